"""The fp32 reference, and the bounds that outputs are held to."""

"""The fp32 reference, and the error bounds of outputs."""

"""Products of rows with 16-bit and packed weights, in Triton's language."""

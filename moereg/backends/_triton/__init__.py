"""Implementations behind the claims of `triton_moe`."""

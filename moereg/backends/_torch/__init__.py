"""Implementations behind the claims of `torch_moe`."""

"""Implementations behind the claims of `cutlass_moe`."""

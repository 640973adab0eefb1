"""Weights of one layer: canonical, permuted for a kernel, and back."""

"""Kernels alone."""

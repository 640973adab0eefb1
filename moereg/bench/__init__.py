"""Measures kernels: inputs, times, and the roofline to compare times with."""

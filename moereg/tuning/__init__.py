"""Measures kernels: inputs, times, and the roofline that times are compared with."""

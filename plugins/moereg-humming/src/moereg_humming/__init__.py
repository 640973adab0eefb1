"""Humming's MoE kernels for moereg: weights of 4 and 8 bits, activations of 16 bits, compiled at run time."""

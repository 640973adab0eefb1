"""Weights of 4 and 8 bits in 32-bit words, and their products with 16-bit rows."""

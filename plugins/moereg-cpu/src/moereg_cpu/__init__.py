"""MoE kernels in C++ for CPUs for moereg: weights of 4 to 32 bits, read once, in canonical order, at memory speed."""

"""Grouped products of QuACK, whose kernels are written in CuTe DSL, with epilogues of our own.

QuACK is imported here, and loads nothing of CUDA until a product runs.
"""

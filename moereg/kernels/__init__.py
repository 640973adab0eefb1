"""Device code, one file per technology and operation. Kernels see tensors and numbers, never a problem."""

"""Contracts about bad input, and what draws the inputs: `make fuzz`."""

import os

import torch

if not torch.cuda.is_available():
    # As in conftest.py: decides at decoration whether kernels are interpreted, so it stands before their import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""FlashInfer's kernels: `flashinfer_cutlass` and its siblings. GPUs of NVIDIA from Hopper on.

One backend for each family of kernels, since they differ in weights, routing and machines. All of them want the up rows
of w13 first and take routing as it comes. What a machine has to have is asked of files: FlashInfer is imported where a
layer runs.
"""

from __future__ import annotations

from typing import Final

from moereg.backends._flashinfer.package import REQUIRES, can_be_imported

# What every cell needs; classes of kernels that have to be built or downloaded add probes of their own.
_REQUIRES: Final = (REQUIRES,)
_PROBES: Final = (can_be_imported,)

"""`make_kernel` and the kernel that it returns."""

from __future__ import annotations

from moereg.layer.factory import make_kernel
from moereg.layer.kernel import MoEKernel

__all__ = ["MoEKernel", "make_kernel"]

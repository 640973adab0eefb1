"""Compiles kernels before the first call needs them, on this machine or for another one."""

from moereg.layer.warm_up.ahead import compile_ahead
from moereg.layer.warm_up.here import warm_up
from moereg.layer.warm_up.result import CompiledVariant, WarmUp, check_token_counts
from moereg.layer.warm_up.shipped import KERNEL_CACHE, check_shipped, use_shipped_kernels

__all__ = [
    "KERNEL_CACHE",
    "CompiledVariant",
    "WarmUp",
    "check_shipped",
    "check_token_counts",
    "compile_ahead",
    "use_shipped_kernels",
    "warm_up",
]

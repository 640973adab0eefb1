"""Torch's ambient state, such as autocast, changes no number of moereg: it computes in a plain state of its own.

What can be changed for this thread or for some lines is changed there. The default dtype and the default device are
left alone: the one is of the process, and the other makes every call of torch slower; moereg names both where it makes
a tensor. Deterministic algorithms, and their filled memory, are kept as well, since they only cost time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["fp32_is_exact", "in_plain_torch", "plain_torch"]

# Its module becomes an object at run time, of which type checkers do not know.
_mkldnn: Any = torch.backends.mkldnn

P = ParamSpec("P")
R = TypeVar("R")


def fp32_is_exact() -> bool:
    """Whether fp32 matmuls are fp32 ones here, and stay so while others leave the plain state."""
    return not (_EXACT.users or _EXACT.is_needed())


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Runs its body without gradients, autocast and reduced precision of fp32 matmuls; as it was before afterwards."""
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        for device_type in _device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if not fp32_is_exact():
            stack.enter_context(_EXACT)
        yield


def in_plain_torch(function: Callable[P, R]) -> Callable[P, R]:
    """The function, run in `plain_torch`; where a caller compiles it, it becomes part of the caller's code as it is."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with plain_torch():
            return function(*args, **kwargs)

    return call


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    # Devices without autocast raise when they are asked.
    return tuple(filter(torch.amp.is_autocast_available, types))


class _ExactMatmuls:
    """fp32 matmuls that are fp32 ones. The setting is the process's, so the last thread to leave restores it."""

    def __init__(self) -> None:
        self.users = 0
        self._before = ("", "")
        self._lock = threading.Lock()

    def is_needed(self) -> bool:
        return not {"ieee", "none"}.issuperset(self._get())

    def _get(self) -> tuple[str, str]:
        return _mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision

    def _set(self, mkldnn: str, cuda: str) -> None:
        _mkldnn.matmul.fp32_precision = mkldnn
        torch.backends.cuda.matmul.fp32_precision = cuda

    def __enter__(self) -> None:
        with self._lock:
            if not self.users:
                self._before = self._get()
                self._set("ieee", "ieee")
            self.users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.users -= 1
            if not self.users:
                self._set(*self._before)


_EXACT = _ExactMatmuls()

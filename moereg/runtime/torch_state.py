"""Shields layers from torch's ambient state, such as autocast, by computing in a plain state.

State that can be changed per thread or per block is changed only there. The default dtype and device are left alone:
the first is process-wide, and setting the second slows down every torch call; moereg names both to make a tensor.
Deterministic algorithms, and their memory filling, are kept too, since they only cost time.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def fp32_is_exact() -> bool:
    """Whether fp32 matmuls use full fp32 now, and still will when other threads leave the plain state."""
    return not _EXACT.is_used_or_needed()


@contextlib.contextmanager
def plain_torch(keeps_gradients: bool = False) -> Iterator[None]:
    """Within this context autocast, reduced fp32 matmul precision and, unless they are kept, gradients are off."""
    with contextlib.ExitStack() as stack:
        if torch.is_grad_enabled() and not keeps_gradients:
            stack.enter_context(torch.no_grad())
        for device_type in _device_types():
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        if not fp32_is_exact():
            stack.enter_context(_EXACT)
        yield


def in_plain_torch(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function run in `plain_torch`; compiled callers include it in their code."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        with plain_torch():
            return function(*args, **kwargs)

    return call


class AmbientState(NamedTuple):
    """torch state that a backend's code may change for code that runs later; the grad mode is this thread's."""

    default_dtype: torch.dtype
    default_device: torch.device
    num_threads: int
    is_deterministic: bool
    is_deterministic_warn_only: bool
    is_grad_enabled: bool

    @classmethod
    def now(cls) -> AmbientState:
        """The current state."""
        return cls(
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.is_grad_enabled(),
        )

    def restore(self) -> tuple[str, ...]:
        """Restores this state; returns the differences, in words with the values found."""
        found = AmbientState.now()
        if found == self:
            return ()
        torch.set_default_dtype(self.default_dtype)
        if found.default_device != self.default_device:
            # None, unlike a device, does not slow down torch calls.
            torch.set_default_device(None if self.default_device.type == "cpu" else self.default_device)
        torch.set_num_threads(self.num_threads)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.is_deterministic_warn_only)
        torch.set_grad_enabled(self.is_grad_enabled)
        names = (field.removeprefix("is_").replace("_", " ") for field in self._fields)
        return tuple(f"{name} {new}" for name, old, new in zip(names, self, found, strict=True) if old != new)


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    types = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    # Devices without autocast raise when asked about it.
    return tuple(filter(torch.amp.is_autocast_available, types))


class _ExactMatmuls:
    """Makes fp32 matmuls use full fp32. The setting is process-wide, so the last thread to leave restores it."""

    def __init__(self) -> None:
        self._users = 0
        self._legacy = "highest"  # The argument of `torch.set_float32_matmul_precision`.
        self._before: list[tuple[Any, str, str]] = []  # Each operator with its effective and its own value.
        self._lock = threading.Lock()

    def is_used_or_needed(self) -> bool:
        # Under one lock, or another thread could enter and leave in between.
        with self._lock:
            return bool(self._users) or any(_is_reduced(matmul) for matmul in _matmuls())

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._make_exact()
            self._users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._restore()

    def _make_exact(self) -> None:
        """Changes only reduced settings, with the setter used before, since torch refuses to read a mix of both."""
        try:
            self._legacy = torch.get_float32_matmul_precision()
        except RuntimeError:  # An operator's setting was changed in the meantime.
            self._legacy = "highest"
        self._before = [(matmul, matmul.fp32_precision, _own_precision(matmul)) for matmul in _matmuls()]
        if self._legacy != "highest":
            torch.set_float32_matmul_precision("highest")
        for matmul in filter(_is_reduced, _matmuls()):
            matmul.fp32_precision = "ieee"

    def _restore(self) -> None:
        if self._legacy != "highest":
            torch.set_float32_matmul_precision(self._legacy)
        for matmul, resolved, own in self._before:
            if matmul.fp32_precision != resolved:
                matmul.fp32_precision = own


def _matmuls() -> tuple[Any, Any]:
    """The operators with a precision setting, which inherits the backend's or torch's if it is `none`."""
    # The module is replaced by an object at run time, which type checkers do not expect.
    mkldnn: Any = torch.backends.mkldnn
    return mkldnn.matmul, torch.backends.cuda.matmul


def _is_reduced(matmul: Any) -> bool:
    return matmul.fp32_precision not in ("ieee", "none")


def _own_precision(matmul: Any) -> str:
    """The operator's own value; its getter returns the inherited one, which may change later."""
    resolved: str = matmul.fp32_precision
    if resolved in ("ieee", "none"):
        return resolved
    matmul.fp32_precision = "none"
    if matmul.fp32_precision == resolved:
        return "none"
    matmul.fp32_precision = resolved
    return resolved


_EXACT = _ExactMatmuls()

"""Checks in Triton's interpreter that kernels stay inside the tensors that they were given."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

# Addresses of user space have 47 bits. The bits above them hold the number of the argument, so that whatever is
# computed from a pointer, through casts and selects too, still says from which argument it came.
_ADDRESS_BITS = 48
_ADDRESS_MASK = np.uint64((1 << _ADDRESS_BITS) - 1)


class OutOfBoundsError(Exception):
    """An unmasked lane of a kernel reads or writes outside of the argument from which its address was derived."""


class _Launch:
    """The tensors that one launch was given. Number 0 stands for addresses that a kernel loaded from memory."""

    def __init__(self, kernel: str) -> None:
        self.kernel = kernel
        self.names: dict[int, str] = {}
        self.arguments = ["an address from memory"]
        self.starts = np.array([0], dtype=np.int64)
        self.extents = np.array([1 << 62], dtype=np.int64)

    def add(self, name: str, address: int, extent: int) -> int:
        """Returns the address with the number of the argument above it."""
        tagged = (len(self.arguments) << _ADDRESS_BITS) + address
        self.arguments.append(name)
        self.starts = np.append(self.starts, tagged)
        self.extents = np.append(self.extents, extent)
        return tagged

    def check(self, access: str, pointers: Any, mask: Any, width: int) -> Any:
        """Returns the real addresses of lanes that lie inside their arguments."""
        addresses = np.asarray(pointers).view(np.int64)
        numbers = addresses >> _ADDRESS_BITS
        offsets = addresses - self.starts.take(numbers, mode="clip")
        extents = self.extents.take(numbers, mode="clip")
        outside = (offsets < 0) | (offsets + width > extents)
        if mask is not None:
            outside = outside & mask
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            number = min(max(int(np.ravel(numbers)[lane]), 0), len(self.arguments) - 1)
            raise OutOfBoundsError(
                f"{self.kernel}: {access} of {width} bytes at byte {int(np.ravel(offsets)[lane])} of "
                f"{self.arguments[number]!r}, which has {int(np.ravel(extents)[lane])} bytes (lane {lane})"
            )
        return np.asarray(pointers) & _ADDRESS_MASK


class _CheckedMemory:
    """Stands for the functions of Triton's interpreter that read and write memory."""

    def __init__(self, memory: Any, launches: list[_Launch]) -> None:
        self._memory, self._launches = memory, launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _check(self, access: str, pointers: Any, mask: Any, width: int) -> Any:
        return self._launches[-1].check(access, pointers, mask, width) if self._launches else pointers

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._memory.load(self._check("load", pointers, mask, dtype.itemsize), mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        return self._memory.store(self._check("store", pointers, mask, value.itemsize), value, mask)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, semantics: Any) -> Any:
        real = self._check("atomic compare and swap", pointers, None, value.itemsize)
        return self._memory.atomic_cas(real, compared, value, semantics)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any) -> Any:
        real = self._check("atomic", pointers, mask, value.itemsize)
        return self._memory.atomic_rmw(operation, real, value, mask, semantics)


def check_pointers(interpreter: Any) -> None:
    """Makes every launch check its loads, stores and atomics; a view counts as its own extent."""
    launches: list[_Launch] = []
    convert, executor = interpreter._implicit_cvt, interpreter.GridExecutor
    init_args, run_grid = executor._init_args_hst, executor.__call__

    def init_args_and_names(self: Any, args: Any, named: Any) -> Any:
        host_args, host_named = init_args(self, args, named)
        for name, value in inspect.getcallargs(self.fn, *host_args, **host_named).items():
            for part in value if isinstance(value, tuple) else (value,):
                launches[-1].names[id(getattr(part, "base", part))] = name
                launches[-1].names[id(part)] = name
        return host_args, host_named

    def convert_with_number(value: Any) -> Any:
        converted = convert(value)
        if launches and hasattr(value, "data_ptr"):
            tensor = interpreter._unwrap_tensor(value)
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            extent = (reach + 1) * tensor.element_size() if tensor.numel() else 0
            name = launches[-1].names.get(id(value), "an argument")
            tagged = launches[-1].add(name, value.data_ptr(), extent)
            converted.handle.data = np.array([tagged], dtype=np.uint64)
        return converted

    def run(self: Any, *args: Any, **named: Any) -> Any:
        launches.append(_Launch(self.fn.__name__))
        try:
            return run_grid(self, *args, **named)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBoundsError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
        finally:
            launches.pop()

    interpreter._interpreter = _CheckedMemory(interpreter._interpreter, launches)
    interpreter._implicit_cvt = convert_with_number
    executor._init_args_hst, executor.__call__ = init_args_and_names, run

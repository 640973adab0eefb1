"""Checks in Triton's interpreter that kernels stay inside the tensors that they were given."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

_LOGGER = logging.getLogger("moereg")

# Addresses of user space have 47 bits. The bits above them hold the number of the argument, so that whatever is
# computed from a pointer, through casts and selects too, still says from which argument it came.
_ADDRESS_BITS = 48
_ADDRESS_MASK = np.uint64((1 << _ADDRESS_BITS) - 1)

# Private ones of Triton's interpreter, which 3.6 to 3.8 have.
_NAMES: Final = ("InterpreterError", "_interpreter", "_implicit_cvt", "_unwrap_tensor", "GridExecutor._init_args_hst")


class OutOfBoundsError(Exception):
    """An unmasked lane of a kernel reads or writes outside of the argument from which its address was derived."""


class _Launch:
    """The tensors that one launch was given. Number 0 stands for addresses that a kernel loaded from memory."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.passed: tuple[Any, Any] = ((), {})
        self.tensors: list[Any] = [None]
        self.starts = [0]
        self.extents = [1 << _ADDRESS_BITS]

    def add(self, tensor: Any, address: int, extent: int) -> int:
        """Returns the address with the number of the argument above it."""
        tagged = (len(self.tensors) << _ADDRESS_BITS) + address
        self.tensors.append(tensor)
        self.starts.append(tagged)
        self.extents.append(extent)
        return tagged

    def check(self, access: str, pointers: Any, mask: Any, width: int) -> Any:
        """Returns the real addresses of lanes that lie inside their arguments."""
        addresses = np.asarray(pointers).view(np.int64)
        first = addresses.item() if addresses.size == 1 else int(addresses.min())
        number = first >> _ADDRESS_BITS
        if 0 <= number < len(self.starts):
            # Masked lanes, too, are inside almost always, which is known sooner than which lanes are masked.
            last = first if addresses.size == 1 else int(addresses.max())
            if self.starts[number] <= first and last + width <= self.starts[number] + self.extents[number]:
                return pointers & _ADDRESS_MASK
        numbers = addresses >> _ADDRESS_BITS
        offsets = addresses - np.array(self.starts).take(numbers, mode="clip")
        extents = np.array(self.extents).take(numbers, mode="clip")
        outside = (offsets < 0) | (offsets + width > extents)
        if mask is not None:
            outside = outside & mask
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            number = min(max(int(np.ravel(numbers)[lane]), 0), len(self.tensors) - 1)
            raise OutOfBoundsError(
                f"{self.kernel.__name__}: {access} of {width} bytes at byte {int(np.ravel(offsets)[lane])} of "
                f"{self._name(number)!r}, which has {int(np.ravel(extents)[lane])} bytes (lane {lane})"
            )
        return pointers & _ADDRESS_MASK

    def _name(self, number: int) -> str:
        """Name of an argument, or of the tuple or descriptor that holds it."""
        for name, value in inspect.getcallargs(self.kernel, *self.passed[0], **self.passed[1]).items():
            for part in _parts(value):
                if number and (part is self.tensors[number] or getattr(part, "base", None) is self.tensors[number]):
                    return name
        return "an argument" if number else "an address from memory"


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


def _parts(value: Any) -> Iterator[Any]:
    """The value, or what a tuple and the tuples in it hold."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def check_pointers(interpreter: Any) -> None:
    """Makes every launch check its loads, stores and atomics; a view counts as its own extent.

    A version of Triton that lacks what is replaced here runs unchecked, and the log says so.
    """
    try:
        operator.attrgetter(*_NAMES)(interpreter)
    except AttributeError as error:
        _LOGGER.warning("pointers of interpreted kernels are not checked with this version of Triton: %s", error)
        return
    launches: list[_Launch] = []
    convert, executor = interpreter._implicit_cvt, interpreter.GridExecutor
    init_args, run_grid = executor._init_args_hst, executor.__call__

    def init_args_and_keep(self: Any, args: Any, named: Any) -> Any:
        launches[-1].passed = init_args(self, args, named)
        return launches[-1].passed

    def convert_with_number(value: Any) -> Any:
        converted = convert(value)
        if launches and hasattr(value, "data_ptr"):
            tensor = interpreter._unwrap_tensor(value)
            size = tensor.numel()
            if not tensor.is_contiguous():  # As every tensor without elements is.
                size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            tagged = launches[-1].add(value, value.data_ptr(), size * tensor.element_size())
            converted.handle.data = np.array([tagged], dtype=np.uint64)
        return converted

    def run(self: Any, *args: Any, **named: Any) -> Any:
        launches.append(_Launch(self.fn))
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
    executor._init_args_hst, executor.__call__ = init_args_and_keep, run

"""Launches Triton kernels, and repeats launches at a fraction of the host time.

At every launch Triton works out which compiled variant of a kernel fits the arguments, and encodes tensor maps: 45 us
for a plain kernel on the host of an H200, more with maps. A layer that runs again with as many tokens needs the same
variants with other pointers. So the first call's launches are recorded, down to the arguments of the C function that
Triton's launcher finally calls. Later calls replace the pointers that have changed.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

# Versions whose launchers do nothing that a replay would miss. 3.6.0 ran on an H200; with 3.6.0, 3.7.1, 3.8.0 and
# 3.9.0, a stand-in for the CUDA driver received the same bytes from a replay as from a launch.
_KNOWN_TRITON = ("3.6.", "3.7.", "3.8.", "3.9.")


class _NotUnderstoodError(Exception):
    """A launcher does not pass its arguments on as expected."""


class _StandIn:
    """Marks the place of a value that changes later; unlike a number, it is never equal to another."""


@dataclass(frozen=True, slots=True)
class _Address:
    """Stands for a descriptor's tensor: encoding a tensor map needs only the address."""

    value: int

    def data_ptr(self) -> int:
        """The address."""
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class _Pointer:
    """The argument `arguments[place]`, an address `offset` bytes into a tensor of the recording."""

    arguments: list[Any]
    place: int
    offset: int

    def bind(self, start: int) -> None:
        """Writes the tensor's current address."""
        self.arguments[self.place] = start + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class _TensorMap:
    """The argument `arguments[place]`, a tensor map whose base lies `offset` bytes into a tensor."""

    arguments: list[Any]  # the C function's, or a list among them
    place: int  # index in `arguments`
    offset: int  # bytes
    descriptor: Any  # source of the map; its base changes
    encode: Callable[[Any], Any]  # turns the descriptor into a map

    def bind(self, start: int) -> None:
        """Encodes the map for the tensor's current address."""
        self.descriptor.base = _Address(start + self.offset)
        self.arguments[self.place] = self.encode(self.descriptor)


class LaunchRecording:
    """Kernel launches that can be repeated with other tensors of the same sizes, strides, dtypes and device.

    Keeps no tensor alive.

    Attributes:
        complete: whether every launch could be recorded; if not, there is nothing to replay.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Expects launches whose tensors all lie within these buffers."""
        self.complete = True
        self._starts = [0 if t is None else t.data_ptr() for t in tensors]
        self._ends = [0 if t is None else t.data_ptr() + t.nbytes for t in tensors]
        self._uses: list[list[_Pointer | _TensorMap]] = [[] for _ in tensors]
        # A C function, its arguments, and which of them is the stream.
        self._launches: list[tuple[Callable[..., Any], list[Any], int]] = []
        # Triton unloads a kernel from the device when nothing refers to it.
        self._compiled: list[Any] = []
        # Arguments are changed in place, and layers of one shape share recordings.
        self._lock = threading.Lock()

    def add(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Adds what `launch` just launched."""
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        try:
            self._add(compiled, grid, [named[name] for name in kernel.arg_names])
        # The kernel is already running, so an unknown launcher may cost time but must not fail the call.
        except (_NotUnderstoodError, AttributeError, IndexError, KeyError, TypeError, ValueError):
            self.complete = False

    def _add(self, compiled: Any, grid: tuple[int, ...], values: list[Any]) -> None:
        layout = _Layout(compiled, grid)
        stream = _StandIn()
        pointers: list[tuple[_StandIn, int]] = []

        def mark(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(mark, value))
            if not isinstance(value, torch.Tensor):
                return value
            pointers.append((_StandIn(), value.data_ptr()))
            return pointers[-1][0]

        # Holds no tensor.
        marked = [mark(value) for value in values]
        for place in layout.descriptors:
            marked[place] = copy.copy(values[place])
            marked[place].base = _Address(values[place].base.data_ptr())
        arguments = layout(marked, stream)
        holder, stream_place = _find(arguments, stream)
        if holder is not arguments:
            raise _NotUnderstoodError
        for stand_in, address in pointers:
            which, offset = self._locate(address)
            self._uses[which].append(_Pointer(*_find(arguments, stand_in), offset))
        maps = _places(arguments, lambda value: isinstance(value, layout.map_types))
        if len(maps) != len(layout.descriptors):
            raise _NotUnderstoodError
        for found, place, encode in zip(maps, layout.descriptors, layout.encoders, strict=True):
            which, offset = self._locate(marked[place].base.data_ptr())
            self._uses[which].append(_TensorMap(*found, offset, marked[place], encode))
        for start, uses in zip(self._starts, self._uses, strict=True):
            for use in uses:
                use.bind(start)
        self._launches.append((layout.function, arguments, stream_place))
        self._compiled.append(compiled)

    def _locate(self, address: int) -> tuple[int, int]:
        for which, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if start <= address < end:
                return which, address - start
        raise AssertionError("a kernel was given a tensor that the recording does not know")

    def replay(self, pointers: list[int]) -> None:
        """Launches everything again on the current stream.

        Args:
            pointers: addresses of tensors like those of `__init__`, in their order, aligned at least as those were.
        """
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        with self._lock:
            if pointers != self._starts:
                for start, bound, uses in zip(pointers, self._starts, self._uses, strict=True):
                    if start != bound:
                        for use in uses:
                            use.bind(start)
                self._starts = pointers
            for function, arguments, stream_place in self._launches:
                arguments[stream_place] = stream
                function(*arguments)


class _Layout:
    """Lays out a kernel's arguments for the C function that launches it, without launching.

    The order differs between versions of Triton, so the launcher itself lays them out, with another function at its
    end.

    Attributes:
        function: the C function.
        descriptors: places of the tensor descriptors among the kernel's arguments.
        encoders: for each of these, the function that makes its tensor map.
        map_types: types of the maps.
    """

    def __init__(self, compiled: Any, grid: tuple[int, ...]) -> None:
        launcher = compiled.run
        if (
            not triton.__version__.startswith(_KNOWN_TRITON)
            or getattr(launcher, "gsan_enabled", False)
            # Scratch memory is allocated for each launch.
            or getattr(launcher, "global_scratch_size", 0)
            or getattr(launcher, "profile_scratch_size", 0)
        ):
            raise _NotUnderstoodError
        x, y, z = (*grid, 1, 1)[:3]
        self._grid = (x, y, z)
        self._compiled = compiled
        signature = compiled.src.signature
        self.descriptors = [n for n, kind in enumerate(signature.values()) if str(kind).startswith("tensordesc")]
        self.encoders: list[Callable[[Any], Any]] = []
        self.map_types: tuple[type, ...] = ()
        self.function: Callable[..., Any] = launcher.launch
        self._caught: tuple[Any, ...] = ()
        self._launcher = copy.copy(launcher)
        self._launcher.launch = self._catch
        if self.descriptors:
            driver = sys.modules[type(launcher).__module__]
            try:
                self.function = inspect.getclosurevars(launcher.launch).nonlocals["launcher"]
                self.map_types = (driver.PyCUtensorMap,)
                metas = compiled.metadata.tensordesc_meta
                self.encoders = [_encoder(driver.make_tensordesc_arg, meta) for meta in metas]
                self._launcher.launch = driver.wrap_handle_tensordesc(self._catch, signature, metas)
            except (AttributeError, KeyError, TypeError):
                raise _NotUnderstoodError from None

    def _catch(self, *arguments: Any) -> None:
        self._caught = arguments

    def __call__(self, values: list[Any], stream: Any) -> list[Any]:
        """Returns the C function's arguments; a tuple in them that holds pointers or tensor maps becomes a list."""
        compiled = self._compiled
        # As `JITFunction.run` ends; the three Nones are a profiler's metadata and hooks.
        self._launcher(*self._grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        return [_as_lists(argument, (_StandIn, *self.map_types)) for argument in self._caught]


def _encoder(make: Callable[..., list[Any]], meta: Any) -> Callable[[Any], Any]:
    """Returns a function from a descriptor to its tensor map, made from the one that expands a descriptor argument."""
    # A third parameter, where there is one, is for another vendor's devices.
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    return lambda descriptor: make(descriptor, meta, *more)[0]


def _as_lists(value: Any, changing: tuple[type, ...]) -> Any:
    """Returns the value with every tuple that contains these types, at any depth, as a list."""
    if not isinstance(value, (list, tuple)):
        return value
    parts = [_as_lists(part, changing) for part in value]
    return parts if any(isinstance(part, (list, *changing)) for part in parts) else value


def _places(arguments: list[Any], wanted: Callable[[Any], bool]) -> list[tuple[list[Any], int]]:
    """Places in the list, and in lists inside it, that match."""
    found = [(arguments, place) for place, value in enumerate(arguments) if wanted(value)]
    return found + [place for value in arguments if isinstance(value, list) for place in _places(value, wanted)]


def _find(arguments: list[Any], stand_in: _StandIn) -> tuple[list[Any], int]:
    found = _places(arguments, lambda value: value is stand_in)
    if len(found) != 1:
        raise _NotUnderstoodError
    return found[0]


class _Active(threading.local):
    recording: LaunchRecording | None = None


_ACTIVE = _Active()


@contextlib.contextmanager
def recording(tensors: Sequence[torch.Tensor | None]) -> Iterator[LaunchRecording]:
    """Runs and records the launches inside the block; `tensors` as in `LaunchRecording`."""
    record = LaunchRecording(tensors)
    _ACTIVE.recording = record
    try:
        yield record
    finally:
        _ACTIVE.recording = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Runs `kernel[grid](*arguments, **options)`, and records it where a recording is active.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        grid: programs along up to three axes.
        arguments: the kernel's leading arguments, by position.
        options: its other arguments by name, and launch options.
    """
    compiled = kernel[grid](*arguments, **options)
    if _ACTIVE.recording is not None:
        _ACTIVE.recording.add(kernel, compiled, grid, arguments, options)

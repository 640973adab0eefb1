"""Launches Triton kernels, and launches the same ones again at a fraction of the host time.

Triton works out from its arguments, at every launch, which compiled variant of a kernel fits: 45 us on the machine of
an H200, 225 us a layer. A layer that runs again with as many tokens needs the same variants with other pointers, so the
first call's launches are recorded and later ones only put the new pointers in: 32 us a layer with two launches, 48 us
with four, the layer's checks included.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton


@dataclass(frozen=True, slots=True)
class _Launch:
    """A compiled kernel, its grid, its arguments, and where pointers go: (argument, which tensor, bytes into it)."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: list[Any]
    pointers: tuple[tuple[int, int, int], ...]


class LaunchRecording:
    """Kernel launches that can be repeated with other tensors of the same sizes, strides, dtypes and device."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Expects launches whose tensors all lie within these."""
        self._ranges = [(0, 0) if t is None else (t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors]
        self._launches: list[_Launch] = []

    def add(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Adds what `launch` just launched."""
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | options
        values = [named[name] for name in kernel.arg_names]
        pointers = tuple(
            (place, *self._locate(value)) for place, value in enumerate(values) if isinstance(value, torch.Tensor)
        )
        x, y, z = (*grid, 1, 1)[:3]
        self._launches.append(_Launch(compiled, (x, y, z), values, pointers))

    def _locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        pointer = tensor.data_ptr()
        for which, (start, end) in enumerate(self._ranges):
            if start <= pointer < end:
                return which, pointer - start
        raise AssertionError("a kernel was given a tensor that the recording does not know")

    def replay(self, pointers: Sequence[int]) -> None:
        """Launches everything again on the current stream.

        Args:
            pointers: addresses of tensors like those of `__init__`, in their order, aligned at least as those were.
        """
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
        for launch in self._launches:
            arguments = launch.arguments.copy()
            for place, which, offset in launch.pointers:
                arguments[place] = pointers[which] + offset
            compiled = launch.compiled
            # As `JITFunction.run` ends; the three Nones are a profiler's metadata and hooks.
            compiled.run(
                *launch.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
            )


class _Active(threading.local):
    recording: LaunchRecording | None = None


_ACTIVE = _Active()


@contextlib.contextmanager
def recording(tensors: Sequence[torch.Tensor | None]) -> Iterator[LaunchRecording]:
    """Launches inside are recorded as well as done; `tensors` as in `LaunchRecording`."""
    record = LaunchRecording(tensors)
    _ACTIVE.recording = record
    try:
        yield record
    finally:
        _ACTIVE.recording = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`, recorded where a recording is under way.

    Args:
        kernel: a `triton.jit` function.
        grid: programs along up to three axes.
        arguments: of the kernel, the first by position.
        options: the others by name, and launch options.
    """
    compiled = kernel[grid](*arguments, **options)
    if _ACTIVE.recording is not None:
        _ACTIVE.recording.add(kernel, compiled, grid, arguments, options)

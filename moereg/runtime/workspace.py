"""Scratch memory shared by all layers: one buffer per device and stream, or thread if there are no streams."""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from moereg.runtime.graph_pools import outside_pools

_ALIGNMENT: Final = 256

_MAX_REQUESTS: Final = 4096
"""Cached requests: distinct numbers of tokens times distinct layers."""

_Shapes = tuple[tuple[int, ...], ...]


class _Scratch:
    """One buffer and the tensors cut from it, by request. Cached, since cutting takes 15 us of a call."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._views: dict[tuple[_Shapes, torch.dtype], tuple[torch.Tensor, ...]] = {}
        self.content: Any = None  # What the last request that said so writes.

    def take(self, shapes: _Shapes, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        tensors = self._views.get((shapes, dtype))
        if tensors is not None:
            return tensors
        num_bytes = _num_bytes(shapes, dtype)
        # Tensors made in inference mode could not be written outside it by later calls.
        with torch.inference_mode(False):
            if self._buffer is None or self._buffer.numel() < num_bytes:
                self.release()  # Frees the old buffer before allocating the larger one.
                self._buffer = outside_pools(lambda: _allocate(num_bytes, device), device)
            if len(self._views) >= _MAX_REQUESTS:
                self._views.clear()
            tensors = self._views[shapes, dtype] = _cut(self._buffer, shapes, dtype)
        return tensors

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.numel()

    def release(self) -> None:
        self._views.clear()
        self._buffer = self.content = None


class _PerThread(threading.local):
    """One thread's scratch memory, by device and purpose; freed with the thread."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[torch.device, bool], _Scratch] = {}


class WorkspacePool:
    """Provides scratch memory, valid until the next request on the same device and stream (without CUDA: thread).

    Work on one stream runs in order, so a model's layers share one buffer that grows to the largest need. During CUDA
    graph capture the memory comes from the graph's own pool instead: the graph keeps it alive, its layers reuse it, and
    eager calls never touch it.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, int, bool], _Scratch] = {}
        self._thread = _PerThread()
        self._all: weakref.WeakSet[_Scratch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._source: Callable[[_Shapes, torch.dtype, torch.device], tuple[torch.Tensor, ...]] | None = None

    @contextlib.contextmanager
    def answered_by(
        self, take: Callable[[_Shapes, torch.dtype, torch.device], tuple[torch.Tensor, ...]]
    ) -> Iterator[None]:
        """Within this context another `take` serves every request, such as the conformance kit's with guard bands."""
        previous, self._source = self._source, take
        try:
            yield
        finally:
            self._source = previous

    def take(self, shapes: _Shapes, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Provides uninitialized tensors of the shapes, 256-byte aligned, without overlap."""
        if self._source is not None:
            return self._source(shapes, dtype, device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _cut(_allocate(_num_bytes(shapes, dtype), device), shapes, dtype)
        return self._scratch(device, False).take(shapes, dtype, device)

    def take_for(
        self, content: Any, shapes: _Shapes, dtype: torch.dtype, device: torch.device
    ) -> tuple[tuple[torch.Tensor, ...], bool]:
        """Like `take`, but from a separate buffer that only calls of `take_for` use.

        Args:
            content: Describes what the caller writes into all of it; compared by equality.
            shapes, dtype, device: As in `take`.

        Returns:
            The tensors, and whether they hold that content because the last request was the same.
        """
        if self._source is not None or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return self.take(shapes, dtype, device), False
        scratch, content = self._scratch(device, True), (content, shapes, dtype)
        tensors, is_there = scratch.take(shapes, dtype, device), scratch.content == content
        scratch.content = content
        return tensors, is_there

    def _scratch(self, device: torch.device, has_content: bool) -> _Scratch:
        if device.type != "cuda":
            own = self._thread.scratch.get((device, has_content))
            if own is None:
                own = self._thread.scratch[device, has_content] = self._new()
            return own
        owner = (device, torch.cuda.current_stream(device).cuda_stream, has_content)
        return self._streams.get(owner) or self._streams.setdefault(owner, self._new())

    def _new(self) -> _Scratch:
        with self._lock:
            scratch = _Scratch()
            self._all.add(scratch)
            return scratch

    @property
    def num_bytes(self) -> int:
        """Bytes held in all buffers."""
        with self._lock:
            return sum(scratch.num_bytes for scratch in self._all)

    def release(self) -> None:
        """Frees all buffers; the next call allocates again."""
        with self._lock:
            for scratch in self._all:
                scratch.release()


def _num_bytes(shapes: _Shapes, dtype: torch.dtype) -> int:
    return sum(_aligned_bytes(shape, dtype) for shape in shapes)


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _cut(buffer: torch.Tensor, shapes: _Shapes, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    tensors, start = [], 0
    for shape in shapes:
        flat = buffer[start : start + math.prod(shape) * dtype.itemsize]
        tensors.append(flat.view(dtype).view(shape))
        start += _aligned_bytes(shape, dtype)
    return tuple(tensors)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    # torch's allocators align to 512 bytes on GPUs and 64 on CPUs; slack of one alignment covers the latter.
    raw = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + num_bytes]


WORKSPACES: Final = WorkspacePool()

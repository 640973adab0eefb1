"""Scratch memory shared by all layers: one buffer a device and stream."""

from __future__ import annotations

import math
import threading
from typing import Final

import torch

__all__ = ["WORKSPACES", "WorkspacePool"]

_ALIGNMENT: Final = 256


class WorkspacePool:
    """Hands out scratch that is valid until the next request on the same device and stream.

    Work on one stream runs in order, so the layers of a model share one buffer that grows to the largest need. While a
    CUDA graph is captured the scratch comes from the graph's own memory pool instead: the graph keeps it alive, layers
    of one graph reuse it, and eager calls never touch it.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        self._lock = threading.Lock()

    def take(
        self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Uninitialised tensors of the shapes, 256-byte aligned, not overlapping.

        Args:
            shapes: One a tensor.
            dtype: Of all of them.
            device: Where.
        """
        sizes = [-(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape in shapes]
        buffer = self._buffer(sum(sizes), device)
        tensors, start = [], 0
        for shape, size in zip(shapes, sizes, strict=True):
            flat = buffer[start : start + math.prod(shape) * dtype.itemsize]
            tensors.append(flat.view(dtype).view(shape))
            start += size
        return tuple(tensors)

    def _buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        on_gpu = device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return _allocate(num_bytes, device)
        key = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else threading.get_ident())
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            with self._lock:
                self._buffers.pop(key, None)
                del buffer  # The old one goes back to the allocator before the larger one is asked for.
                buffer = self._buffers[key] = _allocate(num_bytes, device)
        return buffer

    @property
    def num_bytes(self) -> int:
        """Bytes held in all buffers."""
        with self._lock:
            return sum(buffer.numel() for buffer in self._buffers.values())

    def release(self) -> None:
        """Gives all buffers back to the allocator; the next call allocates again."""
        with self._lock:
            self._buffers.clear()


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    # The allocators of torch align to 512 bytes on GPUs and 64 on CPUs; one alignment of slack covers the latter.
    raw = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % _ALIGNMENT
    return raw[start : start + num_bytes]


WORKSPACES: Final = WorkspacePool()

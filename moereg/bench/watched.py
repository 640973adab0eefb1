"""Detects writes to tensors that others may only read, by version counters and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from moereg.bench.timing import wait_for
from moereg.weights.versions import checksums

_State = tuple[int, int, int, tuple[int, ...]]
"""Address and bytes of the storage, torch's count of writes, checksums."""


class WatchedTensors:
    """Remembers tensors' contents by checksums, without a second copy of gigabytes.

    Writes that torch does not count, by kernels and through `.data`, change the bytes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads all tensors, which synchronizes.

        Args:
            tensors: Tensors by name; contiguous, on one device.
        """
        self._tensors: Final = dict(tensors)
        self._states: dict[str, _State] = {}
        self.renew()

    def written(self) -> tuple[str, ...]:
        """Names of tensors written since they were last read or restored."""
        return tuple(name for name in self._tensors if self._state(name) != self._states[name])

    def restore(self, pristine: Mapping[str, torch.Tensor]) -> None:
        """Writes the original contents back into the same memory, which others' views may share.

        Args:
            pristine: Original tensors by name, with the same shapes and dtypes.
        """
        for name, tensor in self._tensors.items():
            storage, num_bytes = tensor.untyped_storage(), self._states[name][1]
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
            with torch.no_grad():
                tensor.copy_(pristine[name])
        self.renew()

    def renew(self) -> None:
        """Takes the current contents as the expected ones."""
        self._states = {name: self._state(name) for name in self._tensors}

    def _state(self, name: str) -> _State:
        tensor = self._tensors[name]
        wait_for(tensor.device)
        storage = tensor.untyped_storage()
        version = 0 if tensor.is_inference() else tensor._version
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        sums = checksums(tensor) if storage.nbytes() >= end else ()
        return storage.data_ptr(), storage.nbytes(), version, sums

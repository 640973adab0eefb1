"""Reads single rows of tensors in a safetensors file, for layers that store all experts in one tensor."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

__all__ = ["ShardRows"]

# Dtypes that formats of fused experts store.
_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Bytes, the limit that safetensors has.
_LARGEST_HEADER: Final = 100_000_000


class ShardRows(contextlib.ExitStack):
    """A file that safetensors has opened and found valid; closed on exit.

    safetensors reads the whole tensor for each row unless it maps the file. But a process is killed when it reads a
    mapping behind the end of a file that another process has cut off.

    Args:
        path: The file.

    Raises:
        OSError: From every method: the file cannot be read.
        SafetensorError: From every method: the file has changed since it was validated.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.callback(os.close, self._file)
        self._header: Mapping[str, Any] = {}
        self._data_start = 0

    def read(self, name: str, row: int, dtype: str, shape: Sequence[int], num_rows: int | None = None) -> torch.Tensor:
        """A row along dim 0, or a part of several rows, on the CPU; nothing else is read.

        Args:
            name: Name of the tensor.
            row: Index of the row or part.
            dtype: Dtype of the tensor, as safetensors spells it.
            shape: Shape of the whole tensor.
            num_rows: Rows of a part; None for a single row, which comes without that dimension.
        """
        shape_read = (*(() if num_rows is None else (num_rows,)), *shape[1:])
        num_bytes = math.prod(shape_read) * _DTYPES[dtype].itemsize
        try:
            start = self._start_of(name, dtype, shape)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            # safetensors found the header valid, so somebody has written to it since, and half of a header raises any
            # error that JSON knows.
            raise SafetensorError(f"its header changed while {name} was read") from error
        stored = self._read(start + row * num_bytes, num_bytes)
        return stored.view(_DTYPES[dtype]).view(shape_read)

    def _start_of(self, name: str, dtype: str, shape: Sequence[int]) -> int:
        if not self._header:
            self._read_header()
        entry = self._header[name]
        if (entry["dtype"], entry["shape"]) != (dtype, list(shape)):
            raise ValueError(f"another tensor is called {name}")
        start = operator.index(entry["data_offsets"][0])
        if not 0 <= start < 2**62:
            raise ValueError(f"{name} starts at {start}")
        return self._data_start + start

    def _read_header(self) -> None:
        # The format is the length of the header in 8 bytes, the header, the data.
        num_bytes = int.from_bytes(self._read(0, 8).numpy().tobytes(), "little")
        if num_bytes > _LARGEST_HEADER:
            raise SafetensorError("its header changed while it was read")
        self._header = json.loads(self._read(8, num_bytes).numpy().tobytes())
        self._data_start = 8 + num_bytes

    def _read(self, start: int, num_bytes: int) -> torch.Tensor:
        found = torch.empty(num_bytes, dtype=torch.uint8)
        left = memoryview(found.numpy())  # type: ignore[arg-type]
        while left:
            count = os.preadv(self._file, [left], start + num_bytes - len(left))
            if count == 0:
                raise SafetensorError(f"it ended {len(left)} bytes before the end of what was to be read")
            left = left[count:]
        return found

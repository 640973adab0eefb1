"""`torch.empty` that is full of NaN, so that memory which a kernel reads before it writes shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

__all__ = ["poisoned_empty"]

_POISONED: Final = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
_BYTE: Final = 255


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Inside, `torch.empty` gives NaN, and bytes that read as NaN in any float type. Python code alone is affected."""
    real: Any = torch.empty

    def poisoned(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor: torch.Tensor = real(*arguments, **keywords)
        if tensor.device.type != "meta" and tensor.dtype in _POISONED and not torch.compiler.is_compiling():
            tensor.fill_(_BYTE if tensor.dtype == torch.uint8 else float("nan"))
        return tensor

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = real

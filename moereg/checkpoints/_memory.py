"""Rejects a layer that would not fit into memory, before anything is allocated."""

from __future__ import annotations

import torch

from moereg.errors import TooLargeError
from moereg.runtime.memory import format_bytes, free_memory_bytes

__all__ = ["check_fits"]


def check_fits(
    subject: str, expert_bytes: int, num_experts: int, dtype: str, device: torch.device, max_fraction: float
) -> None:
    """Checks that the experts, and one more while they are read, fit.

    Args:
        subject: What is loaded, for the message.
        expert_bytes: Bytes of one expert on the device.
        num_experts: How many are loaded.
        dtype: Dtype that they are loaded in, or the scheme of quantized ones.
        device: Where they are loaded to.
        max_fraction: Share of the free memory that they may take.

    Raises:
        TooLargeError: They do not fit.
    """
    free_bytes = free_memory_bytes(device)
    if free_bytes is None or expert_bytes * (num_experts + 1) <= max_fraction * free_bytes:
        return
    num_fitting = int(max_fraction * free_bytes) // expert_bytes - 1
    cures = []
    if num_fitting >= 1:
        cures.append(f"read fewer experts (--num-local-experts {num_fitting})")
    if dtype == "float32":
        cures.append("read them in 16 bits (--dtype bfloat16)")
    raise TooLargeError(
        f"{subject} needs {format_bytes(expert_bytes * (num_experts + 1))} ({num_experts} experts of "
        f"{format_bytes(expert_bytes)} in {dtype}, and one more while reading), over {max_fraction:.0%} of the "
        f"{format_bytes(free_bytes)} free on {device}; "
        f"{' or '.join(cures) or 'free memory on it or use another machine'}"
    )

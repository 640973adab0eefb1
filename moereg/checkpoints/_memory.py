"""Refuses a layer that would not fit, before anything is allocated."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from moereg.errors import TooLargeError

__all__ = ["check_fits", "free_memory_bytes"]


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that an allocation on the device could get; None where this machine does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def check_fits(
    subject: str, expert_bytes: int, num_experts: int, dtype: str, device: torch.device, max_fraction: float
) -> None:
    """Checks that the experts, and one more while they are read, fit.

    Args:
        subject: What is loaded, for the message.
        expert_bytes: Of one expert on the device.
        num_experts: That are loaded.
        dtype: That they are loaded in.
        device: That they are loaded to.
        max_fraction: Of free memory that they may take.

    Raises:
        TooLargeError: They do not.
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
        f"{subject} needs {_size(expert_bytes * (num_experts + 1))} ({num_experts} experts of {_size(expert_bytes)} in "
        f"{dtype}, and one more while reading), over {max_fraction:.0%} of the {_size(free_bytes)} free on {device}; "
        f"{' or '.join(cures) or 'free memory on it or use another machine'}"
    )


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} bytes"

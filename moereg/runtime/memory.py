"""Free memory, and sizes in readable units."""

from __future__ import annotations

import re
from pathlib import Path

import torch


def free_memory_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device; None if this machine does not report them."""
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


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in readable units, such as `1.2 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} bytes"

"""Facts of a device that launches depend on; no other code of the kernels queries the device."""

from __future__ import annotations

import functools

import torch
import triton


def least_block_m(device: torch.device) -> int:
    """Fewest rows that a device's matrix units take; with fewer, Triton falls back to plain multiply-adds on AMD."""
    return 16 if device.type == "cuda" and torch.version.hip is not None else 1


@functools.cache
def max_shared_bytes(device: torch.device) -> int | None:
    """Shared memory that one program may use on a device; None for the interpreter, which has no limit."""
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a persistent kernel launches one program on each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def can_overlap(device: torch.device) -> bool:
    """Whether kernels for the tensors of this device may overlap: an NVIDIA GPU from compute capability 9.0 on."""
    if device.type == "cpu":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)

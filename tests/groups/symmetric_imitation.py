# mypy: disable-error-code="no-untyped-def"
"""Torch's symmetric memory as ordinary memory, and its exchange over gloo, with the rules that NVSHMEM's has.

Read from pytorch/pytorch, torch/distributed/_symmetric_memory/__init__.py of 2.11 and 2.13, and
torch/csrc/distributed/c10d/symm_mem/nvshmem_extension.cu at 0047056e2d3a: names and order of parameters, what is
checked, where rows arrive. A rank reads in the memory of another until the next exchange begins on both.

There a block of threads copies each split, and block 0, when it has copied the first, writes where rows arrive over
where they come from: both are one line of `out_splits_offsets`, and nothing orders this against blocks that have not
read theirs yet. `State.block_0_is_first` says that it was before all others.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
import torch.distributed as dist

MODULE = "torch.distributed._symmetric_memory"
MOST_RANKS, MOST_BINS = 32, 16


class State:
    """Of one process."""

    def __init__(self) -> None:
        self.backend: str | None = None
        self.made: dict[int, torch.Tensor] = {}
        self.ready: set[int] = set()
        self.last_source = 0
        self.calls = 0
        self.block_0_is_first = False
        self.library: Any = None


STATE = State()


def empty(*size, dtype=None, device=None):
    assert STATE.backend == "NVSHMEM"
    tensor = torch.empty(size, dtype=dtype, device=device)
    STATE.made[tensor.data_ptr()] = tensor
    return tensor


def rendezvous(tensor, group):
    assert tensor.data_ptr() in STATE.made
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (tuple(tensor.shape), str(tensor.dtype)), group=group)
    assert len(set(found)) == 1, f"symmetric tensors differ: {found}"
    STATE.ready.add(tensor.data_ptr())


def is_nvshmem_available():
    return True


def set_backend(name):
    assert not STATE.made, "cannot be changed once there is symmetric memory"
    STATE.backend = name


def get_backend(device):
    return STATE.backend or "CUDA"


def all_to_all_vdev_2d(input, out, in_splits, out_splits_offsets, group_name, major_align=None):
    size, rank = dist.get_world_size(), dist.get_rank()
    assert group_name == dist.group.WORLD.group_name
    assert major_align == 1
    assert all(each.data_ptr() in STATE.ready for each in (input, out, in_splits, out_splits_offsets))
    assert all(each.is_contiguous() for each in (input, out, in_splits, out_splits_offsets))
    assert input.dtype == out.dtype
    assert input.stride(0) == out.stride(0)
    assert in_splits.dtype == out_splits_offsets.dtype == torch.int64
    (num_splits,) = in_splits.shape
    assert out_splits_offsets.shape == (2, num_splits)
    bins = num_splits // size
    assert size <= MOST_RANKS
    assert 0 < bins <= MOST_BINS
    assert int(in_splits.sum()) <= input.shape[0]
    assert input.data_ptr() != STATE.last_source, "another rank may still read the rows of the exchange before"
    STATE.last_source = input.data_ptr()
    STATE.calls += 1
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (input.view(torch.uint8).clone(), in_splits.tolist()))
    begin = 0
    row_bytes = out.view(torch.uint8)
    for place in range(bins):
        rows_of_bin = 0
        for source in range(size):
            rows, splits = found[source]
            first, count = sum(splits[: rank * bins + place]), splits[rank * bins + place]
            if STATE.block_0_is_first and place + source > 0:
                first = min(begin + rows_of_bin, len(rows) - count)  # Beyond the rows there is other memory.
            row_bytes[begin + rows_of_bin : begin + rows_of_bin + count] = rows[first : first + count]
            out_splits_offsets[0, place * size + source] = count
            out_splits_offsets[1, place * size + source] = begin + rows_of_bin
            rows_of_bin += count
        # A bin is never empty there.
        begin += max(rows_of_bin, 1)
    assert begin <= out.shape[0]


def install():
    """Puts the imitation in the place of torch's module and of its operator on a CPU."""
    module = types.ModuleType(MODULE)
    for function in (empty, rendezvous, is_nvshmem_available, set_backend, get_backend):
        setattr(module, function.__name__, function)
    sys.modules[MODULE] = module
    if STATE.library is None:
        STATE.library = torch.library.Library("symm_mem", "IMPL")
        STATE.library.impl("all_to_all_vdev_2d", all_to_all_vdev_2d, "CPU")

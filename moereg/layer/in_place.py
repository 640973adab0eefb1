"""Tensors that kernels read where their owner keeps them, as at each call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping

import torch

from moereg.errors import ArgumentError
from moereg.runtime.memory import format_bytes
from moereg.selection.result import Selection
from moereg.weights.layouts import ALIGNMENT
from moereg.weights.permuted import ExpertWeights


def check_in_place(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that kernels can read tensors where they are; none is copied for them."""
    for name, tensor in tensors.items():
        if type(tensor).__name__ == "DTensor":
            raise ArgumentError(
                f"weights that are read in place must be plain tensors, got a DTensor as {name}; leave the layer's "
                "parameters out of fully_shard, or use DistributedDataParallel"
            )
        if not tensor.is_contiguous():
            raise ArgumentError(
                f"weights that are read in place must be contiguous, got {name} with strides {list(tensor.stride())}; "
                f"pass {name}.contiguous()"
            )
        check_aligned({name: tensor})


def check_aligned(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that a GPU can load 16 bytes at a time from tensors."""
    for name, tensor in tensors.items():
        if not is_aligned(tensor):
            raise ArgumentError(
                f"weights that are read in place must begin at a multiple of {ALIGNMENT} bytes, got {name} at "
                f"{tensor.data_ptr() % ALIGNMENT} past one; pass {name}.clone()"
            )


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a GPU can load 16 bytes at a time from a tensor."""
    # Rows that are no multiple of it are read narrowly anyway.
    has_odd_rows = tensor.dim() > 0 and tensor.shape[-1] * tensor.element_size() % ALIGNMENT > 0
    return tensor.device.type in ("cpu", "meta") or has_odd_rows or tensor.data_ptr() % ALIGNMENT == 0


def say_gain(best: Selection, taken: Selection, weights: ExpertWeights, cure: str) -> None:
    """Says once what a kernel with a copy of the weights would gain over what reads them in place, if anything.

    `taken` is the best that reads in place, which may be none, and `cure` is the call that makes the copy.
    """
    one, other = best.winner, taken.winner
    if one is None or one is other:
        return
    copy = f"{one.label}, which may keep a copy of the weights ({format_bytes(weights.num_bytes)} per layer)"
    if other is None:
        say_once(f"no kernel reads {best.problem.quant.name} weights in place here, so layers run on {copy}")
    else:
        say_once(f"layers run on {other.label}, which reads weights in place; {cure} takes {copy}")


@functools.cache
def say_once(text: str) -> None:
    """Logs a line once in this process."""
    logging.getLogger("moereg").warning("%s", text)

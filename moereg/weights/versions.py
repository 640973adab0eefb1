"""Detects tensors that were replaced or written since they were last read."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moereg.errors import ArgumentError, OldWeightsWarning
from moereg.weights.checks import DEBUG_VARIABLE

_STEPPED: Final[dict[int, tuple[StorageWeakRef, int]]] = {}
"""For memory that an optimizer wrote, its last step in the count over all optimizers of the process. Fused optimizers
raise no version."""

_step = 0
"""Steps of all optimizers since the first question."""

_asked: dict[int, int] = {}
"""Answers of `_last_step` since the last step, by address: it costs 0.4 us a tensor, and a layer has up to eight."""

_most = 1024
"""Number of entries of `_STEPPED` above which those of freed memory are dropped."""


class TensorState(NamedTuple):
    """Place of a tensor, and the number of writes that torch counted.

    torch counts no writes through `tensor.data` or a raw pointer, and none into tensors that were made in inference
    mode.

    Attributes:
        memory: Refers to it weakly: while this state lives, no other memory is equal to it, at the same address either.
        step: The last step of an optimizer that may have written it; 0 for none.
        contents: With MOEREG_DEBUG=1 its `checksums`; None elsewhere, and while a graph is captured.
    """

    address: int
    memory: StorageWeakRef
    version: int
    dtype: torch.dtype
    device: torch.device
    step: int = 0
    contents: tuple[int, ...] | None = None


def states_of(tensors: Iterable[torch.Tensor]) -> tuple[TensorState, ...]:
    """States of tensors, which change when the tensors are replaced or written."""
    _follow_optimizers()
    reads = os.environ.get(DEBUG_VARIABLE) == "1" and not (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )
    return tuple(
        TensorState(
            (address := tensor.data_ptr()),
            StorageWeakRef(tensor.untyped_storage()),
            -1 if tensor.is_inference() else tensor._version,
            tensor.dtype,
            tensor.device,
            _last_step(tensor) if (known := _asked.get(address)) is None else known,
            checksums(tensor) if reads else None,
        )
        for tensor in tensors
    )


def are_elsewhere(before: tuple[TensorState, ...], now: tuple[TensorState, ...]) -> bool:
    """Whether tensors were replaced, instead of written into."""
    places = [[(one.address, one.memory, one.dtype, one.device) for one in states] for states in (before, now)]
    return places[0] != places[1]


def check_counted(before: tuple[TensorState, ...], now: tuple[TensorState, ...], cure: str) -> None:
    """Checks, with MOEREG_DEBUG=1, that torch counted what was written."""
    for one, other in zip(before, now, strict=False):
        is_read = one.contents is not None and other.contents is not None
        if is_read and one.contents != other.contents and one[:-1] == other[:-1]:
            raise ArgumentError(
                "weights of this layer were written in a way that torch does not count, through .data, a raw pointer "
                f"or in inference mode, so its kernel may have the old ones; {cure}"
            )


class CopiedFrom:
    """The memory from which a bare kernel copied its weights.

    Only its caller can update such a kernel. The first step of an optimizer on that memory while this object lives
    gives one `OldWeightsWarning`.
    """

    def __init__(self, name: str, tensors: Iterable[torch.Tensor]) -> None:
        """Starts watching the canonical tensors that the kernel of that name copied."""
        self.name = name
        self.tensors(tensors)
        _WATCHED.add(self)
        _follow_optimizers()

    def tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        """Records that these tensors were copied instead of the earlier ones."""
        self.memory = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


_WATCHED: Final[weakref.WeakSet[CopiedFrom]] = weakref.WeakSet()


@functools.cache
def _follow_optimizers() -> None:
    """Makes torch call `_note_step` from now on; a process that makes no layer has no hook."""
    # A step that raises halfway has written some of its parameters, and reaches no post hook.
    register_optimizer_step_pre_hook(_note_step)
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Records the memory of all parameters of an optimizer."""
    global _step, _asked, _most
    _step += 1
    stepped = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            try:
                storage = parameter.untyped_storage()
            except RuntimeError:  # Sparse tensors have none.
                continue
            stepped.add(storage._cdata)
            known = _STEPPED.get(storage._cdata)
            # While a weak reference to freed memory lives, no other memory gets its number.
            _STEPPED[storage._cdata] = (StorageWeakRef(storage) if known is None else known[0], _step)
    _asked = {}  # Not emptied: another thread may be about to note an answer from before this step.
    if len(_STEPPED) > _most:
        for number in [number for number, (memory, _) in _STEPPED.items() if memory.expired()]:
            del _STEPPED[number]
        _most = max(_most, 2 * len(_STEPPED))
    for copied in [each for each in _WATCHED if any(memory.cdata in stepped for memory in each.memory)]:
        _WATCHED.discard(copied)
        warnings.warn(
            f"{type(optimizer).__name__} trains weights of which {copied.name} has a permuted copy, and goes on with "
            "the old ones; call kernel.reload(weights) after each step, or use a MoELayer: it follows its parameters",
            OldWeightsWarning,
            stacklevel=2,
        )


def _last_step(tensor: torch.Tensor) -> int:
    asked, step = _asked, _step
    # An optimizer may hold another copy of a trained tensor, such as one in fp32, and write it back in its own way.
    if not (tensor.requires_grad or tensor.grad is not None):
        found = _STEPPED.get(tensor.untyped_storage()._cdata)
        step = 0 if found is None else found[1]
    asked[tensor.data_ptr()] = step
    return step


def checksums(tensor: torch.Tensor) -> tuple[int, ...]:
    """Sums of a tensor's bytes that change where bytes change or change places; one for each piece of it."""
    factors = _factors(tensor.device)
    sums = []
    for piece in tensor.detach().reshape(-1).view(torch.uint8).split(8 * len(factors)):
        if len(piece) % 8 or piece.storage_offset() % 8:
            piece = torch.nn.functional.pad(piece, (0, -len(piece) % 8))
        words = piece.view(torch.int64)
        sums.append((words * factors[: len(words)]).sum())
    return tuple(torch.stack(sums).tolist()) if sums else ()


@functools.cache
def _factors(device: torch.device) -> torch.Tensor:
    """Random numbers, since a plain sum stays the same where rows change places; odd, so that no bit is lost."""
    generator = torch.Generator().manual_seed(0)
    # 8-byte words that are summed at a time: few enough for a CPU's cache, enough to keep a GPU busy.
    count = 1 << 18 if device.type == "cpu" else 1 << 22
    return (torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1).to(device)

"""Guard bands: memory around every tensor of a call that reads as NaN and must not be written to.

A kernel that reads past a tensor finds NaN, which multiplying by zero does not hide. One that writes there is detected
afterwards. The bands are bytes of 0xFF: NaN in every float type that moereg knows, -1 in signed integers. Each tensor
has its own allocation, so that none of the layer's memory follows a band.

pytest must not rewrite its assertions' messages: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg.experts import ExpertInputs
from moereg.prepare_finalize import Prepared, PrepareFinalize
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import TENSOR_ROLES
from moereg.weights.permuted import ExpertWeights, PerExpert, PermutedWeights

FILLS: Final = ("nan", "huge", "stale")
"""Initial contents of workspaces: NaN, the largest numbers of the dtype, or what another call left."""

FORMS: Final = ("contiguous", "columns", "transposed", "offset", "parameter", "expanded")
"""Memory layouts of canonical weights.

Contiguous; every second column of a wider tensor; the last two dimensions swapped; aligned to one element only;
parameters that require grad; biases and scales expanded from one number.
"""

_BYTE: Final = 0xFF
_POISONED: Final = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
_THREADS_SECONDS: Final = 1.0
_LEAST_BAND: Final = 1 << 16
_MOST_BAND: Final = 1 << 20
_BAND_ROWS: Final = 256  # As many as the tallest tile has.
_WORKSPACE_ALIGNMENT: Final = 256  # As `Experts.apply` promises.
_HUGE: Final = {torch.bfloat16: 3e38, torch.float32: 3e38, torch.float16: 6e4}


@dataclasses.dataclass
class _Block:
    """One allocation: a band, a tensor's bytes `[start, end)`, and a band; when frozen also contents and version."""

    name: str
    raw: torch.Tensor
    start: int
    end: int
    tensor: torch.Tensor
    frozen: torch.Tensor | None = None
    version: int = 0


class GuardedMemory:
    """Makes tensors between guard bands; checks the bands and the bytes of frozen tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._blocks: list[_Block] = []

    def allocate(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        stride: tuple[int, ...] | None = None,
        alignment: int | None = None,
        offset: int = 0,
    ) -> torch.Tensor:
        """Allocates a tensor of 0xFF bytes; errors call it by its name.

        Args:
            name, shape, dtype, stride: Of the tensor; contiguous without a stride.
            alignment: Exact alignment in bytes of its first byte; None means that of torch's allocator.
            offset: Elements between such an aligned address and the first byte.
        """
        if stride is None:
            stride = torch.empty(shape, device="meta").stride()
        if alignment is None:
            alignment = 512 if self.device.type == "cuda" else 64
        reached = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        num_bytes = reached * dtype.itemsize if math.prod(shape) else 0
        row_bytes = max(stride, default=1) if len(shape) < 2 else stride[-2] if len(shape) == 2 else max(stride[-2:])
        band = min(max(_LEAST_BAND, _BAND_ROWS * row_bytes * dtype.itemsize), _MOST_BAND)
        raw = torch.full(
            (2 * band + num_bytes + 2 * alignment + offset * dtype.itemsize,),
            _BYTE,
            dtype=torch.uint8,
            device=self.device,
        )
        # Aligned exactly so, to make a kernel that needs more fail here.
        start = band + (alignment - band - raw.data_ptr()) % (2 * alignment) + offset * dtype.itemsize
        end = start + num_bytes
        tensor = raw[start:end].view(dtype).as_strided(shape, stride)
        self._blocks.append(_Block(name, raw, start, end, tensor))
        return tensor

    def copy(
        self, name: str, tensor: torch.Tensor, *, stride: tuple[int, ...] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """Copies a tensor, with its stride unless another is given; gaps between elements are 0xFF too."""
        stride = tensor.stride() if stride is None else stride
        copied = self.allocate(name, tuple(tensor.shape), tensor.dtype, stride, offset=offset)
        # Elements of an expanded tensor share memory, so write each address once.
        places = tuple(slice(1) if step == 0 else slice(None) for step in stride)
        target, source = copied[places], tensor.detach()[places]
        if tensor.element_size() == 1:
            target, source = target.view(torch.uint8), source.view(torch.uint8)
        target.copy_(source)
        return copied

    def freeze(self) -> None:
        """Forbids changes to every tensor made so far."""
        for block in self._blocks:
            if block.frozen is None:
                block.frozen, block.version = block.raw.clone(), block.tensor._version

    def check(self) -> None:
        """Synchronizes; AssertionError if a byte changed that must not, in which tensor and where."""
        # One comparison for all bands, since each one synchronizes.
        wrong = [
            (block.raw[: block.start] != _BYTE).any() | (block.raw[block.end :] != _BYTE).any()
            if block.frozen is None
            else (block.raw != block.frozen).any()
            for block in self._blocks
        ]
        if wrong and bool(torch.stack(wrong).any()):
            raise AssertionError("; ".join(self._wrongs()))
        for block in self._blocks:
            is_same = block.frozen is None or block.tensor._version == block.version
            assert is_same, f"{block.name} was written to, with what it held"

    def _wrongs(self) -> Iterator[str]:
        for block in self._blocks:
            changed = torch.nonzero(block.raw != (_BYTE if block.frozen is None else block.frozen)).flatten()
            before, behind = changed[changed < block.start], changed[changed >= block.end]
            inside = changed[(changed >= block.start) & (changed < block.end)]
            if len(before):
                yield f"memory {block.start - int(before[-1])} bytes in front of {block.name} was written to"
            if len(behind):
                yield f"memory {int(behind[0]) - block.end + 1} bytes behind {block.name} was written to"
            if block.frozen is not None and len(inside):
                yield f"{block.name} was written to, at byte {int(inside[0]) - block.start}"


class GuardedWorkspaces:
    """Provides scratch memory as tensors between guard bands, each in its own allocation.

    Attributes:
        fill: Initial contents, one of `FILLS`. Stale ones are NaN the first time.
    """

    def __init__(self, memory: GuardedMemory, fill: str = "nan") -> None:
        self.fill = fill
        self._memory = memory
        self._tensors: dict[tuple[tuple[tuple[int, ...], ...], torch.dtype], tuple[torch.Tensor, ...]] = {}

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Within this context layers get their scratch memory from here."""
        return WORKSPACES.answered_by(self.take)

    def take(
        self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
        """Scratch memory of those shapes, the same at each call, with its initial contents."""
        tensors = self._tensors.get((shapes, dtype))
        if tensors is None:
            names = ("workspace13", "workspace2", "expert_out")
            tensors = self._tensors[shapes, dtype] = tuple(
                self._memory.allocate(name, shape, dtype, alignment=_WORKSPACE_ALIGNMENT)
                for name, shape in zip(names, shapes, strict=False)
            )
        for tensor in tensors:
            if self.fill == "nan":
                tensor.view(torch.uint8).fill_(_BYTE)
            elif self.fill == "huge":
                tensor.fill_(_HUGE[dtype])
        return tensors


class LateWrites:
    """Keeps calls' results and detects changes by threads that a call left running."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def expect(self, out: torch.Tensor) -> None:
        """Records a tensor that must not change any more."""
        self._kept.append((out, out.clone()))

    def check(self) -> None:
        """Waits a little for new threads to end; AssertionError if a tensor has changed."""
        deadline = time.monotonic() + _THREADS_SECONDS
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for out, given in self._kept:
            same = torch.equal(out.view(torch.uint8), given.view(torch.uint8))
            assert same, "out was written to after the call had returned; wait in apply for what it starts"


class GuardedPrepareFinalize(PrepareFinalize):
    """Wraps a `PrepareFinalize` with guard bands around the experts' tensors; rows past an expert's count are NaN."""

    def __init__(self, inner: PrepareFinalize, device: torch.device) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]
        self.activation_format = inner.activation_format  # type: ignore[misc]
        self.memory = GuardedMemory(device)

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        """Calls `inner`; tensors that it passes through are not copied."""
        prepared = self.inner.prepare(hidden_states, topk_weights, topk_ids, problem, expert_map)
        given = (hidden_states, topk_weights, topk_ids, expert_map)
        self.memory = GuardedMemory(hidden_states.device)
        moved: dict[str, Any] = {}
        for field in dataclasses.fields(ExpertInputs):
            tensor = getattr(prepared.inputs, field.name)
            if tensor is not None and not any(tensor is other for other in given):
                moved[field.name] = self.memory.copy(f"prepared {field.name}", tensor)
        counts, rows = prepared.inputs.expert_num_tokens, moved.get("hidden_states")
        if counts is not None and rows is not None:
            unused = torch.arange(rows.shape[1], device=rows.device) >= counts.unsqueeze(1)
            rows.masked_fill_(unused.unsqueeze(2), float("nan"))
        self.memory.freeze()
        return dataclasses.replace(prepared, inputs=dataclasses.replace(prepared.inputs, **moved))

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        """Calls `inner`."""
        self.inner.finalize(out, expert_out, prepared, problem)


def guard_weights(
    memory: GuardedMemory, weights: ExpertWeights, form: str = "contiguous", in_place: bool = False
) -> ExpertWeights:
    """Copies canonical weights, each tensor frozen between guard bands.

    Args:
        memory: Memory for the copy.
        weights: Canonical weights, contiguous.
        form: One of `FORMS`. If biases and scales are expanded, all elements equal the first one.
        in_place: Whether a class reads them where they are, and may decline any that begin elsewhere than allocations.
    """
    tensors = {}
    for name, tensor in weights.tensors().items():
        is_matrix = tensor.dim() > 1
        stride = list(tensor.stride())
        if form == "columns" and is_matrix:
            stride = [2 * step for step in stride]
        elif form == "transposed" and is_matrix:
            stride[-2:] = [1, tensor.shape[-2]]
        elif form == "expanded" and TENSOR_ROLES[name] not in ("weight", "zero_point"):
            tensor = tensor.flatten()[0].expand(tensor.shape)
            stride = [0] * tensor.dim()
        offset = 3 if form == "offset" and not in_place else 0
        tensors[name] = memory.copy(f"canonical {name}", tensor, stride=tuple(stride), offset=offset)
        if form == "parameter":
            tensors[name] = torch.nn.Parameter(tensors[name], requires_grad=tensor.is_floating_point())
    memory.freeze()
    return dataclasses.replace(weights, **tensors)  # type: ignore[arg-type]


def guard_permuted(memory: GuardedMemory, weights: PermutedWeights) -> PermutedWeights:
    """Copies permuted weights with the same strides and 16-byte alignment (if any), frozen between guard bands.

    A tensor without strides, such as oneDNN packs, stays in place: torch gives no access to its memory.
    """

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        # A view of unaligned canonical weights must not become aligned here.
        offset = tensor.data_ptr() % 16 // tensor.element_size()
        return memory.copy(f"permuted {name}", tensor, offset=offset)

    per_expert: dict[str, PerExpert] = {
        name: [one(f"{name}[{expert}]", tensor) for expert, tensor in enumerate(value)]
        if isinstance(value, list)
        else one(name, value)
        for name, value in weights.per_expert.items()
    }
    shared = {name: one(name, tensor) for name, tensor in weights.shared.items()}
    memory.freeze()
    return PermutedWeights(weights.layout, per_expert, shared)


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within this context `torch.empty` gives bytes that are NaN in any float type. Affects only Python code."""
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

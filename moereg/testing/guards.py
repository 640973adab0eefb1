"""Guard bands: memory around every tensor of a call that reads as NaN and must not be written to.

A kernel that reads behind a tensor finds NaN, which no mask or zero weight turns into a number. A kernel that writes
there is seen afterwards. The bands are bytes of 0xFF: NaN in every float type that moereg knows, -1 in signed
integers. Each tensor has its own allocation, so that no memory of the layer lies behind a band.

pytest leaves the messages of its assertions as they are: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from moereg.experts import ExpertInputs
from moereg.prepare_finalize import Prepared, PrepareFinalize
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import TENSOR_ROLES
from moereg.weights.permuted import ExpertWeights, PerExpert, PermutedWeights

FILLS: Final = ("nan", "huge", "stale")
"""Contents of workspaces that a call gets: NaN, the largest numbers of their dtype, or what another call left."""

FORMS: Final = ("contiguous", "columns", "transposed", "offset", "parameter", "expanded")
"""How canonical weights may lie in memory.

Stacked; every second column of a wider tensor; the last two dimensions swapped; addresses aligned to one element only;
parameters that require grad; biases and scales expanded from one number.
"""

_BYTE: Final = 0xFF
_POISONED: Final = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
_THREADS_SECONDS: Final = 1.0
_LEAST_BAND: Final = 1 << 16
_MOST_BAND: Final = 1 << 20
_BAND_ROWS: Final = 256  # The tallest tile has as many.
_WORKSPACE_ALIGNMENT: Final = 256  # As `Experts.apply` promises.
_HUGE: Final = {torch.bfloat16: 3e38, torch.float32: 3e38, torch.float16: 6e4}


@dataclasses.dataclass
class _Block:
    """One allocation: a band, a tensor's bytes `[start, end)`, and a band; its contents and version once frozen."""

    name: str
    raw: torch.Tensor
    start: int
    end: int
    tensor: torch.Tensor
    frozen: torch.Tensor | None = None
    version: int = 0


class GuardedMemory:
    """Makes tensors between guard bands; checks the bands and the bytes of tensors that were frozen."""

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
        """A tensor of 0xFF bytes.

        Args:
            name: Name for errors.
            shape: Shape of the tensor.
            dtype: Dtype of the tensor.
            stride: Stride of the tensor; contiguous where None.
            alignment: Bytes that its first byte is aligned to, and no more; as torch's allocator aligns where None.
            offset: Elements between such an aligned place and the first byte.
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
        # Aligned no further than that, so that a kernel that needs more fails here as it would elsewhere.
        start = band + (alignment - band - raw.data_ptr()) % (2 * alignment) + offset * dtype.itemsize
        end = start + num_bytes
        tensor = raw[start:end].view(dtype).as_strided(shape, stride)
        self._blocks.append(_Block(name, raw, start, end, tensor))
        return tensor

    def copy(
        self, name: str, tensor: torch.Tensor, *, stride: tuple[int, ...] | None = None, offset: int = 0
    ) -> torch.Tensor:
        """A copy; gaps between its elements are 0xFF too.

        Args:
            name: Name for errors.
            tensor: The tensor to copy.
            stride: Stride of the copy; the tensor's where None.
            offset: As in `allocate`.
        """
        stride = tensor.stride() if stride is None else stride
        copied = self.allocate(name, tuple(tensor.shape), tensor.dtype, stride, offset=offset)
        # Elements of an expanded tensor share memory, so each place is written once.
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
        """Waits for the device and compares every byte that must not have changed.

        Raises:
            AssertionError: A byte changed; says of which tensor and where.
        """
        # All bands have one answer, since each answer waits for the GPU.
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
    """Hands out scratch as tensors between guard bands, each in its own allocation.

    Attributes:
        fill: Contents of the tensors when they are handed out, one of `FILLS`. Stale ones are NaN the first time.
    """

    def __init__(self, memory: GuardedMemory, fill: str = "nan") -> None:
        self.fill = fill
        self._memory = memory
        self._tensors: dict[tuple[tuple[tuple[int, ...], ...], torch.dtype], tuple[torch.Tensor, ...]] = {}

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Gives layers that run inside their scratch from here."""
        return WORKSPACES.answered_by(self._take)

    def _take(
        self, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, ...]:
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
    """Keeps what calls gave, and sees whether a thread that one left behind changes it."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def expect(self, out: torch.Tensor) -> None:
        """The tensor must stay as it is now."""
        self._kept.append((out, out.clone()))

    def check(self) -> None:
        """Waits a little for new threads to end, then compares.

        Raises:
            AssertionError: A tensor has changed.
        """
        deadline = time.monotonic() + _THREADS_SECONDS
        for thread in set(threading.enumerate()) - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for out, given in self._kept:
            same = torch.equal(out.view(torch.uint8), given.view(torch.uint8))
            assert same, "out was written to after the call had returned; wait in apply for what it starts"


class GuardedPrepareFinalize(PrepareFinalize):
    """Another `PrepareFinalize`, with guard bands around the experts' tensors; rows past an expert's count are NaN."""

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
        """As `inner`; tensors that it hands on unchanged are not moved."""
        prepared = self.inner.prepare(hidden_states, topk_weights, topk_ids, problem, expert_map)
        given = (hidden_states, topk_weights, topk_ids, expert_map)
        self.memory = GuardedMemory(hidden_states.device)
        moved: dict[str, torch.Tensor] = {}
        for field in dataclasses.fields(ExpertInputs):
            tensor = getattr(prepared.inputs, field.name)
            if tensor is not None and not any(tensor is other for other in given):
                moved[field.name] = self.memory.copy(f"prepared {field.name}", tensor)
        counts = prepared.inputs.expert_num_tokens
        if counts is not None:
            rows = moved.get("hidden_states")
            if rows is not None:
                unused = torch.arange(rows.shape[1], device=rows.device) >= counts.unsqueeze(1)
                rows.masked_fill_(unused.unsqueeze(2), float("nan"))
        self.memory.freeze()
        return dataclasses.replace(prepared, inputs=dataclasses.replace(prepared.inputs, **moved))

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        """As `inner`."""
        self.inner.finalize(out, expert_out, prepared, problem)


def guard_weights(memory: GuardedMemory, weights: ExpertWeights, form: str = "contiguous") -> ExpertWeights:
    """A copy of canonical weights, each tensor between guard bands and frozen.

    Args:
        memory: Memory for the copy.
        weights: Canonical weights, contiguous.
        form: One of `FORMS`. If biases and scales are expanded, all elements equal the first one.
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
        offset = 3 if form == "offset" else 0
        tensors[name] = memory.copy(f"canonical {name}", tensor, stride=tuple(stride), offset=offset)
        if form == "parameter":
            tensors[name] = torch.nn.Parameter(tensors[name], requires_grad=tensor.is_floating_point())
    memory.freeze()
    return dataclasses.replace(weights, **tensors)  # type: ignore[arg-type]


def guard_permuted(memory: GuardedMemory, weights: PermutedWeights) -> PermutedWeights:
    """The same weights, with the same strides and aligned to 16 bytes if they were, between guard bands and frozen.

    A tensor without strides, as oneDNN packs them, stays where it is: torch gives no access to its memory.
    """

    def guarded(tensors: Mapping[str, PerExpert]) -> dict[str, PerExpert]:
        return {
            name: [one(f"{name}[{expert}]", tensor) for expert, tensor in enumerate(value)]
            if isinstance(value, list)
            else one(name, value)
            for name, value in tensors.items()
        }

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided:
            return tensor
        # A view of canonical weights that begin anywhere must not become an aligned tensor here.
        offset = tensor.data_ptr() % 16 // tensor.element_size()
        return memory.copy(f"permuted {name}", tensor, offset=offset)

    per_expert = guarded(weights.per_expert)
    shared = {name: one(name, tensor) for name, tensor in weights.shared.items()}
    memory.freeze()
    return PermutedWeights(weights.layout, per_expert, shared)


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

"""Lists the layers with experts, and reads a layer: its problem, its canonical weights and its router."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from moereg.arguments import check_device
from moereg.checkpoints._files import ONE_EXPORT, CheckpointFiles
from moereg.checkpoints._manifest import ExpertPart, LayerManifest, list_layer, moe_layer_indices
from moereg.errors import ArgumentError, CheckpointError, RequestError, TooLargeError, index_ranges, one_line, shown
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.quantize import dequantize_rows, expert_matrix
from moereg.routing import BY_HAND, RouterSpec
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.runtime.torch_state import in_plain_torch
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

_NARROW: Final = 'float16 ends at 65,504, which an intermediate may pass: dtype="bfloat16" if outputs are not finite'
# Problem fields that a checkpoint does not decide; it fixes all others.
_OVERRIDES: Final = (
    "activation_format",
    "batch_invariant",
    "deterministic",
    "dtype",
    "exact_activations",
    "graph_capture",
    "max_num_tokens",
    "num_local_experts",
    "placement",
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CheckpointLayer:
    """The routed experts of one layer of a checkpoint, and its router.

    Attributes:
        problem: The layer, in the dtype that it was loaded in.
        weights: Canonical weights of local experts; quantized if the checkpoint is.
        model_type: The type in config.json; for multimodal models the language model's.
        layer: Index in the whole model.
        router: How the model routes.
        router_weight: [E,H], all experts, in the problem's dtype; fp32 if `router.fp32_logits`. Its H is the block's,
            another than the problem's where experts are between two projections (Nemotron-H).
        router_bias: [E] in the problem's dtype, or None.
        correction_bias: [E] fp32, DeepSeek-V3's bias for choosing experts, or None.
        expert_scale: [E] fp32, Gemma 4's factors of routing weights, or None.
        expert_table: [V,K] int64, experts by token id (DeepSeek-V4's first layers), or None if the router chooses.
        ep_rank: Local experts start at `ep_rank * num_local_experts`.
        has_shared_experts: Whether the model's layer also has experts that take every token. They are not part of
            this layer: the model combines their output with the kernel's.
        notes: What was not read as the files say.
    """

    problem: MoEProblem
    weights: ExpertWeights
    model_type: str
    layer: int
    router: RouterSpec
    router_weight: torch.Tensor
    router_bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None
    expert_table: torch.Tensor | None = None
    ep_rank: int = 0
    has_shared_experts: bool = False
    notes: tuple[str, ...] = ()

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the layer's user, one line each; usually none."""
        if not self.has_shared_experts:
            return self.notes
        return (
            *self.notes,
            f"layer {self.layer} also has shared experts, which are not in it: combine their output with the kernel's "
            "as the model does",
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of experts and router."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        tensors = [*self.weights.tensors().values(), *(each for each in fields if isinstance(each, torch.Tensor))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __repr__(self) -> str:
        others = ", shared experts left out" if self.has_shared_experts else ""
        return (
            f"CheckpointLayer({self.model_type} layer {self.layer}, {self.problem}, {self.router.kind}{others}, "
            f"{format_bytes(self.num_bytes)} on {self.weights.w13.device})"
        )

    @in_plain_torch
    def route(
        self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens like the checkpoint's own router, with logits in the model's dtype for them.

        Args:
            hidden_states: [T,H] in the problem's dtype, on the weights' device; the router's H.
            token_ids: [T] integers, where an `expert_table` chooses.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32, global experts. Models that round the weights to the
            logits' dtype differ by that rounding, and those that round scores before choosing (DeepSeek-V4, LFM2,
            Mistral 4 and DBRX in transformers) may choose another expert in 16 bits if two are nearly tied.

        Raises:
            ArgumentError: hidden_states have another shape, dtype or device, or token_ids are missing or not expected.
        """
        expected = (self.router_weight.shape[1], self.problem.torch_dtype, self.router_weight.device)
        columns = hidden_states.shape[1] if hidden_states.dim() == 2 else None
        if (columns, hidden_states.dtype, hidden_states.device) != expected:
            raise ArgumentError(
                f"hidden_states must be [T,{expected[0]}] {expected[1]} on {expected[2]}, got "
                f"{list(hidden_states.shape)} {hidden_states.dtype} on {hidden_states.device}; convert them"
            )
        dtype = torch.float32 if self.router.fp32_logits else self.router_weight.dtype
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        logits = torch.nn.functional.linear(hidden_states.to(dtype), self.router_weight.to(dtype), bias)
        shape = None if self.expert_table is None else [len(hidden_states)]
        if shape != (found := None if token_ids is None else list(token_ids.shape)):
            chooser = "its router" if shape is None else "a table by token id"
            raise ArgumentError(f"token_ids must be {shape} where {chooser} chooses experts, got {found}; pass {shape}")
        if self.expert_table is not None and token_ids is not None:
            # The router weighs what the table chose, as if there were no others.
            chosen = self.expert_table[token_ids.long()]
            router = dataclasses.replace(self.router, num_experts=self.router.top_k)
            topk_weights, places = router.route(logits.gather(1, chosen))
            return topk_weights, chosen.gather(1, places.long()).int()
        return self.router.route(logits, self.correction_bias, self.expert_scale)

    def sample_routes(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes the experts' inputs [T,H]; where the router takes something else, that is made up."""
        rows, table, width = hidden_states, self.expert_table, self.router_weight.shape[1]
        if width != rows.shape[1]:
            rows = torch.randn(len(rows), width, generator=torch.Generator().manual_seed(len(rows))).to(rows)
        return self.route(rows, None if table is None else torch.arange(len(rows), device=rows.device) % len(table))

    def make_kernel(self, selection: Selection | None = None, **keywords: Any) -> MoEKernel:
        """Calls `moereg.make_kernel` for this layer and its rank; the selection is made here if None."""
        return make_kernel(self.problem, self.weights, selection, ep_rank=self.ep_rank, **keywords)


def moe_layers(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Indices of the layers with experts, ascending. Reads only config.json; errors as in `load_experts`."""
    with CheckpointFiles(path) as files:
        return moe_layer_indices(files)


def read_problem(path: str | os.PathLike[str], layer: int, **overrides: Any) -> MoEProblem:
    """Reads the problem of a checkpoint's layer from config.json and tensor headers, without tensor data.

    Args:
        path: Checkpoint directory, or a name as `load_experts` takes it.
        layer: Index in the whole model.
        overrides: Fields of `MoEProblem` that a checkpoint does not decide, such as dtype or max_num_tokens.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        RequestError: An override contradicts the checkpoint.
        ArgumentError: An override's value does not fit the layer.
    """
    return read_problems(path, (layer,), **overrides)[layer]


def read_problems(
    path: str | os.PathLike[str], layers: Iterable[int] | None = None, **overrides: Any
) -> dict[int, MoEProblem]:
    """As `read_problem` for several layers, by index: those with experts where None. Opens each file once."""
    if facts := sorted(set(overrides) - set(_OVERRIDES)):
        raise RequestError(
            f"{facts[0]} cannot be overridden, got {facts[0]}={overrides[facts[0]]!r}: the checkpoint decides it; "
            f"leave it out (can be overridden: {', '.join(_OVERRIDES)})"
        )
    with CheckpointFiles(path) as files:
        indices = moe_layer_indices(files) if layers is None else layers
        return {index: dataclasses.replace(list_layer(files, index).problem, **overrides) for index in indices}


def load_experts(
    path: str | os.PathLike[str],
    layer: int,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    max_memory_fraction: float = 0.6,
    *,
    num_local_experts: int | None = None,
    ep_rank: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointLayer:
    """Reads the routed experts and the router of one layer.

    Experts are read one by one into the canonical tensors, so peak memory is the layer plus one expert.

    Args:
        path: Checkpoint directory, or the name of a model that the Hub's local cache holds, such as
            `Qwen/Qwen3-30B-A3B`; a path that exists is a path.
        layer: Index in the whole model.
        dtype: Dtype to load in, or to run quantized experts in; None means the checkpoint's.
        device: Device to load to.
        max_memory_fraction: Largest share of the device's free memory for the layer.
        num_local_experts: Experts of this rank; None means all.
        ep_rank: Selects the experts from `ep_rank * num_local_experts` on. Other experts' shards are not opened.
        progress: Called after each expert with the number read and the total.

    Returns:
        The layer; its tensors do not alias the files.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        TooLargeError: The layer would not fit in free memory.
        ArgumentError: The rank's experts are not experts of the layer, or an argument is out of range.

    Example:
        >>> import torch
        >>> layer = moereg.load_experts("path/to/checkpoint", layer=3)
        >>> print(layer.problem)
        E8 H256 I128 k2 bfloat16 unquantized silu
        >>> hidden_states = torch.randn(5, layer.problem.hidden_size, dtype=layer.problem.torch_dtype)
        >>> layer.make_kernel()(hidden_states, *layer.route(hidden_states)).shape
        torch.Size([5, 256])
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path must be a directory of a checkpoint or a name in the Hub's cache, got {shown(path)}")
    if not (type(max_memory_fraction) in (int, float) and 0 < max_memory_fraction <= 1):
        raise ArgumentError(f"max_memory_fraction must be above 0 and at most 1, got {shown(max_memory_fraction)}")
    device = check_device("device", device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError(
            f"device {str(device)!r} needs a GPU that this torch build can use; leave it out for the CPU"
        )
    with CheckpointFiles(path) as files:
        manifest = list_layer(files, layer, num_local_experts, ep_rank)
        overrides: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        problem = dataclasses.replace(manifest.problem, **overrides)
        specs = _field_specs(problem, {part.field for parts in manifest.parts for part in parts})
        expert_bytes = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in specs.values())
        subject = f"layer {layer} of {str(files.path)!r}"
        held_as = problem.dtype if problem.quant.weight is None else problem.quant.name
        _check_fits(subject, expert_bytes, problem.num_local_experts, held_as, device, max_memory_fraction)
        fields = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in specs.items()}
        for name in ("a13_scale", "a2_scale"):
            if name in fields:
                fields[name].zero_()
        for local_expert, parts in enumerate(manifest.parts):
            _copy_parts(files, parts, fields, local_expert)
            if progress is not None:
                progress(local_expert + 1, len(manifest.parts))
        narrow = _NARROW if problem.dtype == "float16" and problem.activation.limit is None else None
        found = (manifest.note, _fill_activation_scales(fields, manifest.parts), narrow, *_input_notes(manifest))
        notes = tuple(f"layer {layer}: {note}" for note in found if note)
        try:
            weights = ExpertWeights(**fields, quant=problem.quant)
        except ValueError as error:
            raise CheckpointError(f"{subject}: {error}") from error

        routing = _read_routing(files, manifest, problem.torch_dtype, device)
        return CheckpointLayer(
            problem,
            weights,
            manifest.model_type,
            layer,
            manifest.router,
            **routing,
            ep_rank=ep_rank,
            has_shared_experts=manifest.has_shared_experts,
            notes=notes,
        )


def _copy_parts(
    files: CheckpointFiles, parts: Iterable[ExpertPart], fields: Mapping[str, torch.Tensor], expert: int
) -> None:
    for part in parts:
        stored = files.read(part.name, part.row, part.num_rows)
        try:
            part.copy_to(fields, expert, stored)
        except ValueError as error:
            raise CheckpointError(f"{part.name} of {str(files.path)!r}: {error}") from error


def _fill_activation_scales(fields: dict[str, torch.Tensor], parts: Sequence[Sequence[ExpertPart]]) -> str | None:
    """Gives experts that were never calibrated, whose scale is 0, the largest of the others; returns a note.

    Groups of activations have scales of their own, so that this costs precision and no range. Without any scale the
    field is dropped, and each token has its own.
    """
    lacking: dict[str, torch.Tensor] = {}
    for name in {"a13_scale", "a2_scale"} & {*fields}:
        counts = [sum(part.field == name for part in some) for some in parts]
        is_short = torch.tensor([count < max(counts) for count in counts], device=fields[name].device)
        if (missing := is_short | (fields[name] == 0)).any():
            lacking[name] = missing
    if not lacking:
        return None
    experts = torch.stack(tuple(lacking.values())).any(0).nonzero().flatten().tolist()
    instead = []
    for name, missing in sorted(lacking.items()):
        if missing.all():
            del fields[name]
            instead.append(f"one per token as {name}")
        else:
            fields[name][missing] = largest = fields[name][~missing].max()
            instead.append(f"the layer's largest {name}, {float(largest):.3g}")
    found = one_line(", ".join(index_ranges(experts)), 60)
    return f"experts {found} have no finite positive input scale; they take {' and '.join(instead)}"


def _read_routing(
    files: CheckpointFiles, manifest: LayerManifest, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """The router's tensors by field of a layer."""
    # transformers loads the router in the model's dtype, but keeps the correction bias in fp32. Ernie's is [1,E].
    dtypes = {"router_bias": dtype, "expert_table": torch.int64}
    num_experts = manifest.router.num_experts
    found: dict[str, torch.Tensor] = {}
    for field, name in manifest.routing.items():
        stored = files.read(name).to(device, dtypes.get(field, torch.float32), copy=True)
        found[field] = stored.reshape(stored.shape[-2:] if field == "expert_table" else -1)
        if field == "expert_table" and not (0 <= stored.min() <= stored.max() < num_experts):
            first, last = int(stored.min()), int(stored.max())
            raise CheckpointError(f"{name} must name experts 0..{num_experts - 1}, got {first}..{last}; {ONE_EXPORT}")
    weight = _read_router(files, manifest).to(device)
    if "input_norm" in found:
        # The experts' input is the router's but for these factors, so that one input serves both.
        norm = found.pop("input_norm")
        weight = weight.float() * (found.pop("router_scale") / norm * len(norm) ** -0.5)
        if not weight.isfinite().all():
            raise CheckpointError(f"{manifest.routing['input_norm']} must have no zeros, got some; {BY_HAND}")
    return found | {"router_weight": weight.to(torch.float32 if manifest.router.fp32_logits else dtype)}


def _input_notes(manifest: LayerManifest) -> Iterator[str]:
    """Says what the experts and the router read, where that is not only the block's input."""
    inner, outer = manifest.problem.hidden_size, manifest.router_hidden_size
    if inner != outer:
        yield f"its experts read a projection of H={inner}, which is not in it; route takes the block's H={outer}"
    if "input_norm" in manifest.routing:
        yield f"experts and route read what {manifest.routing['input_norm'].removesuffix('.weight')} puts out"
    if "expert_table" in manifest.routing:
        yield "route also takes token_ids, by which a table chooses experts"


def _read_router(files: CheckpointFiles, manifest: LayerManifest) -> torch.Tensor:
    """The router's weight, dequantized."""
    scheme, parts = manifest.router_format.scheme, manifest.router_parts
    if scheme.weight is None:
        return files.read(parts[0].name)
    sizes = (manifest.router.num_experts, manifest.router_hidden_size)
    rows = scheme.tensor_rows(1, *sizes, num_halves=1, has_bias=False)
    fields = {row.name: torch.empty(row.shapes[0], dtype=row.dtype) for row in rows if row.matrix == "w2"}
    _copy_parts(files, parts, fields, 0)
    return dequantize_rows(expert_matrix(fields, "w2", 0, 1), scheme.weight, sizes[1], slice(None), torch.float32)


def _field_specs(problem: MoEProblem, fields: Container[str | None]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the layer's fields of `ExpertWeights`. Gate and up keep separate scales."""
    rows = problem.quant.tensor_rows(
        problem.num_local_experts,
        problem.hidden_size,
        problem.intermediate_size,
        problem.activation.num_halves,
        problem.has_bias,
    )
    return {
        row.name: (
            row.shapes[0] if row.role == "activation_scale" else row.shapes[-1],
            problem.torch_dtype if row.dtype is None else row.dtype,
        )
        for row in rows
        if row.name in fields
    }


def _check_fits(
    subject: str, expert_bytes: int, num_experts: int, dtype: str, device: torch.device, max_fraction: float
) -> None:
    """Checks before allocating that the experts fit, plus one more while they are read."""
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

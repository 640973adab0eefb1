"""What to read for one layer: tensors found and checked against config.json by their headers, no data touched."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from moereg.checkpoints._files import CheckpointFiles, TensorHeader
from moereg.checkpoints._models import MODEL_TYPES, ModelType, read_count
from moereg.errors import CheckpointError, unknown_name_message
from moereg.problem import MoEProblem
from moereg.routing import RouterSpec

__all__ = ["ExpertPart", "LayerPlan", "moe_layer_indices", "plan_layer"]

# In front of `layers.`: language models, multimodal ones old and new, and models saved without their head.
_PREFIXES: Final = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_QUANTISED_SUFFIXES: Final = ("_scale_inv", "_scale", "_scales", "_blocks", "_packed", "qweight", "qzeros", "absmax")


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """One piece of one expert: a tensor, or a row of a fused one, and where it goes.

    Attributes:
        name: Tensor's name in the checkpoint.
        shape: That its header must have.
        field: Of `ExpertWeights`.
        half: Of the expert's w13 that it is: 0 gate, 1 up; None where it is all of the field.
        row: Of the fused tensor; None where the tensor is this expert's alone.
        is_transposed: Stored [in,out].
        is_interleaved: Gate and up rows alternate.
    """

    name: str
    shape: tuple[int, ...]
    field: str
    half: int | None = None
    row: int | None = None
    is_transposed: bool = False
    is_interleaved: bool = False

    def copy_to(self, out: torch.Tensor, stored: torch.Tensor) -> None:
        """Writes the piece as stored into its expert's slice of the field, in the canonical order and out's dtype."""
        source = stored.mT if self.is_transposed else stored
        target = out if self.half is None else out.chunk(2)[self.half]
        if self.is_interleaved:
            gate_rows, up_rows = target.chunk(2)
            gate_rows.copy_(source[0::2])
            up_rows.copy_(source[1::2])
        else:
            target.copy_(source)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A layer whose tensors are all there, with the sizes that config.json says and one dtype.

    Attributes:
        model_type: As config.json says it.
        problem: With the dtype of the stored tensors.
        router: How it routes.
        parts: By local expert, what to read.
        router_weight, router_bias, correction_bias: Tensor names, None where the model has none.
    """

    model_type: str
    problem: MoEProblem
    router: RouterSpec
    parts: Sequence[tuple[ExpertPart, ...]]
    router_weight: str
    router_bias: str | None
    correction_bias: str | None


def moe_layer_indices(files: CheckpointFiles) -> tuple[int, ...]:
    """Layers that have experts, ascending, from config.json alone."""
    _, model = _model(files)
    with _config_errors(files):
        return tuple(sorted(model.moe_layers(files.config, read_count(files.config, "num_hidden_layers"))))


def plan_layer(files: CheckpointFiles, layer: int, num_local_experts: int | None = None, ep_rank: int = 0) -> LayerPlan:
    """Finds and checks the tensors of a layer by their headers.

    Args:
        files: Checkpoint.
        layer: Index in the whole model.
        num_local_experts: Experts of this rank; all where None. Only their shards are opened.
        ep_rank: Which ones: those from `ep_rank * num_local_experts` on.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        ValueError: The rank's experts are not experts of the layer.
    """
    model_type, model = _model(files)
    if files.quant_method is not None:
        raise _quantised(files, f"quant method {files.quant_method!r}")
    _check_has_experts(files, layer)
    with _config_errors(files):
        router = RouterSpec.from_config(files.config)
        problem = MoEProblem(
            num_experts=router.num_experts,
            hidden_size=read_count(files.config, "hidden_size"),
            intermediate_size=read_count(files.config, model.intermediate_size),
            top_k=router.top_k,
            activation=model.activation(files.config),
            has_bias=model.has_bias,
            apply_router_weight_on_input=router.apply_router_weight_on_input,
        )
    experts = _local_experts(problem.num_experts, num_local_experts, ep_rank)
    root = _find_block(files, model, layer)
    _check_not_quantised(files, f"{root}experts.")
    is_fused = model.projections is None or f"{root}experts.gate_up_proj" in files.file_of
    list_parts = _fused_parts if is_fused else _separate_parts
    parts = [tuple(list_parts(model, problem, root, expert)) for expert in experts]
    headers: dict[str, TensorHeader] = {}
    for part in (part for expert_parts in parts for part in expert_parts):
        if part.name not in headers:
            headers[part.name] = _check_header(files, problem, part.name, part.shape)
    dtype = _one_dtype(files, headers)

    router_root = f"{root}{model.router}."
    plan = LayerPlan(
        model_type,
        dataclasses.replace(problem, dtype=dtype, num_local_experts=len(experts)),
        router,
        parts,
        router_weight=f"{router_root}weight",
        router_bias=f"{router_root}bias" if model.has_bias else None,
        correction_bias=f"{router_root}e_score_correction_bias" if router.has_correction_bias else None,
    )
    _check_header(files, problem, plan.router_weight, (problem.num_experts, problem.hidden_size))
    for name in (plan.router_bias, plan.correction_bias):
        if name is not None:
            _check_header(files, problem, name, (problem.num_experts,))
    return plan


@contextlib.contextmanager
def _config_errors(files: CheckpointFiles) -> Iterator[None]:
    """Names the file in errors about values that are read from it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{files.path / 'config.json'}: {error}") from error


def _local_experts(num_experts: int, num_local_experts: int | None, ep_rank: int) -> range:
    """Global indices of the rank's experts."""
    count = num_experts if num_local_experts is None else num_local_experts
    first = ep_rank * count
    if count < 1 or ep_rank < 0 or first + count > num_experts:
        raise ValueError(
            f"a rank's experts must be among the layer's {num_experts}, got num_local_experts={count} and "
            f"ep_rank={ep_rank}; keep num_local_experts * (ep_rank + 1) at most {num_experts}"
        )
    return range(first, first + count)


def _model(files: CheckpointFiles) -> tuple[str, ModelType]:
    model_type = files.config.get("model_type")
    config_path = files.path / "config.json"
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"{config_path} must hold model_type, got {model_type!r}; take config.json from the model's publisher"
        )
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"{config_path}: {unknown_name_message('model type', model_type, MODEL_TYPES)}")
    return model_type, MODEL_TYPES[model_type]


def _check_has_experts(files: CheckpointFiles, layer: int) -> None:
    with _config_errors(files):
        num_layers = read_count(files.config, "num_hidden_layers")
    if not 0 <= layer < num_layers:
        raise CheckpointError(
            f"layer must be in 0..{num_layers - 1} for {str(files.path)!r}, got {layer}; its layers with experts are "
            f"{_index_ranges(moe_layer_indices(files))}"
        )
    if layer not in (moe_layers := moe_layer_indices(files)):
        raise CheckpointError(
            f"layer {layer} of {str(files.path)!r} is dense, but a layer with experts is needed; those are "
            f"{_index_ranges(moe_layers)}"
        )


def _index_ranges(indices: Sequence[int]) -> str:
    """`1-3, 5` for (1, 2, 3, 5)."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][1:] = [index]
        else:
            ranges.append([index])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges) or "none"


def _find_block(files: CheckpointFiles, model: ModelType, layer: int) -> str:
    """What the names of the layer's router and experts begin with, a dot included."""
    roots = [f"{prefix}layers.{layer}.{block}." for prefix in _PREFIXES for block in model.blocks]
    for root in roots:
        if f"{root}{model.router}.weight" in files.file_of:
            return root
    raise CheckpointError(
        f"the router of layer {layer} is missing from {str(files.path)!r}, expected {roots[0]}{model.router}.weight; "
        "download the checkpoint again, or check that config.json belongs to it"
    )


def _fused_parts(model: ModelType, problem: MoEProblem, root: str, expert: int) -> Iterator[ExpertPart]:
    num_experts, gate_up_size = problem.num_experts, 2 * problem.intermediate_size
    sizes = {
        ("w13", "gate_up_proj"): (gate_up_size, problem.hidden_size),
        ("w2", "down_proj"): (problem.hidden_size, problem.intermediate_size),
    }
    for (field, projection), (size_out, size_in) in sizes.items():
        is_interleaved = model.is_interleaved and field == "w13"
        name = f"{root}experts.{projection}"
        yield ExpertPart(
            name,
            (num_experts, size_in, size_out) if model.is_transposed else (num_experts, size_out, size_in),
            field,
            row=expert,
            is_transposed=model.is_transposed,
            is_interleaved=is_interleaved,
        )
        if model.has_bias:
            shape = (num_experts, size_out)
            yield ExpertPart(f"{name}_bias", shape, f"{field}_bias", row=expert, is_interleaved=is_interleaved)


def _separate_parts(model: ModelType, problem: MoEProblem, root: str, expert: int) -> Iterator[ExpertPart]:
    assert model.projections is not None and not model.has_bias, "no known model has separate experts with biases"
    hidden_size, intermediate_size = problem.hidden_size, problem.intermediate_size
    gate, up, down = (f"{root}experts.{expert}.{projection}.weight" for projection in model.projections)
    yield ExpertPart(gate, (intermediate_size, hidden_size), "w13", half=0)
    yield ExpertPart(up, (intermediate_size, hidden_size), "w13", half=1)
    yield ExpertPart(down, (hidden_size, intermediate_size), "w2")


def _check_header(files: CheckpointFiles, problem: MoEProblem, name: str, shape: tuple[int, ...]) -> TensorHeader:
    header = files.header(name)
    if header.dtype not in _DTYPES:
        raise _quantised(files, f"{header.dtype} in tensor {name!r} of {header.file}")
    if header.shape != shape:
        raise CheckpointError(
            f"{name} must be {list(shape)} where config.json says E={problem.num_experts}, H={problem.hidden_size}, "
            f"I={problem.intermediate_size}, got {list(header.shape)} in {files.path / header.file}; use the "
            "config.json that belongs to these tensors"
        )
    return header


def _one_dtype(files: CheckpointFiles, headers: dict[str, TensorHeader]) -> str:
    (first_name, first), *others = headers.items()
    for name, header in others:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"the experts of a layer must have one dtype, got {first.dtype} for {first_name} in {first.file} and "
                f"{header.dtype} for {name} in {header.file} of {str(files.path)!r}; save the checkpoint in one dtype"
            )
    return _DTYPES[first.dtype]


def _check_not_quantised(files: CheckpointFiles, experts_root: str) -> None:
    """Scales beside the weights mean that the weights are not what they seem, whatever config.json says."""
    for name, file in files.file_of.items():
        if name.startswith(experts_root) and name.endswith(_QUANTISED_SUFFIXES):
            raise _quantised(files, f"tensor {name!r} in {file}")


def _quantised(files: CheckpointFiles, found: str) -> CheckpointError:
    return CheckpointError(
        f"moereg reads 16-bit and 32-bit checkpoints in this version, got {found} in {str(files.path)!r}; use the "
        "model's bfloat16 release, or dequantise it with transformers and save_pretrained"
    )

"""What to read for one layer: tensors found and checked against config.json by their headers, no data touched."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from moereg.checkpoints._files import CheckpointFiles, TensorHeader
from moereg.checkpoints._formats import FLOATS, StorageFormat, unquantized_format
from moereg.checkpoints._models import MODEL_TYPES, ModelType
from moereg.checkpoints._parts import ExpertPart, list_modules, list_parts
from moereg.checkpoints._quantization import quantized_format
from moereg.config_entries import MOST_LAYERS, is_one_of, read_count
from moereg.errors import ArgumentError, CheckpointError, one_line, shown, unknown_name_message
from moereg.problem import MoEProblem
from moereg.routing import RouterSpec

__all__ = ["LayerPlan", "moe_layer_indices", "plan_layer"]

# In front of `layers.`: language models, multimodal ones old and new, and models saved without their head.
_PREFIXES: Final = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
# Of an expert, as it stands in a name.
_INDEX: Final = re.compile("[0-9]{1,9}")
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A layer whose tensors are all there, with the sizes that config.json says and one dtype.

    Attributes:
        model_type: As config.json says it.
        problem: With the scheme and dtype of the stored tensors.
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
        num_layers = read_count(files.config, "num_hidden_layers", maximum=MOST_LAYERS)
        return tuple(sorted(model.moe_layers(files.config, num_layers)))


def plan_layer(files: CheckpointFiles, layer: int, num_local_experts: int | None = None, ep_rank: int = 0) -> LayerPlan:
    """Finds and checks the tensors of a layer by their headers.

    Args:
        files: Checkpoint.
        layer: Index in the whole model.
        num_local_experts: Experts of this rank; all where None. Only their shards are opened.
        ep_rank: Which ones: those from `ep_rank * num_local_experts` on.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        ValueError: An argument is no integer, or the rank's experts are not experts of the layer.
    """
    for argument, value in (("layer", layer), ("num_local_experts", num_local_experts), ("ep_rank", ep_rank)):
        if type(value) is not int and not (value is None and argument == "num_local_experts"):
            raise ArgumentError(f"{argument} must be an integer, got {shown(value)}; pass one")
    model_type, model = _model(files)
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
    experts_root = f"{root}experts."
    stored = _storage_format(files, model, experts_root, experts)
    problem = dataclasses.replace(problem, quant=stored.scheme)
    headers: dict[str, TensorHeader] = {}
    parts = []
    # One expert after the other, so that the first that is missing ends it.
    for expert in experts:
        with _config_errors(files):
            listed = list(list_parts(model, problem, stored, experts_root, expert))
        parts.append(tuple(part for part in listed if part.required or part.name in files.file_of))
        for part in parts[-1]:
            if part.name not in headers:
                headers[part.name] = _check_header(files, problem, stored.name, part)
    _check_nothing_else(files, stored, experts_root, experts, headers)

    router_root = f"{root}{model.router}."
    plan = LayerPlan(
        model_type,
        problem,
        router,
        parts,
        router_weight=f"{router_root}weight",
        router_bias=f"{router_root}bias" if model.has_bias else None,
        correction_bias=f"{router_root}e_score_correction_bias" if router.has_correction_bias else None,
    )
    bias_shape = (problem.num_experts,)
    router_shapes: dict[str, tuple[int, ...]] = {plan.router_weight: (*bias_shape, problem.hidden_size)}
    router_shapes.update({name: bias_shape for name in (plan.router_bias, plan.correction_bias) if name is not None})
    for name, shape in router_shapes.items():
        _check_header(files, problem, stored.name, ExpertPart(name, (shape,), FLOATS, None))
    dtype = _dtype(files, stored, headers, plan.router_weight)
    return dataclasses.replace(plan, problem=dataclasses.replace(problem, dtype=dtype, num_local_experts=len(experts)))


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
            f"{config_path} must hold model_type, got {shown(model_type)}; take config.json from the model's publisher"
        )
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"{config_path}: {unknown_name_message('model type', model_type, MODEL_TYPES)}")
    return model_type, MODEL_TYPES[model_type]


def _check_has_experts(files: CheckpointFiles, layer: int) -> None:
    with _config_errors(files):
        num_layers = read_count(files.config, "num_hidden_layers", maximum=MOST_LAYERS)
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
    return one_line(", ".join("-".join(map(str, bounds)) for bounds in ranges) or "none", 200)


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


def _storage_format(files: CheckpointFiles, model: ModelType, experts_root: str, experts: range) -> StorageFormat:
    """How the experts are stored, as the configs say."""
    is_fused = model.projections is None or f"{experts_root}gate_up_proj" in files.file_of
    found = quantized_format(files, list_modules(model, experts_root, experts, is_fused))
    if found is None:
        return unquantized_format(is_fused, model.is_transposed)
    if model.projections is None and not found.is_fused:
        raise CheckpointError(
            f"{files.path / 'config.json'}: experts of model type {files.config.get('model_type')!r} are read fused, "
            f"which {found.name} is not; use a release in mxfp4 or bfloat16"
        )
    return found


def _check_header(files: CheckpointFiles, problem: MoEProblem, stored: str, part: ExpertPart) -> TensorHeader:
    header = files.header(part.name)
    shapes = " or ".join(str(list(shape)) for shape in part.shapes)
    if header.shape not in part.shapes:
        raise CheckpointError(
            f"{part.name} must be {shapes} where config.json says E={problem.num_experts}, H={problem.hidden_size}, "
            f"I={problem.intermediate_size} and {stored} experts, got {list(header.shape)} in "
            f"{files.path / header.file}; use the config.json that belongs to these tensors"
        )
    if header.dtype not in part.dtypes:
        raise CheckpointError(
            f"{part.name} must be {' or '.join(part.dtypes)} where the checkpoint's config says {stored} experts, got "
            f"{header.dtype} in {files.path / header.file}; use the config.json that belongs to these tensors"
        )
    return header


def _check_nothing_else(
    files: CheckpointFiles, stored: StorageFormat, experts_root: str, experts: range, read: Container[str]
) -> None:
    """A tensor of an expert that would not be read means that the weights are not what they seem."""
    for name, file in files.file_of.items():
        if not name.startswith(experts_root) or name in read:
            continue
        expert = name.removeprefix(experts_root).partition(".")[0]
        if not _INDEX.fullmatch(expert) or int(expert) in experts:
            raise CheckpointError(
                f"{stored.name} experts have no tensor such as {shown(name)}, got one in {files.path / file}; use the "
                "config.json that belongs to these tensors, or the model's bfloat16 release"
            )


def _dtype(files: CheckpointFiles, stored: StorageFormat, headers: Mapping[str, TensorHeader], router: str) -> str:
    """Of the weights where they are not quantized, else what the model is said to run in."""
    if stored.scheme.weight is None:
        return _one_dtype(files, headers)
    # transformers writes dtype since version 5, torch_dtype before.
    named = files.config.get("dtype") or files.config.get("torch_dtype")
    return str(named) if is_one_of(named, _DTYPES.values()) else _DTYPES[files.header(router).dtype]


def _one_dtype(files: CheckpointFiles, headers: Mapping[str, TensorHeader]) -> str:
    (first_name, first), *others = headers.items()
    for name, header in others:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"the experts of a layer must have one dtype, got {first.dtype} for {first_name} in {first.file} and "
                f"{header.dtype} for {name} in {header.file} of {str(files.path)!r}; save the checkpoint in one dtype"
            )
    return _DTYPES[first.dtype]

"""The manifest of a layer: its stored tensors, found and checked against config.json by their headers.

No tensor data is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final

from moereg.checkpoints._files import CheckpointFiles, TensorHeader, config_errors
from moereg.checkpoints._formats import FLOATS, StorageFormat, unquantized_format
from moereg.checkpoints._models import MODEL_TYPES, FusedNames, ModelType
from moereg.checkpoints._moe_layers import check_has_experts, find_model
from moereg.checkpoints._parts import ExpertPart, LayerSizes, list_modules, list_parts
from moereg.checkpoints._quantization import quantized_format
from moereg.errors import ArgumentError, CheckpointError, shown
from moereg.routing import RouterSpec
from moereg.routing.config_entries import is_one_of, read_count, read_object
from moereg.spec.problem import MoEProblem

__all__ = ["LayerManifest", "list_layer"]

# What names of layers begin with: in language models, in old and new multimodal ones, in models saved without a head,
# in Qwen3-Omni, in Nemotron-H and in what is built around it, and in DBRX.
_LAYERS: Final = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "language_model.layers.",
    "layers.",
    "thinker.model.layers.",
    "backbone.layers.",
    "language_model.backbone.layers.",
    "llm.model.layers.",
    "transformer.blocks.",
)
# Names of the bias in blocks of any model type, and in the layer outside of them.
_CORRECTION_BIASES: Final = frozenset(name for model in MODEL_TYPES.values() for name in model.correction_biases)
_OUTER_CORRECTION_BIASES: Final = frozenset(model.outer_correction_bias for model in MODEL_TYPES.values()) - {None}
# A module of experts that take every token, in the block or beside it.
_SHARED: Final = re.compile(r"(?:^|\.)(shared?_(?:expert|mlp)\w*)")
# An expert's index in a tensor's name.
_INDEX: Final = re.compile("[0-9]{1,9}")
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclasses.dataclass(frozen=True)
class LayerManifest:
    """A layer whose tensors are all there, in one dtype and with the sizes that config.json says.

    Attributes:
        model_type: As config.json says it.
        problem: With the scheme and dtype of the stored tensors.
        router: How it routes.
        parts: What to read, by local expert.
        router_weight, router_bias, correction_bias: Tensor names, None where the model has none.
        has_shared_experts: Whether the layer has experts that take every token.
    """

    model_type: str
    problem: MoEProblem
    router: RouterSpec
    parts: Sequence[tuple[ExpertPart, ...]]
    router_weight: str
    router_bias: str | None
    correction_bias: str | None
    has_shared_experts: bool


def list_layer(
    files: CheckpointFiles, layer: int, num_local_experts: int | None = None, ep_rank: int = 0
) -> LayerManifest:
    """Finds the tensors of a layer and checks their headers.

    Args:
        files: Checkpoint.
        layer: Index in the whole model.
        num_local_experts: Experts of this rank; all where None. Only their shards are opened.
        ep_rank: Which experts: those from `ep_rank * num_local_experts` on.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        ValueError: An argument is not an integer, or the rank's experts are not experts of the layer.
    """
    for argument, value in (("layer", layer), ("num_local_experts", num_local_experts), ("ep_rank", ep_rank)):
        if type(value) is not int and not (value is None and argument == "num_local_experts"):
            raise ArgumentError(f"{argument} must be an integer, got {shown(value)}; pass one")
    model_type, model = find_model(files)
    check_has_experts(files, layer)
    with config_errors(files):
        router = RouterSpec.from_config(files.config)
        sizes = LayerSizes(
            router.num_experts,
            read_count(files.config, "hidden_size", "d_model"),
            read_count({**files.config, **read_object(files.config, "ffn_config")}, model.intermediate_size),
        )
        activation = model.activation(files.config)
    experts = _local_experts(sizes.num_experts, num_local_experts, ep_rank)
    layer_root, root, router_root = _find_block(files, model, layer)
    fused = _find_fused(files, model, root)
    storage = _storage_format(files, model, sizes, root, experts, fused)
    fused = model.fused[-1] if fused is None and storage.is_fused else fused
    headers: dict[str, TensorHeader] = {}
    parts = []
    # One expert after the other, so that the first missing tensor ends it.
    for expert in experts:
        with config_errors(files):
            listed = list(list_parts(model, sizes, storage, root, expert, fused))
        parts.append(tuple(part for part in listed if part.required or part.name in files.file_of))
        for part in parts[-1]:
            if part.name not in headers:
                headers[part.name] = _check_header(files, sizes, storage.name, part)
    router_weight = f"{router_root}weight"
    router_bias = f"{router_root}bias" if model.has_bias else None
    own_biases = _correction_biases(model, layer_root, root) if router.has_correction_bias else ()
    # If there is none, the check of its header finds the usual name missing.
    correction_bias = next(
        (name for name in own_biases if name in files.file_of), own_biases[0] if own_biases else None
    )
    bias_shape = (sizes.num_experts,)
    router_shapes: dict[str, tuple[tuple[int, ...], ...]] = {router_weight: ((*bias_shape, sizes.hidden_size),)}
    if router_bias is not None:
        router_shapes[router_bias] = (bias_shape,)
    if correction_bias is not None:
        router_shapes[correction_bias] = (bias_shape, (1, *bias_shape))
    for name, shapes in router_shapes.items():
        _check_header(files, sizes, storage.name, ExpertPart(name, shapes, FLOATS))
    shared = _find_shared(files, layer_root)
    # Types that store their experts alike differ in these, and reading one as the other would give wrong numbers.
    others = [name for module, name in shared.items() if module not in model.shared_experts]
    others += [
        name
        for name in _any_correction_bias(layer_root, root)
        if name in files.file_of and name not in (*own_biases, router_bias)
    ]
    if others:
        raise CheckpointError(
            f"layers of model type {model_type!r} have no tensor such as {shown(others[0])}, got one in "
            f"{files.path / files.file_of[others[0]]}; use the config.json that belongs to these tensors"
        )
    lacking = [module for module in model.shared_experts if module.endswith("_gate") and module not in shared]
    if shared and lacking:
        raise CheckpointError(
            f"layers of model type {model_type!r} have {lacking[0]} beside their shared experts, got none with "
            f"{shown(next(iter(shared.values())))}; use the config.json that belongs to these tensors"
        )
    _check_nothing_else(files, storage, f"{root}experts.", experts, {*headers, *router_shapes})
    with config_errors(files):
        problem = MoEProblem(
            **dataclasses.asdict(sizes),
            top_k=router.top_k,
            activation=activation,
            has_bias=model.has_bias,
            apply_router_weight_on_input=router.apply_router_weight_on_input,
            quant=storage.scheme,
            dtype=_dtype(files, storage, headers, router_weight),
            num_local_experts=len(experts),
        )
    return LayerManifest(
        model_type, problem, router, parts, router_weight, router_bias, correction_bias, has_shared_experts=bool(shared)
    )


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


def _find_block(files: CheckpointFiles, model: ModelType, layer: int) -> tuple[str, str, str]:
    """Prefixes of the names of the layer, its block and its router, each including the final dot."""
    roots = [
        (f"{layers}{layer}.", f"{layers}{layer}.{block}{'.' if block else ''}", router)
        for layers in _LAYERS
        for block in model.blocks
        for router in model.routers
    ]
    for layer_root, root, router in roots:
        if f"{root}{router}.weight" in files.file_of:
            return layer_root, root, f"{root}{router}."
    _, root, router = roots[0]
    raise CheckpointError(
        f"the router of layer {layer} is missing from {str(files.path)!r}, expected {root}{router}.weight; download "
        "the checkpoint again, or check that config.json belongs to it"
    )


def _find_fused(files: CheckpointFiles, model: ModelType, root: str) -> FusedNames | None:
    """Names of the tensors that hold all experts; None if each expert has its own."""
    for fused in model.fused:
        if f"{root}{fused.w13[0]}" in files.file_of:
            return fused
    return model.fused[-1] if model.projections is None else None


def _correction_biases(model: ModelType, layer_root: str, root: str) -> tuple[str, ...]:
    """Names that the model type's bias may have."""
    outer = () if model.outer_correction_bias is None else (f"{layer_root}{model.outer_correction_bias}",)
    return (*(f"{root}{name}" for name in model.correction_biases), *outer)


def _any_correction_bias(layer_root: str, root: str) -> Iterator[str]:
    """Names that the bias of some model type has."""
    yield from (f"{root}{name}" for name in sorted(_CORRECTION_BIASES))
    yield from (f"{layer_root}{name}" for name in _OUTER_CORRECTION_BIASES)


def _find_shared(files: CheckpointFiles, layer_root: str) -> dict[str, str]:
    """The layer's modules of experts that take every token, each with the first of its tensors."""
    found: dict[str, str] = {}
    for name in files.file_of:
        if name.startswith(layer_root) and (module := _SHARED.search(name.removeprefix(layer_root))):
            found.setdefault(module[1], name)
    return found


def _storage_format(
    files: CheckpointFiles,
    model: ModelType,
    sizes: LayerSizes,
    root: str,
    experts: range,
    fused: FusedNames | None,
) -> StorageFormat:
    """How the experts are stored, as the configs say."""
    storage = quantized_format(files, list_modules(model, root, experts, fused))
    if storage is None:
        is_transposed = model.is_transposed
        if is_transposed is None:
            is_transposed = fused is not None and _is_transposed(files, sizes, root, fused)
        return unquantized_format(fused is not None, is_transposed)
    if model.projections is None and not storage.is_fused:
        raise CheckpointError(
            f"{files.path / 'config.json'}: experts of model type {files.config.get('model_type')!r} are read fused, "
            f"which {storage.name} is not; use a release in mxfp4 or bfloat16"
        )
    return storage


def _is_transposed(files: CheckpointFiles, sizes: LayerSizes, root: str, fused: FusedNames) -> bool:
    """Whether the shapes are those of transposed tensors. No sizes make both gate and up, and down, ambiguous."""
    columns = (2 * sizes.intermediate_size, sizes.hidden_size)
    shapes = {fused.w13[0]: (sizes.hidden_size, columns[0]), fused.w2: (sizes.intermediate_size, columns[1])}
    return all(files.header(f"{root}{name}").shape == (sizes.num_experts, *shape) for name, shape in shapes.items())


def _check_header(files: CheckpointFiles, sizes: LayerSizes, storage_name: str, part: ExpertPart) -> TensorHeader:
    header = files.header(part.name)
    shapes = " or ".join(str(list(shape)) for shape in part.shapes)
    if header.shape not in part.shapes:
        raise CheckpointError(
            f"{part.name} must be {shapes} where config.json says E={sizes.num_experts}, H={sizes.hidden_size}, "
            f"I={sizes.intermediate_size} and {storage_name} experts, got {list(header.shape)} in "
            f"{files.path / header.file}; use the config.json that belongs to these tensors"
        )
    if header.dtype not in part.dtypes:
        raise CheckpointError(
            f"{part.name} must be {' or '.join(part.dtypes)} where the checkpoint's config says {storage_name} "
            f"experts, got {header.dtype} in {files.path / header.file}; use the config.json that belongs to these "
            "tensors"
        )
    return header


def _check_nothing_else(
    files: CheckpointFiles, storage: StorageFormat, experts_root: str, experts: range, read: Container[str]
) -> None:
    """Checks that all tensors of the experts are read. An unread one means that they are not what they seem."""
    for name, file in files.file_of.items():
        if not name.startswith(experts_root) or name in read:
            continue
        expert = name.removeprefix(experts_root).partition(".")[0]
        if not _INDEX.fullmatch(expert) or int(expert) in experts:
            raise CheckpointError(
                f"{storage.name} experts have no tensor such as {shown(name)}, got one in {files.path / file}; use the "
                "config.json that belongs to these tensors, or the model's bfloat16 release"
            )


def _dtype(files: CheckpointFiles, storage: StorageFormat, headers: Mapping[str, TensorHeader], router: str) -> str:
    """The dtype of unquantized weights; for quantized ones, the dtype that the model runs in."""
    if storage.scheme.weight is None:
        return _common_dtype(files, headers)
    # transformers writes dtype since version 5, torch_dtype before.
    named = files.config.get("dtype") or files.config.get("torch_dtype")
    return str(named) if is_one_of(named, _DTYPES.values()) else _DTYPES[files.header(router).dtype]


def _common_dtype(files: CheckpointFiles, headers: Mapping[str, TensorHeader]) -> str:
    (first_name, first), *others = headers.items()
    for name, header in others:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"the experts of a layer must have one dtype, got {first.dtype} for {first_name} in {first.file} and "
                f"{header.dtype} for {name} in {header.file} of {str(files.path)!r}; save the checkpoint in one dtype"
            )
    return _DTYPES[first.dtype]

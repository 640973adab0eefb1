"""The manifest of a layer: finds its experts' parts and checks their headers against config.json.

Reads no tensor data. What cannot be read as the layer is a CheckpointError that says why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from moereg.checkpoints._files import CheckpointFiles, TensorHeader, config_errors
from moereg.checkpoints._formats import FLOATS, Projection, StorageFormat, StoredTensor, as_is, unquantized_format
from moereg.checkpoints._models import MODEL_TYPES, FusedNames, ModelType, count_layers
from moereg.checkpoints._quantization import quantized_format
from moereg.errors import ArgumentError, CheckpointError, index_ranges, one_line, shown
from moereg.routing import BY_HAND, RouterSpec, unknown_model_message
from moereg.routing.config_entries import is_one_of, read_count, read_object
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import tensor_name
from moereg.weights.checks import check_scale
from moereg.weights.layouts import deinterleave_gate_up

# Prefixes of layer names: language models, old and new multimodal models, models saved without a head, Qwen3-Omni,
# Nemotron-H and models built around it, and DBRX.
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
# A module of shared experts, inside the block or next to it.
_SHARED: Final = re.compile(r"(?:^|\.)(shared?_(?:expert|mlp)\w*)")
# An expert's index in a tensor's name.
_INDEX: Final = re.compile("[0-9]{1,9}")
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class LayerSizes(NamedTuple):
    """The sizes that determine stored shapes: E of the whole layer, H and I."""

    num_experts: int
    hidden_size: int
    intermediate_size: int


@dataclasses.dataclass(frozen=True)
class ExpertPart:
    """A stored tensor, or a row of a fused one, and the rows of one expert that it becomes.

    Attributes:
        name: The tensor's name in the checkpoint.
        tensor: How it is stored; if fused, with the shapes of all experts.
        matrix: Its matrix, `w13` or `w2`.
        half: Half of the expert's w13: 0 gate, 1 up; None for the whole field.
        row: Row of the fused tensor; None if the tensor is this expert's alone.
        num_rows: Rows per expert, in units of which `row` counts; None means one row without that dimension.
        is_interleaved: Whether gate and up rows alternate.
    """

    name: str
    tensor: StoredTensor
    matrix: str
    half: int | None = None
    row: int | None = None
    num_rows: int | None = None
    is_interleaved: bool = False

    @property
    def field(self) -> str | None:
        """Its field of `ExpertWeights`; None if the tensor is only checked."""
        return None if self.tensor.role is None else tensor_name(self.matrix, self.tensor.role)

    def copy_to(self, fields: Mapping[str, torch.Tensor], expert: int, stored: torch.Tensor) -> None:
        """Converts a stored tensor, or its row, and writes it into the local expert's slice of its canonical field.

        Raises ArgumentError if its values contradict its format.
        """
        canonical = self.tensor.convert(stored)
        if self.field is None:
            return
        if self.tensor.role in ("scale", "scale_2", "activation_scale"):
            # Checked while every part is on the CPU and gate and up are still separate.
            check_scale(self.field, canonical)
        rows = fields[self.field][expert]
        if self.is_interleaved:
            deinterleave_gate_up(canonical, out=rows, dim=0)
        elif self.half is None:
            rows.copy_(canonical)
        elif rows.dim():
            rows.chunk(2)[self.half].copy_(canonical)
        else:
            # Gate and up share an input, which gets the larger scale, so that neither saturates.
            rows.copy_(canonical if self.half == 0 else torch.maximum(rows, canonical.to(rows)))


def _list_projections(
    model: ModelType, sizes: LayerSizes, root: str, expert: int, fused: FusedNames | None
) -> Iterator[tuple[str, int | None, Projection]]:
    """The projections of a (global) expert, each with its matrix and half.

    `root` is the prefix of the block's names, including the dot; `fused` is None if each expert has its own tensors.
    """
    if fused is None:
        assert model.projections is not None
        *gate_up, down = (f"{root}experts.{expert}.{name}" for name in model.projections)
    else:
        *gate_up, down = (f"{root}{name}" for name in (*fused.w13, fused.w2))
    is_half, has_gate = len(gate_up) == 2, model.projections is None or len(model.projections) == 3
    rows = sizes.intermediate_size * (2 if has_gate and not is_half else 1)
    for half, name in enumerate(gate_up):
        yield "w13", half if is_half else None, Projection(name, rows, sizes.hidden_size, is_half)
    yield "w2", None, Projection(down, sizes.hidden_size, sizes.intermediate_size)


@dataclasses.dataclass(frozen=True)
class LayerManifest:
    """A layer whose tensors all exist, in one dtype and with config.json's sizes.

    Attributes:
        model_type: The type in config.json.
        problem: The layer, with the scheme and dtype of the stored tensors.
        router: How it routes.
        parts: Parts to read, by local expert.
        router_weight, router_bias, correction_bias: Tensor names, None if the model has none.
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


def _find_model(files: CheckpointFiles) -> tuple[str, ModelType]:
    """The model type's name in config.json, and its row of the table."""
    model_type = files.config.get("model_type")
    config_path = files.path / "config.json"
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"{config_path} must hold model_type, got {shown(model_type)}; take config.json from the model's publisher"
        )
    if model_type not in MODEL_TYPES:
        raise CheckpointError(f"{config_path}: {unknown_model_message(model_type)}")
    return model_type, MODEL_TYPES[model_type]


def moe_layer_indices(files: CheckpointFiles) -> tuple[int, ...]:
    """The layers with experts, ascending."""
    _, model = _find_model(files)
    with config_errors(files):
        return tuple(sorted(model.moe_layers(files.config, count_layers(files.config))))


def list_layer(
    files: CheckpointFiles, layer: int, num_local_experts: int | None = None, ep_rank: int = 0
) -> LayerManifest:
    """Finds the tensors of a layer, of which only this rank's shards are opened; arguments as in `load_experts`.

    Raises ArgumentError if one is not an integer, or the rank's experts are not experts of the layer.
    """
    for argument, value in (("layer", layer), ("num_local_experts", num_local_experts), ("ep_rank", ep_rank)):
        if type(value) is not int and not (value is None and argument == "num_local_experts"):
            raise ArgumentError(f"{argument} must be an integer, got {shown(value)}; pass one")
    model_type, model = _find_model(files)
    _check_has_experts(files, layer)
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
    # Names of the tensors with all experts; None if each expert has its own.
    known = (fused for fused in model.fused if f"{root}{fused.w13[0]}" in files.file_of)
    fused = next(known, model.fused[-1] if model.projections is None else None)
    storage = _storage_format(files, model, sizes, root, experts, fused)
    fused = model.fused[-1] if fused is None and storage.is_fused else fused
    headers: dict[str, TensorHeader] = {}
    parts = []
    # Expert by expert, so that the first missing tensor stops it.
    for expert in experts:
        with config_errors(files):
            listed = list(_list_parts(model, sizes, storage, root, expert, fused))
        parts.append(tuple(part for part in listed if part.tensor.required or part.name in files.file_of))
        for part in parts[-1]:
            if part.name not in headers:
                headers[part.name] = _check_header(files, sizes, storage.name, part.name, part.tensor)
    router_weight = f"{router_root}weight"
    router_bias = f"{router_root}bias" if model.has_bias else None
    own_biases = _bias_names((model,), layer_root, root) if router.has_correction_bias else []
    # If there is none, checking headers reports the usual name as missing.
    correction_bias = next((name for name in own_biases if name in files.file_of), next(iter(own_biases), None))
    bias_shape = (sizes.num_experts,)
    router_shapes: dict[str, tuple[tuple[int, ...], ...]] = {router_weight: ((*bias_shape, sizes.hidden_size),)}
    if router_bias is not None:
        router_shapes[router_bias] = (bias_shape,)
    if correction_bias is not None:
        router_shapes[correction_bias] = (bias_shape, (1, *bias_shape))
    for name, shapes in router_shapes.items():
        _check_header(files, sizes, storage.name, name, StoredTensor("", shapes, FLOATS))
    shared = _find_shared(files, layer_root)
    # Types with equal experts differ in these, and confusing them would give wrong numbers.
    others = [name for module, name in shared.items() if module not in model.shared_experts]
    others += [
        name
        for name in sorted(_bias_names(MODEL_TYPES.values(), layer_root, root))
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
            **sizes._asdict(),
            top_k=router.top_k,
            activation=activation,
            has_bias=model.has_bias,
            apply_router_weight_on_input=router.apply_router_weight_on_input,
            quant=storage.scheme,
            dtype=_dtype(files, storage, headers, router_weight),
            num_local_experts=len(experts),
        )
    return LayerManifest(model_type, problem, router, parts, router_weight, router_bias, correction_bias, bool(shared))


def _check_has_experts(files: CheckpointFiles, layer: int) -> None:
    model_type, model = _find_model(files)
    moe_layers = moe_layer_indices(files)
    listed = one_line(", ".join(index_ranges(moe_layers)) or "none", 200)
    num_layers = count_layers(files.config)
    if not 0 <= layer < num_layers:
        raise CheckpointError(
            f"layer must be in 0..{num_layers - 1} for {str(files.path)!r}, got {layer}; its layers with experts are "
            f"{listed}"
        )
    if layer not in moe_layers:
        raise CheckpointError(
            f"layer {layer} of {str(files.path)!r} is dense, but a layer with experts is needed; those are {listed}"
        )
    with config_errors(files):
        reason = model.unsupported_reason(files.config, layer)
    if reason is not None:
        raise CheckpointError(
            f"layer {layer} of {str(files.path)!r}, model type {model_type!r}, is not read: {reason}; {BY_HAND}"
        )


def _local_experts(num_experts: int, num_local_experts: int | None, ep_rank: int) -> range:
    count = num_experts if num_local_experts is None else num_local_experts
    first = ep_rank * count
    if count < 1 or ep_rank < 0 or first + count > num_experts:
        raise ArgumentError(
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


def _bias_names(models: Iterable[ModelType], layer_root: str, root: str) -> list[str]:
    names = [f"{root}{name}" for model in models for name in model.correction_biases]
    outer = [model.outer_correction_bias for model in models]
    return names + [f"{layer_root}{name}" for name in outer if name is not None]


def _list_parts(
    model: ModelType, sizes: LayerSizes, storage: StorageFormat, root: str, expert: int, fused: FusedNames | None
) -> Iterator[ExpertPart]:
    """Lists the parts of one expert in a storage format; other arguments as for `_list_projections`."""
    for matrix, half, projection in _list_projections(model, sizes, root, expert, fused):
        biases = [StoredTensor("_bias", ((projection.rows,),), FLOATS, "bias")] if model.has_bias else []
        for tensor in (*storage.tensors(projection), *biases):
            name = f"{projection.module}{tensor.suffix}"
            if fused is None:
                yield ExpertPart(name, tensor, matrix, half)
            elif fused.is_flat:  # Gate, up and down, each [E*I,H].
                shape = (sizes.num_experts * sizes.intermediate_size, sizes.hidden_size)
                convert = as_is if matrix == "w13" else torch.t
                flat = dataclasses.replace(tensor, shapes=(shape,), convert=convert)
                yield ExpertPart(name, flat, matrix, half, expert, num_rows=sizes.intermediate_size)
            else:
                every = dataclasses.replace(tensor, shapes=tuple((sizes.num_experts, *some) for some in tensor.shapes))
                is_interleaved = model.is_interleaved and matrix == "w13"
                yield ExpertPart(name, every, matrix, half, expert, is_interleaved=is_interleaved)


def _find_shared(files: CheckpointFiles, layer_root: str) -> dict[str, str]:
    """The layer's modules of shared experts, each with its first tensor."""
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
    projections = (some for expert in experts for some in _list_projections(model, sizes, root, expert, fused))
    storage = quantized_format(files, list(dict.fromkeys(projection.module for _, _, projection in projections)))
    if storage is None:
        is_transposed = model.is_transposed
        if is_transposed is None:
            is_transposed = fused is not None and _is_transposed(files, sizes, root, fused)
        return unquantized_format(fused is not None, is_transposed)
    is_flat = fused is not None and fused.is_flat
    if model.projections is None and (is_flat or not storage.is_fused):
        known = f"unquantized{'' if is_flat else ' or in mxfp4'}"
        raise CheckpointError(
            f"{files.path / 'config.json'}: experts of model type {files.config.get('model_type')!r} are read {known}, "
            f"got {storage.name}; use a release that is {known}"
        )
    return storage


def _is_transposed(files: CheckpointFiles, sizes: LayerSizes, root: str, fused: FusedNames) -> bool:
    """Whether fused tensors are stored transposed. No sizes make both w13's and w2's shapes ambiguous."""
    columns = (2 * sizes.intermediate_size, sizes.hidden_size)
    shapes = {fused.w13[0]: (sizes.hidden_size, columns[0]), fused.w2: (sizes.intermediate_size, columns[1])}
    return all(files.header(f"{root}{name}").shape == (sizes.num_experts, *shape) for name, shape in shapes.items())


def _check_header(
    files: CheckpointFiles, sizes: LayerSizes, storage_name: str, name: str, tensor: StoredTensor
) -> TensorHeader:
    header = files.header(name)
    shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
    if header.shape not in tensor.shapes:
        raise CheckpointError(
            f"{name} must be {shapes} where config.json says E={sizes.num_experts}, H={sizes.hidden_size}, "
            f"I={sizes.intermediate_size} and {storage_name} experts, got {list(header.shape)} in "
            f"{files.path / header.file}; use the config.json that belongs to these tensors"
        )
    if header.dtype not in tensor.dtypes:
        raise CheckpointError(
            f"{name} must be {' or '.join(tensor.dtypes)} where the checkpoint's config says {storage_name} "
            f"experts, got {header.dtype} in {files.path / header.file}; use the config.json that belongs to these "
            "tensors"
        )
    return header


def _check_nothing_else(
    files: CheckpointFiles, storage: StorageFormat, experts_root: str, experts: range, read: Container[str]
) -> None:
    """Checks that all of the experts' tensors are read. An unread one means that the format was misunderstood."""
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
    """The dtype of unquantized weights, or for quantized ones the dtype that the model runs in."""
    if storage.scheme.weight is not None:
        # transformers writes `dtype` since version 5, `torch_dtype` before.
        named = files.config.get("dtype") or files.config.get("torch_dtype")
        return str(named) if is_one_of(named, _DTYPES.values()) else _DTYPES[files.header(router).dtype]
    (first_name, first), *others = headers.items()
    for name, header in others:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"the experts of a layer must have one dtype, got {first.dtype} for {first_name} in {first.file} and "
                f"{header.dtype} for {name} in {header.file} of {str(files.path)!r}; save the checkpoint in one dtype"
            )
    return _DTYPES[first.dtype]

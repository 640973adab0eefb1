"""The manifest of a layer: finds its experts' parts and checks their headers against config.json.

Reads no tensor data. What cannot be read as the layer is a CheckpointError that says why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from moereg.checkpoints._files import ONE_EXPORT, CheckpointFiles, TensorHeader, config_errors
from moereg.checkpoints._formats import (
    FLOATS,
    UNQUANTIZED,
    WEIGHT_NAMES,
    Projection,
    StorageFormat,
    StoredTensor,
)
from moereg.checkpoints._models import LAYERS, MODEL_TYPES, ExpertNames, ModelType, count_layers
from moereg.checkpoints._quantization import quantized_format
from moereg.errors import ArgumentError, CheckpointError, index_ranges, one_line, shown
from moereg.routing import BY_HAND, RouterSpec, unknown_model_message
from moereg.routing.config_entries import is_one_of, read_count, read_object
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import tensor_name
from moereg.weights.checks import check_scale
from moereg.weights.layouts import deinterleave_gate_up

# A module of shared experts, inside the block or next to it.
_SHARED: Final = re.compile(r"(?:^|\.)(shared?_(?:expert|mlp)\w*)")
# An expert's index in a tensor's name.
_INDEX: Final = re.compile("[0-9]{1,9}")
# Names of one expert's projections, of whichever type: as most publishers call them, and as tools that divide fused
# experts do (llm-compressor).
_DIVIDED: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
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
        is_transposed: Whether a matrix is stored as [in,out].
    """

    name: str
    tensor: StoredTensor
    matrix: str
    half: int | None = None
    row: int | None = None
    num_rows: int | None = None
    is_interleaved: bool = False
    is_transposed: bool = False

    @property
    def field(self) -> str | None:
        """Its field of `ExpertWeights`; None if the tensor is only checked."""
        return None if self.tensor.role is None else tensor_name(self.matrix, self.tensor.role)

    def copy_to(self, fields: Mapping[str, torch.Tensor], expert: int, stored: torch.Tensor) -> None:
        """Converts a stored tensor, or its row, and writes it into the local expert's slice of its canonical field.

        Raises ArgumentError if its values contradict its format.
        """
        canonical = self.tensor.convert(stored.mT if self.is_transposed else stored)
        if self.field is None:
            return
        if self.tensor.role in ("scale", "scale_2", "activation_scale") and self.tensor.required:
            # Checked while every part is on the CPU and gate and up are still separate.
            is_input = self.tensor.role == "activation_scale"
            instead = "the largest of the layer's experts in its place" if is_input else "a finite one"
            check_scale(self.field, canonical, f"export the checkpoint with {instead}")
        rows = fields[self.field][expert]
        if self.is_interleaved and canonical.dim():
            deinterleave_gate_up(canonical, out=rows, dim=0)
        elif self.half is None or not rows.dim():
            # Gate and up share an input, which gets the larger scale, so that neither saturates; 0 stands for none.
            canonical = canonical.to(rows)
            if self.half:
                canonical = torch.where((rows > 0) & (canonical > 0), torch.maximum(rows, canonical), 0)
            rows.copy_(canonical)
        else:
            rows.chunk(2)[self.half].copy_(canonical)


def _expert_names(files: CheckpointFiles, model: ModelType, root: str, expert: int) -> ExpertNames:
    """The names under which the expert has a weight, else the publisher's.

    `root` is the prefix of the block's names, including the dot.
    """
    usual = (model.projections or _DIVIDED[0], *(_DIVIDED if model.has_gate else ()))
    known = [ExpertNames(tuple(f"experts.{name}" for name in some[:-1]), f"experts.{some[-1]}") for some in usual]
    # Of alternating gate and up rows it is not known whether a tool that divides experts keeps them.
    known += [some for some in model.fused if "." in some.w2 and not (some.is_interleaved and len(some.w13) == 1)]
    single = [names.divided() for names in known]
    weight = StoredTensor(WEIGHT_NAMES, (), ())
    for names in (*model.fused, *single):
        module = f"{root}{names.w13[0].format(expert)}"
        found = next((name for name in weight.full_names(module, names.is_fused) if name in files.file_of), None)
        if found is not None:
            return dataclasses.replace(names, is_parameter=not found.startswith(f"{module}."))
    return model.fused[-1] if model.projections is None else single[0]


@dataclasses.dataclass
class _Experts:
    """Lists the parts of a layer's experts.

    Attributes:
        root: Prefix of the block's names, including the dot.
        storage: How they are stored.
        is_transposed: Whether fused matrices are stored as [E,in,out].
    """

    files: CheckpointFiles
    model: ModelType
    sizes: LayerSizes
    root: str
    names: ExpertNames
    storage: StorageFormat = UNQUANTIZED
    is_transposed: bool = False

    def projections(self, expert: int) -> Iterator[tuple[str, Projection]]:
        """The projections of a (global) expert, each with its matrix."""
        names, sizes = self.names, self.sizes
        parts = ("gate", "up") if len(names.w13) == 2 else ("gate_up",) if self.model.has_gate else (None,)
        rows = sizes.intermediate_size * (2 if parts == ("gate_up",) else 1)
        for part, name in zip(parts, names.w13, strict=True):
            yield "w13", Projection(f"{self.root}{name.format(expert)}", rows, sizes.hidden_size, part)
        yield "w2", Projection(f"{self.root}{names.w2.format(expert)}", sizes.hidden_size, sizes.intermediate_size)

    def set_storage(self, experts: range) -> None:
        """Finds out how the experts are stored."""
        projections = (projection for expert in experts for _, projection in self.projections(expert))
        modules = list(dict.fromkeys(projection.module for projection in projections))
        self.storage = storage = quantized_format(self.files, modules) or UNQUANTIZED
        fmt, names = storage.scheme.weight, self.names
        if fmt is not None and (names.is_flat or (names.is_fused and names.is_interleaved and fmt.group[0] > 1)):
            reason = "are stored flat" if names.is_flat else "have alternating gate and up rows, which blocks would mix"
            raise CheckpointError(
                f"{self.files.path / 'config.json'}: fused experts of model type "
                f"{self.files.config.get('model_type')!r} {reason}, so they cannot be stored as {storage.name}; use a "
                f"release with a tensor per expert, or {BY_HAND}"
            )
        if not names.is_fused or names.is_flat:
            return
        # No sizes make both w13's and w2's shapes ambiguous.
        fits = []
        with config_errors(self.files):
            first = list(self._stored(experts[0]))
        for part in first:
            if part.tensor.role == "weight" and part.name in self.files.file_of:
                shape = self.files.header(part.name).shape[1:]
                fits.append((shape in part.tensor.shapes, shape[::-1] in part.tensor.shapes))
        self.is_transposed = not all(fit for fit, _ in fits) and all(fit for _, fit in fits)

    def parts(self, expert: int) -> Iterator[ExpertPart]:
        """The parts of a (global) expert; those that need not exist do."""
        num_experts, size = self.sizes.num_experts, self.sizes.intermediate_size
        for part in self._stored(expert):
            if not part.tensor.required and part.name not in self.files.file_of:
                continue
            if self.names.is_flat:  # Gate, up and down, each [E*I,H].
                tensor = dataclasses.replace(part.tensor, shapes=((num_experts * size, self.sizes.hidden_size),))
                is_down = part.matrix == "w2"
                yield dataclasses.replace(part, tensor=tensor, row=expert, num_rows=size, is_transposed=is_down)
            elif self.names.is_fused:
                yield self._row(part, expert)
            else:
                yield part

    def _stored(self, expert: int) -> Iterator[ExpertPart]:
        """As if each expert had its own tensors."""
        for matrix, projection in self.projections(expert):
            tensors = list(self.storage.tensors(projection))
            bias = StoredTensor(("bias",), ((projection.rows,),), FLOATS, "bias")
            if self.model.has_bias:
                tensors.append(bias)
            elif self.storage is not UNQUANTIZED:
                # Tools that quantize write zeros for modules without a bias.
                tensors.append(dataclasses.replace(bias, role=None, convert=_check_no_bias, required=False))
            for tensor in tensors:
                yield _find_part(self.files, projection, tensor, matrix, self.names.is_parameter)

    def _row(self, part: ExpertPart, expert: int) -> ExpertPart:
        """The part as a row of a tensor with all experts, whose matrices may be transposed."""
        shapes = tuple((self.sizes.num_experts, *shape) for shape in part.tensor.shapes)
        mirrored = tuple((shape[0], *shape[:0:-1]) for shape in shapes if len(shape) == 3)
        is_transposed = False
        if self.is_transposed and mirrored:
            is_transposed = part.name in self.files.file_of and self.files.header(part.name).shape in mirrored
            # Scales of rows may stay as they were.
            shapes = mirrored if part.tensor.role == "weight" else (*mirrored, *shapes)
        row: int | None = expert
        if () in part.tensor.shapes and part.name in self.files.file_of:
            # A number may be all experts', as of ModelOpt's input quantizers.
            shape = self.files.header(part.name).shape
            if shape in part.tensor.shapes and shape not in shapes:
                row, shapes = None, part.tensor.shapes
        tensor = dataclasses.replace(part.tensor, shapes=tuple(dict.fromkeys(shapes)))
        is_interleaved = self.names.is_interleaved and part.matrix == "w13" and len(self.names.w13) == 1
        return dataclasses.replace(
            part, tensor=tensor, row=row, is_interleaved=is_interleaved, is_transposed=is_transposed
        )


def _find_part(
    files: CheckpointFiles, projection: Projection, tensor: StoredTensor, matrix: str, is_parameter: bool = False
) -> ExpertPart:
    """The part under the first of its names that exists, else under one that others like it have, for the error."""
    names = list(tensor.full_names(projection.module, is_parameter))
    name = next((name for name in names if name in files.file_of), None)
    if name is None and tensor.required:
        endings = [name.removeprefix(projection.module) for name in names if name != projection.module]
        used = [ending for ending in endings if any(other.endswith(ending) for other in files.file_of)]
        name = f"{projection.module}{max(used, key=len)}" if used else None
    return ExpertPart(name or names[0], tensor, matrix, projection.half)


@dataclasses.dataclass(frozen=True)
class LayerManifest:
    """A layer whose tensors all exist, in one dtype and with config.json's sizes.

    Attributes:
        model_type: The type in config.json.
        problem: The layer, with the scheme and dtype of the stored tensors.
        router: How it routes.
        parts: Parts to read, by local expert.
        router_parts: Parts of the router's weight, as if of one expert's w2.
        router_format: How that is stored.
        router_hidden_size: Columns of the router's weight.
        routing: Names of the router's other tensors: of those of a `CheckpointLayer`, and of `router_scale` and
            `input_norm`, whose quotient is part of its weight.
        has_shared_experts: Whether the layer has experts that take every token.
        note: What the layer's user should know about its format.
    """

    model_type: str
    problem: MoEProblem
    router: RouterSpec
    parts: Sequence[tuple[ExpertPart, ...]]
    router_parts: tuple[ExpertPart, ...]
    router_format: StorageFormat
    router_hidden_size: int
    routing: Mapping[str, str]
    has_shared_experts: bool
    note: str | None


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
        table: tuple[int, ...] = ()
        if model.expert_table(files.config, layer):
            router = dataclasses.replace(router, has_correction_bias=False)
            table = (read_count(files.config, "vocab_size"), router.top_k)
        hidden_size = read_count(files.config, "hidden_size", "d_model")
        sizes = LayerSizes(
            router.num_experts,
            read_count(files.config, "moe_latent_size", "routed_expert_hidden_size", default=hidden_size),
            read_count({**files.config, **read_object(files.config, "ffn_config")}, model.intermediate_size),
        )
        activation = model.activation(files.config)
    experts = _local_experts(sizes.num_experts, num_local_experts, ep_rank)
    layer_root, root, router_root = _find_block(files, model, layer)
    found = _Experts(files, model, sizes, root, _expert_names(files, model, root, experts[0]))
    found.set_storage(experts)
    storage = found.storage
    headers: dict[str, TensorHeader] = {}
    parts = []
    # Expert by expert, so that the first missing tensor stops it.
    for expert in experts:
        with config_errors(files):
            parts.append(tuple(found.parts(expert)))
        for part in parts[-1]:
            if part.name not in headers:
                headers[part.name] = _check_header(files, sizes, storage.name, part)
    outer = sizes._replace(hidden_size=hidden_size)
    router_format, router_parts = _list_router(files, outer, router_root.removesuffix("."))
    own_biases = _bias_names((model,), layer_root, root) if router.has_correction_bias else []
    routing = {field: f"{root}{name}" for field, name in model.routing.items()}
    if model.has_bias:
        routing["router_bias"] = f"{router_root}bias"
    if table:
        routing["expert_table"] = f"{router_root}tid2eid"
    if own_biases:
        # If there is none, checking headers reports the usual name as missing.
        routing["correction_bias"] = next((name for name in own_biases if name in files.file_of), own_biases[0])
    special = {"expert_table": table, "router_scale": (hidden_size,), "input_norm": (hidden_size,)}
    router_tensors = list(router_parts)
    for field, name in routing.items():
        shape = special.get(field, (sizes.num_experts,))
        dtypes = ("I64", "I32") if field == "expert_table" else FLOATS
        router_tensors.append(ExpertPart(name, StoredTensor((), (shape, (1, *shape)), dtypes), "router"))
    router_headers = {part.name: _check_header(files, outer, router_format.name, part) for part in router_tensors}
    shared = _find_shared(files, layer_root)
    # Types with equal experts differ in these, and confusing them would give wrong numbers.
    others = [name for module, name in shared.items() if module not in model.shared_experts]
    others += [
        name
        for name in sorted(_bias_names(MODEL_TYPES.values(), layer_root, root))
        if name in files.file_of and name not in (*own_biases, *routing.values())
    ]
    if others:
        raise CheckpointError(
            f"layers of model type {model_type!r} have no tensor such as {shown(others[0])}, got one in "
            f"{files.path / files.file_of[others[0]]}; {ONE_EXPORT}"
        )
    lacking = [module for module in model.shared_experts if module.endswith("_gate") and module not in shared]
    if shared and lacking:
        raise CheckpointError(
            f"layers of model type {model_type!r} have {lacking[0]} beside their shared experts, got none with "
            f"{shown(next(iter(shared.values())))}; {ONE_EXPORT}"
        )
    own = (f"{root}experts.", *(f"{root}{name}" for name in (*found.names.w13, found.names.w2) if found.names.is_fused))
    _check_nothing_else(files, storage, own, experts, {*headers, *router_headers})
    with config_errors(files):
        problem = MoEProblem(
            **sizes._asdict(),
            top_k=router.top_k,
            activation=activation,
            has_bias=model.has_bias,
            apply_router_weight_on_input=router.apply_router_weight_on_input,
            quant=storage.scheme,
            dtype=_dtype(files, storage, headers, router_headers),
            num_local_experts=len(experts),
        )
    rest = (hidden_size, routing, bool(shared), storage.note)
    return LayerManifest(model_type, problem, router, parts, router_parts, router_format, *rest)


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
        for layers in LAYERS
        for block in model.blocks
        for router in model.routers
    ]
    for layer_root, root, router in roots:
        if any(f"{root}{router}.{name}" in files.file_of for name in WEIGHT_NAMES):
            return layer_root, root, f"{root}{router}."
    _, root, router = roots[0]
    raise CheckpointError(
        f"the router of layer {layer} is missing from {str(files.path)!r}, expected {root}{router}.weight; {ONE_EXPORT}"
    )


def _list_router(
    files: CheckpointFiles, sizes: LayerSizes, module: str
) -> tuple[StorageFormat, tuple[ExpertPart, ...]]:
    """The router's format and the parts of its weight. GPTQ and others that quantize every module quantize it too."""
    weight = f"{module}.weight"
    is_quantized = weight not in files.file_of or files.header(weight).dtype not in FLOATS
    storage = (quantized_format(files, [module]) if is_quantized else None) or UNQUANTIZED
    projection = Projection(module, sizes.num_experts, sizes.hidden_size)
    with config_errors(files):
        tensors = storage.tensors(projection)
    parts = (_find_part(files, projection, tensor, "w2") for tensor in tensors)
    return storage, tuple(part for part in parts if part.tensor.required or part.name in files.file_of)


def _bias_names(models: Iterable[ModelType], layer_root: str, root: str) -> list[str]:
    names = [f"{root}{name}" for model in models for name in model.correction_biases]
    outer = [model.outer_correction_bias for model in models]
    return names + [f"{layer_root}{name}" for name in outer if name is not None]


def _find_shared(files: CheckpointFiles, layer_root: str) -> dict[str, str]:
    """The layer's modules of shared experts, each with its first tensor."""
    found: dict[str, str] = {}
    for name in files.file_of:
        if name.startswith(layer_root) and (module := _SHARED.search(name.removeprefix(layer_root))):
            found.setdefault(module[1], name)
    return found


def _check_header(files: CheckpointFiles, sizes: LayerSizes, storage_name: str, part: ExpertPart) -> TensorHeader:
    name, tensor = part.name, part.tensor
    header = files.header(name)
    shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
    if header.shape not in tensor.shapes:
        raise CheckpointError(
            f"{name} must be {shapes} where config.json says E={sizes.num_experts}, H={sizes.hidden_size}, "
            f"I={sizes.intermediate_size} and {storage_name} experts, got {list(header.shape)} in "
            f"{files.path / header.file}; {ONE_EXPORT}"
        )
    if header.dtype not in tensor.dtypes:
        raise CheckpointError(
            f"{name} must be {' or '.join(tensor.dtypes)} where the checkpoint's config says {storage_name} "
            f"experts, got {header.dtype} in {files.path / header.file}; "
            f"{ONE_EXPORT}"
        )
    return header


def _check_no_bias(stored: torch.Tensor) -> torch.Tensor:
    if stored.any():
        raise CheckpointError(
            f"experts of this model have no bias, got one of up to {float(stored.abs().max()):.3g}; {ONE_EXPORT}"
        )
    return stored


def _check_nothing_else(
    files: CheckpointFiles, storage: StorageFormat, roots: tuple[str, ...], experts: range, read: Container[str]
) -> None:
    """Checks that all of the experts' tensors are read. An unread one means that the format was misunderstood."""
    for name, file in files.file_of.items():
        if not name.startswith(roots) or name in read:
            continue
        index = next((part for part in name.removeprefix(roots[0]).split(".") if _INDEX.fullmatch(part)), None)
        if index is None or int(index) in experts:
            raise CheckpointError(
                f"{storage.name} experts have no tensor such as {shown(name)}, got one in {files.path / file}; "
                f"{ONE_EXPORT}"
            )


def _dtype(
    files: CheckpointFiles,
    storage: StorageFormat,
    headers: Mapping[str, TensorHeader],
    router_headers: Mapping[str, TensorHeader],
) -> str:
    """The dtype of unquantized weights, or for quantized ones the dtype that the model runs in."""
    if storage.scheme.weight is not None:
        # transformers writes `dtype` since version 5, `torch_dtype` before.
        named = files.config.get("dtype") or files.config.get("torch_dtype")
        dtypes = (_DTYPES.get(header.dtype) for header in router_headers.values())
        return str(named) if is_one_of(named, _DTYPES.values()) else next(filter(None, dtypes), "bfloat16")
    (first_name, first), *others = headers.items()
    for name, header in others:
        if header.dtype != first.dtype:
            raise CheckpointError(
                f"the experts of a layer must have one dtype, got {first.dtype} for {first_name} in {first.file} and "
                f"{header.dtype} for {name} in {header.file} of {str(files.path)!r}; save the checkpoint in one dtype"
            )
    return _DTYPES[first.dtype]

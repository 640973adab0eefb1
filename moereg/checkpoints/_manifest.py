"""The manifest of a layer: its stored tensors, found and checked against config.json by their headers.

No tensor data is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Mapping, Sequence
from typing import Final

from moereg.checkpoints._files import CheckpointFiles, TensorHeader, config_errors
from moereg.checkpoints._formats import FLOATS, StorageFormat, unquantized_format
from moereg.checkpoints._models import ModelType
from moereg.checkpoints._moe_layers import check_has_experts, find_model
from moereg.checkpoints._parts import ExpertPart, LayerSizes, list_modules, list_parts
from moereg.checkpoints._quantization import quantized_format
from moereg.config_entries import is_one_of, read_count
from moereg.errors import ArgumentError, CheckpointError, shown
from moereg.problem import MoEProblem
from moereg.routing import RouterSpec

__all__ = ["LayerManifest", "list_layer"]

# Prefixes of `layers.`: in language models, in old and new multimodal ones, and in models saved without a head.
_PREFIXES: Final = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
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
    """

    model_type: str
    problem: MoEProblem
    router: RouterSpec
    parts: Sequence[tuple[ExpertPart, ...]]
    router_weight: str
    router_bias: str | None
    correction_bias: str | None


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
            read_count(files.config, "hidden_size"),
            read_count(files.config, model.intermediate_size),
        )
        activation = model.activation(files.config)
    experts = _local_experts(sizes.num_experts, num_local_experts, ep_rank)
    root = _find_block(files, model, layer)
    experts_root = f"{root}experts."
    storage = _storage_format(files, model, experts_root, experts)
    headers: dict[str, TensorHeader] = {}
    parts = []
    # One expert after the other, so that the first missing tensor ends it.
    for expert in experts:
        with config_errors(files):
            listed = list(list_parts(model, sizes, storage, experts_root, expert))
        parts.append(tuple(part for part in listed if part.required or part.name in files.file_of))
        for part in parts[-1]:
            if part.name not in headers:
                headers[part.name] = _check_header(files, sizes, storage.name, part)
    _check_nothing_else(files, storage, experts_root, experts, headers)

    router_root = f"{root}{model.router}."
    router_weight = f"{router_root}weight"
    router_bias = f"{router_root}bias" if model.has_bias else None
    correction_bias = f"{router_root}e_score_correction_bias" if router.has_correction_bias else None
    bias_shape = (sizes.num_experts,)
    router_shapes: dict[str, tuple[int, ...]] = {router_weight: (*bias_shape, sizes.hidden_size)}
    router_shapes.update({name: bias_shape for name in (router_bias, correction_bias) if name is not None})
    for name, shape in router_shapes.items():
        _check_header(files, sizes, storage.name, ExpertPart(name, (shape,), FLOATS))
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
    return LayerManifest(model_type, problem, router, parts, router_weight, router_bias, correction_bias)


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


def _find_block(files: CheckpointFiles, model: ModelType, layer: int) -> str:
    """Prefix of the names of the layer's router and experts, up to and with a dot."""
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
    storage = quantized_format(files, list_modules(model, experts_root, experts, is_fused))
    if storage is None:
        return unquantized_format(is_fused, model.is_transposed)
    if model.projections is None and not storage.is_fused:
        raise CheckpointError(
            f"{files.path / 'config.json'}: experts of model type {files.config.get('model_type')!r} are read fused, "
            f"which {storage.name} is not; use a release in mxfp4 or bfloat16"
        )
    return storage


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

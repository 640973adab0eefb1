"""Writes a copy of a checkpoint with quantized routed experts, in compressed-tensors' layout."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from moereg.checkpoints._compressed_write import (
    projection_rows,
    quantization_config,
    quantize_as_stored,
    storage_of,
    stored_tensors,
)
from moereg.checkpoints._files import INDEX, SINGLE, CheckpointFiles
from moereg.checkpoints._layer import CheckpointLayer
from moereg.checkpoints._load import load_experts
from moereg.checkpoints._manifest import (
    LayerManifest,
    find_model,
    list_layer,
    list_projections,
    moe_layer_indices,
)
from moereg.errors import CheckpointError, shown
from moereg.numerics.reference import calibrate_activation_scales
from moereg.runtime.memory import format_bytes
from moereg.spec.quant_schemes import QuantScheme, get_scheme
from moereg.weights.permuted import ExpertWeights

_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
_WRITTEN: Final = (INDEX, "config.json")
# Bytes per file of experts, all of which are in memory at once.
_SHARD_BYTES: Final = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written.

    Attributes:
        path: The directory.
        quant: The scheme of the experts.
        layers: Layers whose experts were quantized; others are unchanged.
        num_bytes: Size of all its files.
    """

    path: Path
    quant: QuantScheme
    layers: tuple[int, ...]
    num_bytes: int


def quantize_layer(
    layer: CheckpointLayer, scheme: QuantScheme, hidden_states: torch.Tensor | None = None
) -> ExpertWeights:
    """Quantizes a layer to the weights that `save_quantized` writes.

    Args:
        layer: The unquantized layer.
        scheme: The scheme to quantize to.
        hidden_states: [T,H] in the problem's dtype, real inputs of the layer for calibrating activation scales, if the
            scheme stores them.

    Raises:
        ValueError: The layer is already quantized or not finite, or inputs are needed but missing.
    """
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    if _needs_inputs(scheme) and hidden_states is not None:
        scales = calibrate_activation_scales(
            layer.problem, layer.weights, hidden_states, *layer.route(hidden_states), scheme
        )
    return quantize_as_stored(layer.weights, scheme, layer.problem.torch_dtype, *scales)


def check_can_save(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    quant: str | QuantScheme,
    layers: Sequence[int] | None = None,
    hidden_states: Mapping[int, torch.Tensor] | None = None,
) -> tuple[int, ...]:
    """Checks everything that `save_quantized` needs, without reading or writing tensor data.

    Returns:
        The layers whose experts would be quantized.

    Raises:
        CheckpointError, ValueError: As in `save_quantized`.
    """
    with CheckpointFiles(path) as files:
        return tuple(_checked_copy(files, Path(out), get_scheme(quant), layers, hidden_states or {}).manifests)


def save_quantized(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    quant: str | QuantScheme,
    layers: Sequence[int] | None = None,
    hidden_states: Mapping[int, torch.Tensor] | None = None,
    *,
    device: str | torch.device = "cpu",
    progress: Callable[[int, int], object] | None = None,
) -> SavedCheckpoint:
    """Copies a checkpoint and quantizes its routed experts, layer by layer, in compressed-tensors' layout.

    Everything else (attention, shared experts, routers, tokenizer) is copied unchanged. The directory gets its name
    once it is complete. One layer and its quantized copy are in memory at a time.

    Args:
        path: An unquantized checkpoint, as `load_experts` takes it.
        out: Directory to write, which must not exist or be empty.
        quant: Scheme, by name or value.
        layers: Indices of the layers to quantize; None means all with experts.
        hidden_states: Real inputs [T,H] by layer. Only needed if the scheme stores activation scales
            (`fp8_tensor_static`, `nvfp4`, `int4_w4a8_g128`).
        device: Device to quantize on.
        progress: Called after each layer with the number done and the total.

    Returns:
        A summary of the written checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be read, is already quantized or cannot be stored in that layout, or the
            disk is full.
        ValueError: The weights are not finite.
    """
    scheme = get_scheme(quant)
    with CheckpointFiles(path) as files:
        copy = _checked_copy(files, Path(out), scheme, layers, hidden_states or {})
        try:
            copy.out.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=f".{copy.out.name}.", dir=copy.out.parent) as folder:
                partial = Path(folder) / "checkpoint"
                partial.mkdir()
                copy.write(partial, device, progress or (lambda done, total: None))
                num_bytes = sum(file.stat().st_size for file in partial.iterdir())
                if copy.out.is_dir():
                    copy.out.rmdir()
                partial.rename(copy.out)
        except (OSError, SafetensorError) as error:
            raise _unwritable(copy.out, error) from error
    return SavedCheckpoint(copy.out, scheme, tuple(copy.manifests), num_bytes)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A checked plan to copy a checkpoint.

    Attributes:
        config: `quantization_config`.
        manifests: By layer to quantize.
        hidden_states: By layer.
        others: Names of the files without weights, which are copied.
    """

    files: CheckpointFiles
    out: Path
    scheme: QuantScheme
    config: Mapping[str, Any]
    manifests: Mapping[int, LayerManifest]
    hidden_states: Mapping[int, torch.Tensor]
    others: Sequence[str]

    def write(self, folder: Path, device: str | torch.device, progress: Callable[[int, int], object]) -> None:
        """Writes all files."""
        weight_map: dict[str, str] = {}
        replaced = {part.name for manifest in self.manifests.values() for parts in manifest.parts for part in parts}
        by_file: dict[str, list[str]] = {}
        for name, file in self.files.file_of.items():
            by_file.setdefault(file, []).append(name)
        # If model.safetensors exists, transformers reads only that and ignores the index.
        written = {file: _free_name("rest", by_file) if file == SINGLE else file for file in by_file}
        for file, names in by_file.items():
            kept = [name for name in names if name not in replaced]
            weight_map |= dict.fromkeys(kept, written[file])
            if len(kept) == len(names):
                shutil.copyfile(self.files.path / file, folder / written[file])
            elif kept:
                tensors = {name: self.files.read(name) for name in kept}
                save_file(tensors, folder / written[file], metadata={"format": "pt"})
        for done, layer in enumerate(self.manifests):
            for number, tensors in enumerate(self._shards(layer, device)):
                file = _free_name(f"experts-{layer:05}-{number:02}", written.values())
                weight_map |= dict.fromkeys(tensors, file)
                save_file(tensors, folder / file, metadata={"format": "pt"})
            progress(done + 1, len(self.manifests))
        for name in self.others:
            shutil.copyfile(self.files.path / name, folder / name)
        metadata = {"total_size": sum(_data_bytes(folder / file) for file in set(weight_map.values()))}
        _write_json(folder / INDEX, {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
        _write_json(folder / "config.json", {**self.files.full_config, "quantization_config": self.config})

    def _shards(self, layer: int, device: str | torch.device) -> Iterator[dict[str, torch.Tensor]]:
        """Yields a layer's stored tensors in pieces that fit into memory and a file."""
        loaded = load_experts(self.files.path, layer, device=device)
        dtype, manifest = loaded.problem.torch_dtype, self.manifests[layer]
        inputs = self.hidden_states.get(layer) if _needs_inputs(self.scheme) else None
        weights = quantize_layer(loaded, self.scheme, None if inputs is None else inputs.to(loaded.router_weight))
        del loaded
        storage, found, num_bytes = storage_of(self.config, self.scheme), dict[str, torch.Tensor](), 0
        for expert in range(weights.num_experts):
            for matrix, half, projection in list_projections(
                manifest.model, manifest.problem, manifest.root, expert, fused=None
            ):
                stored = stored_tensors(storage, projection, projection_rows(weights, expert, matrix, half), dtype)
                found |= stored
                num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
            if num_bytes >= _SHARD_BYTES:
                yield found
                found, num_bytes = {}, 0
        if found:
            yield found


def _checked_copy(
    files: CheckpointFiles,
    out: Path,
    scheme: QuantScheme,
    layers: Sequence[int] | None,
    hidden_states: Mapping[int, torch.Tensor],
) -> _Copy:
    """Checks everything that can be known before data is read."""
    out = out.expanduser()
    try:
        is_taken = out.exists() and not (out.is_dir() and not any(out.iterdir()))
        place = next(parent for parent in out.absolute().parents if parent.exists())
        # Permissions and file systems have too many rules to check, so try it.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=place):
            pass
    except OSError as error:
        raise _unwritable(out, error) from error
    if is_taken:
        raise CheckpointError(
            f"a checkpoint is written into a new or empty directory, got {str(out)!r}, which holds something; give "
            "another one"
        )
    if scheme.weight is None:
        raise CheckpointError(f"experts are quantized to a scheme with quantized weights, got {scheme.name}")
    if files.quantization is not None:
        raise CheckpointError(
            f"only unquantized checkpoints are quantized, got {str(files.path)!r}, whose config says "
            f"{shown(files.quantization[0].get('quant_method'))}: its other modules stay in that format, which "
            "compressed-tensors does not hold; start from the model's 16-bit release"
        )
    name, model = find_model(files)
    if model.projections is None or model.has_bias:
        raise CheckpointError(
            f"experts of model type {name!r} are released fused or with biases, which compressed-tensors' layout "
            "of an expert does not hold; quantize it with a tool of its own format"
        )
    chosen = sorted(set(moe_layer_indices(files) if layers is None else layers))
    if not chosen:
        raise CheckpointError(f"there must be a layer with experts to quantize, got none in {str(files.path)!r}")
    manifests = {layer: list_layer(files, layer) for layer in chosen}
    if needs := _needs_inputs(scheme):
        for layer in chosen:
            if layer not in hidden_states:
                raise CheckpointError(
                    f"{scheme.name} stores {needs}, which come from real inputs of each layer, got none for layer "
                    f"{layer}; give hidden states (--inputs), or take a scheme without them, such as one with "
                    "16-bit activations"
                )
    config = quantization_config(scheme, _targets(manifests, model.projections))
    storage = storage_of(config, scheme)
    for manifest in manifests.values():
        for _, _, projection in list_projections(model, manifest.problem, manifest.root, 0, fused=None):
            try:
                storage.tensors(projection)
            except CheckpointError as error:
                rule = str(error).partition(";")[0]
                raise CheckpointError(
                    f"{rule}; {scheme.name} does not fit this layer's sizes, so take a scheme with smaller groups "
                    "or with a scale for each row, such as int8_w8a16"
                ) from error
    # The source's size bounds that of the copy.
    num_bytes = sum(files.shard_path(file).stat().st_size for file in dict.fromkeys(files.file_of.values()))
    parent = next(parent for parent in out.absolute().parents if parent.is_dir())
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < num_bytes:
        raise CheckpointError(
            f"a disk needs as much room as the checkpoint to quantize has, {format_bytes(num_bytes)}, got "
            f"{format_bytes(free_bytes)} free in {str(parent)!r}; write to another disk"
        )
    copied = [name for name in files.names() if name not in _WRITTEN and not name.endswith(_WEIGHT_SUFFIXES)]
    others = [name for name in copied if files.find(name) is not None]
    return _Copy(files, out, scheme, config, manifests, hidden_states, others)


def _unwritable(out: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{out} must be writable, with room for the checkpoint, got: {error}; nothing is left of it")


def _needs_inputs(scheme: QuantScheme) -> str:
    """The activation scales that a checkpoint of a scheme stores, in words; empty if none."""
    fmt = scheme.activation
    if fmt is None or not (fmt.static or fmt.global_scale):
        return ""
    return "static scales of activations" if fmt.static else "global scales of activations"


def _targets(manifests: Mapping[int, LayerManifest], projections: Sequence[str]) -> list[str]:
    """One expression per location of experts within a layer."""
    layers: dict[str, list[int]] = {}
    for layer, manifest in manifests.items():
        layers.setdefault(manifest.root.partition(f"layers.{layer}.")[2], []).append(layer)
    names = "|".join(map(re.escape, projections))
    return [
        rf"re:.*layers\.({'|'.join(map(str, some))})\.{re.escape(f'{block}experts.')}\d+\.({names})$"
        for block, some in layers.items()
    ]


def _free_name(stem: str, taken: Collection[str]) -> str:
    """A file name that is not taken."""
    names = (f"{stem}{suffix}.safetensors" for suffix in ("", *(f"-{number}" for number in range(len(taken)))))
    return next(name for name in names if name not in taken)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _data_bytes(file: Path) -> int:
    """Bytes of a safetensors file's tensors, without the header and its length."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")

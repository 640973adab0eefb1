"""The model type of a checkpoint and which of its layers have experts, from config.json alone."""

from __future__ import annotations

from collections.abc import Sequence

from moereg.checkpoints._files import CheckpointFiles, config_errors
from moereg.checkpoints._model_rules import count_layers
from moereg.checkpoints._models import MODEL_TYPES, ModelType
from moereg.errors import CheckpointError, one_line, shown
from moereg.routing import BY_HAND, unknown_model_message

__all__ = ["check_has_experts", "find_model", "moe_layer_indices"]


def find_model(files: CheckpointFiles) -> tuple[str, ModelType]:
    """The name of the model type, as config.json has it, and its row of the table.

    Raises:
        CheckpointError: It is missing, not known, or refused; the message says why and what to do.
    """
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
    """The layers that have experts, ascending.

    Raises:
        CheckpointError: config.json does not say which layers have experts.
    """
    _, model = find_model(files)
    num_layers = _num_layers(files)
    with config_errors(files):
        return tuple(sorted(model.moe_layers(files.config, num_layers)))


def check_has_experts(files: CheckpointFiles, layer: int) -> None:
    """Checks that the model has that layer, and that the layer has experts.

    Raises:
        CheckpointError: The layer has no experts, and the message lists those that do; or it is refused.
    """
    model_type, model = find_model(files)
    num_layers = _num_layers(files)
    moe_layers = moe_layer_indices(files)
    if not 0 <= layer < num_layers:
        raise CheckpointError(
            f"layer must be in 0..{num_layers - 1} for {str(files.path)!r}, got {layer}; its layers with experts are "
            f"{_index_ranges(moe_layers)}"
        )
    if layer not in moe_layers:
        raise CheckpointError(
            f"layer {layer} of {str(files.path)!r} is dense, but a layer with experts is needed; those are "
            f"{_index_ranges(moe_layers)}"
        )
    with config_errors(files):
        reason = model.unsupported_reason(files.config, layer)
    if reason is not None:
        raise CheckpointError(
            f"layer {layer} of {str(files.path)!r}, model type {model_type!r}, is not read: {reason}; {BY_HAND}"
        )


def _num_layers(files: CheckpointFiles) -> int:
    with config_errors(files):
        return count_layers(files.config)


def _index_ranges(indices: Sequence[int]) -> str:
    """`1-3, 5` for (1, 2, 3, 5)."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][1:] = [index]
        else:
            ranges.append([index])
    return one_line(", ".join("-".join(map(str, bounds)) for bounds in ranges) or "none", 200)

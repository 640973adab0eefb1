"""The facts of a checkpoint's layers; no tensor data is read."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from moereg.checkpoints._files import CheckpointFiles
from moereg.checkpoints._manifest import list_layer
from moereg.checkpoints._moe_layers import moe_layer_indices
from moereg.errors import RequestError
from moereg.spec.problem import MoEProblem

__all__ = ["moe_layers", "read_problem"]

# Keywords of a problem that a checkpoint does not decide; all others are its facts.
_OVERRIDES: Final = (
    "activation_format",
    "deterministic",
    "dtype",
    "exact_activations",
    "graph_capture",
    "max_num_tokens",
    "num_local_experts",
    "placement",
)


def moe_layers(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Indices of the layers that have experts, ascending. Reads config.json only.

    Raises:
        CheckpointError: There is no readable config.json of a known model type.
    """
    with CheckpointFiles(path) as files:
        return moe_layer_indices(files)


def read_problem(path: str | os.PathLike[str], layer: int, **overrides: Any) -> MoEProblem:
    """The problem that a layer of a checkpoint is, from config.json and tensor headers; no tensor data is read.

    Args:
        path: Checkpoint directory.
        layer: Index in the whole model.
        overrides: Keywords of `MoEProblem` that a checkpoint does not decide, such as dtype or max_num_tokens.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        RequestError: An override contradicts a fact of the checkpoint.
        ValueError: An override's value does not fit the layer.
    """
    if facts := sorted(set(overrides) - set(_OVERRIDES)):
        raise RequestError(
            f"{facts[0]} cannot be overridden, got {facts[0]}={overrides[facts[0]]!r}: the checkpoint decides it; "
            f"leave it out (can be overridden: {', '.join(_OVERRIDES)})"
        )
    with CheckpointFiles(path) as files:
        return dataclasses.replace(list_layer(files, layer).problem, **overrides)

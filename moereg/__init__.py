"""moereg picks, prepares, runs and compares fused Mixture-of-Experts kernels for PyTorch.

Sizes have the same letters everywhere: T tokens, H hidden size, I intermediate size, E experts on this rank, K experts
per token (top-k).

A layer
    `MoEProblem` describes a layer, with a `QuantScheme` and an `Activation`; `ExpertWeights` are its weights in
    canonical order. `load_experts` reads both from a checkpoint.

A choice
    `select_backend` chooses a backend for a problem and a `Platform` and returns a `Selection`, or raises
    `UnsupportedProblemError`; `explain_backends` does not raise. `list_backends` lists the available ones.

A kernel
    `make_kernel` permutes the weights for the chosen backend and returns a `MoEKernel`, which runs the layer.
    `MoELayer` is a torch module around one, with parameters, `state_dict` and a router. `ExpertAdapters` are low-rank
    adapters of the experts, which both train.

Many GPUs
    `ExpertPlacement` says which rank holds which experts, replicas included; `balance_experts` makes one from measured
    loads. `make_kernel(..., group=group)` makes a layer with experts on many ranks; `select_dispatcher` and
    `explain_dispatchers` choose its token dispatcher. `shard_experts` cuts a layer for tensor parallelism.

A backend of your own
    `register_moe_backend` decorates an experts class; `moereg.author` has everything that such a class needs, and
    `moereg new-backend` on the command line writes a package with one. `register_prepare_finalize` decorates a token
    dispatcher.

Errors and warnings
    Every error is a `MoeregError`: `ArgumentError`, `BackendError`, `CheckpointError`, `GroupError`, `PluginError`,
    `RanksDifferError`, `RegistrationError`, `RequestError`, `UnknownBackendError`, `UnknownNameError`,
    `UnsupportedProblemError`. Every warning is a `MoeregWarning`, such as `PluginWarning`.

`moereg.integrations.transformers` runs live models on these kernels, `moereg.routing` computes `topk_weights` and
`topk_ids` like the models, `moereg.quantize` quantizes and dequantizes weights, `moereg.spec.model_shapes` has the
sizes of known models, and `moereg.testing` is the conformance kit.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from moereg._version import __version__

if TYPE_CHECKING:
    from moereg.checkpoints import load_experts
    from moereg.dispatch import Selection, explain_backends, select_backend
    from moereg.errors import (
        ArgumentError,
        BackendError,
        CheckpointError,
        GroupError,
        MoeregError,
        MoeregWarning,
        PluginError,
        PluginWarning,
        RanksDifferError,
        RegistrationError,
        RequestError,
        UnknownBackendError,
        UnknownNameError,
        UnsupportedProblemError,
    )
    from moereg.layer.factory import MoEKernel, make_kernel
    from moereg.nn.module import MoELayer
    from moereg.platforms import Platform
    from moereg.prepare_finalize import register_prepare_finalize
    from moereg.prepare_finalize.eplb import balance_experts
    from moereg.prepare_finalize.expert_placement import ExpertPlacement
    from moereg.registry import register_moe_backend
    from moereg.selection.dispatcher import explain_dispatchers, select_dispatcher
    from moereg.selection.loader import list_backends
    from moereg.spec.activations import Activation
    from moereg.spec.problem import MoEProblem
    from moereg.spec.quant_schemes import QuantScheme
    from moereg.weights.adapters import ExpertAdapters
    from moereg.weights.permuted import ExpertWeights
    from moereg.weights.shards import shard_experts

__all__ = [
    "Activation",
    "ArgumentError",
    "BackendError",
    "CheckpointError",
    "ExpertAdapters",
    "ExpertPlacement",
    "ExpertWeights",
    "GroupError",
    "MoEKernel",
    "MoELayer",
    "MoEProblem",
    "MoeregError",
    "MoeregWarning",
    "Platform",
    "PluginError",
    "PluginWarning",
    "QuantScheme",
    "RanksDifferError",
    "RegistrationError",
    "RequestError",
    "Selection",
    "UnknownBackendError",
    "UnknownNameError",
    "UnsupportedProblemError",
    "__version__",
    "balance_experts",
    "explain_backends",
    "explain_dispatchers",
    "list_backends",
    "load_experts",
    "make_kernel",
    "register_moe_backend",
    "register_prepare_finalize",
    "select_backend",
    "select_dispatcher",
    "shard_experts",
]


_NAMES_OF: Final = {
    "moereg.spec.activations": "Activation",
    "moereg.prepare_finalize.eplb": "balance_experts",
    "moereg.checkpoints": "load_experts",
    "moereg.selection.loader": "list_backends",
    "moereg.dispatch": "Selection explain_backends select_backend",
    "moereg.errors": "ArgumentError BackendError CheckpointError GroupError MoeregError MoeregWarning PluginError "
    "PluginWarning RanksDifferError RegistrationError RequestError UnknownBackendError UnknownNameError "
    "UnsupportedProblemError",
    "moereg.prepare_finalize.expert_placement": "ExpertPlacement",
    "moereg.layer.factory": "MoEKernel make_kernel",
    "moereg.nn.module": "MoELayer",
    "moereg.selection.dispatcher": "explain_dispatchers select_dispatcher",
    "moereg.platforms": "Platform",
    "moereg.prepare_finalize": "register_prepare_finalize",
    "moereg.spec.problem": "MoEProblem",
    "moereg.spec.quant_schemes": "QuantScheme",
    "moereg.registry": "register_moe_backend",
    "moereg.weights.adapters": "ExpertAdapters",
    "moereg.weights.permuted": "ExpertWeights",
    "moereg.weights.shards": "shard_experts",
}
_HOMES: Final = {module: names.split() for module, names in _NAMES_OF.items()}
"""Names by home module, imported when first read: torch takes a second, and not every command needs it."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(importlib.import_module(module), name)
            return value
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")  # So that `moereg.errors` works after `import moereg`.
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "author", "integrations", "quantize", "routing", "testing"])

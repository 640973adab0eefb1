"""Rules shared by rows of the model-type table: which layers have experts, and which activation they use.

Rules are made with the defaults of a model type, since an absent entry means the default of that type alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from moereg.errors import CheckpointError, shown
from moereg.routing import BY_HAND
from moereg.routing.config_entries import (
    MOST_LAYERS,
    is_one_of,
    read_count,
    read_indices,
    read_name,
    read_names,
    read_number,
    read_object,
)
from moereg.spec.activations import ACTIVATIONS, Activation

__all__ = [
    "ActivationRule",
    "LayerRule",
    "bounded_step_layers",
    "clamped_swiglu",
    "count_layers",
    "dbrx_activation",
    "dense_layers_first",
    "every_layer",
    "hidden_act",
    "listed_layers",
    "llama4_layers",
    "nemotron_layers",
    "offset_layers",
    "relu2_act",
    "sparse_step_layers",
    "step_layers",
]

Config = Mapping[str, Any]
LayerRule = Callable[[Config, int], Iterable[int]]
"""Lists the layers with experts, from the config and the number of layers."""
ActivationRule = Callable[[Config], Activation]
"""Makes the activation between the matmuls, from the config."""

_HIDDEN_ACTS: Final = {
    "silu": ACTIVATIONS["silu"],
    "swish": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_tanh"],
}
_CURE: Final = "take the file from the model's publisher"


def count_layers(config: Config) -> int:
    """Layers of the model; Nemotron-H lists their kinds instead of counting them.

    Raises:
        CheckpointError: The entry is missing or no count.
    """
    if (kinds := _layer_kinds(config)) is not None:
        return len(kinds)
    return read_count(config, "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)


def every_layer(config: Config, num_layers: int) -> Iterable[int]:
    """All layers have experts."""
    return range(num_layers)


def sparse_step_layers(dense: tuple[int, ...] = ()) -> LayerRule:
    """Every `decoder_sparse_step`-th layer (Qwen).

    Args:
        dense: Layers without experts where `mlp_only_layers` is absent.
    """

    def layers(config: Config, num_layers: int) -> Iterable[int]:
        step = read_count(config, "decoder_sparse_step", default=1)
        listed = read_indices(config, "mlp_only_layers")
        dense_layers = dense if listed is None else listed
        return (layer for layer in range(step - 1, num_layers, step) if layer not in dense_layers)

    return layers


def dense_layers_first(first: int, *entries: str) -> LayerRule:
    """All layers after the first dense ones (DeepSeek).

    Args:
        first: Dense layers where their number is absent.
        entries: Names of the entry with their number; `first_k_dense_replace` where none is given.
    """
    names = entries or ("first_k_dense_replace",)

    def layers(config: Config, num_layers: int) -> Iterable[int]:
        start = read_count(config, *names, default=first, minimum=0)
        frequency = config.get("moe_layer_freq")
        if isinstance(frequency, list):
            flags = _flags(config, "moe_layer_freq", num_layers)
            return (layer for layer in range(start, num_layers) if flags[layer])
        # transformers ignores the frequency, and the publisher's own code reads it; every published file says 1.
        frequency = read_count(config, "moe_layer_freq", default=1)
        return (layer for layer in range(start, num_layers) if layer % frequency == 0)

    return layers


def listed_layers(otherwise: LayerRule, *, sparse: tuple[str, ...] = ("sparse",)) -> LayerRule:
    """Layers whose `mlp_layer_types` say that they are sparse.

    Args:
        otherwise: Lists them where that entry is absent.
        sparse: Words for layers with experts.
    """

    def layers(config: Config, num_layers: int) -> Iterable[int]:
        kinds = read_names(config, "mlp_layer_types")
        if not kinds:
            return otherwise(config, num_layers)
        known = (*sparse, "dense")
        if len(kinds) < num_layers or (others := [kind for kind in kinds if kind not in known]):
            found = f"{len(kinds)} names" if len(kinds) < num_layers else shown(others[0])
            raise CheckpointError(
                f"mlp_layer_types must name each of {num_layers} layers {' or '.join(known)}, got {found}; {_CURE}"
            )
        return (layer for layer in range(num_layers) if kinds[layer] in sparse)

    return layers


def step_layers(config: Config, num_layers: int) -> Iterable[int]:
    """The layers of `moe_layers_enum` (Step), or those that come after the first three."""
    text = config.get("moe_layers_enum")
    if isinstance(text, list):
        return sorted(layer for layer in read_indices(config, "moe_layers_enum") or () if layer < num_layers)
    if (name := read_name(config, "moe_layers_enum")) is None:
        return range(3, num_layers)
    items = [item.strip() for item in name.split(",")]
    if len(items) > MOST_LAYERS or not all(item.isdecimal() and len(item) < 6 for item in items):
        raise CheckpointError(f"moe_layers_enum must be layer indices and commas, got {shown(name)}; {_CURE}")
    return sorted({int(item) for item in items if int(item) < num_layers})


def llama4_layers(config: Config, num_layers: int) -> Iterable[int]:
    """The layers of `moe_layers`, or every `interleave_moe_layer_step`-th."""
    if (layers := read_indices(config, "moe_layers")) is not None:
        return (layer for layer in layers if layer < num_layers)
    step = read_count(config, "interleave_moe_layer_step", default=1)
    return range(step - 1, num_layers, step)


def bounded_step_layers(config: Config, num_layers: int) -> Iterable[int]:
    """Every `moe_layer_interval`-th layer between two bounds (Ernie)."""
    interval = read_count(config, "moe_layer_interval", default=1)
    first = read_count(config, "moe_layer_start_index", default=1, minimum=0)
    last = read_count(config, "moe_layer_end_index", default=-1, minimum=-1)
    last = num_layers - 1 if last == -1 else min(last, num_layers - 1)
    return (layer for layer in range(first, last + 1) if (layer + 1) % interval == 0)


def offset_layers(config: Config, num_layers: int) -> Iterable[int]:
    """Every `expert_layer_period`-th layer from `expert_layer_offset` on (Jamba)."""
    period = read_count(config, "expert_layer_period", default=2)
    offset = read_count(config, "expert_layer_offset", default=1, minimum=0)
    return range(offset, num_layers, period) if offset < period else ()


def nemotron_layers(config: Config, num_layers: int) -> Iterable[int]:
    """The blocks that the list of kinds calls moe, or the pattern E."""
    kinds = _layer_kinds(config)
    if kinds is None:
        raise CheckpointError(
            f"layers_block_type or hybrid_override_pattern must say which layers have experts, got neither; {_CURE}"
        )
    return (layer for layer, kind in enumerate(kinds) if kind in ("moe", "E"))


def _layer_kinds(config: Config) -> tuple[str, ...] | None:
    """Kinds of layers, where the config lists them as Nemotron-H does."""
    kinds = read_names(config, "layers_block_type") or tuple(read_name(config, "hybrid_override_pattern") or "")
    if len(kinds) > MOST_LAYERS:
        raise CheckpointError(f"a model must have at most {MOST_LAYERS} layers, got {len(kinds)}; {_CURE}")
    return kinds or None


def _flags(config: Config, name: str, num_layers: int) -> list[Any]:
    flags: list[Any] = config[name]
    if len(flags) < num_layers or not all(is_one_of(flag, (0, 1, True, False)) for flag in flags):
        raise CheckpointError(f"{name} must be 0 or 1 for each of {num_layers} layers, got {shown(flags)}; {_CURE}")
    return flags


def hidden_act(config: Config) -> Activation:
    """The activation that `hidden_act` names; SiLU where it is absent."""
    return _named_act(config, "hidden_act", "silu", _HIDDEN_ACTS)


def relu2_act(config: Config) -> Activation:
    """Squared ReLU without a gate, which is all that `mlp_hidden_act` may say (Nemotron-H)."""
    return _named_act(config, "mlp_hidden_act", "relu2", {"relu2": ACTIVATIONS["relu2"]})


def dbrx_activation(config: Config) -> Activation:
    """The activation that `ffn_act_fn` of `ffn_config` names."""
    return _named_act(read_object(read_object(config, "ffn_config"), "ffn_act_fn"), "name", "silu", _HIDDEN_ACTS)


def _named_act(config: Config, entry: str, default: str, known: Mapping[str, Activation]) -> Activation:
    name = config.get(entry)
    name = default if name is None else name
    if not isinstance(name, str) or name not in known:
        # No other is suggested: one that is spelled alike computes other numbers.
        raise CheckpointError(f"unknown {entry} {shown(name)} (known: {', '.join(sorted(known))}); {BY_HAND}")
    return known[name]


def clamped_swiglu(standard: Activation) -> ActivationRule:
    """An activation whose clamp and slope are entries of their own.

    Args:
        standard: With the scalars of a config that has none.
    """

    def activation(config: Config) -> Activation:
        # hidden_act says silu in these files, although the experts compute the clamped variant.
        if standard.name == "silu" and hidden_act(config).name != "silu":
            raise CheckpointError(f"hidden_act must be silu where gate and up are clamped, got another; {_CURE}")
        limit = read_number(config, "swiglu_limit", default=standard.limit)
        if limit <= 0:
            raise CheckpointError(f"swiglu_limit must be above 0, got {limit}; {_CURE}")
        if standard.name == "silu":
            return dataclasses.replace(standard, limit=limit)
        return dataclasses.replace(
            standard, limit=limit, alpha=read_number(config, "swiglu_alpha", default=standard.alpha)
        )

    return activation

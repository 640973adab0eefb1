"""One row for each model type: names and order of its tensors, and which layers have experts.

Adding a model is adding a row here and, where it routes in a new way, a reader in `moereg.routing`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.activations import ACTIVATIONS, Activation
from moereg.config_entries import read_count, read_indices, read_number
from moereg.errors import CheckpointError, unknown_name_message

__all__ = ["MODEL_TYPES", "ModelType"]

_HIDDEN_ACTS: Final = {
    "silu": ACTIVATIONS["silu"],
    "swish": ACTIVATIONS["silu"],
    "gelu": ACTIVATIONS["gelu"],
    "gelu_pytorch_tanh": ACTIVATIONS["gelu_tanh"],
}


def _every_layer(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    return range(num_layers)


def _qwen_layers(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    step = read_count(config, "decoder_sparse_step", default=1)
    dense_layers = read_indices(config, "mlp_only_layers") or ()
    return (layer for layer in range(step - 1, num_layers, step) if layer not in dense_layers)


def _deepseek_layers(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    first = read_count(config, "first_k_dense_replace", minimum=0)
    # transformers ignores the frequency, and the publisher's own code reads it; every published file says 1.
    frequency = read_count(config, "moe_layer_freq", default=1)
    return (layer for layer in range(first, num_layers) if layer % frequency == 0)


def _llama4_layers(config: Mapping[str, Any], num_layers: int) -> Iterable[int]:
    if (layers := read_indices(config, "moe_layers")) is not None:
        return (layer for layer in layers if layer < num_layers)
    step = read_count(config, "interleave_moe_layer_step", default=1)
    return range(step - 1, num_layers, step)


def _hidden_act(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_act")
    name = "silu" if name is None else name
    if not isinstance(name, str) or name not in _HIDDEN_ACTS:
        raise CheckpointError(unknown_name_message("hidden_act", name, _HIDDEN_ACTS))
    return _HIDDEN_ACTS[name]


def _clamped_swiglu(config: Mapping[str, Any]) -> Activation:
    # hidden_act says silu in these files, although the experts compute the clamped variant.
    standard = ACTIVATIONS["swigluoai"]
    return dataclasses.replace(
        standard,
        limit=read_number(config, "swiglu_limit", default=standard.limit),
        alpha=read_number(config, "swiglu_alpha", default=standard.alpha),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """How checkpoints of one model type store the experts of a layer.

    Experts are either one tensor each, `experts.5.gate_proj.weight`, or fused, `experts.gate_up_proj`. Both are read.

    Attributes:
        blocks: Module of a layer that holds router and experts: as released, then as transformers calls it.
        router: Module of the block that holds the router's weight.
        projections: Gate, up and down of one expert; None where the model is only released fused.
        intermediate_size: Entry of the config that has I.
        moe_layers: Lists the layers with experts, from the config and the number of layers.
        activation: Makes the activation between the matmuls, from the config.
        is_transposed: Fused tensors are [E,in,out] instead of [E,out,in].
        is_interleaved: Rows of fused gate and up alternate; otherwise all of gate comes first.
        has_bias: Experts and router have biases.
    """

    blocks: tuple[str, ...] = ("mlp",)
    router: str = "gate"
    projections: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: Callable[[Mapping[str, Any], int], Iterable[int]] = _every_layer
    activation: Callable[[Mapping[str, Any]], Activation] = _hidden_act
    is_transposed: bool = False
    is_interleaved: bool = False
    has_bias: bool = False


MODEL_TYPES: Final[Mapping[str, ModelType]] = MappingProxyType(
    {
        "mixtral": ModelType(
            blocks=("block_sparse_moe", "mlp"),
            projections=("w1", "w3", "w2"),
            intermediate_size="intermediate_size",
        ),
        "qwen2_moe": ModelType(moe_layers=_qwen_layers),
        "qwen3_moe": ModelType(moe_layers=_qwen_layers),
        "olmoe": ModelType(intermediate_size="intermediate_size"),
        "deepseek_v2": ModelType(moe_layers=_deepseek_layers),
        "deepseek_v3": ModelType(moe_layers=_deepseek_layers),
        "gpt_oss": ModelType(
            router="router",
            projections=None,
            intermediate_size="intermediate_size",
            activation=_clamped_swiglu,
            is_transposed=True,
            is_interleaved=True,
            has_bias=True,
        ),
        "llama4_text": ModelType(
            blocks=("feed_forward",),
            router="router",
            projections=None,
            intermediate_size="intermediate_size",
            moe_layers=_llama4_layers,
            is_transposed=True,
        ),
    }
)

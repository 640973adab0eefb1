"""One row for each model type: names and order of its tensors, and which layers have experts.

Adding a model is adding a row here and one in `moereg.routing.configs`, with a reader if it routes in a new way.
`moereg.routing.refused` has the types that are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.checkpoints._model_rules import (
    ActivationRule,
    LayerRule,
    bounded_step_layers,
    clamped_swiglu,
    dbrx_activation,
    dense_layers_first,
    every_layer,
    hidden_act,
    listed_layers,
    llama4_layers,
    nemotron_layers,
    offset_layers,
    relu2_act,
    sparse_step_layers,
    step_layers,
)
from moereg.routing.config_entries import read_names
from moereg.spec.activations import ACTIVATIONS

__all__ = ["MODEL_TYPES", "FusedNames", "ModelType"]


@dataclasses.dataclass(frozen=True)
class FusedNames:
    """Names in the block of tensors that hold all experts.

    Attributes:
        w13: Gate and up in one tensor, or each in its own; up alone where there is no gate.
        w2: Down.
        is_flat: Experts are not a dimension of their own: [E*I,H] three times, also down (DBRX).
    """

    w13: tuple[str, ...] = ("experts.gate_up_proj",)
    w2: str = "experts.down_proj"
    is_flat: bool = False


def _always(config: Mapping[str, Any], layer: int) -> str | None:
    return None


def _nemotron_reason(config: Mapping[str, Any], layer: int) -> str | None:
    return None if config.get("moe_latent_size") is None else "its experts are between two projections to a latent size"


def _deepseek_v4_reason(config: Mapping[str, Any], layer: int) -> str | None:
    kinds = read_names(config, "mlp_layer_types")
    count = config.get("num_hash_layers")
    is_hashed = kinds[layer] == "hash_moe" if layer < len(kinds) else layer < (count if type(count) is int else 3)
    return "its experts are looked up by the token's id, not chosen by a router" if is_hashed else None


def _step_reason(config: Mapping[str, Any], layer: int) -> str | None:
    limits = config.get("swiglu_limits")
    is_clamped = isinstance(limits, list) and bool(limits) and (layer >= len(limits) or bool(limits[layer]))
    return "its experts clamp silu(gate), and every Activation clamps the gate before" if is_clamped else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """How checkpoints of one model type store the experts of a layer.

    Experts are either one tensor each, `experts.5.gate_proj.weight`, or fused, `experts.gate_up_proj`. Both are read.

    Attributes:
        blocks: Module of a layer that holds router and experts: as released, then as transformers calls it. Empty if
            the layer itself holds them.
        routers: Module of the block that holds the router's weight: as released, then as transformers calls it.
        projections: Gate, up and down of one expert, or up and down where there is no gate; None where the model is
            only released fused.
        fused: Names of fused tensors: as released, then as transformers calls them.
        intermediate_size: Entry of the config that has I.
        moe_layers: Lists the layers with experts, from the config and the number of layers.
        activation: Makes the activation between the matmuls, from the config. The live module of transformers computes
            the same.
        is_transposed: Fused tensors are [E,in,out] instead of [E,out,in]; None where both are released, so that the
            shape of down decides.
        is_interleaved: Rows of fused gate and up alternate; otherwise all of gate comes first.
        has_bias: Experts and router have biases.
        correction_biases: Names in the block of the bias that only decides the choice: as released, then as
            transformers calls it. Where the router has none, none is accepted.
        outer_correction_bias: Name of that bias in the layer, where a release has it outside of the block.
        shared_experts: Modules of experts that take every token, in the block or beside it: as released, then as
            transformers calls them. They are not read.
        unsupported_reason: Why a layer is not read, from the config and the layer's index; None if it is.
    """

    blocks: tuple[str, ...] = ("mlp",)
    routers: tuple[str, ...] = ("gate",)
    projections: tuple[str, ...] | None = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[FusedNames, ...] = (FusedNames(),)
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: LayerRule = every_layer
    activation: ActivationRule = hidden_act
    is_transposed: bool | None = False
    is_interleaved: bool = False
    has_bias: bool = False
    correction_biases: tuple[str, ...] = ("gate.e_score_correction_bias",)
    outer_correction_bias: str | None = None
    shared_experts: tuple[str, ...] = ()
    unsupported_reason: Callable[[Mapping[str, Any], int], str | None] = _always


_W1_W3_W2: Final = ("w1", "w3", "w2")
_CLAMPED_SILU: Final = clamped_swiglu(dataclasses.replace(ACTIVATIONS["silu"], limit=10.0))
_CLAMPED_SWIGLU: Final = clamped_swiglu(ACTIVATIONS["swigluoai"])

_MIXTRAL: Final = ModelType(
    blocks=("block_sparse_moe", "mlp"), projections=_W1_W3_W2, intermediate_size="intermediate_size"
)
_SHARED: Final = ("shared_experts",)
_SHARED_AND_GATE: Final = ("shared_expert", "shared_expert_gate")
_DEEPSEEK: Final = ModelType(shared_experts=_SHARED)
_DEEPSEEK_V2: Final = dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(0))
_DEEPSEEK_V3: Final = dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(3))
_GLM4: Final = dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(1))
_ONE_DENSE: Final = dataclasses.replace(_DEEPSEEK, moe_layers=listed_layers(dense_layers_first(1)))
_THREE_DENSE: Final = dataclasses.replace(_DEEPSEEK, moe_layers=listed_layers(dense_layers_first(3)))
_GLM5: Final = dataclasses.replace(_THREE_DENSE, activation=_CLAMPED_SILU)
_QWEN: Final = ModelType(moe_layers=sparse_step_layers())
_QWEN_SHARED: Final = dataclasses.replace(_QWEN, shared_experts=_SHARED_AND_GATE)
_GRANITE: Final = ModelType(
    blocks=("block_sparse_moe",),
    routers=("router.layer", "router"),
    projections=None,
    fused=(FusedNames(("input_linear.weight",), "output_linear.weight"), FusedNames()),
    intermediate_size="intermediate_size",
    shared_experts=("shared_mlp",),
)
_GPT_OSS: Final = ModelType(
    routers=("router",),
    projections=None,
    intermediate_size="intermediate_size",
    activation=_CLAMPED_SWIGLU,
    is_transposed=True,
    has_bias=True,
)

MODEL_TYPES: Final[Mapping[str, ModelType]] = MappingProxyType(
    {
        "afmoe": ModelType(
            routers=("router.gate",),
            moe_layers=dense_layers_first(1, "num_dense_layers"),
            correction_biases=("expert_bias",),
            shared_experts=_SHARED,
        ),
        "aria_text": ModelType(
            routers=("router",),
            projections=None,
            fused=(FusedNames(("experts.fc1.weight",), "experts.fc2.weight"), FusedNames()),
            intermediate_size="intermediate_size",
            activation=lambda config: ACTIVATIONS["silu"],  # hidden_act is that of the shared experts.
            is_transposed=True,
            shared_experts=_SHARED,
        ),
        "axk1": _ONE_DENSE,
        "axk2": _ONE_DENSE,
        "bailing_hybrid": dataclasses.replace(
            _DEEPSEEK,
            moe_layers=listed_layers(dense_layers_first(2)),
            correction_biases=("gate.expert_bias", "gate.e_score_correction_bias"),
        ),
        "beam": dataclasses.replace(_THREE_DENSE, shared_experts=()),
        "cohere2_moe": ModelType(
            intermediate_size="intermediate_size",
            moe_layers=listed_layers(dense_layers_first(0)),
            shared_experts=_SHARED,
        ),
        "dbrx": ModelType(
            blocks=("ffn",),
            routers=("router.layer",),
            projections=None,
            fused=(FusedNames(("experts.mlp.w1", "experts.mlp.v1"), "experts.mlp.w2", is_flat=True),),
            intermediate_size="ffn_hidden_size",
            activation=dbrx_activation,
        ),
        "deepseek_ocr2_text": _ONE_DENSE,
        "deepseek_v2": _DEEPSEEK_V2,
        "deepseek_v3": _DEEPSEEK_V3,
        "deepseek_v32": _THREE_DENSE,
        "deepseek_v4": ModelType(
            blocks=("ffn", "mlp"),
            projections=_W1_W3_W2,
            moe_layers=listed_layers(every_layer, sparse=("moe", "hash_moe")),
            activation=_CLAMPED_SILU,
            correction_biases=("gate.bias", "gate.e_score_correction_bias"),
            shared_experts=_SHARED,
            unsupported_reason=_deepseek_v4_reason,
        ),
        "dots1": _DEEPSEEK_V2,
        "dots3_note": _ONE_DENSE,
        "dots3_note_text": _ONE_DENSE,
        "ernie4_5_moe": ModelType(
            moe_layers=bounded_step_layers,
            correction_biases=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
            shared_experts=_SHARED,
        ),
        "exaone_moe": dataclasses.replace(
            _ONE_DENSE, correction_biases=("e_score_correction_bias", "gate.e_score_correction_bias")
        ),
        "flex_olmo": ModelType(intermediate_size="intermediate_size"),
        "flint": dataclasses.replace(
            _QWEN_SHARED, moe_layers=sparse_step_layers((0, 1)), shared_experts=("shared_expert",)
        ),
        "glm4_moe": _GLM4,
        "glm4_moe_lite": _ONE_DENSE,
        "glm4v_moe_text": _GLM4,
        "glm5_next": _GLM5,
        "glm5_next_text": _GLM5,
        "glm_moe_dsa": _THREE_DENSE,
        "gpt_oss": dataclasses.replace(_GPT_OSS, is_interleaved=True),
        "granitemoe": dataclasses.replace(_GRANITE, shared_experts=()),
        "granitemoe_swa": _GRANITE,
        "granitemoehybrid": _GRANITE,
        "granitemoeshared": _GRANITE,
        "hunyuan_v1_moe": ModelType(
            routers=("gate.wg",), intermediate_size="intermediate_size", shared_experts=("shared_mlp",)
        ),
        "hy_v3": dataclasses.replace(
            _ONE_DENSE,
            routers=("router.gate", "gate"),
            correction_biases=("expert_bias", "e_score_correction_bias"),
            shared_experts=("shared_mlp", "shared_experts"),
        ),
        "hy_v4": dataclasses.replace(_ONE_DENSE, activation=_CLAMPED_SILU),
        "jamba": ModelType(
            blocks=("feed_forward",),
            routers=("router",),
            intermediate_size="intermediate_size",
            moe_layers=offset_layers,
        ),
        "kimi_k2": _DEEPSEEK_V3,
        "kimi_linear": dataclasses.replace(_ONE_DENSE, blocks=("block_sparse_moe", "mlp"), projections=_W1_W3_W2),
        "kolibri1": ModelType(outer_correction_bias="moe.router.expert_bias", shared_experts=_SHARED),
        "laguna": dataclasses.replace(
            _ONE_DENSE,
            correction_biases=("experts.e_score_correction_bias", "gate.e_score_correction_bias"),
            shared_experts=("shared_expert", "shared_experts"),
        ),
        "lfm2_moe": ModelType(
            blocks=("feed_forward",),
            projections=_W1_W3_W2,
            moe_layers=dense_layers_first(2, "num_dense_layers"),
            activation=lambda config: ACTIVATIONS["silu"],  # The config has no entry for it.
            correction_biases=("expert_bias",),
        ),
        "llama4_text": ModelType(
            blocks=("feed_forward",),
            routers=("router",),
            projections=None,
            intermediate_size="intermediate_size",
            moe_layers=llama4_layers,
            is_transposed=True,
            shared_experts=("shared_expert",),
        ),
        "mellum": ModelType(moe_layers=listed_layers(every_layer)),
        "mimo_v2_flash": dataclasses.replace(_ONE_DENSE, shared_experts=()),
        "minimax": _MIXTRAL,
        "minimax_m2": dataclasses.replace(_MIXTRAL, correction_biases=("e_score_correction_bias",)),
        "minimax_m3_vl_text": dataclasses.replace(
            _MIXTRAL,
            moe_layers=listed_layers(dense_layers_first(0)),
            activation=_CLAMPED_SWIGLU,
            correction_biases=("e_score_correction_bias", "gate.e_score_correction_bias"),
            shared_experts=_SHARED,
        ),
        "mistral4": _DEEPSEEK_V2,
        "mistral_large4_text": dataclasses.replace(_ONE_DENSE, blocks=("", "mlp"), projections=_W1_W3_W2),
        "mixtral": _MIXTRAL,
        "nemotron_h": ModelType(
            blocks=("mixer",),
            projections=("up_proj", "down_proj"),
            fused=(FusedNames(("experts.up_proj",)),),
            moe_layers=nemotron_layers,
            activation=relu2_act,
            shared_experts=_SHARED,
            unsupported_reason=_nemotron_reason,
        ),
        "olmoe": ModelType(intermediate_size="intermediate_size"),
        "openai_privacy_filter": _GPT_OSS,
        "phimoe": dataclasses.replace(_MIXTRAL, routers=("gate", "router")),
        "qwen2_moe": _QWEN_SHARED,
        "qwen3_5_moe_text": ModelType(shared_experts=_SHARED_AND_GATE),
        "qwen3_moe": _QWEN,
        "qwen3_next": _QWEN_SHARED,
        "qwen3_omni_moe_text": _QWEN,
        # Released transposed, and saved by newer versions of transformers as it is in memory.
        "qwen3_vl_moe_text": dataclasses.replace(_QWEN, is_transposed=None),
        "qwen4_exp_text": ModelType(shared_experts=_SHARED_AND_GATE),
        "solar_open": ModelType(shared_experts=_SHARED),
        "step3p5": ModelType(
            blocks=("moe", "mlp"),
            projections=None,
            fused=(FusedNames(("gate_proj.weight", "up_proj.weight"), "down_proj.weight"), FusedNames()),
            moe_layers=listed_layers(step_layers),
            correction_biases=("router_bias", "gate.e_score_correction_bias"),
            shared_experts=("share_expert", "shared_experts"),
            unsupported_reason=_step_reason,
        ),
        "unlimited_ocr_text": _ONE_DENSE,
    }
)

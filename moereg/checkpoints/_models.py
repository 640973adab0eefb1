"""One row per model type: names and order of its tensors, which layers have experts, and their activation.

To add a model, add a row here and one in `moereg.routing.configs`, with a reader if it routes in a new way.
That module has the refused types too. Rules for layers and activations are made with a model type's defaults,
since each type has its own default for an absent entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.errors import CheckpointError, shown
from moereg.routing.config_entries import (
    MOST_LAYERS,
    is_one_of,
    read_count,
    read_flag,
    read_indices,
    read_name,
    read_names,
    read_number,
    read_object,
)
from moereg.spec.activations import ACTIVATIONS, Activation

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
    "situ": ACTIVATIONS["situ"],
}
_CURE: Final = "take the file from the model's publisher"
LAYERS: Final = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "language_model.layers.",
    "layers.",
    "thinker.model.layers.",
    "model.decoder.layers.",
    "backbone.layers.",
    "language_model.backbone.layers.",
    "llm.model.layers.",
    "transformer.blocks.",
    "model.llm.layers.",
)
"""Prefixes of layer names: language models, old and new multimodal models, models saved without a head, Qwen3-Omni,
DiffusionGemma, Nemotron-H and models built around it, DBRX, and Inkling 2."""


def every_layer(config: Config, num_layers: int) -> Iterable[int]:
    """All layers have experts."""
    return range(num_layers)


def sparse_step_layers(dense: tuple[int, ...] = ()) -> LayerRule:
    """Every `decoder_sparse_step`-th layer (Qwen) except those in `mlp_only_layers`."""

    def layers(config: Config, num_layers: int) -> Iterable[int]:
        step = read_count(config, "decoder_sparse_step", default=1)
        listed = read_indices(config, "mlp_only_layers")
        left_out = dense if listed is None else listed
        return (layer for layer in range(step - 1, num_layers, step) if layer not in left_out)

    return layers


def dense_layers_first(first: int, entry: str = "first_k_dense_replace") -> LayerRule:
    """All layers after the first dense ones (DeepSeek), whose number an entry may give."""

    def layers(config: Config, num_layers: int) -> Iterable[int]:
        start = read_count(config, entry, default=first, minimum=0)
        frequency = config.get("moe_layer_freq")
        if isinstance(frequency, list):
            if len(frequency) < num_layers or not all(is_one_of(flag, (0, 1, True, False)) for flag in frequency):
                raise CheckpointError(
                    f"moe_layer_freq must be 0 or 1 for each of {num_layers} layers, got {shown(frequency)}; {_CURE}"
                )
            return (layer for layer in range(start, num_layers) if frequency[layer])
        # transformers ignores the frequency and the publisher's code reads it; every published file has 1.
        frequency = read_count(config, "moe_layer_freq", default=1)
        return (layer for layer in range(start, num_layers) if layer % frequency == 0)

    return layers


def listed_layers(otherwise: LayerRule, *, sparse: tuple[str, ...] = ("sparse",)) -> LayerRule:
    """Layers that `mlp_layer_types` calls sparse, under one of some names; another rule if it is absent."""

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
    """The layers of `moe_layers_enum` (Step), or all after the first three."""
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
    """The blocks called `moe` in the list of kinds, or `E` in the pattern."""
    kinds = _layer_kinds(config)
    if kinds is None:
        raise CheckpointError(
            f"layers_block_type or hybrid_override_pattern must say which layers have experts, got neither; {_CURE}"
        )
    return (layer for layer, kind in enumerate(kinds) if kind in ("moe", "E"))


def _layer_kinds(config: Config) -> tuple[str, ...] | None:
    """Kinds of layers, if the config lists them like Nemotron-H."""
    kinds = read_names(config, "layers_block_type") or tuple(read_name(config, "hybrid_override_pattern") or "")
    if len(kinds) > MOST_LAYERS:
        raise CheckpointError(f"a model must have at most {MOST_LAYERS} layers, got {len(kinds)}; {_CURE}")
    return kinds or None


def hidden_act(config: Config) -> Activation:
    """The activation that `hidden_act` names; SiLU if absent."""
    named = _named_act(config, "hidden_act", "silu", _HIDDEN_ACTS)
    # Moonshot's code caps gates at 1 and no ups where the entries are absent.
    caps = ("activation_situ_beta", 1.0), ("activation_situ_linear_beta", None)
    return _softcapped(config, *caps) if named.name == "situ" else named


def _softcapped(config: Config, gate: tuple[str, float], up: tuple[str, float | None]) -> Activation:
    return Activation("situ", gate_softcap=_read_positive(config, *gate), up_softcap=_read_positive(config, *up))


def _read_positive(config: Config, entry: str, default: float | None) -> float | None:
    number = default if config.get(entry) is None else read_number(config, entry)
    if number is not None and number <= 0:
        raise CheckpointError(f"{entry} must be above 0, got {number}; {_CURE}")
    return number


def _named_act(config: Config, entry: str, default: str, known: Mapping[str, Activation]) -> Activation:
    name = config.get(entry)
    name = default if name is None else name
    if not isinstance(name, str) or name not in known:
        # Suggests no similar name, since that function computes other numbers.
        raise CheckpointError(
            f"unknown {entry} {shown(name)} (known: {', '.join(sorted(known))}), which no kernel of moereg computes; "
            "run these experts by the model's own code, such as transformers'"
        )
    return known[name]


def clamped_swiglu(standard: Activation) -> ActivationRule:
    """An activation with separate entries for clamp and slope, which have defaults."""

    def activation(config: Config) -> Activation:
        # hidden_act is silu in these files, although the experts compute the clamped variant.
        if standard.name == "silu" and hidden_act(config).name != "silu":
            raise CheckpointError(f"hidden_act must be silu where gate and up are clamped, got another; {_CURE}")
        limit = _read_positive(config, "swiglu_limit", standard.limit)
        has_slope = standard.name != "silu"
        alpha = read_number(config, "swiglu_alpha", default=standard.alpha) if has_slope else standard.alpha
        return dataclasses.replace(standard, limit=limit, alpha=alpha)

    return activation


def count_layers(config: Config) -> int:
    """Number of layers; Nemotron-H lists their kinds instead of counting them."""
    if (kinds := _layer_kinds(config)) is not None:
        return len(kinds)
    return read_count(config, "num_hidden_layers", "n_layers", maximum=MOST_LAYERS)


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Modules or parameters of a layer's experts, in the block.

    Attributes:
        w13: Gate and up in one tensor or two; only up if there is no gate. With `{}` for the expert's index, unless
            one tensor has all experts.
        w2: Down.
        is_flat: Experts have no dimension of their own: all three are [E*I,H], even down (DBRX).
        is_parameter: Whether they are parameters rather than modules.
        is_interleaved: Rows of gate and up in one tensor alternate; otherwise all of gate comes first.
    """

    w13: tuple[str, ...] = ("experts.gate_up_proj",)
    w2: str = "experts.down_proj"
    is_flat: bool = False
    is_parameter: bool = True
    is_interleaved: bool = False

    @property
    def is_fused(self) -> bool:
        """Whether one tensor has all experts, along dim 0."""
        return "{}" not in self.w2

    def divided(self) -> ExpertNames:
        """Names of one expert's own modules, whose index stands before the last part of a name."""
        *w13, w2 = ("{}.{{}}.{}".format(*name.rsplit(".", 1)) for name in (*self.w13, self.w2))
        return ExpertNames(tuple(w13), w2, is_parameter=False)


def _is_hashed(config: Config, layer: int) -> bool:
    kinds = read_names(config, "mlp_layer_types")
    if layer < len(kinds):
        return kinds[layer] == "hash_moe"
    return layer < read_count(config, "num_hash_layers", default=3, minimum=0)


def _step_reason(config: Config, layer: int) -> str | None:
    limits = config.get("swiglu_limits")
    is_clamped = isinstance(limits, list) and bool(limits) and (layer >= len(limits) or bool(limits[layer]))
    return "its experts clamp silu(gate), and every Activation clamps the gate before" if is_clamped else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelType:
    """How checkpoints of one model type store the experts of a layer.

    Experts are either one tensor each, `experts.5.gate_proj.weight`, or fused, `experts.gate_up_proj`, as [E,out,in] or
    [E,in,out]. All are read from every type: tools that quantize divide fused experts, and transformers fuses others.

    Attributes:
        blocks: Module of a layer that holds router and experts: as released, then as transformers calls it. Empty if
            the layer itself holds them.
        routers: Module of the block that holds the router's weight: as released, then as transformers calls it.
        projections: Gate, up and down of one expert, or up and down if there is no gate; None if the publisher only
            has them fused.
        fused: Names of fused tensors: as released, then as transformers calls them.
        intermediate_size: The config's entry for I.
        moe_layers: Lists the layers with experts, from the config and the number of layers.
        activation: Makes the activation between the matmuls, from the config. The live module of transformers computes
            the same.
        has_bias: Experts and router have biases.
        correction_biases: Names in the block of the bias that only affects the choice of experts. If the router has
            none, none is accepted.
        outer_correction_bias: Name of that bias in the layer, if a release has it outside the block.
        expert_table: Says whether a table by token id chooses a layer's experts, and the router only weighs them.
        routing: Names in the block of `expert_scale`, factors of experts' routing weights, and of `router_scale`, which
            with H ** -0.5 are factors of the router's input instead of `input_norm`, the experts' (Gemma 4).
        shared_experts: Modules of shared experts, inside the block or next to it: as released, then as transformers
            calls them. They are not read.
        unsupported_reason: Why a layer is not read, from the config and the layer's index; None if it is.
    """

    blocks: tuple[str, ...] = ("mlp",)
    routers: tuple[str, ...] = ("gate",)
    projections: tuple[str, ...] | None = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[ExpertNames, ...] = (ExpertNames(),)
    intermediate_size: str = "moe_intermediate_size"
    moe_layers: LayerRule = every_layer
    activation: ActivationRule = hidden_act
    has_bias: bool = False
    correction_biases: tuple[str, ...] = ("gate.e_score_correction_bias", "gate.expert_bias")
    outer_correction_bias: str | None = None
    expert_table: Callable[[Config, int], bool] = lambda config, layer: False
    routing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    shared_experts: tuple[str, ...] = ()
    unsupported_reason: Callable[[Config, int], str | None] = lambda config, layer: None

    @property
    def has_gate(self) -> bool:
        """Whether experts have a gate."""
        return self.projections is None or len(self.projections) == 3


_W1_W3_W2: Final = ("w1", "w3", "w2")
_CLAMPED_SILU: Final = clamped_swiglu(dataclasses.replace(ACTIVATIONS["silu"], limit=10.0))
_CLAMPED_SWIGLU: Final = clamped_swiglu(ACTIVATIONS["swigluoai"])

_MIXTRAL: Final = ModelType(
    blocks=("block_sparse_moe", "mlp"), projections=_W1_W3_W2, intermediate_size="intermediate_size"
)
_SHARED: Final = ("shared_experts",)
_SHARED_AND_GATE: Final = ("shared_expert", "shared_expert_gate")
_DEEPSEEK: Final = ModelType(shared_experts=_SHARED)
_ONE_DENSE: Final = dataclasses.replace(_DEEPSEEK, moe_layers=listed_layers(dense_layers_first(1)))
_THREE_DENSE: Final = dataclasses.replace(_DEEPSEEK, moe_layers=listed_layers(dense_layers_first(3)))
_QWEN: Final = ModelType(moe_layers=sparse_step_layers())
_QWEN_SHARED: Final = dataclasses.replace(_QWEN, shared_experts=_SHARED_AND_GATE)
_GRANITE: Final = ModelType(
    blocks=("block_sparse_moe",),
    routers=("router.layer", "router"),
    projections=None,
    fused=(ExpertNames(("input_linear",), "output_linear"), ExpertNames()),
    intermediate_size="intermediate_size",
    shared_experts=("shared_mlp",),
)
_GPT_OSS: Final = ModelType(
    routers=("router",),
    projections=None,
    intermediate_size="intermediate_size",
    activation=_CLAMPED_SWIGLU,
    has_bias=True,
)

_GEMMA: Final = ModelType(
    blocks=("",),
    routers=("router.proj",),
    activation=lambda config: _named_act(config, "hidden_activation", "gelu_pytorch_tanh", _HIDDEN_ACTS),
    routing=dict(
        expert_scale="router.per_expert_scale",
        router_scale="router.scale",
        input_norm="pre_feedforward_layernorm_2.weight",
    ),
)

_BY_NAMES: Final = {
    "afmoe": ModelType(
        routers=("router.gate",),
        moe_layers=dense_layers_first(1, "num_dense_layers"),
        correction_biases=("expert_bias",),
        shared_experts=_SHARED,
    ),
    "aria_text": ModelType(
        routers=("router",),
        projections=None,
        fused=(ExpertNames(("experts.fc1",), "experts.fc2"), ExpertNames()),
        intermediate_size="intermediate_size",
        activation=lambda config: ACTIVATIONS["silu"],  # hidden_act is the shared experts'.
        shared_experts=_SHARED,
    ),
    "axk1 axk2 deepseek_ocr2_text dots3_note dots3_note_text glm4_moe_lite unlimited_ocr_text": _ONE_DENSE,
    "bailing_hybrid": dataclasses.replace(_DEEPSEEK, moe_layers=listed_layers(dense_layers_first(2))),
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
        fused=(ExpertNames(("experts.mlp.w1", "experts.mlp.v1"), "experts.mlp.w2", is_flat=True),),
        intermediate_size="ffn_hidden_size",
        activation=lambda config: _named_act(
            read_object(read_object(config, "ffn_config"), "ffn_act_fn"), "name", "silu", _HIDDEN_ACTS
        ),
    ),
    "deepseek_v2 dots1 mistral4": dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(0)),
    "deepseek_v3 kimi_k2": dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(3)),
    "deepseek_v32 glm_moe_dsa": _THREE_DENSE,
    "deepseek_v4": ModelType(
        blocks=("ffn", "mlp"),
        projections=_W1_W3_W2,
        moe_layers=listed_layers(every_layer, sparse=("moe", "hash_moe")),
        activation=_CLAMPED_SILU,
        correction_biases=("gate.bias", "gate.e_score_correction_bias"),
        shared_experts=_SHARED,
        expert_table=_is_hashed,
    ),
    "diffusion_gemma_text": _GEMMA,
    "ernie4_5_moe": ModelType(
        moe_layers=bounded_step_layers,
        correction_biases=("moe_statics.e_score_correction_bias", "gate.moe_statics.e_score_correction_bias"),
        shared_experts=_SHARED,
    ),
    "exaone_moe": dataclasses.replace(
        _ONE_DENSE, correction_biases=("e_score_correction_bias", "gate.e_score_correction_bias")
    ),
    "flex_olmo olmoe": ModelType(intermediate_size="intermediate_size"),
    "flint": dataclasses.replace(
        _QWEN_SHARED, moe_layers=sparse_step_layers((0, 1)), shared_experts=("shared_expert",)
    ),
    "gemma4_text": dataclasses.replace(
        _GEMMA, moe_layers=lambda config, count: range(count if read_flag(config, "enable_moe_block") else 0)
    ),
    "glm4_moe glm4v_moe_text sarvam_mla sarvam_moe": dataclasses.replace(_DEEPSEEK, moe_layers=dense_layers_first(1)),
    "glm5_next glm5_next_text": dataclasses.replace(_THREE_DENSE, activation=_CLAMPED_SILU),
    "gpt_oss": dataclasses.replace(_GPT_OSS, fused=(ExpertNames(is_interleaved=True),)),
    "granitemoe": dataclasses.replace(_GRANITE, shared_experts=()),
    "granitemoe_swa granitemoehybrid granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": ModelType(
        routers=("gate.wg",), intermediate_size="intermediate_size", shared_experts=("shared_mlp",)
    ),
    "hy_v3": dataclasses.replace(
        _ONE_DENSE,
        routers=("router.gate", "gate"),
        correction_biases=("expert_bias", "e_score_correction_bias"),
        shared_experts=("shared_mlp", "shared_experts"),
    ),
    "hy_v4 hy_v4_vl_text": dataclasses.replace(_ONE_DENSE, activation=_CLAMPED_SILU),
    "inkling2_text": ModelType(
        projections=None,
        fused=(ExpertNames(("experts.w13_weight",), "experts.w2_weight", is_interleaved=True), ExpertNames()),
        activation=lambda config: _softcapped(config, ("mlp_gate_softcap", 4.0), ("mlp_up_softcap", 25.0)),
        correction_biases=("gate.bias", "gate.e_score_correction_bias"),
    ),
    "jamba": ModelType(
        blocks=("feed_forward",),
        routers=("router",),
        intermediate_size="intermediate_size",
        moe_layers=offset_layers,
    ),
    "kimi_linear": dataclasses.replace(_ONE_DENSE, blocks=("block_sparse_moe", "mlp"), projections=_W1_W3_W2),
    "kolibri1": ModelType(outer_correction_bias="moe.router.expert_bias", shared_experts=_SHARED),
    "lara_mini": ModelType(shared_experts=("shared_expert",)),
    "laguna": dataclasses.replace(
        _ONE_DENSE,
        correction_biases=("experts.e_score_correction_bias", "gate.e_score_correction_bias"),
        shared_experts=("shared_expert", "shared_experts"),
    ),
    "lfm2_moe": ModelType(
        blocks=("feed_forward",),
        projections=_W1_W3_W2,
        moe_layers=dense_layers_first(2, "num_dense_layers"),
        activation=lambda config: ACTIVATIONS["silu"],  # Not in the config.
        correction_biases=("expert_bias",),
    ),
    "llama4_text": ModelType(
        blocks=("feed_forward",),
        routers=("router",),
        projections=None,
        intermediate_size="intermediate_size",
        moe_layers=llama4_layers,
        shared_experts=("shared_expert",),
    ),
    "mellum": ModelType(moe_layers=listed_layers(every_layer)),
    "mimo_v2_flash": dataclasses.replace(_ONE_DENSE, shared_experts=()),
    "minimax mixtral": _MIXTRAL,
    "minimax_m2": dataclasses.replace(_MIXTRAL, correction_biases=("e_score_correction_bias",)),
    "minimax_m3_vl_text": dataclasses.replace(
        _MIXTRAL,
        moe_layers=listed_layers(dense_layers_first(0)),
        activation=_CLAMPED_SWIGLU,
        correction_biases=("e_score_correction_bias", "gate.e_score_correction_bias"),
        shared_experts=_SHARED,
    ),
    "mistral_large4_text": dataclasses.replace(_ONE_DENSE, blocks=("", "mlp"), projections=_W1_W3_W2),
    "nemotron_h": ModelType(
        blocks=("mixer",),
        projections=("up_proj", "down_proj"),
        fused=(ExpertNames(("experts.up_proj",)),),
        moe_layers=nemotron_layers,
        activation=lambda config: _named_act(config, "mlp_hidden_act", "relu2", {"relu2": ACTIVATIONS["relu2"]}),
        shared_experts=_SHARED,
    ),
    "openai_privacy_filter": _GPT_OSS,
    "phimoe": dataclasses.replace(_MIXTRAL, routers=("gate", "router")),
    "qwen2_moe qwen3_next": _QWEN_SHARED,
    "qwen3_5_moe_text qwen4_exp_text": ModelType(shared_experts=_SHARED_AND_GATE),
    "qwen3_moe qwen3_omni_moe_text qwen3_vl_moe_text": _QWEN,
    "solar_open": ModelType(shared_experts=_SHARED),
    "step3p5": ModelType(
        blocks=("moe", "mlp"),
        projections=None,
        fused=(ExpertNames(("gate_proj", "up_proj"), "down_proj"), ExpertNames()),
        moe_layers=listed_layers(step_layers),
        correction_biases=("router_bias", "gate.e_score_correction_bias"),
        shared_experts=("share_expert", "shared_experts"),
        unsupported_reason=_step_reason,
    ),
}
"""By the model types that store their experts alike."""

MODEL_TYPES: Final[Mapping[str, ModelType]] = MappingProxyType(
    {name: row for names, row in _BY_NAMES.items() for name in names.split()}
)

"""From vLLM's layer and configuration to a `MoEProblem`, or to every reason against it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from moereg import MoEProblem
from moereg.errors import ArgumentError
from moereg.spec.activations import Activation
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE
from vllm_moereg.settings import Settings
from vllm_moereg.weights import Declined, Form, read_form

__all__ = ["ACTIVATIONS", "Described", "describe"]


class Described(NamedTuple):
    """A layer of vLLM in moereg's terms.

    Attributes:
        problem: The layer as its experts see it.
        form: How vLLM holds its weights.
        is_interleaved: Whether gate and up rows alternate in its w13.
    """

    problem: MoEProblem
    form: Form
    is_interleaved: bool


def _gate(name: str) -> Callable[[Any, Any], Activation]:
    return lambda layer, config: Activation(name, limit=layer.swiglu_limit if name == "silu" else None)


def _uninterleaved(layer: Any, config: Any) -> Activation:
    alpha, beta = (1.0 if layer.swiglu_alpha is None else layer.swiglu_alpha), layer.swiglu_beta or 0.0
    return Activation("swigluoai", alpha=alpha, beta=beta, limit=layer.swiglu_limit)


def _softcapped(layer: Any, config: Any) -> Activation:
    # vLLM's modules take an absent cap of the gate for 1.
    caps = config.activation_situ_beta or 1.0, config.activation_situ_linear_beta
    return Activation("situ", gate_softcap=caps[0], up_softcap=caps[1])


ACTIVATIONS: Final[Mapping[str, Callable[[Any, Any], Activation]]] = MappingProxyType(
    {
        "silu": _gate("silu"),
        "gelu": _gate("gelu"),
        "gelu_tanh": _gate("gelu_tanh"),
        # vLLM's kernels have gpt-oss's numbers built in.
        "swigluoai": lambda layer, config: Activation.from_name("swigluoai"),
        "swigluoai_uninterleave": _uninterleaved,
        "situ": _softcapped,
        "relu2_no_mul": lambda layer, config: Activation.from_name("relu2"),
    }
)
"""moereg's activation of a layer and its `FusedMoEConfig`, by the value of vLLM's `MoEActivation`."""

_INTERLEAVED: Final = "swigluoai"
_PLAIN: Final = ("silu", "gelu", "gelu_tanh")
_DISPATCHER: Final = "allgather_reducescatter"
"""vLLM's default, which gives the experts tokens in standard order with all routes; others do not, or are untried."""


def describe(layer: Any, method: Any, config: Any, engine: Any, settings: Settings) -> Described | list[str]:
    """Describes a layer before its weights are made.

    Args:
        layer: A `RoutedExperts` under construction.
        method: The quantization method that vLLM chose for it.
        config: Its `FusedMoEConfig`.
        engine: The `VllmConfig`.
        settings: The user's.

    Returns:
        The layer, or all reasons why moereg leaves it to vLLM.
    """
    reasons = list(_refusals(layer, config, engine, settings))
    form, activation = None, None
    try:
        form = read_form(method)
    except Declined as declined:
        reasons.append(str(declined))
    name = config.activation.value
    if name in ACTIVATIONS:
        activation = ACTIVATIONS[name](layer, config)
    else:
        reasons.append(f"requires an activation of {', '.join(ACTIVATIONS)}, got {name}")
    intermediate_size = config.intermediate_size_per_partition
    if form is not None:
        form, intermediate_size = _in_whole_groups(form, method, config)
        reasons.extend(_refusals_of_form(form, layer, config, intermediate_size))
    if reasons or form is None or activation is None:
        return reasons
    parallel = config.moe_parallel_config
    num_senders = parallel.dp_size * parallel.pcp_size
    try:
        problem = MoEProblem(
            num_experts=config.num_experts,
            num_local_experts=config.num_local_experts,
            hidden_size=config.hidden_dim,
            intermediate_size=intermediate_size,
            top_k=config.experts_per_token,
            dtype=config.in_dtype,
            quant=form.scheme,
            activation=activation,
            has_bias=config.has_bias,
            placement="map" if parallel.use_ep and config.num_local_experts != config.num_experts else "contiguous",
            # Where vLLM moves tokens between ranks, it multiplies them by their weights before.
            apply_router_weight_on_input=layer.apply_router_weight_on_input and not moves_tokens(config),
            graph_capture=_captures(engine),
            deterministic=settings.deterministic,
            batch_invariant=settings.batch_invariant,
            exact_activations=settings.exact_activations,
            max_num_tokens=config.max_num_tokens * (num_senders if moves_tokens(config) else 1),
        )
    except ArgumentError as error:
        return [f"moereg has no such problem: {error}"]
    return Described(problem, form, name == _INTERLEAVED)


def _in_whole_groups(form: Form, method: Any, config: Any) -> tuple[Form, int]:
    """A rank's part of the intermediate with whole groups and blocks, the same size on every rank."""
    size, weight = config.intermediate_size_per_partition, QUANT_SCHEMES[form.scheme].weight
    if weight is None:
        return form, size
    group, parallel = weight.group[1], config.moe_parallel_config
    if form.refined > 1:
        # The part begins up to this far behind the first element of a block.
        return dataclasses.replace(form, front=size * parallel.tp_rank % group), size + group - math.gcd(size, group)
    if form.is_padded and size % group:
        return form, method.maybe_roundup_sizes(config.hidden_dim, size, config.in_dtype, parallel)[1]
    return form, size


def _refusals_of_form(form: Form, layer: Any, config: Any, intermediate_size: int) -> Iterator[str]:
    name = config.activation.value
    if name == _INTERLEAVED and not form.may_interleave:
        yield f"requires gate rows before up rows in scheme {form.scheme}, got {name}, which alternates them"
    weight, activation = QUANT_SCHEMES[form.scheme].weight, QUANT_SCHEMES[form.scheme].activation
    if config.is_lora_enabled:
        yield from _refusals_beside_adapters(form, layer, config)
    is_of_rank = activation is not None and (activation.group[0] == WHOLE or activation.global_scale)
    if is_of_rank and config.moe_parallel_config.enable_eplb:
        # It depends on the experts of a rank, so that numbers would change when experts move.
        yield f"requires activations with scales per token with --enable-eplb, got one for all in scheme {form.scheme}"
    if weight is None:
        if layer.params_dtype != config.in_dtype:
            yield f"requires weights of the tokens' dtype, got {layer.params_dtype} and {config.in_dtype}"
        return
    rows, columns = weight.group
    sizes = {"hidden size": config.hidden_dim, "intermediate size of a rank": intermediate_size}
    for what, size in sizes.items():
        # vLLM's parameters have no scale for the rest of a group, and its loader would give a rank another's scales.
        if rows == 1 and columns != WHOLE and size % columns:
            yield f"requires {what} % {columns} == 0 in scheme {form.scheme}, got {size}"


def _refusals_beside_adapters(form: Form, layer: Any, config: Any) -> Iterator[str]:
    """Refuses what the path with LoRA lacks: vLLM adds to rows, and its activation follows, in 0.26 without a clamp."""
    name, limit = config.activation.value, layer.swiglu_limit
    if form.scheme != "unquantized":
        yield f"requires weights without a scheme in an engine with LoRA, got {form.scheme}"
    if name not in _PLAIN or limit is not None:
        yield f"requires activation {', '.join(_PLAIN)} without a clamp in an engine with LoRA, got {name} and {limit}"
    if layer.apply_router_weight_on_input:
        yield "requires routing weights of outputs in an engine with LoRA, got apply_router_weight_on_input"
    if config.moe_parallel_config.enable_eplb:
        yield "requires experts that stay where their adapters are in an engine with LoRA, got --enable-eplb"


def moves_tokens(config: Any) -> bool:
    """Whether vLLM moves tokens between data-parallel ranks before and after the experts."""
    parallel = config.moe_parallel_config
    return bool(parallel.use_all2all_kernels or parallel.dp_size > 1)


def _captures(engine: Any) -> bool:
    return engine.device_config.device_type == "cuda" and not engine.model_config.enforce_eager


def _refusals(layer: Any, config: Any, engine: Any, settings: Settings) -> Iterator[str]:
    """Reasons to leave a layer to vLLM whatever its weights are."""
    parallel = config.moe_parallel_config
    if config.moe_backend != "auto":
        yield f"leaves a layer whose kernel was requested to vLLM, got --moe-backend {config.moe_backend}"
    if engine.parallel_config.enable_elastic_ep:
        yield "requires a fixed number of ranks, got elastic expert parallelism"
    if engine.parallel_config.use_ubatching:
        yield "requires one stream, got --enable-dbo or --ubatch-size"
    if parallel.use_all2all_kernels and parallel.all2all_backend != _DISPATCHER:
        yield f"requires --all2all-backend {_DISPATCHER}, got {parallel.all2all_backend}"
    if config.aiter_fmoe_shared_expert_enabled:
        yield "requires shared experts apart from the others, got AITER's fused ones"
    if type(layer).__name__ == "SubstitutedRoutedExperts":
        # vLLM 0.33 makes their routes ones to expert 0 with weight 0, so that a token may name it several times.
        yield "requires distinct experts within a token, got MoNE's constant ones"
    if engine.load_config.load_format == "ipc_cache":
        yield "requires weights that this process loads, got --load-format ipc_cache"
    offload = engine.offload_config
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        yield "requires weights on the device, got --cpu-offload-gb or --offload-group-size"
    if settings.batch_invariant and config.is_lora_enabled:
        yield "makes no promise that tokens with adapters do not depend on their batch, got batch_invariant"

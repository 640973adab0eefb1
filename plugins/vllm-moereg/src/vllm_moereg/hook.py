"""The hook: vLLM's layers get a quantization method that runs moereg's kernel.

vLLM builds its own method first, which creates parameters and loads weights as usual. Where moereg serves the layer,
the method's class becomes a subclass with the same name, since loaders branch on it; the subclass takes the weights out
of the parameters when they are loaded, and calls the kernel.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from typing import Any, Final, NoReturn

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEKernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from moereg import ExpertWeights, MoEKernel, Selection, explain_backends, make_kernel
from moereg.platforms import platform_of
from moereg.selection.decide import reading_in_place
from vllm_moereg.experts import MoeregExperts
from vllm_moereg.problem import Described, describe, moves_tokens
from vllm_moereg.settings import HostError, Settings
from vllm_moereg.weights import expose, give_back, places_of, rows_of_experts, take_weights

__all__ = ["install", "served_by"]

logger: Final = logging.getLogger("vllm.moereg")

_APART: Final = "triton"
"""The backend of whose products `MoeregExperts` makes a layer with adapters."""
# Before 0.30 vLLM's routers call operators that its builds for CPUs lack: its own experts route there.
_CPU_ROUTER: Final = "vllm.model_executor.layers.fused_moe.router.cpu_router"
# What was measured on a CPU: this backend, computing this.
_CPU_BACKEND: Final = "cpu"
_CPU_SCHEMES: Final = ("int4_w4a16", "int8_w8a16", "mxfp4_w4a16")
_SAID: Final[set[str]] = set()
_WARMED: Final[set[str]] = set()


def install() -> None:
    """Wraps `RoutedExperts._get_quant_method`; a second call changes nothing."""
    original = RoutedExperts._get_quant_method
    if hasattr(original, "of_moereg"):
        return

    @functools.wraps(original)
    def _get_quant_method(self: Any, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = original(self, prefix, quant_config, moe_config)
        _serve(self, prefix, method, moe_config)
        return method

    _get_quant_method.of_moereg = True  # type: ignore[attr-defined]
    RoutedExperts._get_quant_method = _get_quant_method


def served_by(method: Any) -> Served | None:
    """Moereg's part of a quantization method; None if vLLM runs the layer."""
    found: Served | None = getattr(method, "moereg", None)
    return found


class Served:
    """The layer of a quantization method that moereg serves.

    Attributes:
        name: The layer's.
        described: The layer.
        selection: How its backend was chosen.
        kernel: The kernel, once weights are loaded. Later loads write into its tensors.
        places: Tensors of the kernel that are the layer's own parameters, by name.
        moves_tokens: Whether vLLM moves tokens between ranks, so that its modular kernel is in between.
    """

    def __init__(self, name: str, described: Described, selection: Selection, moves: bool, warm_up: bool) -> None:
        self.name = name
        self.described = described
        self.selection = selection
        self.moves_tokens = moves
        self.warm_up = warm_up
        self.kernel: MoEKernel | None = None
        self.places: dict[str, torch.Tensor] = {}


def _serve(layer: Any, name: str, method: Any, config: Any) -> None:
    """Makes a method moereg's where moereg serves the layer; else says why not, once for layers alike."""
    engine = get_current_vllm_config()
    settings = Settings.read(os.environ, engine.additional_config)
    if settings.mode == "off":
        return
    kind = type(method).__name__
    described = describe(layer, method, config, engine, settings)
    sizes = config.hidden_dim, config.intermediate_size_per_partition
    rounded = FusedMoEMethodBase.maybe_roundup_sizes(method, *sizes, config.in_dtype, config.moe_parallel_config)
    if isinstance(described, Described) and rounded != sizes:
        described = [f"requires sizes that vLLM does not round up for its token dispatcher, got {sizes} and {rounded}"]
    device = torch.device(engine.device_config.device_type)
    if isinstance(described, Described) and not _can_route(device):
        described = ["requires vLLM 0.30 or newer on a CPU, since older ones route there in their own experts only"]
    if isinstance(described, Described):
        selection = explain_backends(
            described.problem, platform_of(device), settings.require, settings.prefer, settings.deny
        )
        if config.is_lora_enabled:
            selection = reading_in_place(selection)
        reasons = cpu_refusal(selection) if selection.winner is not None else selection.refusal
        if config.is_lora_enabled and selection.backend not in (None, _APART):
            reasons = f"requires backend {_APART} in an engine with LoRA, got {selection.backend}"
        if not reasons:
            _say_choice(name, selection)
            _enter_cache_key(engine, selection)
            method.__class__ = _subclass(type(method))
            method.moereg = Served(name, described, selection, moves_tokens(config), settings.warm_up)
            return
    else:
        reasons = "; ".join(described)
    text = f"moereg leaves MoE layers such as {name} ({kind}) to vLLM: {reasons}"
    if settings.mode == "require":
        raise HostError(f"MOEREG_VLLM=require, but {text}")
    if f"{kind}: {reasons}" not in _SAID:
        _SAID.add(f"{kind}: {reasons}")
        logger.warning("%s", text)


def _can_route(device: torch.device) -> bool:
    return device.type != "cpu" or importlib.util.find_spec(_CPU_ROUTER) is not None


def cpu_refusal(selection: Selection) -> str | None:
    """Why a layer on a CPU is left to vLLM although a kernel fits: it was not measured, and nobody asked for it."""
    winner, problem = selection.winner, selection.problem
    if winner is None or selection.platform.kind != "cpu" or selection.request.require or selection.request.prefer:
        return None
    computes = winner.computes
    is_faster = problem.dtype == "bfloat16" if computes == "unquantized" else computes.startswith(_CPU_SCHEMES)
    if winner.backend == _CPU_BACKEND and is_faster:
        return None
    return (
        f"requires on a CPU the backend {_CPU_BACKEND} of moereg-cpu and bfloat16, int8_w8a16, int4 or mxfp4, got "
        f"{winner.backend} and {computes} in {problem.dtype}; MOEREG_REQUIRE or MOEREG_PREFER names a backend to use it"
    )


def _say_choice(name: str, selection: Selection) -> None:
    winner = selection.winner
    assert winner is not None
    others = ", ".join(selection.alternatives) or "none"
    text = (
        f"MoE {selection.problem} on {selection.platform}: {winner.label}, "
        f"computes {winner.computes}, by {selection.source}; next: {others}"
    )
    if text in _SAID:
        return
    _SAID.add(text)
    logger.info("moereg runs %s and layers like it: %s", name, text)
    if winner.tier == "emulation":
        logger.warning(
            "%s is an emulation: right numbers, not the scheme's speed; MOEREG_VLLM=off leaves it to vLLM",
            winner.backend,
        )
    for notice in selection.notices:
        logger.warning("moereg: %s", notice)
    logger.debug("%s", selection.table())


def _enter_cache_key(engine: Any, selection: Selection) -> None:
    """Makes the choice part of the keys of vLLM's compile cache and startup plan, which hash this configuration."""
    if isinstance(engine.additional_config, dict):
        chosen = set(engine.additional_config.get("moereg_chose", ())) | {selection.fingerprint}
        engine.additional_config["moereg_chose"] = sorted(chosen)


@functools.cache
def _subclass(base: type) -> type:
    """A subclass with the base's name. One base: with a second, Python refuses to change an instance's class."""
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} whose experts run on a kernel that moereg chose.",
        "maybe_roundup_sizes": _round_up,
        # vLLM's warm-up of DeepGEMM asks every layer for it; the base's reads what its own kernel left on the method.
        "get_fused_moe_quant_config": lambda self, layer: FusedMoEQuantConfig.make(),
        "process_weights_after_loading": _process_weights,
        "apply": _apply,
    }
    flags = ("is_monolithic", "has_unpadded_output", "skip_forward_padding", "supports_pre_processed_weights")
    for name in flags:
        namespace[name] = property(lambda self: False)
    namespace["supports_eplb"] = property(lambda self: True)
    return type(base.__name__, (base,), namespace)


def _round_up(method: Any, hidden_size: int, intermediate_size: int, *others: Any, **named: Any) -> tuple[int, int]:
    """Rounds for the token dispatcher; vLLM's own also pads both sizes to its kernels' tiles."""
    described = method.moereg.described
    hidden_size, own = FusedMoEMethodBase.maybe_roundup_sizes(method, hidden_size, intermediate_size, *others, **named)
    return hidden_size, described.problem.intermediate_size if described.form.is_padded else own


def _process_weights(method: Any, layer: Any) -> None:
    served: Served = method.moereg
    is_first = served.kernel is None
    try:
        if is_first:
            _make(served, layer)
            if method.moe.moe_parallel_config.enable_eplb:
                # vLLM's own takes every parameter, also those that are empty now.
                rows = rows_of_experts(served.kernel)
                layer.get_expert_weights = lambda: rows
        else:
            _reload(served, layer)
    except ValueError as error:
        raise HostError(
            f"moereg cannot read the weights of {served.name} ({type(method).__name__}): {error}; MOEREG_VLLM=off "
            "leaves them to vLLM"
        ) from error
    assert served.kernel is not None
    expose(layer, served.kernel)
    _refuse_single_loads(served, layer)
    if not is_first:
        return
    method.moe_quant_config = FusedMoEQuantConfig.make()
    mover = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=method.moe_quant_config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    # vLLM asks it how tokens move and whether sums are complete, so every layer has one.
    method.moe_kernel = FusedMoEKernel(mover, MoeregExperts(method.moe, method.moe_quant_config, served.kernel))
    key = served.selection.fingerprint
    if served.warm_up and served.kernel.weights.device.type == "cuda" and key not in _WARMED:
        _WARMED.add(key)
        logger.info("moereg: %s", served.kernel.warm_up())


def _make(served: Served, layer: Any) -> None:
    problem = served.described.problem
    places = places_of(layer)
    weights = _take(served, layer)
    expert_map = layer._expert_map if problem.placement == "map" else None
    kernel = make_kernel(problem, weights, selection=served.selection, expert_map=expert_map)
    kernel.checks_values = False  # Before vLLM compiles, it runs the model on memory that nothing wrote.
    served.kernel, served.places = kernel, give_back(layer, places, kernel)


def _reload(served: Served, layer: Any) -> None:
    """Writes into the kernel's tensors, whose addresses captured graphs hold.

    vLLM has loaded into temporary parameters. It copies what it then finds under each name to where it was before,
    which are the kernel's tensors again, so that nothing is copied twice.
    """
    assert served.kernel is not None
    if layer.moe_config.moe_parallel_config.enable_eplb:
        raise HostError(
            f"moereg cannot load weights of {served.name} again with --enable-eplb: vLLM would write them to where its "
            "experts were at first; start another engine"
        )
    served.kernel.reload(_take(served, layer), write_shared=True)
    for name, tensor in served.places.items():
        layer._parameters[name].data = tensor


def _take(served: Served, layer: Any) -> ExpertWeights:
    described = served.described
    loaded = getattr(layer, "_loaded_expert_biases", ())
    if loaded and not described.problem.has_bias:
        raise ValueError(f"the checkpoint must have no biases where the model declares none, got {sorted(loaded)}")
    return take_weights(layer, described.form, described.problem, described.is_interleaved)


def _refuse_single_loads(served: Served, layer: Any) -> None:
    """Refuses tensors that `load_weights` gives to a repacked layer one by one, which nothing would process."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise HostError(
            f"moereg cannot load single weights of {served.name}, which it has repacked; load all through vLLM's "
            "reload_weights, which processes them"
        )

    def ignore(*_: Any, **__: Any) -> bool:
        return True

    suffixes = {"_bias", *(where.suffix for where in served.described.form.tensors.values())}
    for key, parameter in layer._parameters.items():
        if parameter is not None and parameter.numel() == 0:
            # vLLM goes on loading what says nothing, such as a shape for each expert, after it has processed a layer.
            is_read = key.removeprefix("w13").removeprefix("w2") in suffixes
            parameter.weight_loader = refuse if is_read else ignore


def _apply(
    method: Any,
    layer: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    shared_experts: Any = None,
    shared_experts_input: torch.Tensor | None = None,
) -> torch.Tensor:
    served: Served = method.moereg
    kernel = served.kernel
    assert kernel is not None, "weights are loaded before the first call"
    if not served.moves_tokens:
        # vLLM's modular kernel would copy the result once more, and does nothing else here.
        return kernel(x.contiguous(), topk_weights.float(), topk_ids)
    nothing = x.new_empty((kernel.problem.num_local_experts, 0, 0))
    result: torch.Tensor = method.moe_kernel.apply(
        hidden_states=x,
        w1=nothing,
        w2=nothing,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=layer.activation,
        global_num_experts=layer.global_num_experts,
        expert_map=layer.expert_map,
        apply_router_weight_on_input=layer.apply_router_weight_on_input,
        shared_experts=shared_experts,
        shared_experts_input=shared_experts_input,
    )
    return result

"""From SGLang's layer to a `MoEProblem` and its weights, or to every reason against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from moereg import Activation, ExpertWeights, MoEProblem
from moereg.errors import ArgumentError

__all__ = ["DEFAULTS", "Described", "describe", "take_weights"]

DEFAULTS: Final[Mapping[str, object]] = {
    **dict.fromkeys(("enable_lora", "lora_paths", "enable_eplb", "ep_num_redundant_experts", "elastic_ep_backend")),
    **dict.fromkeys(("enable_two_batch_overlap", "enable_single_batch_overlap", "enable_pdmux", "cpu_offload_gb")),
    **dict.fromkeys(("enable_torch_compile", "enable_memory_saver", "enable_symm_mem")),
    **{"enable_fused_moe_sum_all_reduce": None, "init_expert_location": "trivial", "offload_group_size": -1},
    "dwdp_size": 1,
}
"""Fields of `ServerArgs` with whose other values SGLang moves, adapts or compiles experts; None is any false value."""


class Described(NamedTuple):
    """A layer of SGLang in moereg's terms.

    Attributes:
        problem: The layer as its experts see it.
        is_interleaved: Whether gate and up rows alternate in its w13.
        scale: Factor of routing weights that SGLang leaves to the experts.
    """

    problem: MoEProblem
    is_interleaved: bool
    scale: float


def describe(layer: Any, args: Any, runner: Any, mover: Any) -> Described | list[str]:
    """Describes a layer whose weights are not loaded, or says all reasons why moereg leaves it to SGLang.

    Args:
        layer: A `FusedMoE`, constructed.
        args: SGLang's `ServerArgs`.
        runner, mover: Its `MoeRunnerBackend` and its `MoeA2ABackend`.
    """
    config = layer.moe_runner_config
    device = next((parameter.device.type for parameter in layer.parameters()), "none")
    is_gpt_oss = config.gemm1_alpha is not None
    # SGLang's models multiply by it themselves where it runs on a CPU.
    is_ours = device == "cuda" and not layer.should_fuse_routed_scaling_factor_in_topk
    scale = float((config.routed_scaling_factor if is_ours else None) or 1.0)
    if reasons := [*_refusals(layer, args, runner, mover, device), *_scheme_refusals(layer.quant_method)]:
        return reasons
    silu = {"alpha": config.gemm1_alpha, "beta": 1.0, "limit": config.gemm1_clamp_limit} if is_gpt_oss else {}
    try:
        problem = MoEProblem(
            num_experts=config.num_experts,
            num_local_experts=config.num_local_experts,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size_per_partition,
            top_k=config.top_k,
            dtype=config.params_dtype,
            quant="unquantized" if "w13_weight_scale_inv" not in layer._parameters else "fp8_block128",
            activation=Activation("swigluoai" if is_gpt_oss else "silu", **silu),
            has_bias="w13_weight_bias" in layer._parameters,
            apply_router_weight_on_input=config.apply_router_weight_on_input,
            graph_capture=device == "cuda" and not args.disable_cuda_graph,
            deterministic=bool(args.enable_deterministic_inference),
        )
    except ArgumentError as error:
        return [f"moereg has no such problem: {error}"]
    return Described(problem, is_gpt_oss and config.gate_up_interleaved, scale)


def _scheme_refusals(method: Any) -> Iterator[str]:
    kind = type(method).__name__
    if kind == "Fp8MoEMethod":
        blocks = "mxfp8" if method.use_mxfp8 else list(method.quant_config.weight_block_size or ())
        if not method.quant_config.is_checkpoint_fp8_serialized:
            yield "requires a checkpoint in fp8, got one that is quantized at load"
        if blocks != [128, 128]:
            yield f"requires fp8 blocks of 128 x 128, got {blocks}"
        if method.is_fp4_expert or method.dequant_fp4_to_fp8:
            yield "requires experts in fp8, got fp4"
    elif kind != "UnquantizedFusedMoEMethod":
        yield f"requires a quantization method that moereg reads, got {kind}"


def _refusals(layer: Any, args: Any, runner: Any, mover: Any, device: str) -> Iterator[str]:
    """Reasons to leave a layer to SGLang whatever its weights are."""
    config = layer.moe_runner_config
    if type(layer).__name__ != "FusedMoE":
        yield f"requires SGLang's FusedMoE, got {type(layer).__name__}"
    if device not in ("cpu", "cuda") or torch.version.hip:
        yield f"requires weights on a CPU or on CUDA, got {'ROCm' if torch.version.hip else device}"
    if not runner.is_auto():
        yield f"leaves a layer whose kernel was requested to SGLang, got --moe-runner-backend {runner.value}"
    if not mover.is_none() or type(layer.dispatcher).__name__ != "StandardDispatcher":
        yield f"requires tokens that stay on their rank, got {type(layer.dispatcher).__name__} ({mover.value})"
    if config.activation != "silu" or not config.is_gated:
        yield f"requires gated silu, got {config.activation}{'' if config.is_gated else ' without a gate'}"
    limit = config.swiglu_limit if config.gemm1_alpha is not None else config.swiglu_limit or config.gemm1_clamp_limit
    if limit is not None:  # SGLang clamps after silu, moereg before it.
        yield f"requires silu without a clamp, got {limit}"
    if config.no_combine:
        yield "requires a sum over experts, got no_combine"
    if config.apply_router_weight_on_input and config.routed_scaling_factor not in (None, 1.0):
        yield f"requires routing weights on outputs with routed_scaling_factor {config.routed_scaling_factor}"
    for name, default in DEFAULTS.items():
        value = getattr(args, name, default)
        if value != default and (value or default is not None):
            yield f"requires the default of {name}, got {value}"


def take_weights(layer: Any, described: Described) -> ExpertWeights:
    """Takes a layer's weights out of its parameters, which keep their names and hold nothing after it.

    Raises:
        ValueError: Tensors have other shapes or dtypes than the scheme says.
    """
    problem = described.problem
    suffixes = {"": "_weight"} | ({"_bias": "_weight_bias"} if problem.has_bias else {})
    suffixes |= {"_scale": "_weight_scale_inv"} if problem.quant.weight is not None else {}
    taken: dict[str, torch.Tensor] = {}
    for field, suffix in suffixes.items():
        for matrix in ("w13", "w2"):
            parameter = getattr(layer, matrix + suffix)
            tensor, parameter.data = parameter.data, parameter.data.new_empty((problem.num_local_experts, 0, 0))
            if matrix == "w13" and described.is_interleaved:
                tensor = tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            taken[matrix + field] = tensor
    return ExpertWeights(**taken, quant=problem.quant)  # type: ignore[arg-type]

"""`torch`: no kernel library beyond torch; every platform, and the default on CPUs."""

from __future__ import annotations

from typing import Final

import torch

from moereg.experts import ExpertInputs, Experts, Facts
from moereg.kernels.plain import device as torch_device_moe
from moereg.kernels.plain import host as torch_moe
from moereg.kernels.plain import mlp as torch_mlp
from moereg.layouts import aligned
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

__all__ = [
    "TorchBatchedExperts",
    "TorchDenseExperts",
    "TorchGroupedExperts",
    "TorchPackedBatchedExperts",
    "TorchPackedExperts",
]

CANONICAL: Final = "canonical"
ONEDNN_FUSED: Final = "onednn_gate_up_down"
ONEDNN: Final = "onednn_w13_w2"

_ALL_ACTIVATIONS: Final = frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"})
_ALL_DTYPES: Final = frozenset({"bfloat16", "float16", "float32"})
_ALL_PLACEMENTS: Final = frozenset({"contiguous", "map"})


# 1.6x the speed of the best of transformers' implementations in the geometric mean, benches/bench_torch_cpu.py.
@register_moe_backend(name="torch", priority=60, quant_schemes=("unquantized",), platforms=("cpu",))
class TorchPackedExperts(Experts):
    """CPU, standard format: weights in oneDNN's order where that is faster, active experts only.

    Reads the routing on the host, as a CPU can.
    """

    facts = Facts(
        activations=_ALL_ACTIVATIONS,
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=_ALL_DTYPES,
        bias=True,
        placements=_ALL_PLACEMENTS,
        router_weight_on_input=True,
        deterministic=True,
    )
    layouts = (ONEDNN_FUSED, ONEDNN, CANONICAL)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Packs every expert, or keeps views of the canonical tensors where packing does not pay."""
        return _pack_weights(weights, problem, self.platform)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None, and the routed rows of a chunk of tokens."""
        itemsize = problem.torch_dtype.itemsize
        rows = torch_moe.routed_rows(num_tokens, problem.top_k, problem.hidden_size, itemsize)
        return (0,), (rows, problem.hidden_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_moe.host_experts`."""
        torch_moe.host_experts(
            out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            _expert_mlp(weights, self.problem),
            self.problem.num_local_experts,
            self.problem.activation.num_halves * self.problem.intermediate_size,
            workspace2,
            inputs.expert_map,
            self.problem.apply_router_weight_on_input,
        )


@register_moe_backend(name="torch", priority=59, quant_schemes=("unquantized",), platforms=("cpu",))
class TorchPackedBatchedExperts(Experts):
    """CPU, batched format: as `TorchPackedExperts`, on the rows that prepare laid out for each expert."""

    facts = Facts(
        activations=_ALL_ACTIVATIONS,
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"batched"}),
        dtypes=_ALL_DTYPES,
        bias=True,
        placements=_ALL_PLACEMENTS,
        router_weight_on_input=True,
        deterministic=True,
    )
    output_form = "per_expert"
    layouts = TorchPackedExperts.layouts

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """As `TorchPackedExperts`."""
        return _pack_weights(weights, problem, self.platform)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: results go straight to `out`."""
        return (0,), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_moe.host_batched_experts`."""
        assert inputs.expert_num_tokens is not None
        torch_moe.host_batched_experts(
            out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            _expert_mlp(weights, self.problem),
            self.problem.activation.num_halves * self.problem.intermediate_size,
        )


class _CanonicalExperts(Experts):
    """Weights as checkpoints mean them; nothing to permute, no workspace."""

    layouts = (CANONICAL,)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views of the canonical tensors."""
        return PermutedWeights(CANONICAL, weights.tensors())

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: torch's allocator serves temporaries, also while a graph is captured."""
        return (0,), (0,)


# Slower than fused kernels, since it writes and reads every intermediate. On an H200, torch 2.11: 5.0 ms for
# Qwen3-30B's layer at T 4096 and 0.15 ms at T 1, against 32 and 5.7 ms of the dense loop.
@register_moe_backend(name="torch", priority=20, quant_schemes=("unquantized",), platforms=("cuda:sm90", "cuda:sm100"))
class TorchGroupedExperts(_CanonicalExperts):
    """GPUs for which torch has a grouped matmul, standard format."""

    facts = Facts(
        activations=_ALL_ACTIVATIONS,
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        bias=True,
        placements=_ALL_PLACEMENTS,
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
        # The grouped matmul wants strides of 16 bytes.
        requires_multiple={"hidden_size": 8, "intermediate_size": 8},
    )

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views of the canonical tensors where they begin at a multiple of 16 bytes, which the grouped matmul wants."""
        return PermutedWeights(CANONICAL, {name: aligned(tensor) for name, tensor in weights.tensors().items()})

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_device_moe.grouped_experts`."""
        torch_device_moe.grouped_experts(
            out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            weights["w13"],
            weights["w2"],
            self.problem.activation,
            weights.get("w13_bias"),
            weights.get("w2_bias"),
            inputs.expert_map,
            self.problem.apply_router_weight_on_input,
        )


# The last resort: E/K times the work that was routed.
@register_moe_backend(name="torch", priority=10, quant_schemes=("unquantized",), platforms=("*",))
class TorchDenseExperts(_CanonicalExperts):
    """Any device, standard format: every expert sees every token, unrouted results are dropped."""

    facts = Facts(
        activations=_ALL_ACTIVATIONS,
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=_ALL_DTYPES,
        bias=True,
        placements=_ALL_PLACEMENTS,
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
    )

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_device_moe.dense_experts`."""
        torch_device_moe.dense_experts(
            out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            weights["w13"],
            weights["w2"],
            self.problem.activation,
            weights.get("w13_bias"),
            weights.get("w2_bias"),
            inputs.expert_map,
            self.problem.apply_router_weight_on_input,
        )


# Batched matmuls over all rows, valid or not (an H200 took 1.0 ms for Qwen3-30B's layer with max_T 64).
@register_moe_backend(name="torch", priority=11, quant_schemes=("unquantized",), platforms=("*",))
class TorchBatchedExperts(_CanonicalExperts):
    """Any device, batched format: two batched matmuls over all rows."""

    facts = Facts(
        activations=_ALL_ACTIVATIONS,
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"batched"}),
        dtypes=_ALL_DTYPES,
        bias=True,
        placements=_ALL_PLACEMENTS,
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
    )
    output_form = "per_expert"

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts; see `kernels.torch_device_moe.batched_experts`."""
        assert inputs.expert_num_tokens is not None
        torch_device_moe.batched_experts(
            out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            weights["w13"],
            weights["w2"],
            self.problem.activation,
            weights.get("w13_bias"),
            weights.get("w2_bias"),
        )


def _pack_weights(weights: ExpertWeights, problem: MoEProblem, platform: Platform) -> PermutedWeights:
    biases = {name: tensor for name, tensor in weights.tensors().items() if name.endswith("_bias")}
    if not torch_mlp.packing_is_faster(problem.torch_dtype, is_intel="Intel" in platform.device_name):
        return PermutedWeights(CANONICAL, {"w13": weights.w13, "w2": weights.w2, **biases})
    down = torch_mlp.pack_experts(weights.w2)
    # oneDNN's fused product takes biases of the matmul's dtype only, and rounding fp32 ones would lose precision.
    has_wide_bias = weights.w13_bias is not None and weights.w13_bias.dtype != problem.torch_dtype
    if has_wide_bias or _post_op(problem) is None:
        return PermutedWeights(ONEDNN, {"w13": torch_mlp.pack_experts(weights.w13), "w2": down, **biases})
    gate, up = weights.w13.chunk(2, dim=1)
    halves = {"gate": torch_mlp.pack_experts(gate), "up": torch_mlp.pack_experts(up)}
    return PermutedWeights(ONEDNN_FUSED, {**halves, "down": down, **biases})


def _expert_mlp(weights: PermutedWeights, problem: MoEProblem) -> torch_mlp.ExpertMlp:
    activation, biases = problem.activation, (weights.get("w13_bias"), weights.get("w2_bias"))
    mlp: torch_mlp.ExpertMlp
    wide: torch_mlp.ExpertMlp
    if weights.layout == CANONICAL:
        is_emulated = torch_mlp.dtype_is_emulated(problem.torch_dtype)
        mlp = wide = torch_mlp.PlainMlp(weights["w13"], weights["w2"], activation, *biases, is_emulated)
    elif weights.layout == ONEDNN:
        w13, w2 = weights.experts("w13"), weights.experts("w2")
        mlp = torch_mlp.PackedMlp(w13, w2, activation, *biases)
        wide = torch_mlp.UnpackingMlp((w13,), w2, activation, *biases)
    else:
        post_op = _post_op(problem)
        assert post_op is not None
        gate, up, down = (weights.experts(name) for name in ("gate", "up", "down"))
        mlp = torch_mlp.PackedFusedMlp(gate, up, down, post_op, *biases)
        wide = torch_mlp.UnpackingMlp((gate, up), down, activation, *biases)
    # The other dtypes have the range of fp32.
    return torch_mlp.RepeatingMlp(mlp, wide) if problem.torch_dtype == torch.float16 else mlp


def _post_op(problem: MoEProblem) -> tuple[str, str] | None:
    activation = problem.activation
    return torch_mlp.fused_post_op(activation.name, activation.alpha, activation.beta, activation.limit)

"""The built-in Triton backend."""

from __future__ import annotations

import os

import torch

from moereg.experts import ExpertInputs, Experts, Facts
from moereg.layouts import pad_columns, round_up
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

# As the kernels have it; repeated because this module must import without triton.
_WEIGHT_PAD = 64


@register_moe_backend(
    name="triton",
    priority=100,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonExperts(Experts):
    """Grouped GEMMs over routes sorted by expert: sort, gate/up with the activation fused, down, reduce.

    Equal inputs give equal bits: a row of a product does not depend on its place in a tile, no kernel adds
    atomically, and a token's rows are added in the order of its choices.
    """

    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        bias=True,
        placements=frozenset({"contiguous", "map"}),
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
        pads_to={"hidden_size": _WEIGHT_PAD, "intermediate_size": _WEIGHT_PAD},
        # The scan over experts keeps one value an expert and thread in registers.
        max_experts=1024,
    )
    output_form = "reduced"
    layouts = ("gate_up_interleaved_pad64",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Sizes beyond the kernels' 32-bit offsets within one expert."""
        rows = problem.activation.num_halves * round_up(problem.intermediate_size, _WEIGHT_PAD)
        elements = rows * round_up(problem.hidden_size, _WEIGHT_PAD)
        if elements >= 2**31:
            return [f"requires fewer than 2**31 elements in one expert's w13, got {elements}"]
        return []

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        """The platform's, and the CPU where Triton's interpreter was asked for."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return (platform.device_type, "cpu") if interpreted else (platform.device_type,)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Interleaves gate and up row by row and zero-pads H of w13 and I of both to multiples of 64.

        Returns:
            `w13` [E, 2 * I_pad, H_pad] (row 2j gate j, row 2j + 1 up j; [E, I_pad, H_pad] where not gated), `w2`
            [E, H, I_pad], and where there are biases `w13_bias` [E, 2 * I_pad] and `w2_bias` [E, H].
        """
        halves = problem.activation.num_halves
        per_expert = {
            "w13": _interleave_and_pad(weights.w13, halves),
            "w2": _pad_experts(weights.w2),
        }
        if weights.w13_bias is not None and weights.w2_bias is not None:
            # A bias is a weight with one column, which is not padded.
            per_expert["w13_bias"] = _interleave_and_pad(weights.w13_bias.unsqueeze(2), halves, columns=1).squeeze(2)
            per_expert["w2_bias"] = weights.w2_bias.contiguous()
        return PermutedWeights(self.layouts[0], per_expert)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the plan of the routes and the rows [N, H] to be reduced."""
        routes = num_tokens * problem.top_k
        plan = _plan_numel(problem, num_tokens)
        return (
            (routes, round_up(problem.intermediate_size, _WEIGHT_PAD)),
            (plan + routes * problem.hidden_size,),
        )

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Six launches at most, four for few tokens; no allocation, no host synchronisation."""
        from moereg.kernels.triton_grouped_gemm import down_gemm, gate_up_gemm, max_shared_bytes, select_config
        from moereg.kernels.triton_reduce import reduce_routes
        from moereg.kernels.triton_routing import sort_routes

        problem = self.problem
        activation = problem.activation
        hidden_states = inputs.hidden_states
        num_tokens, hidden_size = hidden_states.shape
        num_routes = num_tokens * problem.top_k
        plan_numel = _plan_numel(problem, num_tokens)
        intermediate = workspace13[:num_routes]
        route_rows = workspace2[plan_numel : plan_numel + num_routes * hidden_size].view(num_routes, hidden_size)
        weight_on_input = problem.apply_router_weight_on_input

        gate_up_config, down_config = select_config(
            num_routes / problem.num_experts, hidden_states.element_size(), max_shared_bytes(hidden_states.device)
        )
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            gate_up_config.block_m,
            workspace2[:plan_numel].view(torch.int32),
        )
        gate_up_gemm(
            intermediate,
            hidden_states,
            weights["w13"],
            plan,
            gate_up_config,
            top_k=problem.top_k,
            activation=activation.name,
            gated=activation.gated,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
            bias=weights.get("w13_bias"),
            topk_weights=inputs.topk_weights if weight_on_input else None,
        )
        # Rows in the dtype of the activations: fp32 would double the layer's largest buffer and its traffic to save a
        # rounding that the output makes anyway.
        down_gemm(
            route_rows,
            intermediate,
            weights["w2"],
            plan,
            down_config,
            bias=weights.get("w2_bias"),
            topk_weights=None if weight_on_input else inputs.topk_weights,
        )
        reduce_routes(out, route_rows, plan.route_expert)


def _plan_numel(problem: MoEProblem, num_tokens: int) -> int:
    """Elements of the problem's dtype that hold the plan of any shipped configuration, at 256-byte granularity."""
    from moereg.kernels.triton_grouped_gemm import MIN_BLOCK_M
    from moereg.kernels.triton_routing import route_workspace_numel

    ints = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_BLOCK_M)
    return round_up(4 * ints, 256) // problem.torch_dtype.itemsize


def _interleave_and_pad(w13: torch.Tensor, halves: int, columns: int | None = None) -> torch.Tensor:
    """[E, halves * I, C], gate first, to [E, halves * I_pad, C_pad] interleaved; a view where that changes nothing."""
    num_experts, rows, width = w13.shape
    padded_rows = halves * round_up(rows // halves, _WEIGHT_PAD)
    padded_columns = round_up(width, _WEIGHT_PAD) if columns is None else columns
    if halves == 1 and (rows, width) == (padded_rows, padded_columns):
        return w13.contiguous()
    permuted = w13.new_zeros(num_experts, padded_rows, padded_columns)
    for target, source in zip(permuted, w13, strict=True):
        for half, part in enumerate(source.chunk(halves)):
            target[half:rows:halves, :width] = part
    return permuted


def _pad_experts(weight: torch.Tensor) -> torch.Tensor:
    return pad_columns(weight, round_up(weight.shape[2], _WEIGHT_PAD)).contiguous()

"""The built-in Triton backend."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from moereg.experts import ExpertInputs, Experts, Facts
from moereg.layouts import pad_columns, round_up
from moereg.platforms import Platform, PlatformRule
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

if TYPE_CHECKING:
    from moereg.kernels.triton_launch import LaunchRecording

# As the kernels have it; repeated because this module must import without triton.
_WEIGHT_PAD = 64

# Rows in front of both buffers of rows, into which a store of the Gluon kernels is anchored; as those kernels have it.
_GUARD_ROWS = 288

# Up to this many rows an expert the Gluon kernels' tiles would be mostly padding: on an H200 they lose 4 % at 8 rows
# (gpt-oss-120b, 256 tokens) and win 6 % at 64 (qwen3-30b-a3b, 1,024 tokens).
_MIN_GLUON_ROWS = 24

_WEIGHTS = ("w13", "w2", "w13_bias", "w2_bias")

# Triton compiles pointers that are multiples of this into wider loads, so recordings hold for such pointers only.
_POINTER_ALIGNMENT = 16

# A few kilobytes each; a server that sees more numbers of tokens than this starts again.
_MAX_RECORDINGS = 1024


@register_moe_backend(
    name="triton",
    priority=100,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
class TritonExperts(Experts):
    """Two matmuls with the activation between them: by grouped GEMMs over sorted routes, then a reduction.

    Up to 16 tokens need no sort, and one token runs as products of vectors that add up its routes themselves.

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

    def __init__(self, problem: MoEProblem, platform: Platform) -> None:
        super().__init__(problem, platform)
        # Compiled for one architecture's own instructions.
        self._has_gluon = PlatformRule("cuda:sm90").matches(platform)
        # By tokens, strides and device; the problem fixes everything else that a launch depends on but pointers.
        self._recordings: dict[tuple[int, int, int, int | None], LaunchRecording] = {}

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
            (_GUARD_ROWS + routes, round_up(problem.intermediate_size, _WEIGHT_PAD)),
            (plan + (_GUARD_ROWS + routes) * problem.hidden_size,),
        )

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Two launches for one token, three for a few, four to seven above; no allocation, no host synchronisation."""
        tensors = (
            out,
            inputs.hidden_states,
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_map,
            workspace13,
            workspace2,
            *(weights.get(name) for name in _WEIGHTS),
        )
        device = out.device
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        all_bits = 0
        for pointer in pointers:
            all_bits |= pointer
        if device.type != "cuda" or all_bits % _POINTER_ALIGNMENT:
            self._launch(out, inputs, weights, workspace13, workspace2)
            return
        key = (inputs.hidden_states.shape[0], inputs.hidden_states.stride(0), out.stride(0), device.index)
        recorded = self._recordings.get(key)
        if recorded is None:
            from moereg.kernels.triton_launch import recording

            with recording(tensors) as recorded:
                self._launch(out, inputs, weights, workspace13, workspace2)
            if len(self._recordings) >= _MAX_RECORDINGS:
                self._recordings.clear()
            self._recordings[key] = recorded
        elif recorded.complete:
            recorded.replay(pointers)
        else:
            self._launch(out, inputs, weights, workspace13, workspace2)

    def _launch(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        if self._warp_specialised(inputs.hidden_states, inputs.topk_ids.numel()):
            self._launch_gluon(out, inputs, weights, workspace13, workspace2)
        else:
            self._launch_triton(out, inputs, weights, workspace13, workspace2)

    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.triton_gemm_config import GemvPair, max_shared_bytes, select_config
        from moereg.kernels.triton_gemv import down_gemv, gate_up_gemv
        from moereg.kernels.triton_grouped_gemm import down_gemm, gate_up_gemm
        from moereg.kernels.triton_overlap import can_overlap
        from moereg.kernels.triton_reduce import reduce_routes
        from moereg.kernels.triton_routing import RoutePlan, sort_routes
        from moereg.kernels.triton_tiles import DirectRoutes

        problem = self.problem
        activation = problem.activation
        hidden_states, topk_ids, expert_map = inputs.hidden_states, inputs.topk_ids, inputs.expert_map
        num_tokens, hidden_size = hidden_states.shape
        num_routes = num_tokens * problem.top_k
        configs = select_config(
            num_tokens,
            num_routes / problem.num_experts,
            hidden_states.element_size(),
            max_shared_bytes(hidden_states.device),
        )
        overlap = can_overlap(hidden_states.device)
        intermediate = workspace13[:num_routes]
        weight_on_input = problem.apply_router_weight_on_input
        gate_up_keywords: dict[str, Any] = {
            "activation": activation.name,
            "gated": activation.gated,
            "alpha": activation.alpha,
            "beta": activation.beta,
            "limit": activation.limit,
            "bias": weights.get("w13_bias"),
            "topk_weights": inputs.topk_weights if weight_on_input else None,
            "overlap": overlap,
        }
        down_keywords: dict[str, Any] = {
            "bias": weights.get("w2_bias"),
            "topk_weights": None if weight_on_input else inputs.topk_weights,
            "overlap": overlap,
        }
        w13, w2 = weights["w13"], weights["w2"]
        if isinstance(configs, GemvPair):
            ids = (topk_ids, expert_map, problem.num_experts)
            gate_up_gemv(intermediate, hidden_states, w13, *ids, configs.gate_up, **gate_up_keywords)
            down_gemv(out, intermediate, w2, *ids, configs.down, **down_keywords)
            return
        plan_numel = _plan_numel(problem, num_tokens)
        route_rows = workspace2[plan_numel : plan_numel + num_routes * hidden_size].view(num_routes, hidden_size)
        plan: RoutePlan | DirectRoutes
        if configs.sort_routes:
            plan = sort_routes(
                topk_ids,
                expert_map,
                problem.num_experts,
                problem.num_local_experts,
                configs.gate_up.block_m,
                workspace2[:plan_numel].view(torch.int32),
                overlap=overlap,
            )
        else:
            plan = DirectRoutes(topk_ids, expert_map, problem.num_experts, configs.gate_up.block_m)
        gate_up_gemm(intermediate, hidden_states, w13, plan, configs.gate_up, top_k=problem.top_k, **gate_up_keywords)
        # Rows in the dtype of the activations: fp32 would double the layer's largest buffer and its traffic to save a
        # rounding that the output makes anyway.
        down_gemm(route_rows, intermediate, w2, plan, configs.down, **down_keywords)
        reduce_routes(
            out,
            route_rows,
            topk_ids,
            expert_map=expert_map,
            num_experts=problem.num_experts,
            num_local_experts=problem.num_local_experts,
            overlap=overlap,
        )

    def _warp_specialised(self, hidden_states: torch.Tensor, num_routes: int) -> bool:
        """Whether a call runs on the Gluon kernels, which pay from a few rows an expert on."""
        problem = self.problem
        return (
            self._has_gluon
            and hidden_states.device.type != "cpu"
            and hidden_states.element_size() == 2
            and not problem.apply_router_weight_on_input
            and num_routes > _MIN_GLUON_ROWS * problem.num_experts
            # Rows are copied by 16 bytes, at 32-bit offsets.
            and hidden_states.shape[1] % 8 == hidden_states.stride(0) % 8 == hidden_states.data_ptr() % 16 == 0
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        )

    def _launch_gluon(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gluon_consumer import GUARD_ROWS
        from moereg.kernels.gluon_grouped_gemm import down_gemm, gate_up_gemm, select_config
        from moereg.kernels.triton_copy import copy_rows
        from moereg.kernels.triton_reduce import reduce_sorted_rows
        from moereg.kernels.triton_routing import sort_routes

        assert GUARD_ROWS == _GUARD_ROWS, "the workspaces were sized for another guard"
        problem = self.problem
        activation = problem.activation
        num_tokens, hidden_size = inputs.hidden_states.shape
        num_routes = num_tokens * problem.top_k
        config = select_config(num_routes / problem.num_experts, weights["w13"].shape[1])
        plan_numel = _plan_numel(problem, num_tokens)
        intermediate = workspace13[: GUARD_ROWS + num_routes]
        sorted_rows = workspace2[plan_numel : plan_numel + (GUARD_ROWS + num_routes) * hidden_size].view(
            -1, hidden_size
        )
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            config.gate_up.plan_rows,
            workspace2[:plan_numel].view(torch.int32),
            slack=config.gate_up.slack,
        )
        rows: torch.Tensor = inputs.hidden_states
        if config.copies_rows:
            # The second GEMM's output is not there yet.
            rows = sorted_rows[GUARD_ROWS:]
            copy_rows(rows, inputs.hidden_states, plan.route_row)
        gate_up_gemm(
            intermediate,
            rows,
            weights["w13"],
            plan,
            config.gate_up,
            top_k=None if config.copies_rows else problem.top_k,
            activation=activation.name,
            gated=activation.gated,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
            bias=weights.get("w13_bias"),
        )
        down_gemm(sorted_rows, intermediate, weights["w2"], plan, config.down, bias=weights.get("w2_bias"))
        reduce_sorted_rows(out, sorted_rows[GUARD_ROWS:], plan.route_row, inputs.topk_weights)


def _plan_numel(problem: MoEProblem, num_tokens: int) -> int:
    """Elements of the problem's dtype that hold the plan of any shipped configuration, at 256-byte granularity."""
    from moereg.kernels.triton_gemm_config import MIN_BLOCK_M
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

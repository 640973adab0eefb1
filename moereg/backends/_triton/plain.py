"""16- and 32-bit weights with alternating gate and up rows."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import ways
from moereg.backends._triton.recorded import Recorded
from moereg.backends._triton.workspace import batched_rows_per_expert
from moereg.experts import Experts
from moereg.kernels.gemm.rules import MIN_BLOCK_M
from moereg.kernels.hopper import config as hopper
from moereg.kernels.sizes import GUARD_ROWS, WEIGHT_PAD
from moereg.platforms import PlatformRule
from moereg.weights.layouts import aligned, interleave_gate_up, pad_columns, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class Interleaved(Recorded):
    """Weight layout for both activation formats; a subclass sizes its workspaces and selects a way."""

    recorded_weights: ClassVar[tuple[str, ...]] = ("w13", "w2", "w13_bias", "w2_bias")
    shortest_tile: ClassVar[int] = MIN_BLOCK_M

    packed_bits: int | None = None
    """Bits of a packed weight; None if weights have the activations' dtype."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        # The kernels use instructions of this architecture only.
        self.has_hopper = PlatformRule("cuda:sm90").matches(self.platform)

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Interleaves gate and up row by row and zero-pads H of w13 and I of both to multiples of 64.

        Returns:
            `w13` [E, 2 * I_pad, H_pad] (row 2j gate j, row 2j + 1 up j; [E, I_pad, H_pad] if not gated), `w2`
            [E, H, I_pad], and if there are biases `w13_bias` [E, 2 * I_pad] and `w2_bias` [E, H].
        """
        halves = self.problem.activation.num_halves
        per_expert = {"w13": interleave_and_pad(weights.w13, halves), "w2": _pad_experts(weights.w2)}
        return PermutedWeights(self.layouts[0], {**per_expert, **permute_biases(weights, halves)})

    def work(self, call: Call, overlap: bool) -> ways.PlainWork:
        w13, w2 = self.matrices(call.weights)
        plan_bytes = self.plan_bytes(call.inputs.hidden_states.shape[-2])
        return ways.PlainWork(problem=self.problem, call=call, plan_bytes=plan_bytes, overlap=overlap, w13=w13, w2=w2)

    def matrices(self, weights: PermutedWeights) -> tuple[ways.Weights, ways.Weights]:
        """w13 and w2 in the kernels' form."""
        return weights["w13"], weights["w2"]

    def fits_hopper(self, hidden_states: torch.Tensor, rows_per_expert: float) -> bool:
        """Whether Hopper's kernels can read a call's rows and have enough rows per expert to pay."""
        return self.has_hopper and ways.fits_hopper(hidden_states, rows_per_expert)


class Standard(Interleaved):
    """Standard format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the route plan and the rows [N, H] to reduce."""
        problem = self.problem
        rows = GUARD_ROWS + num_tokens * problem.top_k
        plan_numel = self.plan_bytes(num_tokens) // problem.torch_dtype.itemsize
        return ((rows, round_up(problem.intermediate_size, WEIGHT_PAD)), (plan_numel + rows * problem.hidden_size,))

    def select(self, call: Call) -> ways.PlainWay:
        problem, hidden_states = self.problem, call.inputs.hidden_states
        rows_per_expert = call.inputs.topk_ids.numel() / problem.num_experts
        if (
            self.fits_hopper(hidden_states, rows_per_expert)
            and not problem.apply_router_weight_on_input
            # Tokens are copied with 32-bit offsets.
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        ):
            num_experts, num_columns = call.weights["w13"].shape[:2]
            fewest = hopper.count_fewest_tiles(call.inputs.topk_ids.numel(), problem.hidden_size)
            return ways.Hopper(hopper.select_config(rows_per_expert, num_columns, num_experts, fewest))
        return ways.select(problem, hidden_states, rows_per_expert, self.packed_bits)


class Batched(Interleaved):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the tile plan."""
        problem = self.problem
        columns = round_up(problem.intermediate_size, WEIGHT_PAD)
        intermediate = (problem.num_local_experts, num_tokens, columns)
        return intermediate, (self.plan_bytes(num_tokens) // problem.torch_dtype.itemsize,)

    def select(self, call: Call) -> ways.PlainWay:
        problem, hidden_states = self.problem, call.inputs.hidden_states
        rows_per_expert = batched_rows_per_expert(problem, hidden_states.shape[1])
        # A float16 layer's `out` is fp32, being unweighted. Hopper's kernels store boxes in the weights' dtype.
        if call.out.dtype == hidden_states.dtype and self.fits_hopper(hidden_states, rows_per_expert):
            # Rows are already grouped by expert, so none are copied.
            return ways.Hopper(hopper.select_config(rows_per_expert, math.inf, problem.num_local_experts))
        return ways.select(problem, hidden_states, rows_per_expert, self.packed_bits)


def permute_biases(weights: ExpertWeights, halves: int) -> dict[str, torch.Tensor]:
    """`w13_bias` [E, 2 * I_pad] interleaved and `w2_bias` [E, H], if there are biases."""
    if weights.w13_bias is None or weights.w2_bias is None:
        return {}
    # A bias is a weight with one unpadded column.
    w13_bias = interleave_and_pad(weights.w13_bias.unsqueeze(2), halves, columns=1).squeeze(2)
    return {"w13_bias": w13_bias, "w2_bias": aligned(weights.w2_bias)}


def interleave_and_pad(w13: torch.Tensor, halves: int, columns: int | None = None) -> torch.Tensor:
    """Interleaves gate-first [E, halves * I, C] to [E, halves * I_pad, C_pad]; a view if that changes nothing."""
    num_experts, rows, width = w13.shape
    padded_rows = halves * round_up(rows // halves, WEIGHT_PAD)
    padded_columns = round_up(width, WEIGHT_PAD) if columns is None else columns
    if halves == 1 and (rows, width) == (padded_rows, padded_columns):
        return aligned(w13)
    permuted = w13.new_zeros(num_experts, padded_rows, padded_columns)
    for expert, padded in zip(w13, permuted[:, :rows, :width], strict=True):
        if halves == 2:
            interleave_gate_up(expert, out=padded)
        else:
            padded.copy_(expert)
    return permuted


def _pad_experts(weight: torch.Tensor) -> torch.Tensor:
    return aligned(pad_columns(weight, round_up(weight.shape[2], WEIGHT_PAD)))

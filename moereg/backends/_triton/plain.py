"""16- and 32-bit weights in canonical layout, read where they lie."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import ClassVar

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import schedules
from moereg.backends._triton.recorded import Recorded
from moereg.backends._triton.workspace import batched_rows_per_expert
from moereg.experts import Experts
from moereg.kernels.gemm.rules import MIN_BLOCK_M
from moereg.kernels.hopper import config as hopper
from moereg.kernels.sizes import GUARD_ROWS, WEIGHT_PAD
from moereg.platforms import PlatformRule
from moereg.weights.layouts import ALIGNMENT, in_place, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class Canonical(Recorded):
    """Weight layout for both activation formats; a subclass sizes its workspaces and selects a schedule."""

    recorded_weights: ClassVar[tuple[str, ...]] = ("w13", "w2", "w13_bias", "w2_bias")
    shortest_tile: ClassVar[int] = MIN_BLOCK_M

    packed_bits: int | None = None
    """Bits of a packed weight; None if weights have the activations' dtype."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        # The kernels use instructions of this architecture only.
        self.has_hopper = PlatformRule("cuda:sm90").matches(self.platform)

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Views of the canonical tensors.

        Raises:
            ArgumentError: One is not contiguous or not aligned.
        """
        return PermutedWeights(self.layouts[0], {name: in_place(name, one) for name, one in weights.tensors().items()})

    def shared_key(self, weights: PermutedWeights, tensors: Sequence[torch.Tensor | None]) -> Hashable:
        """All canonical weights of the problem have its sizes, so that a call may bring others; biases may be fp32."""
        *_, w13_bias, w2_bias = tensors
        if w13_bias is None or w2_bias is None:
            return self.layer_key
        return self.layer_key, w13_bias.dtype, w2_bias.dtype

    def work(self, call: Call, overlap: bool) -> schedules.PlainWork:
        w13, w2 = self.matrices(call.weights)
        plan_bytes = self.plan_bytes(call.inputs.hidden_states.shape[-2])
        return schedules.PlainWork(
            problem=self.problem, call=call, plan_bytes=plan_bytes, overlap=overlap, w13=w13, w2=w2
        )

    def matrices(self, weights: PermutedWeights) -> tuple[schedules.Weights, schedules.Weights]:
        """w13 and w2 in the kernels' form."""
        return weights["w13"], weights["w2"]

    def fits_hopper(self, call: Call, rows_per_expert: float) -> bool:
        """Whether Hopper's kernels can read a call's rows and weights and have enough rows per expert to pay."""
        return (
            self.has_hopper
            and schedules.fits_hopper(call.inputs.hidden_states, rows_per_expert)
            # Tensor maps begin at multiples of 16 bytes, as do their rows.
            and self.problem.intermediate_size % 8 == 0
            and all(call.weights[name].data_ptr() % ALIGNMENT == 0 for name in ("w13", "w2"))
        )


class Standard(Canonical):
    """Standard format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [N, I_pad]; then, flat, the route plan and the rows [N, H] to reduce.

        Rows of the intermediate are padded to multiples of 128 bytes, which are written and read in whole sectors.
        """
        problem = self.problem
        rows = GUARD_ROWS + num_tokens * problem.top_k
        plan_numel = self.plan_bytes(num_tokens) // problem.torch_dtype.itemsize
        return ((rows, round_up(problem.intermediate_size, WEIGHT_PAD)), (plan_numel + rows * problem.hidden_size,))

    def select(self, call: Call) -> schedules.PlainSchedule:
        problem, hidden_states = self.problem, call.inputs.hidden_states
        rows_per_expert = call.inputs.topk_ids.numel() / problem.num_experts
        if (
            self.fits_hopper(call, rows_per_expert)
            and not problem.apply_router_weight_on_input
            # Tokens are copied with 32-bit offsets.
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        ):
            num_columns = problem.activation.num_halves * round_up(problem.intermediate_size, WEIGHT_PAD)
            fewest = hopper.count_fewest_tiles(call.inputs.topk_ids.numel(), problem.hidden_size)
            return schedules.Hopper(
                hopper.select_config(rows_per_expert, num_columns, problem.num_local_experts, fewest)
            )
        return schedules.select(problem, hidden_states, rows_per_expert, self.packed_bits)


class Batched(Canonical):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate [E, max_T, I_pad]; then the tile plan."""
        problem = self.problem
        columns = round_up(problem.intermediate_size, WEIGHT_PAD)
        intermediate = (problem.num_local_experts, num_tokens, columns)
        return intermediate, (self.plan_bytes(num_tokens) // problem.torch_dtype.itemsize,)

    def select(self, call: Call) -> schedules.PlainSchedule:
        problem, hidden_states = self.problem, call.inputs.hidden_states
        rows_per_expert = batched_rows_per_expert(problem, hidden_states.shape[1])
        # A float16 layer's `out` is fp32, being unweighted. Hopper's kernels store boxes in the weights' dtype.
        if call.out.dtype == hidden_states.dtype and self.fits_hopper(call, rows_per_expert):
            # Rows are already grouped by expert, so none are copied.
            return schedules.Hopper(hopper.select_config(rows_per_expert, math.inf, problem.num_local_experts))
        return schedules.select(problem, hidden_states, rows_per_expert, self.packed_bits)

"""8-bit activations and weights, and 4-bit ones where hardware applies group scales, multiplied as they are."""

from __future__ import annotations

import math
from typing import ClassVar, Final

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import quantized_schedules as schedules
from moereg.backends._triton.recorded import Recorded
from moereg.backends._triton.workspace import (
    batched_rows_per_expert,
    group_columns,
    intermediate_pieces,
    row_format,
    row_pieces,
)
from moereg.backends._workspace import Piece, bytes_of
from moereg.experts import Experts
from moereg.kernels.hopper.config import select_quantized_rule
from moereg.kernels.launch import device as limits
from moereg.kernels.quantized.config import MIN_BLOCK_M, select_quantized_config
from moereg.kernels.quantized.operands import QuantizedMatrices
from moereg.kernels.sizes import CODE_PAD, GUARD_ROWS
from moereg.platforms import PlatformRule
from moereg.spec.quant_schemes import WHOLE
from moereg.weights.layouts import aligned, pad_columns, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_E8M0: Final = "float8_e8m0fnu"

_MIN_HOPPER_ROWS: Final = 30
"""Up to this many rows per expert Hopper's kernels do not pay.

On an H200 on 2026-11-21 they took 0.97 (qwen3-30b-a3b) and 0.93 (deepseek-v3) of the other kernels' time at 32 rows,
0.78 and 0.70 at 64 rows.
"""


_ARRIVED: Final = "hidden_scale"
"""Scales of tokens that arrived quantized."""


class MultipliedCodes(Recorded):
    """Weight layout for both activation formats; a subclass sizes its workspaces and selects a schedule."""

    recorded_weights: ClassVar[tuple[str, ...]] = (
        *("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "w13_bias", "w2_bias"),
        *("a13_scale", "a2_scale"),
        _ARRIVED,
    )
    arriving: ClassVar[tuple[str, ...]] = (_ARRIVED,)
    shortest_tile: ClassVar[int] = MIN_BLOCK_M

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        activation, weight = self.computes.activation, self.computes.weight
        assert activation is not None
        assert weight is not None
        assert weight.symmetric
        self.activation_format, self.weight_format = activation, weight
        self.row_format = row_format(activation)

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Zero-pads the reduced dimensions to multiples of 128, and makes every scale [rows, columns] per expert.

        Returns:
            `w13` [E, 2 * I, H_pad], `w2` [E, H, I_pad], views if nothing is padded, two 4-bit values per byte;
            `w13_scale` and `w2_scale` [E, row groups, column groups] fp32, uint8 if powers of two, or float8_e4m3fn
            with the global `w13_scale_2` [E, 2] and `w2_scale_2` [E, 1]; `a2_scale` [E] and `a13_scale` [E], or shared
            and [1] if the checkpoint has one number; unchanged biases.
        """
        problem, fmt = self.problem, self.weight_format
        tensors = weights.tensors()
        per_expert = {name: aligned(tensor) for name, tensor in weights.tensors("bias").items()}
        shared: dict[str, torch.Tensor] = {}
        for name, columns in (("w13", problem.hidden_size), ("w2", problem.intermediate_size)):
            # As bytes, since not every device pads 8-bit floats; a zero byte is zero.
            num_bytes = round_up(columns, CODE_PAD) * fmt.bits // 8
            padded = aligned(pad_columns(tensors[name].view(torch.uint8), num_bytes))
            per_expert[name] = padded.view(fmt.storage_dtype)
            per_expert[f"{name}_scale"] = self._permute_scale(name, tensors[f"{name}_scale"], columns)
            if fmt.global_scale:
                per_expert[f"{name}_scale_2"] = aligned(self._one_a_half(name, tensors[f"{name}_scale_2"]))
        if weights.a2_scale is not None:
            per_expert["a2_scale"] = aligned(weights.a2_scale.expand(problem.num_local_experts))
        if weights.a13_scale is not None:
            holder = per_expert if weights.a13_scale.dim() else shared
            holder["a13_scale"] = aligned(weights.a13_scale.reshape(-1))
        return PermutedWeights(self.layouts[0], per_expert, shared)

    def _permute_scale(self, name: str, scale: torch.Tensor, columns: int) -> torch.Tensor:
        fmt = self.weight_format
        if scale.dim() < 3:
            scale = self._one_a_half(name, scale).unsqueeze(2)
        num_groups = 1 if fmt.group[1] == WHOLE else round_up(columns, CODE_PAD) // fmt.group[1]
        if fmt.global_scale:
            # Padded as bytes, like the codes; a scale of zero is right for zeros.
            return aligned(pad_columns(scale.view(torch.uint8), num_groups)).view(scale.dtype)
        scale = scale.view(torch.uint8) if fmt.scale_dtype == _E8M0 else scale.float()
        return aligned(pad_columns(scale, num_groups))

    def _one_a_half(self, name: str, scale: torch.Tensor) -> torch.Tensor:
        """Expands a scale per matrix or half to one per half, [E, halves]."""
        halves = self.problem.activation.num_halves if name == "w13" else 1
        return scale.reshape(len(scale), -1).expand(-1, halves)

    def matrices(self, weights: PermutedWeights, name: str) -> QuantizedMatrices:
        """w13 or w2 in the kernels' form."""
        fmt = self.weight_format
        q, scale = weights[name], weights[f"{name}_scale"]
        group_rows = q.shape[1] // scale.shape[1] if fmt.group[0] == WHOLE else fmt.group[0]
        return QuantizedMatrices(q, scale, group_rows, group_columns(fmt), weights.get(f"{name}_scale_2"))

    def run(self, call: Call) -> None:
        """See `Recorded.run`."""
        scales = call.inputs.hidden_scale
        if scales is not None:
            # Like the tokens, these scales have another address in each call; a recording finds tensors by name.
            weights = call.weights
            named = PermutedWeights(weights.layout, weights.per_expert, {**weights.shared, _ARRIVED: scales})
            call = call._replace(weights=named)
        super().run(call)

    def work(self, call: Call, overlap: bool) -> schedules.QuantizedWork:
        return schedules.QuantizedWork(
            problem=self.problem,
            call=call,
            plan_bytes=self.plan_bytes(call.inputs.hidden_states.shape[-2]),
            overlap=overlap,
            activation_format=self.activation_format,
            row_format=self.row_format,
            w13=self.matrices(call.weights, "w13"),
            w2=self.matrices(call.weights, "w2"),
        )


class Standard(MultipliedCodes):
    """Standard format.

    Attributes:
        has_hopper: Whether the platform is Hopper and its kernels serve the formats and sizes.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        problem, fmt = self.problem, self.activation_format
        self.has_hopper = (
            # The kernels use instructions of this architecture only.
            PlatformRule("cuda:sm90").matches(self.platform)
            # Column groups in both operands, or in neither.
            and fmt.scale_dtype == "float32"
            and (fmt.group[1] == WHOLE) == (self.weight_format.group[1] == WHOLE)
            # Blocks of up rows are counted from gate's first row, which fits where gate ends with a block.
            and (fmt.group[1] == WHOLE or problem.intermediate_size % CODE_PAD == 0)
            and problem.torch_dtype.itemsize == 2
            # There float16's routing weights multiply scales, in Triton's tiles the rows.
            and not (problem.batch_invariant and problem.dtype == "float16")
            # Stores need 16-byte aligned rows.
            and problem.hidden_size % 8 == 0
        )

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate, also quantized with scales; then, flat, the route plan and rows.

        The rows first hold quantized tokens or routes, later the rows [N, H] to reduce.
        """
        problem = self.problem
        num_routes, itemsize = num_tokens * problem.top_k, problem.torch_dtype.itemsize
        # Guard rows in front, whichever kernels run.
        rows = GUARD_ROWS + num_routes
        first = bytes_of(intermediate_pieces(problem, self.activation_format, rows))
        tokens = bytes_of(row_pieces(self.activation_format, num_routes, problem.hidden_size))
        to_reduce = Piece((rows, problem.hidden_size), problem.torch_dtype).padded_bytes
        second = self.plan_bytes(num_tokens) + max(tokens, to_reduce)
        return (first // itemsize,), (second // itemsize,)

    def select(self, call: Call) -> schedules.QuantizedSchedule:
        problem, hidden_states = self.problem, call.inputs.hidden_states
        device = hidden_states.device
        rows_per_expert = call.inputs.topk_ids.numel() / problem.num_experts
        if self.has_hopper and device.type != "cpu" and rows_per_expert > _MIN_HOPPER_ROWS:
            return schedules.Hopper(select_quantized_rule(rows_per_expert, self.row_format.group > 0))
        configs = select_quantized_config(
            hidden_states.shape[0],
            rows_per_expert,
            problem.activation.num_halves,
            limits.max_shared_bytes(device),
            problem.batch_invariant,
        )
        return schedules.Sorted(configs) if configs.sort_routes else schedules.Direct(configs)


class Batched(MultipliedCodes):
    """Batched format."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Flat: the intermediate [E * max_T, I_pad], also quantized with scales; the tile plan, quantized tokens."""
        problem = self.problem
        rows, itemsize = problem.num_local_experts * num_tokens, problem.torch_dtype.itemsize
        first = bytes_of(intermediate_pieces(problem, self.activation_format, rows))
        tokens = bytes_of(row_pieces(self.activation_format, rows, problem.hidden_size))
        return (first // itemsize,), ((self.plan_bytes(num_tokens) + tokens) // itemsize,)

    def select(self, call: Call) -> schedules.QuantizedSchedule:
        problem = self.problem
        _, max_tokens, _ = call.inputs.hidden_states.shape
        # An estimate: the counts are on the device.
        rows_per_expert = batched_rows_per_expert(problem, max_tokens)
        halves, shared_bytes = problem.activation.num_halves, limits.max_shared_bytes(call.out.device)
        return schedules.Batched(select_quantized_config(math.inf, rows_per_expert, halves, shared_bytes))

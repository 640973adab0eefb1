"""Weight-only schemes: weights stay packed and are dequantized tile by tile, in registers.

The layer, its weight layout, and the schedules that only packed weights have on Hopper; `schedules` has the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch.nn.functional import pad

from moereg.backends._loaded import Call
from moereg.backends._triton import plain, schedules
from moereg.backends._triton.recorded import Recorded
from moereg.backends._triton.schedules import Hopper, PlainSchedule, PlainWork
from moereg.backends._triton.workspace import group_columns
from moereg.backends._workspace import Piece, cut
from moereg.experts import Experts
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.flagged import both_gemms
from moereg.kernels.gemm.rules import shares_launch
from moereg.kernels.hopper.packed_config import MIN_PACKED_HOPPER_ROWS, select_packed_config
from moereg.kernels.hopper.packed_gemm import MIN_DEPTH, down_packed, gate_up_packed, packed_format
from moereg.kernels.packed.weights import BLOCK, PackedMatrix
from moereg.kernels.rows.plan import max_num_blocks
from moereg.kernels.sizes import FLAG_WORDS, GUARD_ROWS, WEIGHT_PAD
from moereg.platforms import PlatformRule
from moereg.quantize import Quantized, expert_matrix, unpack_nibbles
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantFormat
from moereg.weights.layouts import aligned, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_MATRICES: Final = ("w13", "w2")
_PARTS: Final = ("group_scale", "zero_point", "row_scale")


class Packed(plain.Canonical):
    """Weight layout for both activation formats."""

    recorded_weights: ClassVar[tuple[str, ...]] = (
        *plain.Canonical.recorded_weights,
        *(f"{matrix}_{part}" for matrix in _MATRICES for part in _PARTS),
    )

    shared_key = Recorded.shared_key

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.packed_bits = self._format.bits
        # Those kernels read both operands from shared memory; packed weights have their own.
        self.has_hopper = False

    @property
    def _format(self) -> QuantFormat:
        fmt = self.computes.weight
        assert fmt is not None
        return fmt

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Reorders codes within each block of 64 elements and interleaves gate and up row by row.

        Returns:
            `PackedMatrix`'s tensors: `w13` and `w2` are the packed words, with 2 * I_pad rows (I_pad if not gated) and
            H rows; `w13_group_scale` and so on; and the canonical biases.
        """
        halves = self.problem.activation.num_halves

        per_expert = {
            **pack_matrices(weights, "w13", self._format, lambda rows: interleave_and_pad(rows, halves)),
            **pack_matrices(weights, "w2", self._format, lambda rows: rows),
            **{name: aligned(bias) for name, bias in weights.tensors("bias").items()},
        }
        return PermutedWeights(self.layouts[0], per_expert)

    def matrices(self, weights: PermutedWeights) -> tuple[schedules.Weights, schedules.Weights]:
        return self._matrix(weights, "w13"), self._matrix(weights, "w2")

    def _matrix(self, weights: PermutedWeights, name: str) -> PackedMatrix:
        fmt = self._format
        parts = (weights.get(f"{name}_{part}") for part in _PARTS)
        return PackedMatrix(weights[name], fmt.dtype, group_columns(fmt), fmt.scale_dtype, *parts)


class Standard(Packed, plain.Standard):
    """Standard format."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        is_hopper = PlatformRule("cuda:sm90").matches(self.platform)
        self.has_packed_hopper = is_hopper and self._fits_packed_hopper()
        # Measured only there, and only there programs are known to start in the order of their ids.
        self.may_share_launch = is_hopper and self.problem.dtype == "bfloat16"

    def _fits_packed_hopper(self) -> bool:
        """Whether Hopper's kernels for packed weights serve the layer; `select` decides per call."""
        problem, fmt = self.problem, self._format
        return (
            # Weights are dequantized to bfloat16; float16 would need other instructions.
            problem.dtype == "bfloat16"
            # A zero point would cost another word and instruction per group.
            and fmt.symmetric
            and packed_format(fmt.dtype, group_columns(fmt), fmt.scale_dtype) is not None
            # Each iteration of their loop takes two K steps.
            and min(problem.hidden_size, problem.intermediate_size) > MIN_DEPTH - WEIGHT_PAD
            # Routing weights are applied in the reduction.
            and not problem.apply_router_weight_on_input
        )

    def select(self, call: Call) -> schedules.PlainSchedule:
        hidden_states = call.inputs.hidden_states
        rows_per_expert = call.inputs.topk_ids.numel() / self.problem.num_experts
        if (
            self.has_packed_hopper
            and schedules.fits_hopper(hidden_states, rows_per_expert, MIN_PACKED_HOPPER_ROWS)
            # Tokens are copied with 32-bit offsets.
            and hidden_states.shape[0] * hidden_states.stride(0) < 2**31
        ):
            return HopperPacked(select_packed_config(rows_per_expert))
        schedule = super().select(call)
        if isinstance(schedule, schedules.Sorted) and self._shares_launch(call, rows_per_expert):
            assert isinstance(schedule.configs, GemmPair)
            return Flagged(schedule.configs)
        return schedule

    def _shares_launch(self, call: Call, rows_per_expert: float) -> bool:
        num_tokens, num_routes = call.inputs.hidden_states.shape[0], call.inputs.topk_ids.numel()
        return (
            self.may_share_launch
            and shares_launch(num_tokens, rows_per_expert, self._format.bits)
            and has_room_for_flags(self.problem, num_routes)
        )


class Batched(Packed, plain.Batched):
    """Batched format."""


# A word holds the group codes of this many elements, but at most four.
_WORD_SPAN: Final = 128

_FLOAT4: Final = "float4_e2m1fn"
# Scales that can be folded into 4-bit floats without rounding.
_FOLDED_SCALES: Final = ("float8_e8m0fnu", "float8_e4m3fn")
# The largest code of a folded power-of-two scale; the row's scale takes the rest.
_LARGEST_POWER: Final = 253
_EXPONENT_OFFSET: Final = 22
_LEFT_OF_E4M3: Final = 128.0
# Bit positions within a half word for each of its four 4-bit floats, lowest bit first.
_FLOAT4_PLACES: Final = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))

# Maps rows [R, ...] of a canonical matrix to the kernels' order, padding with zeros.
ArrangeRows = Callable[[torch.Tensor], torch.Tensor]


def interleave_and_pad(rows: torch.Tensor, halves: int) -> torch.Tensor:
    """Pads rows [halves * I, C], gates first, with zeros to [halves * I_pad, C], and has gates and ups alternate."""
    padded = rows.new_zeros(halves * round_up(len(rows) // halves, WEIGHT_PAD), rows.shape[1])
    padded[: len(rows)] = rows.unflatten(0, (halves, -1)).transpose(0, 1).flatten(0, 1)
    return padded


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs codes [R, K_pad] uint8 into words [K_pad / 64, R, 2 * bits] int32, in the kernels' order."""
    rows, columns = codes.shape
    # Element 16 p + 2 j + h of a block, p = 2 c + d.
    parts = codes.view(rows, columns // BLOCK, 2, 2, 8, 2)
    if bits == 4:
        byte = parts[:, :, :, 0] | parts[:, :, :, 1] << 4
        ordered = byte.permute(1, 0, 3, 4, 2)
    else:
        ordered = parts.permute(1, 0, 2, 4, 5, 3)
    return ordered.contiguous().view(columns // BLOCK, rows, -1).view(torch.int32)


def pack_float4(codes: torch.Tensor) -> torch.Tensor:
    """Packs float4_e2m1fn codes [R, K_pad] uint8 into words [K_pad / 64, R, 8] int32, in the kernels' order."""
    rows, columns = codes.shape
    parts = codes.view(rows, columns // BLOCK, 4, 8, 2).int()
    halves = torch.zeros_like(parts[:, :, 0])
    for p in range(4):
        code = parts[:, :, p]
        for bit, place in enumerate(_FLOAT4_PLACES[p]):
            halves |= (code >> bit & 1) << place
    return halves.to(torch.int16).permute(1, 0, 2, 3).contiguous().view(torch.int32).squeeze(3)


def pack_matrices(weights: ExpertWeights, name: str, fmt: QuantFormat, arrange: ArrangeRows) -> dict[str, torch.Tensor]:
    """Packs w13 or w2 of all experts, whose rows `arrange` reorders; fields of `PackedMatrix` as `<matrix>_<field>`."""
    columns = weights.hidden_size if name == "w13" else weights.intermediate_size
    tensors = weights.tensors()
    packed: dict[str, torch.Tensor] = {}
    for expert in range(weights.num_experts):
        matrix = expert_matrix(tensors, name, expert, weights.num_halves)
        for suffix, part in _pack_expert(matrix, fmt, columns, arrange).items():
            key = f"{name}{suffix}"
            if key not in packed:
                packed[key] = part.new_empty(weights.num_experts, *part.shape)
            packed[key][expert] = part
    return packed


def _pack_expert(matrix: Quantized, fmt: QuantFormat, columns: int, arrange: ArrangeRows) -> dict[str, torch.Tensor]:
    rows = matrix.q.shape[0]
    depth = round_up(columns, BLOCK)
    group = fmt.group[1]
    num_groups = 1 if group == WHOLE else -(-depth // group)
    codes = unpack_nibbles(matrix.q, columns) if fmt.bits == 4 else matrix.q.view(torch.uint8)
    if fmt.dtype == "int8":
        codes = codes ^ 0x80
    found: dict[str, torch.Tensor] = {}
    row_scale = None if matrix.scale_2 is None else _of_rows(matrix.scale_2, rows)
    if group == WHOLE:
        scale = _of_rows(matrix.scale, rows)
        row_scale = scale if row_scale is None else scale * row_scale
    elif fmt.scale_dtype in _FOLDED_SCALES:
        magnitudes = pad(codes & 7, (0, matrix.scale.shape[1] * group - columns))
        counts = (magnitudes != 0).unflatten(1, (-1, group)).any(2)
        scale_codes, left = fold_scales(matrix.scale, counts)
        if fmt.scale_dtype == "float8_e4m3fn":
            # No folded code means a scale of zero, so the elements become zero.
            zero = (matrix.scale.float() == 0).repeat_interleave(group, 1)[:, :columns]
            codes = codes.masked_fill(zero, 0)
        row_scale = left if row_scale is None else left * row_scale
        found["_group_scale"] = _place_scales(_pack_bytes(arrange(scale_codes), num_groups, group), fmt.scale_dtype)
    else:
        scale = arrange(matrix.scale)
        found["_group_scale"] = pad(scale, (0, num_groups - scale.shape[1])).T
    if matrix.zero_point is not None:
        zero_point = unpack_nibbles(matrix.zero_point, matrix.scale.shape[1])
        found["_zero_point"] = _pack_bytes(arrange(zero_point), num_groups, group)
    if row_scale is not None:
        found["_row_scale"] = arrange(row_scale.expand(rows, 1)).squeeze(1)
    padded = pad(arrange(codes), (0, depth - columns))
    found[""] = pack_float4(padded) if fmt.dtype == _FLOAT4 else pack_codes(padded, fmt.bits)
    return found


def fold_scales(scale: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits 8-bit scales [R, G] into the codes that kernels fold and a row scale [R, 1] fp32.

    `counts` [R, G] marks groups with a nonzero element; scales of the others do not matter.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        exponent = scale.view(torch.uint8).int()
        largest = exponent.where(counts, 0).amax(1, keepdim=True)
        # A scale clamped here is too small to matter next to the row's largest.
        code = (_LARGEST_POWER + exponent - largest).clamp(min=0, max=_LARGEST_POWER)
        left = largest.to(torch.uint8).view(torch.float8_e8m0fnu).float()
        return code.to(torch.uint8), left
    values = scale.float()
    mantissa, exponent = torch.frexp(values)
    # A mantissa in [1, 2) has 3 fraction bits; float8_e4m3fn's exponents from -9 to 8 fit 5 bits.
    code = (exponent - 1 + _EXPONENT_OFFSET) * 8 + (mantissa * 16 - 8).int()
    code = torch.where(values == 0, 0, code)
    return code.to(torch.uint8), torch.full_like(values[:, :1], _LEFT_OF_E4M3)


def _pack_bytes(codes: torch.Tensor, num_groups: int, group: int) -> torch.Tensor:
    """Packs [R, G] uint8, one per group, into words [words, R] int32 with 1 to 4 groups each, as many as a step has."""
    per_word = 1 if group == WHOLE else min(4, max(1, _WORD_SPAN // group))
    words = -(-num_groups // per_word)
    padded = pad(codes, (0, words * per_word - codes.shape[1])).unflatten(1, (words, per_word))
    return pad(padded, (0, 4 - per_word)).view(torch.int32).squeeze(2).T


def _place_scales(words: torch.Tensor, scale_dtype: str) -> torch.Tensor:
    """Reorders words of 4 codes for `_folded_scales`: 0 and 2 in place in the halves, 1 and 3 byte-swapped."""
    place = 7 if scale_dtype == "float8_e8m0fnu" else 4
    codes = words.contiguous().view(torch.uint8).view(*words.shape, 2, 2).int() << place
    halves = codes[..., 0] | (codes[..., 1] << 8 | codes[..., 1] >> 8) & 0xFFFF
    return halves.to(torch.int16).view(torch.int32).squeeze(-1)


def _of_rows(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Expands a scale per row [R, 1], per half [2] or per matrix [] to one per row, [R, 1] fp32."""
    flat = scale.float().reshape(-1)
    return flat.repeat_interleave(rows // len(flat)).unsqueeze(1)


class HopperPacked(Hopper):
    """Like `schedules.Hopper`, with weights that stay packed until they reach a consumer's registers."""

    gate_up = staticmethod(gate_up_packed)
    down = staticmethod(down_packed)
    reduces_early = False


@dataclass(frozen=True, slots=True)
class Flagged(PlainSchedule):
    """Like `schedules.Sorted`, with both GEMMs in one launch.

    Flags are in the call's own scratch memory; the launch that sorts its routes clears them. So other streams, copies
    of the layer and captured graphs use their own.
    """

    configs: GemmPair

    def run(self, work: PlainWork) -> None:
        problem, out = work.problem, work.out
        block_m, num_routes = self.configs.gate_up.block_m, work.num_rows
        num_tiles = max_num_blocks(num_routes, problem.num_local_experts, block_m)
        flags, route_rows = cut(work.behind_plan, _flags(num_tiles), Piece((num_routes, out.shape[1]), out.dtype))
        plan = work.sort_routes(block_m, flags=flags)  # flags [tiles, words], route_rows [N, H]
        assert isinstance(work.w13, PackedMatrix) and isinstance(work.w2, PackedMatrix)
        both_gemms(
            route_rows,
            work.intermediate(),  # [N, I_pad]
            work.tokens,
            work.w13,
            work.w2,
            plan,
            self.configs,
            work.epilogue,
            top_k=problem.top_k,
            bias=work.w2_bias,
            route_factors=work.input_weights,
            topk_weights=work.tile_weights,
            overlap=work.overlap,
        )
        work.reduce(route_rows)


def has_room_for_flags(problem: MoEProblem, num_routes: int) -> bool:
    """Whether the second workspace's guard rows, which `Flagged` does not need, hold a flag per route.

    There are at most as many row tiles as routes.
    """
    return _flags(num_routes).padded_bytes <= GUARD_ROWS * problem.hidden_size * problem.torch_dtype.itemsize


def _flags(num_tiles: int) -> Piece:
    return Piece((num_tiles, FLAG_WORDS), torch.int32)

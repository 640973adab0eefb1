"""One expert's matmuls on a CPU, with weights in oneDNN's order or in canonical order.

H hidden size, I intermediate size, E local experts, M rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from moereg.kernels.plain import cpu

ActivationFn = Callable[[torch.Tensor], torch.Tensor]
"""[...,2I] gate first (or [...,I] where not gated) to [...,I], same dtype."""
Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps rows [M,K] to [M,N]."""
PerExpert: TypeAlias = "torch.Tensor | list[torch.Tensor]"

# float16 rounds to multiples of 6e-8 at least, in the output too. Beyond this weight, the rows' rounding errors matter.
_LARGE_WEIGHT: Final = 8.0
# Up to here Python is faster than three torch calls, which cost a small call of one token 6 % of its time.
_FEW_WEIGHTS: Final = 64
# A row of scaled inputs whose largest number is below this has lost digits in float16.
_SMALL_INPUT: Final = 2.0**-8

# From here on, converting an expert to fp32 costs less than a matmul in a dtype that the CPU lacks, which converts a
# weight again for each row. On two threads of an AMD EPYC limited to AVX2 both take as long for 8 rows, and 4 rows took
# 0.7 of the time unconverted. On one thread of a first-generation one, converting gained 1.6x at 3 rows, 2x at 4.
UPCAST_ROWS: Final = 8
# MKL's product of so many rows is faster with its factors swapped: 1.2x to 2x on an AMD EPYC.
_SWAPPED_ROWS: Final = range(4, 33)
# Elements that are converted at a time: they stay in the cache until they are multiplied, 1.4x in a large expert.
_UPCAST_ELEMENTS: Final = 1 << 19
# Calling torch for an expert costs as much as a row of so many elements.
_CALL_ELEMENTS: Final = 1 << 20
# Rows whose experts have up to so many elements, each row's counted, multiply copies of them in two products: one of
# oneDNN's takes 40 us, however small it is. AMD EPYC and Intel Xeon, bf16, a token with 8 experts of 200,000: 1.2x.
_COPIED_ELEMENTS: Final = 1 << 22
# Experts of fewer elements are faster in plain matmuls for few rows, since their calls cost less than oneDNN's.
_PACKED_ELEMENTS: Final = 400_000
# Unpacked experts of fewer elements share products: Intel Xeon, fp32, up to 128 tokens, 1.5x with 0.8 million, 1.15x
# with 1.6 million, 1.0x with 5 million and more.
_SHARED_ELEMENTS: Final = 2_000_000

# Rows of every product where a row must have the same bits in any call: torch's libraries choose the order of a sum by
# the shape of a product. A matmul of fewer takes about as long.
PIECE_ROWS: Final = 16
# Numbers that torch does not divide among threads, and of which a half is whole vectors of any CPU, unrolled.
_UNDIVIDED: Final = 1 << 15
_WHOLE_VECTORS: Final = 64


class ExpertMlp(Protocol):
    """One expert's two matmuls and its activation."""

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Maps x [M,H] to [M,H], a new tensor of any floating dtype."""


def packing_is_faster(dtype: torch.dtype, is_intel: bool, num_elements: int) -> bool:
    """Whether oneDNN's weight order exists for this dtype and beats plain matmuls on this CPU.

    Measured over 1 to 128 rows an expert, packed against plain: 2 cores of an AMD EPYC 9004: bf16 1.05x to 2x, fp32
    1.5x to 3.5x; 16 cores of an Intel Xeon with AMX: bf16 0.9x to 1.27x (1.08x on average), fp16 1.0x to 1.13x, fp32
    0.75x to 1.24x (0.91x), since torch's plain ones are MKL's. Only x86-64 packs, and no emulated dtype.

    Args:
        dtype: The weights' dtype.
        is_intel: Whether Intel made the CPU.
        num_elements: Of an expert's weights.
    """
    if not cpu.features().onednn or dtype_is_emulated(dtype):
        return False
    return num_elements >= _PACKED_ELEMENTS and not (is_intel and dtype == torch.float32)


def few_rows(num_elements: int, is_emulated: bool) -> int:
    """Most rows an expert, on average, for which `PlainMlp.together` is faster than each expert by itself, perhaps 0.

    Args:
        num_elements: Of an expert's weights.
        is_emulated: As in `PlainMlp`, which converts weights for more rows.
    """
    if is_emulated:
        return UPCAST_ROWS + _CALL_ELEMENTS // num_elements
    return 64 if num_elements < _SHARED_ELEMENTS else 0


def dtype_is_emulated(dtype: torch.dtype) -> bool:
    """Whether matmuls in this dtype are so slow on this CPU that converting weights to fp32 wins.

    Measured: fp16 without AVX-512 FP16 runs at 44 GFLOP/s, fp32 at 130 and more. False on CPUs other than x86-64.
    """
    found = cpu.features()
    return found.onednn and not {torch.float32: True, torch.bfloat16: found.bf16, torch.float16: found.fp16}[dtype]


def pack_experts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Packs each expert's [N,K] matrix of weight [E,N,K] in oneDNN's order.

    Returns:
        E opaque tensors. Such weights cannot be stacked, sliced or written into.
    """
    # No row-count hint: the order for one row is 1.4x slower with more rows, and one order has to serve all.
    return [torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous()) for matrix in weight]


def fused_post_op(name: str, alpha: float, beta: float, limit: float | None) -> tuple[str, str] | None:
    """The (operation, algorithm) of oneDNN for an activation's gate function, or None where it has none."""
    if (alpha, beta, limit) != (1.0, 0.0, None):
        return None
    return {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh")}.get(name)


def has_large_weights(topk_weights: torch.Tensor) -> bool:
    """Whether float16 results are too coarse for a routing weight; weights of routes without an expert may be NaN."""
    if topk_weights.numel() <= _FEW_WEIGHTS:
        return any(abs(weight) > _LARGE_WEIGHT for weight in topk_weights.flatten().tolist())
    return bool((topk_weights.abs() > _LARGE_WEIGHT).any())


def by_pieces(product: Product, x: torch.Tensor, invariant: bool) -> torch.Tensor:
    """A product of rows x [M,K]; where rows must have the same bits in any call, of `PIECE_ROWS` rows at a time."""
    return torch.cat([product(piece) for piece in x.split(PIECE_ROWS)]) if invariant else product(x)


def row_by_row(activation: ActivationFn) -> ActivationFn:
    """An activation of rows [M,C] whose bits do not depend on a row's neighbors.

    torch divides large tensors among threads, and computes the end of a thread's share, less than some vectors, with
    other functions than the vectors. So this takes rows that are whole vectors together, in few numbers, others alone.
    """

    def of_few(x: torch.Tensor) -> torch.Tensor:
        columns = x.shape[1]
        rows = 1 if columns % _WHOLE_VECTORS else max(1, _UNDIVIDED // columns)
        return torch.cat([activation(part) for part in x.split(rows)])

    return of_few


@dataclasses.dataclass(frozen=True, eq=False)
class RepeatingMlp:
    """Recomputes in fp32 what left float16's range on the way, such as a gate below -65504 whose result is 0.

    Rows are kept or recomputed one by one, so that none depends on its neighbors.
    """

    mlp: ExpertMlp  # Computes float16 rows
    wide: ExpertMlp  # Computes fp32 rows
    # Whether every row is computed in fp32, since routing weights magnify float16's rounding errors
    only_wide: bool = False

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As `ExpertMlp`; x is float16, or fp32 where it was scaled; the result is fp32 where a row was recomputed."""
        if self.only_wide:
            return self.wide(x.float(), expert)
        result = self.mlp(x.half(), expert)
        # An infinity on the way makes every number of its row infinite or NaN, even through a weight of 0.
        is_good = result.isfinite().all(1, keepdim=True)
        if x.dtype != torch.float16:
            largest = x.abs().amax(1, keepdim=True)
            is_good &= (largest == 0) | ((largest >= _SMALL_INPUT) & largest.half().isfinite())
        return result if is_good.all() else torch.where(is_good, result, self.wide(x.float(), expert))


@dataclasses.dataclass(frozen=True, eq=False)
class IsolatingMlp:
    """Keeps rows that are not finite away from their neighbors, for products that mix rows (`cpu.mixes_rows`).

    Such rows come from a token that went wrong, or are rows of the batched format that were never written.
    """

    mlp: ExpertMlp  # Computes rows correctly where their neighbors are finite

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As `ExpertMlp`."""
        is_finite = x.isfinite().all(1, keepdim=True)
        if is_finite.all():
            return self.mlp(x, expert)
        return torch.where(is_finite, self.mlp(x.where(is_finite, 0.0), expert), self.mlp(x, expert))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedFusedMlp:
    """Gate, up and down matrices packed separately, so that the activation runs on the matmuls' fp32 accumulators.

    Three calls per expert instead of four, and one rounding of the intermediate instead of three.
    """

    gate: list[torch.Tensor]  # E packed [I,H]
    up: list[torch.Tensor]  # E packed [I,H]
    down: list[torch.Tensor]  # E packed [H,I]
    post_op: tuple[str, str]  # As `fused_post_op` returns it
    activation: ActivationFn  # The same activation
    w13_bias: torch.Tensor | None = None  # [E,2I] or None
    w2_bias: torch.Tensor | None = None  # [E,H] or None
    invariant: bool = False  # As in `by_pieces`

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As `ExpertMlp`; the result has x's dtype."""
        return by_pieces(lambda piece: self._of_rows(piece, expert), x, self.invariant)

    def _of_rows(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        gate_bias, up_bias = (None, None) if self.w13_bias is None else self.w13_bias[expert].chunk(2)
        operation, algorithm = self.post_op
        gate = _packed_linear(x, self.gate[expert], gate_bias, operation, algorithm)
        hidden = torch.ops.mkldnn._linear_pointwise.binary(x, gate, self.up[expert], up_bias, "mul")
        return _linear(hidden, self.down[expert], _row(self.w2_bias, expert))

    def unpacked(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As a call, with matmuls in fp32, for the rare rows that need them."""
        w13 = torch.cat([self.gate[expert].to_dense(), self.up[expert].to_dense()])
        hidden = self.activation(_linear(x, w13, _row(self.w13_bias, expert), self.invariant))
        return _linear(hidden, self.down[expert], _row(self.w2_bias, expert), self.invariant)


@dataclasses.dataclass(frozen=True, eq=False)
class PlainMlp:
    """Canonical or packed weights, in fp32 where the CPU has no matmul in their dtype or x is fp32.

    Rounds to x's dtype after each product and its bias, however they are computed: the rows that others bring to an
    expert, such as those of other ranks, change a result by the order of its sums alone.
    """

    w13: PerExpert  # [E,2I,H], or [E,I,H] where not gated; or E packed matrices
    w2: PerExpert  # [E,H,I], or E packed matrices
    activation: ActivationFn  # Applied to the first matmul's output
    w13_bias: torch.Tensor | None = None  # [E,2I] (or [E,I]) or None
    w2_bias: torch.Tensor | None = None  # [E,H] or None
    is_emulated: bool = False  # Whether matmuls in this dtype are slow on this CPU
    few_rows: int = 0  # As `few_rows` returns it
    invariant: bool = False  # As in `by_pieces`

    @property
    def has_wide_bias(self) -> bool:
        """Whether a bias has another dtype than the weights, whose products would round it."""
        return self.w13_bias is not None and self.w13_bias.dtype != self.w13[0].dtype

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As `ExpertMlp`; the result has x's dtype."""
        dtype = torch.float32 if self.is_emulated and (len(x) >= UPCAST_ROWS or self.has_wide_bias) else x.dtype
        gemm1 = _linear(x.to(dtype), self.w13[expert], _row(self.w13_bias, expert), self.invariant).to(x.dtype)
        hidden = self.activation(gemm1.float()).to(x.dtype).to(dtype)
        return _linear(hidden, self.w2[expert], _row(self.w2_bias, expert), self.invariant).to(x.dtype)

    def _copies(self, num_rows: int) -> bool:
        """Whether copying each row's expert is faster than a product for each expert."""
        is_free = self.w13_bias is None and self.w2_bias is None and not self.is_emulated
        num_elements = num_rows * (self.w13[0].numel() + self.w2[0].numel())
        return is_free and self.w13[0].dtype != torch.float32 and num_elements <= _COPIED_ELEMENTS

    def shares(self, segments: Sequence[tuple[int, int, int]], most_rows: int) -> bool:
        """Whether `together` is faster: few rows an expert, none with many, and at most `most_rows` of them all."""
        counts = [count for _, _, count in segments]
        is_few = sum(counts) <= min(self.few_rows * len(counts), most_rows)
        return is_few and max(counts) <= 4 * self.few_rows and not self.has_wide_bias

    def together(self, x: torch.Tensor, segments: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Runs several experts of few rows: each product for all of them, then the activation once.

        `x` [R,H], whose dtype the result has, holds their rows one expert after the other; segments are experts,
        ascending, with their first row and number of rows.
        """
        assert isinstance(self.w13, torch.Tensor) and isinstance(self.w2, torch.Tensor)
        row_bytes = (matrix.shape[2] * matrix.element_size() for matrix in (self.w13, self.w2))
        has_bias = self.w13_bias is not None or self.w2_bias is not None
        if has_bias or self._copies(len(x)) or any(size % 16 for size in row_bytes):
            return self.in_turn(x, segments)
        counts = {expert: count for expert, _, count in segments}
        ends = list(itertools.accumulate(counts.get(expert, 0) for expert in range(len(self.w13))))
        offs = torch.tensor(ends, dtype=torch.int32, device="cpu")
        gemm1 = F.grouped_mm(x, self.w13.transpose(1, 2), offs=offs)
        return F.grouped_mm(self.activation(gemm1.float()).to(x.dtype), self.w2.transpose(1, 2), offs=offs)

    def in_turn(self, x: torch.Tensor, segments: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """As `together`, but experts may be in any order, one product each, or two for copies of tiny ones."""
        if isinstance(self.w13, torch.Tensor) and isinstance(self.w2, torch.Tensor) and self._copies(len(x)):
            experts = [expert for expert, _, count in segments for _ in range(count)]
            ids = torch.tensor(experts, dtype=torch.int64, device="cpu")
            gemm1 = torch.bmm(self.w13.index_select(0, ids), x.unsqueeze(2)).squeeze(2)
            hidden = self.activation(gemm1.float()).to(x.dtype)
            return torch.bmm(self.w2.index_select(0, ids), hidden.unsqueeze(2)).squeeze(2)

        def linear(x: torch.Tensor, weight: PerExpert, bias: torch.Tensor | None) -> torch.Tensor:
            rows = x.split([count for _, _, count in segments])
            pairs = zip(rows, segments, strict=True)
            return torch.cat([_linear(own, weight[expert], _row(bias, expert)) for own, (expert, _, _) in pairs])

        hidden = self.activation(linear(x, self.w13, self.w13_bias).float()).to(x.dtype)
        return linear(hidden, self.w2, self.w2_bias)


def _packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, operation: str = "none", algorithm: str = ""
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, operation, [], algorithm)
    return result


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, invariant: bool = False) -> torch.Tensor:
    if weight.is_mkldnn:
        if weight.dtype == x.dtype:
            return by_pieces(lambda piece: _packed_linear(piece, weight, bias), x, invariant)
        weight = weight.to_dense()
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return by_pieces(lambda piece: F.linear(piece, weight, bias), x, invariant)
    blocks = weight.split(max(1, _UPCAST_ELEMENTS // weight.shape[1]))
    columns = (by_pieces(functools.partial(_wide_columns, block.to(x.dtype)), x, invariant) for block in blocks)
    result = torch.cat(list(columns), 1)
    return result if bias is None else result.add_(bias)


def _wide_columns(block: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The columns of `x @ weight.T` for some rows of the weight."""
    return F.linear(block, x).t() if len(x) in _SWAPPED_ROWS else F.linear(x, block)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]

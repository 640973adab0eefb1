"""One expert's matmuls on a CPU, with weights in oneDNN's order or in canonical order.

H hidden size, I intermediate size, E local experts, M rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from moereg.kernels.plain import cpu

ActivationFn = Callable[[torch.Tensor], torch.Tensor]
"""[...,2I] gate first (or [...,I] where not gated) to [...,I], same dtype."""
PerExpert: TypeAlias = "torch.Tensor | list[torch.Tensor]"

# float16 rounds to multiples of 6e-8 at least, in the output too. Beyond this weight, the rows' rounding errors matter.
_LARGE_WEIGHT: Final = 8.0
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
# Experts of fewer elements are faster in plain matmuls for few rows, since their calls cost less than oneDNN's.
_PACKED_ELEMENTS: Final = 400_000


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


def has_large_weights(topk_weights: torch.Tensor) -> bool:
    """Whether float16 results are too coarse for a routing weight; weights of routes without an expert may be NaN."""
    return bool((topk_weights.abs() > _LARGE_WEIGHT).any())


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

    @property
    def has_wide_bias(self) -> bool:
        """Whether a bias has another dtype than the weights, whose products would round it."""
        return self.w13_bias is not None and self.w13_bias.dtype != self.w13[0].dtype

    def __call__(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """As `ExpertMlp`; the result has x's dtype."""
        dtype = torch.float32 if self.is_emulated and (len(x) >= UPCAST_ROWS or self.has_wide_bias) else x.dtype
        gemm1 = _linear(x.to(dtype), self.w13[expert], _row(self.w13_bias, expert)).to(x.dtype)
        hidden = self.activation(gemm1.float()).to(x.dtype).to(dtype)
        return _linear(hidden, self.w2[expert], _row(self.w2_bias, expert)).to(x.dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if weight.is_mkldnn:
        if weight.dtype == x.dtype:
            packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
            return packed
        weight = weight.to_dense()
    bias = None if bias is None else bias.to(x.dtype)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    blocks = weight.split(max(1, _UPCAST_ELEMENTS // weight.shape[1]))
    if len(x) in _SWAPPED_ROWS:
        result = torch.cat([F.linear(block.to(x.dtype), x) for block in blocks]).t().contiguous()
    else:
        result = torch.cat([F.linear(x, block.to(x.dtype)) for block in blocks], 1)
    return result if bias is None else result.add_(bias)


def _row(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]

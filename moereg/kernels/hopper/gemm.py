"""The two grouped GEMMs of a Mixture-of-Experts layer for many rows an expert, on Hopper; `kernel.py` has the kernel.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate. Rows come in the
compact order of a `RoutePlan`, or in the batched format of a plain `BlockMap`. Tensor maps end where H and I do: boxes
that reach further bring zeros.
"""

from __future__ import annotations

import torch
import triton

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import clipped_map, tensor_map, weight_map
from moereg.kernels.hopper.config import HopperGemmConfig, select_group_m
from moereg.kernels.hopper.kernel import launch_product
from moereg.kernels.hopper.ring import BLOCK_K
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS


def gate_up_gemm(
    out: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    plan: BlockMap,
    config: HopperGemmConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int | None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row; see `kernels/gemm/grouped.py`.

    Args:
        out: [GUARD_ROWS + N, I or more] bf16 or fp16, contiguous, rows 16-byte aligned: overwritten behind the guard up
            to the last valid row, columns from I on with zeros or not at all. In the batched format [E, max_T, I or
            more], where invalid rows are overwritten with anything.
        rows: with `top_k` the tokens [T, H], fewer than 2**31 elements; without it their copies [N, H] in sorted order,
            or [E * max_T, H] in the batched format. 16-byte aligned, H and the stride multiples of 8.
        w13: [E, 2I, H], gate rows first, or [E, I, H] where not gated; contiguous, 16-byte aligned, I and H multiples
            of 8.
        plan: from `sort_routes`, or in the batched format from `plan_batches`, with `config.block_m` and
            `config.slack`; its first tile counter is used up.
        top_k: K, or None.
        overlap: whether to start while the previous kernel still runs, and to let the next one start early.
    """
    width = w13.shape[1] // (2 if epilogue.gated else 1)
    assert rows.shape[1] % 8 == rows.stride(0) % 8 == width % 8 == 0 and out.shape[-1] >= width
    _launch(out, rows, w13, plan, config, bias=epilogue.bias, epilogue=epilogue, top_k=top_k, overlap=overlap)


def down_gemm(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: BlockMap,
    config: HopperGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row.

    Args:
        out: [GUARD_ROWS + N, H] bf16 or fp16, contiguous, 16-byte aligned, H a multiple of 8: overwritten behind the
            guard up to the last valid row, in sorted order. In the batched format [E, max_T, H], where invalid rows are
            overwritten with anything.
        intermediate: [GUARD_ROWS + N, I or more] or [E, max_T, I or more], as `gate_up_gemm` wrote it.
        w2: [E, H, I], contiguous, 16-byte aligned, same dtype.
        plan: as for `gate_up_gemm`; its second tile counter is used up.
        bias: [E, H] contiguous, any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous, or None for no weight; None in the batched format.
        overlap: as for `gate_up_gemm`.
    """
    depth = w2.shape[2]
    assert out.shape[-1] == w2.shape[1] and out.shape[-1] % 8 == depth % 8 == 0
    rows = intermediate[GUARD_ROWS:] if intermediate.dim() == 2 else intermediate.flatten(0, 1)
    _launch(out, rows[:, :depth], w2, plan, config, bias=bias, topk_weights=topk_weights, overlap=overlap)


def _launch(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    plan: BlockMap,
    config: HopperGemmConfig,
    *,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    epilogue: GateUpEpilogue | None = None,
    top_k: int | None = None,
    overlap: bool,
) -> None:
    halves = 2 if epilogue is not None and epilogue.gated else 1
    # Columns of a tile that each warpgroup stores.
    out_columns = config.block_n // 2 // halves
    _, num_columns, depth = weight.shape
    assert rows.shape[1] == depth and out.is_contiguous()
    assert topk_weights is None or (isinstance(plan, RoutePlan) and topk_weights.is_contiguous())
    box = (1, config.rows_of_store(out_columns), out_columns)
    launch_product(
        rows,
        weight_map(weight, config.block_n, halves),
        plan,
        config,
        num_columns=num_columns,
        group_m=config.group_m or select_group_m(num_columns * depth * weight.element_size()),
        top_k=top_k,
        activation=None if epilogue is None else epilogue.activation,
        bias=bias,
        overlap=overlap,
        tile={"bodies": config.bodies, "stages": config.num_stages},
        out=clipped_map(out, box) if out.dim() == 2 else tensor_map(out, out.shape, out.stride(), box),
        topk_weights=topk_weights,
        num_steps=triton.cdiv(depth, BLOCK_K.value),
        max_tokens=out.shape[1] if out.dim() == 3 else None,
    )

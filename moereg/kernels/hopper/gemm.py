"""The two grouped GEMMs of a Mixture-of-Experts layer for many rows an expert, on Hopper, in Triton's Gluon.

The kernel is persistent: one program per multiprocessor. A program is warp-specialized: its producer fills a ring of
shared memory, and its consumers, two warpgroups, multiply and store. The product is transposed: rows of a weight are
wgmma's M side, tokens its N side, which may be short. So an expert with a few rows more than a multiple of a block gets
one longer tile instead of two: a short second accumulator takes the extra rows, for which the weights are in shared
memory already.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate. Rows come in the
compact order of a `RoutePlan`, or in the batched format of a plain `BlockMap`. Tensor maps end where H and I do: boxes
that reach further bring zeros.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import (
    clipped_map,
    product_arguments,
    row_arguments,
    tensor_map,
    tile_of,
    weight_map,
)
from moereg.kernels.hopper.config import HopperGemmConfig, select_group_m
from moereg.kernels.hopper.consumer import Output, RowWeights, consume
from moereg.kernels.hopper.producer import WeightBoxes, produce, produce_by_token
from moereg.kernels.hopper.ring import BLOCK_K, Ring, TileOrder, allocate_barriers, allocate_turns
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS

# Registers per thread of each consumer and of the producer: all that 384 threads have. With 56, the producer computes
# each token's address in the same register and stalls until it is read: the first GEMM took 5 to 8 % longer.
_CONSUMER_REGISTERS = gl.constexpr(208)
_PRODUCER_REGISTERS = gl.constexpr(88)


# Counts of tiles and steps are not specialized on their divisibility: that does not help, and compiles more variants.
@gluon.jit(do_not_specialize=["num_tiles_n", "group_m", "num_steps", "max_tokens"])
def _grouped_kernel(
    out,
    weights,
    rows,
    slack_rows,
    bias,
    topk_weights,
    plan,  # PlanPointers
    num_tiles_n,
    group_m,
    num_steps,
    num_columns,
    hidden_chunks,
    stride_chunks,
    max_tokens,
    TILE: gl.constexpr,  # ProductTile
    ACTIVATION: gl.constexpr,  # ActivationConstant
    OVERLAP: gl.constexpr,
):
    """Allocates shared memory, then splits a program's warps into a producer and two consumers.

    See `consume`, `produce` and `produce_by_token` for the arguments. `rows` is the tensor map `half_rows` or, where
    tokens are copied, the pointer `hidden_states`.
    """
    BY_TOKEN: gl.constexpr = TILE.top_k is not None
    dtype: gl.constexpr = weights.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CHUNK: gl.constexpr = [out.block_shape[1], out.block_shape[2]]
    weights_shared = gl.allocate_shared_memory(dtype, [TILE.stages] + weights.block_shape, weights.layout)
    rows_shared = gl.allocate_shared_memory(dtype, [2 * TILE.stages, TILE.block_m // 2, BLOCK_K], operand)
    slack_shared = gl.allocate_shared_memory(dtype, [TILE.stages, TILE.slack, BLOCK_K], operand)
    staging = gl.allocate_shared_memory(dtype, [4] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, dtype))
    # One arrival announces the boxes' bytes; copies by token add one for each producer thread.
    full, empty = allocate_barriers(TILE.stages, 129 if BY_TOKEN else 1)
    turns = allocate_turns()
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    row_weights = RowWeights(None, None)
    if topk_weights is not None:
        row_weights = RowWeights(plan.sorted_routes, topk_weights)
    ring = Ring(weights=weights_shared, rows=rows_shared, slack_rows=slack_shared, full=full, empty=empty)
    order = TileOrder(plan, gl.load(plan.num_blocks), num_tiles_n, group_m)
    output = Output(out, staging, bias, num_columns, row_weights, None, num_columns, max_tokens)
    boxes = WeightBoxes(weights, None, num_columns, None)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    gl.warp_specialize(
        [
            (consume, (output, ring, turns, order, num_steps, 0, TILE, ACTIVATION)),
            (consume, (output, ring, turns, order, num_steps, 1, TILE, ACTIVATION)),
            (produce_by_token, (boxes, rows, ring, turns, order, num_steps, hidden_chunks, stride_chunks, TILE))
            if BY_TOKEN
            else (produce, (boxes, rows, slack_rows, ring, turns, order, num_steps, TILE)),
        ],
        [4, 4 if BY_TOKEN else 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


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
    halves = 2 if epilogue.gated else 1
    width = w13.shape[1] // halves
    assert rows.shape[1] % 8 == rows.stride(0) % 8 == width % 8 == 0 and out.shape[-1] >= width
    _launch(
        out,
        rows,
        w13,
        weight_map(w13, config.block_n, halves),
        plan,
        config,
        out_columns=config.block_n // 2 // halves,
        bias=epilogue.bias,
        epilogue=epilogue,
        top_k=top_k,
        overlap=overlap,
    )


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
    given = out, rows[:, :depth], w2, weight_map(w2, config.block_n, 1), plan, config
    _launch(*given, out_columns=config.block_n // 2, bias=bias, topk_weights=topk_weights, overlap=overlap)


def _launch(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    weights: TensorDescriptor,
    plan: BlockMap,
    config: HopperGemmConfig,
    *,
    out_columns: int,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor | None = None,
    epilogue: GateUpEpilogue | None = None,
    top_k: int | None = None,
    overlap: bool,
) -> None:
    """Launches a product; a step loads a box of `weights`, and each warpgroup stores `out_columns` of a tile."""
    _, num_columns, depth = weight.shape
    assert rows.shape[1] == depth and out.is_contiguous()
    assert topk_weights is None or (isinstance(plan, RoutePlan) and topk_weights.is_contiguous())
    box = (1, config.rows_of_store(out_columns), out_columns)
    launch(
        _grouped_kernel,
        (num_multiprocessors(out.device),),
        out=clipped_map(out, box) if out.dim() == 2 else tensor_map(out, out.shape, out.stride(), box),
        weights=weights,
        topk_weights=topk_weights,
        num_tiles_n=triton.cdiv(num_columns, config.block_n),
        group_m=config.group_m or select_group_m(num_columns * depth * weight.element_size()),
        num_steps=triton.cdiv(depth, BLOCK_K.value),
        num_columns=num_columns,
        max_tokens=out.shape[1] if out.dim() == 3 else None,
        TILE=tile_of(config, rows, top_k, bodies=config.bodies, stages=config.num_stages),
        **row_arguments(rows, plan, config, top_k),
        **product_arguments(plan, epilogue, bias, overlap=overlap),
    )

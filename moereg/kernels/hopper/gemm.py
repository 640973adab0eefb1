"""The two grouped matmuls of a Mixture-of-Experts layer for many rows an expert, on Hopper, in Triton's Gluon.

One persistent program an SM. Its producer warps fill a ring of shared memory, and two warpgroups multiply and store.
The product is transposed: rows of a weight are wgmma's M side, tokens its N side, which may be short. So an expert with
a few rows more than a multiple of a block gets one longer tile, with a short second accumulator for which the weights
are in shared memory already, and not two tiles.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate, `I_pad` and `H_pad`
the sizes of the zero-padded weights. Rows come in the compact order of a `RoutePlan`, or lie where a plain `BlockMap`
of the batched format says. References in plain torch: `gate_up_reference` and `down_reference` of
`triton_gemm_reference`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moereg.kernels.hopper.consumer import GUARD_ROWS, consume
from moereg.kernels.hopper.producer import produce, produce_by_token
from moereg.kernels.hopper.ring import BLOCK_K
from moereg.kernels.hopper.turns import TURNS
from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.sort import RoutePlan

# All registers of 384 threads: both consumers', then the producer's. With 56 the producer computes each token's address
# in the same register and waits for it to be read: the first GEMM took 5 to 8 % longer.
_CONSUMER_REGISTERS = gl.constexpr(208)
_PRODUCER_REGISTERS = gl.constexpr(88)


@dataclass(frozen=True, slots=True)
class GluonGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile: wgmma's N side; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two); each warpgroup takes one half.
        slack: rows by which a tile may be longer; equal to the plan's.
        stages: depth of the ring.
        staged: elements of one staged store, of which each warpgroup has two; 4 KiB each is what four stages leave.
    """

    block_m: int
    block_n: int
    slack: int = 32
    stages: int = 4
    staged: int = 2048


@dataclass(frozen=True, slots=True)
class GluonConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        max_rows_per_expert: applies up to this average of rows per expert,
        min_columns: and from this many rows of an expert's w13 on.
        copies_rows: whether the tokens are first copied to the sorted rows of their routes.
        gate_up: configuration of the first GEMM.
        down: configuration of the second, with the same `block_m` and `slack`.
    """

    max_rows_per_expert: float
    min_columns: int
    copies_rows: bool
    gate_up: GluonGemmConfig
    down: GluonGemmConfig


# First match counts. Measured on an H200 with 32 to 8192 rows an expert, 2026-11-20 and 21.
#
# Tiles of 256 x 128 and 128 x 256 read as many bytes a product. The former are faster by 1 to 12 % where rows come as
# boxes, but where they are copied token by token, by 16 bytes, that costs 8 to 14 % of the former and 3 to 6 % of the
# latter, which copy half as many; yet at 256 rows an expert the latter lose more by a short second tile.
#
# To copy the tokens into sorted order first takes time with rows x H and saves with rows x H x columns: 162 us for 150
# at 2,048 columns (olmoe-1b-7b), 145 for 460 at 5,760 (gpt-oss-120b).
CONFIG_RULES = (
    GluonConfigRule(80, 0, False, GluonGemmConfig(64, 256), GluonGemmConfig(64, 256)),
    GluonConfigRule(176, 0, False, GluonGemmConfig(128, 256), GluonGemmConfig(128, 256)),
    GluonConfigRule(math.inf, 4096, True, GluonGemmConfig(256, 128), GluonGemmConfig(256, 128)),
    GluonConfigRule(400, 0, False, GluonGemmConfig(256, 128), GluonGemmConfig(256, 128)),
    GluonConfigRule(math.inf, 0, False, GluonGemmConfig(128, 256), GluonGemmConfig(128, 256)),
)

# An expert's matrix that is larger is not kept by the L2 until the next block of the same expert.
L2_SHARE_BYTES = 48 * 2**20

# Blocks that share its columns then. For smaller ones 1 is as good as any, or better by up to 11 % (gpt-oss-120b).
L2_GROUP = 4


def select_config(rows_per_expert: float, num_columns: float) -> GluonConfigRule:
    """Returns the rule for an average number of rows per expert and the rows of an expert's w13.

    Infinitely many of these give the rule for rows that lie in order already, as in the batched format.
    """
    return next(
        rule for rule in CONFIG_RULES if rows_per_expert <= rule.max_rows_per_expert and num_columns >= rule.min_columns
    )


# Tile and step counts are not specialized: their divisibility says nothing, and each would be compiled anew.
@gluon.jit(do_not_specialize=["num_tiles_n", "group", "num_k", "max_tokens"])
def _grouped_kernel(
    out,
    weights,
    rows,
    tail_rows,
    bias,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    counter,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    hidden_chunks,
    stride_chunks,
    max_tokens,
    BY_TOKEN: gl.constexpr,
    TOP_K: gl.constexpr,
    MASK_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    dtype: gl.constexpr = weights.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    CHUNK: gl.constexpr = [out.block_shape[1], out.block_shape[2]]
    weights_shared = gl.allocate_shared_memory(dtype, [STAGES] + weights.block_shape, weights.layout)
    rows_shared = gl.allocate_shared_memory(dtype, [2 * STAGES, MAIN // 2, BLOCK_K], operand)
    tail_shared = gl.allocate_shared_memory(dtype, [STAGES, TAIL, BLOCK_K], operand)
    staging = gl.allocate_shared_memory(dtype, [4] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, dtype))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        # One arrival announces the boxes' bytes; copies by token add one for each producer thread.
        mbarrier.init(full.index(slot), count=129 if BY_TOKEN else 1)
        mbarrier.init(empty.index(slot), count=2)
    tiles = gl.allocate_shared_memory(gl.int32, [TURNS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    announced = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    for turn in gl.static_range(TURNS):
        mbarrier.init(announced.index(turn), count=1)
        mbarrier.init(taken.index(turn), count=2)
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    ring = (weights_shared, rows_shared, tail_shared, full, empty)
    plan = (block_expert, block_row, block_end, gl.load(num_blocks))
    turns = (tiles, announced, taken)
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    # fmt: off
    if BY_TOKEN:
        gl.warp_specialize(
            [(consume, (out, bias, ring, turns, staging, plan, num_tiles_n, group, num_k, num_columns, max_tokens, 0,
                        True, BLOCK_N, MAIN, TAIL, STAGES, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (consume, (out, bias, ring, turns, staging, plan, num_tiles_n, group, num_k, num_columns, max_tokens, 1,
                        True, BLOCK_N, MAIN, TAIL, STAGES, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (produce_by_token, (weights, rows, sorted_routes, ring, turns, counter, plan, num_tiles_n, group, num_k,
                                 num_columns, hidden_chunks, stride_chunks, TOP_K, MASK_K, BLOCK_N, MAIN, TAIL,
                                 STAGES))],
            [4, 4], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    else:
        gl.warp_specialize(
            [(consume, (out, bias, ring, turns, staging, plan, num_tiles_n, group, num_k, num_columns, max_tokens, 0,
                        False, BLOCK_N, MAIN, TAIL, STAGES, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (consume, (out, bias, ring, turns, staging, plan, num_tiles_n, group, num_k, num_columns, max_tokens, 1,
                        False, BLOCK_N, MAIN, TAIL, STAGES, ACTIVATION, GATED, ALPHA, BETA, LIMIT)),
             (produce, (weights, rows, tail_rows, ring, turns, counter, plan, num_tiles_n, group, num_k, num_columns,
                        BLOCK_N, MAIN, TAIL, STAGES))],
            [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS])
    # fmt: on


def gate_up_gemm(
    out: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    plan: BlockMap,
    config: GluonGemmConfig,
    *,
    top_k: int | None,
    activation: str,
    gated: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row; see `triton_grouped_gemm.gate_up_gemm`.

    Args:
        out: [GUARD_ROWS + N, I_pad] bf16 or fp16, contiguous, 16-byte aligned: overwritten behind the guard up to the
            last valid row. In the batched format [E, max_T, I_pad], where rows that are not valid are overwritten with
            anything.
        rows: with `top_k` the tokens [T, H], fewer than 2**31 elements; without it their copies [N, H] in sorted order,
            or [E * max_T, H] in the batched format. 16-byte aligned, H and the stride multiples of 8.
        w13: [E, 2 * I_pad, H_pad] interleaved, or [E, I_pad, H_pad] where not gated; contiguous, zero padded, I_pad and
            H_pad multiples of 64.
        plan: from `sort_routes`, or in the batched format from `plan_batches`, with `config.block_m` and
            `config.slack`; its first tile counter is used up.
        config: launch configuration.
        top_k: K, or None.
        activation: `silu`, `swigluoai`, `gelu`, `gelu_tanh` or `relu2`.
        gated: whether w13 holds gates.
        alpha: slope inside the sigmoid.
        beta: added to the clamped up half; only where gated.
        limit: the clamp, or None; only where gated.
        bias: [E, 2 * I_pad] or [E, I_pad] in w13's row order, contiguous, any float dtype, or None.
        overlap: whether to start while the kernel in front still runs, and to let the next one start early.
    """
    num_experts, num_columns, depth = w13.shape
    assert rows.shape[1] % 8 == rows.stride(0) % 8 == 0 and out.shape[-1] == num_columns // (2 if gated else 1)
    # Of 16 rows, a box takes 8 gates and then 8 ups, or, where not gated, all in order.
    half_stride, row_stride = (depth, 2 * depth) if gated else (8 * depth, depth)
    weights = tensor_map(
        w13,
        (num_experts * num_columns // 16, 2, 8, depth),
        (16 * depth, half_stride, row_stride, 1),
        (config.block_n // 16, 2, 8, BLOCK_K.value),
    )
    out_columns = config.block_n // (4 if gated else 2)
    # fmt: off
    _launch(out, out_columns, weights, rows, w13, plan, 0, config, top_k, bias, activation, gated, alpha, beta, limit,
            overlap)
    # fmt: on


def down_gemm(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: BlockMap,
    config: GluonGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Writes `intermediate[row] @ w2[expert].T + bias` for every sorted row, unweighted.

    Args:
        out: [GUARD_ROWS + N, H] bf16 or fp16, contiguous, 16-byte aligned, H a multiple of 8: overwritten behind the
            guard up to the last valid row, in sorted order. In the batched format [E, max_T, H], where rows that are
            not valid are overwritten with anything.
        intermediate: [GUARD_ROWS + N, I_pad] or [E, max_T, I_pad], contiguous, as `gate_up_gemm` wrote it.
        w2: [E, H, I_pad], contiguous, same dtype.
        plan: as for `gate_up_gemm`; its second tile counter is used up.
        config: launch configuration.
        bias: [E, H] contiguous, any float dtype, or None.
        overlap: as for `gate_up_gemm`.
    """
    depth = w2.shape[2]
    assert intermediate.shape[-1] == depth and out.shape[-1] == w2.shape[1] and out.shape[-1] % 8 == 0
    weights = tensor_map(w2, w2.shape, w2.stride(), (1, config.block_n, BLOCK_K.value))
    rows = intermediate[GUARD_ROWS:] if intermediate.dim() == 2 else intermediate.view(-1, depth)
    # fmt: off
    _launch(out, config.block_n // 2, weights, rows, w2, plan, 1, config, None, bias, None, False, 1.0, 0.0, None,
            overlap)
    # fmt: on


def _launch(
    out: torch.Tensor,
    out_columns: int,
    weights: TensorDescriptor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    plan: BlockMap,
    number: int,
    config: GluonGemmConfig,
    top_k: int | None,
    bias: torch.Tensor | None,
    activation: str | None,
    gated: bool,
    alpha: float,
    beta: float,
    limit: float | None,
    overlap: bool,
) -> None:
    _, num_columns, depth = weight.shape
    assert plan.block_m == config.block_m and plan.slack == config.slack and depth % BLOCK_K.value == 0
    assert out.is_contiguous() and weight.is_contiguous() and config.block_m + config.slack <= GUARD_ROWS
    width = out.shape[-1]
    max_tokens = out.shape[1] if out.dim() == 3 else None
    # Anchored at an expert's end: [end, GUARD_ROWS - rows + i] is row i of the tile of `rows` rows that ends there.
    compact = (out.shape[0] - GUARD_ROWS + 1, GUARD_ROWS, width), (width, width, 1)
    shape, strides = compact if max_tokens is None else (out.shape, out.stride())
    clipped_out = tensor_map(out, shape, strides, (1, config.staged // out_columns, out_columns))
    half = tail = None
    if top_k is None:
        half = tensor_map(rows, rows.shape, rows.stride(), (config.block_m // 2, BLOCK_K.value))
        tail = tensor_map(rows, rows.shape, rows.stride(), (config.slack, BLOCK_K.value))
    launch(
        _grouped_kernel,
        (num_multiprocessors(out.device),),
        clipped_out,
        weights,
        rows if half is None else half,
        tail,
        bias,
        plan.sorted_routes if isinstance(plan, RoutePlan) else None,
        plan.block_expert,
        plan.block_row,
        plan.block_end,
        plan.num_blocks,
        plan.tile_counters[number:],
        triton.cdiv(num_columns, config.block_n),
        1 if num_columns * depth * weight.element_size() <= L2_SHARE_BYTES else L2_GROUP,
        depth // BLOCK_K.value,
        num_columns,
        rows.shape[1] // 8,
        rows.stride(0) // 8,
        max_tokens,
        BY_TOKEN=top_k is not None,
        TOP_K=top_k,
        MASK_K=rows.shape[1] != depth,
        BLOCK_N=config.block_n,
        MAIN=config.block_m,
        TAIL=config.slack,
        STAGES=config.stages,
        ACTIVATION=activation,
        GATED=gated,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        OVERLAP=overlap,
        num_warps=4,
        **overlap_options(overlap),
    )


def tensor_map(
    base: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorDescriptor:
    """A map whose boxes lie in shared memory as `wgmma` reads them."""
    swizzle_bytes = min(128, box[-1] * base.element_size())
    layout = gl.NVMMASharedLayout(swizzle_bytes, 8 * base.element_size(), len(box))
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


@functools.lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

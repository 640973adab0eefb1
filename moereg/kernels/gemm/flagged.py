"""Both products of a Mixture-of-Experts layer with packed weights in one launch, in Triton.

Tasks are all tiles of the first product, row tile by row tile, then all tiles of the second in the same order. Each row
tile has a flag: the launch that plans the rows zeroes it, and each tile of the first product increments it. A tile of
the second product waits until the flag has counted all of them. So only the tiles that read the output of the first
product's slowest program wait for it, and the second product fills multiprocessors that the first leaves idle. Flags
belong to the plan, and so to one call.

A program's id is its task, so that programs wait only for lower ids. This cannot deadlock if those have already
started, even where few programs run at a time, or one after another as in the interpreter. NVIDIA GPUs start programs
in the order of their ids. That is undocumented, but NVIDIA's own library relies on it: CUB's scan assigns tiles by
block index, and each block waits for those before it. This kernel has run on an H200 only.

Sizes as in `grouped`, whose results it reproduces bit for bit with the same configurations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.grouped import Gemm, down_tile, gate_up_tile
from moereg.kernels.gemm.operand import Strides, operand_of, tile_shape
from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.tiles import PlanArguments, RouteArguments, RouteShape, claim_tile
from moereg.kernels.sizes import FLAG_WORDS

_FLAG_WORDS = tl.constexpr(FLAG_WORDS)

# Blocks of 64 elements prefetched from each weight row of a waiting tile; a power of two.
_PREFETCHED_BLOCKS = tl.constexpr(8)


@triton.constexpr_function
def _has_prefetch():
    return not triton.knobs.runtime.interpret and tl.target_info.cuda_capability_geq(9, 0)


@triton.jit
def _prefetch_weights(weights, stride_expert, depth, num_columns, expert, column_tile, TILE: tl.constexpr):
    """Prefetches the first 4-bit weights of a column tile into the L2; does nothing before Hopper.

    `weights` are words of all experts, `num_columns` the rows of one, `depth` the elements of a row; `expert` is int64.
    """
    if _has_prefetch():
        # 256 bytes are 8 rows of a block.
        PARTS: tl.constexpr = TILE.block_n // 8
        chunks = tl.arange(0, _PREFETCHED_BLOCKS * PARTS)
        block = tl.minimum(chunks // PARTS, depth // 64 - 1)
        # The last tile may reach past the matrix.
        column = tl.minimum(column_tile * TILE.block_n + chunks % PARTS * 8, tl.maximum(num_columns - 8, 0))
        words = (block * num_columns + column) * 8
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
            "=r,l",
            [weights + expert * stride_expert + words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _raise_flag(flag):
    """Increments a flag (release) after all threads of the program have written their part of the tile."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def _flag_value(flag):
    """Reads a flag (acquire): what was written before it was raised can be read afterwards."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="gpu")


@triton.jit
def _both_kernel(
    out,
    intermediate,
    hidden_states,
    w13,  # Matrices
    w13_bias,
    w2,  # Matrices
    w2_bias,
    route_factors,
    topk_weights,
    sorted_routes,
    tiles,  # Tiles
    hidden_size,
    w13_depth,
    w13_columns,
    w2_depth,
    w2_columns,
    stride_hidden,
    stride_intermediate,
    stride_out,
    w13_strides,  # MatrixStrides
    w13_stride_bias,
    w2_strides,  # MatrixStrides
    w2_stride_bias,
    ROUTES: tl.constexpr,  # RouteShape
    ACTIVATION: tl.constexpr,  # ActivationConstant
    UP_FORMAT: tl.constexpr,  # WeightFormat, like DOWN_FORMAT
    UP_TILE: tl.constexpr,  # TileShape, like DOWN_TILE
    DOWN_FORMAT: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    direct = RouteArguments(None, None)
    plan = PlanArguments(0, 0, sorted_routes, tiles.block_expert, tiles.block_row, tiles.block_end, tiles.num_blocks)
    number = tl.program_id(0)
    up_tiles = tl.cdiv(w13_columns, UP_TILE.block_n)
    down_tiles = tl.cdiv(w2_columns, DOWN_TILE.block_n)
    # From here on the plan is complete and its flags are zero; no flag may be raised earlier.
    wait_for_previous(OVERLAP)
    used_blocks = tl.load(plan.num_blocks)
    if number < used_blocks * up_tiles:
        up = claim_tile(direct, 0, plan, used_blocks, up_tiles, ROUTES, UP_TILE, number)
        first = Gemm(intermediate, hidden_states, w13, w13_bias, route_factors, None)
        strides = Strides(stride_hidden, w13_strides, w13_stride_bias, stride_intermediate)
        # fmt: off
        gate_up_tile(up, first, hidden_size, w13_depth, w13_columns, strides, ROUTES, ACTIVATION, UP_FORMAT, UP_TILE,
                     OVERLAP)
        # fmt: on
        _raise_flag(tiles.flags + number // up_tiles * _FLAG_WORDS)
    elif number < used_blocks * (up_tiles + down_tiles):
        release_next(OVERLAP)
        number -= used_blocks * up_tiles
        down = claim_tile(direct, 0, plan, used_blocks, down_tiles, ROUTES, DOWN_TILE, number)
        flag = tiles.flags + number // down_tiles * _FLAG_WORDS
        count = _flag_value(flag)
        if count < up_tiles:
            expert = down.expert.to(tl.int64)
            _prefetch_weights(w2.weights, w2_strides.expert, w2_depth, w2_columns, expert, down.column_tile, DOWN_TILE)
        while count < up_tiles:
            count = _flag_value(flag)
        # One thread read the flag; the others may load only after it.
        tl.debug_barrier()
        second = Gemm(out, intermediate, w2, w2_bias, topk_weights, None)
        strides = Strides(stride_intermediate, w2_strides, w2_stride_bias, stride_out)
        down_tile(down, second, w2_depth, w2_columns, strides, DOWN_FORMAT, DOWN_TILE)


def both_gemms(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: PackedMatrix,
    w2: PackedMatrix,
    plan: RoutePlan,
    configs: GemmPair,
    epilogue: GateUpEpilogue,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    route_factors: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Runs `grouped.gate_up_gemm`, then `grouped.down_gemm`; takes the arguments of both.

    Args:
        w13, w2: packed, 4 bits a weight.
        plan: with the flags that `sort_routes` zeroed; they are used up.
        configs: launch configurations with equal warps in both products, no tall tiles and a `group_m` of 1.
    """
    gate_up, down = configs.gate_up, configs.down
    up, last = operand_of(w13, gate_up), operand_of(w2, down)
    assert w13.words.shape[3] == w2.words.shape[3] == 8, "weights of 4 bits"
    assert gate_up.num_warps == down.num_warps and gate_up.tall is None and down.tall is None
    assert gate_up.group_m == down.group_m == 1 and gate_up.block_m == down.block_m == plan.block_m and not plan.tall
    assert plan.flags is not None
    assert hidden_states.stride(1) == intermediate.stride(1) == out.stride(1) == 1
    hidden_size, depth = hidden_states.shape[1], last.depth
    assert hidden_size <= up.depth and intermediate.shape[1] == depth
    up_shape, down_shape = (
        tile_shape(c, o.num_columns, size, o.depth, c.block_k * c.slices, c.mask_rows)
        for c, o, size in ((gate_up, up, hidden_size), (down, last, depth))
    )
    num_tiles = sum(triton.cdiv(o.num_columns, c.block_n) for o, c in ((up, gate_up), (last, down)))
    launch(
        _both_kernel,
        (plan.max_blocks * num_tiles,),
        out,
        intermediate,
        hidden_states,
        up.matrices,
        epilogue.bias,
        last.matrices,
        bias,
        route_factors,
        topk_weights,
        plan.sorted_routes,
        plan.tiles,
        hidden_size,
        *(up.depth, up.num_columns, depth, last.num_columns),
        *(rows.stride(0) for rows in (hidden_states, intermediate, out)),
        up.strides,
        0 if epilogue.bias is None else epilogue.bias.shape[1],
        last.strides,
        0 if bias is None else bias.stride(0),
        ROUTES=RouteShape(True, False, top_k, 1),
        ACTIVATION=epilogue.activation,
        UP_FORMAT=up.format,
        UP_TILE=up_shape,
        DOWN_FORMAT=last.format,
        DOWN_TILE=down_shape,
        num_warps=gate_up.num_warps,
        # For loops that set no depth of their own; those over packed weights do.
        num_stages=gate_up.num_stages,
        **overlapping(overlap),
    )

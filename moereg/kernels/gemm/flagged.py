"""Both products of a Mixture-of-Experts layer with packed weights in one launch, in Triton.

Tasks are all tiles of the first product, expert by expert, and then all tiles of the second, in the same order. A tile
of the second waits for the tiles of the first that wrote its rows, and for no others (`launch/flags.py`). So nothing
waits for the slowest program of the first product but what needs its numbers, and tiles of the second fill the
multiprocessors that the first leaves free. Sizes as in `grouped` and `single`; the numbers are theirs, bit for bit,
where the configurations are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.config import GroupedGemmConfig, OneLaunch
from moereg.kernels.gemm.down import Down, down_tile
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.gate_up import GateUp, gate_up_tile
from moereg.kernels.gemm.loop import tile_shape
from moereg.kernels.gemm.operand import Matrices, operand_of
from moereg.kernels.gemm.single import MAX_TOP_K, down_single_tile, share_slices
from moereg.kernels.launch.flags import (
    counter_words,
    end_waiting,
    flag_of,
    flag_value,
    launches_before,
    prefetch_bytes,
    raise_flag,
    take_ticket,
    wait_for_flag,
)
from moereg.kernels.launch.overlap import overlap_options, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes, load_local_expert
from moereg.kernels.rows.tiles import RowArguments, claim_tile_of, plan_arguments


@triton.jit
def _prefetch_weights(matrices, experts, column_tile, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Asks the L2 for the first 4-bit weights of a tile of columns, BLOCKS times 64 of each row.

    Args:
        matrices: `Matrices`.
        experts: [EXPERTS] local experts, int64, a power of two of them.
        column_tile: number of the tile.
    """
    # 256 bytes are 8 rows of a block.
    PARTS: tl.constexpr = TILE.block_n // 8
    chunks = tl.arange(0, BLOCKS * PARTS)
    block = tl.minimum(chunks // PARTS, matrices.depth // 64 - 1)
    # The last tile may reach past the matrix.
    column = tl.minimum(column_tile * TILE.block_n + chunks % PARTS * 8, tl.maximum(matrices.num_columns - 8, 0))
    words = (block * matrices.num_columns + column) * 8
    prefetch_bytes(matrices.weights + (experts * matrices.stride_expert)[:, None] + words[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _both_kernel(
    out,
    intermediate,
    hidden_states,
    counters,
    w13,
    w13_group_scale,
    w13_zero_point,
    w13_row_scale,
    w13_bias,
    w2,
    w2_group_scale,
    w2_zero_point,
    w2_row_scale,
    w2_bias,
    route_factors,
    topk_weights,
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    hidden_size,
    w13_depth,
    w13_columns,
    w13_tiles,
    w2_depth,
    w2_columns,
    w2_tiles,
    max_blocks,
    stride_hidden,
    stride_intermediate,
    stride_out,
    w13_stride_expert,
    w13_stride_column,
    w13_stride_scale,
    w13_stride_zero_point,
    w13_stride_bias,
    w2_stride_expert,
    w2_stride_column,
    w2_stride_scale,
    w2_stride_zero_point,
    w2_stride_bias,
    SORTED: tl.constexpr,
    SINGLE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_TOP_K: tl.constexpr,
    PIECES: tl.constexpr,
    TICKETS: tl.constexpr,
    PREFETCH: tl.constexpr,  # Blocks of a waiting tile's weights.
    ACTIVATION: tl.constexpr,  # ActivationConstant
    UP_FORMAT: tl.constexpr,  # WeightFormat, as the next but one
    UP_TILE: tl.constexpr,  # TileShape, as the next but one
    DOWN_FORMAT: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = RowArguments(
        topk_ids,
        expert_map,
        num_tokens,
        num_experts,
        num_local_experts,
        sorted_routes,
        block_expert,
        block_row,
        block_end,
        num_blocks,
    )
    used_blocks = max_blocks
    if SORTED:
        wait_for_previous(OVERLAP)
        used_blocks = tl.load(num_blocks)
    if TICKETS:
        number, launches = take_ticket(counters)
    else:
        number = tl.program_id(0)
        launches = 0
    up_tasks = max_blocks * w13_tiles
    if number < up_tasks:
        # One token has one flag, since a tile of its second product reads all routes.
        flag = flag_of(counters, 0 if SINGLE else number // w13_tiles)
        if number < used_blocks * w13_tiles:
            up = claim_tile_of(rows, number, 0, used_blocks, w13_tiles, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, UP_TILE)
            if up.expert >= 0:
                matrices = Matrices(
                    w13,
                    w13_group_scale,
                    w13_zero_point,
                    w13_row_scale,
                    w13_depth,
                    w13_columns,
                    w13_stride_expert,
                    w13_stride_column,
                    w13_stride_scale,
                    w13_stride_zero_point,
                )
                first = GateUp(
                    intermediate,
                    hidden_states,
                    w13_bias,
                    route_factors,
                    matrices,
                    hidden_size,
                    stride_hidden,
                    w13_stride_bias,
                    stride_intermediate,
                )
                gate_up_tile(up, first, SORTED, TOP_K, ACTIVATION, UP_FORMAT, UP_TILE, OVERLAP)
        raise_flag(flag)
    else:
        number -= up_tasks
        if not TICKETS:
            launches = launches_before(counters, tl.num_programs(0) - up_tasks)
        matrices = Matrices(
            w2,
            w2_group_scale,
            w2_zero_point,
            w2_row_scale,
            w2_depth,
            w2_columns,
            w2_stride_expert,
            w2_stride_column,
            w2_stride_scale,
            w2_stride_zero_point,
        )
        if SINGLE:
            if PREFETCH > 0:
                routes = tl.arange(0, BLOCK_TOP_K)
                experts = load_local_expert(topk_ids, expert_map, routes, TOP_K, num_experts, num_local_experts)
                _prefetch_weights(matrices, tl.maximum(experts, 0).to(tl.int64), number, PREFETCH, DOWN_TILE)
            down_single_tile(
                out,
                intermediate,
                matrices,
                w2_bias,
                topk_weights,
                topk_ids,
                expert_map,
                num_experts,
                num_local_experts,
                stride_intermediate,
                w2_stride_bias,
                number,
                flag_of(counters, 0),
                (launches + 1) * up_tasks,
                TOP_K,
                PIECES,
                DOWN_FORMAT,
                DOWN_TILE,
                OVERLAP,
            )
        elif number < used_blocks * w2_tiles:
            down = claim_tile_of(rows, number, 0, used_blocks, w2_tiles, SORTED, SINGLE, TOP_K, BLOCK_TOP_K, DOWN_TILE)
            if down.expert >= 0:
                release_next(OVERLAP)
                flag = flag_of(counters, number // w2_tiles)
                target = (launches + 1) * w13_tiles
                count = flag_value(flag)
                if PREFETCH > 0:
                    if count - target < 0:
                        experts = tl.zeros([1], tl.int64) + down.expert
                        _prefetch_weights(matrices, experts, down.column_tile, PREFETCH, DOWN_TILE)
                wait_for_flag(flag, target, count)
                second = Down(
                    out,
                    intermediate,
                    w2_bias,
                    topk_weights,
                    None,
                    matrices,
                    stride_intermediate,
                    w2_stride_bias,
                    stride_out,
                )
                down_tile(down, second, DOWN_FORMAT, DOWN_TILE)
        if not TICKETS:
            end_waiting(counters)


def num_flags(plan: BlockMap | DirectRoutes) -> int:
    """Flags that a launch of `both_gemms` needs."""
    return 1 if isinstance(plan, DirectRoutes) and plan.single else int(plan.max_blocks)


def both_gemms(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: PackedMatrix,
    w2: PackedMatrix,
    plan: BlockMap | DirectRoutes,
    gate_up: GroupedGemmConfig,
    down: GroupedGemmConfig,
    epilogue: GateUpEpilogue,
    counters: torch.Tensor,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    overlap: bool = False,
    shares: OneLaunch,
) -> None:
    """`grouped.gate_up_gemm` and then `grouped.down_gemm`, or of one token `single.down_single`.

    Args:
        out: of the second product: [N, H], or [1, H] of one token.
        intermediate: [N, I_pad], overwritten as by the first product.
        hidden_states: [T, H].
        w13: packed.
        w2: packed.
        plan: as of both; one token comes as `DirectRoutes`.
        gate_up: launch configuration of the first product, without tall tiles, one tile of rows after the other.
        down: of the second, likewise, with as many warps.
        epilogue: of the first.
        counters: from `flags.new_counters`, with as many flags as `num_flags` says, used by launches of as many tasks
            only, of which no two run at a time.
        top_k: K.
        bias: of the second product, [E, H] or None.
        topk_weights: [T, K] fp32 contiguous, or None.
        apply_router_weight_on_input: whether they multiply the first product.
        overlap: as of both products.
        shares: how they share the launch.
    """
    single = isinstance(plan, DirectRoutes) and plan.single
    pieces = 1
    if single:
        assert top_k <= MAX_TOP_K
        down, pieces = share_slices(down, top_k)
    first, second = operand_of(w13, gate_up), operand_of(w2, down)
    assert gate_up.num_warps == down.num_warps and gate_up.tall is None and down.tall is None
    assert gate_up.group_m == down.group_m == 1
    assert gate_up.block_m == plan.block_m and down.block_m == plan.block_m
    assert counters.dtype == torch.int32 and counters.numel() >= counter_words(num_flags(plan))
    assert hidden_states.stride(1) == intermediate.stride(1) == out.stride(1) == 1
    assert hidden_states.shape[1] <= first.depth and intermediate.shape[1] == second.depth
    hidden_size, depth = hidden_states.shape[1], second.depth
    up_tiles, down_tiles = (triton.cdiv(o.num_columns, c.block_n) for o, c in ((first, gate_up), (second, down)))
    launch(
        _both_kernel,
        (plan.max_blocks * up_tiles + (1 if single else plan.max_blocks) * down_tiles,),
        out,
        intermediate,
        hidden_states,
        counters,
        *first.tensors,
        epilogue.bias,
        *second.tensors,
        bias,
        topk_weights if apply_router_weight_on_input else None,
        None if apply_router_weight_on_input else topk_weights,
        *plan_arguments(plan, first.num_experts),
        hidden_size,
        first.depth,
        first.num_columns,
        up_tiles,
        depth,
        second.num_columns,
        down_tiles,
        plan.max_blocks,
        hidden_states.stride(0),
        intermediate.stride(0),
        out.stride(0),
        *first.strides,
        0 if epilogue.bias is None else epilogue.bias.stride(0),
        *second.strides,
        0 if bias is None else bias.stride(0),
        SORTED=isinstance(plan, BlockMap),
        SINGLE=single,
        TOP_K=top_k,
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
        PIECES=pieces,
        TICKETS=shares.tickets,
        PREFETCH=0 if w2.element == "int8" else shares.prefetch,
        ACTIVATION=epilogue.constant,
        UP_FORMAT=first.format,
        UP_TILE=tile_shape(
            gate_up, first.num_columns, hidden_size, first.depth, gate_up.block_k * gate_up.slices, gate_up.mask_rows
        ),
        DOWN_FORMAT=second.format,
        DOWN_TILE=tile_shape(
            down,
            second.num_columns,
            depth,
            depth,
            down.block_k * (pieces if single else down.slices),
            # Rows of one token are pieces of routes, of which some have no expert here.
            single or down.mask_rows,
        ),
        OVERLAP=overlap,
        num_warps=gate_up.num_warps,
        num_stages=gate_up.num_stages,
        **overlap_options(overlap and isinstance(plan, BlockMap)),
        **({} if shares.registers is None else {"maxnreg": shares.registers}),
    )

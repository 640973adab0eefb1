"""The kernel of Hopper's grouped products with 16-bit or packed weights, in Triton's Gluon.

It is persistent: one or two programs per multiprocessor. A program is warp-specialized: its producer fills a ring of
shared memory, and its consumers, one to three, multiply and store. The product is transposed: rows of a weight are
wgmma's M side, tokens its N side, which may be short. So an expert with a few rows more than a multiple of a block gets
one longer tile instead of two: a short second accumulator takes the extra rows, for which the weights are in shared
memory already.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.hopper.arguments import product_arguments, row_arguments
from moereg.kernels.hopper.config import BODIES, THREE_BODIES, HopperGemmConfig
from moereg.kernels.hopper.consumer import Output, RowWeights, consume_plain_tile
from moereg.kernels.hopper.packed_config import HopperPackedConfig
from moereg.kernels.hopper.packed_consumer import consume_packed_tile
from moereg.kernels.hopper.producer import Operands, produce, produce_ahead
from moereg.kernels.hopper.ring import (
    BLOCK_K,
    NO_TILE,
    ProductTile,
    Ring,
    TileOrder,
    allocate_barriers,
    allocate_turns,
    consumer_warps,
    locate,
    take_tile,
)
from moereg.kernels.hopper.training_consumer import STORES, consume_trained_tile
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.launch.overlap import release_next, wait_for_previous
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.block_map import BlockMap

_BODIES = gl.constexpr(BODIES)


@gluon.constexpr_function
def _next_shorter(body: int, bodies: int) -> int:
    """Number of the longest body in `bodies` that is shorter than number `body`, or -1."""
    return max((shorter for shorter in range(body) if (bodies or THREE_BODIES) >> shorter & 1), default=-1)


@gluon.jit
def _consume_tile(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    SLACK: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Multiplies and finishes a tile of up to ROWS + SLACK rows; returns the next slot of the ring and its phase."""
    # fmt: off
    if TILE.packed is not None:
        return consume_packed_tile(output, ring, slot, phase, num_steps, tile, PART, ROWS, SLACK, TILE, ACTIVATION)
    elif TILE.trained is not None:
        return consume_trained_tile(output, ring, slot, phase, num_steps, tile, PART, ROWS, TILE, ACTIVATION)
    else:
        return consume_plain_tile(output, ring, slot, phase, num_steps, tile, PART, ROWS, SLACK, TILE, ACTIVATION)
    # fmt: on


@gluon.jit
def _consume_shortest(
    output,
    ring,
    slot,
    phase,
    num_steps,
    tile,
    PART: gl.constexpr,
    BODY: gl.constexpr,
    TILE: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    """Runs `_consume_tile` with the shortest body that holds the tile; body number BODY does."""
    ROWS: gl.constexpr = _BODIES[BODY][0] * TILE.block_m // 4
    MORE: gl.constexpr = _BODIES[BODY][1] * TILE.slack
    SHORTER: gl.constexpr = _next_shorter(BODY, TILE.bodies)
    # fmt: off
    if SHORTER < 0:
        return _consume_tile(output, ring, slot, phase, num_steps, tile, PART, ROWS, MORE, TILE, ACTIVATION)
    else:
        if tile.num_rows > _BODIES[SHORTER][0] * TILE.block_m // 4 + _BODIES[SHORTER][1] * TILE.slack:
            slot, phase = _consume_tile(output, ring, slot, phase, num_steps, tile, PART, ROWS, MORE, TILE, ACTIVATION)
        else:
            slot, phase = _consume_shortest(
                output, ring, slot, phase, num_steps, tile, PART, SHORTER, TILE, ACTIVATION)
        return slot, phase
    # fmt: on


@gluon.jit
def _consume(output, ring, turns, order, num_steps, PART: gl.constexpr, TILE: gl.constexpr, ACTIVATION: gl.constexpr):
    """Multiplies and stores a part of every tile of the program. Run by the warps of one consumer.

    Waits for a tile to be announced and for each slot of the ring to be full; reads the ring, `order` and what
    `output` names; writes the staged stores and, through these, the output. `num_steps` has those of an adapter, and
    is at least three for packed weights; PART is the consumer's number and that of its columns.
    """
    WARPS: gl.constexpr = consumer_warps(TILE.consumers)
    LONGEST: gl.constexpr = _next_shorter(len(_BODIES), TILE.bodies)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_number, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0), WARPS)
    while tile_number != NO_TILE:
        tile = locate(tile_number, order, TILE.block_m, TILE.slack)
        slot, phase = _consume_shortest(output, ring, slot, phase, num_steps, tile, PART, LONGEST, TILE, ACTIVATION)
        tile_number, turn, turn_phase = take_tile(turns, turn, turn_phase, WARPS)
    tma.store_wait(0)


# Counts of tiles and steps are not specialized on their divisibility: that does not help, and compiles more variants.
@gluon.jit(
    do_not_specialize=[
        *("num_tiles_n", "group_m", "num_steps", "low_steps"),
        *("bias_columns", "scale_words", "max_tokens", "num_routes"),
    ]
)
def _grouped_kernel(
    out,
    pre,
    partials,
    saved,
    rows,
    slack_rows,
    low_rows,
    weights,
    scales,
    row_scale,
    low_weights,
    bias,
    topk_weights,
    plan,  # PlanPointers
    num_tiles_n,
    group_m,
    num_steps,
    low_steps,
    num_columns,
    bias_columns,
    scale_words,
    max_tokens,
    num_routes,
    hidden_chunks,
    stride_chunks,
    TILE: gl.constexpr,  # ProductTile
    ACTIVATION: gl.constexpr,  # ActivationConstant
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Allocates shared memory, then splits a program's warps into a producer and one to three consumers.

    See `Output` and `Operands` for the arguments; None for what a product lacks, and for `bias_columns` if equal to
    `num_columns`.
    """
    IS_TRAINED: gl.constexpr = TILE.trained is not None
    AHEAD: gl.constexpr = IS_TRAINED or TILE.top_k is not None
    CONSUMERS: gl.constexpr = TILE.consumers
    dtype: gl.constexpr = weights.dtype if TILE.packed is None else out.dtype
    operand: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BOXES: gl.constexpr = TILE.stages if TILE.packed is None and not TILE.by_depth else CONSUMERS * TILE.stages
    # A product that stores rows from the ring, if any, has as large boxes there.
    STORE: gl.constexpr = saved.block_shape if out is None else out.block_shape
    CHUNK: gl.constexpr = [STORE[1], STORE[2]]
    NUM_STORES: gl.constexpr = STORES if IS_TRAINED and saved is None else 2
    weights_shared = gl.allocate_shared_memory(weights.dtype, [BOXES] + weights.block_shape, weights.layout)
    rows_shared = gl.allocate_shared_memory(dtype, [2 * TILE.stages, TILE.block_m // 2, BLOCK_K], operand)
    scales_shared = None
    if scales is not None:
        scales_shared = gl.allocate_shared_memory(gl.int32, [BOXES] + scales.block_shape, scales.layout)
    slack_shared = None
    if TILE.slack > 0:
        slack_shared = gl.allocate_shared_memory(dtype, [TILE.stages, TILE.slack, BLOCK_K], operand)
    staging = gl.allocate_shared_memory(
        dtype, [NUM_STORES * CONSUMERS] + CHUNK, gl.NVMMASharedLayout.get_default_for(CHUNK, dtype)
    )
    factors = None
    if IS_TRAINED:
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        factors = gl.allocate_shared_memory(gl.float32, [CONSUMERS, TILE.block_m], LINE)
    # One arrival announces the boxes' bytes; copies by token add one for each producer thread.
    full, empty = allocate_barriers(TILE.stages, 1 if TILE.top_k is None else 129, CONSUMERS)
    turns = allocate_turns(CONSUMERS)
    fence_async_shared()
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    row_weights = RowWeights(None, None)
    if topk_weights is not None:
        row_weights = RowWeights(plan.sorted_routes, topk_weights)
    ring = Ring(weights_shared, scales_shared, rows_shared, slack_shared, full, empty)
    order = TileOrder(plan, gl.load(plan.num_blocks), num_tiles_n, group_m)
    if bias_columns is None:
        bias_columns = num_columns
    # fmt: off
    output = Output(out, staging, bias, bias_columns, row_weights, row_scale, num_columns, max_tokens,
                    pre, partials, factors, num_routes)
    operands = Operands(rows, slack_rows, weights, scales, num_columns, scale_words, num_steps,
                        low_rows, low_weights, low_steps, saved, hidden_chunks, stride_chunks)
    # fmt: on
    all_steps = num_steps if low_rows is None else num_steps + low_steps
    # Arguments are spelled out because a tuple that is kept in a variable turns its constants into tensors.
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (output, ring, turns, order, all_steps, 0, TILE, ACTIVATION)),
                (produce_ahead, (operands, ring, turns, order, TILE)),
            ],
            [4],
            [PRODUCER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consume, (output, ring, turns, order, all_steps, 0, TILE, ACTIVATION)),
                (_consume, (output, ring, turns, order, all_steps, 1, TILE, ACTIVATION)),
                (produce_ahead if AHEAD else produce, (operands, ring, turns, order, TILE)),
            ],
            [4, 4 if AHEAD else 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.static_assert(CONSUMERS == 3 and not AHEAD)
        gl.warp_specialize(
            [
                (_consume, (output, ring, turns, order, all_steps, 0, TILE, ACTIVATION)),
                (_consume, (output, ring, turns, order, all_steps, 1, TILE, ACTIVATION)),
                (_consume, (output, ring, turns, order, all_steps, 2, TILE, ACTIVATION)),
                (produce, (operands, ring, turns, order, TILE)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# Arguments that a product may lack.
_ABSENT: Final = dict.fromkeys(
    (
        *("pre", "partials", "saved", "low_rows", "scales", "row_scale", "low_weights", "topk_weights"),
        *("low_steps", "bias_columns", "scale_words", "max_tokens", "num_routes"),
    )
)

# Registers per thread of each consumer and of the producer: all that 384 threads have. With 56, the producer computes
# each token's address in the same register and stalls until it is read: the first GEMM took 5 to 8 % longer.
_REGISTERS: Final = {"CONSUMER_REGISTERS": 208, "PRODUCER_REGISTERS": 88}


def launch_product(
    rows: torch.Tensor,
    weights: TensorDescriptor,
    plan: BlockMap,
    config: HopperGemmConfig | HopperPackedConfig,
    *,
    num_columns: int,
    group_m: int,
    top_k: int | None,
    tile: dict[str, Any],
    activation: ActivationConstant | None,
    bias: torch.Tensor | None,
    counter: torch.Tensor | None = None,
    overlap: bool = False,
    programs: int = 1,
    **others: Any,
) -> None:
    """Launches a product; arguments as for `row_arguments`, `product_arguments`, `Operands` and `TileOrder`.

    Args:
        tile: what the `ProductTile` has beside sizes.
        programs: per multiprocessor.
        others: further arguments of `_grouped_kernel`, and options.
    """
    sizes = config.block_m, config.block_n, config.slack
    mask_k = top_k is not None and rows.shape[1] % BLOCK_K.value != 0
    arguments = {
        "weights": weights,
        "num_tiles_n": triton.cdiv(num_columns, config.block_n),
        "group_m": group_m,
        "num_columns": num_columns,
        "TILE": ProductTile(*sizes, top_k=top_k, mask_k=mask_k, **tile),
        **row_arguments(rows, plan, config, top_k),
        **product_arguments(plan, activation, bias, counter=counter, overlap=overlap),
    }
    grid = (programs * num_multiprocessors(rows.device),)
    launch(_grouped_kernel, grid, **{**_ABSENT, **_REGISTERS, **arguments, **others})

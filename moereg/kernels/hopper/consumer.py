"""The consumers of a Hopper grouped GEMM, in Triton's Gluon: multiply a tile, add the bias, activate, store.

The product is transposed, columns x rows, because rows of a weight are wgmma's M side.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from moereg.kernels.hopper.ring import locate, multiply, reinterpret
from moereg.kernels.hopper.turns import NO_TILE, take_tile
from moereg.kernels.sizes import GUARD_ROWS

_GUARD = gl.constexpr(GUARD_ROWS)

# Triton 3.8 renamed these two; 3.9 removed the old names.
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def activate(x, ACTIVATION: gl.constexpr, ALPHA: gl.constexpr):
    """The activation of gates in fp32; as `triton_activation.activate`."""
    if ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        return x / (1.0 + gl.exp(-ALPHA * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        gl.static_assert(ACTIVATION == "relu2")
        # Written so that NaN stays NaN.
        x = gl.where(x < 0.0, 0.0, x)
        return x * x


@gluon.jit
def _finish(
    x,
    bias,
    expert,
    column,
    num_columns,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    DTYPE: gl.constexpr,
):
    """Returns rows x columns of the output for `x`, columns x rows of the product."""
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    if bias is not None:
        at = gl.arange(0, COLUMNS, gl.SliceLayout(1, x.type.layout))
        if GATED:
            at = at // 16 * 16 + at % 8 * 2 + at // 8 % 2
        at += column
        value = gl.load(bias + expert.to(gl.int64) * num_columns + at, mask=at < num_columns, other=0.0)
        x += value.to(gl.float32)[:, None]
    if GATED:
        # The box brought 8 gates, then their 8 ups: rows that one thread holds both of.
        gate, up = gl.split(gl.permute(gl.reshape(x, (COLUMNS // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
        if LIMIT is not None:
            # Comparisons keep NaN, which a minimum would replace by the limit.
            gate = gl.where(gate > LIMIT, LIMIT, gate)
            up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
        y = gl.reshape(activate(gate, ACTIVATION, ALPHA) * (up + BETA), (COLUMNS // 2, ROWS))
    elif ACTIVATION is not None:
        y = activate(x, ACTIVATION, ALPHA)
    else:
        y = x
    return gl.permute(y.to(DTYPE), (1, 0))


@gluon.jit
def _store(
    x,
    out,
    staging,
    bias,
    expert,
    column,
    out_column,
    num_columns,
    anchor,
    first_row,
    WARPGROUP: gl.constexpr,
    FIRST: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Stores a warpgroup's columns x rows of the product, chunk by chunk through its two buffers of `staging`.

    Row i of the tile goes to [anchor, first_row + i] of the tensor map `out`, which drops it where the expert ends.
    """
    COLUMNS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    CHUNK: gl.constexpr = out.block_shape[1]
    if ROWS > CHUNK:
        low, high = gl.split(gl.permute(gl.reshape(x, (COLUMNS, 2, ROWS // 2)), (0, 2, 1)))
        # fmt: off
        _store(low, out, staging, bias, expert, column, out_column, num_columns, anchor, first_row, WARPGROUP,
               FIRST, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        _store(high, out, staging, bias, expert, column, out_column, num_columns, anchor, first_row, WARPGROUP,
               FIRST + ROWS // 2, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
        # fmt: on
    else:
        y = _finish(x, bias, expert, column, num_columns, ACTIVATION, GATED, ALPHA, BETA, LIMIT, out.dtype)
        buffer = staging.index(2 * WARPGROUP + FIRST // CHUNK % 2)
        # Of the two buffers the other one may still be read; a tile may have left off with either.
        tma.store_wait(0 if FIRST == 0 else 1)
        barrier()
        if ROWS == CHUNK:
            buffer.store(y)
        else:
            buffer.slice(0, ROWS, dim=0).store(y)
        fence_async_shared()
        barrier()
        box = reinterpret(buffer, out.dtype, out.block_shape, out.layout)
        store_box(out, [anchor, first_row + FIRST, out_column], box)


@gluon.jit
def _consume_tile(
    out,
    bias,
    ring,
    staging,
    slot,
    phase,
    num_k,
    num_columns,
    expert,
    tile_n,
    row,
    rows,
    max_tokens,
    WARPGROUP: gl.constexpr,
    ROWS: gl.constexpr,
    TAIL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    FENCE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
    OUT_COLUMNS: gl.constexpr,
):
    main, tail, slot, phase = multiply(ring, slot, phase, num_k, WARPGROUP, ROWS, TAIL, BLOCK_N, STAGES, FENCE)
    column = tile_n * BLOCK_N + WARPGROUP * (BLOCK_N // 2)
    out_column = (2 * tile_n + WARPGROUP) * OUT_COLUMNS
    if max_tokens is None:
        anchor = row + rows
        first_row = _GUARD - rows
    else:
        anchor = expert
        first_row = row - expert * max_tokens
    # fmt: off
    _store(main, out, staging, bias, expert, column, out_column, num_columns, anchor, first_row,
           WARPGROUP, 0, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    if TAIL > 0:
        _store(tail, out, staging, bias, expert, column, out_column, num_columns, anchor, first_row,
               WARPGROUP, ROWS, ACTIVATION, GATED, ALPHA, BETA, LIMIT)
    # fmt: on
    return slot, phase


@gluon.jit
def consume(
    out,
    bias,
    ring,
    turns,
    staging,
    plan,
    num_tiles_n,
    group,
    num_k,
    num_columns,
    max_tokens,
    WARPGROUP: gl.constexpr,
    FENCE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MAIN: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    ALPHA: gl.constexpr,
    BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):
    """Multiplies and stores one warpgroup's half of every tile of the program.

    `max_tokens` is the batched format's, whose `out` is the map of [E, max_T, columns]: the rows of a box behind an
    expert's count are written, those behind its max_T dropped. None where rows are compact.
    """
    OUT_COLUMNS: gl.constexpr = out.block_shape[2]
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile, turn, turn_phase = take_tile(turns, gl.to_tensor(0), gl.to_tensor(0))
    while tile != NO_TILE:
        expert, tile_n, row, rows = locate(tile, plan, num_tiles_n, group, MAIN, TAIL)
        # fmt: off
        if rows > MAIN:
            slot, phase = _consume_tile(
                out, bias, ring, staging, slot, phase, num_k, num_columns, expert, tile_n, row, rows, max_tokens,
                WARPGROUP, MAIN, TAIL, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT, OUT_COLUMNS)
        elif rows > MAIN // 2:
            slot, phase = _consume_tile(
                out, bias, ring, staging, slot, phase, num_k, num_columns, expert, tile_n, row, rows, max_tokens,
                WARPGROUP, MAIN, 0, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT, OUT_COLUMNS)
        else:
            slot, phase = _consume_tile(
                out, bias, ring, staging, slot, phase, num_k, num_columns, expert, tile_n, row, rows, max_tokens,
                WARPGROUP, MAIN // 2, 0, BLOCK_N, STAGES, FENCE, ACTIVATION, GATED, ALPHA, BETA, LIMIT, OUT_COLUMNS)
        # fmt: on
        tile, turn, turn_phase = take_tile(turns, turn, turn_phase)
    tma.store_wait(0)

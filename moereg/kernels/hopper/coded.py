"""Decodes 4-bit weights on their way into the ring, in Triton's Gluon: the producer writes what TMA would bring.

At most 16 numbers share a scale, whatever is stored. So a thread that holds 32 codes of one scale computes those 16
numbers, as `kernels/restore.py` does and with its bits, and looks each code up by permutations of bytes: three
instructions a number, for any 4-bit element. Codes are read in canonical order, along either axis of a weight, one step
ahead, so that a step of the products, some 1,000 cycles, hides both the reading and the decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from moereg.kernels.hopper.consumer import barrier
from moereg.kernels.hopper.ring import BLOCK_K, producer_warps, reinterpret

# Elements that a thread decodes at once, of one row and one scale.
CHUNK = gl.constexpr(32)

# Steps whose codes in a row are one line of 128 bytes, or where rows are steps, whose rows are as many as lines.
STEPS_AHEAD = gl.constexpr(4)

# Lines of BLOCK_K elements in a slot.
_LINES = gl.constexpr(256)


class CodedFormat(NamedTuple):
    """Compile-time constant: 4-bit codes and their scales."""

    numbers: tuple[float, ...]  # by code; of integers before a zero point is taken off
    group: int  # elements of a row that share a scale, a multiple of CHUNK; 0: all
    exponents: bool  # whether scales are exponents in uint8
    zero_points: bool  # whether there are zero points, packed as codes are


class Codes(NamedTuple):
    """A matrix of each expert as kernel arguments."""

    words: Any  # pointer to int32 [E, R, K / 8], a row's codes in order from the lowest bits on
    scale: Any  # pointer to [E, R, groups], fp32 or uint8
    zero_point: Any  # pointer to uint8 [E, R, ceil(groups / 2)]; or None
    num_rows: Any  # R
    row_chunks: Any  # K / CHUNK
    num_groups: Any  # scales of a row


@dataclass(frozen=True)
class CodedMatrix:
    """A matrix of each expert in canonical order, contiguous.

    Attributes:
        q: [E, R, K / 2] uint8.
        scale: [E, R, groups] fp32, or uint8 exponents.
        zero_point: [E, R, ceil(groups / 2)] uint8, or None.
        format: What they mean.
    """

    q: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    format: CodedFormat

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, R and K."""
        return (*self.q.shape[:2], 2 * self.q.shape[2])

    @property
    def arguments(self) -> Codes:
        """The kernel's."""
        _, rows, columns = self.shape
        return Codes(
            self.q.view(torch.int32), self.scale, self.zero_point, rows, columns // CHUNK.value, self.scale.shape[2]
        )


@gluon.jit
def _row_of(at, codes, column_tile, TILE: gl.constexpr):
    """The rows of a matrix that lie in a slot's lines `at`, but for `by_depth`, and which of them exist."""
    if TILE.trained == "gate_up" and TILE.halves == 2:
        # As `weight_map`'s boxes: 8 gates, then their 8 ups.
        limit = codes.num_rows // 2
        rows = column_tile * (TILE.block_n // 2) + at // 16 * 8 + at % 8
        return rows + at // 8 % 2 * limit, rows < limit
    else:
        rows = column_tile * TILE.block_n + at
        return rows, rows < codes.num_rows


@gluon.jit
def prefetch_steps(codes, expert, column_tile, k, TILE: gl.constexpr):
    """Asks for the codes of STEPS_AHEAD steps from `k` on, a line of 128 bytes a row: `load_step` finds them in L2.

    Registers hold one step more, which is too short for memory, and shared memory is full.
    """
    at = gl.arange(0, _LINES, gl.BlockedLayout([1], [32], [producer_warps(TILE.coded)], [0]))  # [256]
    if TILE.by_depth:
        rows = k * BLOCK_K + at
        mask = rows < codes.num_rows
        first = column_tile * (TILE.block_n // 8)
    else:
        rows, mask = _row_of(at, codes, column_tile, TILE)
        first = k * (BLOCK_K // 8)
    row_words = codes.row_chunks * 4
    start = codes.words + expert.to(gl.int64) * codes.num_rows * row_words
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [start + gl.where(mask, rows * row_words + first, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load_step(codes, expert, column_tile, k, TILE: gl.constexpr):
    """Reads the codes and scales of a step, and its zero points if there are any, into registers.

    Returns:
        [256, 2, 4] int32 and [256, 2]: rows of BLOCK_K elements in the order of a slot. A thread's own codes in a row
        have one scale.
    """
    gl.static_assert(TILE.block_n == _LINES)
    FORMAT: gl.constexpr = TILE.coded
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 4], [16, 2, 1], [producer_warps(TILE.coded), 1, 1], [2, 1, 0])
    OF_CHUNKS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    at = gl.arange(0, _LINES, gl.SliceLayout(1, OF_CHUNKS))[:, None]  # [256, 1]
    chunks = gl.arange(0, 2, gl.SliceLayout(0, OF_CHUNKS))[None, :]  # [1, 2]
    if TILE.by_depth:
        # 128 bytes of each of the step's rows, then the next 128.
        rows = k * BLOCK_K + at % BLOCK_K
        mask = rows < codes.num_rows
        chunks = chunks + (column_tile * (TILE.block_n // CHUNK) + at // BLOCK_K * (BLOCK_K // CHUNK))
    else:
        chunks = chunks + (k * (BLOCK_K // CHUNK) + at * 0)
        rows, mask = _row_of(at, codes, column_tile, TILE)
    mask = mask & (chunks < codes.row_chunks)  # [256, 2]
    first_row = expert.to(gl.int64) * codes.num_rows
    places = gl.expand_dims(rows * codes.row_chunks + chunks, 2) * 4  # [256, 2, 1]
    places = places + gl.expand_dims(
        gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))), 0), 0
    )
    word_mask = gl.broadcast(gl.expand_dims(mask, 2), places)[0]
    words = gl.load(codes.words + first_row * (codes.row_chunks * 4) + places, mask=word_mask, other=0)
    groups = chunks * 0
    if FORMAT.group > 0:
        groups = chunks // (FORMAT.group // CHUNK)
    scale = gl.load(codes.scale + first_row * codes.num_groups + (rows * codes.num_groups + groups), mask=mask, other=0)
    if FORMAT.zero_points:
        row_bytes = (codes.num_groups + 1) // 2
        zero_point = codes.zero_point + first_row * row_bytes + (rows * row_bytes + groups // 2)
        zero = gl.load(zero_point, mask=mask, other=0).to(gl.int32)
        return words, scale, (zero >> groups % 2 * 4) & 15
    else:
        return words, scale


@gluon.jit
def _number(scale, step, CODE: gl.constexpr, TILE: gl.constexpr):
    """A code's number, fp32."""
    # Triton 3.6 does not pass a `CodedFormat` on as an argument.
    FORMAT: gl.constexpr = TILE.coded
    VALUE: gl.constexpr = FORMAT.numbers[CODE]
    if FORMAT.zero_points:
        return (VALUE - step[2].to(gl.float32)) * scale
    else:
        return VALUE * scale


@gluon.jit
def _two(low, high, dtype: gl.constexpr):
    """Rounds two fp32 numbers to 16 bits each: one word."""
    NAME: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + NAME + ".f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _planes(scale, step, FIRST: gl.constexpr, TILE: gl.constexpr, dtype: gl.constexpr):
    """The low bytes of the 16-bit numbers of codes FIRST to FIRST + 3, and their high bytes: two words."""
    low = _two(_number(scale, step, FIRST, TILE), _number(scale, step, FIRST + 1, TILE), dtype)
    high = _two(_number(scale, step, FIRST + 2, TILE), _number(scale, step, FIRST + 3, TILE), dtype)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;",
        "=&r,=r,r,r",
        [low, high],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _look_up(words, low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3):
    """Eight codes' numbers, two a word, out of the planes of all 16 numbers; all of one shape."""
    # A selector's lower three bits choose among eight bytes, and a code's highest bit between the two choices.
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 bytes, side, a, b, low, high, words;
        and.b32 bytes, $4, 0x7777; shr.u32 side, $4, 1;
        and.b32 side, side, 0x4444; or.b32 side, side, 0x3210;
        prmt.b32 a, $5, $6, bytes; prmt.b32 b, $7, $8, bytes; prmt.b32 low, a, b, side;
        prmt.b32 a, $9, $10, bytes; prmt.b32 b, $11, $12, bytes; prmt.b32 high, a, b, side;
        prmt.b32 $0, low, high, 0x5140; prmt.b32 $1, low, high, 0x7362;
        shr.u32 words, $4, 16;
        and.b32 bytes, words, 0x7777; shr.u32 side, words, 1;
        and.b32 side, side, 0x4444; or.b32 side, side, 0x3210;
        prmt.b32 a, $5, $6, bytes; prmt.b32 b, $7, $8, bytes; prmt.b32 low, a, b, side;
        prmt.b32 a, $9, $10, bytes; prmt.b32 b, $11, $12, bytes; prmt.b32 high, a, b, side;
        prmt.b32 $2, low, high, 0x5140; prmt.b32 $3, low, high, 0x7362;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r",
        [words, low_0, low_1, low_2, low_3, high_0, high_1, high_2, high_3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _as_wide(x, words):
    return gl.broadcast(gl.expand_dims(x, 2), words)[0]


@gluon.jit
def decode_step(step, ring, slot, ready, TILE: gl.constexpr):
    """Decodes what `load_step` returned into a slot, and arrives at `ready`."""
    words = step[0]
    scale = step[1]
    dtype: gl.constexpr = ring.rows.dtype
    if TILE.coded.exponents:
        # 2^-127 is subnormal, and 255 is NaN.
        exponent = scale.to(gl.int32)
        bits = gl.where(exponent == 0, 0x400000, gl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(gl.float32, bitcast=True)
    low_0, high_0 = _planes(scale, step, 0, TILE, dtype)  # [256, 2]
    low_1, high_1 = _planes(scale, step, 4, TILE, dtype)
    low_2, high_2 = _planes(scale, step, 8, TILE, dtype)
    low_3, high_3 = _planes(scale, step, 12, TILE, dtype)
    # fmt: off
    x0, x1, x2, x3 = _look_up(  # [256, 2, 4]
        words, _as_wide(low_0, words), _as_wide(low_1, words), _as_wide(low_2, words), _as_wide(low_3, words),
        _as_wide(high_0, words), _as_wide(high_1, words), _as_wide(high_2, words), _as_wide(high_3, words))
    # fmt: on
    pairs = gl.permute(gl.join(gl.join(x0, x1), gl.join(x2, x3)), (0, 1, 2, 4, 3))
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    # One store, since Triton waits between two: lines of two numbers a word.
    lines = reinterpret(ring.weights, gl.int32, [TILE.stages, _LINES, BLOCK_K // 2], SHARED)
    lines.index(slot).store(gl.reshape(pairs, (_LINES, BLOCK_K // 2)))
    # wgmma reads through the async proxy.
    fence_async_shared()
    barrier()
    mbarrier.arrive(ready)

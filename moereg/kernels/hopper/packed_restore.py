"""Dequantizes packed weights into the register operand of a warpgroup's wgmma, in Triton's Gluon.

wgmma's left operand may be in registers: of 64 rows and 16 reduced elements, thread 4 r + c of a warp holds elements
2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of rows r and r + 8. In the order of `kernels/packed/weights.py` these are words c and
c + 4 of the two rows, for four instructions in a row. So a thread reads four words, and no data is exchanged.

A thread loads weight rows from shared memory by address, so any row can be its own: where gate and up alternate, rows
r and r + 8 of an instruction are gate and up of the same column.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moereg.kernels.hopper.ring import BLOCK_K, reinterpret


class PackedFormat(NamedTuple):
    """Compile-time constant: how weights are packed and how they are dequantized."""

    element: str  # of `PackedMatrix`
    # `e8m0` or `e4m3` codes that are folded into the operand; `float32` ones that multiply dequantized weights,
    # rounded; or None
    scales: str | None
    span: int  # steps per word of scales


@gluon.constexpr_function
def words_layout(columns, words, gated):
    """Layout in which a warpgroup reads `columns` rows of `words` words, as lines of 32 words."""
    # Basis vectors of a row number's bits in (line, word), the lowest bit first.
    per_line = 32 // words
    row_bits = [[0, words << bit] for bit in range(per_line.bit_length() - 1)]
    row_bits += [[1 << bit, 0] for bit in range((columns // per_line).bit_length() - 1)]
    lane_rows = row_bits[1:4] if gated else row_bits[:3]
    pair = row_bits[0] if gated else row_bits[3]
    registers = [[0, 4], pair, *row_bits[6:], *([[0, 8]] if words == 16 else [])]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], *lane_rows], row_bits[4:6], [], [columns // per_line, 32]
    )


@gluon.constexpr_function
def scales_layout(columns, gated):
    """Layout in which a warpgroup reads one word of each row as lines of 8 words; rows as in `words_layout`."""
    row_bits = [[0, 1 << bit] for bit in range(3)]
    row_bits += [[1 << bit, 0] for bit in range((columns // 8).bit_length() - 1)]
    lane_rows = row_bits[1:4] if gated else row_bits[:3]
    pair = row_bits[0] if gated else row_bits[3]
    return gl.DistributedLinearLayout(
        [pair, *row_bits[6:]], [[0, 0], [0, 0], *lane_rows], row_bits[4:6], [], [columns // 8, 8]
    )


@gluon.jit
def _multiply_add(x, y, z):
    """Returns x * y + z for both bfloat16 halves of 32-bit words."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, y, z], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _permute_bytes(x, selector):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [x, selector], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _both_halves(x):
    """Rounds fp32 to bfloat16 and returns it in both halves of a word."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _factor(scale, parity, p: gl.constexpr, FORMAT: gl.constexpr):
    """[COLUMNS] uint32: the scale of a block's elements from 16 p on, in both halves, from `PackedMatrix` words."""
    if FORMAT.scales == "e8m0":
        # Codes 0 and 1 of a word belong to an even block, 2 and 3 to an odd one.
        selector = gl.full_like(scale, 0x1010 if p < 2 else 0x0101) + (parity * 0x2222).to(gl.uint32)
        return _permute_bytes(scale, selector) & 0x7F807F80
    else:
        gl.static_assert(FORMAT.scales == "e4m3")
        SELECTOR: gl.constexpr = (0x1010, 0x0101, 0x3232, 0x2323)[p]
        return (_permute_bytes(scale, gl.full_like(scale, SELECTOR)) & 0x0FF00FF0) | 0x70007000


@gluon.jit
def _pair(low_words, high_words, scale, parity, p: gl.constexpr, FORMAT: gl.constexpr):
    """[COLUMNS, 8, 2] bfloat16: elements 16 p to 16 p + 15 of a block."""
    words = high_words if FORMAT.element == "int8" and p >= 2 else low_words
    if FORMAT.element == "float4_e2m1fn":
        if p < 3:
            bits = (words << (3 * p)) & 0x81C081C0
        else:
            bits = ((words << 1) & 0x80008000) | ((words >> 5) & 0x01000100) | ((words >> 4) & 0x00C000C0)
        factor = gl.expand_dims(_factor(scale, parity, p, FORMAT), 1)  # [COLUMNS, 1]
        # A zero of either sign plus minus zero keeps its sign.
        zero = gl.full_like(words, 0x80008000)
        pair = _multiply_add(bits, gl.broadcast(factor, bits)[0], zero)
    else:
        # As in `kernels/packed/weights.py`: in units of 2**-6.
        BITS: gl.constexpr = 8 if FORMAT.element == "int8" else 4
        PLACE: gl.constexpr = BITS * p % 8
        MIDDLE: gl.constexpr = 0x8000 + ((128 if BITS == 8 else 124) << 7)
        bits = (words >> (BITS * p // 8 * 8 % 16)) & (((1 << BITS) - 1) * 0x10001 << PLACE)
        unit = gl.full_like(words, (0x7F00 - PLACE * 0x80) * 0x10001)
        pair = _multiply_add(bits, unit, gl.full_like(words, MIDDLE * 0x10001))
        if FORMAT.scales == "float32":
            factor = gl.expand_dims(_both_halves(scale.to(gl.float32, bitcast=True)), 1)  # [COLUMNS, 1]
            pair = _multiply_add(pair, gl.broadcast(factor, pair)[0], gl.full_like(words, 0x80008000))
    low = (pair & 0xFFFF).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.uint16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _in_halves(shared, LINES: gl.constexpr, WIDTH: gl.constexpr):
    """Views shared memory [..., lines, WIDTH] in blocks of 64 weight rows."""
    PARTS: gl.constexpr = shared.shape[0] * shared.shape[1] // LINES
    return reinterpret(shared, gl.int32, [PARTS, LINES, WIDTH], shared.layout)


@gluon.jit
def _in_order(x, GATED: gl.constexpr):
    """Flattens [lines, words a line] to 64 rows; where gated, each 16 rows are 8 gates, then their 8 ups."""
    WORDS: gl.constexpr = x.shape[0] * x.shape[1] // 64
    if GATED:
        x = gl.permute(gl.reshape(x, (4, 8, 2, WORDS)), (0, 2, 1, 3))
    return gl.reshape(x, (64, WORDS))


@gluon.jit
def restore(ring, place, parity, ROWS: gl.constexpr, GATED: gl.constexpr, FORMAT: gl.constexpr):
    """[64, BLOCK_K] bfloat16, the left operand of a product with ROWS rows, from 64 rows of a slot.

    `place` says which 64 rows of the ring; `parity` is 1 in odd steps, which use the upper codes of a word of scales
    that serves two steps. GATED: whether gates and ups alternate.
    """
    WORDS: gl.constexpr = 16 if FORMAT.element == "int8" else 8
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    words = _in_halves(ring.weights, 2 * WORDS, 32).index(place)  # [lines, 32]
    words = _in_order(words.load(words_layout(64, WORDS, GATED)).to(gl.uint32, bitcast=True), GATED)  # [64, WORDS]
    high_words = words
    if WORDS == 16:
        words, high_words = gl.split(gl.permute(gl.reshape(words, (64, 2, 8)), (0, 2, 1)))
    scale = None
    if FORMAT.scales is not None:
        LAYOUT: gl.constexpr = gl.SliceLayout(1, words.type.layout)
        scale = _in_halves(ring.scales, 8, 8).index(place).load(scales_layout(64, GATED))
        scale = gl.reshape(_in_order(scale.to(gl.uint32, bitcast=True), GATED), (64,))
        scale = gl.convert_layout(scale, LAYOUT, assert_trivial=True)
    x0 = _pair(words, high_words, scale, parity, 0, FORMAT)
    x1 = _pair(words, high_words, scale, parity, 1, FORMAT)
    x2 = _pair(words, high_words, scale, parity, 2, FORMAT)
    x3 = _pair(words, high_words, scale, parity, 3, FORMAT)  # [64, 8, 2]
    joined = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [64, 8, 2, 2, 2]: p is 2 * last + the one before
    operand = gl.reshape(gl.permute(joined, (0, 4, 3, 1, 2)), (64, BLOCK_K))
    return gl.convert_layout(operand, OPERAND, assert_trivial=True)

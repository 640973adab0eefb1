"""Quantizes tokens that travel between ranks, and dequantizes them, in Triton.

Bit for bit as `moereg.quantize` does. Sizes: T tokens, H hidden, G groups of a token.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.remembered import launch_again
from moereg.kernels.quantized.codes import amax_bits, divide, encode, load_rows, quantize_tile, scale_of_bits
from moereg.kernels.quantized.operands import RowFormat
from moereg.kernels.sizes import GROUPED_BLOCK

# Numbers per program where there are many tokens; a program then takes several tokens.
_PROGRAM_ELEMENTS: Final = 4096
_MANY_PROGRAMS: Final = 1024


@triton.jit(do_not_specialize=["num_tokens"])
def _quantize_tokens_kernel(
    q,
    scales,
    x,
    num_tokens,
    size,
    num_groups,
    stride_x,
    GROUP: tl.constexpr,
    MIN_CODE: tl.constexpr,
    MAX_CODE: tl.constexpr,
    E8M0: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]  # [TOKENS, 1]
    inside = tokens < num_tokens
    first = tl.program_id(1) * BLOCK
    columns = first + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    values = load_rows(x, None, tokens, inside, columns, size, stride_x)  # [TOKENS, BLOCK]
    DTYPE: tl.constexpr = q.dtype.element_ty
    if GROUP:
        codes, stored = quantize_tile(values, DTYPE, GROUP, MIN_CODE, MAX_CODE, E8M0)
        groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :]  # [1, BLOCK / GROUP]
    else:
        scale, stored = scale_of_bits(tl.expand_dims(amax_bits(values, 1), 1), MAX_CODE, E8M0)  # [TOKENS, 1]
        codes = encode(divide(values, scale), DTYPE, MIN_CODE, MAX_CODE)  # [TOKENS, BLOCK]
        groups = tl.arange(0, 1)[None, :]  # [1, 1]
    rows = tokens.to(tl.int64)
    stored = stored.to(scales.dtype.element_ty)
    tl.store(scales + rows * num_groups + groups, stored, mask=inside & (groups < num_groups))
    tl.store(q + rows * size + columns, codes, mask=inside & (columns < size))


def quantize_tokens(q: torch.Tensor, scales: torch.Tensor, hidden_states: torch.Tensor, fmt: RowFormat) -> None:
    """Quantizes each token: one launch.

    Args:
        q: [T, H] codes, contiguous: overwritten.
        scales: [T, G] fp32 or uint8 exponents, contiguous: overwritten; the last group may be short.
        hidden_states: [T, H].
        fmt: Format of the codes: dynamic scales of one token each.
    """
    (num_tokens, size), num_groups = hidden_states.shape, scales.shape[1]
    assert not fmt.static and not fmt.spans_rows and not fmt.global_scale and q.dtype == fmt.dtype
    assert num_groups == (-(-size // fmt.group) if fmt.group else 1) and scales.dtype == fmt.scale_dtype
    assert q.is_contiguous() and scales.is_contiguous() and hidden_states.stride(1) == 1
    if num_tokens == 0:
        return
    widest = triton.next_power_of_2(size)
    block = max(fmt.group, min(GROUPED_BLOCK, widest)) if fmt.group else widest
    num_blocks = triton.cdiv(size, block)
    several = max(1, _PROGRAM_ELEMENTS // block) if num_tokens * num_blocks >= _MANY_PROGRAMS else 1
    launch_again(
        _quantize_tokens_kernel,
        (triton.cdiv(num_tokens, several), num_blocks),
        *(q, scales, hidden_states),
        *(num_tokens, size, num_groups, hidden_states.stride(0)),
        **fmt.constants,
        E8M0=fmt.e8m0,
        TOKENS=several,
        BLOCK=block,
        num_warps=min(8, max(1, several * block // 512)),
    )


@triton.jit
def _restored(codes, scale):
    """Dequantizes codes to fp32; scales are fp32, or exponents in uint8."""
    if scale.dtype == tl.uint8:
        exponent = scale.to(tl.int32)
        # 2^-127 is subnormal, and 255 is NaN.
        bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
    return codes.to(tl.float32) * scale


@triton.jit
def _restore_tokens_kernel(
    out, codes, scales, size, num_groups, stride_codes, stride_scales, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < size
    values = tl.load(codes + token * stride_codes + columns, mask=mask)
    groups = columns // GROUP if GROUP else columns * 0
    scale = tl.load(scales + token * stride_scales + groups, mask=mask, other=0)
    tl.store(out + token * size + columns, _restored(values, scale).to(out.dtype.element_ty), mask=mask)


def restore_tokens(codes: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes codes to [T, H] numbers of a dtype, rounded from fp32: one launch.

    Rows of the codes and of their scales [T, G], fp32 or uint8 exponents, are contiguous; `group` 0: a whole row.
    """
    num_tokens, size = codes.shape
    out = torch.empty((num_tokens, size), dtype=dtype, device=codes.device)
    if num_tokens == 0:
        return out
    block = min(GROUPED_BLOCK, triton.next_power_of_2(size))
    launch_again(
        _restore_tokens_kernel,
        (num_tokens, triton.cdiv(size, block)),
        *(out, codes, scales),
        *(size, scales.shape[1], codes.stride(0), scales.stride(0)),
        GROUP=group,
        BLOCK=block,
    )
    return out

"""Copies tokens to the sorted rows of their routes, in Triton. Sizes: T tokens, K choices per token, H hidden."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.replay import launch


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """Launch configuration of the copy.

    Attributes:
        block: columns per program; a power of two.
        num_warps: warps per program.
    """

    block: int = 1024
    num_warps: int = 4


DEFAULT_COPY_CONFIG = CopyConfig()


@triton.jit
def _copy_rows_kernel(
    out,
    hidden_states,
    route_row,
    hidden_size,
    stride_out,
    stride_hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    release_next(OVERLAP)
    # A program copies a token, not a row, so that each token is read once.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < hidden_size
    x = tl.load(hidden_states + token * stride_hidden + columns, mask=mask)
    for k in tl.static_range(TOP_K):
        row = tl.load(route_row + token * TOP_K + k).to(tl.int64)
        tl.store(out + row * stride_out + columns, x, mask=mask & (row >= 0))


def copy_rows(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    route_row: torch.Tensor,
    config: CopyConfig = DEFAULT_COPY_CONFIG,
    overlap: bool = False,
) -> None:
    """Writes each token to the sorted rows of its routes.

    Args:
        out: [T * K, H], dtype of the tokens, rows contiguous: overwritten up to the last valid row.
        hidden_states: [T, H], rows contiguous.
        route_row: [T * K] int32, the row of a route, negative where it adds nothing.
        config: launch configuration.
        overlap: whether to start while the kernel that writes `route_row` still runs, and to let the next start early.
    """
    num_tokens, hidden_size = hidden_states.shape
    assert out.shape == (route_row.numel(), hidden_size) and route_row.numel() % num_tokens == 0
    assert out.stride(1) == hidden_states.stride(1) == 1
    block = min(config.block, triton.next_power_of_2(hidden_size))
    launch(
        _copy_rows_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        out,
        hidden_states,
        route_row,
        hidden_size,
        out.stride(0),
        hidden_states.stride(0),
        TOP_K=route_row.numel() // num_tokens,
        BLOCK=block,
        num_warps=config.num_warps,
        **overlapping(overlap),
    )

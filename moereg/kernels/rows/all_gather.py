"""Tokens that every rank of a group sees, in Triton: padded to equal numbers, their routes divided among the ranks.

Sizes: T tokens of this rank, M the most of any rank, R ranks, K choices per token, H hidden.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.remembered import launch_again

_IDS: Final = 1024
_COLUMNS: Final = 1024


class PaddedTokens(NamedTuple):
    """Tokens, followed by padding."""

    hidden_states: torch.Tensor  # [M, H], zeros in padding
    topk_weights: torch.Tensor  # [M, K] fp32, zeros in padding
    topk_ids: torch.Tensor  # [M, K] int32, -1 in padding


@triton.jit(do_not_specialize=["num_tokens"])
def _pad_tokens_kernel(
    out,
    out_weights,
    out_ids,
    hidden_states,
    topk_weights,
    topk_ids,
    num_tokens,
    hidden_size,
    stride_hidden,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = token < num_tokens
    x = tl.load(hidden_states + token * stride_hidden + columns, mask=inside & (columns < hidden_size), other=0.0)
    tl.store(out + token * hidden_size + columns, x, mask=columns < hidden_size)
    choices = tl.arange(0, CHOICES)
    first = (choices < TOP_K) & (tl.program_id(1) == 0)
    routes = token * TOP_K + choices
    tl.store(out_weights + routes, tl.load(topk_weights + routes, mask=first & inside, other=0.0), mask=first)
    tl.store(out_ids + routes, tl.load(topk_ids + routes, mask=first & inside, other=-1), mask=first)


def pad_tokens(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_rows: int
) -> PaddedTokens:
    """Copies tokens [T, H], their weights [T, K] fp32 and ids [T, K] int32, and pads them: one launch."""
    (num_tokens, hidden_size), top_k = hidden_states.shape, topk_ids.shape[1]
    hidden_states = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    topk_weights, topk_ids = topk_weights.contiguous(), topk_ids.contiguous()
    padded = PaddedTokens(
        hidden_states.new_empty((num_rows, hidden_size)),
        topk_weights.new_empty((num_rows, top_k)),
        topk_ids.new_empty((num_rows, top_k)),
    )
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch_again(
        _pad_tokens_kernel,
        (num_rows, triton.cdiv(hidden_size, block)),
        *(*padded, hidden_states, topk_weights, topk_ids),
        *(num_tokens, hidden_size, hidden_states.stride(0)),
        TOP_K=top_k,
        CHOICES=triton.next_power_of_2(top_k),
        BLOCK=block,
    )
    return padded


@triton.jit
def _keep_own_routes_kernel(
    topk_ids,
    num_holders,
    holders,
    num_routes,
    num_experts,
    num_ranks,
    most,
    rank,
    TOP_K: tl.constexpr,
    IDS: tl.constexpr,
):
    routes = tl.program_id(0) * IDS + tl.arange(0, IDS)  # [IDS]
    ids = tl.load(topk_ids + routes, mask=routes < num_routes, other=-1)
    token = routes // TOP_K
    turns = token % most + token // most
    known = (ids >= 0) & (ids < num_experts)
    experts = tl.where(known, ids, 0)
    replica = turns % tl.load(num_holders + experts)
    takes = tl.where(known, tl.load(holders + experts * num_ranks + replica), -1)
    tl.store(topk_ids + routes, tl.where(takes == rank, ids, -1), mask=routes < num_routes)


def keep_own_routes(topk_ids: torch.Tensor, num_holders: torch.Tensor, holders: torch.Tensor, rank: int) -> None:
    """Replaces the ids of routes that other ranks compute by -1: one launch.

    Args:
        topk_ids: [R * M, K] int32, contiguous, those of rank 0 first: changed in place.
        num_holders: [num_experts] int32, ranks that hold each expert.
        holders: [num_experts, R] int32, the ranks, ascending. Token t of rank r takes holder (t + r) % num_holders.
    """
    assert topk_ids.is_contiguous() and topk_ids.numel() < 2**31
    num_experts, num_ranks = holders.shape
    launch_again(
        _keep_own_routes_kernel,
        (triton.cdiv(topk_ids.numel(), _IDS),),
        *(topk_ids, num_holders, holders),
        *(topk_ids.numel(), num_experts, num_ranks, topk_ids.shape[0] // num_ranks, rank),
        TOP_K=topk_ids.shape[1],
        IDS=_IDS,
    )


@triton.jit
def _sum_of_ranks_kernel(
    out, parts, hidden_size, stride_out, stride_rank, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < hidden_size
    where = parts + token * hidden_size + columns
    total = tl.load(where, mask=mask).to(tl.float32)
    for _ in range(1, NUM_RANKS):
        where += stride_rank
        total += tl.load(where, mask=mask).to(tl.float32)
    tl.store(out + token * stride_out + columns, total.to(out.dtype.element_ty), mask=mask)


def sum_of_ranks(out: torch.Tensor, parts: torch.Tensor) -> None:
    """Sums the rows of all ranks, `parts` [R, M, H], in fp32, in rank order: one launch.

    Overwrites `out` [T, H], whose rows are contiguous as the parts are; rows of these from T on are not read.
    """
    num_tokens, hidden_size = out.shape
    assert out.stride(1) == 1 and parts.is_contiguous()
    if num_tokens == 0:
        return
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch_again(
        _sum_of_ranks_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(out, parts),
        *(hidden_size, out.stride(0), parts.stride(0)),
        NUM_RANKS=parts.shape[0],
        BLOCK=block,
    )

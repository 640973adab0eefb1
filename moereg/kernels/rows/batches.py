"""Lays tokens out by expert, [E, T, H], and sums what comes back, in Triton: two launches and one, for any T.

Routes need no sort here: each expert's program scans all of them and counts the tokens that name it, which gives these
their places. Sizes: T tokens, K choices per token, E local experts, H hidden.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.device import can_overlap
from moereg.kernels.launch.overlap import overlapping, release_next
from moereg.kernels.launch.remembered import launch_again, launch_remembered
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.direct import load_local_expert
from moereg.kernels.rows.reduce import copy_rows_kernel, reduce_sorted_rows_kernel

# Ids that a program reads at a time, 16 a thread, and columns of a row that a program copies or sums.
_IDS: Final = 2048
_COLUMNS: Final = 1024


class Batches(NamedTuple):
    """Tokens by expert."""

    rows: torch.Tensor  # [E, T, H], each expert's rows first, in token order; the others are undefined
    counts: torch.Tensor  # [E] int32, valid rows of each expert
    # [T, K] int32, row of a route in [E * T, H], -1 where it adds nothing. Routes of one token to one expert share a
    # row
    row_of_route: torch.Tensor


@triton.jit(do_not_specialize=["num_tokens"])
def _place_tokens_kernel(
    counts,
    row_of_route,
    topk_ids,
    expert_map,
    num_tokens,
    num_experts,
    num_local_experts,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    # The first program handles routes that add nothing, as expert -1; each of the others handles one expert.
    own = tl.program_id(0) - 1
    choices = tl.arange(0, CHOICES)[None, :]  # [1, CHOICES]
    count = 0
    for start in range(0, num_tokens, TOKENS):
        tokens = start + tl.arange(0, TOKENS)[:, None]  # [TOKENS, 1]
        inside = (tokens < num_tokens) & (choices < TOP_K)
        routes = tl.where(inside, tokens * TOP_K + choices, num_tokens * TOP_K)  # [TOKENS, CHOICES]
        expert = load_local_expert(topk_ids, expert_map, routes, num_tokens * TOP_K, num_experts, num_local_experts)
        here = inside & (expert == own)
        # Once per token, however often it names the expert.
        named = tl.max(here.to(tl.int32), 1)  # [TOKENS]
        place = count + tl.cumsum(named, 0) - named
        row = tl.where(own >= 0, own * num_tokens + place, -1)
        tl.store(row_of_route + routes, tl.broadcast_to(row[:, None], [TOKENS, CHOICES]), mask=here)
        count += tl.sum(named, 0)
    tl.store(counts + own, count, mask=own >= 0)


def lay_out_batches(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_local_experts: int,
    topk_weights: torch.Tensor | None = None,
) -> Batches:
    """Copies tokens to the rows of their experts; no host synchronization.

    Args:
        hidden_states: [T, H], any float dtype.
        topk_ids: [T, K] int32: ids that are not in the map, or without a map outside [0, E), add nothing.
        expert_map: [num_experts] int32 to local experts, where values outside [0, E) mean not local; several ids may
            map to one expert. None: identity.
        topk_weights: [T, K] fp32 that scale the rows, K = 1; None if they scale results instead.

    Returns:
        New tensors; `row_of_route` counts rows in int32, so E * T must be below 2**31.
    """
    (num_tokens, hidden_size), top_k = hidden_states.shape, topk_ids.shape[1]
    assert num_tokens * max(num_local_experts, top_k) < 2**31
    assert topk_weights is None or top_k == 1
    hidden_states = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    topk_ids = topk_ids.contiguous()
    topk_weights = None if topk_weights is None else topk_weights.contiguous()
    batches = Batches(
        hidden_states.new_empty(num_local_experts, num_tokens, hidden_size),
        topk_ids.new_empty(num_local_experts),
        torch.empty_like(topk_ids),
    )
    if num_tokens == 0:
        batches.counts.zero_()
        return batches
    overlap = can_overlap(hidden_states.device)
    choices, block = triton.next_power_of_2(top_k), min(_COLUMNS, triton.next_power_of_2(hidden_size))

    def launches() -> None:
        launch(
            _place_tokens_kernel,
            (1 + num_local_experts,),
            *(batches.counts, batches.row_of_route, topk_ids, expert_map),
            *(num_tokens, num_local_experts if expert_map is None else expert_map.shape[0], num_local_experts),
            TOP_K=top_k,
            CHOICES=choices,
            TOKENS=max(1, _IDS // choices),
            OVERLAP=overlap,
        )
        launch(
            copy_rows_kernel,
            (num_tokens, triton.cdiv(hidden_size, block)),
            *(batches.rows, hidden_states, batches.row_of_route, topk_weights),
            *(hidden_size, None, hidden_states.stride(0)),
            TOP_K=top_k,
            BLOCK=block,
            **overlapping(overlap),
        )

    given = (*batches, hidden_states, topk_ids, expert_map, topk_weights)
    launch_remembered("lay_out_batches", launches, given)
    return batches


def sum_batches(
    out: torch.Tensor, expert_out: torch.Tensor, row_of_route: torch.Tensor, topk_weights: torch.Tensor | None
) -> None:
    """Writes the weighted sum of each token's rows, added in fp32 from choice 0 to K - 1, in one launch.

    Args:
        out: [T, H], rows contiguous: overwritten; zeros where no route has a row.
        expert_out: [E, max_T, H] of any float dtype; only rows of routes are read.
        row_of_route: [T, K] of any integer dtype: as in `Batches`.
        topk_weights: [T, K] fp32, or None for no weight.
    """
    (num_tokens, hidden_size), top_k = out.shape, row_of_route.shape[1]
    assert out.stride(1) == 1
    if num_tokens == 0:
        return
    expert_out, row_of_route = expert_out.contiguous(), row_of_route.contiguous()
    topk_weights = None if topk_weights is None else topk_weights.contiguous()
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch_again(
        reduce_sorted_rows_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(out, expert_out, row_of_route, topk_weights),
        *(hidden_size, expert_out.stride(1), out.stride(0)),
        TOP_K=top_k,
        BLOCK=block,
        EARLY=0,
        OVERLAP=False,
    )

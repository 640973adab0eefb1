"""Sends tokens to the ranks of their experts, in Triton, in two launches, and unpacks them there in one.

A row that travels holds the ids of a token's routes to that rank, -1 for the others, then the place of the first of
them among all routes that go there, then routing weights if they scale inputs, then the bytes of the token. With the
place, a rank lays out what arrived, one token per route or one token with all of its routes, without counting it
again. Sizes: T tokens, K choices per token, R ranks.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.remembered import launch_again, launch_remembered
from moereg.kernels.launch.replay import launch

# Ids that a rank's program reads at a time, where there are few or many, and words of a row that a program copies.
_FEW_IDS: Final = 512
_MANY_IDS: Final = 8192
_BLOCK_WORDS: Final = 1024


class PlacedRoutes(NamedTuple):
    """Destinations of a rank's tokens and routes."""

    # [R, 2] int64, tokens and routes to each rank; a token goes to a rank once. Token counts are stamped
    counts: torch.Tensor
    # [3, T, K] int32: each route's rank, -1 if its id is no expert; its token's place among those that go there, at the
    # first such route, else -1; its own place among the routes that go there, or -1
    parts: torch.Tensor


class RowWords(NamedTuple):
    """Layout of a row that travels, in words of `word` bytes, but for `head_row`."""

    word: int  # 1, 2 or 4
    row: int  # Words of the whole row
    head_row: int  # The same in words of 4 bytes, in which ids, place and weights are written
    starts: tuple[int, ...]  # First word of each of the token's columns
    widths: tuple[int, ...]  # Words of each column

    @property
    def block(self) -> int:
        """Words of the first column that a program copies."""
        return min(_BLOCK_WORDS, int(triton.next_power_of_2(self.widths[0])))

    def constants(self, num_ranks: int, top_k: int) -> dict[str, int]:
        """Constants of the kernels that write and read such rows, for K routes per token and R ranks."""
        return {
            "NUM_RANKS": num_ranks,
            "RANKS": triton.next_power_of_2(num_ranks),
            "TOP_K": top_k,
            "CHOICES": triton.next_power_of_2(top_k),
            "ROW": self.row,
            "HEAD_ROW": self.head_row,
            "START": self.starts[0],
            "WIDTH": self.widths[0],
            "SECOND_START": self.starts[-1],
            "SECOND_WIDTH": self.widths[-1],
            "SECOND_BLOCK": 1 if len(self.widths) == 1 else triton.next_power_of_2(self.widths[-1]),
            "BLOCK": self.block,
        }


# Mask of the number of tokens in a stamped count.
_TOKEN_BITS: Final[tl.constexpr] = tl.constexpr(2**31 - 1)

_WORD_DTYPES: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize=["num_tokens", "home_rank"])
def _place_routes_kernel(
    counts,
    parts,
    topk_ids,
    num_holders,
    holders,
    stamp,
    num_tokens,
    home_rank,
    num_experts,
    num_ranks,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    # The first program handles routes to no rank, as rank -1; each of the others handles one rank.
    own = tl.program_id(0) - 1
    choices = tl.arange(0, CHOICES)[None, :]  # [1, CHOICES]
    num_rows = 0
    num_routes = 0
    for start in range(0, num_tokens, TOKENS):
        tokens = start + tl.arange(0, TOKENS)[:, None]  # [TOKENS, 1]
        inside = (tokens < num_tokens) & (choices < TOP_K)
        routes = tokens * TOP_K + choices  # [TOKENS, CHOICES]
        ids = tl.load(topk_ids + routes, mask=inside, other=-1)
        known = (ids >= 0) & (ids < num_experts)
        held = tl.load(num_holders + ids, mask=known, other=1)
        rank = tl.load(holders + ids * num_ranks + (tokens + home_rank) % held, mask=known, other=-1)
        here = inside & (rank == own)
        each = here.to(tl.int32)
        so_far = tl.cumsum(each, 1)  # [TOKENS, CHOICES]
        of_token = tl.sum(each, 1)  # [TOKENS]
        goes = (of_token > 0).to(tl.int32)
        row = num_rows + tl.cumsum(goes, 0) - goes
        first = num_routes + tl.cumsum(of_token, 0) - of_token
        goes_nowhere = own < 0
        row = tl.where((so_far == 1) & (goes_nowhere == 0), row[:, None], -1)  # [TOKENS, CHOICES]
        place = tl.where(goes_nowhere, -1, first[:, None] + so_far - each)
        tl.store(parts + routes, rank, mask=here)
        tl.store(parts + num_tokens * TOP_K + routes, row, mask=here)
        tl.store(parts + 2 * num_tokens * TOP_K + routes, place, mask=here)
        num_rows += tl.sum(goes, 0)
        num_routes += tl.sum(of_token, 0)
    tl.store(counts + 2 * own, num_rows + tl.load(stamp), mask=own >= 0)
    tl.store(counts + 2 * own + 1, num_routes, mask=own >= 0)


def place_routes(
    topk_ids: torch.Tensor,
    num_holders: torch.Tensor,
    holders: torch.Tensor,
    home_rank: int,
    counts: torch.Tensor,
    stamp: torch.Tensor,
) -> PlacedRoutes:
    """Counts and places what goes to each rank: one launch, no host synchronization.

    Args:
        topk_ids: [T, K] int32.
        num_holders: [num_experts] int32, ranks that hold each expert.
        holders: [num_experts, R] int32, the ranks. Token t takes number (t + home_rank) % num_holders of them.
        counts: [R, 2] int64, contiguous: overwritten, and aliased by the result.
        stamp: [1] int64, added to the token counts: a multiple of 2**32.
    """
    (num_tokens, top_k), (num_experts, num_ranks) = topk_ids.shape, holders.shape
    assert 3 * num_tokens * top_k < 2**31
    topk_ids = topk_ids.contiguous()
    placed = PlacedRoutes(counts, topk_ids.new_empty((3, num_tokens, top_k)))
    if num_tokens == 0:
        counts.zero_()[:, :1] += stamp
        return placed
    choices = triton.next_power_of_2(top_k)
    ids = _FEW_IDS if num_tokens * choices <= _FEW_IDS else _MANY_IDS
    launch_again(
        _place_routes_kernel,
        (1 + num_ranks,),
        *(*placed, topk_ids, num_holders, holders, stamp),
        *(num_tokens, home_rank, num_experts, num_ranks),
        TOP_K=top_k,
        CHOICES=choices,
        TOKENS=max(1, ids // choices),
        num_warps=4 if ids == _FEW_IDS else 8,
    )
    return placed


@triton.jit
def _before(counts, rank, NUM_RANKS: tl.constexpr, RANKS: tl.constexpr):
    """Sums every second count over the ranks before each of `rank` [N, 1]: [N, 1]."""
    ranks = tl.arange(0, RANKS)[None, :]  # [1, RANKS]
    values = tl.load(counts + 2 * ranks + 0 * rank, mask=(ranks < rank) & (ranks < NUM_RANKS), other=0)
    return tl.sum(values & _TOKEN_BITS, 1)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def _pack_tokens_kernel(
    sent,
    sent_head,
    home_row,
    counts,
    parts,
    topk_ids,
    topk_weights,
    first_column,
    second_column,
    num_tokens,
    stride_first,
    stride_second,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_ROW: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SECOND_START: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program copies a token, not a row, so that each token is read once.
    token = tl.program_id(0).to(tl.int64)
    choices = tl.arange(0, CHOICES)[:, None]  # [CHOICES, 1]
    exists = choices < TOP_K
    routes = token * TOP_K + choices
    num_routes = num_tokens * TOP_K
    rank = tl.load(parts + routes, mask=exists, other=-1)
    row = tl.load(parts + num_routes + routes, mask=exists, other=-1)
    leads = row >= 0
    row = _before(counts, rank, NUM_RANKS, RANKS) + row  # [CHOICES, 1] int64
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = columns < WIDTH
    values = tl.load(first_column + token * stride_first + columns, mask=inside)
    values = tl.broadcast_to(values, [CHOICES, BLOCK])
    tl.store(sent + row * ROW + START + columns, values, mask=leads & inside)
    if tl.program_id(1) == 0:
        place = tl.load(parts + 2 * num_routes + routes, mask=exists, other=-1)
        if BY_TOKEN:
            home = tl.where(leads, row, -1)
        else:
            home = tl.where(rank >= 0, _before(counts + 1, rank, NUM_RANKS, RANKS) + place, -1)
        tl.store(home_row + routes, home.to(tl.int32), mask=exists)
        head = sent_head + row * HEAD_ROW
        others = tl.arange(0, CHOICES)[None, :]  # [1, CHOICES]
        known = others < TOP_K
        ids = tl.load(topk_ids + token * TOP_K + others, mask=known, other=-1)
        ranks = tl.load(parts + token * TOP_K + others, mask=known, other=-1)
        tl.store(head + others, tl.where(ranks == rank, ids, -1), mask=leads & known)
        tl.store(head + TOP_K, place, mask=leads)
        if topk_weights is not None:
            weights = tl.load(topk_weights + token * TOP_K + others, mask=known, other=0)
            weights = tl.broadcast_to(weights, [CHOICES, CHOICES])
            tl.store(head + TOP_K + 1 + others, weights, mask=leads & known)
        if second_column is not None:
            more = tl.arange(0, SECOND_BLOCK)[None, :]  # [1, SECOND_BLOCK]
            has_more = more < SECOND_WIDTH
            more_values = tl.load(second_column + token * stride_second + more, mask=has_more)
            more_values = tl.broadcast_to(more_values, [CHOICES, SECOND_BLOCK])
            tl.store(sent + row * ROW + SECOND_START + more, more_values, mask=leads & has_more)


def pack_tokens(
    placed: tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    columns: tuple[torch.Tensor, ...],
    words: RowWords,
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies tokens to the rows that travel: one launch, no host synchronization.

    Args:
        placed: `PlacedRoutes`, from `place_routes` or made elsewhere.
        topk_ids: [T, K] int32.
        topk_weights: [T, K] fp32 where they travel, else None.
        columns: One or two tensors [T, bytes] uint8, rows contiguous; if there are two, the second is narrow.
        words: The layout of a row.
        by_token: Whether one row per token comes back from each rank, instead of one per route.

    Returns:
        [T * min(K, R), bytes of a row] uint8, whose first rows travel, by rank and then by token; and [T, K] int32,
        each route's place among all that go anywhere, by rank and then by route; -1 where it goes nowhere. With
        `by_token`: the token's row among those that travel, at its first route to a rank; else -1.
    """
    (num_tokens, top_k), num_ranks = topk_ids.shape, placed[0].shape[0]
    dtype = _WORD_DTYPES[words.word]
    topk_ids = topk_ids.contiguous()
    sent = columns[0].new_empty((num_tokens * min(top_k, num_ranks), words.row * words.word))
    home_row = torch.empty_like(topk_ids)
    if num_tokens == 0:
        return sent, home_row
    weights = None if topk_weights is None else topk_weights.contiguous().view(torch.int32)
    # A caller's tokens may begin at an address that is no multiple of a word.
    columns = tuple(column if column.data_ptr() % words.word == 0 else column.clone() for column in columns)

    def launches() -> None:
        # Made only where a launch is recorded: views that a replay does not need cost the host as much as the replay.
        first, second = columns[0].view(dtype), columns[1].view(dtype) if len(columns) > 1 else None
        launch(
            _pack_tokens_kernel,
            (num_tokens, triton.cdiv(words.widths[0], words.block)),
            *(sent.view(dtype), sent.view(torch.int32), home_row, *placed, topk_ids, weights, first, second),
            *(num_tokens, first.stride(0), 0 if second is None else second.stride(0)),
            BY_TOKEN=by_token,
            **words.constants(num_ranks, top_k),
        )

    launch_remembered(
        "pack_tokens", launches, (sent, home_row, *placed, topk_ids, weights, *columns), (words, by_token)
    )
    return sent, home_row


@triton.jit(do_not_specialize=["num_rows"])
def _unpack_tokens_kernel(
    first_column,
    second_column,
    out_ids,
    out_weights,
    received,
    received_head,
    counts,
    num_rows,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_ROW: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SECOND_START: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANKS)  # [RANKS]
    tokens = tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0) & _TOKEN_BITS
    routes = tl.load(counts + 2 * ranks + 1, mask=ranks < NUM_RANKS, other=0)
    if row < tl.sum(tokens, 0):
        # Rows come by rank; all routes of earlier ranks precede this row's.
        first = tl.sum(tl.where(tl.cumsum(tokens, 0) <= row, routes, 0), 0)
        choices = tl.arange(0, CHOICES)[:, None]  # [CHOICES, 1]
        head = received_head + row * HEAD_ROW
        ids = tl.load(head + choices, mask=choices < TOP_K, other=-1)
        comes = ids >= 0
        # Not a scan: Triton 3.6 cannot compile one over a column of few rows.
        others = tl.arange(0, CHOICES)[None, :]  # [1, CHOICES]
        other_ids = tl.load(head + others, mask=others < TOP_K, other=-1)
        earlier = tl.sum(((other_ids >= 0) & (others < choices)).to(tl.int32), 1)[:, None]  # [CHOICES, 1]
        place = first + tl.load(head + TOP_K) + earlier  # [CHOICES, 1] int64
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
        inside = columns < WIDTH
        values = tl.broadcast_to(tl.load(received + row * ROW + START + columns, mask=inside), [CHOICES, BLOCK])
        tl.store(first_column + place * WIDTH + columns, values, mask=comes & inside)
        if tl.program_id(1) == 0:
            tl.store(out_ids + place, ids, mask=comes)
            if out_weights is not None:
                tl.store(out_weights + place, tl.load(head + TOP_K + 1 + choices, mask=comes, other=0), mask=comes)
            if second_column is not None:
                more = tl.arange(0, SECOND_BLOCK)[None, :]  # [1, SECOND_BLOCK]
                has_more = more < SECOND_WIDTH
                more_values = tl.load(received + row * ROW + SECOND_START + more, mask=has_more)
                more_values = tl.broadcast_to(more_values, [CHOICES, SECOND_BLOCK])
                tl.store(second_column + place * SECOND_WIDTH + more, more_values, mask=comes & has_more)
    if (row == tl.num_programs(0) - 1) & (tl.program_id(1) == 0):
        # Padding rows go to no expert.
        for start in range(tl.sum(routes, 0), num_rows, BLOCK):
            rows = start + tl.arange(0, BLOCK)
            tl.store(out_ids + rows, tl.full([BLOCK], -1, tl.int32), mask=rows < num_rows)


def unpack_tokens(
    received: torch.Tensor, counts: torch.Tensor, num_rows: int, top_k: int, has_weights: bool, words: RowWords
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]:
    """Makes one token of each route that arrived: one launch, no host synchronization.

    Args:
        received: [rows, bytes of a row] uint8, contiguous: what arrived, by rank, then undefined rows.
        counts: [R, 2] int64, tokens, stamped or not, and routes from each rank.
        num_rows: Rows of the result, at least as many as routes.
        has_weights: Whether weights travelled.
        words: The layout of a row.

    Returns:
        The columns, [num_rows, bytes] uint8 each; ids, [num_rows, 1] int32, -1 past the routes; weights, [num_rows, 1]
        fp32, if they travelled. Other rows past the routes are undefined.
    """
    ids = received.new_empty((num_rows, 1), dtype=torch.int32)
    weights = received.new_empty((num_rows, 1), dtype=torch.float32) if has_weights else None
    columns = _launch_unpacking(_unpack_tokens_kernel, received, counts, ids, weights, words, top_k, num_rows)
    return columns, ids, weights


def _launch_unpacking(
    kernel: Any,
    received: torch.Tensor,
    counts: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    words: RowWords,
    top_k: int,
    *num_rows: int,
) -> tuple[torch.Tensor, ...]:
    """Launches a kernel that fills ids, weights and columns, which it returns; `num_rows` if the kernel takes it."""
    columns = tuple(received.new_empty((len(ids), width * words.word)) for width in words.widths)
    dtype = _WORD_DTYPES[words.word]

    def launches() -> None:
        launch(
            kernel,
            (received.shape[0], triton.cdiv(words.widths[0], words.block)),
            *(columns[0].view(dtype), columns[1].view(dtype) if len(columns) > 1 else None, ids),
            *(None if weights is None else weights.view(torch.int32), received.view(dtype)),
            *(received.view(torch.int32), counts),
            *num_rows,
            **words.constants(counts.shape[0], top_k),
        )

    if len(ids):
        tensors = (received, counts, *columns, ids, weights)
        launch_remembered(kernel, launches, tensors, (words, top_k))
    return columns


@triton.jit
def _split_rows_kernel(
    first_column,
    second_column,
    out_ids,
    out_weights,
    received,
    received_head,
    counts,
    NUM_RANKS: tl.constexpr,
    RANKS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,
    ROW: tl.constexpr,
    HEAD_ROW: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    SECOND_START: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    SECOND_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ranks = tl.arange(0, RANKS)  # [RANKS]
    arrived = row < tl.sum(tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0) & _TOKEN_BITS, 0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = arrived & (columns < WIDTH)
    values = tl.load(received + row * ROW + START + columns, mask=inside)
    tl.store(first_column + row * WIDTH + columns, values, mask=inside)
    if tl.program_id(1) == 0:
        choices = tl.arange(0, CHOICES)  # [CHOICES]
        exists = choices < TOP_K
        head = received_head + row * HEAD_ROW + choices
        # Padding rows go to no expert.
        tl.store(out_ids + row * TOP_K + choices, tl.load(head, mask=exists & arrived, other=-1), mask=exists)
        weights = tl.load(head + TOP_K + 1, mask=exists & arrived, other=0)
        tl.store(out_weights + row * TOP_K + choices, weights, mask=exists)
        if second_column is not None:
            more = tl.arange(0, SECOND_BLOCK)  # [SECOND_BLOCK]
            has_more = arrived & (more < SECOND_WIDTH)
            more_values = tl.load(received + row * ROW + SECOND_START + more, mask=has_more)
            tl.store(second_column + row * SECOND_WIDTH + more, more_values, mask=has_more)


def split_rows(
    received: torch.Tensor, counts: torch.Tensor, top_k: int, words: RowWords
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Splits the rows of tokens that arrived with their weights: one launch, no host synchronization.

    Args:
        received: [rows, bytes of a row] uint8, contiguous: what arrived, by rank, then undefined rows.
        counts: [R, 2] int64, tokens, stamped or not, and routes from each rank.
        words: The layout of a row, which has weights.

    Returns:
        The columns, [rows, bytes] uint8 each, undefined past the tokens; ids, [rows, K] int32, -1 for routes to other
        ranks and past the tokens; weights, [rows, K] fp32.
    """
    num_rows = received.shape[0]
    ids = received.new_empty((num_rows, top_k), dtype=torch.int32)
    weights = received.new_empty((num_rows, top_k), dtype=torch.float32)
    columns = _launch_unpacking(_split_rows_kernel, received, counts, ids, weights, words, top_k)
    return columns, ids, weights

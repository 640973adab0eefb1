"""Unpacks tokens that arrived from other ranks from the rows in which they travelled, in Triton, in one launch.

Either one token per route that arrived, or one token with all of its routes. Sizes: K choices per token, R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.remembered import launch_remembered
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.exchanged import TOKEN_BITS, WORD_DTYPES, RowWords


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
    tokens = tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0) & TOKEN_BITS
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
        top_k: K.
        has_weights: Whether weights travelled.
        words: The layout of a row.

    Returns:
        The columns, [num_rows, bytes] uint8 each; ids, [num_rows, 1] int32, -1 past the routes; weights, [num_rows, 1]
        fp32, if they travelled. Other rows past the routes are undefined.
    """
    ids = received.new_empty((num_rows, 1), dtype=torch.int32)
    weights = received.new_empty((num_rows, 1), dtype=torch.float32) if has_weights else None
    columns = _launch(_unpack_tokens_kernel, received, counts, ids, weights, words, top_k, num_rows)
    return columns, ids, weights


def _launch(
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
    dtype = WORD_DTYPES[words.word]

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
    arrived = row < tl.sum(tl.load(counts + 2 * ranks, mask=ranks < NUM_RANKS, other=0) & TOKEN_BITS, 0)
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
        top_k: K.
        words: The layout of a row, which has weights.

    Returns:
        The columns, [rows, bytes] uint8 each, undefined past the tokens; ids, [rows, K] int32, -1 for routes to other
        ranks and past the tokens; weights, [rows, K] fp32.
    """
    num_rows = received.shape[0]
    ids = received.new_empty((num_rows, top_k), dtype=torch.int32)
    weights = received.new_empty((num_rows, top_k), dtype=torch.float32)
    columns = _launch(_split_rows_kernel, received, counts, ids, weights, words, top_k)
    return columns, ids, weights

"""Rows that travel between ranks: their layout, and writing and reading them in torch.

`moereg.kernels.rows.all_to_all` does the same in Triton, bit for bit. Sizes: T tokens, K choices per token, R ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from moereg.prepare_finalize.expert_placement import PlacementTables, token_turns
from moereg.prepare_finalize.wire import as_bytes
from moereg.weights.layouts import ALIGNMENT, round_up

if TYPE_CHECKING:
    from moereg.kernels.rows.all_to_all import RowWords

STAMP: Final = 2**32
"""Factor of the layer's number, which a rank adds to its token counts; these are smaller."""

_WORD: Final = 4
"""Bytes of an id, a place or a weight."""


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """Layout of a row that travels.

    It holds the ids of the token's routes to that rank, -1 for others; the place of the first of them among all routes
    that go there; routing weights if they scale inputs; the token's columns.

    Attributes:
        top_k: K.
        has_weights: Whether routing weights travel.
        widths: Bytes of each column.
    """

    top_k: int
    has_weights: bool
    widths: tuple[int, ...]

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Offset of each column, in bytes."""
        starts, end = [], _WORD * (self.top_k + 1 + self.has_weights * self.top_k)
        for width in self.widths:
            starts.append(round_up(end, ALIGNMENT))
            end = starts[-1] + width
        return tuple(starts)

    @functools.cached_property
    def row_bytes(self) -> int:
        """Size of the whole row."""
        return round_up(self.starts[-1] + self.widths[-1], ALIGNMENT)

    @functools.cached_property
    def words(self) -> RowWords:
        """The layout for kernels, in the widest words that all columns are multiples of."""
        from moereg.kernels.rows.all_to_all import RowWords  # Loads Triton, which may not be there.

        word = math.gcd(_WORD, *self.widths)
        starts, widths = (tuple(each // word for each in values) for values in (self.starts, self.widths))
        return RowWords(word, self.row_bytes // word, self.row_bytes // _WORD, starts, widths)


row_layout: Final = functools.cache(RowLayout)
"""`RowLayout`, made once for all calls of equal layers."""


class Placed(NamedTuple):
    """As `PlacedRoutes` of the kernels: [R,2] tokens and routes to each rank; [3,T,K] rank, row and place of routes."""

    counts: torch.Tensor
    parts: torch.Tensor


def place_routes(topk_ids: torch.Tensor, tables: PlacementTables) -> Placed:
    """Counts and places what goes to each rank."""
    (num_tokens, top_k), size = topk_ids.shape, tables.placement.num_ranks
    rank = tables.ranks_of(topk_ids, token_turns(num_tokens, tables.rank, topk_ids.device))
    goes = (rank.unsqueeze(2) == torch.arange(size, device=rank.device)).to(torch.int32)  # [T,K,R]
    of_token = goes.amax(1) if num_tokens else goes.sum(1)  # [T,R]
    known, at = rank >= 0, rank.clamp(min=0).long()
    so_far = goes.flatten(0, 1).cumsum(0).view(num_tokens, top_k, size)  # [T,K,R], each route counts itself
    place = so_far.gather(2, at.unsqueeze(2)).squeeze(2) - 1
    within = goes.cumsum(1).gather(2, at.unsqueeze(2)).squeeze(2)
    row = (of_token.cumsum(0) - of_token).gather(1, at)
    parts = rank, torch.where(known & (within == 1), row, -1), torch.where(known, place, -1)
    return Placed(
        torch.stack([of_token.sum(0), goes.sum((0, 1))], dim=1), torch.stack([part.to(torch.int32) for part in parts])
    )


def pack_tokens(
    placed: tuple[torch.Tensor, torch.Tensor],
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    columns: tuple[torch.Tensor, ...],
    layout: RowLayout,
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies tokens to the rows that travel; waits for the device.

    Args:
        placed, topk_ids: The routes: `Placed`, from `place_routes` or made elsewhere, and [T,K] int32.
        topk_weights: [T,K] fp32 if they travel.
        columns: [T,bytes] uint8 each.
        layout: The layout of a row.
        by_token: Whether one row per token comes back from each rank, instead of one per route.

    Returns:
        [rows, bytes of a row] uint8, by rank and then by token; and [T,K] int32, each route's place among all that go
        anywhere, by rank and then by route; -1 where it goes nowhere. With `by_token`: the token's row among those that
        travel, at its first route to a rank; else -1.
    """
    counts, (rank, row, place) = placed
    before = counts.cumsum(0) - counts  # [R,2]
    at = rank.clamp(min=0).long()
    within = row if by_token else place
    home_row = torch.where(within >= 0, before[at, 0 if by_token else 1] + within, -1).to(torch.int32)
    token, choice = (row >= 0).nonzero(as_tuple=True)
    order = (before[at[token, choice], 0] + row[token, choice]).argsort()
    token, choice = token[order], choice[order]
    goes_here = rank[token] == rank[token, choice].unsqueeze(1)
    head = [torch.where(goes_here, topk_ids[token], -1), place[token, choice].unsqueeze(1)]
    if topk_weights is not None:
        head.append(topk_weights[token].view(torch.int32))
    joined = as_bytes(torch.cat(head, dim=1))
    sent = joined.new_zeros((len(token), layout.row_bytes))
    sent[:, : joined.shape[1]] = joined
    for start, width, column in zip(layout.starts, layout.widths, columns, strict=True):
        sent[:, start : start + width] = column[token]
    return sent, home_row


def split_rows(
    received: torch.Tensor, layout: RowLayout
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]:
    """Splits rows [rows, bytes of a row] uint8 of tokens that arrived.

    Returns:
        Columns, [rows,bytes] uint8 each; ids, [rows,K] int32, -1 for routes to other ranks; weights, [rows,K] fp32, if
        they travelled.
    """
    top_k = layout.top_k
    head = received[:, : layout.starts[0]].contiguous().view(torch.int32)
    spans = zip(layout.starts, layout.widths, strict=True)
    columns = tuple(received[:, start : start + width].contiguous() for start, width in spans)
    weights = head[:, top_k + 1 : 2 * top_k + 1].contiguous().view(torch.float32) if layout.has_weights else None
    return columns, head[:, :top_k].contiguous(), weights


def unpack_tokens(
    received: torch.Tensor, layout: RowLayout
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]:
    """As `split_rows`, with one row for each route that arrived and K of 1; waits for the device."""
    top_k = layout.top_k
    head = received[:, : layout.starts[0]].contiguous().view(torch.int32)
    ids = head[:, :top_k]
    token, choice = (ids >= 0).nonzero(as_tuple=True)
    spans = zip(layout.starts, layout.widths, strict=True)
    columns = tuple(received[:, start : start + width][token] for start, width in spans)
    weights = head[:, top_k + 1 :][token, choice].view(torch.float32).unsqueeze(1) if layout.has_weights else None
    return columns, ids[token, choice].unsqueeze(1), weights


def first_rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first rows; the tensor itself if it has no others, since a view costs the host 3 us."""
    return tensor if len(tensor) == count else tensor[:count]


def rounded_rows(count: int, most: int | None) -> int:
    """Rounds a number of rows up to one of a few values, so that calls find recorded launches.

    At most an eighth more, and at most `most` unless `count` exceeds it: tokens may name an expert twice.
    """
    step = 1 << max(0, count.bit_length() - 4)
    rows = -(-count // step) * step
    return rows if most is None else max(count, min(rows, most))

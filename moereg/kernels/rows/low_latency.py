"""Rooms: fixed receive slots for the rows of each expert of each rank, in Triton; only filled rows are moved.

Sizes: T tokens, K choices per token, R ranks, M rooms a rank, C rows a room, E local experts (E <= M), H hidden. A
rank's rooms are contiguous; ranks may be any number of elements apart, since other things travel with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.device import can_overlap
from moereg.kernels.launch.overlap import overlapping, release_next, wait_for_previous
from moereg.kernels.launch.remembered import launch_again
from moereg.kernels.rows.replicas import Holders, rank_of_routes

# Ids that a program reads at a time, 16 a thread, and columns of a row that a program copies.
_IDS: Final = 2048
_COLUMNS: Final = 1024

# Programs that move rows between rooms and experts; each loops over rows of one expert.
_PROGRAMS: Final = 4096


@triton.jit(do_not_specialize=["num_routes", "first_turn"])
def _place_routes_kernel(
    counts,
    row_of_route,
    topk_ids,
    num_holders,
    holders,
    expert_maps,
    num_routes,
    first_turn,
    num_experts,
    num_ranks,
    rooms_per_rank,
    room,
    stride_counts,
    TOP_K: tl.constexpr,
    IDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    release_next(OVERLAP)
    # The first program handles routes that go nowhere, as room -1; each of the others handles one room.
    own = tl.program_id(0) - 1
    count = 0
    for start in range(0, num_routes, IDS):
        routes = start + tl.arange(0, IDS)  # [IDS]
        inside = routes < num_routes
        ids = tl.load(topk_ids + routes, mask=inside, other=-1)
        turns = first_turn + routes // TOP_K
        rank, experts = rank_of_routes(ids, turns, num_holders, holders, num_experts, num_ranks)
        local = tl.load(expert_maps + rank * num_experts + experts, mask=rank >= 0, other=0)
        here = inside & (tl.where(rank >= 0, rank * rooms_per_rank + local, -1) == own)
        place = count + tl.cumsum(here.to(tl.int32), 0) - here.to(tl.int32)
        # A token that names an expert twice, against the rules, may find the room full.
        row = tl.where((own >= 0) & (place < room), own * room + place, -1)
        tl.store(row_of_route + routes, row, mask=here)
        count += tl.sum(here.to(tl.int32), 0)
    where = counts + (own // rooms_per_rank).to(tl.int64) * stride_counts + own % rooms_per_rank
    tl.store(where, tl.minimum(count, room), mask=own >= 0)


def place_routes(
    counts: torch.Tensor, row_of_route: torch.Tensor, topk_ids: torch.Tensor, holders: Holders, room: int
) -> None:
    """Gives every route a row in the room of its expert, in order of routes: one launch.

    Args:
        counts: [R, M] int32 of any stride between ranks: overwritten with the filled rows of each room.
        row_of_route: [T, K] int32, contiguous: overwritten with rows of [R * M * C], -1 where a route has none.
        topk_ids: [T, K] int32, contiguous.
        holders: Assigns routes to ranks.
    """
    num_ranks, rooms_per_rank = counts.shape
    assert counts.stride(1) == 1 and row_of_route.is_contiguous() and topk_ids.is_contiguous()
    overlap = can_overlap(topk_ids.device)
    launch_again(
        _place_routes_kernel,
        (1 + num_ranks * rooms_per_rank,),
        *(counts, row_of_route, topk_ids, holders.num_holders, holders.holders, holders.expert_maps),
        *(topk_ids.numel(), holders.first_turn, holders.expert_maps.shape[1], num_ranks, rooms_per_rank, room),
        counts.stride(0),
        TOP_K=topk_ids.shape[1],
        IDS=min(_IDS, max(16, triton.next_power_of_2(topk_ids.numel()))),
        OVERLAP=overlap,
    )


@triton.jit
def _spread_tokens_kernel(
    rooms,
    room_weights,
    hidden_states,
    topk_weights,
    row_of_route,
    hidden_size,
    rows_per_rank,
    stride_rooms,
    stride_weights,
    stride_hidden,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # A program copies a token, not a row, so that each token is read once; tokens are older than their rows' places.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = columns < hidden_size
    x = tl.load(hidden_states + token * stride_hidden + columns, mask=mask)
    wait_for_previous(OVERLAP)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_of_route + token * TOP_K + k)
        rank, within = (row // rows_per_rank).to(tl.int64), (row % rows_per_rank).to(tl.int64)
        tl.store(rooms + rank * stride_rooms + within * hidden_size + columns, x, mask=mask & (row >= 0))
        if room_weights is not None:
            first = (row >= 0) & (tl.program_id(1) == 0)
            weight = tl.load(topk_weights + token * TOP_K + k, mask=first, other=0.0)
            tl.store(room_weights + rank * stride_weights + within, weight, mask=first)


def spread_tokens(
    rooms: torch.Tensor,
    hidden_states: torch.Tensor,
    row_of_route: torch.Tensor,
    room_weights: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> None:
    """Copies each token to the rows of its routes, right after `place_routes`: one launch.

    Args:
        rooms: [R, M * C, H], rows of a rank contiguous: only rows of routes are written.
        hidden_states: [T, H] of the same dtype.
        row_of_route: As `place_routes` wrote it.
        room_weights: [R, M * C] fp32, a rank's contiguous, for the weight of each route; or None.
        topk_weights: [T, K] fp32 where there are any to write.
    """
    (num_tokens, hidden_size), top_k = hidden_states.shape, row_of_route.shape[1]
    assert rooms.dtype == hidden_states.dtype and rooms.stride()[1:] == (hidden_size, 1)
    assert (room_weights is None) == (topk_weights is None)
    if num_tokens == 0:
        return
    # A copy would come between this launch, which starts early, and the one that it overlaps.
    assert hidden_states.stride(1) == 1
    topk_weights = None if topk_weights is None else topk_weights.contiguous()
    overlap, block = can_overlap(rooms.device), min(_COLUMNS, triton.next_power_of_2(hidden_size))
    launch_again(
        _spread_tokens_kernel,
        (num_tokens, triton.cdiv(hidden_size, block)),
        *(rooms, room_weights, hidden_states, topk_weights, row_of_route),
        *(hidden_size, rooms.shape[1], rooms.stride(0), 0 if room_weights is None else room_weights.stride(0)),
        hidden_states.stride(0),
        TOP_K=top_k,
        BLOCK=block,
        **overlapping(overlap),
    )


@triton.jit
def _place_in_room(end, here, ranks, row):
    """Source rank and slot of each received row."""
    source = tl.sum((end <= row).to(tl.int32), 0)
    return source.to(tl.int64), row - tl.sum(tl.where(ranks == source, end - here, 0), 0)


@triton.jit
def _empty_rooms_kernel(
    rows,
    num_rows,
    arrived_counts,
    rooms,
    scales,
    room_weights,
    counts,
    hidden_size,
    num_groups,
    room,
    max_rows,
    num_ranks,
    stride_rooms,
    stride_scales,
    stride_weights,
    stride_counts,
    GROUP: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert, columns = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden_size
    ranks = tl.arange(0, RANKS)
    here = tl.load(counts + ranks.to(tl.int64) * stride_counts + expert, mask=ranks < num_ranks, other=0)  # [RANKS]
    end, total = tl.cumsum(here, 0), tl.sum(here, 0)
    if tl.program_id(1) == 0:
        if tl.program_id(2) == 0:
            tl.store(num_rows + expert, total)
            tl.store(arrived_counts + ranks * tl.num_programs(0) + expert, here, mask=ranks < num_ranks)
    for row in range(tl.program_id(1), total, tl.num_programs(1)):
        source, within = _place_in_room(end, here, ranks, row)
        place = expert * room + within
        values = tl.load(rooms + source * stride_rooms + place * hidden_size + columns, mask=mask)
        if scales is not None:
            groups = place * num_groups + (columns // GROUP if GROUP else columns * 0)
            scale = tl.load(scales + source * stride_scales + groups, mask=mask, other=0)
            values = restored(values, scale).to(rows.dtype.element_ty)
        if room_weights is not None:
            weight = tl.load(room_weights + source * stride_weights + place)
            values = (values.to(tl.float32) * weight).to(rows.dtype.element_ty)
        tl.store(rows + (expert * max_rows + row) * hidden_size + columns, values, mask=mask)


@triton.jit
def restored(codes, scale):
    """Dequantizes codes to fp32; scales are fp32, or exponents in uint8."""
    if scale.dtype == tl.uint8:
        exponent = scale.to(tl.int32)
        # 2^-127 is subnormal, and 255 is NaN.
        bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        scale = bits.to(tl.float32, bitcast=True)
    return codes.to(tl.float32) * scale


@dataclass(frozen=True, slots=True, eq=False)
class FilledRooms:
    """Rooms of this rank's experts, as they arrived."""

    rows: torch.Tensor  # [R, M * C, H] numbers or codes, rows of a rank contiguous
    counts: torch.Tensor  # [R, M] int32, a rank's contiguous: filled rows of each room
    scales: torch.Tensor | None  # [R, M * C, G] fp32, or uint8 exponents, a rank's contiguous, of codes; else None
    group: int  # columns that share a scale; 0: all
    weights: torch.Tensor | None  # [R, M * C] fp32, a rank's contiguous, that rows are multiplied by; or None
    room: int  # C


def empty_rooms(rows: torch.Tensor, num_rows: torch.Tensor, arrived_counts: torch.Tensor, rooms: FilledRooms) -> None:
    """Moves filled rows to their experts, in rank order, and dequantizes codes: one launch.

    Args:
        rows: [E, R * C, H], contiguous: overwritten as far as rooms are filled; rounded to its dtype.
        num_rows: [E] int32: overwritten with the rows of each expert.
        arrived_counts: [R, E] int32, contiguous: overwritten with the counts of the rooms, for `fill_rooms`.
        rooms: What arrived.
    """
    num_experts, max_rows, hidden_size = rows.shape
    num_ranks = rooms.counts.shape[0]
    assert rows.is_contiguous() and max_rows == num_ranks * rooms.room and rooms.rows.stride()[1:] == (hidden_size, 1)
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    blocks = triton.cdiv(hidden_size, block)
    launch_again(
        _empty_rooms_kernel,
        (num_experts, _programs(num_experts * blocks, max_rows), blocks),
        *(rows, num_rows, arrived_counts, rooms.rows, rooms.scales, rooms.weights, rooms.counts),
        *(hidden_size, 0 if rooms.scales is None else rooms.scales.shape[2], rooms.room, max_rows, num_ranks),
        *(rooms.rows.stride(0), 0 if rooms.scales is None else rooms.scales.stride(0)),
        *(0 if rooms.weights is None else rooms.weights.stride(0), rooms.counts.stride(0)),
        GROUP=rooms.group,
        RANKS=triton.next_power_of_2(num_ranks),
        BLOCK=block,
    )


@triton.jit
def _fill_rooms_kernel(
    rooms,
    rows,
    arrived_counts,
    hidden_size,
    rows_per_rank,
    room,
    max_rows,
    num_ranks,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert, columns = tl.program_id(0).to(tl.int64), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < hidden_size
    ranks = tl.arange(0, RANKS)
    here = tl.load(arrived_counts + ranks * tl.num_programs(0) + expert, mask=ranks < num_ranks, other=0)  # [RANKS]
    end, total = tl.cumsum(here, 0), tl.sum(here, 0)
    for row in range(tl.program_id(1), total, tl.num_programs(1)):
        source, within = _place_in_room(end, here, ranks, row)
        values = tl.load(rows + (expert * max_rows + row) * hidden_size + columns, mask=mask)
        place = source * rows_per_rank + expert * room + within
        tl.store(rooms + place * hidden_size + columns, values, mask=mask)


def fill_rooms(rooms: torch.Tensor, rows: torch.Tensor, arrived_counts: torch.Tensor) -> None:
    """Moves results [E, R * C, H] back as `empty_rooms`, which wrote `arrived_counts`, moved rows: one launch.

    Writes only the filled rows of `rooms` [R, M * C, H], contiguous and of the same dtype as `rows`.
    """
    num_experts, max_rows, hidden_size = rows.shape
    num_ranks, rows_per_rank = rooms.shape[:2]
    assert rows.is_contiguous() and rooms.is_contiguous() and rows.dtype == rooms.dtype
    block = min(_COLUMNS, triton.next_power_of_2(hidden_size))
    blocks = triton.cdiv(hidden_size, block)
    launch_again(
        _fill_rooms_kernel,
        (num_experts, _programs(num_experts * blocks, max_rows), blocks),
        *(rooms, rows, arrived_counts),
        *(hidden_size, rows_per_rank, max_rows // num_ranks, max_rows, num_ranks),
        RANKS=triton.next_power_of_2(num_ranks),
        BLOCK=block,
    )


def _programs(parts: int, max_rows: int) -> int:
    """Programs that share the rows of an expert; the rest of the grid has `parts` programs."""
    return max(1, min(max_rows, _PROGRAMS // parts))

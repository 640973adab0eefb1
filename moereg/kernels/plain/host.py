"""MoE experts for a CPU in plain torch: routes sorted by expert, one chunk of tokens at a time.

The routing is read on the host, as a CPU can: only active experts are touched, each once per chunk of tokens.

T tokens, H hidden size, I intermediate size, E local experts, K top-k, N = T*K routes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from moereg.kernels.plain.mlp import PIECE_ROWS, ExpertMlp, PlainMlp
from moereg.kernels.plain.threads import run_tasks

Part: TypeAlias = tuple[int, int, int]
"""Expert, first row, rows."""
RunPart: TypeAlias = Callable[[int, int, int], None]

# A chunk's weighted rows [N,H] are the one large temporary; smaller chunks would stream the weights more often.
HOST_CHUNK_BYTES: Final = 128 << 20
# Bounds input, both halves of the intermediate and output of one matmul pair, which each thread may have.
BLOCK_BYTES: Final = 48 << 20
MAX_BLOCK_ROWS: Final = 1024
# One gather for all experts saves a call for each; a larger one is evicted from the cache before it is read.
GATHER_ONCE_BYTES: Final = 4 << 20
# Up to this many routes a call, plain Python sorts faster than numpy.
FEW_ROUTES: Final = 128
# oneDNN's kernels stream weights slower for 1 and 2 rows than for 4 (1536x2048 bf16: 20 against 26 GB/s).
MIN_ROWS: Final = 4
# Up to this many elements, a batched product sums a call's rows in fewer steps than an embedding bag.
FEW_SUMMED: Final = 1 << 17


def rows_dtype(dtype: torch.dtype) -> torch.dtype:
    """A layer's dtype to that of routes' results, not yet weighted: float16 lacks the range, the others have fp32's."""
    return torch.float32 if dtype == torch.float16 else dtype


def host_chunk_tokens(num_tokens: int, top_k: int, hidden_size: int, itemsize: int) -> int:
    """Tokens that `host_experts` takes at a time, so that their N rows of output stay within `HOST_CHUNK_BYTES`.

    Monotone in `num_tokens` and at least 1.
    """
    return max(1, min(num_tokens, HOST_CHUNK_BYTES // (top_k * hidden_size * itemsize)))


def routed_rows(num_tokens: int, top_k: int, hidden_size: int, itemsize: int) -> int:
    """Rows of H elements that `host_experts` needs as workspace: a chunk's routes and one row of zeros."""
    return host_chunk_tokens(num_tokens, top_k, hidden_size, itemsize) * top_k + 1


def row_block(hidden_size: int, w13_rows: int, itemsize: int) -> int:
    """Most rows of one matmul: bounds its temporaries. A multiple of 32, at least 32."""
    rows = BLOCK_BYTES // ((2 * hidden_size + 2 * w13_rows) * itemsize)
    return max(32, min(MAX_BLOCK_ROWS, rows // 32 * 32))


def bucket_rows(rows: int, min_rows: int = MIN_ROWS) -> int:
    """The row count that one of oneDNN's matmuls of `rows` rows is run with: at least `min_rows`, at most 1/16 more.

    oneDNN builds a kernel for each distinct row count (1.4 ms on the machine of the benches) and keeps 1,024 of them
    for the whole process; with buckets a layer needs at most about 110 for each of its matmuls.
    """
    step = 1 << max(0, rows.bit_length() - 5)
    return max(min_rows, -(-rows // step) * step)


def fill_pieces(rows: int) -> int:
    """The row count of whole pieces, for an `mlp` that multiplies piece by piece."""
    return -(-rows // PIECE_ROWS) * PIECE_ROWS


@dataclasses.dataclass(frozen=True, eq=False)
class SortedRoutes:
    """Routes ordered by local expert, without those that have none."""

    num_rows: int  # Routes that remain
    segments: list[tuple[int, int, int]]  # (expert, first row, rows) of each active expert
    order: torch.Tensor  # [num_rows] int64, index into the flattened [T,K]
    positions: torch.Tensor  # [T,K] int64, row of each route, or `num_rows` where it is left out


def sort_on_host(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None) -> SortedRoutes:
    """Sorts routes by local expert, on the host.

    Args:
        topk_ids: [T,K] integers, CPU; global experts; out-of-range or unmapped ones are left out.
        expert_map: [num_experts] int32 or None; local expert or -1.
    """
    if topk_ids.numel() <= FEW_ROUTES:
        return _sort_few(topk_ids, num_local_experts, expert_map)
    # numpy: these arrays are small, and its calls cost a third of torch's.
    ids = topk_ids.numpy().ravel()
    if expert_map is None:
        known = (ids >= 0) & (ids < num_local_experts)
        local = np.where(known, ids, num_local_experts)
    else:
        table = expert_map.numpy()
        known = (ids >= 0) & (ids < len(table))
        local = table[np.where(known, ids, 0)]
        local = np.where(known & (local >= 0) & (local < num_local_experts), local, num_local_experts)
    # Stable sorts of 16-bit keys are radix sorts in numpy.
    keys = local.astype(np.uint16) if num_local_experts < 1 << 16 else local
    order = np.argsort(keys, kind="stable")
    counts = np.bincount(local, minlength=num_local_experts + 1)[:num_local_experts]
    ends = np.cumsum(counts)
    num_rows = int(ends[-1])
    positions = np.empty(len(ids), np.int64)
    positions[order] = np.arange(len(ids))
    np.minimum(positions, num_rows, out=positions)
    active = np.flatnonzero(counts)
    rows = counts[active]
    return SortedRoutes(
        num_rows=num_rows,
        segments=list(zip(active.tolist(), (ends[active] - rows).tolist(), rows.tolist(), strict=True)),
        order=torch.from_numpy(order[:num_rows]),
        positions=torch.from_numpy(positions).view(topk_ids.shape),
    )


def _local_experts(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> list[int]:
    """The local expert of each of a few routes; another number where it has none."""
    ids: list[int] = topk_ids.flatten().tolist()
    if expert_map is None:
        return ids
    table: list[int] = expert_map.tolist()
    return [table[expert] if 0 <= expert < len(table) else -1 for expert in ids]


def _sort_few(topk_ids: torch.Tensor, num_local_experts: int, expert_map: torch.Tensor | None) -> SortedRoutes:
    """As `sort_on_host`, without numpy's twenty calls, which take longer than sorting a few routes."""
    ids = _local_experts(topk_ids, expert_map)
    order = [route for route, expert in enumerate(ids) if 0 <= expert < num_local_experts]
    order.sort(key=ids.__getitem__)
    segments: list[tuple[int, int, int]] = []
    positions = [len(order)] * len(ids)
    for row, route in enumerate(order):
        positions[route] = row
        if segments and segments[-1][0] == ids[route]:
            segments[-1] = (ids[route], segments[-1][1], row + 1 - segments[-1][1])
        else:
            segments.append((ids[route], row, 1))
    return SortedRoutes(
        num_rows=len(order),
        segments=segments,
        order=torch.tensor(order, dtype=torch.int64, device="cpu"),
        positions=torch.tensor(positions, dtype=torch.int64, device="cpu").view(topk_ids.shape),
    )


def host_experts(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mlp: ExpertMlp,
    num_local_experts: int,
    w13_rows: int,
    workspace: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    scaled_dtype: torch.dtype | None = None,
    min_tasks: int = 2,
    min_rows: int = MIN_ROWS,
    invariant: bool = False,
) -> None:
    """Runs the experts of a CPU layer, chunk by chunk of tokens.

    Deterministic for a fixed number of threads.

    Args:
        out: [T,H]; overwritten; aliases no input.
        hidden_states: [T,H]; read only.
        topk_weights: [T,K] fp32; routing weights.
        topk_ids: [T,K] int32; global experts.
        mlp: The experts.
        w13_rows: 2I, or I where not gated.
        workspace: At least `routed_rows(...)` * H elements of `rows_dtype(out.dtype)`; contents undefined before and
            after.
        expert_map: [num_experts] int32 or None; local expert or -1.
        apply_router_weight_on_input: Scale an expert's input instead of its output; requires K = 1.
        scaled_dtype: Dtype of scaled inputs; None: that of hidden_states.
        min_tasks: As in `run_tasks`.
        min_rows: As in `bucket_rows`.
        invariant: Whether a token's row must have the same bits in any call, for a fixed number of threads. `mlp` must
            then multiply piece by piece, and `min_tasks` must be out of reach.
    """
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    scaled_dtype = scaled_dtype or hidden_states.dtype
    if num_tokens == 1 and not invariant:
        ids = _local_experts(topk_ids, expert_map)
        slots = [slot for slot, expert in enumerate(ids) if 0 <= expert < num_local_experts]
        weights = topk_weights.view(-1)
        if apply_router_weight_on_input:
            hidden_states, weights = (hidden_states * weights).to(scaled_dtype), torch.ones_like(weights)
        _one_token(out, hidden_states, weights, ids, slots, mlp, min_tasks)
        return
    chunk = host_chunk_tokens(num_tokens, top_k, hidden_size, workspace.element_size())
    block = row_block(hidden_size, w13_rows, out.element_size())
    fill = fill_pieces if invariant else functools.partial(bucket_rows, min_rows=min_rows)
    for first in range(0, num_tokens, chunk):
        tokens = slice(first, first + chunk)
        routes = sort_on_host(topk_ids[tokens], num_local_experts, expert_map)
        input_weights = topk_weights[tokens].reshape(-1) if apply_router_weight_on_input else None
        rows = workspace.view(-1)[: (routes.num_rows + 1) * hidden_size].view(-1, hidden_size)
        x = hidden_states[tokens]
        rows = _run_segments(rows, x, routes, top_k, mlp, block, input_weights, scaled_dtype, min_tasks, fill)
        weights = torch.ones_like(topk_weights[tokens]) if apply_router_weight_on_input else topk_weights[tokens]
        add_up = _sum_in_order if invariant else _weighted_sum
        add_up(out[tokens], rows, routes, weights)


def routed_inputs(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    num_local_experts: int,
    block: int,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the inputs that `host_experts` gives to each active expert, without neighboring rows that fill a bucket.

    Args:
        hidden_states, topk_weights, topk_ids, num_local_experts, expert_map, apply_router_weight_on_input: As there.
        block: Most rows at a time.

    Yields:
        The expert and [rows, H] in hidden_states' dtype.
    """
    top_k = topk_ids.shape[1]
    routes = sort_on_host(topk_ids, num_local_experts, expert_map)
    input_weights = topk_weights.reshape(-1)
    for expert, first, count in routes.segments:
        for order in routes.order[first : first + count].split(block):
            x = hidden_states.index_select(0, order // top_k)
            if apply_router_weight_on_input:
                x = (x * input_weights.index_select(0, order).unsqueeze(1)).to(hidden_states.dtype)
            yield expert, x


def batched_rows(
    hidden_states: torch.Tensor, expert_num_tokens: torch.Tensor, block: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each active expert and views [rows, H] of its valid rows, at most `block` at a time.

    As `routed_inputs`, for [E,max_T,H] in the batched format, with `expert_num_tokens` [E] int32 valid rows.
    """
    for expert, count in enumerate(expert_num_tokens.tolist()):
        for x in hidden_states[expert, :count].split(block):
            if len(x):
                yield expert, x


def _run_segments(
    rows: torch.Tensor,
    hidden_states: torch.Tensor,
    routes: SortedRoutes,
    top_k: int,
    mlp: ExpertMlp,
    block: int,
    input_weights: torch.Tensor | None,
    scaled_dtype: torch.dtype,
    min_tasks: int,
    fill: Callable[[int], int],
) -> torch.Tensor:
    """Returns each route's unweighted output; in rows [num_rows + 1, H], with zeros last, if a route is left out."""
    is_complete = routes.num_rows == routes.positions.numel()
    if not is_complete:
        rows[-1].zero_()
    if not routes.num_rows:
        return rows

    def gather(order: torch.Tensor) -> torch.Tensor:
        gathered = hidden_states.index_select(0, order if top_k == 1 else order // top_k)
        if input_weights is None:
            return gathered
        return (gathered * input_weights.index_select(0, order).unsqueeze(1)).to(scaled_dtype)

    if isinstance(mlp, PlainMlp) and mlp.shares(routes.segments, 2 * block):
        results = mlp.together(gather(routes.order), routes.segments)
        if is_complete:
            return results
        rows[:-1].copy_(results)
        return rows
    # Spare rows at the end, so that a bucket of rows can start at any expert's first row; their contents are unused.
    order = F.pad(routes.order, (0, max(MIN_ROWS, fill(1)) - 1))
    num_gathered = len(order)
    row_bytes = hidden_states.shape[1] * hidden_states.element_size()
    everything = gather(order) if num_gathered * row_bytes <= GATHER_ONCE_BYTES else None

    def run(expert: int, start: int, wanted: int) -> None:
        # Neighboring rows fill the bucket. Rows do not depend on each other, so no padding is copied.
        given = min(fill(wanted), num_gathered)
        begin = min(start, num_gathered - given)
        places = slice(begin, begin + given)
        x = gather(order[places]) if everything is None else everything[places]
        rows[start : start + wanted].copy_(mlp(x, expert)[start - begin : start - begin + wanted])

    parts = [
        (expert, start, min(block, first + count - start))
        for expert, first, count in routes.segments
        for start in range(first, first + count, block)
    ]
    _run_parts(run, parts, min_tasks)
    return rows


def _run_parts(run: RunPart, parts: Sequence[Part], min_tasks: int) -> None:
    tasks = [functools.partial(run, *part) for part in parts]
    run_tasks(tasks, [rows for _, _, rows in parts], min_tasks=min_tasks)


def _one_token(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: Sequence[int],
    slots: Sequence[int],
    mlp: ExpertMlp,
    min_tasks: int,
) -> None:
    """Runs one token x [1,H], whose experts all read the same row, without sorting, gathering and padding.

    These calls of torch and numpy would take as long as the experts of a small layer. `ids` are local experts of the K
    slots, or any other number where one has none; `slots` those that have one.
    """
    if not slots:
        out.zero_()
        return
    rows = [x] * len(slots)
    dtype = rows_dtype(out.dtype)

    def run(expert: int, row: int, _num_rows: int) -> None:
        # Rounded like rows of several tokens, so that other tokens in a call change no result by a rounding.
        rows[row] = mlp(x, expert).to(dtype)

    parts = [(ids[slot], row, 1) for row, slot in enumerate(slots)]
    if isinstance(mlp, PlainMlp) and mlp.shares(parts, len(parts)):
        rows = [mlp.in_turn(x.expand(len(slots), -1), parts)]
    else:
        _run_parts(run, parts, min_tasks)
    # The weight of a route without a local expert may be anything, and infinity times 0 is NaN.
    own = weights if len(slots) == len(ids) else weights[torch.tensor(slots, dtype=torch.int64, device="cpu")]
    out.copy_(torch.mv(torch.cat(rows).float().t(), own))


def _weighted_sum(out: torch.Tensor, rows: torch.Tensor, routes: SortedRoutes, weights: torch.Tensor) -> None:
    """Writes out[t] = sum over k of weights[t,k] * rows[positions[t,k]], summed in fp32."""
    positions = routes.positions
    if routes.num_rows < positions.numel():
        # The weight of a route without a local expert may be anything, and infinity times the row of zeros is NaN.
        weights = weights.masked_fill(positions == routes.num_rows, 0.0)
    if rows.dtype != torch.float32 and positions.numel() * rows.shape[1] <= FEW_SUMMED:
        found = rows.index_select(0, positions.view(-1)).view(*positions.shape, -1).float()
        out.copy_(torch.bmm(weights.unsqueeze(1), found).squeeze(1))
        return
    scales = weights.to(rows.dtype)
    if rows.dtype != torch.float32:
        # An embedding bag requires weights in the rows' dtype. A weight's value and rounding error as two weights keep
        # fp32's precision, and bfloat16 has fp32's range; the second visit to a row finds it in cache.
        scales = torch.cat((scales, (weights - scales.float()).to(rows.dtype)), dim=1)
        positions = torch.cat((positions, positions), dim=1)
    out.copy_(F.embedding_bag(positions, rows, mode="sum", per_sample_weights=scales))


def _sum_in_order(out: torch.Tensor, rows: torch.Tensor, routes: SortedRoutes, weights: torch.Tensor) -> None:
    """As `_weighted_sum`, choice by choice, so that no order depends on the number of tokens."""
    weights = weights.masked_fill(routes.positions == routes.num_rows, 0.0)
    total = torch.zeros(out.shape, dtype=torch.float32, device="cpu")
    for places, factors in zip(routes.positions.unbind(1), weights.unbind(1), strict=True):
        total += rows.index_select(0, places).float() * factors.unsqueeze(1)
    out.copy_(total)


def host_batched_experts(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    expert_num_tokens: torch.Tensor,
    mlp: ExpertMlp,
    w13_rows: int,
    min_tasks: int = 2,
    min_rows: int = MIN_ROWS,
) -> None:
    """Runs the experts of a CPU layer in the batched format; other arguments as for `host_experts`.

    Args:
        out: [E,max_T,H], any float dtype; overwritten; rows past an expert's count become 0.
        hidden_states: [E,max_T,H]; rows past an expert's count may hold anything.
        expert_num_tokens: [E] int32; valid rows of each expert.
    """
    max_tokens, hidden_size = hidden_states.shape[1:]
    block = row_block(hidden_size, w13_rows, hidden_states.element_size())

    def run(expert: int, start: int, wanted: int) -> None:
        given = min(bucket_rows(wanted, min_rows), max_tokens)
        begin = min(start, max_tokens - given)
        result = mlp(hidden_states[expert, begin : begin + given], expert)
        out[expert, start : start + wanted].copy_(result[start - begin : start - begin + wanted])

    counts = expert_num_tokens.tolist()
    parts = [
        (expert, start, min(block, count - start))
        for expert, count in enumerate(counts)
        for start in range(0, count, block)
    ]
    _run_parts(run, parts, min_tasks)
    for expert, count in enumerate(counts):
        out[expert, count:].zero_()

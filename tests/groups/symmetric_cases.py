"""What ranks do with `low_latency_symmetric` on an imitation of torch's symmetric memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import moereg
from moereg.expert_placement import PlacementTables
from moereg.layer import make_kernel
from moereg.prepare_finalize import Group, LowLatencySymmetric
from moereg.prepare_finalize.wire import CodedWire, PlainWire
from tests.groups import symmetric_imitation
from tests.groups.cases import CPU, errors_of, experts_of, numbers_of, problem_of, tokens_of


def overlapped(rank: int, size: int) -> bool:
    """Two calls are under way at once, as with two parts on a GPU; experts that return what they get."""
    symmetric_imitation.install()
    problem = dataclasses.replace(problem_of(), num_local_experts=12 // size, placement="map")
    group, placement = Group(dist.group.WORLD, CPU), moereg.ExpertPlacement.contiguous(12, size)
    tables = PlacementTables(placement, rank, CPU)
    seen = LowLatencySymmetric.experts_problem_of(problem, group.facts, "standard")
    moves = LowLatencySymmetric(problem, seen, group, tables, PlainWire(problem))
    calls = [tokens_of(problem, rank, num_tokens) for num_tokens in (5, 3, 8, 1)]
    prepared = [moves.prepare(*calls[0], seen, tables.expert_map)]
    is_right = True
    for place, (hidden_states, topk_weights, topk_ids) in enumerate(calls):
        if place + 1 < len(calls):
            prepared.append(moves.prepare(*calls[place + 1], seen, tables.expert_map))
        out = torch.full_like(hidden_states, float("nan"))
        moves.finalize(out, prepared[place].inputs.hidden_states, prepared[place], seen)
        weights = torch.where(topk_ids >= 0, topk_weights, 0).sum(1, keepdim=True)
        is_right = is_right and torch.equal(out, hidden_states * weights)
    return is_right


def compared(rank: int, size: int, num_batches: int = 1, extra: int = 1, **changes: Any) -> dict[str, Any]:
    """Its cell names GPUs, so the object is made by hand."""
    symmetric_imitation.install()
    problem = problem_of(**changes)
    weights = numbers_of(problem)
    num_experts = problem.num_experts
    held = [tuple(range(each * num_experts // size, (each + 1) * num_experts // size)) for each in range(size)]
    # Some experts of the first rank are also on the last one.
    placement = moereg.ExpertPlacement(num_experts, (*held[:-1], (*held[-1], *range(1, 1 + extra))))
    own = placement.experts_of_rank[rank]
    mine = dataclasses.replace(problem, num_local_experts=len(own), placement="map")
    most = mine.max_num_tokens
    assert most is not None
    part = dataclasses.replace(mine, max_num_tokens=-(-most // num_batches))
    group = Group(dist.group.WORLD, CPU)
    seen = LowLatencySymmetric.experts_problem_of(part, group.facts, "standard")
    assert (seen.top_k, seen.max_num_tokens) == (1, -(-most // num_batches) * size * problem.top_k)
    scheme = moereg.explain_backends(seen, "cpu").decisions[0].scheme
    assert scheme is not None
    wire = PlainWire(mine) if scheme.activation is None else CodedWire(mine, scheme)
    moves = LowLatencySymmetric(part, seen, group, PlacementTables(placement, rank, CPU), wire)
    moves.num_batches = num_batches
    kernel = make_kernel(
        problem,
        experts_of(weights, own),
        group=dist.group.WORLD,
        prepare_finalize=moves,
        expert_placement=placement,
        num_batches=num_batches,
    )
    before = symmetric_imitation.STATE.calls
    found = errors_of(kernel, make_kernel(problem, weights), problem, rank, size)
    return {**found, "exchanges": symmetric_imitation.STATE.calls - before, "bins": moves._bins}


def symmetric(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size)


def symmetric_shared_bins(rank: int, size: int) -> dict[str, Any]:
    """More experts a rank than bins."""
    return compared(rank, size, num_experts=24 * size, top_k=4, extra=2)


def symmetric_in_two_parts(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, num_batches=2)


def symmetric_weights_on_inputs(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, top_k=1, apply_router_weight_on_input=True)


def symmetric_overtaken(rank: int, size: int) -> dict[str, Any]:
    """Block 0 writes before the others read, as it may."""
    symmetric_imitation.STATE.block_0_is_first = True
    try:
        return compared(rank, size)
    finally:
        symmetric_imitation.STATE.block_0_is_first = False


def symmetric_fp8(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, dtype="bfloat16", quant="fp8_block128", intermediate_size=128)

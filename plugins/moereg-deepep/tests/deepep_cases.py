"""Cases for the ranks of a group: layers whose tokens move by an imitation of DeepEP."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import deepep_imitation
import torch.distributed as dist
from moereg_deepep.prepare_finalize import DeepEP, DeepEPLowLatency

import moereg
from moereg.author import Group, PlacementTables, PlainWire
from moereg.prepare_finalize.wire import CodedWire
from tests.groups.cases import CPU, errors_of, experts_of, numbers_of, problem_of


def compared(rank: int, size: int, activation_format: str, **changes: Any) -> dict[str, Any]:
    """A layer over the group against the same layer on one rank. Its cells name GPUs, so the object is made by hand."""
    sys.modules["deep_ep"] = deepep_imitation.module()
    problem = problem_of(dtype="bfloat16", intermediate_size=128, **changes)
    weights = numbers_of(problem)
    one = moereg.make_kernel(problem, weights)
    # An expert of the first rank is also on the last one.
    held = [tuple(range(each * 12 // size, (each + 1) * 12 // size)) for each in range(size)]
    placement = moereg.ExpertPlacement(12, (*held[:-1], (*held[-1], 1)))
    own = placement.experts_of_rank[rank]
    mine = dataclasses.replace(problem, num_local_experts=len(own), placement="map")
    group = Group(dist.group.WORLD, CPU)
    kind = DeepEP if activation_format == "standard" else DeepEPLowLatency
    seen = kind.experts_problem_of(mine, group.facts, activation_format)
    scheme = moereg.explain_backends(seen, "cpu").decisions[0].scheme
    assert scheme is not None
    wire = PlainWire(mine) if scheme.activation is None else CodedWire(mine, scheme)
    moves = kind(mine, seen, group, PlacementTables(placement, rank, CPU), wire)
    kernel = moereg.make_kernel(
        problem,
        experts_of(weights, own),
        group=dist.group.WORLD,
        prepare_finalize=moves,
        expert_placement=placement,
    )
    return errors_of(kernel, one, problem, rank, size)


def deepep(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, "standard")


def deepep_fp8(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, "standard", quant="fp8_block128")


def deepep_low_latency(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, "batched")


def deepep_low_latency_fp8(rank: int, size: int) -> dict[str, Any]:
    return compared(rank, size, "batched", quant="fp8_block128")

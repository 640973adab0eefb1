"""Moves experts between the ranks of a group, between calls and in the same storage.

A rank gets an expert from one that has it: as rows in the backend's layout, copied unchanged, or as canonical weights
if the layout has tensors that cannot be copied or that differ between ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from moereg.arguments import check_instance
from moereg.errors import ArgumentError
from moereg.layer.held_weights import HeldWeights
from moereg.layer.one_expert import OneExpert
from moereg.prepare_finalize import Group, GroupPrepareFinalize
from moereg.prepare_finalize.expert_placement import ExpertPlacement
from moereg.prepare_finalize.ranks_agree import MOVING, agree
from moereg.runtime.torch_state import plain_torch
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_DOING: Final = "experts that move"


@dataclasses.dataclass(frozen=True)
class ExpertMove:
    """Copies a local expert of one rank over one of another rank."""

    expert: int
    source_rank: int
    source_place: int
    target_rank: int
    target_place: int


def plan_moves(before: ExpertPlacement, after: ExpertPlacement) -> tuple[ExpertMove, ...]:
    """Plans which experts move from which rank to which; equal on every rank.

    A rank copies an expert that it already has. Otherwise it comes from the rank that has sent the fewest so far.
    """
    if (after.num_experts, after.num_ranks) != (before.num_experts, before.num_ranks):
        raise ArgumentError(f"experts must stay in their layer and group, {before}, got {after}")
    for rank, (old, new) in enumerate(zip(before.experts_of_rank, after.experts_of_rank, strict=True)):
        if len(old) != len(new):
            raise ArgumentError(
                f"a rank must keep its number of experts, whose memory it has, got {len(new)} for {len(old)} on rank "
                f"{rank}; make the kernel with more replicas"
            )
    holders: dict[int, list[tuple[int, int]]] = {}
    for rank, experts in enumerate(before.experts_of_rank):
        for place, expert in enumerate(experts):
            holders.setdefault(expert, []).append((rank, place))
    sent = [0] * before.num_ranks
    moves = []
    for target, (old, new) in enumerate(zip(before.experts_of_rank, after.experts_of_rank, strict=True)):
        for target_place, (was, expert) in enumerate(zip(old, new, strict=True)):
            if was == expert:
                continue
            rank, place = min(holders[expert], key=lambda holder: (holder[0] != target, sent[holder[0]], holder[0]))
            sent[rank] += rank != target
            moves.append(ExpertMove(expert, rank, place, target, target_place))
    return tuple(moves)


_Arrived = dict[int, Mapping[str, torch.Tensor]]
"""For each local expert to replace, its row of every per-expert tensor, by name."""


def move_experts(
    held: HeldWeights, dispatcher: GroupPrepareFinalize, placement: ExpertPlacement, write_shared: bool
) -> int:
    """Implements `MoEKernel.move_experts`; each rank of the group has to call it.

    Briefly needs twice the memory of arriving experts, and one tensor of leaving ones.
    """
    error: Exception | None = None
    try:
        check_instance("placement", placement, ExpertPlacement, "make one with balance_experts(...)")
        held.check_writable(write_shared)
    except Exception as raised:
        error = raised
    group, tables = dispatcher.group, dispatcher.tables
    # A call between exchange and writes would meet ranks that have already written.
    with group.exclusive(MOVING.act):
        arrived = exchange_experts(group, held.now, tables.placement, placement, error)
        with held.in_turn.exclusive():
            with plain_torch(), torch.inference_mode():
                for place, rows in arrived.items():
                    for name, value in held.now.per_expert.items():
                        if isinstance(value, list) and value[place].layout != torch.strided:
                            value[place] = rows[name]  # Opaque tensors cannot be written into.
                        else:
                            value[place].copy_(rows[name])
            tables.update(placement)
    return len(arrived)


def exchange_experts(
    group: Group, weights: PermutedWeights, before: ExpertPlacement, after: ExpertPlacement, error: Exception | None
) -> _Arrived:
    """Exchanges experts with all ranks, or raises on all of them if one has an error. Writes nothing."""
    reader, moves, said, copied_as = weights.reader, tuple[ExpertMove, ...](), dict[str, str](), None
    if error is None:
        try:
            moves = plan_moves(before, after)
            if not isinstance(reader, OneExpert):
                raise ArgumentError("experts move between kernels that make_kernel made; make one with it")
            said = {"placement before": before.digest, "new placement": after.digest, "layout": weights.layout}
            copied_as = _copied_as(weights)
        except Exception as raised:
            error = raised
    copied = agree(group, _DOING, said, error, copied_as, MOVING)
    assert isinstance(reader, OneExpert)
    if not moves:
        return {}
    with plain_torch(), torch.inference_mode():
        if copied[0] is not None and len(set(copied)) == 1:
            return _exchange_rows(group, weights, moves)
        return _exchange_canonical(group, weights, moves, reader)


def _copied_as(weights: PermutedWeights) -> str | None:
    """A layout's fingerprint, equal on ranks that can copy rows from each other; None if rows cannot be copied."""
    if any(tensor.layout != torch.strided for tensor in weights.flat()):
        return None
    digest = hashlib.sha256()
    for name, value in sorted(weights.per_expert.items()):
        digest.update(repr((name, tuple(value[0].shape), value[0].dtype)).encode())
    for name, tensor in sorted(weights.shared.items()):
        digest.update(repr((name, tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(_as_bytes(tensor).cpu().numpy().tobytes())
    return digest.hexdigest()


def _exchange_rows(group: Group, weights: PermutedWeights, moves: Sequence[ExpertMove]) -> _Arrived:
    mine, theirs = _of_rank(group, moves)
    rows: list[dict[str, torch.Tensor]] = [{} for _ in theirs]
    for name, value in sorted(weights.per_expert.items()):
        sent = [value[move.source_place] for move in mine]
        like = value[0]
        for place, row in enumerate(_exchange(group, moves, sent, tuple(like.shape), like.dtype, like.device)):
            rows[place][name] = row
    return {move.target_place: each for move, each in zip(theirs, rows, strict=True)}


def _exchange_canonical(
    group: Group, weights: PermutedWeights, moves: Sequence[ExpertMove], reader: OneExpert
) -> _Arrived:
    mine, theirs = _of_rank(group, moves)
    sent: dict[int, dict[str, torch.Tensor]] = {}
    error: Exception | None = None
    try:
        for place in dict.fromkeys(move.source_place for move in mine):
            sent[place] = weights.to_canonical(place).tensors()
    except Exception as raised:
        error = raised
    said = {"tensors": str(sorted(reader.specs.items()))}
    agree(group, "reading experts that move", said, error, together=MOVING)
    found: list[dict[str, torch.Tensor]] = [{} for _ in theirs]
    for name, (shape, dtype) in sorted(reader.specs.items()):
        own = [sent[move.source_place][name] for move in mine]
        for place, tensor in enumerate(_exchange(group, moves, own, shape, dtype, weights.device)):
            found[place][name] = tensor
    del sent
    rows: list[Mapping[str, torch.Tensor]] = []
    try:
        for tensors in found:
            permuted = reader.rows_for(weights, ExpertWeights.unchecked(tensors, reader.quant))
            rows.append({name: value[0] for name, value in permuted.per_expert.items()})
            tensors.clear()
    except Exception as raised:
        error = raised
    # No rank has written anything yet: either all ranks continue or none.
    agree(group, "permuting experts that moved", {}, error, together=MOVING)
    return {move.target_place: each for move, each in zip(theirs, rows, strict=True)}


def _of_rank(group: Group, moves: Sequence[ExpertMove]) -> tuple[list[ExpertMove], list[ExpertMove]]:
    """Moves that this rank sends (ordered by target) and receives (by source); copies within a rank are in both."""
    mine = [move for move in moves if move.source_rank == group.rank]
    theirs = [move for move in moves if move.target_rank == group.rank]
    # Moves are ordered by target. Within a pair of ranks both sides have the same order.
    return mine, sorted(theirs, key=lambda move: move.source_rank)


def _exchange(
    group: Group,
    moves: Sequence[ExpertMove],
    sent: Sequence[torch.Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Exchanges one tensor of each moving expert, as bytes: torch.distributed may not support the dtype."""
    num_bytes = math.prod(shape) * dtype.itemsize
    mine, theirs = _of_rank(group, moves)
    out_rows = [sum(move.source_rank == rank for move in theirs) for rank in range(group.size)]
    sent_rows = [sum(move.target_rank == rank for move in mine) for rank in range(group.size)]
    leaving = torch.empty((len(sent), num_bytes), dtype=torch.uint8, device=device)
    for row, tensor in zip(leaving, sent, strict=True):
        row.copy_(_as_bytes(tensor))
    arriving = torch.empty((sum(out_rows), num_bytes), dtype=torch.uint8, device=device)
    group.all_to_all(arriving, leaving, _DOING, out_rows, sent_rows)
    return (row.view(dtype).view(shape) for row in arriving)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)

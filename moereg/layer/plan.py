"""Plans a layer over a group: all ranks agree on the expert placement, the token dispatcher and the backend."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from moereg._version import __version__
from moereg.arguments import check_instance
from moereg.dispatch import select_backend
from moereg.errors import ArgumentError, RanksMeasuredWarning, UnsupportedProblemError
from moereg.evidence.code_digest import class_digest
from moereg.layer.checks import resolve_expert_map, winner_of
from moereg.platforms import platform_of
from moereg.prepare_finalize import Group, GroupPrepareFinalize, PrepareFinalize, resolve_prepare_finalize
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables
from moereg.prepare_finalize.ranks_agree import agree, differences
from moereg.prepare_finalize.wire import CodedWire, PlainWire, Wire, wire_scheme
from moereg.selection.decide import unmeasured
from moereg.selection.dispatcher import DispatcherDecision, DispatcherSelection, problem_of_rank, select_dispatcher
from moereg.selection.request import DispatcherNames
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

DispatcherChoice = PrepareFinalize | DispatcherSelection | DispatcherNames
"""Names of token dispatchers, a selection of one, or an object that moves tokens; None takes the best."""

_OF_ONE_RANK: Final = ("num_local_experts", "max_num_tokens")
"""Problem fields that may differ between ranks."""


class LayerArguments(NamedTuple):
    """Arguments of `make_kernel` that go with the group, by name."""

    prepare_finalize: DispatcherChoice
    expert_map: torch.Tensor | None
    expert_placement: ExpertPlacement | None
    ep_rank: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Parts of a layer over a group, which all ranks agreed on; problem and map are this rank's."""

    problem: MoEProblem
    selection: Selection
    prepare_finalize: PrepareFinalize
    expert_map: torch.Tensor | None
    group: Group


def plan_layer(
    problem: MoEProblem, weights: ExpertWeights, process_group: Any, selection: Selection | None, asked: LayerArguments
) -> Plan:
    """Plans a layer with all ranks of a group, each of which has to call it. Arguments as in `make_kernel`.

    Ranks exchange three times, even if one of them fails: their arguments, what each would choose, and their choices.
    They run one plan: if measured times make their choices differ, all of them choose without.
    """
    device = weights.w13.device
    group = Group(process_group, device)
    placement: ExpertPlacement | None = None
    error: Exception | None = None
    try:
        problem, placement = _placed(problem, group, asked)
        weights.check_against(problem)
    except Exception as raised:
        error = raised
    expert_map = asked.expert_map
    common = {name: value for name, value in problem.to_dict().items() if name not in _OF_ONE_RANK}
    said = {"moereg": __version__, "torch": torch.__version__, "device": device.type, **common}
    own = None if expert_map is None or placement is not None or error else expert_map.tolist()
    known = agree(group, "what they were given", said, error, (own, group.num_layers))
    maps = [mapping for mapping, _ in known]
    # One more than any rank's count: a rank may have counted a layer that others gave up.
    number = 1 + max(made for _, made in known)
    group.add_layer(number, f"E{problem.num_experts} H{problem.hidden_size} I{problem.intermediate_size}")
    plan, said = None, {}
    try:
        if placement is None:
            placement = _placement_of(maps, problem.num_experts)
        plan, said = _chosen(problem, group, placement, device, selection, asked.prepare_finalize)
    except Exception as raised:
        error = raised
    known = agree(group, "what they would choose", {}, error, (said, plan.selection.measured if plan else ""))
    assert plan is not None
    assert placement is not None
    digests = [digest for _, digest in known]
    try:
        differing = differences([fields for fields, _ in known])
        if differing and any(digests):
            text = (
                f"ranks of a group must choose alike, and by their measured times would run {differing[0]}: all of "
                "them choose without measured times; give every rank the same pack (MOEREG_TUNING)"
            )
            warnings.warn(text, RanksMeasuredWarning, stacklevel=2)
            notice = "the measured times are not used: by theirs, ranks of the group would choose differently"
            selection = unmeasured(plan.selection)
            selection = dataclasses.replace(selection, notices=(*selection.notices, notice))
            plan, said = _chosen(problem, group, placement, device, selection, asked.prepare_finalize)
        elif any(digests):
            # Times of other digests that choose the same plan; the fingerprints of ranks are equal.
            plan = dataclasses.replace(plan, selection=dataclasses.replace(plan.selection, measured=digests[0]))
        if isinstance(plan.prepare_finalize, GroupPrepareFinalize):
            plan.prepare_finalize.layer_number = number
    except Exception as raised:
        error = raised
    agree(group, "what they chose", said, error)
    return plan


def _placed(problem: MoEProblem, group: Group, asked: LayerArguments) -> tuple[MoEProblem, ExpertPlacement | None]:
    """The problem with this rank's experts, and the placement; None if it follows from all ranks' maps."""
    ep_rank, expert_map, placement = asked.ep_rank, asked.expert_map, asked.expert_placement
    if ep_rank not in (0, group.rank):
        raise ArgumentError(f"ep_rank must be this process's rank in the group, {group.rank}, got {ep_rank}")
    if placement is not None:
        check_instance("expert_placement", placement, ExpertPlacement, "make one with ExpertPlacement(...)")
        if expert_map is not None:
            raise ArgumentError("expert_placement says what expert_map says, got both; leave expert_map out")
        if (placement.num_experts, placement.num_ranks) != (problem.num_experts, group.size):
            raise ArgumentError(
                f"expert_placement must be of {problem.num_experts} experts on {group.size} ranks, got {placement}"
            )
        held = len(placement.experts_of_rank[group.rank])
        return dataclasses.replace(problem, num_local_experts=held, placement="map"), placement
    if expert_map is None:
        if problem.placement == "map":
            raise ArgumentError("placement 'map' needs expert_placement or expert_map beside the group, got neither")
        return problem_of_rank(problem, group.size), ExpertPlacement.contiguous(problem.num_experts, group.size)
    resolve_expert_map(problem, 0, expert_map, expert_map.device)
    held_by = [local for local in expert_map.tolist() if local >= 0]
    if sorted(held_by) != list(range(problem.num_local_experts)):
        raise ArgumentError(
            f"expert_map must name each of {problem.num_local_experts} local experts once beside a group, got "
            f"{sorted(held_by)}"
        )
    return problem, None


def _placement_of(maps: Sequence[list[int]], num_experts: int) -> ExpertPlacement:
    """The placement that follows from all ranks' maps."""
    ranks = [
        tuple(sorted((expert for expert in range(num_experts) if mapping[expert] >= 0), key=mapping.__getitem__))
        for mapping in maps
    ]
    return ExpertPlacement(num_experts, tuple(ranks))


def _chosen(
    problem: MoEProblem,
    group: Group,
    placement: ExpertPlacement,
    device: torch.device,
    selection: Selection | None,
    choice: DispatcherChoice,
) -> tuple[Plan, dict[str, Any]]:
    """This rank's plan, and the values that must be equal on all ranks."""
    given = choice if isinstance(choice, GroupPrepareFinalize) else None
    tables = PlacementTables(placement, group.rank, device) if given is None else given.tables
    expert_map: torch.Tensor | None = tables.expert_map
    if given is None and problem.placement == "contiguous":
        expert_map = resolve_expert_map(problem, group.rank, None, device)
    if isinstance(choice, PrepareFinalize):
        seen = problem if given is None else given.experts_problem
        moves = given or resolve_prepare_finalize(problem, choice)
        selection = selection or select_backend(seen, platform_of(device))
        winner = winner_of(selection, seen)
        plan = Plan(problem, selection, moves, expert_map, group)
        return plan, {"dispatcher": moves.name, **_kernel_fields(selection, winner), "placement": placement.digest}
    if not isinstance(choice, DispatcherSelection):
        choice = select_dispatcher(problem, group.facts, platform_of(device), require=choice)
    elif (choice.problem, choice.group) != (problem, group.facts):
        raise ArgumentError(
            f"the dispatchers were judged for {choice.problem} on {choice.group}, got {problem} on {group.facts}; "
            "judge them again"
        )
    decision, selection = _first_with_backend(choice, selection)
    winner = winner_of(selection, selection.problem)
    wire = _wire(problem, selection, winner)
    moves = decision.cell.dispatcher(
        problem=problem, experts_problem=selection.problem, group=group, tables=tables, wire=wire
    )
    said = {
        "dispatcher": decision.name,
        "activation format": decision.activation_format,
        "wire": wire.name,
        "dispatcher's code": f"{decision.cell.provider} {class_digest(decision.cell.dispatcher)}",
        **_kernel_fields(selection, winner),
        "placement": placement.digest,
    }
    if decision.cell.facts.max_num_tokens:
        said["max_num_tokens"] = problem.max_num_tokens
    return Plan(problem, selection, moves, expert_map, group), said


def _first_with_backend(
    choice: DispatcherSelection, selection: Selection | None
) -> tuple[DispatcherDecision, Selection]:
    """The best token dispatcher whose format a backend serves, with that backend."""
    if choice.winner is None:
        raise UnsupportedProblemError(choice.refusal, choice)
    refused: list[UnsupportedProblemError] = []
    for decision in choice.accepted:
        seen = choice.experts_problem(decision)
        if selection is not None:
            if selection.problem == seen:
                return decision, selection
            continue
        try:
            return decision, select_backend(seen, choice.platform)
        except UnsupportedProblemError as error:
            refused.append(error)
    if selection is None:
        raise refused[0]
    seen = choice.experts_problem(choice.winner)
    raise ArgumentError(
        f"the selection was made for {selection.problem}, and the experts behind {choice.winner.name} see {seen}; "
        "select for that: select_dispatcher(...).experts_problem(...)"
    )


def _wire(problem: MoEProblem, selection: Selection, winner: Decision) -> Wire:
    scheme, decisions = winner.scheme, [decision for _, decision in selection.plan]
    # Tokens travel before it is known which range they reach on another rank.
    if any(one.scheme != scheme for one in decisions) or scheme is None or wire_scheme(scheme, problem) is None:
        return PlainWire(problem)
    forms = {one.cell.experts.input_form for one in decisions if one.cell is not None}
    takes_codes = forms == {"quantized"} and selection.problem.activation_format == "standard"
    return CodedWire(problem, scheme, keeps_codes=takes_codes)


def _kernel_fields(selection: Selection, winner: Decision) -> dict[str, Any]:
    """Values that must be equal on all ranks, of the winner and of each other range."""
    fields = {**_decision_fields(winner), "platform": str(selection.platform)}
    for most, decision in selection.plan[:-1]:
        fields[f"plan to {most} tokens"] = " ".join(_decision_fields(decision).values())
    return fields


def _decision_fields(decision: Decision) -> dict[str, str]:
    assert decision.cell is not None
    return {
        "backend": decision.backend,
        "experts": decision.experts,
        "computes": decision.computes,
        "code": f"{decision.provider} {class_digest(decision.cell.experts)}",
    }

"""Choosing the way of tokens between ranks: before the backend, as that is chosen, and with the same words.

`decide_movement` is pure but for probes: problem, group, platform, request and cells come in as arguments.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from typing import Any

from moereg.arguments import takes
from moereg.discovery import current_platform, load_movements
from moereg.errors import (
    ArgumentError,
    UnsupportedProblemError,
    described,
    shown,
    stops_the_process,
)
from moereg.machine import PROBES, Probes, assumptions, clause, lacks, private_copy
from moereg.movement_request import MovementRequest, WayNames, way_place
from moereg.platforms import Platform
from moereg.prepare_finalize import GroupFacts, MovementCell
from moereg.prepare_finalize.facts import movement_reasons
from moereg.problem import MoEProblem
from moereg.reasons import CURES, Reason
from moereg.registry import BUILTIN

__all__ = [
    "MovementDecision",
    "MovementRequest",
    "MovementSelection",
    "decide_movement",
    "explain_movements",
    "select_movement",
]


@dataclasses.dataclass(frozen=True)
class MovementDecision:
    """What became of one candidate: a way with one activation format.

    Attributes:
        name: The way's.
        activation_format: The format that the experts would see.
        rule: The platform rule that matched, else all of the cell's.
        priority: Its rank.
        predicted: Whether that was predicted and not measured.
        origin, origin_version: The distribution that brings it.
        reasons: Everything that speaks against it; accepted if empty.
        assumes: Requirements that are assumed to be met on a named platform.
        cell: Where it was registered.
    """

    name: str
    activation_format: str
    rule: str
    priority: int
    origin: str
    origin_version: str
    reasons: tuple[Reason, ...]
    assumes: tuple[str, ...]
    cell: MovementCell = dataclasses.field(compare=False, repr=False)
    predicted: bool = False

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return {
            "way": self.name,
            "activation_format": self.activation_format,
            "rule": self.rule,
            "accepted": self.accepted,
            "priority": self.priority,
            "predicted": self.predicted,
            "origin": self.origin,
            "origin_version": self.origin_version,
            "assumes": list(self.assumes),
            "reasons": [{"code": reason.code, "text": reason.text} for reason in self.reasons],
        }


@dataclasses.dataclass(frozen=True)
class MovementSelection:
    """The outcome for one problem, group and platform.

    Attributes:
        problem: The layer as the caller sees it, with this rank's experts.
        group: The ranks.
        platform: The machine.
        request: The resolved request.
        decisions: Every candidate, best first, rejected after accepted.
    """

    problem: MoEProblem
    group: GroupFacts
    platform: Platform
    request: MovementRequest
    decisions: tuple[MovementDecision, ...] = dataclasses.field(repr=False)

    @property
    def winner(self) -> MovementDecision | None:
        """The chosen candidate, or None if nothing fits."""
        return self.decisions[0] if self.decisions and self.decisions[0].accepted else None

    @property
    def accepted(self) -> tuple[MovementDecision, ...]:
        """All that fit, best first. If no backend serves the first one's format, the next is tried."""
        return tuple(decision for decision in self.decisions if decision.accepted)

    def experts_problem(self, decision: MovementDecision) -> MoEProblem:
        """The layer as the experts of a rank see it, for `select_backend`."""
        return decision.cell.movement.experts_problem_of(
            problem=self.problem, group=self.group, activation_format=decision.activation_format
        )

    @property
    def refusal(self) -> str:
        """Why nothing fits."""
        lines = [f"no way of moving tokens fits {self.problem} on {self.group}, {self.platform}"]
        nearest = min(self.decisions, key=lambda decision: len(decision.reasons), default=None)
        if nearest is not None and len(nearest.reasons) == 1:
            reason = nearest.reasons[0]
            lines[0] += f"; nearest is {nearest.name}: {reason.text} ({CURES[reason.code]})"
        for decisions in self._by_line():
            formats = " or ".join(each.activation_format for each in decisions)
            lines.append(f"  {decisions[0].name} ({formats}): {'; '.join(each.text for each in decisions[0].reasons)}")
        return "\n".join(lines)

    def table(self) -> str:
        """The decision table as plain text, one way per line, best first, and its reasons below.

        A way has several lines where reasons or classes of its formats differ. Of several cells for one format the best
        is shown.
        """
        lines = [f"group     {self.group}"]
        for decisions in self._by_line():
            decision = decisions[0]
            mark = "chosen" if decision is self.winner else "fits" if decision.accepted else "rejected"
            formats = " or ".join(each.activation_format for each in decisions)
            wheel = "" if decision.origin == BUILTIN else f" of {decision.origin} {decision.origin_version}".rstrip()
            rank = "predicted priority" if decision.predicted else "priority"
            lines.append(f"{mark:9} {decision.name} ({formats}{wheel}, {decision.rule}, {rank} {decision.priority})")
            lines.extend(f"{'':10}- {reason.text} [{reason.code}]" for reason in decision.reasons)
        return "\n".join(lines)

    def _by_line(self) -> list[list[MovementDecision]]:
        """The best decision for each way and format, those that say the same of one way together."""
        best: dict[tuple[str, str], MovementDecision] = {}
        for decision in self.decisions:
            best.setdefault((decision.name, decision.activation_format), decision)
        together: dict[object, list[MovementDecision]] = {}
        for decision in best.values():
            same = decision.name, decision.cell.movement, decision.rule, decision.priority, decision.reasons
            together.setdefault(same, []).append(decision)
        return list(together.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "group": dataclasses.asdict(self.group),
            "request": self.request.to_dict(),
            "selected": self.winner.name if self.winner else None,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


def decide_movement(
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform,
    request: MovementRequest,
    cells: Iterable[MovementCell],
    probes: Probes = PROBES,
) -> MovementSelection:
    """Chooses among cells, of any registry.

    Args:
        problem: The layer, with this rank's experts.
        group: The ranks.
        platform: What it is to run on; probes run only where it is probed.
        request: Resolved.
        cells: Candidates.
        probes: Keeps the answers of probes.
    """
    decisions = [
        _judge(cell, activation_format, problem, group, platform, request, probes)
        for cell in cells
        for activation_format in cell.formats
    ]

    def order(decision: MovementDecision) -> tuple[object, ...]:
        required = way_place(decision.name, request.require)
        preferred = way_place(decision.name, request.prefer)
        # The problem's own format goes first within a way: somebody may have asked for it.
        other_format = decision.activation_format != problem.activation_format
        return (
            not decision.accepted,
            len(decision.reasons),
            len(request.require) if required is None else required,
            len(request.prefer) if preferred is None else preferred,
            -decision.priority,
            decision.name,
            other_format,
            decision.activation_format,
        )

    return MovementSelection(problem, group, platform, request, tuple(sorted(decisions, key=order)))


def _judge(
    cell: MovementCell,
    activation_format: str,
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform,
    request: MovementRequest,
    probes: Probes,
) -> MovementDecision:
    rule = cell.rule_for(platform)
    reasons = [*lacks(cell, rule, platform, probes)]
    if way_place(cell.name, request.deny) is not None:
        reasons.append(Reason("denied", f"denied by the request ({', '.join(request.deny)})"))
    if request.require and way_place(cell.name, request.require) is None:
        reasons.append(Reason("not_required", f"requires a way in ({', '.join(request.require)}), got {cell.name}"))
    if cell.opt_in and cell.name not in (*request.require, *request.prefer):
        reasons.append(Reason("opt_in", "is opt-in: name it in require or prefer"))
    reasons += movement_reasons(cell.facts, problem, group)
    reasons += _own_reasons(cell, problem, group, platform)
    return MovementDecision(
        name=cell.name,
        activation_format=activation_format,
        rule=rule.text if rule else cell.rules_text,
        priority=cell.priority,
        origin=cell.origin,
        origin_version=cell.origin_version,
        reasons=tuple(reasons),
        assumes=assumptions(cell, platform),
        cell=cell,
        predicted=cell.predicted,
    )


def _own_reasons(cell: MovementCell, problem: MoEProblem, group: GroupFacts, platform: Platform) -> list[Reason]:
    try:
        found: object = cell.movement.unsupported_reasons(
            problem=private_copy(problem), group=group, platform=private_copy(platform)
        )
    except BaseException as error:  # As with predicates of backends.
        if stops_the_process(error):
            raise
        return [Reason("predicate_error", f"its unsupported_reasons raised {described(error)}")]
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        return [Reason("predicate_error", f"its unsupported_reasons has to return a list of texts, got {shown(found)}")]
    return [Reason("backend", clause(text)) for text in found]


@takes(problem=(MoEProblem, "make one with MoEProblem(...)"))
def explain_movements(
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform | str | None = None,
    require: WayNames = None,
    prefer: WayNames = None,
    deny: WayNames = None,
) -> MovementSelection:
    """Judges every way of moving tokens between ranks; no communication, no device, no group needed.

    Args:
        problem: The layer. Where it says that all experts are local, each rank gets an equal share of them.
        group: The ranks, such as `GroupFacts(8)`.
        platform: A value, a name such as `cuda:sm90`, or None for the machine at hand.
        require: One of these ways, tried in this order, or no winner. MOEREG_EP_REQUIRE means the same.
        prefer: These go first. MOEREG_EP_PREFER means the same.
        deny: None of these. MOEREG_EP_DENY adds to it.

    Returns:
        The selection; its `winner` is None if nothing fits.

    Raises:
        ArgumentError: The problem, group or platform is something else, or the ranks do not divide the experts.
        RequestError: A name is both required and denied, or something is not a name.
        UnknownNameError: A way or platform is not known.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=256, hidden_size=7168, intermediate_size=2048, top_k=8, quant="fp8_block128"
        ... )
        >>> group = moereg.prepare_finalize.GroupFacts(8)
        >>> selection = moereg.explain_movements(problem, group, platform="cuda:sm90")
        >>> selection.winner.name, selection.problem.num_local_experts
        ('all_to_all', 32)
    """
    cells = load_movements().cells
    if not isinstance(group, GroupFacts):
        raise ArgumentError(f"group must be GroupFacts, such as GroupFacts(8), got {shown(group)}")
    if platform is None:
        platform = current_platform()
    elif isinstance(platform, str):
        platform = Platform.from_name(platform)
    elif not isinstance(platform, Platform):
        raise ArgumentError(f"platform must be a Platform or a name such as 'cuda:sm90', got {shown(platform)}")
    request = MovementRequest.resolve(require, prefer, deny, environ=os.environ, known={cell.name for cell in cells})
    return decide_movement(problem_of_rank(problem, group.size), group, platform, request, cells)


def select_movement(
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform | str | None = None,
    require: WayNames = None,
    prefer: WayNames = None,
    deny: WayNames = None,
) -> MovementSelection:
    """Chooses the way of moving tokens between ranks, for `make_kernel(prepare_finalize=...)`.

    Args:
        problem: The layer. Where it says that all experts are local, each rank gets an equal share of them.
        group: The ranks, such as `GroupFacts(8)`.
        platform: A value, a name such as `cuda:sm90`, or None for the machine at hand.
        require: One of these ways, tried in this order, or an error.
        prefer: These go first.
        deny: None of these.

    Returns:
        The selection, with a winner.

    Raises:
        UnsupportedProblemError: Nothing fits; carries the selection and says every way's reasons.
        ArgumentError, RequestError, UnknownNameError: As `explain_movements`.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=64, hidden_size=2048, intermediate_size=1408, top_k=6, graph_capture=True, max_num_tokens=64
        ... )
        >>> group = moereg.prepare_finalize.GroupFacts(2)
        >>> movement = moereg.select_movement(problem, group, platform="cuda:sm90")
        >>> movement.winner.name
        'all_gather'
        >>> seen = movement.experts_problem(movement.winner)
        >>> moereg.select_backend(seen, platform="cuda:sm90", require="triton").backend
        'triton'
    """
    selection = explain_movements(problem, group, platform, require, prefer, deny)
    if selection.winner is None:
        raise UnsupportedProblemError(selection.refusal, selection)
    return selection


def problem_of_rank(problem: MoEProblem, size: int) -> MoEProblem:
    """The layer with this rank's experts: an equal share where the problem says that all are local.

    Raises:
        ArgumentError: The ranks do not divide the experts, and no map says who holds what.
    """
    if problem.placement == "map":
        return problem
    if problem.num_experts % size:
        raise ArgumentError(
            f"a group's ranks must divide the experts where no map says who holds what, got {problem.num_experts} "
            f"experts on {size} ranks; pass expert_placement to make_kernel"
        )
    share = problem.num_experts // size
    if problem.num_local_experts not in (share, problem.num_experts):
        raise ArgumentError(
            f"num_local_experts must be {share}, an equal share of {problem.num_experts} experts on {size} ranks, got "
            f"{problem.num_local_experts}; leave it out, or pass expert_placement to make_kernel"
        )
    return dataclasses.replace(problem, num_local_experts=share)

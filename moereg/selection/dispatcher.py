"""Selects the token dispatcher, which moves tokens between ranks, before the backend and by the same rules.

`decide_dispatcher` is pure except for probes: problem, group, platform, request and cells are arguments.
"""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Iterable
from typing import Any

from moereg.arguments import check_instance
from moereg.errors import ArgumentError, UnsupportedProblemError, shown
from moereg.platforms import Platform, read_platform
from moereg.prepare_finalize import DispatcherCell, GroupFacts
from moereg.selection.decide import judge_cell
from moereg.selection.loader import load_dispatchers
from moereg.selection.request import DispatcherNames, Request
from moereg.selection.result import Choice, Verdict
from moereg.spec.facts import fact_reasons
from moereg.spec.problem import MoEProblem


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherDecision(Verdict):
    """The verdict on one candidate: a token dispatcher with one activation format. See also `Verdict`.

    Attributes:
        name: The dispatcher's name.
        activation_format: The format that the experts would see.
        predicted: Whether its priority was predicted, not measured.
        cell: Its registration.
    """

    name: str
    activation_format: str
    cell: DispatcherCell = dataclasses.field(compare=False, repr=False)
    predicted: bool = False

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        own = ("activation_format", "rule", "accepted", "priority", "predicted")
        return {"dispatcher": self.name, **{name: getattr(self, name) for name in own}, **self.shared_fields()}


@dataclasses.dataclass(frozen=True)
class DispatcherSelection(Choice[DispatcherDecision]):
    """The outcome for one group, one platform and one problem with this rank's experts.

    Attributes:
        group: The ranks.
    """

    group: GroupFacts

    @property
    def accepted(self) -> tuple[DispatcherDecision, ...]:
        """All that fit, best first. If no backend serves the first one's format, the next one is tried."""
        return tuple(decision for decision in self.decisions if decision.accepted)

    def experts_problem(self, decision: DispatcherDecision) -> MoEProblem:
        """The layer as the experts of a rank see it, for `select_backend`."""
        return decision.cell.dispatcher.experts_problem_of(
            problem=self.problem, group=self.group, activation_format=decision.activation_format
        )

    @property
    def refusal(self) -> str:
        """Why nothing fits."""
        lines = [f"no token dispatcher fits {self.problem} on {self.group}, {self.platform}"]
        if self.decisions:  # The first has the fewest reasons.
            lines[0] += self.decisions[0].nearest(self.decisions[0].name)
        for decision, formats in self._lines():
            lines.append(f"  {decision.name} ({formats}): {'; '.join(each.text for each in decision.reasons)}")
        return "\n".join(lines)

    def table(self) -> str:
        """The decision table as plain text: one dispatcher per line, best first, with its reasons below.

        A dispatcher has several lines if its formats differ in reasons or classes. If a format has several cells, the
        best is shown.
        """
        lines = [f"group     {self.group}"]
        for decision, formats in self._lines():
            rank = "predicted priority" if decision.predicted else "priority"
            about = f"{decision.name} ({formats}{decision.of_wheel}, {decision.rule}, {rank} {decision.priority})"
            lines += decision.rows(about, decision is self.winner)
        return "\n".join(lines)

    def _lines(self) -> list[tuple[DispatcherDecision, str]]:
        """The best decision per dispatcher and format; formats with equal decisions share a line."""
        best: dict[tuple[str, str], DispatcherDecision] = {}
        for decision in self.decisions:
            best.setdefault((decision.name, decision.activation_format), decision)
        together: dict[object, list[DispatcherDecision]] = {}
        for decision in best.values():
            same = decision.name, decision.cell.dispatcher, decision.rule, decision.priority, decision.reasons
            together.setdefault(same, []).append(decision)
        return [(alike[0], " or ".join(each.activation_format for each in alike)) for alike in together.values()]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "group": dataclasses.asdict(self.group),
            "request": self.request.to_dict(),
            "selected": self.winner.name if self.winner else None,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }


def decide_dispatcher(
    problem: MoEProblem, group: GroupFacts, platform: Platform, request: Request, cells: Iterable[DispatcherCell]
) -> DispatcherSelection:
    """Chooses among cells for a layer with this rank's experts, as `decide` does for backends."""
    decisions = [decision for cell in cells for decision in _judge(cell, problem, group, platform, request)]

    def order(decision: DispatcherDecision) -> tuple[object, ...]:
        wish = request.preference(decision.name)
        # Within a dispatcher the problem's own format goes first, since the user may have asked for it.
        other_format = decision.activation_format != problem.activation_format
        return (
            len(decision.reasons),
            wish.required,
            wish.preferred,
            -decision.priority,
            decision.name,
            other_format,
            decision.activation_format,
        )

    return DispatcherSelection(problem, platform, request, tuple(sorted(decisions, key=order)), group=group)


def _judge(
    cell: DispatcherCell, problem: MoEProblem, group: GroupFacts, platform: Platform, request: Request
) -> Iterable[DispatcherDecision]:
    """A decision for each format of a cell, all with the same reasons."""
    # Facts read attributes of the problem and the group, and the number of ranks.
    asked = types.SimpleNamespace(**vars(problem), group=group, num_ranks=group.size)
    facts, rule = fact_reasons(cell.facts, asked), cell.rule_for(platform)
    verdict = judge_cell(cell, rule, platform, request, (), facts, problem=problem, group=group)
    for activation_format in cell.formats:
        yield DispatcherDecision(
            name=cell.name, activation_format=activation_format, cell=cell, predicted=cell.predicted, **verdict
        )


def explain_dispatchers(
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform | str | None = None,
    require: DispatcherNames = None,
    prefer: DispatcherNames = None,
    deny: DispatcherNames = None,
) -> DispatcherSelection:
    """Like `select_dispatcher`, but if nothing fits it returns a selection whose `winner` is None.

    Args:
        problem, group, platform, require, prefer, deny: As in `select_dispatcher`.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=256, hidden_size=7168, intermediate_size=2048, top_k=8, quant="fp8_block128"
        ... )
        >>> group = moereg.prepare_finalize.GroupFacts(8)
        >>> selection = moereg.explain_dispatchers(problem, group, platform="cuda:sm90")
        >>> selection.winner.name, selection.problem.num_local_experts
        ('all_to_all', 32)
    """
    check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
    cells = load_dispatchers().cells
    if not isinstance(group, GroupFacts):
        raise ArgumentError(f"group must be GroupFacts, such as GroupFacts(8), got {shown(group)}")
    platform = read_platform(platform)
    known = {cell.name for cell in cells}
    request = Request.resolve_dispatchers(require, prefer, deny, environ=os.environ, known=known)
    return decide_dispatcher(problem_of_rank(problem, group.size), group, platform, request, cells)


def select_dispatcher(
    problem: MoEProblem,
    group: GroupFacts,
    platform: Platform | str | None = None,
    require: DispatcherNames = None,
    prefer: DispatcherNames = None,
    deny: DispatcherNames = None,
) -> DispatcherSelection:
    """Selects the token dispatcher for `make_kernel(prepare_finalize=...)`. No communication, no device.

    Args:
        problem: The layer. If it says that all experts are local, each rank gets an equal share.
        group: The ranks, such as `GroupFacts(8)`.
        platform: A `Platform`, a name such as `cuda:sm90`, or None for this machine.
        require: Names of dispatchers, tried in this order; else an error. MOEREG_EP_REQUIRE means the same.
        prefer: Names that go first. MOEREG_EP_PREFER means the same.
        deny: Names to exclude. MOEREG_EP_DENY adds to them.

    Returns:
        The selection, with a winner.

    Raises:
        UnsupportedProblemError: Nothing fits; carries the selection and every dispatcher's reasons.
        ArgumentError: The problem, group or platform has another type, or the ranks do not divide the experts.
        RequestError: A name is both required and denied, or something is not a name.
        UnknownNameError: A dispatcher or platform is unknown.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=64, hidden_size=2048, intermediate_size=1408, top_k=6, graph_capture=True, max_num_tokens=64
        ... )
        >>> group = moereg.prepare_finalize.GroupFacts(2)
        >>> choice = moereg.select_dispatcher(problem, group, platform="cuda:sm90")
        >>> choice.winner.name
        'all_gather'
        >>> seen = choice.experts_problem(choice.winner)
        >>> moereg.select_backend(seen, platform="cuda:sm90", require="triton").backend
        'triton'
    """
    selection = explain_dispatchers(problem, group, platform, require, prefer, deny)
    if selection.winner is None:
        raise UnsupportedProblemError(selection.refusal, selection)
    return selection


def problem_of_rank(problem: MoEProblem, size: int) -> MoEProblem:
    """The layer with this rank's experts: an equal share if the problem says that all are local.

    Raises ArgumentError if ranks do not divide the experts, and no map says which rank holds which.
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

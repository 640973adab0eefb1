"""Deciding: judge every candidate, rank what is accepted, say why.

Pure but for what `moereg.asking` remembers of probes and of predicates that were given up: problem, platform, request
and cells come in as arguments, and nothing is looked up. Names no backend, architecture or scheme.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from moereg.asking import PREDICATE_SECONDS, ask_predicates, own_reasons
from moereg.candidates import Candidate, standing
from moereg.facts import fact_reasons
from moereg.machine import PROBES, Probes, assumptions, lacks
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.quarantine import EMPTY, Quarantine
from moereg.reasons import Reason
from moereg.registry import BUILTIN, BackendCell
from moereg.request import Request, place_of
from moereg.selection import Decision, Selection

__all__ = ["decide", "evaluate", "judge", "rank"]


def decide(
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    cells: Iterable[BackendCell],
    probes: Probes = PROBES,
    quarantine: Quarantine = EMPTY,
    seconds: float = PREDICATE_SECONDS,
) -> Selection:
    """Chooses among cells: those of `BackendRegistry.cells`, whichever registry they were registered in.

    Args:
        problem: The layer.
        platform: What it is to run on; probes run only where it is probed.
        request: Resolved for the problem's scheme.
        cells: Candidates.
        probes: Keeps the answers of probes.
        quarantine: What failed the conformance kit on the machine that `platform` is.
        seconds: Limit of each predicate and probe of another distribution.

    Returns:
        The selection, without a winner where nothing fits.
    """
    cells = tuple(cells)
    candidates = standing(cells, problem, platform)
    # A user who denies a wheel's backend need not wait for its code, which may be why.
    left_out = {
        place
        for place, candidate in enumerate(candidates)
        if candidate.cell.origin != BUILTIN and place_of(candidate.cell.name, request.deny) is not None
    }
    wanted = {place: candidate for place, candidate in enumerate(candidates) if place not in left_out}
    own = {**ask_predicates(wanted, problem, platform, probes, seconds), **dict.fromkeys(left_out, ())}
    decisions = rank(
        (
            judge(
                candidate, problem, platform, request, probes if place in wanted else None, quarantine, own.get(place)
            )
            for place, candidate in enumerate(candidates)
        ),
        request,
    )
    source = None
    if decisions and decisions[0].accepted:
        source = "required" if request.require else "priority"
        if not request.require and place_of(decisions[0].backend, request.prefer) is not None:
            source = "preferred"
    notices = (*request.notices, *_outranking(decisions, cells))
    return Selection(problem, platform, request, decisions, source, notices)


def evaluate(
    cell: BackendCell,
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    seconds: float = PREDICATE_SECONDS,
) -> Decision:
    """Every reason against one cell, whatever other cells there are and whatever is quarantined."""
    candidate = Candidate.of(cell, problem, platform)
    own = ask_predicates({0: candidate}, problem, platform, PROBES, seconds)
    return judge(candidate, problem, platform, request, PROBES, EMPTY, own.get(0))


def judge(
    candidate: Candidate,
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    probes: Probes | None = PROBES,
    quarantine: Quarantine = EMPTY,
    own: Sequence[Reason] | None = None,
) -> Decision:
    """Every reason against one candidate.

    Args:
        candidate: The candidate.
        problem: The layer.
        platform: What it is to run on.
        request: Resolved for the problem's scheme.
        probes: Keeps the answers of probes; none is asked where None.
        quarantine: What failed the conformance kit on the machine that `platform` is.
        own: The reasons of its class's predicate; it is asked right here where None.
    """
    cell, scheme, rule = candidate.cell, candidate.scheme, candidate.rule
    reasons = [
        *_scheme_reasons(cell, scheme, problem),
        *lacks(cell, rule, platform, probes),
        *_request_reasons(cell, request),
        *filter(None, [quarantine.reason(cell, scheme, rule, platform)]),
        *fact_reasons(cell.facts, problem),
        *_precision_reasons(scheme, problem),
        *(own_reasons(cell, problem, platform) if own is None else own),
    ]
    return Decision(
        backend=cell.name,
        experts=cell.class_name,
        rule=rule.text if rule else cell.rules_text,
        computes=(scheme or cell.schemes[0]).name,
        priority=cell.priority,
        tier=cell.tier,
        origin=cell.origin,
        origin_version=cell.origin_version,
        reasons=tuple(reasons),
        assumes=assumptions(cell, platform),
        candidate=candidate,
    )


def _scheme_reasons(cell: BackendCell, scheme: QuantScheme | None, problem: MoEProblem) -> Iterable[Reason]:
    if scheme is not None:
        return
    of_these_weights = [known.name for known in cell.schemes if known.weight == problem.quant.weight]
    rule_text = f"weights in ({', '.join(known.name for known in cell.schemes)})"
    if of_these_weights:
        rule_text = f"activations as in ({', '.join(of_these_weights)})"
    yield Reason("quant_scheme", f"requires {rule_text}, got {problem.quant.description}")


def _request_reasons(cell: BackendCell, request: Request) -> Iterable[Reason]:
    if place_of(cell.name, request.deny) is not None:
        yield Reason("denied", f"denied by the request ({', '.join(request.deny)})")
    if request.require and place_of(cell.name, request.require) is None:
        yield Reason("not_required", f"requires a backend in ({', '.join(request.require)}), got {cell.name}")
    if cell.opt_in and cell.name not in (*request.require, *request.prefer):  # A pattern names nobody.
        yield Reason("opt_in", "is opt-in: name it in require or prefer")


def _precision_reasons(scheme: QuantScheme | None, problem: MoEProblem) -> Iterable[Reason]:
    if scheme is not None and problem.exact_activations and scheme.activation != problem.quant.activation:
        yield Reason("precision", f"requires activations as {problem.quant.name} has them, got {scheme.name} instead")


def _outranking(decisions: Sequence[Decision], cells: Sequence[BackendCell]) -> list[str]:
    """A line for each backend of another distribution that fits with a priority above every built-in cell's."""
    highest = max((cell.priority for cell in cells if cell.origin == BUILTIN), default=None)
    if highest is None:
        return []
    above: dict[str, str] = {}
    for decision in decisions:
        if decision.accepted and decision.origin != BUILTIN and decision.priority > highest:
            line = (
                f"backend {decision.backend!r} of {decision.provider} has priority {decision.priority}, above every "
                f"built-in backend's (at most {highest}): it goes first wherever it fits; --deny {decision.backend} "
                "does without it"
            )
            above.setdefault(decision.backend, line)
    return list(above.values())


def rank(decisions: Iterable[Decision], request: Request) -> tuple[Decision, ...]:
    """Best first.

    Accepted before rejected; kernels before emulation; preferred names in their order, then required ones in theirs;
    then priority, name, class. Rejected ones by the number of reasons, nearest to fitting first.
    """
    decisions = list(decisions)
    places = {
        name: [
            len(names) if (place := place_of(name, names)) is None else place
            for names in (request.prefer, request.require)
        ]
        for name in {decision.backend for decision in decisions}
    }

    def key(decision: Decision) -> tuple[Any, ...]:
        return (
            len(decision.reasons),
            decision.tier != "kernel",
            places[decision.backend],
            -decision.priority,
            decision.backend,
            decision.experts,
            decision.rule,
        )

    return tuple(sorted(decisions, key=key))

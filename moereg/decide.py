"""Deciding: judge every candidate, rank what is accepted, say why.

Pure but for probes: problem, platform, request and cells come in as arguments, and nothing is looked up. Names no
backend, architecture or scheme.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Final

from moereg.candidates import Candidate, standing
from moereg.errors import described, shown, stops_the_process
from moereg.facts import fact_reasons
from moereg.machine import PROBES, Probes, assumptions, clause, lacks
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.quarantine import EMPTY, Quarantine
from moereg.reasons import Reason
from moereg.registry import BackendCell
from moereg.request import Request
from moereg.selection import Decision, Selection

__all__ = ["decide", "evaluate", "judge", "rank"]

_MOST_REASONS: Final = 100
"""The most that one predicate may give: it may be a generator without an end."""


def decide(
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    cells: Iterable[BackendCell],
    probes: Probes = PROBES,
    quarantine: Quarantine = EMPTY,
) -> Selection:
    """Chooses among cells: those of `BackendRegistry.cells`, whichever registry they were registered in.

    Args:
        problem: The layer.
        platform: What it is to run on; probes run only where it is probed.
        request: Resolved for the problem's scheme.
        cells: Candidates.
        probes: Who keeps the answers of probes.
        quarantine: What failed the conformance kit on the machine that `platform` is.

    Returns:
        The selection, without a winner where nothing fits.
    """
    candidates = standing(cells, problem, platform)
    decisions = rank(
        (judge(candidate, problem, platform, request, probes, quarantine) for candidate in candidates), request
    )
    source = None
    if decisions and decisions[0].accepted:
        source = "required" if request.require else "priority"
        if not request.require and decisions[0].backend in request.prefer:
            source = "preferred"
    return Selection(problem, platform, request, decisions, source)


def evaluate(cell: BackendCell, problem: MoEProblem, platform: Platform, request: Request) -> Decision:
    """Every reason against one cell, whatever other cells there are and whatever is quarantined."""
    return judge(Candidate.of(cell, problem, platform), problem, platform, request)


def judge(
    candidate: Candidate,
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    probes: Probes = PROBES,
    quarantine: Quarantine = EMPTY,
) -> Decision:
    """Every reason against one candidate."""
    cell, scheme, rule = candidate.cell, candidate.scheme, candidate.rule
    unread = _scheme_reasons(cell, scheme, problem)
    inexact = _precision_reasons(scheme, problem)
    unwanted = _request_reasons(cell, request)
    held = quarantine.reason(cell, scheme, rule, platform)
    own = _own_reasons(cell, problem, platform)
    missing = lacks(cell, rule, platform, probes)
    undeclared = fact_reasons(cell.facts, problem)
    return Decision(
        backend=cell.name,
        experts=cell.class_name,
        rule=rule.text if rule else cell.rules_text,
        computes=(scheme or cell.schemes[0]).name,
        priority=cell.priority,
        tier=cell.tier,
        origin=cell.origin,
        reasons=(*unread, *missing, *unwanted, *filter(None, [held]), *undeclared, *inexact, *own),
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
    if cell.name in request.deny:
        yield Reason("denied", f"denied by the request ({', '.join(request.deny)})")
    if request.require and cell.name not in request.require:
        yield Reason("not_required", f"requires a backend in ({', '.join(request.require)}), got {cell.name}")
    if cell.opt_in and cell.name not in (*request.require, *request.prefer):
        yield Reason("opt_in", "is opt-in: name it in require or prefer")


def _precision_reasons(scheme: QuantScheme | None, problem: MoEProblem) -> Iterable[Reason]:
    if scheme is not None and problem.exact_activations and scheme.activation != problem.quant.activation:
        yield Reason("precision", f"requires activations as {problem.quant.name} has them, got {scheme.name} instead")


def _own_reasons(cell: BackendCell, problem: MoEProblem, platform: Platform) -> list[Reason]:
    """The reasons that the class's own predicate gives."""
    reasons: list[Reason] = []
    try:
        texts: object = cell.experts.unsupported_reasons(problem, platform)
        if not isinstance(texts, Iterable) or isinstance(texts, str):
            raise TypeError(f"it has to return a list of texts, got {shown(texts)}")
        reasons.extend([Reason("backend", clause(text)) for text in itertools.islice(texts, _MOST_REASONS)])
    except BaseException as error:  # A predicate that raises is a bug of that backend, not of the dispatcher.
        if stops_the_process(error):
            raise
        reasons.append(Reason("predicate_error", f"its predicate raised {described(error)}"))
    return reasons


def rank(decisions: Iterable[Decision], request: Request) -> tuple[Decision, ...]:
    """Best first.

    Accepted before rejected; kernels before emulation; preferred names in their order; then priority, name, class.
    Rejected ones by the number of reasons, nearest to fitting first.
    """
    preferred = {name: place for place, name in enumerate(request.prefer)}

    def key(decision: Decision) -> tuple[Any, ...]:
        return (
            len(decision.reasons),
            decision.tier != "kernel",
            preferred.get(decision.backend, len(preferred)),
            -decision.priority,
            decision.backend,
            decision.experts,
            decision.rule,
        )

    return tuple(sorted(decisions, key=key))

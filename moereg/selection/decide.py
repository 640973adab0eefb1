"""Deciding: judge every candidate, rank what is accepted, say why.

Pure except for the cached answers of probes: problem, platform, request and cells come in as arguments, and nothing is
looked up. Names no backend, architecture or scheme.

    decide                  the cells of a registry, best first, with every reason
      _eligible             candidates: cells that read the weights, by their most specific rule
      _judge                every reason against one candidate
        judge_cell          those that a token dispatcher can have too
      rank                  accepted before rejected, wishes before priorities
      measured_order        the measured order of decisions that tie in the request
    reading_in_place        the same among classes that copy no weights
    unmeasured              the same without what was measured
      without_winner        the same once the first of them is ruled out
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.errors import described, one_line, shown, stops_the_process
from moereg.evidence.measured import Source, measured_order
from moereg.evidence.on_machine import ADMITTED_TIER, NO_RECORDS, Admitted, Quarantine
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BUILTIN, BackendCell, Cell, Probe
from moereg.selection.request import Request
from moereg.selection.result import Decision, Selection
from moereg.spec.facts import fact_reasons
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.spec.reasons import Reason

Candidate = tuple[BackendCell, QuantScheme | None, PlatformRule | None]
"""A cell with the scheme that it would compute, if it reads the weights, and the rule by which it may run, if any."""


def decide(
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    cells: Iterable[BackendCell],
    quarantine: Quarantine = NO_RECORDS,
    admitted: Admitted = NO_RECORDS,
    tuning: Sequence[Source] = (),
) -> Selection:
    """Chooses among cells: those of `BackendRegistry.cells`, whichever registry they were registered in.

    The selection has no winner where nothing fits.

    Args:
        problem: The layer.
        platform: What it is to run on; probes run only where it is probed.
        request: Resolved for the problem's scheme.
        cells: Candidates.
        quarantine, admitted: What failed there, and what passed its first check (only evidence).
        tuning: Packs of what was measured there; they order candidates that the request does not tell apart.
    """
    cells = tuple(cells)
    candidates = _eligible(cells, problem, platform)
    decisions = rank((_judge(each, problem, platform, request, quarantine, admitted) for each in candidates), request)
    source = _source(decisions, request)
    measurable = ties_for_first(decisions, request) if tuning else []
    known = [candidate_of(decision, platform) for decision in measurable]
    measured = measured_order(tuning, problem, platform, known)
    plan = tuple((most, measurable[place]) for most, place in measured.ranges)
    if plan:
        best, source = plan[-1][1], "measured"
        decisions = (best, *(decision for decision in decisions if decision is not best))
    above = _outranking(decisions, cells, is_measured=bool(plan))
    restores = _restoring(problem, decisions)
    notices = (*request.notices, *above, *restores, *filter(None, (measured.note, *measured.notes)))
    ranges = plan if len(plan) > 1 else ()
    return Selection(problem, platform, request, decisions, source, notices, ranges, measured.digest)


def reading_in_place(selection: Selection) -> Selection:
    """The selection among classes that read canonical weights where their owner keeps them; the others say why not."""

    def judged(decision: Decision) -> Decision:
        if decision.cell is None or not decision.accepted or decision.cell.experts.reads_in_place():
            return decision
        layouts = ", ".join(decision.cell.experts.layouts)
        reason = Reason("layout", f"requires weights that are read in place, got layouts {layouts}")
        return dataclasses.replace(decision, reasons=(reason,))

    kept = {id(one): judged(one) for one in selection.decisions}
    decisions = tuple(sorted(kept.values(), key=lambda one: not one.accepted))
    if decisions[:1] == selection.decisions[:1]:
        is_whole = all(kept[id(one)].accepted for _, one in selection.ranges)
        return dataclasses.replace(selection, decisions=decisions, ranges=selection.ranges if is_whole else ())
    return _in_order(selection, decisions)


def unmeasured(selection: Selection) -> Selection:
    """The selection by the request and priority alone, whatever was measured."""
    return _in_order(selection, rank(selection.decisions, selection.request))


def _in_order(selection: Selection, decisions: tuple[Decision, ...]) -> Selection:
    source = _source(decisions, selection.request)
    return dataclasses.replace(selection, decisions=decisions, source=source, ranges=(), measured="")


def _source(decisions: Sequence[Decision], request: Request) -> str | None:
    """Why the first decision wins where nothing was measured."""
    if not decisions or not decisions[0].accepted:
        return None
    is_preferred = request.preference(decisions[0].backend).preferred < math.inf
    return "required" if request.require else "preferred" if is_preferred else "priority"


def ties_for_first(decisions: Sequence[Decision], request: Request) -> list[Decision]:
    """The accepted decisions that the request and their tiers do not tell from the first."""

    def as_requested(decision: Decision) -> tuple[object, ...]:
        wish = request.preference(decision.backend)
        return decision.accepted, decision.tier, wish.preferred, wish.required

    return [each for each in decisions if each.accepted and as_requested(each) == as_requested(decisions[0])]


def candidate_of(accepted: Decision, platform: Platform) -> tuple[BackendCell, QuantScheme, PlatformRule]:
    """An accepted candidate as packs know it."""
    cell, scheme = accepted.cell, accepted.scheme
    rule = cell.rule_for(platform) if cell is not None else None
    assert cell is not None and scheme is not None and rule is not None, "it was accepted"
    return cell, scheme, rule


def evaluate(cell: BackendCell, problem: MoEProblem, platform: Platform, request: Request) -> Decision:
    """Every reason against one cell, whatever other cells there are and whatever is quarantined."""
    scheme, rule = _scheme_for(cell, problem, problem.restored), cell.rule_for(platform)
    return _judge((cell, scheme, rule), problem, platform, request, NO_RECORDS, NO_RECORDS)


def without_winner(selection: Selection, reason: Reason) -> Selection:
    """The selection once its winner is rejected for one more reason; its plan goes, the order of the others stays."""
    first, *others = selection.decisions
    rejected = dataclasses.replace(first, reasons=(*first.reasons, reason))
    fitting = [each for each in others if each.accepted]
    return _in_order(selection, (*fitting, rejected, *(each for each in others if not each.accepted)))


def _eligible(cells: Iterable[BackendCell], problem: MoEProblem, platform: Platform) -> Iterator[Candidate]:
    """Candidates that read the problem's weights; for a backend without any, all of its cells.

    If several cells of one experts class and scheme match the platform, only the one with the most specific rule is a
    candidate. Among equally specific ones, keep those whose facts match the problem; if none do, keep all.
    """
    restored = problem.restored
    computes = [(cell, _scheme_for(cell, problem, restored)) for cell in cells]
    readers = {cell.name for cell, scheme in computes if scheme is not None}
    alike: dict[tuple[str, type, str], list[tuple[BackendCell, QuantScheme, PlatformRule]]] = {}
    for cell, scheme in computes:
        if scheme is None and cell.name in readers:
            continue
        rule = cell.rule_for(platform)
        if scheme is None or rule is None:
            yield cell, scheme, rule
        else:
            alike.setdefault((cell.name, cell.experts, scheme.name), []).append((cell, scheme, rule))
    for best in alike.values():
        if len(best) > 1:
            most = max(rule.specificity for _, _, rule in best)
            best = [each for each in best if each[2].specificity == most]
        if len(best) > 1:
            best = [each for each in best if not fact_reasons(each[0].facts, problem)] or best
        yield from best


def _scheme_for(cell: BackendCell, problem: MoEProblem, restored: MoEProblem) -> QuantScheme | None:
    """The scheme that a cell computes for a problem, or for the restored one if it trains and reads such weights."""
    if restored is not problem and cell.facts.gradients and "canonical" in cell.experts.layouts:
        return cell.scheme_for(restored.quant) or cell.scheme_for(problem.quant)
    return cell.scheme_for(problem.quant)


def _judge(
    candidate: Candidate,
    problem: MoEProblem,
    platform: Platform,
    request: Request,
    quarantine: Quarantine,
    admitted: Admitted,
) -> Decision:
    cell, scheme, rule = candidate
    reads: list[Reason] = []
    seen = problem.computed_as(scheme)
    facts = fact_reasons(cell.facts, seen)
    if scheme is None:
        alike = ", ".join(known.name for known in cell.schemes if known.weight == problem.quant.weight)
        known = ", ".join(known.name for known in cell.schemes)
        wanted = f"activations as in ({alike})" if alike else f"weights in ({known})"
        reads.append(Reason("quant_scheme", f"requires {wanted}, got {problem.quant.description}"))
    elif problem.exact_activations and scheme.activation != problem.quant.activation:
        text = f"requires activations as {problem.quant.name} has them, got {scheme.name} instead"
        facts.append(Reason("precision", text))
    trains = bool(problem.gradients)
    if (failed := quarantine.record(cell, scheme, platform, trains)) is not None:
        facts.insert(0, failed.reason)

    return Decision(
        backend=cell.name,
        experts=cell.class_name,
        computes=(scheme or cell.schemes[0]).name,
        tier=cell.tier,
        cell=cell,
        scheme=scheme,
        evidence=ADMITTED_TIER if admitted.record(cell, scheme, platform, trains) else "",
        **judge_cell(cell, rule, platform, request, reads, facts, problem=seen),
    )


def judge_cell(
    cell: Cell,
    rule: PlatformRule | None,
    platform: Platform,
    request: Request,
    first: Iterable[Reason],
    facts: Iterable[Reason],
    **asked: object,
) -> dict[str, Any]:
    """The fields of a `Verdict` on a cell, a backend's or that of a token dispatcher.

    Its reasons are those that come first, the machine, the request, its facts, then its class's own predicate, which is
    asked about the platform and what else is `asked`. `rule` is the cell's for the platform, if any.
    """
    wish = request.preference(cell.name)
    # Denying a wheel's backend keeps its code out of the choice.
    is_asked = cell.origin == BUILTIN or not wish.is_denied
    reasons = [*first, *requirement_reasons(cell, rule, platform, is_asked)]
    if wish.is_denied:
        reasons.append(Reason("denied", f"denied by the request ({', '.join(request.deny)})"))
    if request.require and wish.required == math.inf:
        required = ", ".join(request.require)
        reasons.append(Reason("not_required", f"requires a {cell.requested_as} in ({required}), got {cell.name}"))
    if cell.opt_in and not wish.is_named:
        reasons.append(Reason("opt_in", "is opt-in: name it in require or prefer"))
    reasons.extend(facts)
    try:
        predicate = cell.implementation.unsupported_reasons
        texts: object = predicate(platform=platform, **asked) if is_asked else ()
        if not isinstance(texts, Iterable) or isinstance(texts, (str, bytes, Mapping)):
            raise TypeError(f"it has to return a list of texts, got {shown(texts)}")
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"it has to return a list of texts, got one with {shown(text)}")
            reasons.append(Reason("backend", clause(text)))
    except BaseException as error:  # A predicate that raises is a bug of that backend, not of the dispatcher.
        if stops_the_process(error):
            raise
        reasons.append(Reason("predicate_error", f"its {cell.predicate} raised {described(error)}"))
    return {
        "rule": rule.text if rule else cell.rules_text,
        "priority": cell.priority,
        "origin": cell.origin,
        "origin_version": cell.origin_version,
        "reasons": tuple(reasons),
        # Requirements are assumed to be met on a named platform.
        "assumes": () if platform.probed else (*cell.requires, *map(_probe_name, cell.probes)),
    }


def _outranking(decisions: Sequence[Decision], cells: Sequence[BackendCell], is_measured: bool) -> list[str]:
    """A line for each backend of another distribution that fits with a priority above every built-in cell's."""
    highest = max((cell.priority for cell in cells if cell.origin == BUILTIN), default=math.inf)
    above: dict[str, Decision] = {}
    for decision in decisions:
        if decision.accepted and decision.origin != BUILTIN and decision.priority > highest:
            above.setdefault(decision.backend, decision)
    where = "where no measured times choose another" if is_measured else "wherever it fits"
    return [
        f"backend {name!r} of {one.provider} has priority {one.priority}, above every built-in backend's (at most "
        f"{highest}): it goes first {where}; --deny {name} does without it"
        for name, one in above.items()
    ]


def _restoring(problem: MoEProblem, decisions: Sequence[Decision]) -> list[str]:
    """A line on how a quantized layer trains, if it does."""
    if not decisions or not decisions[0].accepted or problem.computed_as(decisions[0].scheme) is problem:
        return []
    activations = " and quantizes no activations" if problem.quant.activation is not None else ""
    return [
        f"each call, forward and backward, restores {problem.quant.name} weights to {problem.dtype}{activations}; to "
        "infer, make a kernel of the problem without gradients"
    ]


def rank(decisions: Iterable[Decision], request: Request) -> tuple[Decision, ...]:
    """Best first.

    Accepted before rejected; kernels before emulation; preferred names in their order, then required ones in theirs;
    then priority, name, class. Rejected ones by the number of reasons, nearest to fitting first.
    """

    def key(decision: Decision) -> tuple[Any, ...]:
        wish = request.preference(decision.backend)
        return (
            len(decision.reasons),
            decision.tier != "kernel",
            wish.preferred,
            wish.required,
            -decision.priority,
            decision.backend,
            decision.experts,
            decision.rule,
        )

    return tuple(sorted(decisions, key=key))


def clause(reason: str) -> str:
    """A backend's reason on one line that can be printed."""
    return one_line(reason) or "no text"


_PROBING: Final = threading.RLock()
"""Threads that ask at once wait for one. A probe may select in turn."""

_ANSWERS: Final[dict[tuple[Probe, Platform], Reason | None]] = {}
"""A machine does not change while a process runs, and a probe may take seconds."""


def ask_probe(probe: Probe, platform: Platform) -> Reason | None:
    """The reason by which a probe says that a cell cannot run there, or None; it runs once a platform."""
    key = (probe, platform)
    if key not in _ANSWERS:
        with _PROBING:
            if key not in _ANSWERS:
                _ANSWERS[key] = _answer(probe, platform)
    return _ANSWERS[key]


def _answer(probe: Probe, platform: Platform) -> Reason | None:
    try:
        text: object = probe(platform)
    except BaseException as error:  # As with predicates: the bug of one backend must not affect the others.
        if stops_the_process(error):
            raise
        return Reason("predicate_error", f"its {_probe_name(probe)} raised {described(error)}")
    if text is None:
        return None
    # An empty text is no reason, nor does it say that all is well.
    if not isinstance(text, str) or not text.strip():
        return Reason("predicate_error", f"its {_probe_name(probe)} has to return a text or None, got {shown(text)}")
    return Reason("probe", clause(text))


def _probe_name(probe: Probe) -> str:
    return f"probe {getattr(probe, '__name__', type(probe).__name__)}"


def requirement_reasons(
    cell: Cell, rule: PlatformRule | None, platform: Platform, is_asked: bool = True
) -> list[Reason]:
    """Why a cell cannot run on a platform for any problem; a named platform is assumed to meet packages and probes.

    Takes the cell's rule for the platform, if any. Its probes run if it `is_asked`.
    """
    reasons: list[Reason] = []
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({cell.rules_text}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None and is_asked and cell.probes:
            reasons.extend(reason for probe in cell.probes if (reason := ask_probe(probe, platform)))
    return reasons


@functools.lru_cache(maxsize=4096)
def _requirement_reason(text: str, version: str | None) -> Reason | None:
    if version is None:
        return Reason("package", f"requires {text}, which is not installed")
    try:
        met = Requirement(text).specifier.contains(version, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else Reason("package", f"requires {text}, got {version}")


@functools.lru_cache(maxsize=256)
def _requirement_name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)

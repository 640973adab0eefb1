"""Choosing a backend: evaluate every cell, rank the accepted ones, say why. Names no backend, arch or scheme."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.arguments import check_instance
from moereg.discovery import current_platform, load_backends
from moereg.errors import (
    ArgumentError,
    MoeregWarning,
    UnsupportedProblemError,
    described,
    one_line,
    shown,
    stops_the_process,
)
from moereg.experts import Reason, fact_reasons
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import BackendCell, Probe
from moereg.request import Names, Request
from moereg.selection import Decision, Selection, rules_text, unsupported_text

__all__ = [
    "Decision",
    "EmulationWarning",
    "Names",
    "Request",
    "Selection",
    "evaluate",
    "explain_backends",
    "machine_reasons",
    "rank",
    "select_backend",
]

logger: Final = logging.getLogger("moereg")


class EmulationWarning(MoeregWarning):
    """Only an emulation fits: right numbers, not the speed of the scheme."""


@functools.lru_cache(maxsize=4096)
def _requirement_reason(text: str, version: str | None) -> Reason | None:
    requirement = Requirement(text)
    if version is None:
        return Reason("package", f"requires {text}, which is not installed")
    try:
        met = requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        met = False
    if not met:
        return Reason("package", f"requires {text}, got {version}")
    return None


@functools.lru_cache(maxsize=256)
def _requirement_name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)


# Of one predicate, which may be a generator without an end, and characters of one reason.
_MOST_REASONS: Final = 100
_LONGEST_REASON: Final = 2000

_PROBED: Final[dict[tuple[Probe, Platform], Reason | None]] = {}
# Probes may be slow: threads that select at once wait for one. Reentrant, since a probe may select in turn.
_PROBING: Final = threading.RLock()


def _probe_reason(probe: Probe, platform: Platform) -> Reason | None:
    key = (probe, platform)
    if key not in _PROBED:
        with _PROBING:
            if key not in _PROBED:
                _PROBED[key] = _run_probe(probe, platform)
    return _PROBED[key]


def _run_probe(probe: Probe, platform: Platform) -> Reason | None:
    try:
        text: object = probe(platform)
    except BaseException as error:  # As for predicates: the bug of one backend must not take the others down.
        if stops_the_process(error):
            raise
        return Reason("predicate_error", f"its probe {_probe_name(probe)} raised {described(error)}")
    return None if text is None else Reason("probe", _as_text(text))


def _probe_name(probe: Probe) -> str:
    return getattr(probe, "__name__", type(probe).__name__)


def _as_text(reason: object) -> str:
    """What a backend gave as its reason, on one line that can be printed."""
    return one_line(reason, _LONGEST_REASON) if isinstance(reason, str) else shown(reason)


def evaluate(cell: BackendCell, problem: MoEProblem, platform: Platform, request: Request) -> Decision:
    """Every reason against one cell. Pure but for probes, which run once for a probed platform."""
    reasons: list[Reason] = []
    assumes: list[str] = []
    scheme = cell.scheme_for(problem.quant)
    rule = cell.rule_for(platform)
    if scheme is None:
        of_these_weights = [known.name for known in cell.schemes if known.weight == problem.quant.weight]
        rule_text = f"weights in ({', '.join(known.name for known in cell.schemes)})"
        if of_these_weights:
            rule_text = f"activations as in ({', '.join(of_these_weights)})"
        reasons.append(Reason("quant_scheme", f"requires {rule_text}, got {problem.quant.description}"))
    reasons.extend(machine_reasons(cell, platform))
    if not platform.probed:
        assumes = [*cell.requires, *(f"probe {_probe_name(probe)}" for probe in cell.probes)]
    reasons.extend(_request_reasons(cell, request))
    reasons.extend(fact_reasons(cell.facts, problem))
    if scheme is not None and problem.exact_activations and scheme.activation != problem.quant.activation:
        reasons.append(
            Reason("precision", f"requires activations as {problem.quant.name} has them, got {scheme.name} instead")
        )
    try:
        texts: object = cell.experts.unsupported_reasons(problem, platform)
        if not isinstance(texts, Iterable) or isinstance(texts, str):
            raise TypeError(f"it has to return a list of texts, got {shown(texts)}")
        reasons.extend([Reason("backend", _as_text(text)) for text in itertools.islice(texts, _MOST_REASONS)])
    except BaseException as error:  # A predicate that raises is a bug of that backend, not of the dispatcher.
        if stops_the_process(error):
            raise
        reasons.append(Reason("predicate_error", f"its predicate raised {described(error)}"))
    return Decision(
        backend=cell.name,
        experts=cell.class_name,
        rule=rule.text if rule else rules_text(cell),
        computes=(scheme or cell.schemes[0]).name,
        priority=cell.priority,
        tier=cell.tier,
        origin=cell.origin,
        reasons=tuple(reasons),
        assumes=tuple(assumes),
        cell=cell,
    )


def machine_reasons(cell: BackendCell, platform: Platform) -> list[Reason]:
    """Why a cell cannot run on a platform whatever the problem; a named platform assumes packages and probes met."""
    reasons: list[Reason] = []
    rule = cell.rule_for(platform)
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({rules_text(cell)}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None:
            reasons.extend(reason for probe in cell.probes if (reason := _probe_reason(probe, platform)))
    return reasons


def _request_reasons(cell: BackendCell, request: Request) -> Iterable[Reason]:
    if cell.name in request.deny:
        yield Reason("denied", f"denied by the request ({', '.join(request.deny)})")
    if request.require and cell.name not in request.require:
        yield Reason("not_required", f"requires a backend in ({', '.join(request.require)}), got {cell.name}")
    if cell.opt_in and cell.name not in (*request.require, *request.prefer):
        yield Reason("opt_in", "is opt-in: name it in require or prefer")


def _candidates(cells: Sequence[BackendCell], problem: MoEProblem, platform: Platform) -> list[BackendCell]:
    """Cells whose weights are the problem's; for a backend without any, all of its cells.

    Of the cells of one experts class and scheme whose rules match the platform, only the most specific stands.
    """
    standing: list[BackendCell] = []
    best: dict[tuple[str, type, str], tuple[int, BackendCell]] = {}
    names = set()
    for cell in cells:
        scheme = cell.scheme_for(problem.quant)
        if scheme is None:
            continue
        names.add(cell.name)
        rule = cell.rule_for(platform)
        if rule is None:
            standing.append(cell)
            continue
        key = (cell.name, cell.experts, scheme.name)
        if key not in best or rule.specificity > best[key][0]:
            best[key] = (rule.specificity, cell)
    standing += [cell for _, cell in best.values()]
    return [*standing, *(cell for cell in cells if cell.name not in names)]


def rank(decisions: Iterable[Decision], request: Request) -> tuple[Decision, ...]:
    """Best first; pure.

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


def explain_backends(
    problem: MoEProblem,
    platform: Platform | str | None = None,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
) -> Selection:
    """As `select_backend`, but returns the selection with no winner where nothing fits."""
    check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
    load_backends()  # First: plugins may bring the kind of machine that the platform's name says.
    if platform is None:
        platform = current_platform()
    elif isinstance(platform, str):
        platform = Platform.from_name(platform)
    elif not isinstance(platform, Platform):
        raise ArgumentError(f"platform must be a Platform or a name such as 'cuda:sm90', got {shown(platform)}")
    request = Request.resolve(problem.quant.name, require, prefer, deny)
    cells = _candidates(load_backends().cells, problem, platform)
    decisions = rank((evaluate(cell, problem, platform, request) for cell in cells), request)
    source = None
    if decisions and decisions[0].accepted:
        source = "required" if request.require else "priority"
        if not request.require and decisions[0].backend in request.prefer:
            source = "preferred"
    return Selection(problem, platform, request, decisions, source)


def select_backend(
    problem: MoEProblem,
    platform: Platform | str | None = None,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
) -> Selection:
    """Chooses the backend for a problem. Imports no kernel library and initializes no device; thread-safe.

    Args:
        problem: The layer.
        platform: A value, a name such as `cuda:sm100`, or None for the machine at hand.
        require: One of these backends or an error. MOEREG_REQUIRE means the same.
        prefer: These go first. MOEREG_PREFER means the same.
        deny: None of these. MOEREG_DENY adds to it.

    Returns:
        The selection, with a winner.

    Raises:
        UnsupportedProblemError: Nothing fits; carries the selection and says every backend's reasons.
        ArgumentError: The problem or the platform is something else.
        RequestError: A name is both required and denied, or something is no name.
        UnknownNameError: A backend, scheme or platform is not known.
    """
    selection = explain_backends(problem, platform, require, prefer, deny)
    winner = selection.winner
    if winner is None:
        raise UnsupportedProblemError(unsupported_text(selection), selection)
    if winner.tier == "emulation":
        warnings.warn(
            f"only an emulation fits {problem} on {selection.platform}: {winner.backend}; "
            "its numbers are right, its speed is not the scheme's",
            EmulationWarning,
            stacklevel=2,
        )
    _log_once(selection, winner)
    return selection


_LOGGED: Final[set[tuple[MoEProblem, str, str]]] = set()


def _log_once(selection: Selection, winner: Decision) -> None:
    key = (selection.problem, str(selection.platform), winner.backend)
    if key in _LOGGED:
        return
    _LOGGED.add(key)
    others = [decision.backend for decision in selection.decisions[1:] if decision.accepted]
    logger.info(
        "MoE %s on %s: %s (%s), computes %s, by %s; next: %s",
        selection.problem,
        selection.platform,
        winner.backend,
        winner.experts,
        winner.computes,
        selection.source,
        ", ".join(others) or "none",
    )

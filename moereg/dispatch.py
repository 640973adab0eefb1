"""Choosing a backend: evaluate every cell, rank the accepted ones, say why. Names no backend, arch or scheme."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.discovery import check_backend_names, current_platform, load_backends
from moereg.errors import (
    MoeregWarning,
    RequestError,
    UnknownSchemeError,
    UnsupportedProblemError,
    unknown_name_message,
)
from moereg.experts import Reason, fact_reasons
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES
from moereg.registry import BackendCell, Probe

__all__ = ["Decision", "EmulationWarning", "Names", "Request", "Selection", "evaluate", "rank", "select_backend"]

SCHEMA: Final = 1
logger: Final = logging.getLogger("moereg")

Names = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""`"triton"`, `("triton", "torch")`, `"nvfp4=flashinfer_cutlass,unquantized=triton"`, or `{"nvfp4": "triton"}`."""


class EmulationWarning(MoeregWarning):
    """Only an emulation fits: right numbers, not the speed of the scheme."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What was asked for, resolved for one scheme.

    Attributes:
        require: Backends of which one must be used; empty for any.
        prefer: Backends that go first, in this order.
        deny: Backends that must not be used.
    """

    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @classmethod
    def resolve(
        cls,
        scheme: str,
        require: Names = None,
        prefer: Names = None,
        deny: Names = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Request:
        """Joins arguments and environment: for require and prefer arguments win, denials add up.

        A value for the scheme beats a value for all schemes of the same source.

        Raises:
            RequestError: A name is both required and denied.
            UnknownNameError: A backend or scheme is not known.
        """
        request = cls(
            require=_names_for(scheme, require) or _names_for(scheme, environ.get("MOEREG_REQUIRE")),
            prefer=_names_for(scheme, prefer) or _names_for(scheme, environ.get("MOEREG_PREFER")),
            deny=_all_names_for(scheme, deny, environ.get("MOEREG_DENY")),
        )
        check_backend_names((*request.require, *request.prefer, *request.deny))
        if both := sorted(set(request.require) & set(request.deny)):
            raise RequestError(f"backend {both[0]!r} is both required and denied; remove it from one of the two")
        return request

    def to_dict(self) -> dict[str, list[str]]:
        """Lists by word."""
        return {"require": list(self.require), "prefer": list(self.prefer), "deny": list(self.deny)}


def _by_scheme(names: Names) -> dict[str, tuple[str, ...]]:
    """Names by scheme; `""` is every scheme."""
    if isinstance(names, Mapping):
        found = {scheme: _split(value) for scheme, value in names.items()}
    else:
        found = {}
        for item in _split(names or ()):
            scheme, _, name = (part.strip() for part in item.rpartition("="))
            if name:
                found[scheme] = (*found.get(scheme, ()), name)
    known = {*QUANT_SCHEMES, *(scheme.name for cell in load_backends().cells for scheme in cell.schemes)}
    for scheme in found:
        if scheme and scheme not in known:
            raise UnknownSchemeError(unknown_name_message("quant scheme", scheme, known))
    return found


def _split(names: str | Sequence[str]) -> tuple[str, ...]:
    items = names.split(",") if isinstance(names, str) else names
    return tuple(item.strip() for item in items if item.strip())


def _names_for(scheme: str, names: Names) -> tuple[str, ...]:
    found = _by_scheme(names)
    return found.get(scheme) or found.get("", ())


def _all_names_for(scheme: str, *sources: Names) -> tuple[str, ...]:
    denied: dict[str, None] = {}
    for names in sources:
        found = _by_scheme(names)
        denied.update(dict.fromkeys((*found.get(scheme, ()), *found.get("", ()))))
    return tuple(denied)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What became of one candidate.

    Attributes:
        backend: Its name.
        experts: Name of the experts class.
        rule: The platform rule that matched, or all of the cell's where none did.
        computes: Scheme that it would compute.
        priority, tier, origin: The cell's.
        reasons: Every reason against it; empty means accepted, exactly one means one change away.
        assumes: For a named platform: what was taken as met.
        cell: The cell itself; None after a JSON round trip on a machine that lacks it.
    """

    backend: str
    experts: str
    rule: str
    computes: str
    priority: int
    tier: str
    origin: str
    reasons: tuple[Reason, ...] = ()
    assumes: tuple[str, ...] = ()
    cell: BackendCell | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    def to_dict(self) -> dict[str, Any]:
        """As `moereg explain --json` shows it."""
        return {
            "backend": self.backend,
            "experts": self.experts,
            "rule": self.rule,
            "computes": self.computes,
            "accepted": self.accepted,
            "priority": self.priority,
            "tier": self.tier,
            "origin": self.origin,
            "assumes": list(self.assumes),
            "reasons": [{"code": reason.code, "text": reason.text} for reason in self.reasons],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Decision:
        """Inverse of `to_dict`; looks the cell up where it is registered here."""
        keywords = {key: value for key, value in values.items() if key != "accepted"}
        keywords["reasons"] = tuple(Reason(**reason) for reason in values["reasons"])
        keywords["assumes"] = tuple(values["assumes"])
        cells = [
            cell
            for cell in load_backends().by_name(values["backend"])
            if cell.class_name == values["experts"]
            and values["computes"] in {scheme.name for scheme in cell.schemes}
            and values["rule"] in {_rules_text(cell), *(rule.text for rule in cell.rules)}
        ]
        return cls(**keywords, cell=cells[0] if cells else None)


@dataclasses.dataclass(frozen=True)
class Selection:
    """The outcome for one problem on one platform.

    Attributes:
        problem: What was asked.
        platform: What it was asked for; `platform.probed` says whether it is the machine at hand.
        request: The resolved request.
        decisions: Every candidate, best first, rejected after accepted, nearest to fitting first.
        source: Why the first one won: `required`, `preferred`, `measured` or `priority`; None where nothing fits.
    """

    problem: MoEProblem
    platform: Platform
    request: Request
    decisions: tuple[Decision, ...]
    source: str | None

    @property
    def winner(self) -> Decision | None:
        """The chosen candidate, or None where nothing fits."""
        return self.decisions[0] if self.decisions and self.decisions[0].accepted else None

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.winner.backend if self.winner else None

    @property
    def plan(self) -> tuple[tuple[int | None, Decision], ...]:
        """(most tokens, candidate) ranges; one open range unless measured."""
        return ((None, self.winner),) if self.winner else ()

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that would run the same kernel for the same layer; a hexadecimal digest."""
        problem = self.problem.to_dict()
        # Ranks may hold different numbers of experts and still have to agree on everything else.
        for field in ("num_local_experts", "max_num_tokens"):
            problem.pop(field, None)
        winner = self.winner
        chosen = (winner.backend, winner.experts, winner.computes, winner.origin) if winner else None
        text = json.dumps([problem, str(self.platform), chosen], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """As `moereg explain --json` prints it."""
        return {
            "schema": SCHEMA,
            "problem": self.problem.to_dict(),
            "platform": str(self.platform),
            "platform_source": "probed" if self.platform.probed else "named",
            "request": self.request.to_dict(),
            "selected": self.backend,
            "source": self.source,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Selection:
        """Inverse of `to_dict`. A probed platform comes back as its name, marked probed."""
        if values.get("schema") != SCHEMA:
            raise ValueError(f"a selection must have schema {SCHEMA}, got {values.get('schema')!r}; write it again")
        platform = Platform.from_name(values["platform"])
        return cls(
            problem=MoEProblem.from_dict(values["problem"]),
            platform=dataclasses.replace(platform, probed=values["platform_source"] == "probed"),
            request=Request(**{word: tuple(names) for word, names in values["request"].items()}),
            decisions=tuple(Decision.from_dict(decision) for decision in values["decisions"]),
            source=values["source"],
        )

    def table(self) -> str:
        """The decision table as plain text, one candidate a line and its reasons below."""
        lines = [f"problem   {self.problem}", f"platform  {self.platform}"]
        for decision in nearest_by_backend(self.decisions):
            mark = "chosen" if decision is self.winner else "fits" if decision.accepted else "rejected"
            lines.append(
                f"{mark:9} {decision.backend} ({decision.experts}, {decision.rule}, computes {decision.computes}, "
                f"priority {decision.priority})"
            )
            lines.extend(f"{'':10}- {reason.text} [{reason.code}]" for reason in decision.reasons)
        return "\n".join(lines)


def nearest_by_backend(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Every accepted candidate, and of a backend with none the one with the fewest reasons."""
    shown: list[Decision] = []
    seen: set[str] = set()
    for decision in decisions:
        if decision.accepted or decision.backend not in seen:
            shown.append(decision)
        seen.add(decision.backend)
    return tuple(shown)


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
        text = probe(platform)
    except Exception as error:  # As for predicates: the bug of one backend must not take the others down.
        return Reason("predicate_error", f"its probe {_probe_name(probe)} raised {type(error).__name__}: {error}")
    return None if text is None else Reason("probe", text)


def _probe_name(probe: Probe) -> str:
    return getattr(probe, "__name__", type(probe).__name__)


def _rules_text(cell: BackendCell) -> str:
    return ", ".join(rule.text for rule in cell.rules)


def evaluate(cell: BackendCell, problem: MoEProblem, platform: Platform, request: Request) -> Decision:
    """Every reason against one cell. Pure but for probes, which run once for a probed platform."""
    reasons: list[Reason] = []
    assumes: list[str] = []
    scheme = cell.scheme_for(problem.quant)
    rule = cell.rule_for(platform)
    if scheme is None:
        computed = ", ".join(known.name for known in cell.schemes)
        reasons.append(Reason("quant_scheme", f"requires weights in ({computed}), got {problem.quant.name}"))
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({_rules_text(cell)}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None:
            reasons.extend(reason for probe in cell.probes if (reason := _probe_reason(probe, platform)))
    else:
        assumes = [*cell.requires, *(f"probe {_probe_name(probe)}" for probe in cell.probes)]
    reasons.extend(_request_reasons(cell, request))
    reasons.extend(fact_reasons(cell.facts, problem))
    if scheme is not None and problem.exact_activations and scheme != problem.quant:
        reasons.append(
            Reason("precision", f"requires activations as {problem.quant.name} has them, got {scheme.name} instead")
        )
    try:
        texts: object = cell.experts.unsupported_reasons(problem, platform)
        if not isinstance(texts, Iterable) or isinstance(texts, str):
            raise TypeError(f"it has to return a list of texts, got {texts!r}")
        reasons.extend([Reason("backend", text) for text in texts])
    except Exception as error:  # A predicate that raises is a bug of that backend, not of the dispatcher.
        reasons.append(Reason("predicate_error", f"its predicate raised {type(error).__name__}: {error}"))
    return Decision(
        backend=cell.name,
        experts=cell.class_name,
        rule=rule.text if rule else _rules_text(cell),
        computes=(scheme or cell.schemes[0]).name,
        priority=cell.priority,
        tier=cell.tier,
        origin=cell.origin,
        reasons=tuple(reasons),
        assumes=tuple(assumes),
        cell=cell,
    )


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
    if platform is None:
        platform = current_platform()
    elif isinstance(platform, str):
        platform = Platform.from_name(platform)
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
    """Chooses the backend for a problem. Imports no kernel library and initialises no device; thread-safe.

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
        RequestError: A name is both required and denied.
        UnknownNameError: A backend, scheme or platform is not known.
    """
    selection = explain_backends(problem, platform, require, prefer, deny)
    winner = selection.winner
    if winner is None:
        raise UnsupportedProblemError(_unsupported_text(selection), selection)
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


_CURES: Final[dict[str, str]] = {
    "platform": "run on one of those platforms",
    "package": "install that package",
    "probe": "provide what the probe looks for",
    "denied": "take it out of deny",
    "not_required": "add it to require",
    "opt_in": "name it in require or prefer",
    "quant_scheme": "use a checkpoint of that scheme",
    "activation": "use that activation, if the model allows",
    "swiglu_limit": "there is no cure but another backend",
    "bias": "there is no cure but another backend",
    "dtype": "load the layer in one of those dtypes",
    "activation_format": "use that activation format",
    "placement": "place experts that way",
    "router_weight_on_input": "there is no cure but another backend",
    "alignment": "pad the weights to that multiple",
    "size": "split the layer over more ranks or the call over more calls",
    "graph_capture": "run without graph capture",
    "deterministic": "ask without deterministic",
    "precision": "ask without exact_activations",
    "backend": "change that fact of the problem",
    "predicate_error": "report the bug to that backend's authors",
}


def _unsupported_text(selection: Selection) -> str:
    lines = [f"no backend fits {selection.problem} on {selection.platform}"]
    nearest = nearest_by_backend(selection.decisions)
    if nearest and len(nearest[0].reasons) == 1:
        reason = nearest[0].reasons[0]
        lines[0] += f"; nearest is {nearest[0].backend}: {reason.text} ({_CURES[reason.code]})"
    for decision in nearest:
        reasons = "; ".join(reason.text for reason in decision.reasons)
        lines.append(f"  {decision.backend} ({decision.experts}): {reasons}")
    if not nearest:
        lines.append("  no backend is registered")
    return "\n".join(lines)

"""The outcome of selecting: a decision for every candidate, as data, as a table and as an error text."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec

from moereg.arguments import check_one_of, within
from moereg.errors import ArgumentError, shown
from moereg.evidence.on_machine import ADMITTED_TIER
from moereg.evidence.store import check_schema
from moereg.platforms import Platform
from moereg.registry import BUILTIN, HIGHEST_PRIORITY, TIERS, BackendCell, provider
from moereg.runtime.json_types import Count, Text, Whole, convert, decode
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.spec.reasons import CURES, Reason

SCHEMA: Final = 1
"""Version of all JSON that moereg writes."""

EVIDENCE: Final = ("", ADMITTED_TIER)
"""Evidence of this machine in a decision."""

_DEVICE: Final = ("arch", "device_name", "memory_bytes")
"""Fields of a platform that its name does not say."""

SOURCES: Final = ("required", "preferred", "measured", "priority")
"""Why a candidate may win."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on one candidate, a backend or a token dispatcher; `priority` and `origin` are its cell's.

    Attributes:
        rule: The platform rule that matched, or all of the cell's if none did.
        reasons: Every reason against it; empty means accepted, exactly one means one change away.
        assumes: For a named platform: requirements that are assumed to be met.
    """

    rule: str
    priority: int
    origin: str
    origin_version: str = ""
    reasons: tuple[Reason, ...] = ()
    assumes: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reasons

    @property
    def provider(self) -> str:
        """The distribution with its version that it comes from, or `builtin`."""
        return provider(self.origin, self.origin_version)

    @property
    def of_wheel(self) -> str:
        """` of` the distribution that it comes from, for texts; empty for moereg's own."""
        return "" if self.origin == BUILTIN else f" of {self.provider}"

    def shared_fields(self) -> dict[str, Any]:
        """The end of `to_dict` of every kind."""
        return {
            "origin": self.origin,
            "origin_version": self.origin_version,
            "assumes": list(self.assumes),
            "reasons": [{"code": reason.code, "text": reason.text} for reason in self.reasons],
        }

    def nearest(self, name: str) -> str:
        """A clause on the cure where it is one change away, for an error; else empty."""
        if len(self.reasons) != 1:
            return ""
        (reason,) = self.reasons
        return f"; nearest is {name}: {reason.text} ({CURES[reason.code]})"

    def rows(self, about: str, is_chosen: bool) -> list[str]:
        """Its rows of a decision table: what it is about, and each reason below."""
        mark = "chosen" if is_chosen else "fits" if self.accepted else "rejected"
        return [f"{mark:9} {about}", *(f"{'':10}- {reason.text} [{reason.code}]" for reason in self.reasons)]


V = TypeVar("V", bound=Verdict)


@dataclasses.dataclass(frozen=True)
class Choice(Generic[V]):
    """Common part of selections of backends and of token dispatchers."""

    problem: MoEProblem
    platform: Platform
    request: Request
    decisions: tuple[V, ...] = dataclasses.field(repr=False)

    @property
    def winner(self) -> V | None:
        """The chosen candidate, or None if nothing fits."""
        return self.decisions[0] if self.decisions and self.decisions[0].accepted else None

    @property
    def chosen(self) -> V:
        """The winner of a selection that has one."""
        assert self.winner is not None
        return self.winner

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision(Verdict):
    """The verdict on one backend's candidate. Further attributes are those of `Verdict`.

    Attributes:
        backend, experts, tier: Name of the cell and of its experts class, and the cell's tier.
        computes: Scheme that it would compute.
        evidence: `admitted` if it passed its first check on this machine, else empty. Ledgers say what was verified.
        cell: The cell; None if JSON was read on a machine without it.
        scheme: `computes` as a value; None if the cell cannot read the problem's weights.
    """

    backend: str
    experts: str
    computes: str
    tier: str
    evidence: str = ""
    cell: BackendCell | None = dataclasses.field(default=None, compare=False, repr=False)
    scheme: QuantScheme | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """Its backend and class, and the distribution of others: `torch (TorchPackedExperts)`."""
        return f"{self.backend} ({self.experts}){self.of_wheel}"

    def to_dict(self) -> dict[str, Any]:
        """As `moereg explain --json` shows it."""
        own = ("backend", "experts", "rule", "computes", "accepted", "priority", "tier", "evidence")
        return {**{name: getattr(self, name) for name in own}, **self.shared_fields()}


class _Decision(msgspec.Struct):
    backend: Text
    experts: Text
    rule: Text
    computes: Text
    accepted: bool
    priority: Annotated[int, msgspec.Meta(ge=-HIGHEST_PRIORITY, le=2**63 - 1)]
    tier: str
    origin: Text
    evidence: str = ""
    origin_version: Text = ""
    assumes: tuple[Text, ...] = ()
    reasons: tuple[Reason, ...] = ()

    def read(self, name: str, cells: Iterable[BackendCell]) -> Decision:
        """The decision with its cell, if that is among these."""
        check_one_of(f"{name}.tier", self.tier, TIERS)
        check_one_of(f"{name}.evidence", self.evidence, EVIDENCE)
        if self.accepted is bool(self.reasons):
            rule = f"accepted must be {not self.reasons} with {len(self.reasons)} reasons"
            raise ArgumentError(f"{name}.{rule}, got {self.accepted}")
        fields = msgspec.structs.asdict(self)
        del fields["accepted"]
        return _with_cell(Decision(**fields), cells)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    require: tuple[Text, ...]
    prefer: tuple[Text, ...]
    deny: tuple[Text, ...]


class _Range(msgspec.Struct):
    most_tokens: Count | None
    decision: Whole


class _Selection(msgspec.Struct):
    problem: dict[str, Any]
    platform: Text
    platform_source: str
    request: _Request
    selected: Text | None
    source: str | None
    decisions: list[_Decision]
    notices: tuple[Text, ...] = ()
    platform_claimed_by: Text | None = None
    plan: list[_Range] = []
    measured: Text | None = None
    platform_device: dict[str, Any] = {}


def _with_cell(decision: Decision, cells: Iterable[BackendCell]) -> Decision:
    # Cells of one class and rule differ in their facts, which a decision does not say, and so in priority.
    for cell in sorted(cells, key=lambda cell: cell.priority != decision.priority):
        schemes = {scheme.name: scheme for scheme in cell.schemes}
        if (
            (cell.name, cell.class_name) == (decision.backend, decision.experts)
            and decision.computes in schemes
            # If none fits, a decision names the cell's rules or first scheme instead.
            and decision.rule in {cell.rules_text, *(rule.text for rule in cell.rules)}
        ):
            reads = all(reason.code != "quant_scheme" for reason in decision.reasons)
            return dataclasses.replace(decision, cell=cell, scheme=schemes[decision.computes] if reads else None)
    return decision


@dataclasses.dataclass(frozen=True, repr=False)
class Selection(Choice[Decision]):
    """The outcome for one problem on one platform.

    Attributes:
        problem: The layer that was asked about.
        platform: The platform that was asked about; `platform.probed` says whether it is the machine at hand.
        request: The resolved request.
        decisions: Every candidate, best first, rejected after accepted, nearest to fitting first.
        source: Why the first one won, one of `SOURCES`; None if nothing fits.
        notices: What else a user may want to know, one line each: names in the environment that mean nothing here,
            backends of other distributions whose priority is above every built-in's, what was measured and what
            measured times are not used.
        ranges: Where measured times give several numbers of tokens to different candidates: (most tokens, candidate),
            ascending, the last one open and its candidate the first of `decisions`. Else empty.
        measured: Digest of the measured times that chose; empty if none did.
    """

    source: str | None
    notices: tuple[str, ...] = ()
    ranges: tuple[tuple[int | None, Decision], ...] = dataclasses.field(default=(), repr=False)
    measured: str = ""

    def __post_init__(self) -> None:
        if self.ranges in ((), ((None, self.winner),)):
            object.__setattr__(self, "ranges", ())
            return
        *closed, (last, decision) = self.ranges
        limits = [most for most, _ in closed]
        ends = [0, *(most if type(most) is int else 0 for most in limits)]
        if last is not None or decision is not self.winner or any(a >= b for a, b in itertools.pairwise(ends)):
            found = ", ".join(f"{one.backend} to {shown(most)}" for most, one in self.ranges)
            raise ArgumentError(
                f"the plan of a selection must have ranges that ascend, from 1 token up, and end with the winner's, "
                f"which is open, got {found}; select again"
            )

    def __repr__(self) -> str:
        chosen = f"{self.winner.label} by {self.source}" if self.winner else "nothing fits"
        count = sum(one.accepted for one in self.decisions)
        return (
            f"Selection({self.problem} on {self.platform}: {chosen}, {count} of {len(self.decisions)} candidates fit)"
        )

    def _repr_html_(self) -> str:
        rows = [("backend", "platforms", "computes", "priority", "")]
        for one in nearest_by_backend(self.decisions):
            why = "; ".join(reason.text for reason in one.reasons) or ("chosen" if one is self.winner else "fits")
            rows.append((one.label, one.rule, one.computes, str(one.priority), why))
        lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
        return f"<table><caption>{html.escape(repr(self))}</caption><tr>{'<tr>'.join(lines)}</table>"

    @property
    def backend(self) -> str | None:
        """Name of the chosen backend."""
        return self.winner.backend if self.winner else None

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The other backends that fit, or that only a request for others rules out: accepted first, best first."""
        return self._spared({"not_required"})

    @property
    def instead(self) -> str:
        """`triton or torch`, the alternatives; where there are none, `require='aiter'` for backends that are opt-in."""
        return " or ".join(self.alternatives or map("require={!r}".format, self._spared({"not_required", "opt_in"})))

    def _spared(self, codes: set[str]) -> tuple[str, ...]:
        names = [one.backend for one in self.decisions if {reason.code for reason in one.reasons} <= codes]
        return tuple(dict.fromkeys(name for name in names if name != self.backend))

    @property
    def plan(self) -> tuple[tuple[int | None, Decision], ...]:
        """(most tokens, candidate) ranges; one open range unless measured."""
        return self.ranges or (((None, self.winner),) if self.winner else ())

    @property
    def plan_text(self) -> str:
        """The ranges as one line, such as `triton to 255 tokens, humming to 1024, triton above`; empty for one."""
        if not self.ranges:
            return ""
        runs = {(one.backend, one.experts) for _, one in self.ranges}
        is_told = len({backend for backend, _ in runs}) == len(runs)
        names = [one.backend if is_told else one.experts for _, one in self.ranges]
        limits = [f"to {most}" for most, _ in self.ranges[:-1]]
        return ", ".join(
            f"{name} {limit}" for name, limit in zip(names, [f"{limits[0]} tokens", *limits[1:], "above"], strict=True)
        )

    @property
    def fingerprint(self) -> str:
        """Equal on ranks that would run the same kernel, with the same evidence, for the same layer; hexadecimal."""
        problem = self.problem.to_dict()
        # Ranks may hold different numbers of experts, and must agree on everything else.
        for field in ("num_local_experts", "max_num_tokens"):
            problem.pop(field, None)
        plan = [(most, *_identity(decision)) for most, decision in self.plan]
        # A plan for all numbers of tokens that nothing measured is its winner alone.
        chosen = [plan, self.measured] if self.ranges or self.measured else plan and plan[0][1:]
        text = json.dumps([problem, str(self.platform), chosen or None], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def refusal(self) -> str:
        """Why nothing fits: the problem, the cheapest cure, then each backend's reasons, nearest first."""
        lines = [f"no backend fits {self.problem} on {self.platform}"]
        nearest = nearest_by_backend(self.decisions)
        if nearest and all(any(reason.code == "quant_scheme" for reason in decision.reasons) for decision in nearest):
            lines[0] += "; no backend computes this scheme: use a checkpoint of one that is named below"
        elif nearest:
            lines[0] += nearest[0].nearest(nearest[0].backend)
        if self.request.require and self.instead:
            lines[0] += f"; {'without the request, ' if self.alternatives else ''}{self.instead} would do"
        # Whoever requires some asks about these alone.
        for decision in [one for one in nearest if all(why.code != "not_required" for why in one.reasons)] or nearest:
            reasons = "; ".join(reason.text for reason in decision.reasons)
            lines.append(f"  {decision.label}: {reasons}")
        return "\n".join(lines if nearest else [*lines, "  no backend is registered"])

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
            "notices": list(self.notices),
            "platform_claimed_by": self.platform.claimed_by or None,
            "plan": [{"most_tokens": most, "decision": self.decisions.index(decision)} for most, decision in self.plan],
            "measured": self.measured or None,
            "platform_device": {name: getattr(self.platform, name) for name in _DEVICE},
        }

    @classmethod
    def from_json(cls, text: str | bytes, cells: Iterable[BackendCell] | None = None) -> Selection:
        """Inverse of `to_json`.

        Args:
            text: The JSON.
            cells: As in `from_dict`.

        Raises:
            ArgumentError: The text is no JSON, or `from_dict` refuses it.
        """
        return cls.from_dict(decode(text, Any, "a selection's JSON", "; write it again"), cells)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], cells: Iterable[BackendCell] | None = None) -> Selection:
        """Inverse of `to_dict`. A probed platform comes back without versions.

        Unknown fields of the selection and of its decisions are ignored; unknown fields of its problem or request are
        refused.

        Args:
            values: The fields.
            cells: Where their cells are looked up; all that are installed where None, as for a user who reads a file.

        Raises:
            ArgumentError: A field is missing, has another type, or contradicts another; the message has its path.
            UnknownNameError: A scheme, platform, code or tier is not known here.
        """
        check_schema(convert(values, dict[str, Any], "a selection").get("schema"), SCHEMA)
        found: _Selection = convert(values, _Selection, "a selection")
        # Plugins may bring the kind of machine that the platform's name says.
        cells = load_backends().cells if cells is None else tuple(cells)
        platform = within("platform", Platform.from_name, found.platform)
        source = check_one_of("platform_source", found.platform_source, ("probed", "named"))
        device = {name: found.platform_device[name] for name in _DEVICE if name in found.platform_device}
        known = {"probed": source == "probed", "claimed_by": found.platform_claimed_by or ""}
        here = within("platform_device", dataclasses.replace, platform, **known, **device)
        if str(here) != str(platform):
            raise ArgumentError(f"platform_device.arch must be that of {platform}, got {shown(here.arch)}")
        selection = cls(
            problem=within("problem", MoEProblem.from_dict, found.problem),
            platform=here,
            request=Request(**msgspec.structs.asdict(found.request)),
            decisions=tuple(one.read(f"decisions[{place}]", cells) for place, one in enumerate(found.decisions)),
            source=None if found.source is None else check_one_of("source", found.source, SOURCES),
            notices=found.notices,
            measured=found.measured or "",
        )
        if (selection.source is None) is not (selection.winner is None):
            raise ArgumentError(
                f"source must be set if and only if the first decision is accepted, got "
                f"{shown(selection.source)} with {shown(selection.backend)}"
            )
        for place, decision in enumerate(selection.decisions):
            scheme = decision.scheme
            served = selection.problem.computed_as(scheme).quant
            if decision.accepted and scheme is not None and not scheme.serves(served):
                raise ArgumentError(
                    f"decisions[{place}].computes must be a scheme that serves {selection.problem.quant.name}, got "
                    f"{shown(decision.computes)}"
                )
        if found.selected != selection.backend:
            raise ArgumentError(
                f"selected must be the first accepted decision's backend, {shown(selection.backend)}, got "
                f"{shown(found.selected)}"
            )
        for place, one in enumerate(found.plan):
            if one.decision >= len(selection.decisions) or not selection.decisions[one.decision].accepted:
                raise ArgumentError(
                    f"plan[{place}].decision must be the place of an accepted decision, got {one.decision}"
                )
        ranges = tuple((one.most_tokens, selection.decisions[one.decision]) for one in found.plan)
        return dataclasses.replace(selection, ranges=ranges)

    def table(self) -> str:
        """The decision table as plain text, one candidate per line and its reasons below."""
        lines = [f"problem   {self.problem}", f"platform  {self.platform}"]
        for decision in nearest_by_backend(self.decisions):
            facts = f"{decision.rule}, computes {decision.computes}, priority {decision.priority}"
            about = f"{decision.backend} ({decision.experts}{decision.of_wheel}, {facts})"
            lines += decision.rows(about, decision is self.winner)
        lines += [f"plan      {self.plan_text}"] if self.ranges else []
        return "\n".join([*lines, *(f"note      {notice}" for notice in self.notices)])


def _identity(decision: Decision) -> tuple[str, ...]:
    """The parts of a decision that say which kernel runs. Versions count, since kernels of one name may differ."""
    evidence = [decision.evidence] if decision.evidence else []
    return decision.backend, decision.experts, decision.computes, decision.origin, decision.origin_version, *evidence


def nearest_by_backend(decisions: Sequence[Decision]) -> tuple[Decision, ...]:
    """Every accepted candidate, and the nearest one of each backend that has none.

    The nearest has the fewest reasons; among equals it is one that another request would cure, not another machine.
    Packages and probes count last, since cells of other machines were not asked for them.
    If a backend cannot read the weights, list every cell rejected only for that: together they say what it reads.
    """
    nearest: dict[str, Decision] = {}
    for decision in decisions:
        best = nearest.setdefault(decision.backend, decision)
        if _distance(decision) < _distance(best):
            nearest[decision.backend] = decision

    def is_shown(decision: Decision) -> bool:
        first = nearest[decision.backend]
        return decision.accepted or decision is first or (_reads_others(first) and _reads_others(decision))

    return tuple(filter(is_shown, decisions))


def _distance(decision: Decision) -> tuple[int, bool, int]:
    codes = [reason.code for reason in decision.reasons]
    return sum(code not in ("package", "probe") for code in codes), "platform" in codes, len(codes)


def _reads_others(decision: Decision) -> bool:
    codes = {reason.code for reason in decision.reasons}
    # The class's own reasons are about formats that it cannot read.
    return "quant_scheme" in codes and codes <= {"quant_scheme", "backend"}

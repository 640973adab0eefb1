"""The outcome of selecting: a decision for every candidate, as data, as a table and as an error text."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from moereg.discovery import load_backends
from moereg.experts import Reason
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import BackendCell
from moereg.request import Request

__all__ = ["SCHEMA", "Decision", "Selection", "nearest_by_backend", "rules_text", "unsupported_text"]

SCHEMA: Final = 1
"""Of everything that moereg writes as JSON."""


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
            and values["rule"] in {rules_text(cell), *(rule.text for rule in cell.rules)}
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
    """Every accepted candidate, and of a backend with none the one with the fewest reasons.

    Of several with as few, one that another request would cure rather than another machine.
    Of a backend that does not read the weights all that only fail for them: together they say what it reads.
    """
    nearest: dict[str, Decision] = {}
    for decision in decisions:
        best = nearest.setdefault(decision.backend, decision)
        if _distance(decision) < _distance(best):
            nearest[decision.backend] = decision
    shown: list[Decision] = []
    for decision in decisions:
        first = nearest[decision.backend]
        if decision.accepted or decision is first or (_reads_others(first) and _reads_others(decision)):
            shown.append(decision)
    return tuple(shown)


def _distance(decision: Decision) -> tuple[int, bool]:
    return len(decision.reasons), any(reason.code == "platform" for reason in decision.reasons)


def _reads_others(decision: Decision) -> bool:
    codes = {reason.code for reason in decision.reasons}
    # What a class adds is about formats that it cannot read.
    return "quant_scheme" in codes and codes <= {"quant_scheme", "backend"}


def rules_text(cell: BackendCell) -> str:
    """All platform rules of a cell, as one string."""
    return ", ".join(rule.text for rule in cell.rules)


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


def unsupported_text(selection: Selection) -> str:
    """The text of `UnsupportedProblemError`: the problem, the cheapest cure, each backend's reasons, nearest first."""
    lines = [f"no backend fits {selection.problem} on {selection.platform}"]
    nearest = nearest_by_backend(selection.decisions)
    if nearest and all(any(reason.code == "quant_scheme" for reason in decision.reasons) for decision in nearest):
        lines[0] += "; no backend computes this scheme: use a checkpoint of one that is named below"
    elif nearest and len(nearest[0].reasons) == 1:
        reason = nearest[0].reasons[0]
        lines[0] += f"; nearest is {nearest[0].backend}: {reason.text} ({_CURES[reason.code]})"
    for decision in nearest:
        reasons = "; ".join(reason.text for reason in decision.reasons)
        lines.append(f"  {decision.backend} ({decision.experts}): {reasons}")
    if not nearest:
        lines.append("  no backend is registered")
    return "\n".join(lines)

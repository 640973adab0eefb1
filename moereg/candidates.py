"""Candidate: a cell as it meets one problem on one platform, and which cells of a registry are candidates at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moereg.platforms import Platform, PlatformRule
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.registry import BackendCell

__all__ = ["Candidate", "standing"]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A cell with the scheme that it would compute and the rule by which it may run. Resolved once a selection.

    Attributes:
        cell: The cell.
        scheme: What it computes for the problem's weights; None if it cannot read them.
        rule: The most specific of its rules that match the platform; None if none does.
    """

    cell: BackendCell
    scheme: QuantScheme | None
    rule: PlatformRule | None

    @classmethod
    def of(cls, cell: BackendCell, problem: MoEProblem, platform: Platform) -> Candidate:
        """Resolves a cell for a problem on a platform."""
        return cls(cell, cell.scheme_for(problem.quant), cell.rule_for(platform))


def standing(cells: Iterable[BackendCell], problem: MoEProblem, platform: Platform) -> list[Candidate]:
    """Candidates that read the problem's weights; for a backend without any, all of its cells.

    If several cells of one experts class and scheme match the platform, only the one with the most specific rule
    stands.
    """
    computes = [(cell, cell.scheme_for(problem.quant)) for cell in cells]
    readers = {cell.name for cell, scheme in computes if scheme is not None}
    others: list[Candidate] = []
    best: dict[tuple[str, type, str], tuple[int, Candidate]] = {}
    for cell, scheme in computes:
        if scheme is None and cell.name in readers:
            continue
        rule = cell.rule_for(platform)
        candidate = Candidate(cell, scheme, rule)
        if scheme is None or rule is None:
            others.append(candidate)
            continue
        key = (cell.name, cell.experts, scheme.name)
        if key not in best or rule.specificity > best[key][0]:
            best[key] = (rule.specificity, candidate)
    return [*others, *(candidate for _, candidate in best.values())]

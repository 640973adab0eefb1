"""Candidate: a cell as it meets one problem on one platform, and which cells of a registry are candidates at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from moereg.facts import fact_reasons
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
    stands. Of equally specific ones, whose facts no problem can meet at once, those that the problem meets stand; all
    of them where it meets none.
    """
    computes = [(cell, cell.scheme_for(problem.quant)) for cell in cells]
    readers = {cell.name for cell, scheme in computes if scheme is not None}
    others: list[Candidate] = []
    best: dict[tuple[str, type, str], tuple[int, list[Candidate]]] = {}
    for cell, scheme in computes:
        if scheme is None and cell.name in readers:
            continue
        rule = cell.rule_for(platform)
        candidate = Candidate(cell, scheme, rule)
        if scheme is None or rule is None:
            others.append(candidate)
            continue
        key = (cell.name, cell.experts, scheme.name)
        specificity = rule.specificity
        if key not in best or specificity > best[key][0]:
            best[key] = (specificity, [candidate])
        elif specificity == best[key][0]:
            best[key][1].append(candidate)
    return [*others, *(candidate for _, candidates in best.values() for candidate in _meeting(candidates, problem))]


def _meeting(candidates: list[Candidate], problem: MoEProblem) -> list[Candidate]:
    """Those of several candidates whose facts a problem meets, or all where it meets none."""
    if len(candidates) == 1:
        return candidates
    return [candidate for candidate in candidates if not fact_reasons(candidate.cell.facts, problem)] or candidates

"""Evidence of shipped kernels that is older than their code, against the list that says why: `stale_evidence.txt`."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib

from moereg.evidence.ledger import cell_digest, evidence_of
from moereg.plugins.loader import load_backends
from moereg.registry import BUILTIN, BackendCell

LIST = pathlib.Path(__file__).with_name("stale_evidence.txt")


@dataclasses.dataclass(frozen=True)
class Line:
    """One cell on one platform whose evidence is stale.

    Attributes:
        cell: Experts class, first scheme and rule, and the platform of the evidence; cells of a class have no scheme in
            common on one rule.
        digest: Of the code that the line speaks of: code that changes again needs another line.
        date: Since when.
        reason: What changed, and why nobody has run it since.
    """

    cell: str
    digest: str
    date: str
    reason: str


def read_list(text: str) -> tuple[Line, ...]:
    """The lines of the list, without blank lines and comments (`#`).

    Raises:
        ValueError: A line does not say cell, digest, date and reason, or a cell is listed twice.
    """
    lines: dict[str, Line] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        if line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|")]
        if len(parts) != 4 or len(parts[3].split()) < 3:
            raise ValueError(f"a line must say CELL | DIGEST | DATE | REASON, got {line!r}")
        datetime.date.fromisoformat(parts[2])
        if parts[0] in lines:
            raise ValueError(f"{parts[0]!r} is listed twice")
        lines[parts[0]] = Line(*parts)
    return tuple(lines.values())


def stale_cells(cells: tuple[BackendCell, ...]) -> dict[str, tuple[str, str]]:
    """The cells with evidence on a platform that is all stale there: the digest of their code, and its latest date."""
    found: dict[str, tuple[str, str]] = {}
    for cell in cells:
        evidence = evidence_of(cell)
        is_current = {record.platform for record in evidence.current}
        for record in evidence.stale:
            if record.platform not in is_current:
                name = f"{record.experts} {record.schemes[0]} {record.rule} {record.platform}"
                found[name] = cell_digest(cell), max(record.date, found.get(name, ("", ""))[1])
    return found


def disagreements(listed: tuple[Line, ...], stale: dict[str, tuple[str, str]]) -> list[str]:
    """The faults of the list, each as a readable line."""
    names = {line.cell for line in listed if line.cell not in stale or line.digest == stale[line.cell][0]}
    today = datetime.date.today().isoformat()
    return [
        *(
            f"changed since it was run on {stale[name][1]}, and no line says why; run it there with --ledger, or let "
            f"its line say: {name} | {stale[name][0]} | {today} | WHY"
            for name in sorted(set(stale) - names)
        ),
        *(f"its evidence is current or gone; take the line out: {name}" for name in sorted(names - set(stale))),
    ]


def shipped() -> tuple[BackendCell, ...]:
    """moereg's own cells."""
    return tuple(cell for cell in load_backends().cells if cell.origin == BUILTIN)

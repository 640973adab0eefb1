"""The ledger: which cell was verified on which hardware, with which versions, and whether its code is still the same.

A package's ledger is `moereg_ledger.json` at its top level; moereg's own ships with it.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib.resources
import json
import pathlib
from typing import Any, Final

from packaging.requirements import Requirement

from moereg.platforms import Platform
from moereg.registry import BackendCell
from moereg.testing.provenance import provenance

__all__ = ["FILE_NAME", "SCHEMA", "Verification", "code_digest", "merge_ledger", "verifications"]

FILE_NAME: Final = "moereg_ledger.json"
SCHEMA: Final = 1


@dataclasses.dataclass(frozen=True)
class Verification:
    """One cell that passed its conformance cases on one machine.

    Attributes:
        backend, experts: The cell's.
        schemes: Names of what it computes.
        platform: Such as `cuda:sm90`.
        device: As the driver says it.
        versions: Of torch and what the cell requires.
        commit: Of the code, empty where unknown.
        date: ISO.
        cases: Conformance tests that passed; none failed.
        digest: Of the code, `code_digest`.
    """

    backend: str
    experts: str
    schemes: tuple[str, ...]
    platform: str
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    cases: int
    digest: str

    @classmethod
    def of(cls, cell: BackendCell, platform: Platform, cases: int) -> Verification:
        """A record for a cell that has just passed on the machine at hand."""
        return cls(
            backend=cell.name,
            experts=cell.class_name,
            schemes=tuple(scheme.name for scheme in cell.schemes),
            cases=cases,
            digest=code_digest(cell),
            **provenance(platform, {"torch", *(Requirement(text).name for text in cell.requires)}),
        )

    @property
    def key(self) -> tuple[object, ...]:
        """A later record of the same cell on the same device replaces an earlier one."""
        return (self.backend, self.experts, self.schemes, self.platform, self.device)


def code_digest(cell: BackendCell) -> str:
    """A digest of the cell's backend module, private packages beside it and kernels, as far as they are imported.

    Imports anywhere in functions count.
    """
    top = cell.experts.__module__
    kernels = f"{top.partition('.')[0]}.kernels."
    private = f"{top.rpartition('.')[0]}._"
    pending, sources = [top], {}
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        sources[name] = source = _source(name)
        pending += [found for found in _imported_names(source) if found.startswith((kernels, private, f"{top}."))]
    text = "\0".join(sources[name] for name in sorted(sources))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source(module: str) -> str:
    """A module's text, empty where there is no such module. Imports nothing: kernels need their libraries for that."""
    top, *parts = module.split(".")
    try:
        root = pathlib.Path(str(importlib.resources.files(top)))
    except (ModuleNotFoundError, TypeError, ValueError):  # A class of an interactive session has no file.
        return ""
    path = root.joinpath(*parts)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def _imported_names(source: str) -> set[str]:
    """What the import statements name: modules, and for `from a import b` also `a.b`, which may be one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def _read(cell: BackendCell) -> list[dict[str, Any]]:
    package = cell.experts.__module__.partition(".")[0]
    try:
        text = importlib.resources.files(package).joinpath(FILE_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, ModuleNotFoundError, TypeError, ValueError):
        return []
    records: list[dict[str, Any]] = json.loads(text)["records"]
    return records


def verifications(cell: BackendCell) -> list[dict[str, Any]]:
    """Where and when a cell was verified: the ledger's records with `stale`, whether the code has changed since."""
    digest = code_digest(cell)
    schemes = [scheme.name for scheme in cell.schemes]
    return [
        {
            **{key: record[key] for key in ("platform", "device", "versions", "commit", "date", "cases")},
            "stale": record["digest"] != digest,
        }
        for record in _read(cell)
        if (record["backend"], record["experts"], record["schemes"]) == (cell.name, cell.class_name, schemes)
    ]


def merge_ledger(path: pathlib.Path, records: list[Verification]) -> None:
    """Writes records into a ledger file; what is there of other cells and devices stays."""
    known: dict[tuple[object, ...], Verification] = {}
    if path.exists():
        for values in json.loads(path.read_text(encoding="utf-8"))["records"]:
            record = Verification(**{**values, "schemes": tuple(values["schemes"])})
            known[record.key] = record
    known.update({record.key: record for record in records})
    ordered = sorted(
        known.values(), key=lambda record: (record.backend, record.experts, record.platform, record.device)
    )
    document = {"schema": SCHEMA, "records": [dataclasses.asdict(record) for record in ordered]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

"""The ledger: which cells were verified on which hardware and versions, and whether their code is still the same.

A package's ledger is `moereg_ledger.json` at its top level and has records of that package's cells only; moereg ships
its own. A record is evidence for the machine that it names, and for the rule that matched when it was made.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, Final

from packaging.requirements import Requirement
from typing_extensions import Self

from moereg.arguments import check_count, check_date, within
from moereg.errors import ArgumentError, MoeregWarning
from moereg.evidence.code_digest import LEDGER_NAME, UNKNOWN, class_digest, module_file, root_package
from moereg.evidence.provenance import provenance
from moereg.evidence.store import Record, read_once, read_records, records_text
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BUILTIN, REGISTRY, BackendCell
from moereg.spec.facts import narrowed_text

FILE_NAME: Final = LEDGER_NAME
SCHEMA: Final = 2
_PACKAGE: Final = __name__.partition(".")[0]


class LedgerWarning(MoeregWarning):
    """A ledger cannot be read; its cells count as not verified."""


@dataclasses.dataclass(frozen=True)
class Verification(Record):
    """One cell that passed its conformance cases on one machine.

    Attributes:
        backend, experts, tier: The cell's.
        schemes: Names of the schemes that the cell computes.
        rule: The cell's rule that matched.
        platform: Such as `cuda:sm90`.
        device: The driver's name of the device.
        versions: Versions of torch and the cell's requirements.
        commit: Commit of moereg's code; empty if unknown, and for other distributions' cells.
        date: ISO date.
        cases: Conformance tests that passed; none failed.
        digest: `cell_digest` of the code.
        facts: The cell's narrowed facts, as text, to distinguish cells on one rule; empty if it narrows none, and in
            records that do not say.
    """

    backend: str
    experts: str
    schemes: tuple[str, ...]
    rule: str
    tier: str
    platform: str
    device: str
    versions: dict[str, str]
    commit: str
    date: Annotated[str, check_date]
    cases: Annotated[int, check_count]
    digest: str
    facts: str = ""

    @classmethod
    def of(cls, cell: BackendCell, platform: Platform, cases: int) -> Verification:
        """Makes a record for a cell that has just passed on this machine.

        Raises:
            ValueError: None of its rules matches the machine, which could only have imitated another.
        """
        rule = cell.rule_for(platform)
        if rule is None:
            rules = ", ".join(rule.text for rule in cell.rules)
            raise ValueError(
                f"a record of {cell.class_name} needs a platform in ({rules}), got {platform}; run it there"
            )
        found = provenance(platform, {"torch", *(Requirement(text).name for text in cell.requires)})
        if cell.origin != BUILTIN:
            # The commit is moereg's and says nothing about another distribution's code.
            found["commit"] = ""
        return cls(
            backend=cell.name,
            experts=cell.class_name,
            schemes=tuple(scheme.name for scheme in cell.schemes),
            rule=rule.text,
            tier=cell.tier,
            cases=cases,
            digest=cell_digest(cell),
            facts=narrowed_text(cell.facts, cell.experts.facts),
            **found,
        )

    @classmethod
    def from_dict(cls, values: object, name: str = "a record") -> Self:
        """Like `Record.from_dict`; the rule must match the platform."""
        record = super().from_dict(values, name)
        if not within(name, lambda: PlatformRule(record.rule).matches(Platform.from_name(record.platform))):
            raise ArgumentError(f"{name}: rule {record.rule!r} does not match platform {record.platform!r}")
        return record

    def is_of(self, cell: BackendCell) -> bool:
        """Whether it is evidence for a cell: same class and schemes, and the rule that would match there now."""
        if (self.backend, self.experts, self.tier) != (cell.name, cell.class_name, cell.tier):
            return False
        rule = cell.rule_for(Platform.from_name(self.platform))
        schemes = tuple(scheme.name for scheme in cell.schemes)
        if rule is None or (self.rule, self.schemes) != (rule.text, schemes):
            return False
        return self.facts in ("", narrowed_text(cell.facts, cell.experts.facts))

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], str, str, str, str]:
        """The record's subject: a later record of the same cell on the same device replaces it."""
        return (self.backend, self.experts, self.schemes, self.rule, self.platform, self.device, self.facts)


def cell_digest(cell: BackendCell) -> str:
    """A digest of the code that a cell runs: its class, and what it names and imports."""
    return class_digest(cell.experts)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The ledger's evidence for a cell.

    Attributes:
        current: Records of the current code.
        stale: Records of code that has changed since, or cannot be read now.
        missing: Platforms that the cell's rules name without a current record, such as `cuda:sm80` for `cuda:sm80+`;
            a rule without an architecture stands for itself.
        is_readable: Whether the cell's code could be read; True if there are no records.
    """

    current: tuple[Verification, ...]
    stale: tuple[Verification, ...]
    missing: tuple[str, ...]
    is_readable: bool = True

    def on(self, platform: Platform) -> bool:
        """Whether a current record covers this platform."""
        return any(record.platform == str(platform) for record in self.current)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: `verified`, a list of records with `stale`, and `not_verified`, a list of platforms."""
        keys = ("rule", "platform", "device", "versions", "commit", "date", "cases")
        return {
            "verified": [
                {**{key: getattr(record, key) for key in keys}, "stale": record in self.stale}
                for record in (*self.current, *self.stale)
            ],
            "not_verified": list(self.missing),
        }

    def __str__(self) -> str:
        """Such as `on sm90 (NVIDIA H200, 2026-11-22); not on sm80, gfx942`, or `not verified` without records."""
        if not self.current and not self.stale:
            return "not verified"
        parts = []
        if self.current:
            parts.append(f"on {_machines(self.current)}")
        if self.stale:
            since = "before its code changed" if self.is_readable else "with code that cannot be read now,"
            parts.append(f"{since} on {_machines(self.stale)}")
        missing = [name for name in self.missing if not any(_covers(record.platform, name) for record in self.stale)]
        if missing:
            names = ["elsewhere" if name == "*" else arch_name(name) for name in missing]
            parts.append(f"not {'' if names == ['elsewhere'] else 'on '}{', '.join(names)}")
        return "; ".join(parts)


def arch_name(platform: str) -> str:
    """`sm90` for `cuda:sm90`, `cpu` for `cpu`, the whole name for a plugin's kind, whose `g3` is not well known."""
    kind, _, arch = platform.partition(":")
    return arch if arch and kind in ("cpu", "cuda", "rocm") else platform


def _machines(records: Sequence[Verification]) -> str:
    return ", ".join(
        f"{arch_name(record.platform)} ({', '.join(filter(None, [record.device, record.date]))})" for record in records
    )


def evidence_of(cell: BackendCell) -> Evidence:
    """The evidence for a cell in its own package's ledger. Warns once about an unreadable ledger."""
    records = [record for record in _own_records(cell) if record.is_of(cell)]
    digest = cell_digest(cell) if records else UNKNOWN
    is_current = [record.digest == digest != UNKNOWN for record in records]
    current = tuple(record for record, holds in zip(records, is_current, strict=True) if holds)
    stale = tuple(record for record, holds in zip(records, is_current, strict=True) if not holds)
    named = [_named(rule) for rule in cell.rules]
    missing = tuple(name for name in named if not any(_covers(record.platform, name) for record in current))
    return Evidence(current, stale, missing, digest != UNKNOWN or not records)


def _named(rule: PlatformRule) -> str:
    base = rule.text.partition(",")[0]
    return str(rule.instance or base) if ":" in base else base


def _covers(platform: str, named: str) -> bool:
    return named in (platform, platform.partition(":")[0])


def _own_records(cell: BackendCell) -> tuple[Verification, ...]:
    """The records of a cell's own distribution; if it registered another's class, that one's do not count."""
    module = cell.experts.__module__
    root = root_package(module)
    owner = REGISTRY.owner_of(cell.name, module)
    # A module that is not installed is its own origin.
    own_root = _PACKAGE if cell.origin == BUILTIN else root_package(cell.origin)
    is_own = root == own_root if owner is None else owner[0] == cell.origin
    file = module_file(root)
    if not is_own or file is None or file.stem != "__init__":
        return ()
    return read_once(file.parent / FILE_NAME, _records, (), cell.origin)


def _records(path: pathlib.Path, origin: str) -> tuple[Verification, ...]:
    try:
        return read_ledger(path)
    except ValueError as error:
        warnings.warn(
            f"the ledger of {origin}, {path}, cannot be used as evidence, and its cells count as not verified: "
            f"{error}; reinstall {_PACKAGE if origin == BUILTIN else origin}, or remove the ledger",
            LedgerWarning,
            stacklevel=2,
        )
        return ()


def read_ledger(path: pathlib.Path) -> tuple[Verification, ...]:
    """Reads the records of a ledger file.

    Raises:
        ValueError: It cannot be read, is not JSON, or does not hold records of this schema.
    """
    return read_records(path, Verification, SCHEMA)


def merge_ledger(path: pathlib.Path, records: Sequence[Verification]) -> None:
    """Merges records into a ledger file; records of other cells and devices stay.

    Raises:
        ValueError: The file exists and is not a ledger.
    """
    known = {record.key: record for record in (*(read_ledger(path) if path.exists() else ()), *records)}
    ordered = [known[key] for key in sorted(known)]
    path.write_text(records_text(SCHEMA, ordered), encoding="utf-8")

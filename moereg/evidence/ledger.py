"""The ledger: which cells were verified on which hardware and versions, and whether their code is still the same.

A package's ledger is `moereg_ledger.json` at its top level and has records of that package's cells only; moereg ships
its own. A record is evidence for the device and the versions that it names, and for the rule that matched then.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final

from packaging.requirements import Requirement

from moereg.errors import ArgumentError, LedgerWarning
from moereg.evidence.code_digest import LEDGER_NAME, UNKNOWN, class_digest, module_file, root_package
from moereg.evidence.provenance import minor_version, provenance
from moereg.evidence.store import read_once, read_records, records_text
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BUILTIN, REGISTRY, BackendCell
from moereg.runtime.json_types import Count, Date, Text
from moereg.spec.facts import narrowed_text

SCHEMA: Final = 3
_PACKAGE: Final = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Verification:
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
        digest: `class_digest` of the code.
        facts: The cell's narrowed facts, as text, to distinguish cells on one rule; empty if it narrows none, and in
            records that do not say.
    """

    backend: Text
    experts: Text
    schemes: tuple[Text, ...]
    rule: Text
    tier: Text
    platform: Text
    device: Text
    versions: dict[Text, Text]
    commit: Text
    date: Date
    cases: Count
    digest: Text
    facts: Text = ""

    def __post_init__(self) -> None:
        if not PlatformRule(self.rule).matches(Platform.from_name(self.platform)):
            raise ArgumentError(f"rule {self.rule!r} does not match platform {self.platform!r}")

    @classmethod
    def of(cls, cell: BackendCell, platform: Platform, cases: int) -> Verification:
        """A record for a cell that has just passed on this machine; an ArgumentError if no rule of it matches."""
        rule = cell.rule_for(platform)
        if rule is None:
            rules = ", ".join(rule.text for rule in cell.rules)
            raise ArgumentError(
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
            digest=class_digest(cell.experts),
            facts=narrowed_text(cell.facts, cell.experts.facts),
            **found,
        )

    def is_of(self, cell: BackendCell) -> bool:
        """Whether it is evidence for a cell: same class and schemes, and the rule that would match there now."""
        if (self.backend, self.experts, self.tier) != (cell.name, cell.class_name, cell.tier):
            return False
        rule = cell.rule_for(Platform.from_name(self.platform))
        schemes = tuple(scheme.name for scheme in cell.schemes)
        if rule is None or (self.rule, self.schemes) != (rule.text, schemes):
            return False
        return self.facts in ("", narrowed_text(cell.facts, cell.experts.facts))

    def is_on(self, platform: Platform) -> bool:
        """Whether it holds for a machine: same device, and same major and minor versions of torch and libraries.

        Of a platform that is only named, neither is known: its architecture decides. The model of a CPU does not
        matter, since the kernels for CPUs are torch's, which support every CPU; otherwise hardly any CPU would be in a
        record, and all users would wait for the first check.
        """
        if self.platform != str(platform) or not platform.probed:
            return self.platform == str(platform)
        here = {name: minor_version(platform.versions.get(name, "")) for name in self.versions}
        is_same = here == {name: minor_version(version) for name, version in self.versions.items()}
        return is_same and (platform.kind == "cpu" or self.device == platform.device_name)

    @property
    def machine(self) -> tuple[str, ...]:
        """Device and versions, such as `H200`, `torch 2.11`, `triton 3.6`."""
        names = sorted(self.versions, key=lambda name: (name not in ("torch", "triton"), name))
        versions = (f"{name} {minor_version(self.versions[name])}" for name in names)
        return (self.device.removeprefix("NVIDIA ") or arch_name(self.platform), *versions)

    @property
    def machine_in_brief(self) -> str:
        """`machine` with torch and Triton alone."""
        device, *versions = self.machine
        return ", ".join((device, *(each for each in versions if each.startswith(("torch ", "triton ")))))

    @property
    def key(self) -> tuple[str, str, tuple[str, ...], str, str, str, str]:
        """The record's subject: a later record of the same cell on the same device replaces it."""
        return (self.backend, self.experts, self.schemes, self.rule, self.platform, self.device, self.facts)


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The ledger's evidence for a cell.

    Attributes:
        current: Records of the current code.
        stale: Records of code that has changed since, or cannot be read now.
        missing: Platforms that the cell's rules name without a current record, such as `cuda:sm80` for `cuda:sm80+`;
            a rule without an architecture stands for itself.
    """

    current: tuple[Verification, ...]
    stale: tuple[Verification, ...]
    missing: tuple[str, ...]

    def on(self, platform: Platform) -> Verification | None:
        """The current record that holds for this machine, or None."""
        return next((record for record in self.current if record.is_on(platform)), None)

    def nearest(self, platform: Platform) -> Verification | None:
        """The current record that holds for this machine, else one of the same platform, else any."""
        return max(self.current, key=lambda one: (one.is_on(platform), one.platform == str(platform)), default=None)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: `verified`, a list of records with `stale`, and `not_verified`, a list of platforms."""
        keys = ("rule", "platform", "device", "versions", "commit", "date", "cases", "digest")
        return {
            "verified": [
                {
                    **{key: getattr(record, key) for key in keys},
                    "stale": record in self.stale,
                    "machine": record.machine_in_brief,
                }
                for record in (*self.current, *self.stale)
            ],
            "not_verified": list(self.missing),
        }

    def __str__(self) -> str:
        """Such as `on H200 with torch 2.11, triton 3.6 (sm90, 2026-11-22); not on sm80`, or `not verified`."""
        if not self.current and not self.stale:
            return "not verified"
        parts = []
        if self.current:
            parts.append(f"on {_machines(self.current)}")
        if self.stale:
            parts.append(f"before its code changed on {_machines(self.stale)}")
        missing = [name for name in self.missing if not any(_covers(record.platform, name) for record in self.stale)]
        if missing:
            names = ["elsewhere" if name == "*" else arch_name(name) for name in missing]
            parts.append(f"not {'' if names == ['elsewhere'] else 'on '}{', '.join(names)}")
        return "; ".join(parts)


def arch_name(platform: str) -> str:
    """`sm90` for `cuda:sm90`, `cpu` for `cpu`, the whole name for a plugin's kind, whose `g3` is not well known."""
    kind, _, arch = platform.partition(":")
    return arch if arch and kind in ("cpu", "cuda", "rocm") else platform


def _machines(records: Iterable[Verification]) -> str:
    """Such as `H200 with torch 2.11, triton 3.6 (sm90, 2026-11-22)`."""
    found = [(record.machine, f"{arch_name(record.platform)}, {record.date}") for record in records]
    return ", ".join(f"{device} with {', '.join(versions)} ({where})" for (device, *versions), where in found)


def evidence_of(cell: BackendCell) -> Evidence:
    """The evidence for a cell in its own package's ledger. Warns once about an unreadable ledger."""
    records = [record for record in _own_records(cell) if record.is_of(cell)]
    digest = class_digest(cell.experts) if records else UNKNOWN
    current = tuple(record for record in records if record.digest == digest != UNKNOWN)
    stale = tuple(record for record in records if record not in current)
    named = [_named(rule) for rule in cell.rules]
    missing = tuple(name for name in named if not any(_covers(record.platform, name) for record in current))
    return Evidence(current, stale, missing)


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
    return read_once(file.parent / LEDGER_NAME, _records, (), cell.origin)


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
    """Reads the records of a ledger file; errors as in `read_records`."""
    return read_records(path, Verification, SCHEMA)


def merge_ledger(path: pathlib.Path, records: Sequence[Verification]) -> None:
    """Merges records into a ledger file; records of other cells and devices stay."""
    known = {record.key: record for record in (*(read_ledger(path) if path.exists() else ()), *records)}
    ordered = [known[key] for key in sorted(known)]
    path.write_text(records_text(SCHEMA, ordered), encoding="utf-8")

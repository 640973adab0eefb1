"""The quarantine: cells that failed the conformance kit on this machine, which selection therefore rejects.

A file in the user's data directory holds the records; MOEREG_QUARANTINE names another file, or turns this off if empty.
A record applies to the code that failed: once a cell's code or versions change, it has no effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moereg.errors import MoeregError, MoeregWarning, described, one_line, shown
from moereg.evidence.code_digest import class_digest
from moereg.evidence.store import Record, read_once, read_records, records_text
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BackendCell
from moereg.spec.facts import narrowed_text
from moereg.spec.quant_schemes import QuantScheme
from moereg.spec.reasons import Reason

SCHEMA: Final = 1
_VARIABLE: Final = "MOEREG_QUARANTINE"
_LONGEST_FAILURE: Final = 500
_LONGEST_FACTS: Final = 4000
_LOCK_SECONDS: Final = 10.0


class QuarantineWarning(MoeregWarning):
    """The quarantine's file cannot be used, so nothing is quarantined."""


class QuarantineError(MoeregError, RuntimeError):
    """The quarantine cannot be changed."""


_Key = tuple[str, ...]
_KEY: Final = ("backend", "experts", "rule", "scheme", "platform", "device", "facts")


@dataclasses.dataclass(frozen=True)
class QuarantineRecord(Record):
    """One scheme of a cell that failed on one machine.

    Attributes:
        backend, experts, rule, platform, device, digest, date, facts: As in `moereg.evidence.ledger.Verification`.
        scheme: Name of the scheme that the cell computed.
        versions: Versions of moereg, torch, the cell's distribution and its requirements.
        failure: The failed check and its failure, as one line.
    """

    backend: str
    experts: str
    rule: str
    scheme: str
    platform: str
    device: str
    digest: str
    versions: Mapping[str, str] = dataclasses.field(hash=False)
    failure: str
    date: str
    facts: str = ""

    @classmethod
    def of(cls, cell: BackendCell, scheme: QuantScheme, platform: Platform, failure: str) -> QuarantineRecord:
        """Makes a record of a cell that has just failed on this machine, computing a scheme.

        Raises:
            ValueError: The platform is not a probed one, or none of the cell's rules matches it.
        """
        rule = cell.rule_for(platform)
        if rule is None or not platform.probed:
            raise ValueError(
                f"only what failed on the machine at hand can be quarantined, got {cell.class_name} "
                f"({cell.rules_text}) on {platform}; verify it there"
            )
        return cls(
            **dict(zip(_KEY, _key(cell, scheme, rule, platform), strict=True)),
            digest=class_digest(cell.experts),
            versions=_versions(cell, platform),
            failure=one_line(failure, _LONGEST_FAILURE),
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        )

    @property
    def key(self) -> _Key:
        """The record's subject: a later record of the same cell, scheme and device replaces it."""
        return tuple(getattr(self, name) for name in _KEY)

    @property
    def reason(self) -> Reason:
        """The reason in a decision."""
        text = "requires that it passes the conformance kit on this machine, got a failure on"
        return Reason("quarantined", f"{text} {self.date}: {self.failure}")

    def is_from(self, platform: Platform) -> bool:
        """Whether it failed on that machine."""
        return (self.platform, self.device) == (str(platform), one_line(platform.device_name))

    def holds(self, cell: BackendCell, platform: Platform) -> bool:
        """Whether the cell's code and versions are still those that failed."""
        return self.versions == _versions(cell, platform) and self.digest == _digest_once(cell.experts)


def _key(cell: BackendCell, scheme: QuantScheme, rule: PlatformRule, platform: Platform) -> _Key:
    # A problem may use another name for the scheme. Names from drivers and plugins may hold any character.
    alike = (known for known in cell.schemes if (known.weight, known.activation) == (scheme.weight, scheme.activation))
    own = next(alike, scheme)
    names = (cell.name, cell.class_name, rule.text, own.name, str(platform), platform.device_name)
    return (*map(one_line, names), one_line(narrowed_text(cell.facts, cell.experts.facts), _LONGEST_FACTS))


def record_keys(cell: BackendCell, platform: Platform, scheme: QuantScheme | None = None) -> frozenset[_Key]:
    """The keys of all records that a cell could have on a machine, for one scheme if given."""
    rule = cell.rule_for(platform)
    schemes = cell.schemes if scheme is None else (scheme,)
    return frozenset() if rule is None else frozenset(_key(cell, each, rule, platform) for each in schemes)


def _versions(cell: BackendCell, platform: Platform) -> dict[str, str]:
    names = {"moereg", "torch", cell.origin, *(Requirement(text).name for text in cell.requires)}
    found = {canonicalize_name(name) for name in names}
    return {name: one_line(platform.versions[name]) for name in sorted(found) if name in platform.versions}


@functools.lru_cache(maxsize=1024)
def _digest_once(experts: type) -> str:
    """Caches the digest of the code that this process loaded, or nearly: it is read at first use."""
    return class_digest(experts)


class Quarantine:
    """The records that selection respects. Immutable.

    Attributes:
        records: In the order of the file.
    """

    def __init__(self, records: Iterable[QuarantineRecord] = ()) -> None:
        self.records = tuple(records)
        self._by_key = {record.key: record for record in self.records}

    def record(
        self, cell: BackendCell, scheme: QuantScheme | None, rule: PlatformRule | None, platform: Platform
    ) -> QuarantineRecord | None:
        """The record that rejects a cell for a scheme, or None. A platform that was only named has no records."""
        if not self._by_key or scheme is None or rule is None or not platform.probed:
            return None
        found = self._by_key.get(_key(cell, scheme, rule, platform))
        return found if found is not None and found.holds(cell, platform) else None

    def of_cell(self, cell: BackendCell, platform: Platform) -> tuple[QuarantineRecord, ...]:
        """The records that reject a cell, one per scheme."""
        rule = cell.rule_for(platform)
        return tuple(filter(None, (self.record(cell, scheme, rule, platform) for scheme in cell.schemes)))


EMPTY: Final = Quarantine()
"""A quarantine without records."""


def quarantine_path() -> Path | None:
    """The quarantine's file, whether or not it exists; None if MOEREG_QUARANTINE is empty."""
    named = os.environ.get(_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    import platformdirs

    return Path(platformdirs.user_data_dir("moereg", appauthor=False)) / "quarantine.json"


def read_quarantine() -> Quarantine:
    """Reads the current quarantine, once per process and again when the file has changed.

    If the file cannot be used, issues one `QuarantineWarning`, and nothing is quarantined.
    """
    path = quarantine_path()
    return EMPTY if path is None else read_once(path, _believed, EMPTY)


def _believed(path: Path) -> Quarantine:
    try:
        return Quarantine(read_records(path, QuarantineRecord, SCHEMA, is_own=True))
    except ValueError as error:
        warnings.warn(
            f"the quarantine {shown(str(path))} cannot be used: {error}; "
            f"delete it, or name another file in {_VARIABLE}",
            QuarantineWarning,
            stacklevel=6,
        )
        return EMPTY


def change_quarantine(
    add: Iterable[QuarantineRecord] = (), lift: Callable[[QuarantineRecord], bool] | None = None
) -> tuple[QuarantineRecord, ...]:
    """Lifts records, then adds others, atomically; concurrent writers take turns.

    An added record replaces one with the same key.

    Returns:
        The lifted records.

    Raises:
        QuarantineError: The quarantine is switched off, or its file cannot be read or written.
    """
    import filelock

    named = quarantine_path()
    if named is None:
        raise QuarantineError(f"{_VARIABLE} must name a file, got an empty name, which switches the quarantine off")
    try:
        path = Path(os.path.realpath(named))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
            before = read_records(path, QuarantineRecord, SCHEMA, is_own=True) if path.exists() else ()
            lifted = tuple(record for record in before if lift is not None and lift(record))
            kept = (record for record in before if record not in lifted)
            records = {record.key: record for record in (*kept, *add)}
            _write(path, records_text(SCHEMA, records.values()))
    except (OSError, ValueError) as error:
        raise QuarantineError(
            f"the quarantine {shown(str(named))} must be readable and writable, got {described(error)}; delete it, or "
            f"name another file in {_VARIABLE}"
        ) from error
    return lifted


def _write(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

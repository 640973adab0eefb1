"""This machine, and records of what happened to cells on it, one scheme each, with the files that keep them.

Quarantined: a cell that failed the conformance kit or its first check here, which selection therefore rejects.
Admitted: one without a ledger's record for this platform, but right when a layer was checked here.

A record holds for the code and versions that it was made with: once they change it has no effect. Its file is in the
user's data directory unless an environment variable names another, or turns it off: `off` or an empty text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typing_extensions import Self

from moereg.errors import ArgumentError, RecordFileError, RecordFileWarning, one_line, shown
from moereg.evidence.code_digest import class_digest
from moereg.evidence.store import (
    OlderFileError,
    change_file,
    read_once,
    read_records,
    records_text,
    unusable,
)
from moereg.platforms import Platform, PlatformRule, probe_settings
from moereg.registry import BackendCell
from moereg.runtime.json_types import Date, Size, Text, Whole
from moereg.spec.facts import narrowed_text
from moereg.spec.quant_schemes import QuantScheme
from moereg.spec.reasons import Reason

SCHEMA: Final = 2
_LONGEST_FACTS: Final = 4000
_OFF: Final = ("", "off")

_Key = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellRecord:
    """One scheme of a cell, with the code and the versions that it ran with.

    Attributes:
        backend, experts, rule, digest, facts: As in `moereg.evidence.ledger.Verification`.
        scheme: Name of the scheme that the cell computes.
        versions: Versions of moereg, torch, the cell's distribution and its requirements.
    """

    backend: Text
    experts: Text
    rule: Text
    scheme: Text
    digest: Text
    versions: Mapping[Text, Text] = dataclasses.field(hash=False)
    facts: Text = ""

    @staticmethod
    def fields_of(cell: BackendCell, scheme: QuantScheme, rule: PlatformRule, platform: Platform) -> dict[str, Any]:
        """The fields of a cell on a machine, whose rule matches it."""
        names = dict(zip(_NAMES, cell_key(cell, scheme, rule), strict=True))
        return {**names, "digest": class_digest(cell.experts), "versions": cell_versions(cell, platform)}

    @property
    def cell_key(self) -> _Key:
        """The record's cell, as `cell_key` gives it."""
        return tuple(getattr(self, name) for name in _NAMES)

    def changes(self, cell: BackendCell, platform: Platform, part: Callable[[str], str] = str) -> tuple[str, ...]:
        """Changes since: versions such as `humming 0.1.19 -> 0.1.20`, then `code`; empty if the record holds.

        Of versions only a `part` matters, all by default.
        """
        now = cell_versions(cell, platform)
        names = sorted({*now, *self.versions})
        pairs = [(name, self.versions.get(name, "none"), now.get(name, "none")) for name in names]
        changed = [f"{name} {old} -> {new}" for name, old, new in pairs if part(old) != part(new)]
        return (*changed, *(["code"] if self.digest != class_digest(cell.experts) else []))


_NAMES: Final = ("backend", "experts", "rule", "scheme", "facts")
_USES: Final = ("infers", "trains")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineRecord(CellRecord):
    """One scheme of a cell on one machine, with or without gradients.

    One class may infer and train, and the two are admitted and quarantined apart. A layer whose problem has gradients
    is admitted by a check of both, since its calls without a backward pass run what infers: so what failed in inference
    does not train either, and what failed in training still infers.

    Attributes:
        platform, device, date: As in `moereg.evidence.ledger.Verification`.
        trains: Whether it is of problems with gradients.
    """

    platform: Text
    device: Text
    date: Date
    trains: bool = False

    @classmethod
    def of(cls, cell: BackendCell, scheme: QuantScheme, platform: Platform, **found: Any) -> Self:
        """Makes a record of a cell that has just run on this machine, computing a scheme.

        Raises ArgumentError if the platform is not a probed one, or none of the cell's rules matches it.
        """
        rule = cell.rule_for(platform)
        if rule is None or not platform.probed:
            raise ArgumentError(
                f"only what ran on the machine at hand can be recorded, got {cell.class_name} "
                f"({cell.rules_text}) on {platform}; run it there"
            )
        name, device = _machine(platform)
        date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        return cls(**cls.fields_of(cell, scheme, rule, platform), platform=name, device=device, date=date, **found)

    @property
    def key(self) -> _Key:
        """The record's subject: a later record of the same cell, scheme, device and use replaces it."""
        return (*self.cell_key, self.platform, self.device, _USES[self.trains])

    @property
    def computed(self) -> str:
        """The scheme and pass that it is of, such as `unquantized, gradients`."""
        return f"{self.scheme}, gradients" if self.trains else self.scheme

    def holds_for(self, trains: bool) -> bool:
        """Whether it says something of problems with gradients, or of those without."""
        return self.trains is trains

    def is_from(self, platform: Platform) -> bool:
        """Whether it was made on that machine."""
        return (self.platform, self.device) == _machine(platform)


def _machine(platform: Platform) -> _Key:
    return str(platform), one_line(platform.device_name)


def cell_key(cell: BackendCell, scheme: QuantScheme, rule: PlatformRule) -> _Key:
    """A cell computing a scheme, in texts of one line: names from drivers and plugins may hold any character."""
    # A problem may use another name for the scheme.
    alike = (known for known in cell.schemes if (known.weight, known.activation) == (scheme.weight, scheme.activation))
    own = next(alike, scheme)
    names = (cell.name, cell.class_name, rule.text, own.name)
    return (*map(one_line, names), one_line(narrowed_text(cell.facts, cell.experts.facts), _LONGEST_FACTS))


def record_keys(cell: BackendCell, platform: Platform, scheme: QuantScheme | None = None) -> frozenset[_Key]:
    """The keys of all records that a cell could have on a machine, for one scheme if given."""
    rule = cell.rule_for(platform)
    if rule is None:
        return frozenset()
    keys = (cell_key(cell, each, rule) for each in (cell.schemes if scheme is None else (scheme,)))
    return frozenset((*key, *_machine(platform), use) for key in keys for use in _USES)


def cell_versions(cell: BackendCell, platform: Platform) -> dict[str, str]:
    """Versions of what a cell runs on: moereg, torch, its distribution and its requirements."""
    names = _distributions(cell.origin, cell.requires)
    return {name: one_line(platform.versions[name]) for name in names if name in platform.versions}


@functools.lru_cache(maxsize=1024)
def _distributions(origin: str, requires: tuple[str, ...]) -> tuple[str, ...]:
    names = {"moereg", "torch", origin, *(Requirement(text).name for text in requires)}
    return tuple(sorted({canonicalize_name(name) for name in names}))


M = TypeVar("M", bound=MachineRecord)


class MachineRecords(Generic[M]):
    """Records that selection respects, in the order of the file. Immutable."""

    def __init__(self, records: Iterable[M] = ()) -> None:
        self.records = tuple(records)
        self._by_key = {record.key: record for record in self.records}

    def record(
        self, cell: BackendCell, scheme: QuantScheme | None, platform: Platform, trains: bool = False
    ) -> M | None:
        """The record that holds for a cell and a scheme, with gradients or without; else None."""
        found = () if scheme is None else self.of_cell(cell, platform, scheme)
        return next((record for record in found if record.holds_for(trains)), None)

    def of_cell(self, cell: BackendCell, platform: Platform, scheme: QuantScheme | None = None) -> tuple[M, ...]:
        """The records that hold for a cell, of one scheme if given. A platform that was only named has none."""
        keys = sorted(record_keys(cell, platform, scheme)) if self._by_key and platform.probed else ()
        found = filter(None, map(self._by_key.get, keys))
        return tuple(record for record in found if not record.changes(cell, platform))


NO_RECORDS: Final[MachineRecords[Any]] = MachineRecords()
"""Nothing quarantined, or nothing admitted."""


@dataclasses.dataclass(frozen=True)
class RecordFile(Generic[M]):
    """A file of records in the user's data directory.

    Attributes:
        variable: The environment variable that names another file, or turns this one off: `off` or an empty text.
        name: Its name in the user's data directory, less `.json`; also what messages call it.
        kind: The records' class.
    """

    variable: str
    name: str
    kind: type[M]

    def path(self) -> Path | None:
        """The file, whether or not it exists; None if it is turned off."""
        named = os.environ.get(self.variable)
        if named is not None:
            return Path(named) if named not in _OFF else None
        return user_data() / f"{self.name}.json"

    def read(self) -> MachineRecords[M]:
        """Reads the current records, once per process and again when the file has changed.

        If the file cannot be used, issues one `RecordFileWarning`, and there are none.
        """
        path = self.path()
        return NO_RECORDS if path is None else read_once(path, self._believed, NO_RECORDS)

    def _believed(self, path: Path) -> MachineRecords[M]:
        try:
            return MachineRecords(read_records(path, self.kind, SCHEMA, is_own=True))
        except ValueError as error:
            text = unusable(f"the {self.name}", path, error, self.variable)
            warnings.warn(text, RecordFileWarning, stacklevel=6)
            return NO_RECORDS

    def change(self, add: Iterable[M] = (), lift: Callable[[M], bool] | None = None) -> tuple[M, ...]:
        """Lifts records and returns them, then adds others, atomically; concurrent writers take turns.

        An added record replaces one with the same key. A RecordFileError if the file is turned off, or cannot be read
        or written.
        """
        named = self.path()
        lifted: tuple[M, ...] = ()
        if named is None:
            raise RecordFileError(
                f"{self.variable} must name a file, got {shown(os.environ[self.variable])}, which turns the "
                f"{self.name} off"
            )

        def changed(path: Path) -> str:
            nonlocal lifted
            before: tuple[M, ...] = ()
            with contextlib.suppress(OlderFileError):
                before = read_records(path, self.kind, SCHEMA, is_own=True) if path.exists() else ()
            lifted = tuple(record for record in before if lift is not None and lift(record))
            kept = (record for record in before if record not in lifted)
            return records_text(SCHEMA, {record.key: record for record in (*kept, *add)}.values())

        change_file(named, changed, f"the {self.name}", self.variable)
        return lifted


def user_data() -> Path:
    """Moereg's folder in the user's data directory, whether or not it exists."""
    import platformdirs

    return Path(platformdirs.user_data_dir("moereg", appauthor=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuarantineRecord(MachineRecord):
    """One scheme of a cell that failed on one machine; `failure` has the check and its failure, as one line."""

    failure: Text

    @classmethod
    def failed(
        cls, cell: BackendCell, scheme: QuantScheme, platform: Platform, failure: str, trains: bool = False
    ) -> QuarantineRecord:
        """Makes a record of a cell that has just failed on this machine; raises ValueError as `of`."""
        return cls.of(cell, scheme, platform, failure=one_line(failure, 500), trains=trains)

    def holds_for(self, trains: bool) -> bool:
        """Whether it keeps the cell from problems with gradients, or from those without."""
        return trains or not self.trains

    @property
    def reason(self) -> Reason:
        """The reason in a decision."""
        text = "requires that it passes the conformance kit on this machine, got a failure on"
        return Reason("quarantined", f"{text} {self.date}: {self.failure}")


Quarantine = MachineRecords[QuarantineRecord]

QUARANTINE: Final = RecordFile("MOEREG_QUARANTINE", "quarantine", QuarantineRecord)


ADMITTED_TIER: Final = "admitted"
"""The evidence in a decision on an admitted cell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionRecord(MachineRecord):
    """One scheme of a cell whose numbers were right in a short check on one machine.

    `error` is the largest relative error of the check's calls, and `bound` that call's bound.
    """

    error: Size
    bound: Size


Admitted = MachineRecords[AdmissionRecord]

ADMITTED: Final = RecordFile("MOEREG_ADMISSION", "admitted", AdmissionRecord)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine whose times a pack holds.

    Attributes:
        platform: Such as `cuda:sm90`.
        device: The driver's name of the device.
        units: Cores of a GPU as NVML counts them, processors that this process may use on a CPU, else 0.
        power_limit_w: The enforced power limit of a GPU in W; 0 if there is none.
        mig: Whether a GPU is divided into instances.
        driver: Major version of a GPU's driver, else empty.
    """

    platform: Text
    device: Text
    units: Whole
    power_limit_w: Whole
    mig: bool
    driver: Text

    def differences(self, here: Machine) -> tuple[str, ...]:
        """The fields that differ on this machine, such as `driver 570, here 580`; of another device that alone."""
        now, then = dataclasses.asdict(here), dataclasses.asdict(self)
        names = [name for name in then if then[name] != now[name]]
        names = ["device"] if "device" in names else names
        return tuple(f"{name} {str(then[name]) or 'none'}, here {str(now[name]) or 'none'}" for name in names)


@functools.lru_cache(maxsize=8)
def machine_of(platform: Platform) -> Machine:
    """The machine at hand, which a probed platform describes; asked once a process. Does not initialize CUDA."""
    units, power_limit_w, mig, driver = probe_settings(platform)
    return Machine(
        str(platform), one_line(platform.device_name), units, power_limit_w, mig, one_line(driver).partition(".")[0]
    )

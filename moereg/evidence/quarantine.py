"""The quarantine: cells that failed the conformance kit or their first check here, which selection therefore rejects.

A file in the user's data directory holds the records. MOEREG_QUARANTINE names another file; `off`, or an empty text,
turns this off.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from moereg.errors import one_line
from moereg.evidence.on_machine import MachineRecord, MachineRecords, RecordFile
from moereg.platforms import Platform
from moereg.registry import BackendCell
from moereg.runtime.json_types import Text
from moereg.spec.quant_schemes import QuantScheme
from moereg.spec.reasons import Reason

_LONGEST_FAILURE: Final = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuarantineRecord(MachineRecord):
    """One scheme of a cell that failed on one machine.

    Attributes:
        failure: The failed check and its failure, as one line.
    """

    failure: Text

    @classmethod
    def failed(
        cls, cell: BackendCell, scheme: QuantScheme, platform: Platform, failure: str, trains: bool = False
    ) -> QuarantineRecord:
        """Makes a record of a cell that has just failed on this machine; raises ValueError as `of`."""
        return cls.of(cell, scheme, platform, failure=one_line(failure, _LONGEST_FAILURE), trains=trains)

    def holds_for(self, trains: bool) -> bool:
        """Whether it keeps the cell from problems with gradients, or from those without."""
        return trains or not self.trains

    @property
    def reason(self) -> Reason:
        """The reason in a decision."""
        text = "requires that it passes the conformance kit on this machine, got a failure on"
        return Reason("quarantined", f"{text} {self.date}: {self.failure}")


Quarantine = MachineRecords[QuarantineRecord]

EMPTY: Final = Quarantine()
"""A quarantine without records."""

QUARANTINE: Final = RecordFile("MOEREG_QUARANTINE", "quarantine", QuarantineRecord)

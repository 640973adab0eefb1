"""Admitted cells: without a ledger's record for this platform, but right when a layer was checked on this machine.

A file in the user's data directory holds the records. MOEREG_ADMISSION names another file; `off`, or an empty text,
turns this and the check off.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from moereg.evidence.on_machine import MachineRecord, MachineRecords, RecordFile
from moereg.runtime.json_types import Size

ADMITTED_TIER: Final = "admitted"
"""The evidence in a decision on an admitted cell."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionRecord(MachineRecord):
    """One scheme of a cell whose numbers were right in a short check on one machine.

    Attributes:
        error: Largest relative error of the check's calls.
        bound: The bound of the call with that error.
    """

    error: Size
    bound: Size


Admitted = MachineRecords[AdmissionRecord]

NONE_ADMITTED: Final = Admitted()
"""No admitted cells."""

ADMITTED: Final = RecordFile("MOEREG_ADMISSION", "admitted", AdmissionRecord)

"""No kernel changes under its records without a line that says why: a CPU cannot check what only a GPU runs."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from moereg.evidence import ledger
from moereg.evidence.ledger import Verification, evidence_of
from moereg.platforms import Platform
from moereg.registry import BUILTIN, BackendCell
from moereg.selection.loader import load_backends

LIST = pathlib.Path(__file__).with_name("stale_evidence.txt")
H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={}, probed=True)


def shipped() -> list[BackendCell]:
    """moereg's own cells."""
    return [cell for cell in load_backends().cells if cell.origin == BUILTIN]


def stale(cells: list[BackendCell]) -> set[str]:
    """Backends and platforms with a cell whose records there are all stale."""
    found = set()
    for cell in cells:
        evidence = evidence_of(cell)
        current = {record.platform for record in evidence.current}
        found |= {f"{cell.name} {record.platform}" for record in evidence.stale if record.platform not in current}
    return found


def test_each_stale_backend_has_a_line_and_each_line_a_stale_backend() -> None:
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    parts = [line.partition(": ") for line in lines]
    assert all(len(why.split()) >= 3 for _, _, why in parts), "a line says BACKEND PLATFORM: WHY"
    named = [name for name, _, _ in parts]
    assert sorted(named) == sorted(stale(shipped())), (
        f"{LIST.name} and the ledger disagree; run what changed there with --ledger, or say why nobody did"
    )


def test_a_changed_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = (cell for cell in shipped() if cell.class_name == "TritonExperts")
    record = Verification.of(cell, H200, 3)
    old = dataclasses.replace(record, digest="of the code before")
    for records, expected in (((record,), set()), ((old,), {"triton cuda:sm90"}), ((old, record), set())):
        monkeypatch.setattr(ledger, "_own_records", lambda asked, found=records: found)
        assert stale([cell]) == expected

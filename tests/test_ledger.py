from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from moereg.discovery import load_backends
from moereg.platforms import Platform
from moereg.testing import ledger
from moereg.testing.ledger import Verification, code_digest, merge_ledger, verifications

H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"torch": "2.11.0", "triton": "3.6.0"}, probed=True)


def _cell(name: str) -> ledger.BackendCell:
    return load_backends().by_name(name)[0]


@pytest.mark.parametrize("changed_module", ["moereg.kernels.triton_reduce", "moereg.backends._triton.interleaved"])
def test_digest_follows_kernels_and_private_packages_that_a_backend_imports(
    changed_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = _cell("triton")
    before = code_digest(cell)
    real = ledger._source

    def changed(module: str) -> str:
        return real(module) + ("\n# changed" if module == changed_module else "")

    monkeypatch.setattr(ledger, "_source", changed)
    assert code_digest(cell) != before
    assert code_digest(_cell("torch")) == code_digest(_cell("torch"))


def test_digest_ignores_kernels_of_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = _cell("torch")
    before = code_digest(cell)
    real = ledger._source
    monkeypatch.setattr(
        ledger, "_source", lambda module: real(module) + ("\n#" if module == "moereg.kernels.triton_reduce" else "")
    )
    assert code_digest(cell) == before


def test_records_are_merged_by_cell_and_device(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ledger.json"
    record = Verification.of(_cell("triton"), H200, 10)
    merge_ledger(path, [record])
    merge_ledger(path, [dataclasses.replace(record, cases=20), dataclasses.replace(record, device="NVIDIA B200")])
    records = json.loads(path.read_text())["records"]
    assert [(found["device"], found["cases"]) for found in records] == [("NVIDIA B200", 10), ("NVIDIA H200", 20)]
    assert record.versions == {"torch": "2.11.0", "triton": "3.6.0"}


def test_changed_code_shows_as_stale(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.json"
    cell = _cell("triton")
    record = Verification.of(cell, H200, 10)
    merge_ledger(path, [record])
    monkeypatch.setattr(ledger, "_read", lambda cell: json.loads(path.read_text())["records"])
    assert [found["stale"] for found in verifications(cell)] == [False]
    merge_ledger(path, [dataclasses.replace(record, digest="of older code")])
    assert [found["stale"] for found in verifications(cell)] == [True]
    assert verifications(_cell("torch")) == []


def test_the_shipped_ledger_names_registered_cells_only() -> None:
    known = {(cell.name, cell.class_name) for cell in load_backends().cells}
    records = ledger._read(_cell("torch"))
    assert {(record["backend"], record["experts"]) for record in records} <= known

"""No kernel changes under its evidence without a line that says why: a CPU cannot check what only a GPU runs."""

from __future__ import annotations

import dataclasses

import pytest

from moereg.evidence import ledger
from moereg.evidence.ledger import Verification, cell_digest
from moereg.platforms import Platform
from moereg.registry import BackendCell
from tests.kit.stale_evidence import LIST, Line, disagreements, read_list, shipped, stale_cells

H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={}, probed=True)


def test_each_stale_evidence_has_a_line_and_each_line_a_stale_evidence() -> None:
    found = disagreements(read_list(LIST.read_text(encoding="utf-8")), stale_cells(shipped()))
    assert not found, "\n".join([f"{LIST.name} and the ledger disagree:", *found])


def test_a_changed_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = (cell for cell in shipped() if cell.class_name == "TritonExperts")
    record = dataclasses.replace(Verification.of(cell, H200, 3), date="2026-11-22")
    monkeypatch.setattr(ledger, "_own_records", lambda asked: (record,))
    assert stale_cells((cell,)) == {}

    def edited(asked: BackendCell) -> str:
        return cell_digest(asked)[::-1]

    monkeypatch.setattr(ledger, "cell_digest", edited)
    name = "TritonExperts unquantized cuda:sm80+ cuda:sm90"
    assert stale_cells((cell,)) == {name: (cell_digest(cell), "2026-11-22")}
    second = dataclasses.replace(record, device="NVIDIA H100", digest=edited(cell))
    monkeypatch.setattr(ledger, "_own_records", lambda asked: (record, second))
    assert stale_cells((cell,)) == {}


def test_what_is_said_of_a_list_that_disagrees() -> None:
    stale = {"A": ("0123", "2026-11-20")}
    (first, second) = disagreements((Line("B", "0123", "2026-11-22", "changed on purpose"),), stale)
    assert first.startswith("changed since it was run on 2026-11-20, and no line says why; run it there")
    assert "let its line say: A | 0123 | 20" in first
    assert second == "its evidence is current or gone; take the line out: B"
    assert disagreements((Line("A", "0123", "2026-11-22", "changed on purpose"),), stale) == []
    # Code that changed once more than the line knows.
    assert disagreements((Line("A", "4567", "2026-11-22", "changed on purpose"),), stale) == [first]


@pytest.mark.parametrize(
    "text",
    [
        "A",
        "A | 01 | 2026-11-22",
        "A | 01 | 2026-11-22 | why",
        "A | 01 | now | a long reason",
        "A|01|2026-11-22|a b c\n" * 2,
    ],
)
def test_a_list_that_says_too_little(text: str) -> None:
    with pytest.raises(ValueError, match=r"must say|listed twice|isoformat"):
        read_list(text)
    assert read_list("# A | B\n\n A x | 01 | 2026-11-22 | a b c \n") == (Line("A x", "01", "2026-11-22", "a b c"),)

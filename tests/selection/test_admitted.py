"""Admitted cells in a selection: evidence, and no change of the order."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moereg.evidence.on_machine import NO_RECORDS, AdmissionRecord, Admitted, Quarantine, QuarantineRecord
from moereg.platforms import Platform
from moereg.selection.decide import decide, without_winner
from moereg.selection.request import Request
from moereg.spec.reasons import Reason
from tests.evidence.packs import HERE, NAMES, PROBLEM, make_cells

CELLS = make_cells(NAMES[:3])


def admitted(name: str, **changes: Any) -> AdmissionRecord:
    cell = next(cell for cell in CELLS if cell.name == name)
    made = AdmissionRecord.of(cell, PROBLEM.quant, HERE, error=0.001, bound=0.008)
    return dataclasses.replace(made, **changes)


CASES: dict[str, tuple[list[AdmissionRecord], Platform, list[str]]] = {
    "nothing": ([], HERE, ["", "", ""]),
    "the last one": ([admitted("third")], HERE, ["", "", "admitted"]),
    "two": ([admitted("first"), admitted("third")], HERE, ["admitted", "", "admitted"]),
    "another device": ([admitted("first", device="Another CPU")], HERE, ["", "", ""]),
    "another scheme": ([admitted("first", scheme="int8_w8a16")], HERE, ["", "", ""]),
    "another version": ([admitted("first", versions={"torch": "2.14.0"})], HERE, ["", "", ""]),
    "other code": ([admitted("first", digest="0123456789abcdef")], HERE, ["", "", ""]),
    "a named platform": ([admitted("first")], dataclasses.replace(HERE, probed=False), ["", "", ""]),
}


@pytest.mark.parametrize("case", CASES)
def test_evidence_says_what_is_admitted_and_changes_no_choice(case: str) -> None:
    records, platform, expected = CASES[case]
    found = decide(PROBLEM, platform, Request(), CELLS, admitted=Admitted(records))
    assert [decision.backend for decision in found.decisions] == ["first", "second", "third"]
    assert [decision.evidence for decision in found.decisions] == expected
    bare = decide(PROBLEM, platform, Request(), CELLS, admitted=NO_RECORDS)
    assert (found.fingerprint == bare.fingerprint) is (expected[0] == "")


def test_what_is_quarantined_is_rejected_although_it_was_admitted() -> None:
    held = Quarantine([QuarantineRecord.failed(CELLS[0], PROBLEM.quant, HERE, "off by 0.5")])
    found = decide(PROBLEM, HERE, Request(), CELLS, held, Admitted([admitted("first")]))
    assert [decision.backend for decision in found.decisions] == ["second", "third", "first"]


@pytest.mark.parametrize(
    ("request_", "expected", "sources"),
    [
        (Request(), ["second", "third", "first"], ("priority", "priority", None)),
        (Request(prefer=("third",)), ["first", "second", "third"], ("preferred", "priority", None)),
        (Request(require=("third", "first")), ["first", "third", "second"], ("required", "required", None)),
    ],
    ids=str,
)
def test_without_its_winner_a_selection_keeps_the_order(
    request_: Request, expected: list[str], sources: tuple[str | None, ...]
) -> None:
    before = decide(PROBLEM, HERE, request_, CELLS)
    assert before.source == sources[0]
    after = without_winner(before, Reason("quarantined", "failed"))
    assert [decision.backend for decision in after.decisions] == expected
    assert after.source == sources[1]
    (rejected,) = (decision for decision in after.decisions if decision.backend == before.backend)
    assert rejected.reasons == (Reason("quarantined", "failed"),)
    while after.winner is not None:
        after = without_winner(after, Reason("quarantined", "failed"))
    assert after.source == sources[2]

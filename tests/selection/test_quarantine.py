"""Cells that failed here are rejected here until their code or versions change; a bad file never breaks selection."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import pytest

from moereg.backends.torch_moe import TorchTrainingExperts
from moereg.dispatch import explain_backends
from moereg.errors import RecordFileError, RecordFileWarning
from moereg.evidence import code_digest, store
from moereg.evidence.on_machine import NO_RECORDS, QUARANTINE, Quarantine, QuarantineRecord
from moereg.platforms import Platform
from moereg.registry import BackendCell, BackendRegistry, register_moe_backend
from moereg.runtime.json_types import convert
from moereg.selection.decide import decide
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from tests.evidence.packs import HERE, PROBLEM, VERSIONS, make_cells
from tests.support.fakes import FakeExperts

EIGHT = get_scheme("int8_w8a16")
PLAIN = PROBLEM.quant


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The quarantine's file, which does not exist yet, nor does its folder."""
    path = tmp_path / "data" / "quarantine.json"
    monkeypatch.setenv("MOEREG_QUARANTINE", str(path))
    return path


@pytest.fixture
def cells() -> tuple[BackendCell, ...]:
    return make_cells(("bad", "good"))


def record(cell: BackendCell, **changes: Any) -> QuarantineRecord:
    made = QuarantineRecord.failed(cell, PLAIN, HERE, "numbers of T 17: off by 0.5\nwhere 0.008 is allowed")
    return convert({**vars(made), **changes}, QuarantineRecord, "a record")


def choose(cells: tuple[BackendCell, ...], held: Quarantine, platform: Platform = HERE, **facts: Any) -> Selection:
    problem = MoEProblem(**{**PROBLEM.to_dict(), **facts})
    return decide(problem, platform, Request(), cells, quarantine=held)


def test_what_failed_here_is_rejected_with_the_failure(cells: tuple[BackendCell, ...]) -> None:
    assert choose(cells, NO_RECORDS).backend == "bad"
    found = choose(cells, Quarantine([record(cells[0])]))
    assert found.backend == "good"
    (rejected,) = (decision for decision in found.decisions if decision.backend == "bad")
    (reason,) = rejected.reasons
    assert reason.code == "quarantined"
    assert reason.text.startswith("requires that it passes the conformance kit on this machine, got a failure on 20")
    assert reason.text.endswith(": numbers of T 17: off by 0.5 where 0.008 is allowed")
    assert Selection.from_json(found.to_json(), cells=cells).decisions == found.decisions
    nothing_fits = choose(cells[:1], Quarantine([record(cells[0])]))
    assert "moereg verify NAME --unquarantine" in nothing_fits.refusal


OTHERS: dict[str, dict[str, Any]] = {
    "backend": {"backend": "good"},
    "class": {"experts": "OtherExperts"},
    "rule": {"rule": "cuda:sm90"},
    "scheme": {"scheme": "int8_w8a16"},
    "platform": {"platform": "cuda:sm90"},
    "device": {"device": "Another CPU"},
    "digest": {"digest": "0123456789abcdef"},
    "version of torch": {"versions": {**VERSIONS, "torch": "2.14.0"}},
    "version of a requirement": {"versions": {name: VERSIONS[name] for name in ("torch", "moereg")}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_record_of_another_cell_or_of_changed_code_says_nothing(cells: tuple[BackendCell, ...], other: str) -> None:
    assert choose(cells[:1], Quarantine([record(cells[0], **OTHERS[other])])).backend == "bad"


def test_cells_on_one_rule_that_differ_in_narrowed_facts_are_held_one_by_one() -> None:
    registry = BackendRegistry()
    for activation in ("silu", "gelu"):
        register_moe_backend("twins", 20, ("unquantized",), ("cpu",), activations={activation}, registry=registry)(
            FakeExperts
        )
    register_moe_backend("good", 10, ("unquantized",), ("cpu",), registry=registry)(
        type("GoodExperts", (FakeExperts,), {})
    )
    silu, gelu, _ = registry.cells
    held = Quarantine([record(silu)])
    assert held.records[0].facts == "activations=silu"
    assert held.of_cell(gelu, HERE) == ()
    assert choose(registry.cells, held).backend == "good"
    assert choose(registry.cells, held, activation="gelu").backend == "twins"
    assert len(Quarantine([record(silu), record(gelu)]).of_cell(silu, HERE)) == 1


def test_versions_are_those_that_the_cell_runs_on(cells: tuple[BackendCell, ...]) -> None:
    made = record(cells[0])
    assert made.versions == {name: VERSIONS[name] for name in ("kernels", "moereg", "torch")}
    updated = dataclasses.replace(HERE, versions={**VERSIONS, "other": "4"})
    assert choose(cells, Quarantine([made]), updated).backend == "good"
    brought = dataclasses.replace(cells[0], origin="other")
    assert record(brought).versions == VERSIONS
    assert record(brought).changes(brought, updated) == ("other 3 -> 4",)


def test_schemes_are_held_one_by_one_and_other_machines_are_not(cells: tuple[BackendCell, ...]) -> None:
    held = Quarantine([record(cells[0])])
    assert choose(cells, held, quant="int8_w8a16").backend == "bad"
    assert [found.scheme for found in held.of_cell(cells[0], HERE)] == ["unquantized"]
    assert choose(cells, held, dataclasses.replace(HERE, probed=False)).backend == "bad"
    with pytest.raises(ValueError, match="only what ran on the machine at hand can be recorded"):
        QuarantineRecord.failed(cells[0], EIGHT, Platform.from_name("cuda:sm90"), "off")
    with pytest.raises(ValueError, match="run it there"):
        QuarantineRecord.failed(cells[0], EIGHT, Platform("cuda", "sm80", probed=True), "off")


@pytest.mark.parametrize(
    ("failed", "trained", "winner"), [(0, 0, "good"), (0, 1, "good"), (1, 0, "bad"), (1, 1, "good")]
)
def test_what_fails_to_infer_does_not_train_either(failed: int, trained: int, winner: str) -> None:
    registry = BackendRegistry()
    for name, priority in (("bad", 20), ("good", 10)):
        kind = type(f"{name.capitalize()}Experts", (TorchTrainingExperts,), {})
        register_moe_backend(name, priority, ("unquantized",), ("cpu",), registry=registry)(kind)
    held = Quarantine([record(registry.cells[0], trains=bool(failed))])
    gradients = {"hidden_states"} if trained else ()
    assert choose(registry.cells, held, gradients=gradients).backend == winner


def test_a_scheme_by_another_name_is_the_same_and_a_long_failure_is_cut(cells: tuple[BackendCell, ...]) -> None:
    renamed = dataclasses.replace(EIGHT, name="my_int8")
    made = QuarantineRecord.failed(cells[0], renamed, HERE, "off " * 1000)
    assert made.scheme == "int8_w8a16"
    assert len(made.failure) <= 500
    held = Quarantine([made])
    assert held.record(cells[0], renamed, HERE) == held.record(cells[0], EIGHT, HERE) == made


def test_a_link_to_the_file_stays_a_link_and_its_folder_is_the_users_alone(
    file: Path, cells: tuple[BackendCell, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    QUARANTINE.change([record(cells[0])])
    assert file.parent.stat().st_mode & 0o777 == 0o700
    link = file.parent.parent / "link.json"
    link.symlink_to(file)
    monkeypatch.setenv("MOEREG_QUARANTINE", str(link))
    QUARANTINE.change([record(cells[1])])
    assert link.is_symlink()
    assert len(json.loads(file.read_text())["records"]) == 2


def test_changed_code_is_selected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "repaired_x.py").write_text("class Repaired:\n    factor = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    repaired = type("Repaired", (FakeExperts,), {"__module__": "repaired_x"})
    registry = BackendRegistry()
    register_moe_backend("repaired", 1, ("unquantized",), ("cpu",), registry=registry)(repaired)
    held = Quarantine([record(registry.cells[0])])
    assert choose(registry.cells, held).backend is None
    (tmp_path / "repaired_x.py").write_text("class Repaired:\n    factor = 1\n")
    code_digest.class_digest.cache_clear()  # A new process would read it anew.
    code_digest._module_digest.cache_clear()
    assert choose(registry.cells, held).backend == "repaired"


def test_records_are_written_read_replaced_and_lifted(file: Path, cells: tuple[BackendCell, ...]) -> None:
    assert QUARANTINE.read().records == ()
    first = record(cells[0])
    assert QUARANTINE.change([first, record(cells[1])]) == ()
    assert [found.backend for found in QUARANTINE.read().records] == ["bad", "good"]
    assert QUARANTINE.read() is QUARANTINE.read(), "an unchanged file is read once"
    later = record(cells[0], failure="off by 0.7")
    QUARANTINE.change([later])
    assert {found.backend: found.failure for found in QUARANTINE.read().records} == {
        "bad": "off by 0.7",
        "good": record(cells[1]).failure,
    }
    assert QUARANTINE.change(lift=lambda found: found.backend == "bad") == (later,)
    assert [found.backend for found in QUARANTINE.read().records] == ["good"]
    assert QUARANTINE.change(lift=lambda found: True) == (record(cells[1]),)
    assert QUARANTINE.read().records == ()
    assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}


def test_selection_reads_the_file_that_the_variable_names(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = explain_backends(PROBLEM)
    winner = before.winner
    assert winner is not None
    assert winner.cell is not None
    QUARANTINE.change([QuarantineRecord.failed(winner.cell, PLAIN, before.platform, "off by 0.5")])
    found = explain_backends(PROBLEM)
    assert found.winner is not None
    assert found.winner.experts != winner.experts
    held = next(decision for decision in found.decisions if decision.experts == winner.experts)
    assert [reason.code for reason in held.reasons] == ["quarantined"]
    for switched_off in ("", str(file.parent / "nowhere.json"), f"{file}/below"):
        monkeypatch.setenv("MOEREG_QUARANTINE", switched_off)
        assert explain_backends(PROBLEM).winner == winner


GOOD = json.dumps({"schema": 2, "records": []})
# The ledger's test has every fault of a file of records.
BROKEN = {
    "no JSON": ("{", "; delete it, or name another file in MOEREG_QUARANTINE"),
    "a flag for a schema": ('{"schema": true, "records": []}', "schema must be 2, got True; move it away, or name"),
    "a record without a key": ('{"schema": 2, "records": [{}]}', "records[0].backend is required"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_warning_and_nothing_is_quarantined(file: Path, name: str) -> None:
    content, message = BROKEN[name]
    file.parent.mkdir()
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert explain_backends(PROBLEM).winner is not None
        assert explain_backends(PROBLEM).winner is not None
    assert [(found.category, message in str(found.message)) for found in warned] == [(RecordFileWarning, True)]
    assert str(file) in str(warned[0].message)
    assert "\n" not in str(warned[0].message)
    with pytest.raises(RecordFileError, match=re.escape(message)):
        QUARANTINE.change()


def test_a_file_of_an_older_moereg_counts_as_empty_and_is_begun_anew(
    file: Path, cells: tuple[BackendCell, ...]
) -> None:
    file.parent.mkdir()
    file.write_text('{"schema": 1, "records": [{}]}')
    with pytest.warns(RecordFileWarning, match=r"made by an older moereg \(schema 1, now 2\) and is ignored"):
        assert QUARANTINE.read().records == ()
    QUARANTINE.change([record(cells[0])])
    assert [found.backend for found in QUARANTINE.read().records] == ["bad"]


def test_texts_that_a_terminal_would_obey_are_refused(file: Path, cells: tuple[BackendCell, ...]) -> None:
    with pytest.raises(ValueError, match="failure must be printable on one line"):
        record(cells[0], failure="\x1b[2J")
    with pytest.raises(ValueError, match=r"versions\[\.\.\.\] must be printable on one line"):
        record(cells[0], versions={"torch": "\x1b[2J"})
    with pytest.raises(ValueError, match="versions must be an object"):
        record(cells[0], versions="2.13")
    # A driver may say anything; what is written can be read back.
    odd = dataclasses.replace(HERE, device_name="A\x1b[2J CPU")
    QUARANTINE.change([QuarantineRecord.failed(cells[0], PLAIN, odd, "off\x1b[2J")])
    assert choose(cells, QUARANTINE.read(), odd).backend == "good"


def test_a_file_that_others_may_write_is_not_believed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.parent.mkdir()
    file.write_text(GOOD)
    for mode in (0o666, 0o660):
        file.chmod(mode)
        store._read_once.cache_clear()
        with pytest.warns(RecordFileWarning, match="nobody else may write to it"):
            assert QUARANTINE.read().records == ()
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    status = os.stat_result((0o100600, 1, 1, 1, 4242, 0, len(GOOD), 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda handle: status)
    store._read_once.cache_clear()
    with pytest.warns(RecordFileWarning, match="must belong to this user or to root"):
        assert QUARANTINE.read().records == ()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_is_not_read(file: Path, make: Callable[[Path], None]) -> None:
    file.parent.mkdir()
    make(file)
    with pytest.warns(RecordFileWarning, match="no regular file; name another file in MOEREG_QUARANTINE"):
        assert QUARANTINE.read().records == ()
    with pytest.raises(RecordFileError, match="no regular file"):
        QUARANTINE.change()


def test_what_cannot_be_written_is_an_error_with_its_cure(
    cells: tuple[BackendCell, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEREG_QUARANTINE", "/dev/null/quarantine.json")
    assert QUARANTINE.read().records == ()
    with pytest.raises(RecordFileError, match=r"'/dev/null/quarantine.json' cannot be used: .*; name another file"):
        QUARANTINE.change([record(cells[0])])
    monkeypatch.setenv("MOEREG_QUARANTINE", "")
    with pytest.raises(RecordFileError, match="which turns the quarantine off"):
        QUARANTINE.change([record(cells[0])])


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (errno.ENOSPC, "free space on its disk, or name another file"),
        (errno.EDQUOT, "free space on its disk, or name another file"),
        (errno.EROFS, "let this user, and nobody else, write to it and its folder, or name another file"),
        (errno.EACCES, "let this user, and nobody else, write to it and its folder, or name another file"),
        (errno.EIO, "name another file"),
    ],
)
def test_a_write_that_fails_leaves_the_file_and_says_what_to_do(
    number: int, cure: str, file: Path, cells: tuple[BackendCell, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    QUARANTINE.change([record(cells[0])])
    before = file.read_bytes()

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecordFileError, match=rf"{os.strerror(number)}; {cure} in MOEREG_QUARANTINE$"):
        QUARANTINE.change([record(cells[1])])
    for function in ("fsync", "replace"):
        monkeypatch.setattr(os, function, mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            QUARANTINE.change([record(cells[1])])
        monkeypatch.undo()
        assert file.read_bytes() == before
        assert {path.name for path in file.parent.iterdir()} <= {file.name, f"{file.name}.lock"}
        monkeypatch.setenv("MOEREG_QUARANTINE", str(file))


def test_a_lock_that_another_process_holds_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    QUARANTINE.change()
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.1)
    with filelock.FileLock(f"{file}.lock"), pytest.raises(RecordFileError, match="holds its lock or end it, or name"):
        QUARANTINE.change()


def test_writers_take_turns(file: Path, cells: tuple[BackendCell, ...]) -> None:
    def add(number: int) -> None:
        QUARANTINE.change([record(cells[0], device=f"CPU {number}")])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(add, range(16)))
    assert {found.device for found in QUARANTINE.read().records} == {f"CPU {number}" for number in range(16)}


def test_the_file_is_in_the_users_data_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOEREG_QUARANTINE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert QUARANTINE.path() == tmp_path / "moereg" / "quarantine.json"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "other"))
    assert QUARANTINE.path() == tmp_path / "other" / "moereg" / "quarantine.json"

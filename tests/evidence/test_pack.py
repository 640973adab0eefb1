"""Packs as values and as files: what is not a pack is one error, and a write is whole or did not happen."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moereg.errors import ArgumentError, MoeregError, RecordFileError
from moereg.evidence.pack import Pack, Session, TimedCell, read_pack, write_pack
from moereg.spec.problem import MoEProblem
from tests.evidence.packs import GRID, HERE, PROBLEM, make_cells, pack_of, row, rows_of

CELLS = make_cells()
PACK = pack_of(CELLS, rows_of({1: -0.2, 2: {4: 0.1}}), wrong=[(3, "off by 0.5")])


@pytest.mark.parametrize("routings", [(), ("\u00e9tage",)])
def test_json_round_trip_and_a_row_a_line(routings: tuple[str, ...]) -> None:
    more = [row(1, 1, routing, 2**40, -1e-9, 40.0, error=1e9, graph=True) for routing in routings]
    text = (pack := PACK.with_rows(PROBLEM, 0, more)).text()
    assert Pack.from_json(text) == pack
    assert len([line for line in text.splitlines() if line.startswith("   [")]) == len(pack.layers[0].rows)


def test_unknown_fields_and_columns_of_a_later_version_are_left_out() -> None:
    values = json.loads(PACK.text())
    values["later"] = values["machine"]["later"] = values["sessions"][0]["later"] = values["cells"][0]["later"] = 1
    values["columns"].append("later")
    values["layers"][0]["rows"] = [[*cells, "?"] for cells in values["layers"][0]["rows"]]
    assert Pack.from_json(json.dumps(values)) == PACK


NOW = object()
"""Deletes the field."""

BROKEN: dict[str, tuple[list[Any], Any, str]] = {
    "schema": (["schema"], 3, "schema must be 2, got 3"),
    "an older schema": (["schema"], 1, "it was made by an older moereg (schema 1, now 2) and is ignored"),
    "schema is a flag": (["schema"], True, "schema must be 2, got True"),
    "no machine": (["machine"], NOW, "machine is required"),
    "machine": (["machine"], [], "machine must be an object"),
    "units": (["machine", "units"], 1.5, "machine.units must be an integer"),
    "number of a session": (["sessions", 0, "number"], -1, r"sessions[0].number must be an integer >= 0, got -1"),
    "two sessions of one number": (["sessions", 0, "number"], 2, "sessions[1] must differ from those before it"),
    "one process twice": (["sessions", 0, "process"], "process 2", "sessions[1].process must differ"),
    "date": (["sessions", 0, "date"], "today", "sessions[0].date must be an ISO date"),
    "clocks": (["sessions", 0, "clocks", "sm_mhz"], "fast", "sessions[0].clocks[...] must be an integer"),
    "escape in a state": (["cells", 0, "state"], "\x1b[31m", "cells[0].state must be printable on one line"),
    "columns": (["columns"], ["session"], "columns must begin with session, cell, routing, tokens"),
    "problem": (["layers", 0, "problem", "top_k"], 99, "layers[0]: problem: top_k must be at most num_experts"),
    "field of a problem": (["layers", 0, "problem", "x"], 1, "layers[0]: problem: unknown field of a problem 'x'"),
    "default": (["layers", 0, "default"], 4, "layers[0] must have cells of the pack, got 4"),
    "negative default": (["layers", 0, "default"], -1, "layers[0].default must be an integer >= 0"),
    "row of another length": (["layers", 0, "rows", 0], [1, 2], "layers[0].rows[0] must be a list of at least"),
    "session of a row": (["layers", 0, "rows", 3, 0], 9, "layers[0].rows must have sessions of the pack, got 9"),
    "cell of a row": (["layers", 0, "rows", 3, 1], 10**30, "layers[0].rows[3][1] must be an integer <= 922337203"),
    "cell of a row that is missing": (["layers", 0, "rows", 3, 1], 4, "layers[0] must have cells of the pack, got 4"),
    "tokens": (["layers", 0, "rows", 3, 3], 0, "layers[0].rows[3][3] must be an integer >= 1, got 0"),
    "no number": (["layers", 0, "rows", 3, 4], math.nan, "it must be readable JSON"),
    "infinite": (["layers", 0, "rows", 3, 5], math.inf, "it must be readable JSON"),
    "a ratio beyond all floats": (["layers", 0, "rows", 20, 4], 1e300, "layers[0].rows[20][4] must be a finite number"),
    "a negative width": (["layers", 0, "rows", 20, 5], -0.1, "layers[0].rows[20][5] must be a finite number >= 0.0"),
    "a negative time": (["layers", 0, "rows", 3, 6], -1.0, "layers[0].rows[3][6] must be a finite number >= 0.0"),
    "graph": (["layers", 0, "rows", 3, 11], 1, "layers[0].rows[3][11] must be True or False, got 1"),
    "the default is its own measure": (["layers", 0, "rows", 3, 4], 0.1, "layers[0]: log_ratio and half_width of"),
    "a row twice": (["layers", 0, "rows", 1, 3], GRID[0], "layers[0]: rows[1] must differ from those before it"),
    "wrong": (["layers", 0, "wrong", 0], [1], "layers[0].wrong[0] must be a list of length 2"),
    "a wrong cell that is missing": (["layers", 0, "wrong", 0, 0], 4, "layers[0] must have cells of the pack, got 4"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_pack_is_one_error_with_the_path(name: str, tmp_path: Path) -> None:
    place, value, message = BROKEN[name]
    values = copy.deepcopy(json.loads(PACK.text()))
    target = values
    for key in place[:-1]:
        target = target[key]
    if value is NOW:
        del target[place[-1]]
    else:
        target[place[-1]] = value
    file = tmp_path / "tuning.json"
    file.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_pack(file, is_own=True)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, MoeregError)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "[]", "1", "null", '"x"', '{"schema": 2}'])
def test_another_file_is_one_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"must be|is required"):
        read_pack(file, is_own=True)


def test_two_layers_of_one_problem_and_default_are_refused() -> None:
    values = json.loads(PACK.text())
    values["layers"] *= 2
    with pytest.raises(ArgumentError, match=r"^layers\[1\] must differ"):
        Pack.from_json(json.dumps(values))


def test_only_this_user_and_root_may_write_to_a_users_pack(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(PACK.text())
    for mode in (0o620, 0o602):
        file.chmod(mode)
        with pytest.raises(ValueError, match="nobody else may write to it"):
            read_pack(file, is_own=True)
        assert read_pack(file, is_own=False) == PACK
    file.chmod(0o644)
    assert read_pack(file, is_own=True) == PACK


def test_rows_take_the_place_of_those_of_one_subject_and_keep_the_others() -> None:
    again = row(1, 1, "uniform", 4, -0.5, 0.001)
    pack = PACK.with_rows(PROBLEM, 0, [again], [(1, "off")])
    (layer,) = pack.layers
    assert len(layer.rows) == len(PACK.layers[0].rows)
    assert [each for each in layer.rows if each.key == again.key] == [again]
    assert layer.wrong == ((3, "off by 0.5"), (1, "off"))
    other = MoEProblem(**{**PROBLEM.to_dict(), "top_k": 4})
    assert [len(each.rows) for each in pack.with_rows(other, 0, [again]).layers] == [len(layer.rows), 1]
    # Beside another default a ratio means something else.
    assert [each.default for each in pack.with_rows(PROBLEM, 2, [again]).layers] == [0, 2]


def test_sessions_and_cells_are_there_once() -> None:
    assert PACK.next_session == 3
    assert Pack(PACK.machine).next_session == 1
    cooler = dataclasses.replace(PACK.sessions[0], clocks={"sm_mhz": 1500})
    assert [each.number for each in PACK.with_session(cooler).sessions] == [2, 1]
    assert PACK.with_session(cooler).sessions[1] == cooler
    assert PACK.with_cell(PACK.cells[1]) == (PACK, 1)
    updated, index = PACK.with_cell(dataclasses.replace(PACK.cells[1], digest="other"))
    assert (index, len(updated.cells)) == (4, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pack: pack.with_session(Session(9, "2026-11-24", "", PACK.sessions[0].process)), "process"),
        (
            lambda pack: pack.with_rows(PROBLEM, 0, [row(1, 1, "uniform", 1, math.nan)]),
            r"rows\[12\]\[4\] must be a finite number",
        ),
        (lambda pack: pack.with_rows(PROBLEM, 0, [row(7, 1, "uniform", 1)]), "session"),
        (lambda pack: pack.with_rows(PROBLEM, 9, []), "cells of the pack, got 9"),
        (lambda pack: pack.with_rows(PROBLEM, 0, [], [(9, "off")]), "cells of the pack, got 9"),
    ],
)
def test_what_could_not_be_read_back_is_not_taken(change: Callable[[Pack], Pack], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        change(PACK)


def test_a_write_makes_the_folder_and_hands_the_pack_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "data" / "tuning.json"
    assert write_pack(file, PACK.machine, lambda pack: PACK if pack == Pack(PACK.machine) else pack) == PACK
    assert read_pack(file, is_own=True) == PACK
    assert file.stat().st_mode & 0o077 == 0
    third = Session(3, "2026-11-24", "", "x")
    assert write_pack(file, PACK.machine, lambda pack: pack.with_session(third)).sessions[2:] == (third,)
    assert write_pack(file, PACK.machine, lambda pack: pack, is_new=True) == Pack(PACK.machine)


def test_an_unreadable_pack_or_one_of_another_machine_is_not_written_over(tmp_path: Path) -> None:
    file = tmp_path / "tuning.json"
    elsewhere = dataclasses.replace(PACK.machine, driver="570")
    write_pack(file, elsewhere, lambda pack: pack)
    elsewhere_said = r"times of this machine, got driver 570, here none; move it away, or name another"
    with pytest.raises(RecordFileError, match=elsewhere_said):
        write_pack(file, PACK.machine, lambda pack: PACK)
    assert read_pack(file, is_own=True).machine == elsewhere
    file.write_text("{")
    with pytest.raises(RecordFileError, match=r"readable JSON.*; delete it, or name another"):
        write_pack(file, PACK.machine, lambda pack: PACK)
    assert file.read_text() == "{"
    assert write_pack(file, PACK.machine, lambda pack: PACK, is_new=True) == PACK


def test_a_cell_holds_while_code_versions_and_state_are_the_same() -> None:
    made = PACK.cells[0]
    cell = CELLS[0]
    assert made.changes(cell, HERE) == ()
    assert dataclasses.replace(made, state="tuned").changes(cell, HERE) == ("state",)
    assert dataclasses.replace(made, digest="other").changes(cell, HERE) == ("code",)
    newer = dataclasses.replace(HERE, versions={**HERE.versions, "kernels": "1.3"})
    assert made.changes(cell, newer) == ("kernels 1.2 -> 1.3",)
    patched = dataclasses.replace(HERE, versions={**HERE.versions, "kernels": "1.2.1"})
    assert made.changes(cell, patched) == ()


def test_a_class_says_its_state_once_a_process() -> None:
    (cell,) = make_cells(("stateful",))
    answers = iter(["tactics 1"])
    cell.experts.tuning_state = classmethod(lambda cls: next(answers))  # type: ignore[method-assign]
    rule = cell.rule_for(HERE)
    assert rule is not None
    made = TimedCell.of(cell, PROBLEM.quant, rule, HERE)
    assert made.state == "tactics 1"
    assert made.changes(cell, HERE) == ()


def test_a_state_that_raises_or_is_no_text_is_a_change(tmp_path: Path) -> None:
    (cell,) = make_cells(("broken",))
    made = pack_of((cell,), []).cells[0]

    def broken(cls: type) -> str:
        raise RuntimeError("no file")

    (cell,) = make_cells(("broken",))
    cell.experts.tuning_state = classmethod(broken)  # type: ignore[method-assign, assignment]
    assert made.changes(cell, HERE)[-1] == "tuning_state() raised RuntimeError: no file"
    (cell,) = make_cells(("broken",))
    cell.experts.tuning_state = classmethod(lambda cls: b"x")  # type: ignore[method-assign, assignment, return-value]
    assert "tuning_state() of BrokenExperts must be a text" in made.changes(cell, HERE)[-1]

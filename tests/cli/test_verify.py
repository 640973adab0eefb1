"""`moereg verify`: exit codes, the table, JSON, the ledger, and the line that runs a failure again."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Iterator

import pytest

from moereg import cli
from moereg.cli._verify import _by_cause
from moereg.evidence.ledger import read_ledger
from moereg.registry import REGISTRY
from moereg.selection.loader import load_backends
from moereg.testing.check import CellName, Check, Outcome, Result
from tests.cli.command import Call, CallJson, strict_json

FILE = str(pathlib.Path(__file__).parents[1] / "kit" / "bad_backends.py")
MODULE = f"--module {FILE} --no-isolate"


@pytest.fixture(autouse=True)
def _bad_backends() -> Iterator[None]:
    """The file's backends are gone after each test."""
    load_backends()
    before = REGISTRY.cells
    yield
    REGISTRY.restore(before)
    sys.modules.pop("bad_backends", None)


def failures(err: str) -> int:
    """Lines on standard error that are not progress, of which a slow machine prints more."""
    lines = [line for line in err.splitlines() if not line.startswith("verifying")]
    assert all(line.startswith("failed: ") for line in lines)
    return len(lines)


def test_a_right_backend_passes(call_json: CallJson) -> None:
    code, report = call_json(f"verify good {MODULE} --check permute --check workspaces")
    assert code == 0
    assert report["passed"] is True
    assert [result["status"] for result in report["results"]] == ["passed", "passed"]
    (cell,) = report["cells"]
    assert (cell["backend"], cell["runs"], cell["counts"]["passed"]) == ("good", "natively", 2)


def test_a_failure_is_told_once_with_the_line_that_runs_it_again(
    call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(f"verify writes_behind {MODULE} --check numbers --seed 3")
    assert code == 1
    assert out.count("memory 1 bytes behind out was written to") == 1
    assert "and so do 8 other checks" in out
    assert failures(err) == 1
    (line,) = (line.partition("again: moereg ")[2] for line in out.splitlines() if "again:" in line)
    assert "--seed 3" in line
    sys.modules.pop("bad_backends", None)
    assert cli.main(shlex.split(line)) == 1
    assert "1 failed" in capsys.readouterr().out


def test_failures_with_one_cause_are_told_once_with_their_cause(call: Call) -> None:
    code, out, err = call(f"verify swapped {MODULE} --check numbers --check drawn --check faults")
    assert code == 1
    assert out.count("likely cause: gate and up swapped") == 1
    assert out.count("FAILED") == 1
    # Undone by the same fault, which a check of the kit plants: that is no second mistake.
    assert "planted" not in out
    assert "and so do" in out
    assert failures(err) == 1


def test_named_causes_come_first_and_drawn_layers_last() -> None:
    def failed(experts: str, kind: str, message: str) -> Result:
        check = Check.make(CellName("mine", experts, ("unquantized",), ("cpu",)), kind)
        return Result(check, Outcome("failed", f"error 5.4e-01, bound 5e-01{message}"))

    one, other = "; likely cause: gate and up swapped", "; likely causes: w2 transposed, or gate and up swapped"
    results = [
        *(failed("A", "drawn", ""), failed("B", "drawn", "; is late"), failed("B", "numbers", "")),
        *(failed("C", "drawn", one), failed("C", "numbers", other), failed("C", "numbers", one)),
    ]
    found = [[results.index(result) for result in group] for group in _by_cause(results)]
    assert found == [[5, 4, 3], [2], [0], [1]]


def test_a_drawn_layer_is_made_simple_and_runs_again(call: Call, call_json: CallJson) -> None:
    code, report = call_json(f"verify nan {MODULE} --check drawn")
    assert code == 1
    (result,) = report["results"]
    assert result["status"] == "failed"
    layer, problem = result["layer"], result["layer"]["problem"]
    assert (layer["num_tokens"], problem["num_experts"], problem["top_k"]) == (1, 1, 1)
    assert (layer["routing"], layer["fill"], layer["form"], layer["seed"]) == ("uniform", "nan", "contiguous", 0)
    arguments = shlex.split(result["rerun"].removeprefix("moereg "))
    assert json.loads(arguments[arguments.index("--check") + 1]) == layer
    code, out, err = call(f"verify nan {MODULE} --seed 5 --check {json.dumps(layer, separators=(',', ':'))} --json")
    assert code == 1, err
    (again,) = strict_json(out)["results"]
    assert (again["check"], again["layer"]) == ("drawn/NanExperts/cpu/unquantized/given", layer)


def test_a_part_of_the_checks_is_no_evidence(call: Call, tmp_path: pathlib.Path) -> None:
    code, out, err = call(f"verify good {MODULE} --check permute --ledger {tmp_path / 'ledger.json'}")
    assert (code, out) == (2, "")
    assert "leave --check out" in err


def test_a_machine_that_can_run_nothing_says_why(call: Call, call_json: CallJson) -> None:
    code, out, _ = call(f"verify elsewhere {MODULE}")
    assert code == 3
    assert "cannot run here: requires platform in (cuda:sm90), got cpu" in out
    assert out.splitlines()[-1].startswith("nothing of elsewhere can run here; 1 check passed")
    code, report = call_json(f"verify elsewhere {MODULE} --check permute")
    assert (code, report["passed"], report["results"]) == (3, None, [])


@pytest.mark.slow
def test_what_passed_everything_is_recorded(call: Call, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ledger.json"
    code, out, err = call(f"verify picky --module {FILE} --ledger {path}")
    assert code == 0
    assert "picky: 15 checks passed in" in out
    assert "note: " not in out + err
    assert f"1 of 1 cells are recorded in {path}" in out
    (record,) = read_ledger(path)
    assert (record.backend, record.rule) == ("picky", "cpu")
    assert record.cases == 15
    code, out, _ = call(f"verify writes_behind {MODULE} --ledger {path}")
    assert code == 1
    assert "0 of 1 cells are recorded" in out

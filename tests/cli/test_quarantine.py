"""What `moereg verify --quarantine` writes: schemes that failed here, and nothing that this machine does not run."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from moereg.cli._quarantine import lift_quarantine, quarantine_failures
from moereg.errors import UnknownBackendError
from moereg.evidence.on_machine import QUARANTINE
from moereg.platforms import current_platform
from moereg.registry import BackendCell, BackendRegistry
from moereg.selection.loader import list_cells, load_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.testing.check import GRADIENT_KINDS, IMPORT, CellName, Check, Outcome, Report, Result
from moereg.testing.drawing import DrawnLayer
from tests.cli.command import Call, CallJson

PROBLEM = MoEProblem(num_experts=4, hidden_size=64, intermediate_size=64, top_k=2, quant="int8_w8a16")
BAD = Outcome("failed", "off by 0.5")
GOOD = Outcome("passed")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "quarantine.json"
    monkeypatch.setenv("MOEREG_QUARANTINE", str(path))
    return path


def cell_of(experts: str) -> BackendCell:
    """The cell of a class; of several the one for weights alone."""
    return next(
        cell
        for cell in load_backends().cells
        if cell.class_name == experts and all(scheme.activation is None for scheme in cell.schemes)
    )


def name_of(experts: str) -> CellName:
    return next(name for name, cell in CellName.of_all(load_backends().cells).items() if cell == cell_of(experts))


def report(*results: tuple[Check, Outcome], imitated: tuple[CellName, ...] = ()) -> Report:
    return Report("mine", "cpu", "", {}, 0, tuple(Result(*each) for each in results), {}, frozenset(imitated))


def held() -> set[tuple[str, str]]:
    return {(record.experts, record.scheme) for record in QUARANTINE.read().records}


QUANTIZED = "TorchQuantizedExperts"
DRAWN = DrawnLayer(backend="torch", experts=QUANTIZED, rule="cpu", computes="int8_w8a16", problem=PROBLEM, num_tokens=1)
SCHEMES: dict[str, tuple[str, object]] = {
    "numbers": ("numbers", {"problem": PROBLEM.to_dict(), "is_first": True}),
    "a fault": ("faults", dataclasses.asdict(get_scheme("int8_w8a16"))),
    "a drawn layer": ("drawn", {"seed": 0, "num_layers": 10, "seconds": None}),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_check_of_one_scheme_quarantines_that_scheme(kind: str) -> None:
    check = Check.make(name_of(QUANTIZED), *SCHEMES[kind])
    layer = DRAWN if check.kind == "drawn" else None
    failed = (Outcome("failed", message, layer=layer) for message in ("off by 0.5", "later"))
    change = quarantine_failures(report(*((check, outcome) for outcome in failed)))
    assert held() == {(QUANTIZED, "int8_w8a16")}
    (record,) = QUARANTINE.read().records
    assert record.failure == f"{check.id} failed: off by 0.5"
    assert QUARANTINE.read().of_cell(cell_of(QUANTIZED), current_platform()) == (record,)
    assert str(change) == f"quarantined here: torch ({QUANTIZED}, cpu), int8_w8a16"


@pytest.mark.parametrize("status", ["failed", "crashed"])
def test_a_check_of_no_scheme_quarantines_all_of_them(status: str) -> None:
    outcome = Outcome(status, "off")
    quarantine_failures(report((Check.make(name_of(QUANTIZED), "permute"), outcome)), again=lambda check: outcome)
    assert held() == {(QUANTIZED, scheme.name) for scheme in cell_of(QUANTIZED).schemes}


def test_wrong_gradients_quarantine_training_alone() -> None:
    trained = "TorchTrainingExperts"
    failed = [(Check.make(name_of(trained), kind), BAD) for kind in (*GRADIENT_KINDS, "permute", "training")]
    change = quarantine_failures(report(*failed[:3]))
    assert [(record.trains, record.failure) for record in QUARANTINE.read().records] == [
        (True, f"{failed[0][0].id} failed: off by 0.5")
    ]
    assert str(change) == f"quarantined here: torch ({trained}, cpu), unquantized, gradients"
    # What also fails to infer has one record of each.
    assert [record.trains for record in quarantine_failures(report(*failed)).added] == [True, False]
    assert [record.trains for record in quarantine_failures(report(*failed[3:])).added] == [False]


@pytest.mark.parametrize("status", ["timed_out", "crashed"])
def test_what_took_too_long_or_crashed_runs_again_before_it_is_quarantined(status: str) -> None:
    check = Check.make(name_of(QUANTIZED), "permute")
    late = report((check, Outcome(status, "no end after 2 s")))
    for again in (None, lambda found: GOOD):
        change = quarantine_failures(late, again=again)
        assert held() == set()
        assert change.left[str(check.cell)].endswith(" once, and passes alone")
    asked: list[Check] = []

    def still(found: Check) -> Outcome:
        asked.append(found)
        return Outcome("timed_out", "no end after 4 s")

    quarantine_failures(late, again=still)
    assert held() == {(QUANTIZED, scheme.name) for scheme in cell_of(QUANTIZED).schemes}
    assert QUARANTINE.read().records[0].failure == f"{check.id} timed out: no end after 4 s"
    assert asked == [check]


def test_a_drawn_layer_that_crashes_is_run_again_by_itself() -> None:
    check = Check.make(name_of(QUANTIZED), *SCHEMES["a drawn layer"])
    asked: list[Check] = []
    crashed = report((check, Outcome("crashed", "the process died of SIGSEGV", layer=DRAWN)))
    change = quarantine_failures(crashed, again=lambda found: asked.append(found) or GOOD)
    assert [json.loads(found.argument) for found in asked] == [{"layer": DRAWN.to_dict()}]
    assert change.left


def test_a_cell_that_passes_everything_is_lifted() -> None:
    first, second = (Check.make(name_of(experts), "permute") for experts in (QUANTIZED, "TorchDenseExperts"))
    quarantine_failures(report((first, BAD), (second, BAD)))
    assert ("TorchDenseExperts", "unquantized") in held()
    # Something is not known any more, so what failed stays.
    quarantine_failures(report((second, GOOD), (second, Outcome("skipped", "no time left"))))
    assert ("TorchDenseExperts", "unquantized") in held()
    quarantine_failures(report((second, GOOD)), is_whole=False)
    assert ("TorchDenseExperts", "unquantized") in held()
    change = quarantine_failures(report((second, GOOD)))
    assert {experts for experts, _ in held()} == {QUANTIZED}
    assert str(change) == "no longer quarantined: torch (TorchDenseExperts, *), unquantized"
    assert [record["experts"] for record in change.to_dict()["lifted"]] == ["TorchDenseExperts"]


def test_what_this_machine_does_not_select_is_left() -> None:
    emulated = name_of(QUANTIZED)
    stranger = CellName("mine", "MineExperts", ("unquantized",), ("cpu",))
    elsewhere = next(
        name
        for name, cell in CellName.of_all(load_backends().cells).items()
        if cell.rule_for(current_platform()) is None
    )
    failures = [(Check.make(name, "permute"), BAD) for name in (emulated, stranger, elsewhere)]
    change = quarantine_failures(report(*failures, imitated=(emulated,)))
    assert held() == set()
    assert list(change.left) == [str(emulated), str(stranger), str(elsewhere)]
    assert "not by an installed wheel" in change.left[str(stranger)]
    assert "selection on cpu does not offer it" in change.left[str(elsewhere)]


def test_a_backend_whose_import_ends_the_process_is_not_imported_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from moereg.cli import _quarantine

    def crash() -> None:
        raise AssertionError("the backends were imported")

    monkeypatch.setattr(_quarantine, "load_backends", crash)
    monkeypatch.setattr(_quarantine, "current_platform", crash)
    check = Check.make(CellName("mine", IMPORT, ("*",), ("*",)), "deciding")
    change = quarantine_failures(report((check, Outcome("crashed", "signal 11"))))
    assert change.left == {
        "mine": "loading ends the process: signal 11; uninstall what does that, or leave it out of MOEREG_PLUGINS"
    }
    change = quarantine_failures(report((check, Outcome("timed_out", "no end after 0.1 s"))))
    assert "give it more --check-seconds" in change.left["mine"]


def test_lifting_is_for_a_backend_on_this_machine() -> None:
    quarantine_failures(report((Check.make(name_of("TorchDenseExperts"), "permute"), BAD)))
    (record,) = lift_quarantine("torch").lifted
    assert (record.experts, held()) == ("TorchDenseExperts", set())
    change = lift_quarantine("torch")
    assert (change.lifted, str(change)) == ((), "torch is not quarantined here")
    with pytest.raises(UnknownBackendError, match="unknown backend 'torhc', did you mean 'torch'"):
        lift_quarantine("torhc")
    assert list_cells("torch")


def test_the_command_quarantines_and_lifts(
    file: Path, tmp_path: Path, isolated_registry: BackendRegistry, call: Call, call_json: CallJson
) -> None:
    assert call(f"new-backend wrong_here --directory {tmp_path / 'wheel'}")[0] == 0
    module = tmp_path / "wheel" / "src" / "moereg_wrong_here" / "backend.py"
    module.write_text(module.read_text().replace("weights.w13.transpose", "weights.w13.flip(1).transpose"))
    line = f"verify wrong_here --module {module} --no-isolate --check float32"
    assert "quarantine" not in call_json(line)[1]
    code, found = call_json(f"{line} --quarantine")
    assert (code, list(found["quarantine"])) == (1, ["file", "added", "lifted", "left"])
    assert found["quarantine"]["file"] == str(file)
    (added,) = found["quarantine"]["added"]
    assert (added["backend"], added["rule"], added["scheme"]) == ("wrong_here", "cpu", "unquantized")
    layer = "explain --experts 8 --hidden 64 --intermediate 32 --top-k 2 --require wrong_here"
    code, found = call_json(layer)
    assert code == 3
    (held,) = (each for each in found["decisions"] if each["backend"] == "wrong_here")
    assert [reason["code"] for reason in held["reasons"]] == ["quarantined"]
    code, out, _ = call("verify wrong_here --unquarantine")
    assert (code, out) == (0, "no longer quarantined: wrong_here (WrongHereExperts, cpu), unquantized\n")
    assert call_json(layer)[0] == 0
    code, found = call_json("verify wrong_here --unquarantine")
    assert (code, found["quarantine"]["lifted"]) == (0, [])
    sys.modules.pop("backend", None)


def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEREG_QUARANTINE", "/dev/null/quarantine.json")
    code, out, err = call("verify torch --quarantine")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the quarantine '/dev/null/quarantine.json' cannot be used" in err

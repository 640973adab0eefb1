"""`moereg regret`: what the present choice loses, and that what was not measured is never 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moereg.dispatch import explain_backends
from moereg.registry import register_moe_backend
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.cli.command import SIZES, Call, CallJson
from tests.measured.packs import GRID, rows_of, write_here
from tests.support.fakes import FakeExperts

NAMES = ("fake_first", "fake_second")
FASTER = math.log(0.8)


@pytest.fixture(autouse=True)
def fakes(isolated_registry: object) -> None:
    layouts = {"layouts": ("canonical", "rows"), "shared_layouts": ("rows",)}
    for place, name in enumerate(NAMES):
        register_moe_backend(name, 500 - place, ("unquantized",), ("cpu",))(type(name.title(), (FakeExperts,), layouts))


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEREG_TUNING", str(tmp_path / "pack.json"))
    return tmp_path / "pack.json"


def selection(**fields: Any) -> Selection:
    return explain_backends(MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, **fields))


def test_without_times_nothing_is_said_to_be_lost(pack: Path, call: Call, call_json: CallJson) -> None:
    code, found = call_json(f"regret {SIZES}")
    (row,) = found["rows"]
    assert (code, row["loss"], row["default_loss"], row["tokens"]) == (0, None, None, [])
    assert row["selected"] == row["default"] == {"backend": "fake_first", "experts": "Fake_First"}
    assert row["not_measured"] == ["no pack in force has valid times of this layer; moereg tune measures it"]
    code, out, _ = call(f"regret {SIZES} --fail-above 50")
    assert code == 1
    assert "not measured: no pack in force" in " ".join(out.split())
    assert "--fail-above needs times of everything, got none or not all of sizes" in " ".join(out.split())
    assert "0.0%" not in out


def test_who_fits_without_times_is_named(pack: Path, call_json: CallJson) -> None:
    write_here(pack, selection(), NAMES, rows_of({1: FASTER}))
    register_moe_backend("fake_new", 400, ("unquantized",), ("cpu",))(type("Fake_New", (FakeExperts,), {}))
    code, found = call_json(f"regret {SIZES} --deny torch --fail-above 5")
    assert (code, found["rows"][0]["loss"]) == (1, 0.0)
    assert found["rows"][0]["not_measured"] == ["fake_new (Fake_New), which fits and has no valid times"]


def test_who_was_left_out_as_slow_is_told_apart(pack: Path, call: Call, call_json: CallJson) -> None:
    write_here(pack, selection(), NAMES, rows_of({}), left_out=[(1, "far behind")])
    code, found = call_json(f"regret {SIZES} --deny torch --fail-above 5")
    (row,) = found["rows"]
    assert (code, row["loss"], row["not_measured"]) == (0, 0.0, [])
    assert row["left_out"] == [{"backend": "fake_second", "experts": "Fake_Second", "reason": "far behind"}]
    assert "left out when it was measured: fake_second (Fake_Second): far behind" in call(f"regret {SIZES}")[1]


def test_a_measured_choice_loses_nothing_and_the_default_what_tuning_gained(
    pack: Path, call: Call, call_json: CallJson
) -> None:
    write_here(pack, selection(), NAMES, rows_of({1: FASTER}))
    code, found = call_json(f"regret {SIZES} --fail-above 0 --deny torch")
    (row,) = found["rows"]
    assert (code, found["failures"], row["not_measured"]) == (0, [], [])
    assert (row["selected"]["backend"], row["default"]["backend"]) == ("fake_second", "fake_first")
    assert (row["loss"], row["default_loss"]) == (0.0, pytest.approx(0.25))
    assert [point["tokens"] for point in row["tokens"]] == list(GRID)
    assert {point["chosen"]["backend"] for point in row["tokens"]} == {"fake_second"}
    _, out, _ = call(f"regret {SIZES}")
    assert "over equal decades of tokens the choice loses 0.0% against the fastest measured" in out
    assert "the default, fake_first (Fake_First), loses 25.0%" in out


def test_a_choice_that_one_session_cannot_change_loses(pack: Path, call: Call, call_json: CallJson) -> None:
    write_here(pack, selection(), NAMES, rows_of({1: FASTER}, sessions=(1,)))
    code, found = call_json(f"regret {SIZES} --fail-above 25.1 --deny torch")
    assert (code, found["failures"]) == (0, [])
    assert [found["rows"][0][key] for key in ("loss", "default_loss")] == [pytest.approx(0.25)] * 2
    assert found["rows"][0]["tokens"][0]["fastest"]["backend"] == "fake_second"
    code, out, _ = call(f"regret {SIZES} --fail-above 24.9 --deny torch")
    assert code == 1
    assert "more than --fail-above 24.9: sizes loses 25.0%" in out


def test_each_number_of_tokens_has_its_choice_of_the_plan(pack: Path, call_json: CallJson) -> None:
    logs = {1: 0.1, 4: FASTER, 16: FASTER, 64: 0.3}
    write_here(pack, selection(), NAMES, rows_of({1: logs}), layouts=("rows", "rows"))
    _, found = call_json(f"regret {SIZES}")
    (row,) = found["rows"]
    assert [point["chosen"]["backend"] for point in row["tokens"]] == [NAMES[0], NAMES[1], NAMES[1], NAMES[0]]
    assert row["loss"] == 0.0
    assert row["default_loss"] == pytest.approx(4 / (2 + 2 * 0.8) - 1)


def test_what_the_request_denies_is_not_compared_with(pack: Path, call_json: CallJson) -> None:
    write_here(pack, selection(), NAMES, rows_of({1: FASTER}, sessions=(1,)))
    _, found = call_json(f"regret {SIZES} --deny fake_second")
    assert found["rows"][0]["loss"] == 0.0
    # The default of another request was not measured.
    code, found = call_json(f"regret {SIZES} --require torch --fail-above 5")
    assert (code, found["rows"][0]["loss"]) == (1, None)


def test_a_histogram_says_which_calls_were_not_measured(
    pack: Path, tmp_path: Path, call: Call, call_json: CallJson
) -> None:
    write_here(pack, selection(), NAMES, rows_of({1: {1: FASTER, 4: 0.1, 16: 0.1, 64: 0.1}}))
    (tmp_path / "calls.json").write_text('{"1": 900, "64": 100, "128": 7}')
    line = f"regret {SIZES} --deny torch --histogram {tmp_path / 'calls.json'}"
    code, found = call_json(line)
    (row,) = found["rows"]
    assert (code, found["calls"]) == (0, {"1": 900, "64": 100, "128": 7})
    assert row["not_measured"] == ["7 calls, of fewer than 1 or more than 64 tokens"]
    assert row["default_loss"] == pytest.approx(1000 / (900 * 0.8 + 100) - 1)
    code, out, _ = call(f"{line} --fail-above 90")
    assert code == 1
    assert "over 1,007 calls the choice loses" in out


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": 1}', '{"0": 1}', '{"-4": 1}', '{"1.5": 1}', '{"1": -1}', '{"1": 1.5}', "{}", '{"1": 0}']
)
def test_bad_histograms(pack: Path, tmp_path: Path, call: Call, text: str) -> None:
    (tmp_path / "calls.json").write_text(text)
    code, out, err = call(f"regret {SIZES} --deny torch --histogram {tmp_path / 'calls.json'}")
    assert (code, out) == (2, "")
    assert err.startswith("moereg: --histogram takes calls by tokens, such as")


@pytest.mark.parametrize("rest", ["--histogram none.json", "--platform cuda:sm90", "--fail-above -1", "--layer 1"])
def test_bad_input(pack: Path, call: Call, rest: str) -> None:
    assert call(f"regret {SIZES} {rest}")[:2] == (2, "")


def test_nothing_fits(pack: Path, call: Call, call_json: CallJson) -> None:
    code, out, _ = call(f"regret {SIZES} --require triton --fail-above 3")
    assert code == 3
    assert "nothing fits" in out
    assert call_json(f"regret {SIZES} --require triton")[1]["rows"][0]["default"] is None


def test_layers_of_a_checkpoint_that_are_alike_are_compared_once(
    pack: Path, checkpoint: Path, call: Call, call_json: CallJson
) -> None:
    _, found = call_json(f"regret --checkpoint {checkpoint} --deny torch")
    (row,) = found["rows"]
    assert row["layers"] == [1, 2]
    problem = MoEProblem.from_dict(row["problem"])
    write_here(pack, explain_backends(problem), NAMES, rows_of({1: FASTER}))
    code, out, _ = call(f"regret --checkpoint {checkpoint} --fail-above 1 --deny torch")
    assert code == 0
    assert "layer 1 and 1 like it: E4" in " ".join(out.split())
    assert json.loads(call(f"regret --checkpoint {checkpoint} --layer 2 --json")[1])["rows"][0]["layers"] == [2]

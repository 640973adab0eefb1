"""`moereg bench`: its comparisons and refusals."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from moereg.bench.roofline import Ceilings
from moereg.registry import register_moe_backend
from tests.cli.command import SIZES, Call, CallJson
from tests.support.fakes import RaisingExperts, WrongExperts

pytestmark = pytest.mark.usefixtures("isolated_registry")

ROW_KEYS = ["backend", "experts", "tokens", "relative_error", "tolerance", "passed"]
ROW_KEYS += ["failure", "damage", "time_us", "p10_us", "p90_us", "tflops", "gbps", "roofline_us", "share"]
ROW_KEYS += ["origin", "origin_version"]
RATES = ["time_us", "p10_us", "p90_us", "tflops", "gbps", "share"]
BENCH = f"bench {SIZES} --rounds 2 --tokens 16,1"


def _check_bench(found: dict[str, Any]) -> None:
    assert found["schema"] == 1
    assert list(found["ceilings"]) == ["matmul_tflops", "read_gbps", "read_by"]
    for row in found["rows"]:
        assert list(row) == ROW_KEYS
        assert all((row[name] is not None) is row["passed"] for name in RATES)
    for skipped in found["skipped"]:
        assert list(skipped) == ["backend", "reasons"]
        assert skipped["reasons"]


def test_bench_compares_all_that_fit(call_json: CallJson, ceilings: Ceilings) -> None:
    code, found = call_json(BENCH)
    _check_bench(found)
    assert code == 0
    accepted = [decision for decision in call_json(f"explain {SIZES}")[1]["decisions"] if decision["accepted"]]
    expected = [(decision["backend"], decision["experts"]) for decision in accepted]
    for num_tokens in (1, 16):
        rows = [row for row in found["rows"] if row["tokens"] == num_tokens]
        assert [(row["backend"], row["experts"]) for row in rows] == expected
    assert [row["tokens"] for row in found["rows"]] == sorted(row["tokens"] for row in found["rows"])
    assert found["problem"]["max_num_tokens"] == 16
    assert (found["platform"], found["routing"]) == ("cpu", "uniform")
    assert found["ceilings"] == vars(ceilings)
    assert found["versions"]["torch"] == metadata.version("torch")
    assert "triton" in {skipped["backend"] for skipped in found["skipped"]}
    for row in found["rows"]:
        assert row["passed"] is True
        assert 0 < row["relative_error"] <= row["tolerance"]
        assert row["share"] == pytest.approx(row["roofline_us"] / row["time_us"])
        flops = 2 * row["tokens"] * 2 * 3 * 64 * 32
        assert row["tflops"] * row["time_us"] * 1e6 == pytest.approx(flops)


def test_bench_for_people(call: Call, ceilings: Ceilings) -> None:
    code, out, err = call(f"{BENCH} --routing zipf")
    assert code == 0
    assert not err or "..." in err, err
    assert out.count("fastest") == 2
    for text in ("E8 H64 I32 k2", "% of roofline", "TorchPackedExperts", "0.1 TFLOP/s", "20 GB/s", "zipf routing"):
        assert text in out
    assert "a layer gets torch (TorchPackedExperts): chosen by priority" in out
    (line,) = (line for line in out.splitlines() if "requires another platform than cpu [platform]" in line)
    # In whichever order: FlashInfer's come first where it is installed.
    assert {"triton", "cutlass"} <= {*line.removeprefix("not compared: ").partition(":")[0].split(", ")}
    full = call(f"{BENCH} -v")[1]
    assert "flashinfer_trtllm does not fit:\n  - requires platform in (cuda:sm100f), got " in full
    assert "not compared" not in full


def test_bench_measures_the_ceilings_of_this_machine(call_json: CallJson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.bench.roofline._CPU_READ_BYTES", 1 << 24)
    monkeypatch.setattr("moereg.bench.roofline._CPU_MATMUL_SIZES", (128,))
    code, found = call_json(f"bench {SIZES} --dtype float32 --rounds 1 --tokens 2 --require torch")
    _check_bench(found)
    assert code == 0
    assert found["ceilings"]["matmul_tflops"] > 0
    assert found["ceilings"]["read_gbps"] > 0
    assert found["ceilings"]["read_by"].startswith("torch sum")
    assert all(row["roofline_us"] > 0 for row in found["rows"])
    skipped = {skipped["backend"]: skipped["reasons"] for skipped in found["skipped"]}
    assert {"platform", "not_required"} <= {reason["code"] for reason in skipped["triton"]}


@pytest.mark.usefixtures("ceilings")
def test_bench_gives_a_wrong_backend_no_time(call: Call, call_json: CallJson) -> None:
    register_moe_backend("fake_wrong", 99, ("unquantized",), ("*",))(type("Wrong", (WrongExperts,), {}))
    code, found = call_json(BENCH)
    _check_bench(found)
    assert code == 1
    wrong = [row for row in found["rows"] if row["backend"] == "fake_wrong"]
    assert len(wrong) == 2
    for row in wrong:
        assert row["passed"] is False
        assert row["relative_error"] == pytest.approx(0.5, rel=0.05)
    assert all(row["passed"] for row in found["rows"] if row["backend"] != "fake_wrong")
    code, out, _ = call(BENCH)
    assert code == 1
    assert out.count("WRONG") == 2
    assert "5.0e-01 > " in out
    assert out.splitlines()[-1] == "not right: fake_wrong (Wrong) of abc"
    assert out.count("fastest") == 2


@pytest.mark.usefixtures("ceilings")
def test_a_backend_that_fails_takes_no_other_down(call: Call, call_json: CallJson) -> None:
    register_moe_backend("fake_raising", 1, ("unquantized",), ("*",))(type("Raising", (RaisingExperts,), {}))
    code, found = call_json(BENCH)
    _check_bench(found)
    assert code == 1
    assert {row["backend"]: row["passed"] for row in found["rows"]} == {"torch": True, "fake_raising": False}
    failures = {row["backend"]: row["failure"] for row in found["rows"]}
    assert failures["torch"] is None
    assert "raised in Raising.workspace_shapes: RuntimeError: a bug of two lines" in failures["fake_raising"]
    code, out, _ = call(BENCH)
    assert code == 1
    assert "fake_raising (Raising) of abc failed at 16 tokens: " in " ".join(out.split())
    assert "RuntimeError: a bug" in out


@pytest.mark.parametrize("line", ["--require triton", "--quant fp8_block128 --require triton", "--deny torch"])
def test_nothing_fits_to_bench_is_exit_3(call: Call, call_json: CallJson, line: str) -> None:
    code, found = call_json(f"{BENCH} --platform cpu {line}")
    _check_bench(found)
    assert (code, found["rows"]) == (3, [])
    assert set(found["ceilings"].values()) == {None}
    assert {skipped["backend"] for skipped in found["skipped"]} >= {"torch", "triton"}
    code, out, err = call(f"{BENCH} --platform cpu {line}")
    assert (code, err) == (3, "")
    assert out.splitlines()[-1].startswith("nothing fits")

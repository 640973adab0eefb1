"""`--ep`: a layer over several ranks, explained without any, run and compared by processes on this machine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from moereg.cli._ep import _passed
from tests.cli.command import ROOT, SELECTION_KEYS, Call, CallJson, run_module, run_python, strict_json

SIZES = "--experts 8 --hidden 128 --intermediate 64 --top-k 2 --dtype float32 --platform cpu"
ROW_KEYS = {"way", "wire", "activation_format", "backend", "experts", "computes", "tier", "tokens", "routing"}
ROW_KEYS |= {"relative_error", "tolerance", "passed", "failure", "repeats", "one_rank_error", "one_rank_equal"}
ROW_KEYS |= {"captured", "time_us", "p10_us", "p90_us", "one_rank_us", "over_one_rank", "bare_us", "bytes_out"}
ROW_KEYS |= {"bytes_back", "batches"}


def check_rows(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        assert set(row) == ROW_KEYS
        assert row["failure"] is None
        assert row["passed"]
        assert row["repeats"]
        assert row["relative_error"] <= row["tolerance"]
        for name in ("time_us", "one_rank_us", "over_one_rank", "bare_us", "bytes_out", "bytes_back"):
            assert row[name] > 0, name


def test_explain_shows_ways_and_then_backends(call: Call, call_json: CallJson) -> None:
    line = "explain --ep 8 --model deepseek-v3 --quant fp8_block128 --tokens 64 --platform cuda:sm90"
    code, found = call_json(line)
    assert code == 0
    assert list(found)[: len(SELECTION_KEYS)] == SELECTION_KEYS
    assert found["ranks"] == 8
    assert found["movement"]["selected"] in {one["way"] for one in found["movement"]["decisions"] if one["accepted"]}
    assert found["problem"]["num_local_experts"] == 32
    code, out, _ = call(f"{line} --way all_to_all")
    assert code == 0
    assert "8 ranks over nccl on cuda" in out
    assert "chosen    all_to_all" in out
    assert "requires a way in (all_to_all)" in out
    # A way has one line, whatever number of rectangles it was registered with, and says what its rank is worth.
    _, out, _ = call("explain --ep 2 --model qwen3-30b-a3b --tokens 64 --platform cuda:sm90")
    (line,) = (line for line in out.splitlines() if " all_gather (" in line)
    assert line.startswith("chosen    all_gather (standard or batched, *, predicted priority 60)")
    code, out, _ = call("explain --ep 8 --model deepseek-v3 --platform cuda:sm90 --way all_gather")
    assert code == 3
    assert "requires max_num_tokens" in out


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([(True, None), (False, "left out: no room")], True),
        ([(True, None), (False, "wrong numbers")], False),
        ([(False, "left out: no room")], None),
    ],
)
def test_rows_that_are_left_out_have_not_failed(rows: list[tuple[bool, str | None]], passed: bool | None) -> None:
    assert _passed([{"passed": is_right, "failure": failure} for is_right, failure in rows], "") is passed


def test_more_ranks_than_torchrun_started(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    code, _, err = call(f"bench --ep 4 {SIZES}")
    assert code == 2
    assert "--ep must be the number of ranks that torchrun started, 2, got 4" in err


@pytest.mark.slow
def test_run_over_two_ranks_is_what_one_rank_computes(call_json: CallJson) -> None:
    code, found = call_json(f"run --ep 2 {SIZES} --tokens 5 --way all_to_all")
    assert code == 0
    check_rows(found)
    (row,) = found["rows"]
    assert (found["ranks"], found["transport"], row["way"], row["tokens"]) == (2, "cpu:gloo", "all_to_all", 5)
    assert row["one_rank_error"] < 1e-6


@pytest.mark.slow
def test_bench_compares_ways(call: Call) -> None:
    told = "--tokens 3,9 --routing uniform,zipf --rounds 3 --replicas 2 --batches 1,2 --json"
    done = run_module(f"bench --ep 2 {SIZES} {told}")
    assert done.returncode == 0, done.stderr
    found = strict_json(done.stdout)
    check_rows(found)
    ways = {row["way"] for row in found["rows"]}
    assert ways == {"all_to_all", "all_gather", "low_latency"}
    assert len(found["rows"]) == len(ways) * 8
    assert {row["batches"] for row in found["rows"]} == {1, 2}
    assert (found["balanced"], found["replicas"], found["model"]) == (True, 2, None)
    assert {one["way"] for one in found["skipped"]} >= {"all_to_all_sums"}


@pytest.mark.slow
def test_torchruns_ranks_are_joined() -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "moereg", "bench", "--ep", "2", *SIZES.split(), "--tokens", "4", "--way", "all_to_all", "--json"]
    done = run_python(*command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    found = strict_json(done.stdout)
    check_rows(found)
    assert len(found["rows"]) == 1


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_command_with_its_words() -> None:
    done = run_module(f"bench --ep 2 {SIZES} --tokens 4 --json", MOEREG_REQUIRE="triton")
    assert done.returncode == 1
    found = strict_json(done.stdout)
    assert found["rows"] == []
    assert "triton" in found["failure"]

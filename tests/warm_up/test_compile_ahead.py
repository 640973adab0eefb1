"""Kernels that were compiled ahead are those that calls launch: nothing is compiled after."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from moereg.cli import main
from moereg.dispatch import select_backend
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up import worker
from moereg.layer.warm_up.ahead import ask
from moereg.layer.warm_up.dummy import MOVING_KERNELS, described, empty_weights
from moereg.spec.problem import MoEProblem
from tests.cli.command import printed

SCRIPT = str(Path(__file__).parent / "offline.py")

SIZES = ("--experts", "8", "--hidden", "256", "--intermediate", "128", "--top-k", "2")


def _problem(**facts: Any) -> MoEProblem:
    return MoEProblem(num_experts=8, hidden_size=256, intermediate_size=128, top_k=2, **facts)


def _compile(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = main(["compile", *SIZES, "--platform", "cuda:sm90", "--jobs", "2", "--json", *arguments])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else {}, err


def _launched(cache: Path, *layers: tuple[MoEProblem, list[int]]) -> list[dict[str, int]]:
    asked = json.dumps([(problem.to_dict(), counts) for problem, counts in layers])
    text = printed(SCRIPT, "launch", asked, "cuda:sm90", timeout=800, TRITON_CACHE_DIR=str(cache))
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_after_compiling_ahead_nothing_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "made"
    code, made, err = _compile(capsys, "--tokens", "1-24", "--cache", str(cache))
    assert code == 0, err
    assert made["token_counts"] == {"number": 24, "least": 1, "most": 24}
    assert made["num_compiled"] == len(made["kernels"]) >= 6
    assert {kernel["name"].rpartition(":")[2] for kernel in made["kernels"]} >= {
        "_gemv_gate_up_kernel", "_gate_up_kernel", "_sort_routes_kernel", "_reduce_routes_kernel"
    }  # fmt: skip
    # Numbers that nobody named a launch for among them.
    counts = [1, 2, 3, 7, 8, 13, 16, 17, 19, 23, 24]
    (found,) = _launched(cache, (_problem(), counts))
    assert found["compiled"] == 0
    # Elsewhere, once the paths in the folder are this place's.
    moved = tmp_path / "moved"
    shutil.move(cache, moved)
    assert main(["compile", "--check", "--cache", str(moved), "--platform", "cuda:sm90"]) == 0
    assert "1 layers" in capsys.readouterr().out
    (found,) = _launched(moved, (_problem(), counts))
    assert found["compiled"] == 0
    assert 0 < found["read"] <= len(made["kernels"]) < found["launched"]
    # As warm_up asks: by a kernel's own weights instead of a scheme's.
    selection = select_backend(_problem(), platform="cuda:sm90", require="triton")
    assert selection.winner is not None
    (weights,) = empty_weights(make_experts(selection, selection.winner))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    asked = ask(selection, range(1, 25), 2, has_map=False, weights=described(weights), shared_bytes=232448)
    assert asked.fault is None
    assert asked.counts[0] == 1
    assert [kernel.name for kernel in asked.kernels if not kernel.was_there] == []
    assert len(asked.kernels) == len(made["kernels"])
    # So it is where kernels lay tokens out by expert, too: they are compiled for no number of tokens either.
    code, made, err = _compile(capsys, "--activation-format", "batched", "--tokens", "1-24", "--cache", str(moved))
    assert code == 0, err
    names = [kernel["name"] for kernel in made["kernels"]]
    assert sorted(name.rpartition(":")[2] for name in names if name.startswith(MOVING_KERNELS)) == [
        "_place_tokens_kernel", "copy_rows_kernel", "reduce_sorted_rows_kernel"
    ]  # fmt: skip
    batched, other = (_problem(activation_format="batched"), counts), (_problem(has_bias=True), [1])
    found, compiled = _launched(moved, batched, other)
    assert found["compiled"] == 0
    assert found["launched"] == 6 * len(counts)
    # The counter counts: this layer has a bias, which is another variant of the products.
    assert compiled["compiled"] > 0


# Averages of rows an expert where another rule begins.
BORDERS = (22, 30, 48, 72, 96, 110, 176, 400)


def test_kernels_on_either_side_of_a_rule_s_border_are_found() -> None:
    few: dict[str, Any] = {"num_experts": 8, "top_k": 4, "hidden_size": 64, "intermediate_size": 64}
    many = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "intermediate_size": 256}
    # The first number of tokens of each list of launches: few columns, many columns, many experts (whose routes are
    # sorted in two launches before one border and in three before another), rows by expert, 32 bits, codes with scales
    # of blocks and of rows (which are encoded several at a time from some number on).
    layers: list[tuple[dict[str, Any], list[int] | None]] = [
        (few, [43, 45, 193, 353, 801]),
        ({**few, "intermediate_size": 2048}, [43, 45, 193, 353]),
        (many, [175, 177, 385, 575, 577, 1407, 1409]),
        ({**few, "activation_format": "batched"}, [43, 45, 353]),
        ({**few, "dtype": "float32"}, None),
        ({**few, "hidden_size": 640, "intermediate_size": 640, "quant": "fp8_block128"}, [43, 61, 221]),
        ({**few, "hidden_size": 640, "intermediate_size": 640, "quant": "fp8_channel_token"}, [43, 61, 351]),
    ]
    asked = []
    for facts, _ in layers:
        tokens_a_row = facts["num_experts"] // facts["top_k"]
        counts = [tokens_a_row * border + more for border in BORDERS for more in (-1, 0, 1, 2)]
        asked.append((MoEProblem(**facts).to_dict(), counts))
    lines = printed(SCRIPT, "sweep", json.dumps(asked), "cuda:sm90", timeout=300).splitlines()
    answers = [json.loads(line) for line in lines]
    for (facts, first), (_, counts), answer in zip(layers, asked, answers, strict=True):
        assert first is None or answer["counts"] == first, facts
        for count, names in zip(counts, answer["launched"], strict=True):
            on_hopper = first is not None and count >= first[1]
            codes = "_quantized" if "quant" in facts else ""
            assert (f"{codes}_grouped_kernel" in names) == on_hopper, (facts, count)
            assert (f"{codes}_gate_up_kernel" in names) != on_hopper, (facts, count)


@pytest.mark.few(most=1)
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
def test_a_backend_that_compiles_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], activation_format: str
) -> None:
    options = ("--tokens", "1,2", "--require", "torch", "--activation-format", activation_format)
    code, made, err = _compile(capsys, *options, "--cache", str(tmp_path))
    assert code == 3
    assert err.startswith("moereg: backend 'torch' compiles nothing ahead: it launches no Triton kernels; require one")
    assert err.count("\n") == 1
    assert made["kernels"] == []


def test_a_module_that_the_process_cannot_import_is_a_fault() -> None:
    # The layer then compiles in its own process, and says so.
    answer = worker._answer({"modules": ["no_such_kernel"]}, lambda values: None)
    assert answer["fault"].startswith("module 'no_such_kernel' must import and register a backend, got ModuleNotFound")

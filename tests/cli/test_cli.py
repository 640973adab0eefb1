"""The command line's contract: exit codes, one-line errors, and JSON with exactly the keys that the design names."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import moereg
from moereg import cli
from moereg.author import ExpertInputs, PermutedWeights
from moereg.cli import _layer, _progress
from moereg.cli import _memory as cli_memory
from moereg.cli._options import ProblemFlags
from moereg.cli._output import console
from moereg.experts import REASON_CODES
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.registry import REGISTRY, BackendRegistry, register_moe_backend
from moereg.shapes import get_shape
from moereg.testing import ledger
from moereg.testing.ledger import Verification
from moereg.testing.tolerances import layer_tolerance
from moereg.tuning.roofline import Ceilings
from tests.support.fakes import FakeExperts, WrongExperts

SIZES = "--experts 8 --hidden 64 --intermediate 32 --top-k 2"

SELECTION_KEYS = ["schema", "problem", "platform", "platform_source", "request", "selected", "source", "decisions"]
EXPLAIN_KEYS = [*SELECTION_KEYS, "verification"]
DECISION_KEYS = ["backend", "experts", "rule", "computes", "accepted", "priority", "tier", "origin"]
DECISION_KEYS += ["assumes", "reasons"]
INFO_KEYS = ["schema", "version", "platform", "backends", "plugins"]
BACKEND_KEYS = ["name", "origin", "cells", "available", "reasons"]
CELL_KEYS = ["experts", "quant_schemes", "platforms", "priority", "tier", "verified", "not_verified"]
PLUGIN_KEYS = ["group", "name", "value", "distribution", "status", "error"]
MEASUREMENTS = ["relative_error", "tolerance", "time_us", "permute_ms"]
RUN_KEYS = ["schema", "backend", "platform", "problem", "tokens", "relative_error", "tolerance", "passed"]
RUN_KEYS += ["failure", "damage", "time_us", "permute_ms", "selection"]

Call = Callable[[str], tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def call_json(call: Call) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """As `call` with `--json`; standard output has to be one object and nothing else."""

    def run(line: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = call(f"{line} --json")
        return code, _strict(out)

    return run


CallJson = Callable[[str], tuple[int, dict[str, Any]]]


def _strict(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def _module(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moereg", *line.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )


# --- exit 2: one line on standard error, nothing on standard output ---

BAD_LINES = {
    "no command": ("", "Missing command"),
    "unknown command": ("inf", "did you mean 'info'"),
    "unknown option": (f"explain {SIZES} --expert 3", "--expert"),
    "surplus argument": (f"explain {SIZES} extra", "extra"),
    "no layer": ("explain", "--model NAME"),
    "no layer to run": ("run", "--checkpoint DIR"),
    "missing sizes": ("run --experts 8 --hidden 64", "missing: --intermediate, --top-k"),
    "unknown model": ("explain --model qwen3-30b-a3c", "did you mean 'qwen3-30b-a3b'"),
    "unknown scheme": (f"explain {SIZES} --quant fp8_blok128", "did you mean 'fp8_block128'"),
    "unknown required": (f"explain {SIZES} --require torhc", "did you mean 'torch'"),
    "unknown preferred": (f"run {SIZES} --prefer torch,trition", "did you mean 'triton'"),
    "unknown denied": (f"explain {SIZES} --deny torch --deny nonsense", "unknown backend 'nonsense'"),
    "unknown scheme of a request": (f"explain {SIZES} --require nvfp5=torch", "did you mean 'nvfp4'"),
    "unknown platform": (f"explain {SIZES} --platform cuad:sm90", "did you mean 'cuda:sm90'"),
    "unknown arch": (f"explain {SIZES} --platform cuda:90", "sm"),
    "no arch": (f"explain {SIZES} --platform cuda", "needs an architecture"),
    "unknown dtype": (f"explain {SIZES} --dtype bfloat17", "did you mean 'bfloat16'"),
    "unknown activation": (f"explain {SIZES} --activation siluu", "did you mean 'silu'"),
    "unknown format": (f"explain {SIZES} --activation-format batch", "did you mean 'batched'"),
    "limit": (f"explain {SIZES} --swiglu-limit -1", "swiglu_limit must be a positive"),
    "limit without gate": (f"explain {SIZES} --swiglu-limit 7 --activation relu2", "not gated"),
    "no experts": (f"explain {SIZES} --experts 0", "num_experts must be at least 1, got 0"),
    "no hidden": (f"run {SIZES} --hidden 0", "hidden_size must be at least 1"),
    "no intermediate": (f"run {SIZES} --intermediate -4", "intermediate_size must be at least 1"),
    "no top-k": (f"explain {SIZES} --top-k 0", "top_k must be at least 1"),
    "no local experts": (f"explain {SIZES} --num-local-experts 0", "num_local_experts must be at least 1"),
    "negative tokens": (f"explain {SIZES} --tokens -1", "--tokens"),
    "negative tokens to run": (f"run {SIZES} --tokens -1", "--tokens"),
    "tokens that are no number": (f"run {SIZES} --tokens many", "--tokens"),
    "top-k above experts": (f"explain {SIZES} --top-k 9", "top_k must be at most num_experts"),
    "local above experts": (f"run {SIZES} --num-local-experts 9", "num_local_experts must be at most num_experts"),
    "weight on input": (f"explain {SIZES} --router-weight-on-input", "requires top_k = 1"),
    "model with other top-k": ("explain --model llama-4-scout --top-k 2", "requires top_k = 1"),
    "required and denied": (f"explain {SIZES} --require torch --deny torch", "both required and denied"),
    "run elsewhere": (f"run {SIZES} --platform cuda:sm100", "moereg explain --platform cuda:sm100"),
    "layer of nothing": (f"run {SIZES} --layer 3", "--layer needs --checkpoint"),
    "checkpoint and model": ("run --checkpoint . --model qwen3-30b-a3b", "--model cannot be combined"),
    "checkpoint and sizes": ("run --checkpoint . --top-k 2", "--top-k cannot be combined"),
    "no checkpoint": ("run --checkpoint /nonexistent", "/nonexistent"),
    "negative seed": (f"run {SIZES} --seed -1", "--seed"),
    "bench without a layer": ("bench", "--model NAME"),
    "bench elsewhere": (f"bench {SIZES} --platform cuda:sm100", "bench needs the machine itself"),
    "bench with no tokens": (f"bench {SIZES} --tokens 0", "at least 1 such as 1,16,64, got '0'"),
    "bench with negative tokens": (f"bench {SIZES} --tokens=-1", "at least 1"),
    "bench with tokens that are no numbers": (f"bench {SIZES} --tokens 1,many", "got '1,many'"),
    "bench with an empty list": (f"bench {SIZES} --tokens ,", "at least 1"),
    "unknown routing": (f"bench {SIZES} --routing zipff", "did you mean 'zipf'"),
    "no rounds": (f"bench {SIZES} --rounds 0", "--rounds"),
    "no such folder": (f"bench {SIZES} --plot /nonexistent/bench.png", "make /nonexistent first"),
    "unknown kind of plot": (f"bench {SIZES} --plot bench.docx", "a file such as bench.png"),
    "bench of a denied backend": (f"bench {SIZES} --require torch --deny torch", "both required and denied"),
    "tune": ("tune", "tune comes in a later release"),
    "verify": ("verify torch", "verify comes in a later release"),
    "new-backend": ("new-backend mine --in here", "new-backend comes in a later release"),
}


@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("suffix", ["", " --json"])
def test_bad_input_is_one_line_and_exit_2(call: Call, name: str, suffix: str) -> None:
    line, expected = BAD_LINES[name]
    code, out, err = call(line + suffix if line else line)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert expected.lower() in err.lower()
    assert "Traceback" not in err


def test_a_bad_environment_is_bad_input(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_DENY", "torhc")
    code, out, err = call(f"explain {SIZES}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'torhc'" in err


def test_a_run_that_does_not_fit_names_what_makes_it_smaller(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_memory, "free_memory_bytes", lambda device: 10**6)
    code, out, err = call("run --model qwen3-30b-a3b --dtype float32 --json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "4.9 GB" in err or "4.8 GB" in err, err
    assert "--dtype bfloat16" in err


def test_the_local_experts_that_a_refusal_names_fit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_memory, "free_memory_bytes", lambda device: 300_000)
    code, _, err = call(f"run {SIZES} --tokens 1")
    assert code == 2
    count = err.rsplit("--num-local-experts ", 1)[1].strip()
    assert 1 <= int(count) < 8
    assert call(f"run {SIZES} --tokens 1 --num-local-experts {count}")[0] == 0
    assert call(f"run {SIZES} --tokens 1 --num-local-experts {int(count) + 1}")[0] == 2


def test_a_large_call_is_refused_too(call: Call) -> None:
    code, _, err = call(f"run {SIZES} --tokens 1000000000000")
    assert code == 2
    assert "a smaller --tokens" in err


# --- explain ---


@pytest.mark.parametrize("platform", ["cuda:sm90", "cuda:sm100", "rocm:gfx942", "cpu"])
def test_what_another_machine_would_choose(call_json: CallJson, platform: str) -> None:
    code, found = call_json(f"explain --model qwen3-30b-a3b --platform {platform}")
    assert code == 0
    assert (found["platform"], found["platform_source"]) == (platform, "named")
    assert found["selected"] == found["decisions"][0]["backend"] == ("torch" if platform == "cpu" else "triton")
    assert list(found) == EXPLAIN_KEYS
    keywords = get_shape("qwen3-30b-a3b").problem_keywords()
    assert found["problem"] == MoEProblem(**keywords).to_dict()
    assert all(isinstance(value, (str, int, type(None))) for value in found["problem"].values())


def test_explain_json_has_exactly_the_keys(call_json: CallJson) -> None:
    code, found = call_json(f"explain {SIZES}")
    assert code == 0
    assert list(found) == EXPLAIN_KEYS
    assert (found["schema"], found["source"], found["platform_source"]) == (1, "priority", "probed")
    assert list(found["request"]) == ["require", "prefer", "deny"]
    assert all(list(decision) == DECISION_KEYS for decision in found["decisions"])
    accepted = [decision["accepted"] for decision in found["decisions"]]
    assert accepted == sorted(accepted, reverse=True)
    reasons = [reason for decision in found["decisions"] for reason in decision["reasons"]]
    assert reasons
    assert all(list(reason) == ["code", "text"] and reason["code"] in REASON_CODES for reason in reasons)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--require triton --platform cpu", "platform"),
        ("--deny torch,triton --platform cuda:sm90", "denied"),
        ("--require triton --platform cuda:sm75", "platform"),
        ("--quant mxfp8 --platform cuda:sm80", "platform"),
    ],
)
def test_nothing_fits_is_exit_3_with_every_reason(call: Call, call_json: CallJson, line: str, code: str) -> None:
    exit_code, found = call_json(f"explain {SIZES} {line}")
    assert exit_code == 3
    assert list(found) == EXPLAIN_KEYS
    assert (found["selected"], found["source"]) == (None, None)
    assert all(decision["reasons"] for decision in found["decisions"])
    assert code in {reason["code"] for decision in found["decisions"] for reason in decision["reasons"]}
    exit_code, out, err = call(f"explain {SIZES} {line}")
    assert (exit_code, err) == (3, "")
    for text in ("nothing fits", f"[{code}]", "torch"):
        assert text in out


def test_requests_reach_the_dispatcher(call_json: CallJson) -> None:
    line = f"explain {SIZES} --platform cuda:sm90"
    assert call_json(f"{line} --require torch")[1]["source"] == "required"
    assert call_json(f"{line} --prefer unquantized=torch,nvfp4=triton")[1]["selected"] == "torch"
    assert call_json(f"{line} --prefer torch")[1]["source"] == "preferred"
    found = call_json(f"{line} --deny triton --require unquantized=torch")[1]
    assert found["request"] == {"require": ["torch"], "prefer": [], "deny": ["triton"]}


def test_options_override_the_model(call_json: CallJson) -> None:
    line = (
        "explain --model gpt-oss-20b --hidden 128 --dtype fp16 --no-bias --swiglu-limit 3.5 --num-local-experts 4 "
        "--activation-format batched --graph-capture --deterministic --exact-activations --tokens 17 --platform cpu"
    )
    problem = call_json(line)[1]["problem"]
    expected = MoEProblem(
        num_experts=32,
        hidden_size=128,
        intermediate_size=2880,
        top_k=4,
        dtype="float16",
        activation="swigluoai(limit=3.5)",
        num_local_experts=4,
        activation_format="batched",
        graph_capture=True,
        deterministic=True,
        exact_activations=True,
        max_num_tokens=17,
    )
    assert problem == expected.to_dict()
    assert call_json("explain --model gpt-oss-20b --platform cpu")[1]["problem"]["has_bias"] is True
    scout = call_json("explain --model llama-4-scout --platform cpu --tokens 0")[1]["problem"]
    assert scout["apply_router_weight_on_input"] is True
    assert scout.get("max_num_tokens") is None


def test_explain_for_people(call: Call) -> None:
    code, out, err = call("explain --model qwen3-30b-a3b --platform cuda:sm90")
    assert (code, err) == (0, "")
    for text in ("qwen3-30b-a3b", "E128 H2048 I768 k8", "cuda:sm90 (named", "TritonExperts", "cuda:sm80+"):
        assert text in out
    assert "assumed of cuda:sm90: triton>=3.6" in out
    assert "triton: chosen by priority" in out
    assert out.index("TritonExperts") < out.index("TorchDenseExperts")
    code, out, _ = call(f"explain {SIZES} --platform cpu")
    assert "requires platform in (cuda:sm80+, rocm:gfx942), got cpu [platform]" in out


# --- info ---


def test_info_json_has_exactly_the_keys(call_json: CallJson) -> None:
    code, found = call_json("info")
    assert code == 0
    assert list(found) == INFO_KEYS
    assert (found["schema"], found["version"]) == (1, moereg.__version__)
    assert all(list(plugin) == PLUGIN_KEYS for plugin in found["plugins"])
    names = [backend["name"] for backend in found["backends"]]
    assert names == sorted(set(names))
    assert "torch" in names
    for backend in found["backends"]:
        assert list(backend) == BACKEND_KEYS
        assert backend["cells"]
        assert all(list(cell) == CELL_KEYS for cell in backend["cells"])
        assert backend["available"] is not bool(backend["reasons"])
        assert all(reason["code"] in ("platform", "package", "probe") for reason in backend["reasons"])


def _mxfp8_cells(info: dict[str, Any]) -> dict[str, dict[str, Any]]:
    triton = next(backend for backend in info["backends"] if backend["name"] == "triton")
    return {
        cell["platforms"][0]: cell
        for cell in triton["cells"]
        if cell["experts"] == "TritonQuantizedExperts" and cell["quant_schemes"] == ["mxfp8"]
    }


def test_info_shows_where_a_cell_was_verified_and_where_not(call: Call, call_json: CallJson) -> None:
    cells = _mxfp8_cells(call_json("info")[1])
    # The emulation of sm90 was run on an H200; the kernel of sm100 has the same class and scheme and was not.
    assert {record["device"] for record in cells["cuda:sm90"]["verified"]} == {"NVIDIA H200"}
    assert cells["cuda:sm100+"]["verified"] == []
    assert cells["cuda:sm100+"]["not_verified"] == ["cuda:sm100"]
    out = call("info")[1]
    assert "sm90 (NVIDIA H200," in re.sub(r"\s+", " ", out)
    assert "not verified" in out


@pytest.mark.parametrize("content", ["{", '{"schema": 2, "records": [{}]}', '{"records": [{"backend": 1}]}'])
def test_a_broken_ledger_is_a_warning(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str
) -> None:
    (tmp_path / "wheel_z").mkdir()
    (tmp_path / "wheel_z" / "moereg_ledger.json").write_text(content)
    source = "from tests.support.fakes import FakeExperts\n\n\nclass Fake(FakeExperts):\n    pass\n"
    (tmp_path / "wheel_z" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    fake = __import__("wheel_z").Fake
    del sys.modules["wheel_z"]
    before = REGISTRY.snapshot()
    try:
        register_moe_backend("fake_broken_ledger", 1, ("unquantized",), ("*",))(fake)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            code, out, _ = call("info")
    finally:
        REGISTRY.restore(before)
    assert code == 0
    assert "fake_broken_ledger" in re.sub(r"\s+", "", out)
    assert len([warning for warning in warned if "wheel_z" in str(warning.message)]) == 1


def test_explain_says_whether_its_choice_was_verified(
    call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "explain --model qwen3-30b-a3b --quant mxfp8"
    code, out, _ = call(f"{line} --platform cuda:sm100")
    assert (code, out.splitlines()[-1]) == (0, "not verified on sm100")
    assert call_json(f"{line} --platform cuda:sm100")[1]["verification"] == {
        "verified": [],
        "not_verified": ["cuda:sm100"],
        "verified_on_platform": False,
    }
    record = {"backend": "triton", "experts": "TritonQuantizedExperts", "schemes": ("mxfp8",), "rule": "cuda:sm90"}
    record |= {"tier": "emulation", "platform": "cuda:sm90", "device": "NVIDIA H200", "versions": {}, "commit": ""}
    made = Verification(**record, date="2026-11-22", cases=3, digest="of the code")  # type: ignore[arg-type]
    monkeypatch.setattr(ledger, "_own_records", lambda cell: (made,))
    monkeypatch.setattr(ledger, "cell_digest", lambda cell: "of the code")
    line += " --platform cuda:sm90 --require triton"
    assert call(line)[1].splitlines()[-1] == "verified on sm90 (NVIDIA H200, 2026-11-22)"
    found = call_json(line)[1]["verification"]
    assert found["verified_on_platform"] is True
    assert found["verified"][0]["stale"] is False
    monkeypatch.setattr(ledger, "cell_digest", lambda cell: "of other code")
    changed = "not verified on sm90; verified before its code changed on sm90 (NVIDIA H200, 2026-11-22)"
    assert call(line)[1].splitlines()[-1] == changed
    assert call_json(line)[1]["verification"]["verified_on_platform"] is False
    assert call_json(f"explain {SIZES} --require triton --platform cpu")[1]["verification"] is None


def test_info_says_why_a_backend_cannot_run(
    call: Call, call_json: CallJson, isolated_registry: BackendRegistry
) -> None:
    def no_compiler(platform: Platform) -> str | None:
        return "requires a compiler, got none"

    register = register_moe_backend
    register("fake_here", 1, ("unquantized",), ("*",))(type("Here", (FakeExperts,), {}))
    lacking = type("Lacking", (FakeExperts,), {})
    register("fake_lacking", 1, ("unquantized",), ("*",), requires=("no-such-package>=2",))(lacking)
    register("fake_lacking", 1, ("nvfp4",), ("*",), requires=("no-such-package>=2",), probes=(no_compiler,))(lacking)
    register("fake_far", 2, ("unquantized",), ("tpu:v5e",))(type("Far", (FakeExperts,), {}))
    backends = {backend["name"]: backend for backend in call_json("info")[1]["backends"]}
    assert backends["fake_here"]["available"] is True
    assert backends["fake_here"]["origin"] == "abc"
    missing = {"code": "package", "text": "requires no-such-package>=2, which is not installed"}
    assert backends["fake_lacking"]["reasons"] == [missing, {"code": "probe", "text": "requires a compiler, got none"}]
    assert [reason["code"] for reason in backends["fake_far"]["reasons"]] == ["platform"]
    code, out, err = call("info")
    assert (code, err) == (0, "")
    for text in ("moereg ", "Lacking", "tpu:v5e", "fake_lacking (abc) cannot run here", "[package]"):
        assert text in out


# --- run ---


def _check_run(found: dict[str, Any]) -> None:
    assert list(found) == RUN_KEYS
    assert found["schema"] == 1
    assert list(found["selection"]) == SELECTION_KEYS
    assert found["backend"] == found["selection"]["selected"]
    assert found["problem"] == found["selection"]["problem"]
    assert found["platform"] == found["selection"]["platform"]


@pytest.mark.parametrize(
    "line",
    [
        SIZES,
        f"{SIZES} --tokens 0",
        f"{SIZES} --tokens 1 --dtype float32",
        f"{SIZES} --dtype float16 --seed 7",
        f"{SIZES} --bias --activation swigluoai",
        f"{SIZES} --activation relu2 --activation-format batched",
        f"{SIZES} --num-local-experts 3 --swiglu-limit 1.5",
        f"{SIZES} --top-k 1 --router-weight-on-input --platform cpu",
    ],
)
def test_run_is_right(call_json: CallJson, line: str) -> None:
    code, found = call_json(f"run {line}")
    _check_run(found)
    assert (code, found["passed"]) == (0, True)
    assert found["tokens"] == int(line.partition("--tokens ")[2].partition(" ")[0] or 64)
    assert 0 <= found["relative_error"] <= found["tolerance"]
    assert all(isinstance(found[name], float) for name in MEASUREMENTS)
    if found["tokens"] == 0:
        assert found["relative_error"] == 0
    elif "float32" not in line:
        assert found["relative_error"] > 0


def test_run_for_people(call: Call) -> None:
    code, out, _ = call(f"run {SIZES}")
    assert code == 0
    for text in ("torch (", "chosen by priority", "within the tolerance", "64 tokens", "permuted in", "right"):
        assert text in out
    assert "triton (TritonExperts): requires platform in" in out


def test_run_of_quantized_weights_says_what_the_scheme_costs(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"run {SIZES} --platform cpu --quant int8_w8a16"
    _, out, _ = call(line)
    (loss,) = re.findall(r"loss +(\S+) against fp32, of int8_w8a16 itself", out)
    assert 0.005 < float(loss) < 0.03
    monkeypatch.setattr("moereg.cli._run._LARGEST_UNQUANTIZED", 1000)
    _, out, _ = call(line)
    assert "loss" not in out
    assert "right" in out


def test_wrong_numbers_are_exit_1(call: Call, call_json: CallJson, isolated_registry: BackendRegistry) -> None:
    register_moe_backend("fake_wrong", 1, ("unquantized",), ("*",))(type("Wrong", (WrongExperts,), {}))
    code, found = call_json(f"run {SIZES} --require fake_wrong")
    _check_run(found)
    assert (code, found["backend"], found["passed"]) == (1, "fake_wrong", False)
    assert found["relative_error"] == pytest.approx(0.5, rel=0.05)
    code, out, _ = call(f"run {SIZES} --require fake_wrong")
    assert code == 1
    assert "WRONG" in out
    assert "not within" in out


class NanExperts(FakeExperts):
    """Leaves one value that is not a number."""

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        super().apply(out, inputs, weights, workspace13, workspace2)
        out[-1, -1] = float("nan")


class LeavingExperts(FakeExperts):
    """Leaves its output as it was."""

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        return None


class RaisingExperts(FakeExperts):
    """Has a bug."""

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise RuntimeError("a bug\nof two lines")


def test_not_a_number_is_null_and_exit_1(call_json: CallJson, isolated_registry: BackendRegistry) -> None:
    register_moe_backend("fake_nan", 1, ("unquantized",), ("*",))(NanExperts)
    code, found = call_json(f"run {SIZES} --require fake_nan")
    _check_run(found)
    assert (code, found["relative_error"], found["passed"]) == (1, None, False)


@pytest.mark.parametrize("line", ["--require triton", "--quant fp8_block128 --graph-capture", "--deny torch"])
def test_nothing_fits_to_run_is_exit_3(call: Call, call_json: CallJson, line: str) -> None:
    code, found = call_json(f"run {SIZES} --platform cpu {line}")
    _check_run(found)
    assert code == 3
    assert all(found[name] is None for name in (*MEASUREMENTS, "backend", "passed"))
    assert found["tokens"] == 64
    assert found["selection"]["decisions"]
    code, out, err = call(f"run {SIZES} --platform cpu {line}")
    assert (code, err) == (3, "")
    assert "nothing fits" in out


def test_an_emulation_says_so_and_nothing_warns(call: Call, isolated_registry: BackendRegistry) -> None:
    emulation = type("Emulation", (FakeExperts,), {})
    register_moe_backend("fake_slow", 1, ("unquantized",), ("*",), tier="emulation")(emulation)
    code, out, err = call(f"run {SIZES} --require fake_slow")
    assert (code, err) == (0, "")
    assert "emulation: right numbers" in out


@pytest.mark.parametrize(
    ("line", "computes", "tier"),
    [
        ("--quant nvfp4", "nvfp4_w4a16", "kernel"),
        ("--quant nvfp4 --exact-activations --bias", "nvfp4", "emulation"),
        ("--quant fp8_tensor_static --dtype float16", "fp8_tensor_static", "emulation"),
        ("--quant int4_w4a16_g128_zp --activation relu2 --num-local-experts 3", "int4_w4a16_g128_zp", "kernel"),
    ],
)
def test_run_of_quantized_weights(call_json: CallJson, line: str, computes: str, tier: str) -> None:
    code, found = call_json(f"run {SIZES} --platform cpu {line}")
    assert (code, found["passed"]) == (0, True)
    winner = found["selection"]["decisions"][0]
    assert (winner["computes"], winner["tier"]) == (computes, tier)
    assert (
        0
        < found["relative_error"]
        < found["tolerance"]
        == pytest.approx(layer_tolerance(MoEProblem.from_dict(found["problem"]), found["tokens"], computes))
    )


def test_verbose_logs_to_standard_error(call: Call) -> None:
    code, out, err = call(f"run {SIZES} --hidden 80 --json -v")
    assert code == 0
    assert _strict(out)["passed"] is True
    assert "INFO moereg: MoE E8 H80 I32" in err
    assert not logging.getLogger("moereg").handlers


# --- run on a checkpoint ---


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Qwen3-MoE with one dense layer and two of experts."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "hidden_act": "silu",
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in (1, 2):
        block = f"model.layers.{layer}.mlp"
        shapes[f"{block}.gate.weight"] = (4, 64)
        for expert in range(4):
            for name in ("gate_proj", "up_proj"):
                shapes[f"{block}.experts.{expert}.{name}.weight"] = (32, 64)
            shapes[f"{block}.experts.{expert}.down_proj.weight"] = (64, 32)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("line", ["", "--layer 2 --dtype float32", "--num-local-experts 2 --tokens 5 --deterministic"])
def test_run_on_a_checkpoint(call_json: CallJson, checkpoint: Path, line: str) -> None:
    code, found = call_json(f"run --checkpoint {checkpoint} {line}")
    _check_run(found)
    assert (code, found["passed"]) == (0, True)
    assert found["problem"]["num_experts"] == 4
    assert found["problem"]["dtype"] == ("float32" if "float32" in line else "bfloat16")
    assert found["problem"]["num_local_experts"] == (2 if "local" in line else 4)


def test_a_checkpoint_is_named(call: Call, checkpoint: Path) -> None:
    code, out, _ = call(f"run --checkpoint {checkpoint}")
    assert code == 0
    assert f"{checkpoint.name}, layer 1" in out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--layer 0", "layer 0"),
        ("--layer 9", "got 9"),
        ("--num-local-experts 5", "num_local_experts"),
        ("--dtype int8", "unknown dtype"),
        ("--quant mxfp8", "--quant cannot be combined"),
    ],
)
def test_bad_input_with_a_checkpoint(call: Call, checkpoint: Path, line: str, expected: str) -> None:
    code, out, err = call(f"run --checkpoint {checkpoint} {line}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_nothing_fits_a_checkpoint_and_nothing_is_read(
    call_json: CallJson, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereg.checkpoints.load_experts", None)
    code, found = call_json(f"run --checkpoint {checkpoint} --platform cpu --require triton")
    _check_run(found)
    assert code == 3


# --- bench ---

BENCH_KEYS = ["schema", "problem", "platform", "device", "versions", "commit", "date", "routing", "ceilings", "rows"]
BENCH_KEYS += ["skipped"]
ROW_KEYS = ["backend", "experts", "tokens", "relative_error", "tolerance", "passed"]
ROW_KEYS += ["failure", "damage", "time_us", "p10_us", "p90_us", "tflops", "gbps", "roofline_us", "share"]
RATES = ["time_us", "p10_us", "p90_us", "tflops", "gbps", "share"]
BENCH = f"bench {SIZES} --rounds 2 --tokens 16,1"


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> Ceilings:
    """Known ones, at once."""
    known = Ceilings(matmul_tflops=0.1, read_gbps=20.0, read_by="nothing")
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: known)
    return known


def _check_bench(found: dict[str, Any]) -> None:
    assert list(found) == BENCH_KEYS
    assert found["schema"] == 1
    assert list(found["ceilings"]) == ["matmul_tflops", "read_gbps", "read_by"]
    for row in found["rows"]:
        assert list(row) == ROW_KEYS
        assert all((row[name] is not None) is row["passed"] for name in RATES)
    for skipped in found["skipped"]:
        assert list(skipped) == ["backend", "reasons"]
        assert skipped["reasons"]
        assert all(list(reason) == ["code", "text"] for reason in skipped["reasons"])


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
    assert found["versions"]["torch"] == torch.__version__
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
    assert "not compared: triton (TritonExperts): requires platform in" in out


def test_bench_measures_the_ceilings_of_this_machine(call_json: CallJson, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.tuning.roofline._CPU_READ_BYTES", 1 << 24)
    monkeypatch.setattr("moereg.tuning.roofline._CPU_MATMUL_SIZES", (128,))
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
def test_bench_gives_a_wrong_backend_no_time(
    call: Call, call_json: CallJson, isolated_registry: BackendRegistry
) -> None:
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
    assert out.count("fastest") == 2


@pytest.mark.usefixtures("ceilings")
@pytest.mark.parametrize("kind", [NanExperts, LeavingExperts])
def test_bench_sees_what_was_not_written(
    call_json: CallJson, isolated_registry: BackendRegistry, kind: type[FakeExperts]
) -> None:
    register_moe_backend("fake_nan", 1, ("unquantized",), ("*",))(type("Nan", (kind,), {}))
    code, found = call_json(f"{BENCH} --require fake_nan")
    _check_bench(found)
    assert code == 1
    assert [(row["relative_error"], row["passed"]) for row in found["rows"]] == [(None, False)] * 2


@pytest.mark.usefixtures("ceilings")
def test_a_backend_that_fails_takes_no_other_down(
    call: Call, call_json: CallJson, isolated_registry: BackendRegistry
) -> None:
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
    assert "fake_raising failed at 16 tokens: " in out
    assert "RuntimeError: a bug" in out


@pytest.mark.parametrize("line", ["--require triton", "--quant fp8_block128 --require triton", "--deny torch"])
def test_nothing_fits_to_bench_is_exit_3(call: Call, call_json: CallJson, line: str) -> None:
    code, found = call_json(f"{BENCH} --platform cpu {line}")
    _check_bench(found)
    assert (code, found["rows"]) == (3, [])
    assert set(found["ceilings"].values()) == {None}
    assert {skipped["backend"] for skipped in found["skipped"]} >= {"torch", "triton"}
    code, out, err = call(f"{BENCH} --platform cpu {line} --plot nothing.png")
    assert (code, err) == (3, "")
    assert "nothing fits" in out
    assert not Path("nothing.png").exists()


def test_a_bench_that_does_not_fit_names_what_makes_it_smaller(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_memory, "free_memory_bytes", lambda device: 10**6)
    code, out, err = call("bench --model qwen3-30b-a3b --dtype float32 --json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "permuted for 2 kernels" in err
    for cure in ("--dtype bfloat16", "--require with fewer backends"):
        assert cure in err


@pytest.mark.usefixtures("ceilings")
@pytest.mark.parametrize("name", ["bench.png", "bench.svg"])
def test_bench_draws_a_plot(call: Call, isolated_registry: BackendRegistry, tmp_path: Path, name: str) -> None:
    register_moe_backend("fake_wrong", 99, ("unquantized",), ("*",))(type("Wrong", (WrongExperts,), {}))
    code, out, _ = call(f"{BENCH} --plot {tmp_path / name} --json")
    assert code == 1
    assert _strict(out)["rows"]
    written = (tmp_path / name).read_bytes()
    if name.endswith(".png"):
        assert written.startswith(b"\x89PNG")
        width, height = (int.from_bytes(written[start : start + 4], "big") for start in (16, 20))
        assert width > 1000
        assert height > 500
    else:
        for text in (b"TorchPackedExperts", b"roofline", b"fake_wrong, wrong at 1, 16", b"E8 H64 I32 k2", b"tokens"):
            assert text in written


@pytest.mark.usefixtures("ceilings")
def test_a_plot_of_nothing_right(call: Call, isolated_registry: BackendRegistry, tmp_path: Path) -> None:
    register_moe_backend("fake_wrong", 99, ("unquantized",), ("*",))(type("Wrong", (WrongExperts,), {}))
    code, _, err = call(f"{BENCH} --require fake_wrong --plot {tmp_path / 'bench.png'}")
    assert code == 1
    assert "Warning" not in err
    assert (tmp_path / "bench.png").exists()


@pytest.mark.parametrize("json", ["", " --json"])
def test_a_plot_that_cannot_be_written_is_said_before_anything_runs(call: Call, tmp_path: Path, json: str) -> None:
    (tmp_path / "folder.png").mkdir()
    code, out, err = call(f"{BENCH} --plot {tmp_path / 'folder.png'}{json}")
    assert (code, out) == (2, "")
    assert "needs a file that can be written" in err
    assert "comparing" not in err


def test_a_plot_needs_matplotlib_before_anything_runs(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", None)
    code, out, err = call(f"{BENCH} --plot bench.png")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "pip install 'moereg[plot]'" in err


# --- random layers ---


def test_a_seed_is_a_layer() -> None:
    problem = ProblemFlags(experts=2, hidden=32, intermediate=16, top_k=1).problem()
    device = torch.device("cpu")
    layers = [_layer.random_layer(problem, seed, device, lambda done, total: None) for seed in (0, 0, 1)]
    first, second, other = (layer.weights.w13 for layer in layers)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    tokens = [_layer.random_hidden_states(problem, 4, seed, device) for seed in (0, 0, 1)]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert all(map(torch.equal, layers[0].route(tokens[0]), layers[1].route(tokens[1])))


# --- streams ---


def test_long_work_shows_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 0.01)
    shown = ""
    with _progress.phase("permuting weights") as advance:
        advance(1, 2)
        while not shown:
            time.sleep(0.01)
            shown = capsys.readouterr().err
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 1000.0)
    with _progress.phase("quick"):
        pass
    assert shown + capsys.readouterr().err == "permuting weights ...\n"


def test_no_colors_without_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for line in ("info", f"explain {SIZES}", f"run {SIZES}", "explain --help", "nonsense"):
        _, out, err = call(line)
        assert "\x1b" not in out + err
    assert console(sys.stdout).color_system is None


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"moereg {moereg.__version__}\n", "")
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for command in ("info", "explain", "run", "bench", "tune", "verify", "new-backend"):
        assert f"  {command} " in out
    assert "--num-local-experts" in call("run --help")[1]
    bench = call("bench --help")[1]
    for option in ("--tokens", "--routing", "--rounds", "--plot", "--require", "--json"):
        assert f"  {option} " in bench
    assert "Later" not in bench


# --- the real entry point ---


def test_the_module_is_the_command() -> None:
    done = _module(f"explain {SIZES} --platform cuda:sm90 --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert _strict(done.stdout)["selected"] == "triton"
    done = _module(f"explain {SIZES} --require triton", FORCE_COLOR="1", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (3, "")
    assert "\x1b" not in done.stdout
    done = _module(f"run {SIZES} --top-k 9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_run_as_a_command_writes_one_object() -> None:
    done = _module(f"run {SIZES} --json")
    assert done.returncode == 0
    _check_run(_strict(done.stdout))
    assert "Traceback" not in done.stderr


def test_showing_imports_no_kernel_library_and_initializes_no_device() -> None:
    script = """
        import sys
        import torch

        def refuse(*args, **kwargs):
            raise AssertionError("initialized CUDA")

        torch.cuda._lazy_init = refuse
        for name in ("triton", "flashinfer", "cutlass"):
            sys.modules.setdefault(name, None)
        from moereg.cli import main
        assert main(["info", "--json"]) == 0
        assert main(["explain", "--model", "qwen3-30b-a3b", "--json"]) == 0
        assert main(["explain", "--model", "qwen3-30b-a3b", "--platform", "cuda:sm90"]) == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_reader_that_leaves_is_no_wrong_number() -> None:
    process = subprocess.run(
        f"set -o pipefail; {sys.executable} -m moereg info --json | true",
        shell=True,
        executable="/bin/bash",
        check=False,
    )
    assert process.returncode in (0, 141)


@pytest.mark.parametrize("text", [",", "unquantized=", " , ,"])
def test_a_request_that_names_nothing(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *SIZES.split(), "--require", text]) == 2
    assert "must name a backend" in (error := capsys.readouterr().err) or "names backends" in error


def test_only_the_limit_can_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *SIZES.split(), "--activation", "silu(alpha=None)"]) == 2
    assert "is not a name with scalars" in capsys.readouterr().err

"""`moereg run`: right numbers, wrong ones, and layers that do not fit."""

from __future__ import annotations

import logging
import re

import pytest
import torch

from moereg.author import ExpertInputs, PermutedWeights
from moereg.cli import _bench
from moereg.cli._options import ProblemFlags
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import register_moe_backend
from moereg.spec.problem import MoEProblem
from tests.cli.command import SIZES, Call, CallJson, check_run, strict_json
from tests.support.fakes import FakeExperts, NanExperts, WrongExperts

pytestmark = pytest.mark.usefixtures("isolated_registry")

MEASUREMENTS = ["relative_error", "tolerance", "time_us", "permute_ms"]


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("run --dtype float32 --json", (r"4\.[89] GB", "--dtype bfloat16")),
        (
            "bench --dtype float32 --json",
            ("permuted for 3 kernels", "--dtype bfloat16", "--require with fewer backends"),
        ),
    ],
    ids=["run", "bench"],
)
def test_what_does_not_fit_starts_nothing_and_names_what_makes_it_smaller(
    call: Call, monkeypatch: pytest.MonkeyPatch, line: str, texts: tuple[str, ...]
) -> None:
    monkeypatch.setattr(_bench, "free_memory_bytes", lambda device: 10**6)
    code, out, err = call(f"{line} --model qwen3-30b-a3b")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert [text for text in texts if not re.search(text, err)] == []


def test_the_local_experts_that_a_refusal_names_fit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bench, "free_memory_bytes", lambda device: 300_000)
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
    check_run(found)
    assert (code, found["passed"]) == (0, True)
    assert found["tokens"] == int(line.partition("--tokens ")[2].partition(" ")[0] or 64)
    assert 0 <= found["relative_error"] <= found["tolerance"]
    assert all(isinstance(found[name], float) for name in MEASUREMENTS)
    if found["tokens"] == 0:
        assert found["relative_error"] == 0
    elif "float32" not in line:
        assert found["relative_error"] > 0


def test_wrong_numbers_are_exit_1(call: Call, call_json: CallJson) -> None:
    register_moe_backend("fake_wrong", 1, ("unquantized",), ("*",))(type("Wrong", (WrongExperts,), {}))
    code, found = call_json(f"run {SIZES} --require fake_wrong")
    check_run(found)
    assert (code, found["backend"], found["passed"]) == (1, "fake_wrong", False)
    assert found["relative_error"] == pytest.approx(0.5, rel=0.05)
    code, out, _ = call(f"run {SIZES} --require fake_wrong")
    assert code == 1
    assert re.match(r"WRONG: error \S+, not within", out.splitlines()[-1])


class RememberingExperts(FakeExperts):
    """Answers each call as the first of its size: a graph that was captured on other memory does so."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        if not hasattr(self, "kept"):
            super().compute(out, inputs, weights)
            self.kept = out.clone()
        out.copy_(self.kept)


def test_answering_with_the_result_of_another_call_is_wrong(call_json: CallJson) -> None:
    register_moe_backend(name="remembering", priority=200, quant_schemes=("unquantized",), platforms=("*",))(
        RememberingExperts
    )
    code, found = call_json(f"run {SIZES} --tokens 4")
    assert (code, found["backend"], found["passed"]) == (1, "remembering", False)


def test_not_a_number_is_null_and_exit_1(call_json: CallJson) -> None:
    register_moe_backend("fake_nan", 1, ("unquantized",), ("*",))(NanExperts)
    code, found = call_json(f"run {SIZES} --require fake_nan")
    check_run(found)
    assert (code, found["relative_error"], found["passed"]) == (1, None, False)


def test_an_emulation_says_so_and_nothing_warns(call: Call) -> None:
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
    assert strict_json(out)["passed"] is True
    assert "INFO moereg: MoE E8 H80 I32" in err
    assert not logging.getLogger("moereg").handlers


def test_a_seed_is_a_layer() -> None:
    problem = ProblemFlags(experts=2, hidden=32, intermediate=16, top_k=1).problem()
    device = torch.device("cpu")
    layers = [_bench.random_layer(problem, seed, device, lambda done, total: None) for seed in (0, 0, 1)]
    first, second, other = (layer.weights.w13 for layer in layers)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    tokens = [_bench.random_hidden_states(problem, 4, seed, device) for seed in (0, 0, 1)]
    assert torch.equal(tokens[0], tokens[1])
    assert not torch.equal(tokens[0], tokens[2])
    assert all(map(torch.equal, layers[0].sample_routes(tokens[0]), layers[1].sample_routes(tokens[1])))

"""The part of the bench of quantized layers that needs no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from benches.h200 import quant, quant_configs
from moereg.backends._triton import quantized
from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.kernels.quantized.config import select_quantized_config
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.tuning import roofline
from moereg.tuning.inputs import random_call
from tests.benches.selecting import select_way

LAYERS = [(scheme, model) for scheme, (models, _) in quant.ROWS.items() for model in models]


@pytest.mark.parametrize(("scheme", "model"), LAYERS)
def test_layers_are_judged_by_what_they_multiply(scheme: str, model: str) -> None:
    found = {"read_tbps": 4.0, "bfloat16_tflops": 700.0, "float8_e4m3fn_tflops": 1300.0, "int8_tflops": 900.0}
    expected = 1300.0 if scheme.startswith("fp8") else 900.0 if scheme == "int8_w8a8" else 700.0
    assert quant.ceilings_of(scheme, found) == roofline.Ceilings(expected, 4000.0, read_by="torch")
    problem = quant.make_problem(model, scheme)
    call = random_call(problem, 16, "uniform", torch.Generator().manual_seed(0))
    ratio = quant.byte_ratio(model, scheme, [call])
    bits = problem.quant.weight.bits  # type: ignore[union-attr]
    assert 0.85 * 16 / bits < ratio < 16 / bits, "scales, hidden states and output make it less"


def test_more_calls_are_a_mean() -> None:
    problem = quant.make_problem("qwen3-30b-a3b", "int8_w8a16")
    generator = torch.Generator().manual_seed(0)
    one, other = (random_call(problem, tokens, "uniform", generator) for tokens in (1, 64))
    ratios = [quant.byte_ratio("qwen3-30b-a3b", "int8_w8a16", calls) for calls in ([one], [other], [one, other])]
    assert min(ratios[:2]) < ratios[2] < max(ratios[:2])


def row(scheme: str, tokens: int, ours: float, **fields: Any) -> quant.Row:
    found = {"model": "qwen3-30b-a3b", "scheme": scheme, "tokens": tokens, "wrong": False, "relative_error": 0.01}
    return {**found, "ours_us": ours, "roof_us": 10.0, "share": 10.0 / ours, **fields}


def test_summary_names_the_worst_rows() -> None:
    rows = [
        row("fp8_block128", 1, 20.0),
        row("fp8_block128", 4096, 40.0),
        row("int8_w8a8", 1, 21.0),
        row("int8_w8a8", 4096, 30.0),
        # Has no row of the other scheme beside it.
        row("int8_w8a8", 16, 500.0),
        row("int8_w8a16", 16, 25.0, share_of_byte_ratio=0.4),
        row("int8_w8a16", 64, 25.0, share_of_byte_ratio=0.9),
        {"scheme": "int8_w8a16", "model": "m", "tokens": 256, "left_out": "out of time"},
        {"scheme": "mxfp4_w4a16", "model": "m", "tokens": 1, "wrong": True, "relative_error": None},
    ]
    found = quant.summarize(rows)
    assert list(found) == ["fp8_block128", "int8_w8a8", "int8_w8a16"]
    block, eight, only = found.values()
    model = "qwen3-30b-a3b"
    assert (block["share T 1-64"], block["share T 4096-16384"]) == pytest.approx((0.5, 0.25))
    assert "share T 256-1024" not in block
    assert "time over fp8_block128 worst" not in block
    assert eight["time over fp8_block128 worst"] == {"value": 1.05, "model": model, "tokens": 1}
    assert only["share_of_byte_ratio mean"] == pytest.approx(0.6)
    assert only["share_of_byte_ratio worst"] == {"value": 0.4, "model": model, "tokens": 16}
    assert "0.400 (qwen3-30b-a3b T 16)" in quant.show_summary(only)


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "deepseek-v3"])
def test_candidates_can_run_and_differ(model: str) -> None:
    problem = quant.make_problem(model, "fp8_block128")
    for num_tokens in quant.ROWS["fp8_block128"][1]:
        rows = num_tokens * problem.top_k / problem.num_experts
        candidates = quant_configs.candidates_of(num_tokens, rows)
        names = [quant_configs.describe(pair) for pair in candidates]
        assert len(set(names)) == len(names) > 3
        for pair in candidates:
            assert pair.gate_up.block_m == pair.down.block_m
            assert pair.sort_routes or num_tokens <= pair.gate_up.block_m
            assert 128 % pair.gate_up.block_n == 0


def test_a_candidate_replaces_the_rules_and_only_inside() -> None:
    candidate = quant_configs.candidates_of(1, 0.06)[-1]
    with quant_configs.selecting(candidate):
        assert quantized.select_quantized_config(1, 0.06, 2, None) is candidate
    assert quantized.select_quantized_config is select_quantized_config


@pytest.mark.parametrize("tokens", [2, 64])
def test_a_layer_runs_with_the_candidate(tokens: int) -> None:
    problem = MoEProblem(num_experts=8, hidden_size=128, intermediate_size=128, top_k=2, quant="int8_w8a8")
    candidate = quant_configs.candidates_of(tokens, tokens / 4)[-1]
    with quant_configs.selecting(candidate):
        way = select_way(TritonQuantizedExperts(problem, Platform.from_name("cuda:sm80")), tokens)
    assert way.configs is candidate


def test_lines_of_rows_name_what_is_wrong_or_missing() -> None:
    bare = {"model": "m", "scheme": "s", "tokens": 4}
    assert "left out: out of time" in quant.show(bare | {"left_out": "out of time"})
    assert "WRONG" in quant.show(bare | {"wrong": True, "relative_error": 0.5})
    right = row("int8_w8a16", 4, 20.0, bf16_us=30.0, share_of_byte_ratio=0.75)
    line = quant.show(right | {"configs_us": {"slow": 3.0, "fast": 2.0, "bad": math.nan}})
    assert line.index("fast") < line.index("slow") < line.index("bad")
    assert "50.0%" in line
    assert "75.0%" in line

"""The parts of the benches of the H200 that need none: what they plan, replace and conclude."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from benches.h200 import ep, quant, shapes, sweep
from benches.h200.table import check, roofline_us
from moereg.bench.inputs import random_call, random_weights
from moereg.bench.roofline import Ceilings
from moereg.layer.factory import make_kernel
from moereg.spec.problem import MoEProblem


def test_plans_have_every_row_once() -> None:
    rows = [(layer.name, *point) for layer, points in shapes.all_rows() for point in points]
    assert len(set(rows)) == len(rows) > 0
    items = ep.items(())
    assert len(set(items)) == len(items)
    assert [item.tokens for item in items[:8]] == [8192] * 4 + [64] * 4, "what matters most comes first"
    with pytest.raises(ValueError, match=r"all_gather.*, got half, qwen$"):
        ep.items(("qwen", "zipf", "half"))
    problem = sweep.make_problem(sweep.MODELS[0])
    candidates = sweep.row_candidates(problem, sweep.NUM_TOKENS[0], 227 * 1024)
    assert candidates[0] == sweep.shipped(problem, sweep.NUM_TOKENS[0], 227 * 1024)
    assert 8 <= len({candidate.name for candidate in candidates}) == len(candidates) <= 15


@pytest.mark.parametrize(("scheme", "tflops"), [("fp8_block128", 1300.0), ("int8_w8a8", 900.0), ("int8_w8a16", 700.0)])
def test_layers_are_judged_by_what_they_multiply(scheme: str, tflops: float) -> None:
    found = {"read_tbps": 4.0, "bfloat16_tflops": 700.0, "float8_e4m3fn_tflops": 1300.0, "int8_tflops": 900.0}
    assert quant.ceilings_of(scheme, found) == Ceilings(tflops, 4000.0, read_by="torch")


def test_a_row_is_checked_and_compared_with_its_roofline() -> None:
    problem = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(problem, generator, torch.device("cpu"))
    calls = [random_call(problem, 4, "uniform", generator) for _ in range(2)]
    assert 0 < check(make_kernel(problem, weights), problem, weights, calls[0]) < 8e-3
    moved = [len(ids.unique()) * 3 * 64 * 32 * 2 + 2 * 4 * 64 * 2 for _, _, ids in calls]
    slow_to_read = {"matmul_tflops": 1e6, "read_tbps": 1e-3}
    assert roofline_us(problem, calls, slow_to_read) == pytest.approx(sum(moved) / 2 / 1e3)
    slow_to_multiply = {"matmul_tflops": 1e-3, "read_tbps": 1e6}
    assert roofline_us(problem, calls, slow_to_multiply) == pytest.approx(2 * 4 * 2 * 3 * 64 * 32 / 1e3)

"""The parts of the benches of the H200 that need none: what they plan, replace and conclude."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benches.h200 import ep, quant, shapes, sweep
from benches.h200.leave_one_out import by_tokens, choose, leave_one_out
from benches.h200.table import check, roofline_us
from moereg.bench.inputs import random_call, random_weights
from moereg.bench.roofline import Ceilings
from moereg.layer.factory import make_kernel
from moereg.spec.problem import MoEProblem


def row(model: str, tokens: int = 4, shipped: str = "a", group: str = "few", **times_us: float) -> dict[str, Any]:
    place = {"model": model, "tokens": tokens, "class": group, "shipped": shipped}
    return {**place, "times_us": times_us, "skipped": [], "wrong": []}


# Alone, x is best with a, y and z with b; c is never best but never bad.
ROWS = [row("x", a=10.0, b=20.0, c=11.0), row("y", a=40.0, b=10.0, c=11.0), row("z", a=11.0, b=10.0, c=12.0)]


def test_a_choice_does_not_look_at_the_row_it_is_for() -> None:
    # For x: a (4 * 1.1) ** 0.5 = 2.10, b 1, c (1.1 * 1.2) ** 0.5 = 1.15. For y: a 1.05, b 1.41, c 1.15.
    found = leave_one_out(ROWS)
    assert [line["chosen"] for line in found] == ["b", "a", "c"]
    assert [line["ratio"] for line in found] == [2.0, 4.0, 1.2]
    assert [line["shipped_ratio"] for line in found] == [1.0, 4.0, 1.1]
    others = [row("x", 16, a=1.0, b=100.0, c=100.0), row("w", 64, group="many", a=1.0, b=100.0, c=100.0)]
    assert choose(ROWS[0], [*ROWS, *others]) == "b"
    # By rows b would win, by models it loses.
    rows = [row("x", a=1.0, b=1.0), row("y", a=1.0, b=1.2), *(row("z", n, a=1.1, b=1.0) for n in (4, 8, 16))]
    assert choose(rows[0], rows) == "a"
    # What did not run for x is not chosen for it, and a shape that is alone in its class has no ratio.
    assert choose(row("x", a=10.0, c=11.0), [row("x", a=10.0, c=11.0), *ROWS[1:]]) == "c"
    assert by_tokens(leave_one_out(ROWS[:1]))[0]["ratio_worst"] is None


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

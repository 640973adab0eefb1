"""The code that the H200 bench shares with the other benches, on a CPU: the table itself needs the GPU."""

from __future__ import annotations

import math

import pytest
import torch

from benches.h200.leave_one_out import geomean
from benches.h200.table import check, num_calls, roofline_us, time_us
from moereg.layer import make_kernel
from moereg.problem import MoEProblem
from moereg.tuning.inputs import random_call, random_weights

PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)


def test_a_row_is_checked_timed_and_compared_with_its_roofline() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(PROBLEM, generator, torch.device("cpu"))
    kernel = make_kernel(PROBLEM, weights)
    # As others may make them: plain tuples.
    calls = [tuple(random_call(PROBLEM, 4, "uniform", generator)) for _ in range(2)]
    assert 0 < check(kernel, PROBLEM, weights, calls[0]) < 8e-3  # type: ignore[arg-type]
    assert time_us(kernel, calls) > 0  # type: ignore[arg-type]
    one_expert = 3 * 64 * 32 * 2
    moved = [len(ids.unique()) * one_expert + 2 * 4 * 64 * 2 for _, _, ids in calls]
    slow_to_read = {"matmul_tflops": 1e6, "read_tbps": 1e-3}
    assert roofline_us(PROBLEM, calls, slow_to_read) == pytest.approx(sum(moved) / 2 / 1e3)  # type: ignore[arg-type]
    slow_to_multiply = {"matmul_tflops": 1e-3, "read_tbps": 1e6}
    flops = 2 * 4 * 2 * 3 * 64 * 32
    assert roofline_us(PROBLEM, calls, slow_to_multiply) == pytest.approx(flops / 1e3)  # type: ignore[arg-type]


def test_means_and_rotation() -> None:
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert math.isnan(geomean([]))
    assert (num_calls(1), num_calls(1024), num_calls(4096)) == (16, 8, 2)

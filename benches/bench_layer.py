"""Every registered backend that fits this machine: cost of a call and of permuting, bytes of workspace.

    python -m pytest benches/bench_layer.py --benchmark-only

Each result is compared with the reference first; a wrong one gets no number. Tables group by problem and tokens, so
that each compares backends. Small shapes: a first look and a guard against regressions; the tables in benches/results/
are measured at full size.
"""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from moereg.discovery import load_backends
from moereg.layer import MoEKernel
from moereg.reference import reference_experts, relative_error
from moereg.testing.tolerances import tolerance
from tests import conformance
from tests.conformance import Case

SIZES = {"num_experts": 32, "hidden_size": 512, "intermediate_size": 256, "top_k": 4}
DEVICE = conformance.test_device()


def _cases() -> list[Case]:
    """One problem a cell that runs natively here, in its preferred 16-bit dtype."""
    here = conformance.current_platform()
    found = []
    for cell in load_backends().cells:
        if conformance.runnable_platform(cell) != here:
            continue
        claimed = next(iter(conformance.claimed_problems(cell)))
        problem = type(claimed)(**{**claimed.to_dict(), **SIZES, "num_local_experts": None})
        found.append(Case(cell, here, problem))
    return found


each_case = pytest.mark.parametrize("case", _cases(), ids=lambda case: f"{case.cell.name}-{case.cell.class_name}")


def _checked(case: Case, num_tokens: int) -> tuple[MoEKernel, conformance.Inputs]:
    weights = conformance.make_weights(case.problem, DEVICE)
    kernel = conformance.build(case, DEVICE, weights)
    inputs = conformance.make_inputs(case.problem, num_tokens, "uniform", DEVICE)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    error = relative_error(kernel(*arguments), reference_experts(case.problem, weights, *arguments))
    assert error <= tolerance(case.problem.quant.name, case.problem.dtype), f"wrong numbers ({error:.2e}): no time"
    return kernel, inputs


@each_case
@pytest.mark.parametrize("num_tokens", [1, 64])
def bench_call(benchmark: BenchmarkFixture, case: Case, num_tokens: int) -> None:
    kernel, inputs = _checked(case, num_tokens)
    benchmark.group = f"{case.problem}, {num_tokens} tokens"
    shapes = kernel.experts.workspace_shapes(case.problem, num_tokens)
    benchmark.extra_info["workspace_bytes"] = sum(
        torch.Size(shape).numel() * case.problem.torch_dtype.itemsize for shape in shapes
    )

    def call() -> None:
        kernel(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark(call)


@each_case
def bench_permute_weights(benchmark: BenchmarkFixture, case: Case) -> None:
    weights = conformance.make_weights(case.problem, DEVICE)
    experts = case.cell.experts(case.problem, case.platform)
    benchmark.group = f"permute {case.problem}"
    benchmark.extra_info["weight_bytes"] = experts.permute_weights(weights, case.problem).num_bytes

    def permute() -> None:
        experts.permute_weights(weights, case.problem)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark(permute)

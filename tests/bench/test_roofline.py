"""Rooflines count the necessary work; ceilings are measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg.bench import roofline
from moereg.bench.inputs import Call
from moereg.bench.roofline import Ceilings, Traffic, expert_bytes, measure_ceilings, roofline_us, work_of
from moereg.bench.timing import Timing
from moereg.spec.problem import MoEProblem

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "top_k": 2}


def call(ids: list[list[int]]) -> Call:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return Call(torch.zeros(len(ids), 64, dtype=torch.bfloat16), torch.ones(topk_ids.shape), topk_ids)


def test_bytes_of_an_expert() -> None:
    matrices = 3 * 64 * 32
    assert expert_bytes(MoEProblem(**SIZES)) == 2 * matrices
    assert expert_bytes(MoEProblem(**SIZES, dtype="float32", activation="relu2")) == 4 * 2 * 64 * 32
    assert expert_bytes(MoEProblem(**SIZES, has_bias=True)) == 2 * (matrices + 2 * 32 + 64)
    scaled = MoEProblem(**{**SIZES, "hidden_size": 256, "intermediate_size": 128, "quant": "fp8_block128"})
    assert expert_bytes(scaled) == 3 * 256 * 128 + 4 * (2 * 2 + 2 * 1)


def test_only_active_experts_are_moved() -> None:
    problem = MoEProblem(**SIZES)
    one, activations = expert_bytes(problem), 2 * 3 * 64 * 2
    assert work_of(problem, call([[1, 2], [2, 1], [1, 7]])) == Traffic(2 * 6 * 3 * 64 * 32, 3 * one + activations)
    assert work_of(problem, call([[0, 1], [2, 3], [4, 5]])).num_bytes == 6 * one + activations


def test_other_ranks_experts_are_not_this_ones_work() -> None:
    problem = MoEProblem(**SIZES, num_local_experts=4)
    found = work_of(problem, call([[1, 5], [6, 7], [-1, 8]]))
    assert found == Traffic(2 * 1 * 3 * 64 * 32, expert_bytes(problem) + 2 * 3 * 64 * 2)


def test_the_roofline_is_the_larger_of_both_times() -> None:
    ceilings = Ceilings(matmul_tflops=2.0, read_gbps=1000.0, read_by="")
    assert roofline_us([Traffic(flops=2e6, num_bytes=5e6)], ceilings) == pytest.approx(5.0)
    assert roofline_us([Traffic(flops=2e7, num_bytes=5e6)], ceilings) == pytest.approx(10.0)
    assert roofline_us([Traffic(2e6, 5e6), Traffic(2e7, 5e6)], ceilings) == pytest.approx(7.5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_CPU_READ_BYTES", 1 << 24)
    monkeypatch.setattr(roofline, "_CPU_MATMUL_SIZES", (64, 128))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fastest", [torch.float32, torch.float64, torch.bfloat16])
def test_ceilings_are_of_the_fastest(fastest: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run takes 20 us in the fastest dtype and 50 us in others; the slowest of its samples does not count."""

    def time_runs(runs: dict[str, list[Any]], device: torch.device, rounds: int) -> dict[str, Timing]:
        ((name, (run,)),) = runs.items()
        run()
        operand = getattr(run, "__self__", None) if not hasattr(run, "args") else run.args[0]
        assert isinstance(operand, torch.Tensor)
        time_us = 20.0 if operand.dtype == fastest else 50.0
        return {name: Timing((time_us, 90.0))}

    monkeypatch.setattr(roofline, "time_runs", time_runs)
    found = measure_ceilings(dtype, CPU)
    assert found.read_gbps == pytest.approx((1 << 24) / 20.0 / 1e3)
    assert found.read_by == f"torch sum of {str(fastest).removeprefix('torch.')}"
    # On a CPU a product in fp32 counts whatever the dtype is.
    time_us = 20.0 if fastest in (dtype, torch.float32) else 50.0
    assert found.matmul_tflops == pytest.approx(2 * 128**3 / time_us / 1e6)


def test_a_product_counts_additions_and_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_CPU_MATMUL_SIZES", (64, 100))
    times = iter([(900.0, 800.0), (50.0, 40.0)])
    monkeypatch.setattr(roofline, "time_runs", lambda runs, device, rounds: {"": Timing(next(times))})
    assert roofline._cpu_matmul_tflops(torch.float32) == pytest.approx(2 * 100**3 / 40e-6 / 1e12)


def test_only_the_settled_samples_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a GPU falls while it works: the first samples are of one that it cannot keep."""
    now = 0.0

    def time_runs(runs: Any, device: torch.device, rounds: int) -> dict[str, Timing]:
        nonlocal now
        now += 0.5
        return {"": Timing((10.0,) * 8 if now < 1.2 else (30.0,) * 8)}

    monkeypatch.setattr(roofline, "time_runs", time_runs)
    monkeypatch.setattr(roofline, "time", SimpleNamespace(perf_counter=lambda: now))
    assert roofline.settled_us(lambda: None, CPU) == 30.0


@pytest.mark.usefixtures("small")
def test_a_small_machine_reads_less(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = roofline._readers

    def readers(buffer: torch.Tensor) -> Any:
        read.append(buffer.nbytes)
        return real(buffer)

    monkeypatch.setattr(roofline, "_readers", readers)
    monkeypatch.setattr(roofline, "free_memory_bytes", lambda device: 20 << 20)
    measure_ceilings(torch.float32, CPU)
    assert read == [6 << 20]

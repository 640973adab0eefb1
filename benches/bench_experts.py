"""Every registered backend on every layer that it supports: small layers on a CPU, real models on a GPU.

    python -m pytest benches/bench_experts.py --benchmark-only [-k mixtral]

A group of the table is one layer and number of tokens. `moereg.bench` compares its backends with the reference and
times them in turns: on a GPU as replays of CUDA graphs over rotated inputs, measured with events. pytest-benchmark gets
those samples, one a round, through a timer that moves by a sample at a time. A wrong backend fails and has no number.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from pytest_benchmark.fixture import BenchmarkFixture

from moereg.bench.compare import Comparison, Measurement
from moereg.bench.inputs import num_calls, random_calls, random_weights
from moereg.bench.roofline import Ceilings, measure_ceilings
from moereg.cli._bench import check_run_fits
from moereg.dispatch import explain_backends
from moereg.errors import TooLargeError
from moereg.evidence.provenance import clocks, provenance
from moereg.platforms import current_platform
from moereg.selection.result import Decision, Selection
from moereg.spec.model_shapes import MODEL_SHAPES
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

PLATFORM = current_platform()
DEVICE = torch.device(PLATFORM.device_type)
ROUTING = "uniform"
TOKEN_COUNTS = (1, 64) if DEVICE.type == "cpu" else (1, 16, 64, 256, 1024, 4096)
SMALL: dict[str, Any] = {"num_experts": 32, "hidden_size": 512, "intermediate_size": 256, "top_k": 4}
SMALL_LAYERS: dict[str, dict[str, Any]] = {
    "small": SMALL,
    "small-fp32": {**SMALL, "dtype": "float32"},
    "small-batched": {**SMALL, "activation_format": "batched"},
    "small-swigluoai": {**SMALL, "activation": "swigluoai", "has_bias": True},
    "small-relu2": {**SMALL, "activation": "relu2"},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One bench: a layer, a number of tokens and a backend that fits."""

    layer: str
    selection: Selection
    num_tokens: int
    decision: Decision

    @property
    def id(self) -> str:
        """Readable and unique."""
        return f"{self.layer}-T{self.num_tokens}-{self.decision.backend}-{self.decision.experts}"


def _cases() -> list[Case]:
    real = {name: shape.problem_keywords() for name, shape in MODEL_SHAPES.items()}
    olmoe = real["olmoe-1b-7b"]
    real |= {"olmoe-1b-7b-fp16": {**olmoe, "dtype": "float16"}}
    real |= {"olmoe-1b-7b-batched": {**olmoe, "activation_format": "batched"}}
    layers = SMALL_LAYERS if DEVICE.type == "cpu" else real
    cases = []
    for layer, keywords in layers.items():
        selection = explain_backends(MoEProblem(**keywords, max_num_tokens=max(TOKEN_COUNTS)), PLATFORM)
        cases += [
            Case(layer, selection, num_tokens, decision)
            for num_tokens in TOKEN_COUNTS
            for decision in selection.decisions
            if decision.accepted
        ]
    return cases


class _Current:
    """The layer that is being measured, one at a time, and its last number of tokens."""

    def __init__(self) -> None:
        self._selection: Selection | None = None
        self._comparison: Comparison | None = None
        self._rows: dict[int, list[Measurement]] = {}

    def comparison(self, selection: Selection) -> Comparison:
        if self._comparison is None or self._selection is not selection:
            # The layer before goes first: the two together may not fit.
            self._selection, self._comparison, self._rows = selection, None, {}
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
            num_kernels = sum(decision.accepted for decision in selection.decisions)
            for num_tokens in TOKEN_COUNTS:
                num_inputs = (1 + num_kernels) * num_calls(num_tokens)
                check_run_fits(selection.problem, num_tokens, DEVICE, num_kernels, num_inputs)

            def make_weights() -> ExpertWeights:
                return random_weights(selection.problem, torch.Generator().manual_seed(0), DEVICE)

            inputs = {
                num_tokens: random_calls(selection.problem, num_tokens, ROUTING, 0, DEVICE)
                for num_tokens in TOKEN_COUNTS
            }
            self._comparison = Comparison(selection, make_weights, inputs)
        return self._comparison

    def measure(self, case: Case) -> Measurement:
        comparison = self.comparison(case.selection)
        if case.num_tokens not in self._rows:
            ceilings = _ceilings(case.selection.problem.dtype)
            self._rows = {case.num_tokens: comparison.measure(case.num_tokens, ceilings)}
        return next(row for row in self._rows[case.num_tokens] if row.decision == case.decision)


CURRENT = _Current()


@functools.cache
def _ceilings(dtype: str) -> Ceilings:
    return measure_ceilings(getattr(torch, dtype), DEVICE)


class SampleClock:
    """A clock that stands still but for `advance`, which moves it by the next sample."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._samples_us: list[float] = []

    def load(self, samples_us: tuple[float, ...]) -> None:
        """The samples that `advance` will go through."""
        self._samples_us = list(reversed(samples_us))

    def advance(self) -> None:
        """The work that pytest-benchmark times."""
        self.seconds += self._samples_us.pop() * 1e-6


CLOCK = SampleClock()


def measured_seconds() -> float:
    """The timer that pytest-benchmark reads."""
    return CLOCK.seconds


@pytest.mark.benchmark(timer=measured_seconds)
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.id)
def bench_experts(benchmark: BenchmarkFixture, case: Case) -> None:
    problem = case.selection.problem
    try:
        row = CURRENT.measure(case)
    except TooLargeError as error:
        pytest.skip(str(error))
    if row.failure:
        pytest.fail(f"it raised {row.failure}", pytrace=False)
    if row.damage:
        pytest.fail(f"it is wrong: {row.damage}", pytrace=False)
    if row.timing is None:
        pytest.fail(f"wrong numbers ({row.relative_error:.2e} > {row.tolerance:.1e}): no time", pytrace=False)
    benchmark.group = f"{problem.quant.name}: {case.layer} ({problem}), {case.num_tokens} tokens"
    cell = case.decision.cell
    requires = () if cell is None else cell.requires
    benchmark.extra_info |= {
        "share_of_roofline": row.share,
        "tflops": row.tflops,
        "gbps": row.gbps,
        "roofline_us": row.roofline_us,
        "relative_error": row.relative_error,
        "workspace_bytes": CURRENT.comparison(case.selection).workspace_bytes(case.decision, case.num_tokens),
        "routing": ROUTING,
        "ceilings": dataclasses.asdict(_ceilings(problem.dtype)),
        **provenance(PLATFORM, {"torch", *(Requirement(text).name for text in requires)}),
        **clocks(PLATFORM),
    }
    CLOCK.load(row.timing.samples_us)
    benchmark.pedantic(CLOCK.advance, rounds=len(row.timing.samples_us))

"""Small layers of fake experts for the tests of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moereg.dispatch import evaluate
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts
from moereg.platforms import current_platform
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.support.fakes import BatchedExperts, FakeExperts, PerRouteExperts, cell_of

CPU = torch.device("cpu")
FORMS = {"reduced": FakeExperts, "per_route": PerRouteExperts, "per_expert": BatchedExperts}


def problem_of(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 8, "hidden_size": 16, "intermediate_size": 12, "top_k": 2, "dtype": "float32"}
    return MoEProblem(**{**facts, **changes})


def problem_for(form: str, **changes: Any) -> MoEProblem:
    """A problem in the activation format of experts with that output form."""
    return problem_of(activation_format="batched" if form == "per_expert" else "standard", **changes)


def selection_of(problem: MoEProblem, experts: type[FakeExperts] = FakeExperts, name: str = "fake") -> Selection:
    """A selection of a class that is registered only here."""
    request = Request(require=(name,))
    decision = evaluate(cell_of(experts, rules=("*",), name=name), problem, current_platform(), request)
    assert decision.accepted, decision.reasons
    return Selection(problem, current_platform(), request, (decision,), "required")


def kernel_of(
    problem: MoEProblem,
    experts: type[FakeExperts] = FakeExperts,
    weights: ExpertWeights | None = None,
    name: str = "fake",
    **changes: Any,
) -> MoEKernel:
    weights = make_weights(problem, CPU) if weights is None else weights
    return make_kernel(problem, weights, selection=selection_of(problem, experts, name), **changes)


def copied(weights: ExpertWeights) -> ExpertWeights:
    return dataclasses.replace(weights, **{name: tensor.clone() for name, tensor in weights.tensors().items()})


def replaced(weights: ExpertWeights, expert: int, others: ExpertWeights) -> ExpertWeights:
    """Weights with one expert of others; numbers that serve all experts stay."""
    tensors = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    for name, tensor in tensors.items():
        if tensor.dim():
            tensor[expert] = others.tensors()[name][expert]
    return ExpertWeights.unchecked(tensors, weights.scheme)


def call(kernel: MoEKernel, inputs: Inputs, **changes: Any) -> torch.Tensor:
    return kernel(*inputs.call, **changes)


def expected(problem: MoEProblem, weights: ExpertWeights, inputs: Inputs, expert_map: Any = None) -> torch.Tensor:
    return reference_experts(problem, weights, *inputs.call, expert_map, torch.float64)


INPUTS = make_inputs(problem_of(), 4, "uniform", CPU)


def build_refused(text: str, problem: MoEProblem | None = None, **changes: Any) -> None:
    problem = problem_of() if problem is None else problem
    keywords = {"weights": make_weights(problem, CPU), "selection": selection_of(problem), **changes}
    with pytest.raises(ValueError, match=re.escape(text)):
        make_kernel(problem, **keywords)


class Cuda:
    """Stands for `torch.cuda`, as far as it is asked.

    Attributes:
        streams: Entered, by the name of the thread.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cuda_stream = 7
        self.is_capturing = False
        self.streams: list[tuple[str, object]] = []
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.streams.append((threading.current_thread().name, stream))
        yield

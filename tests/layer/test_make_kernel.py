"""What make_kernel refuses and fills in, in one process and across ranks."""

from __future__ import annotations

import dataclasses
import re
import threading

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.errors import BackendError, LayoutMismatchError
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import relative_error
from moereg.prepare_finalize import StandardPrepareFinalize
from moereg.selection.result import Selection
from moereg.testing.inputs import make_inputs, make_weights
from tests.layer.small_layers import CPU, INPUTS, build_refused, call, expected, kernel_of, problem_of, selection_of
from tests.support.fakes import FakeExperts


def test_what_belongs_to_something_else_is_refused() -> None:
    selection = selection_of(problem_of())
    absent, none = Selection.from_dict(selection.to_dict()), dataclasses.replace(selection, decisions=(), source=None)
    for arguments, text in (
        (
            {"selection": selection_of(problem_of(top_k=3))},
            "the selection was made for E8 H16 I12 k3 float32 unquantize",
        ),
        ({"selection": absent}, "the selection has no backend that is registered here (it names 'fake'); select again"),
        ({"selection": none}, "(it names None); select again"),
        (
            {"weights": make_weights(problem_of(), CPU).to("meta")},
            "needs weights on a cpu or cuda device, got meta; move",
        ),
    ):
        build_refused(text, **arguments)


def test_layouts_have_to_match() -> None:
    class Elsewhere(FakeExperts):
        layouts = ("swizzled", "padded")

    text = (
        "returned an undeclared layout from Elsewhere.permute_weights: 'canonical', and its class declares swizzled, "
    )
    with pytest.raises(BackendError, match=text):
        kernel_of(problem_of(), Elsewhere)
    kernel = kernel_of(problem_of(), FakeExperts)
    experts = Elsewhere(kernel.problem, kernel.selection.platform, kernel.problem.quant)
    text = "Elsewhere reads layouts swizzled, padded, got 'canonical'; permute the weights with the same class"
    with pytest.raises(LayoutMismatchError, match=f"^{re.escape(text)}$"):
        MoEKernel(kernel.problem, kernel.selection, experts, kernel.weights, StandardPrepareFinalize(), None)


def test_selects_where_nothing_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_REQUIRE", "torch")
    problem = problem_of()
    weights = make_weights(problem, CPU)
    kernel = make_kernel(problem, weights)
    assert kernel.selection == select_backend(problem)
    assert kernel.selection.source == "required"
    assert relative_error(call(kernel, INPUTS), expected(problem, weights, INPUTS)) < 1e-5
    assert repr(kernel).startswith("MoEKernel(torch, E8 H16 I12 k2 float32 unquantized silu, ")


def test_threads_select_and_build_at_once() -> None:
    problem = problem_of()
    weights = make_weights(problem, CPU)
    want = expected(problem, weights, INPUTS)
    errors: list[float] = []

    def build() -> None:
        kernel = make_kernel(problem, weights, selection=select_backend(problem, require="torch"))
        errors.append(relative_error(call(kernel, INPUTS), want))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 8
    assert max(errors) < 1e-5


def test_a_default_device_changes_nothing() -> None:
    """Engines build models under another default device; a kernel's own tensors must not follow it."""
    problem = problem_of(num_local_experts=4)
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, 5, "uniform", CPU)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    selection = selection_of(problem)
    with torch.device("meta"):
        kernel = make_kernel(problem, weights, selection, ep_rank=1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: kernel(*arguments), fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), kernel(*arguments))
    assert torch.equal(kernel(*arguments), make_kernel(problem, weights, selection, ep_rank=1)(*arguments))

"""Layers in compiled code."""

from __future__ import annotations

import dataclasses
import gc
import re

import pytest
import torch

from moereg.layer.factory import MoEKernel, make_kernel
from moereg.runtime import torch_op as compiled
from moereg.testing.inputs import make_inputs, make_weights
from tests.layer.small_layers import CPU, INPUTS, call, kernel_of, problem_of, selection_of


def test_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    problem = problem_of()
    kernel = kernel_of(problem)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return kernel(x * 2, weights, ids) + 1

    for num_tokens in (3, 5, 11, 0):
        inputs = make_inputs(problem, num_tokens, "unmapped", CPU)
        found = model(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
        doubled = dataclasses.replace(inputs, hidden_states=inputs.hidden_states * 2)
        torch.testing.assert_close(found, call(kernel, doubled) + 1)


def test_compiles_with_out_and_int64_ids() -> None:
    torch._dynamo.reset()
    kernel = kernel_of(problem_of())

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        kernel(x, weights, ids, out=out)
        return out + 1

    out = torch.full((4, 16), torch.nan)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids.long(), out)
    assert torch.equal(out, call(kernel, INPUTS))
    assert torch.equal(found, out + 1)


def test_compiled_layers_of_one_model_stay_apart() -> None:
    torch._dynamo.reset()
    problem = problem_of()
    kernels = [kernel_of(problem, weights=make_weights(problem, CPU, seed)) for seed in range(3)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for kernel in kernels:
            x = x + kernel(x, weights, ids)
        return x

    x = INPUTS.hidden_states
    for kernel in kernels:
        x = x + kernel(x, INPUTS.topk_weights, INPUTS.topk_ids)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids)
    torch.testing.assert_close(found, x)


def test_compiled_code_outlives_no_kernel() -> None:
    handle = kernel_of(problem_of())._handle
    gc.collect()
    with pytest.raises(
        RuntimeError, match=rf"the MoE layer of compiled code \(handle {handle}\) is gone; keep a reference"
    ):
        compiled._moe_layer(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids, torch.empty(4, 16), handle)


@pytest.mark.slow
def test_compiled_code_refuses_what_plain_code_does() -> None:
    """Compiled code used to hand NaN, and an expert named twice, on to the kernel."""
    kernel = kernel_of(problem_of())
    compiled = torch.compile(lambda *arguments: kernel(*arguments), fullgraph=True, backend="eager")
    weights, ids = INPUTS.topk_weights.clone(), INPUTS.topk_ids.clone()
    weights[2, 1] = torch.nan
    ids[3, 1] = ids[3, 0]
    for arguments, text in (
        ((INPUTS.hidden_states, weights, INPUTS.topk_ids), "topk_weights must be finite, got nan at token 2, slot 1"),
        ((INPUTS.hidden_states, INPUTS.topk_weights, ids), "topk_ids of one token must be distinct"),
        ((INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids, INPUTS.hidden_states), "out must not alias"),
    ):
        for run in (kernel, compiled):
            with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
                run(*arguments)


@pytest.mark.slow
def test_compiles_with_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Inductor traces the poisoned torch.empty and cannot lower it.
    torch._dynamo.reset()
    kernel = kernel_of(problem_of())
    model = torch.compile(lambda x, weights, ids: kernel(x, weights, ids).relu(), fullgraph=True)
    found = model(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids)
    torch.testing.assert_close(found, call(kernel, INPUTS).relu())


def test_many_layers_compile_once() -> None:
    problem = problem_of()
    kernels = [make_kernel(problem, make_weights(problem, CPU, seed), selection_of(problem)) for seed in range(12)]
    inputs = make_inputs(problem, 5, "uniform", CPU)
    arguments = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    torch._dynamo.reset()

    class Layer(torch.nn.Module):
        def __init__(self, kernel: MoEKernel) -> None:
            super().__init__()
            self.kernel = kernel

        def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
            return self.kernel(*arguments) + 1

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(kernel: MoEKernel, *arguments: torch.Tensor) -> torch.Tensor:
        return kernel(*arguments) + 1

    for kernel in kernels:
        layer = torch.compile(Layer(kernel), fullgraph=True, backend="eager")
        for out in (layer(*arguments), compiled(kernel, *arguments)):
            assert torch.equal(out, kernel(*arguments) + 1)

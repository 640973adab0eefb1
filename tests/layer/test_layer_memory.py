"""Storage that a layer reads, shares, copies and writes into, and layers in compiled code."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.errors import CompiledCodeError, PicklingError
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import relative_error
from moereg.runtime import torch_op as compiled
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.layer.small_layers import (
    CPU,
    FORMS,
    INPUTS,
    call,
    copied,
    expected,
    kernel_of,
    problem_for,
    problem_of,
    selection_of,
)
from tests.support.fakes import FakeExperts


def every_second(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((tensor, tensor.roll(1)), dim=-1)[..., 0]


def behind_others(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.cat((tensor.flatten()[:1], tensor.flatten()))
    return flat[1:].view(tensor.shape)


# The same numbers in every way that torch can hold them.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second column": every_second,
    "transposed": lambda tensor: tensor.transpose(0, -1).contiguous().transpose(0, -1),
    "behind others": behind_others,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.dtype.itemsize > 1),
}


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("unquantized", "bfloat16"), ("unquantized", "float32"), ("int8_w8a8", "bfloat16"), ("nvfp4", "bfloat16")],
)
def test_weights_of_any_strides(scheme: str, dtype: str, activation_format: str) -> None:
    problem = problem_of(
        num_experts=3,
        hidden_size=48,
        intermediate_size=40,
        has_bias=True,
        quant=scheme,
        dtype=dtype,
        activation_format=activation_format,
        exact_activations=True,
    )
    weights = make_weights(problem, CPU)
    selection = select_backend(problem, "cpu")
    inputs = make_inputs(problem, 5, "uniform", CPU)
    want = call(make_kernel(problem, weights, selection), inputs)
    for way, strided in STRIDES.items():
        others = dataclasses.replace(weights, **{name: strided(value) for name, value in weights.tensors().items()})
        kernel = make_kernel(problem, others, selection)
        assert torch.equal(call(kernel, inputs), want), way
        kernel.reload(others, write_shared=True)
        assert torch.equal(call(kernel, inputs), want), way


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_bias_may_be_one_number_for_all(dtype: str) -> None:
    """Memory behind it was read as the other numbers."""
    problem = problem_of(hidden_size=64, intermediate_size=32, has_bias=True, dtype=dtype)
    weights = make_weights(problem, CPU)
    sizes = {"w13_bias": (8, 64), "w2_bias": (8, 64)}
    for bias_dtype in (problem.torch_dtype, torch.float32):
        one = torch.tensor(0.5, dtype=bias_dtype)
        expanded = dataclasses.replace(weights, **{name: one.expand(size) for name, size in sizes.items()})
        whole = dataclasses.replace(weights, **{name: torch.full(size, 0.5).to(one) for name, size in sizes.items()})
        inputs = make_inputs(problem, 5, "uniform", CPU)
        assert torch.equal(call(make_kernel(problem, expanded), inputs), call(make_kernel(problem, whole), inputs))


def test_reload_reads_views_of_its_own_storage() -> None:
    """A transposed view has the address of its base."""
    problem = problem_of(hidden_size=16, intermediate_size=8)
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, weights=weights)
    transposed = dataclasses.replace(weights, w13=weights.w13.transpose(1, 2))
    wanted = dataclasses.replace(weights, w13=transposed.w13.clone())
    assert kernel.weights["w13"].data_ptr() == transposed.w13.data_ptr()
    truth = expected(problem, wanted, INPUTS)
    kernel.reload(transposed, write_shared=True)
    assert relative_error(call(kernel, INPUTS), truth) < 1e-6


def test_inference_mode_may_come_and_go() -> None:
    """Tensors made inside it serve outside, and the other way around."""
    weights, other = make_weights(problem_of(), CPU), make_weights(problem_of(), CPU, seed=1)
    for form in FORMS:
        here = problem_for(form)
        wanted = [call(kernel_of(here, FORMS[form], value), INPUTS) for value in (weights, other)]
        for inside in (True, False):
            with torch.inference_mode(inside):
                kernel = kernel_of(here, FORMS[form], copied(weights))
                assert torch.equal(call(kernel, INPUTS), wanted[0])
            with torch.inference_mode(not inside):
                kernel.reload(copied(other), write_shared=True)
                assert torch.equal(call(kernel, INPUTS), wanted[1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_copy_of_the_default_backend(dtype: str) -> None:
    problem = problem_of(hidden_size=64, intermediate_size=32, dtype=dtype)
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    inputs = make_inputs(problem, 5, "uniform", CPU)
    # Weights that are packed are the kernel's own anyway; which are depends on the CPU.
    kernel = make_kernel(problem, weights, own_weights=True)
    before = call(kernel, inputs)
    twin = copy.deepcopy(kernel)
    assert torch.equal(call(twin, inputs), before)
    twin.reload(other)
    assert torch.equal(call(kernel, inputs), before)
    after = call(twin, inputs)
    assert relative_error(after, expected(problem, other, inputs)) < 8e-3
    kernel.reload(other)
    twin.reload(weights)
    assert torch.equal(call(kernel, inputs), after)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *arguments: twin(*arguments), fullgraph=True, backend="eager")
    assert torch.equal(compiled(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids), before)
    with pytest.raises(PicklingError, match="is not pickled"):
        pickle.dumps(twin)


class CopyingExperts(FakeExperts):
    """Permutes by copying, as a kernel with another layout does."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("canonical", {name: tensor.clone() for name, tensor in weights.tensors().items()})


def test_canonical_weights_are_not_kept() -> None:
    weights = make_weights(problem_of(), CPU)
    canonical = weakref.ref(weights.w13)
    kernel = kernel_of(problem_of(), CopyingExperts, weights)
    del weights
    gc.collect()
    assert canonical() is None
    assert call(kernel, INPUTS).any()


def test_reload_keeps_storage() -> None:
    problem = problem_of()
    kernel = kernel_of(problem, CopyingExperts)
    pointers = {name: kernel.weights[name].data_ptr() for name in ("w13", "w2")}
    first = call(kernel, INPUTS)
    other = make_weights(problem, CPU, seed=5)
    kernel.reload(other)
    assert {name: kernel.weights[name].data_ptr() for name in pointers} == pointers
    assert relative_error(call(kernel, INPUTS), expected(problem, other, INPUTS)) < 1e-6
    assert not torch.equal(call(kernel, INPUTS), first)
    with pytest.raises(ValueError, match=r"^w13 must be \[8, 24, 16\]"):
        kernel.reload(make_weights(problem_of(intermediate_size=10), CPU))
    assert relative_error(call(kernel, INPUTS), expected(problem, other, INPUTS)) < 1e-6


def test_kernels_share_one_workspace() -> None:
    seen: list[tuple[int, int]] = []

    class Watched(FakeExperts):
        def apply(self, out: Any, inputs: Any, weights: Any, workspace13: Any, workspace2: Any) -> None:
            seen.append((workspace13.data_ptr(), workspace2.data_ptr()))
            assert workspace13.shape == (4, 12)
            assert workspace2.shape == (4, 16)
            workspace13.fill_(torch.nan)
            workspace2.fill_(torch.nan)
            super().apply(out, inputs, weights, workspace13, workspace2)

    one, other = (kernel_of(problem_of(), Watched, make_weights(problem_of(), CPU, seed)) for seed in (1, 2))
    first = call(one, INPUTS)
    call(other, INPUTS)
    assert torch.equal(call(one, INPUTS), first)
    assert len(set(seen)) == 1
    assert seen[0][0] != seen[0][1]


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


def test_compiled_code_outlives_no_kernel() -> None:
    handle = kernel_of(problem_of())._handle
    gc.collect()
    with pytest.raises(
        CompiledCodeError, match=rf"the MoE layer of compiled code \(handle {handle}\) is gone; keep a reference"
    ):
        compiled._moe_layer(INPUTS.hidden_states, INPUTS.topk_weights, INPUTS.topk_ids, torch.empty(4, 16), handle)


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

"""Quantized weights on CPUs: what is computed, and how little of the weights is restored."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moereg.backends.torch_moe import TorchInt8BatchedExperts, TorchInt8Experts
from moereg.dispatch import select_backend
from moereg.errors import EmulationWarning
from moereg.kernels.plain import cpu, host, quantized_mlp
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform
from moereg.quantize import quantize_weights
from moereg.selection.loader import load_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme
from moereg.testing.cases import Case, build
from moereg.testing.inputs import Inputs, make_inputs, make_plain_weights, make_weights
from moereg.weights import quantize_weights as quantize_module
from moereg.weights.permuted import ExpertWeights

SetFeatures = Callable[..., None]

CPU = torch.device("cpu")
PLATFORM = "cpu"
ROUNDING = [name for name, scheme in QUANT_SCHEMES.items() if scheme.activation is not None]


pytestmark = pytest.mark.usefixtures("one_thread")


def problem_of(quant: str | QuantScheme, **changes: Any) -> MoEProblem:
    facts = {"num_experts": 6, "hidden_size": 130, "intermediate_size": 88, "top_k": 2, "quant": quant}
    return MoEProblem(**{**facts, **changes})


def kernel_of(problem: MoEProblem, weights: ExpertWeights | None = None, **options: Any) -> MoEKernel:
    weights = make_weights(problem, CPU) if weights is None else weights
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationWarning)
        return make_kernel(problem, weights, **{"selection": select_backend(problem, PLATFORM), **options})


# --- what is computed ---


def test_the_kernel_knows_what_it_computes() -> None:
    problem = problem_of("nvfp4")
    kernel = kernel_of(problem)
    assert kernel.experts.computes is QUANT_SCHEMES["nvfp4_w4a16"]
    assert kernel.experts.problem.quant is QUANT_SCHEMES["nvfp4"]
    exact = kernel_of(dataclasses.replace(problem, exact_activations=True))
    assert exact.experts.computes is QUANT_SCHEMES["nvfp4"]
    assert type(exact.experts)(problem, Platform("cpu")).computes is problem.quant


def check(kernel: MoEKernel, weights: ExpertWeights, inputs: Inputs) -> torch.Tensor:
    out = kernel(*inputs.call)
    computes = kernel.experts.computes
    truth = reference_experts(kernel.problem, weights, *inputs.call, kernel.expert_map, computes=computes)
    # All of them keep gate and up in fp32 where they round activations.
    bound = tolerance(computes, kernel.problem.dtype, truth.numel(), rounds_as_reference=True)
    assert relative_error(out, truth) < bound
    return out


@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_within_the_closer_bound(name: str, activation_format: str) -> None:
    problem = problem_of(name, activation_format=activation_format, exact_activations=True)
    weights = make_weights(problem, CPU)
    check(kernel_of(problem, weights), weights, make_inputs(problem, 63, "skewed", CPU))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(1, 400), st.integers(1, 400), st.sampled_from(["silu", "relu2"]))
def test_blocks_that_do_not_divide(hidden: int, intermediate: int, activation: str) -> None:
    sizes = {"num_experts": 2, "hidden_size": hidden, "intermediate_size": intermediate, "activation": activation}
    problem = problem_of("fp8_block128", **sizes)
    weights = make_weights(problem, CPU)
    check(kernel_of(problem, weights), weights, make_inputs(problem, 9, "uniform", CPU))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("experts", [TorchInt8Experts, TorchInt8BatchedExperts])
@pytest.mark.parametrize("sizes", [(130, 88), (33, 7), (64, 96), (1, 40), (40, 1), (1, 1)], ids=str)
def test_int8_matmuls_on_any_cpu(experts: Any, dtype: str, sizes: tuple[int, int]) -> None:
    """Slow without VNNI, and the same."""
    (activation_format,) = experts.facts.activation_formats
    problem = problem_of(
        "int8_w8a8",
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        dtype=dtype,
        has_bias=True,
        activation_format=activation_format,
    )
    weights = make_weights(problem, CPU)
    (cell,) = [cell for cell in load_backends().cells if cell.experts is experts]
    kernel = build(Case(cell, Platform("cpu"), problem), weights)
    assert type(kernel.experts) is experts
    for num_tokens in (1, 17):
        check(kernel, weights, make_inputs(problem, num_tokens, "uniform", CPU))


def may_be_fast() -> bool:
    """False where oneDNN may not use VNNI: torch, which asks the CPU alone, would let it saturate."""
    return cpu.features().int8 or not torch.cpu._is_vnni_supported()


@pytest.mark.parametrize("int8", [True, False])
def test_int8_products_of_every_small_size(int8: bool, cpu_features: SetFeatures) -> None:
    """torch's int8 product of a single column reads past the weights' end; oneDNN's without VNNI saturates."""
    cpu_features(int8=int8 and may_be_fast())
    generator = torch.Generator().manual_seed(0)
    for depth in (*range(1, 10), 31, 32, 33):
        for num_rows in range(1, 21):
            for columns in (1, 2, 3, 8, 17):
                x = torch.randint(-128, 128, (num_rows, depth), dtype=torch.int8, generator=generator)
                weight = torch.randint(-128, 128, (columns, depth), dtype=torch.int8, generator=generator)
                found = quantized_mlp.int8_matmul(x, weight)
                assert torch.equal(found, (x.long() @ weight.long().t()).int()), (depth, num_rows, columns)


@pytest.mark.parametrize("int8", [True, False])
def test_int8_sums_are_exact(int8: bool, cpu_features: SetFeatures) -> None:
    """Sums of 33 million on the way, of which fp32 keeps every second number, to a last one of -127."""
    cpu_features(int8=int8 and may_be_fast())
    weight = torch.full((1, 2, 4096), 127, dtype=torch.int8)
    weight[0, :, 2048:] = -127
    weight[0, 0, 0] = 126
    scale = torch.ones(1, 2, 1)
    mlp = quantized_mlp.Int8Mlp(
        weight, weight, scale, scale, torch.relu, lambda x: (x.to(torch.int8), torch.ones(1, 1))
    )
    assert mlp._linear(torch.full((1, 4096), 127.0), weight[0], scale[0], None, 0).tolist() == [[-127.0, 0.0]]


@pytest.mark.parametrize("name", ["fp8_tensor_dynamic", "fp8_tensor_static", "nvfp4"])
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
def test_what_goes_nowhere_changes_no_scale(name: str, activation_format: str) -> None:
    """Unmapped tokens, and the rows that fill a batch or a bucket, may hold anything."""
    problem = problem_of(name, activation_format=activation_format, exact_activations=True)
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, weights)
    inputs = make_inputs(problem, 9, "uniform", CPU)
    inputs.topk_ids[4] = torch.tensor([-1, 6], dtype=torch.int32)
    before = check(kernel, weights, inputs)
    inputs.hidden_states[4] = float("nan")
    after = check(kernel, weights, inputs)
    assert torch.equal(after, before)


def test_one_scale_for_a_call_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of("fp8_tensor_dynamic", top_k=3)
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, weights)
    inputs = make_inputs(problem, 200, "uniform", CPU)
    inputs.hidden_states[-1] *= 10
    whole = check(kernel, weights, inputs)
    monkeypatch.setattr(host, "HOST_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(host, "BLOCK_BYTES", 1)
    assert host.host_chunk_tokens(200, 3, 130, 2) < 200
    assert relative_error(check(kernel, weights, inputs), whole.float()) < 1e-3


@pytest.mark.parametrize("name", ["fp8_tensor_static", "nvfp4"])
def test_static_scales_may_be_one_number_and_are_reloaded(name: str) -> None:
    problem = problem_of(name, exact_activations=True)
    weights = make_weights(problem, CPU)
    one = dataclasses.replace(weights, a13_scale=weights.a13_scale.amax(), a2_scale=weights.a2_scale.amax())
    kernel = kernel_of(problem, one)
    inputs = make_inputs(problem, 17, "uniform", CPU)
    check(kernel, one, inputs)
    kernel.reload(weights)
    check(kernel, weights, inputs)


def test_gate_and_up_may_have_scales_of_their_own() -> None:
    for name in ("fp8_tensor_dynamic", "nvfp4_w4a16"):
        problem = problem_of(name)
        weights = quantize_weights(make_plain_weights(problem, CPU), name, separate_halves=True)
        check(kernel_of(problem, weights), weights, make_inputs(problem, 17, "uniform", CPU))


# --- memory ---


class LargestOutput(TorchDispatchMode):
    """The largest tensor that any operation inside returns, in bytes; views count with their shape."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_bytes = max(self.num_bytes, out.nbytes)
        return out


@pytest.mark.parametrize("name", ["nvfp4_w4a16", "fp8_block128", "int4_w4a16_g128_zp", "mxfp8"])
def test_some_rows_are_restored_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Biases, so that a block of rows has to find its own part of them.
    problem = problem_of(name, hidden_size=512, intermediate_size=512, num_experts=2, has_bias=True)
    weights = make_weights(problem, CPU)
    inputs = make_inputs(problem, 3, "uniform", CPU)
    whole = check(kernel_of(problem, weights), weights, inputs)
    monkeypatch.setattr(quantize_module, "BLOCK_BYTES", 64 << 10)
    kernel = kernel_of(problem, weights)
    with LargestOutput() as largest:
        out = kernel(*inputs.call)
    assert torch.equal(out, whole)
    # fp32 of one expert's w13 is 2 MiB; blocks of 128 x 128 need 128 rows, 256 KiB.
    stored = max(tensor.nbytes for tensor in weights.tensors().values())
    assert largest.num_bytes <= max(stored, 256 << 10)


def test_weights_stay_packed() -> None:
    for name in ("nvfp4_w4a16", "fp8_channel_token", "int8_w8a16"):
        problem = problem_of(name)
        weights = make_weights(problem, CPU)
        kernel = kernel_of(problem, weights)
        assert kernel.weights["w13"].data_ptr() == weights.w13.data_ptr()
        assert kernel.weights.num_bytes == sum(tensor.nbytes for tensor in weights.tensors().values())

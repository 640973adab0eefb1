"""What the torch backend's classes promise beside what the kit checks of every backend (tests/kit)."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moereg.backends.cutlass_moe import TorchGroupedExperts
from moereg.backends.torch_moe import (
    TorchBatchedExperts,
    TorchDenseExperts,
    TorchPackedBatchedExperts,
    TorchPackedExperts,
)
from moereg.experts import ExpertInputs, Experts
from moereg.kernels.plain import device, host, mlp
from moereg.numerics.reference import relative_error
from moereg.numerics.tolerances import ROUNDING_BOUNDS
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.testing.check import Check
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from moereg.testing.suite import list_suite
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.cli.command import printed
from tests.support.experts_run import CPU, run_experts, truth_of

STANDARD = (TorchPackedExperts, TorchGroupedExperts, TorchDenseExperts)
BATCHED = (TorchPackedBatchedExperts, TorchBatchedExperts)
CLASSES = (*STANDARD, *BATCHED)
PACKING = [
    check
    for check in list_suite("torch").checks
    if check.kind in ("numbers", "equal_bits", "reload") and "TorchPacked" in str(check.cell)
]

pytestmark = pytest.mark.usefixtures("one_thread")


def make_problem(**changes: object) -> MoEProblem:
    facts = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 96, "top_k": 2, **changes}
    return MoEProblem(**facts)


def run(
    experts_class: type[Experts],
    problem: MoEProblem,
    inputs: Inputs,
    weights: ExpertWeights,
    expert_map: torch.Tensor | None = None,
    permuted: PermutedWeights | None = None,
) -> torch.Tensor:
    return run_experts(experts_class, problem, weights, inputs, Platform("cpu"), expert_map, permuted)


def format_of(experts_class: type[Experts]) -> str:
    return next(iter(experts_class.facts.activation_formats))


@pytest.mark.parametrize("check", PACKING, ids=lambda check: check.id)
def test_packed_experts_of_any_size(monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    """The kit's layers are so small that plain matmuls are faster."""
    monkeypatch.setattr(mlp, "_PACKED_ELEMENTS", 0)
    check.run()


@pytest.mark.parametrize("experts_class", CLASSES)
def test_unmapped_and_out_of_range_ids_add_nothing(experts_class: type[Experts]) -> None:
    problem = make_problem(
        num_experts=8, num_local_experts=3, placement="map", activation_format=format_of(experts_class)
    )
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1], dtype=torch.int32)
    inputs = make_inputs(problem, 63, "uniform", CPU)
    # Routes that add nothing may carry any weight.
    inputs.topk_ids[3] = torch.tensor([-1, 8], dtype=torch.int32)
    inputs.topk_ids[4] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    if format_of(experts_class) == "standard":
        inputs.topk_weights[3] = float("inf")
    weights = make_weights(problem, CPU)
    out = run(experts_class, problem, inputs, weights, expert_map)
    assert relative_error(out, truth_of(problem, weights, inputs, expert_map)) < ROUNDING_BOUNDS["bfloat16"]
    assert not out[3:5].any()


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("experts_class", CLASSES)
def test_biases_of_a_bf16_layer(experts_class: type[Experts], bias_dtype: torch.dtype) -> None:
    problem = make_problem(has_bias=True, activation_format=format_of(experts_class))
    inputs, weights = make_inputs(problem, 63, "uniform", CPU), make_weights(problem, CPU)
    biases = {"w13_bias": weights.w13_bias.to(bias_dtype), "w2_bias": weights.w2_bias.to(bias_dtype)}
    weights = dataclasses.replace(weights, **biases)
    error = relative_error(run(experts_class, problem, inputs, weights), truth_of(problem, weights, inputs))
    assert error < ROUNDING_BOUNDS["bfloat16"]


@pytest.mark.parametrize("few_summed", [0, host.FEW_SUMMED])
@pytest.mark.parametrize("experts_class", STANDARD)
def test_routing_weights_keep_32_bits(
    experts_class: type[Experts], few_summed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer would refuse a token that names one expert twice; here both weights must add up."""
    monkeypatch.setattr(host, "FEW_SUMMED", few_summed)
    problem = make_problem()
    inputs, weights = make_inputs(problem, 5, "uniform", CPU), make_weights(problem, CPU)
    inputs.topk_ids[:] = 3
    inputs.topk_weights[:] = torch.tensor([1 + 2.0**-13, -1.0])
    difference = run(experts_class, problem, inputs, weights)
    inputs.topk_weights[:] = torch.tensor([2.0**-13, 0.0])
    assert torch.equal(difference, run(experts_class, problem, inputs, weights))


@pytest.mark.parametrize("experts_class", CLASSES)
def test_chunk_boundaries(experts_class: type[Experts], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(top_k=3, activation_format=format_of(experts_class))
    inputs, weights = make_inputs(problem, 257, "uniform", CPU), make_weights(problem, CPU)
    whole = run(experts_class, problem, inputs, weights)
    monkeypatch.setattr(host, "HOST_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(host, "BLOCK_BYTES", 1)
    monkeypatch.setattr(host, "GATHER_ONCE_BYTES", 1)
    assert host.host_chunk_tokens(257, 3, 64, 2) < 257
    chunked = run(experts_class, problem, inputs, weights)
    assert relative_error(chunked, truth_of(problem, weights, inputs)) < ROUNDING_BOUNDS["bfloat16"]
    assert relative_error(chunked, whole.float()) < ROUNDING_BOUNDS["bfloat16"]


class CountConversions(TorchDispatchMode):
    """Counts weights of some shapes that are converted, by expert."""

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        self.shapes = {weights.w13.shape[1:], weights.w2.shape[1:]}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape[-2:] in self.shapes:
            self.count += args[0].shape[:-2].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts_class", [TorchDenseExperts, TorchBatchedExperts])
def test_float16_weights_are_converted_once_a_call(
    experts_class: type[Experts], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(dtype="float16", activation_format=format_of(experts_class))
    inputs, weights = make_inputs(problem, 65, "uniform", CPU), make_weights(problem, CPU)
    whole = run(experts_class, problem, inputs, weights)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 20_000)
    assert device.device_chunk_tokens(65, 1, 64, 2 * 96) < 65
    with CountConversions(weights) as conversions:
        chunked = run(experts_class, problem, inputs, weights)
    assert conversions.count == 2 * problem.num_experts
    assert relative_error(chunked, whole.float()) < ROUNDING_BOUNDS["float16"]


def test_temporaries_are_bounded() -> None:
    for hidden_size, intermediate_size, top_k in ((2048, 768, 8), (7168, 2048, 8), (6144, 16384, 2)):
        for itemsize in (2, 4):
            rows = host.routed_rows(1 << 20, top_k, hidden_size, itemsize)
            routed_bytes = rows * hidden_size * itemsize
            block = host.row_block(hidden_size, 2 * intermediate_size, itemsize)
            block_bytes = block * 2 * (hidden_size + 2 * intermediate_size) * itemsize
            assert routed_bytes + block_bytes <= 256 << 20
            assert rows == host.routed_rows(1 << 21, top_k, hidden_size, itemsize)


def test_buckets_are_few_and_small() -> None:
    for rows in range(1, host.MAX_BLOCK_ROWS + 1):
        given = host.bucket_rows(rows)
        assert rows <= given <= max(host.MIN_ROWS, rows + rows // 16)
    assert len({host.bucket_rows(rows) for rows in range(1, host.MAX_BLOCK_ROWS + 1)}) <= 112


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", ""), ("float32", "Intel(R) Xeon(R)")])
def test_canonical_layout_is_read_too(dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where packing does not pay, as in fp32 on Intel's CPUs."""
    monkeypatch.setattr(mlp, "_PACKED_ELEMENTS", 0 if dtype == "float32" else 2**62)
    problem = make_problem(dtype=dtype)
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 63, "uniform", CPU)
    permuted = TorchPackedExperts(problem, Platform("cpu", device_name=name)).permute_weights(weights, problem)
    assert permuted["w13"] is weights.w13
    assert permuted.layout == "canonical"
    out = run(TorchPackedExperts, problem, inputs, weights, permuted=permuted)
    assert relative_error(out, truth_of(problem, weights, inputs)) < ROUNDING_BOUNDS[dtype]


@pytest.mark.parametrize("experts_class", [TorchGroupedExperts, TorchDenseExperts, TorchBatchedExperts])
@pytest.mark.parametrize("has_map", [False, True])
def test_device_classes_never_read_the_device(experts_class: type[Experts], has_map: bool) -> None:
    """Fake tensors have no values, so reading one on the host raises."""
    problem = make_problem(
        has_bias=True, placement="map" if has_map else "contiguous", activation_format=format_of(experts_class)
    )
    batched = problem.activation_format == "batched"
    with FakeTensorMode():
        weights = ExpertWeights(
            w13=torch.empty(8, 192, 64, dtype=torch.bfloat16),
            w2=torch.empty(8, 64, 96, dtype=torch.bfloat16),
            w13_bias=torch.empty(8, 192, dtype=torch.bfloat16),
            w2_bias=torch.empty(8, 64, dtype=torch.bfloat16),
        )
        inputs = ExpertInputs(
            torch.empty((8, 16, 64) if batched else (16, 64), dtype=torch.bfloat16),
            torch.empty(16, 2),
            torch.zeros(16, 2, dtype=torch.int32),
            expert_num_tokens=torch.zeros(8, dtype=torch.int32) if batched else None,
            expert_map=torch.zeros(8, dtype=torch.int32) if has_map else None,
        )
        experts = experts_class(problem, Platform("cuda", "sm90"))
        nothing = torch.empty(0, dtype=torch.bfloat16)
        out = torch.empty_like(inputs.hidden_states)
        experts.apply(out, inputs, experts.permute_weights(weights, problem), nothing, nothing)


def test_batched_rows_past_the_count_are_zero() -> None:
    problem = make_problem(activation_format="batched")
    weights = make_weights(problem, CPU)
    hidden_states = torch.full((8, 6, 64), float("nan"), dtype=torch.bfloat16)
    counts = torch.tensor([0, 1, 6, 2, 0, 3, 0, 5], dtype=torch.int32)
    for expert, count in enumerate(counts.tolist()):
        hidden_states[expert, :count] = 1
    inputs = ExpertInputs(hidden_states, torch.ones(6, 2), torch.zeros(6, 2, dtype=torch.int32), counts)
    for experts_class in BATCHED:
        experts = experts_class(problem, Platform("cpu"))
        out = torch.full_like(hidden_states, float("nan"))
        nothing = torch.empty(0, dtype=torch.bfloat16)
        experts.apply(out, inputs, experts.permute_weights(weights, problem), nothing, nothing)
        for expert, count in enumerate(counts.tolist()):
            assert not out[expert, count:].any()
            assert (out[expert, :count].abs().sum(1) > 0).all()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_permute_needs_one_copy() -> None:
    """Peak of permuting, measured by the kernel in a separate process: the packed copy and little more."""
    script = """
        import torch
        from pathlib import Path
        from moereg.backends.torch_moe import TorchPackedExperts
        from moereg.platforms import Platform
        from moereg.spec.problem import MoEProblem
        from moereg.weights.permuted import ExpertWeights

        def status(name):
            text = Path("/proc/self/status").read_text()
            return int(next(line for line in text.splitlines() if line.startswith(name)).split()[1]) * 1024

        problem = MoEProblem(num_experts=32, hidden_size=1024, intermediate_size=1024, top_k=2)
        experts = TorchPackedExperts(problem, Platform("cpu"))

        def ones(*size):
            return torch.ones(*size, dtype=torch.bfloat16)

        # The first packing loads kernels and grows pools.
        small = MoEProblem(num_experts=1, hidden_size=64, intermediate_size=64, top_k=1)
        experts.permute_weights(ExpertWeights(w13=ones(1, 128, 64), w2=ones(1, 64, 64)), small)
        weights = ExpertWeights(w13=ones(32, 2048, 1024), w2=ones(32, 1024, 1024))
        before = status("VmRSS")
        permuted = experts.permute_weights(weights, problem)
        print((status("VmHWM") - before) / permuted.num_bytes)
    """
    assert float(printed("-c", textwrap.dedent(script))) < 1.15


def test_the_grouped_matmul_gets_aligned_weights_wherever_the_canonical_ones_begin() -> None:
    """On an H200 it refuses others: "expected data_ptr to be aligned to 16 bytes"."""
    problem = MoEProblem(num_experts=2, hidden_size=8, intermediate_size=8, top_k=1)
    storage = torch.randn(1 + 2 * 16 * 8 + 2 * 8 * 8).bfloat16()
    w13, w2 = storage[1:257].view(2, 16, 8), storage[257:].view(2, 8, 8)
    experts = TorchGroupedExperts(problem, Platform.from_name("cuda:sm90"))
    permuted = experts.permute_weights(ExpertWeights(w13=w13, w2=w2), problem)
    for name, canonical in (("w13", w13), ("w2", w2)):
        assert permuted[name].data_ptr() % 16 == 0
        assert torch.equal(permuted[name], canonical)

"""The torch backend's classes against the fp32 reference, one by one; the dispatcher is not involved."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from moereg.backends.cutlass_moe import TorchGroupedExperts
from moereg.backends.torch_moe import (
    TorchBatchedExperts,
    TorchDenseExperts,
    TorchPackedBatchedExperts,
    TorchPackedExperts,
)
from moereg.experts import ExpertInputs, Experts
from moereg.kernels.plain import device, host
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import ROUNDING_BOUNDS
from moereg.platforms import Platform
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.spec.activations import Activation
from moereg.spec.facts import fact_reasons
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights

STANDARD = (TorchPackedExperts, TorchGroupedExperts, TorchDenseExperts)
BATCHED = (TorchPackedBatchedExperts, TorchBatchedExperts)
TOLERANCE = ROUNDING_BOUNDS
ACTIVATIONS = (
    Activation.from_name("silu"),
    Activation.from_name("gelu"),
    Activation.from_name("gelu_tanh"),
    Activation.from_name("swigluoai"),
    Activation.from_name("relu2"),
    Activation.from_name("silu", limit=0.75),
)


pytestmark = pytest.mark.usefixtures("one_thread")


def make_problem(**changes: object) -> MoEProblem:
    facts = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 96, "top_k": 2, **changes}
    return MoEProblem(**facts)


def make_weights(problem: MoEProblem, bias_dtype: torch.dtype | None = None) -> ExpertWeights:
    """Gate and up of different scale, so that swapping them cannot pass."""
    generator = torch.Generator().manual_seed(3)

    def normal(*size: int, scale: float) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(problem.torch_dtype)

    num_experts, hidden_size = problem.num_local_experts, problem.hidden_size
    intermediate_size = problem.intermediate_size
    parts = [normal(num_experts, intermediate_size, hidden_size, scale=0.2)]
    if problem.activation.gated:
        parts.append(normal(num_experts, intermediate_size, hidden_size, scale=0.05))
    biases: dict[str, torch.Tensor] = {}
    if problem.has_bias:
        rows = len(parts) * intermediate_size
        biases = {
            "w13_bias": normal(num_experts, rows, scale=0.5).to(bias_dtype or problem.torch_dtype),
            "w2_bias": normal(num_experts, hidden_size, scale=0.5).to(bias_dtype or problem.torch_dtype),
        }
    w2 = normal(num_experts, hidden_size, intermediate_size, scale=0.1)
    return ExpertWeights(w13=torch.cat(parts, dim=1), w2=w2, **biases)


def make_inputs(problem: MoEProblem, num_tokens: int, expert_map: torch.Tensor | None = None) -> ExpertInputs:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    logits = torch.randn(num_tokens, problem.num_experts, generator=generator)
    topk_weights, topk_ids = torch.topk(torch.softmax(logits, dim=1), problem.top_k)
    return ExpertInputs(hidden_states, topk_weights, topk_ids.to(torch.int32), expert_map=expert_map)


def run(
    experts_class: type[Experts],
    problem: MoEProblem,
    inputs: ExpertInputs,
    weights: ExpertWeights,
    permuted: PermutedWeights | None = None,
) -> torch.Tensor:
    """Applies a class to NaN-filled output and workspaces, and checks that it claims the call."""
    assert not fact_reasons(experts_class.facts, problem)
    experts = experts_class(problem, Platform("cpu"))
    permuted = permuted or experts.permute_weights(weights, problem)
    assert permuted.layout in experts_class.layouts
    prepared = None
    if problem.activation_format == "batched":
        prepare_finalize = BatchedPrepareFinalize()
        prepared = prepare_finalize.prepare(
            inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, problem, inputs.expert_map
        )
    num_tokens = len(inputs.hidden_states)
    workspaces = [
        torch.full(shape, float("nan"), dtype=problem.torch_dtype)
        for shape in experts.workspace_shapes(problem, num_tokens)
    ]
    out = torch.full_like(inputs.hidden_states, float("nan"))
    if prepared is None:
        experts.apply(out, inputs, permuted, *workspaces)
        return out
    expert_out = torch.full_like(prepared.inputs.hidden_states, float("nan"))
    experts.apply(expert_out, prepared.inputs, permuted, *workspaces)
    prepare_finalize.finalize(out, expert_out, prepared, problem)
    return out


def reference(problem: MoEProblem, inputs: ExpertInputs, weights: ExpertWeights) -> torch.Tensor:
    return reference_experts(
        problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
    )


def check(experts_class: type[Experts], problem: MoEProblem, inputs: ExpertInputs, weights: ExpertWeights) -> None:
    error = relative_error(run(experts_class, problem, inputs, weights), reference(problem, inputs, weights))
    assert error < TOLERANCE[problem.dtype]


def format_of(experts_class: type[Experts]) -> str:
    return next(iter(experts_class.facts.activation_formats))


CLAIMED = [(experts, dtype) for experts in (*STANDARD, *BATCHED) for dtype in sorted(experts.facts.dtypes)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(("experts_class", "dtype"), CLAIMED)
def test_matches_reference(experts_class: type[Experts], dtype: str, activation: Activation, has_bias: bool) -> None:
    problem = make_problem(
        dtype=dtype, activation=activation, has_bias=has_bias, activation_format=format_of(experts_class)
    )
    check(experts_class, problem, make_inputs(problem, 63), make_weights(problem))


@pytest.mark.parametrize("num_tokens", [1, 2, 257])
@pytest.mark.parametrize(("experts_class", "dtype"), CLAIMED)
def test_token_counts(experts_class: type[Experts], dtype: str, num_tokens: int) -> None:
    problem = make_problem(dtype=dtype, activation_format=format_of(experts_class))
    check(experts_class, problem, make_inputs(problem, num_tokens), make_weights(problem))


@pytest.mark.parametrize("experts_class", [TorchPackedExperts, TorchDenseExperts])
@pytest.mark.parametrize("sizes", [(3, 5), (33, 17), (1, 1)], ids=str)
def test_odd_sizes(experts_class: type[Experts], sizes: tuple[int, int]) -> None:
    problem = make_problem(hidden_size=sizes[0], intermediate_size=sizes[1])
    check(experts_class, problem, make_inputs(problem, 17), make_weights(problem))


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_all_tokens_to_one_expert(experts_class: type[Experts]) -> None:
    problem = make_problem(top_k=1, activation_format=format_of(experts_class))
    inputs = make_inputs(problem, 63)
    inputs = dataclasses.replace(inputs, topk_ids=torch.full_like(inputs.topk_ids, 5))
    check(experts_class, problem, inputs, make_weights(problem))


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_unmapped_and_out_of_range_ids_add_nothing(experts_class: type[Experts]) -> None:
    problem = make_problem(
        num_experts=8, num_local_experts=3, placement="map", activation_format=format_of(experts_class)
    )
    expert_map = torch.tensor([-1, 2, -1, 0, -1, -1, 1, -1], dtype=torch.int32)
    inputs = make_inputs(problem, 63, expert_map)
    # Routes that add nothing may carry any weight.
    inputs.topk_ids[3] = torch.tensor([-1, 8], dtype=torch.int32)
    inputs.topk_ids[4] = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    if format_of(experts_class) == "standard":
        inputs.topk_weights[3] = float("inf")
    weights = make_weights(problem)
    out = run(experts_class, problem, inputs, weights)
    assert relative_error(out, reference(problem, inputs, weights)) < TOLERANCE["bfloat16"]
    assert not out[3:5].any()


@pytest.mark.parametrize("experts_class", STANDARD)
def test_no_local_route_gives_zeros(experts_class: type[Experts]) -> None:
    problem = make_problem()
    inputs = make_inputs(problem, 5)
    inputs = dataclasses.replace(inputs, topk_ids=torch.full_like(inputs.topk_ids, -1))
    assert not run(experts_class, problem, inputs, make_weights(problem)).any()


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_router_weight_on_input(experts_class: type[Experts]) -> None:
    problem = make_problem(top_k=1, apply_router_weight_on_input=True, activation_format=format_of(experts_class))
    check(experts_class, problem, make_inputs(problem, 63), make_weights(problem))


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_fp32_biases_of_a_bf16_layer(experts_class: type[Experts]) -> None:
    problem = make_problem(has_bias=True, activation_format=format_of(experts_class))
    check(experts_class, problem, make_inputs(problem, 63), make_weights(problem, bias_dtype=torch.float32))


@pytest.mark.parametrize("experts_class", STANDARD)
def test_routing_weights_keep_32_bits(experts_class: type[Experts]) -> None:
    """A layer would refuse a token that names one expert twice; here both weights must add up."""
    problem = make_problem()
    inputs, weights = make_inputs(problem, 5), make_weights(problem)
    inputs.topk_ids[:] = 3
    inputs.topk_weights[:] = torch.tensor([1 + 2.0**-13, -1.0])
    difference = run(experts_class, problem, inputs, weights)
    inputs.topk_weights[:] = torch.tensor([2.0**-13, 0.0])
    assert torch.equal(difference, run(experts_class, problem, inputs, weights))


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_inputs_unchanged_and_same_bits_each_time(experts_class: type[Experts]) -> None:
    problem = make_problem(activation_format=format_of(experts_class))
    inputs, weights = make_inputs(problem, 63), make_weights(problem)
    tensors = [inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, weights.w13, weights.w2]
    before = [tensor.clone() for tensor in tensors]
    first = run(experts_class, problem, inputs, weights)
    for _ in range(5):
        assert torch.equal(run(experts_class, problem, inputs, weights), first)
    assert all(map(torch.equal, tensors, before))


def test_tokens_do_not_depend_on_each_other() -> None:
    """Buckets of rows take in neighbors; a NaN there must not spread."""
    problem = make_problem(dtype="float32")
    inputs, weights = make_inputs(problem, 63), make_weights(problem)
    clean = run(TorchPackedExperts, problem, inputs, weights)
    inputs.hidden_states[7] = float("nan")
    out = run(TorchPackedExperts, problem, inputs, weights)
    assert out[7].isnan().all()
    others = torch.arange(63) != 7
    torch.testing.assert_close(out[others], clean[others])


@pytest.mark.parametrize("experts_class", [*STANDARD, *BATCHED])
def test_chunk_boundaries(experts_class: type[Experts], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(top_k=3, activation_format=format_of(experts_class))
    inputs, weights = make_inputs(problem, 257), make_weights(problem)
    whole = run(experts_class, problem, inputs, weights)
    monkeypatch.setattr(host, "HOST_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(host, "BLOCK_BYTES", 1)
    monkeypatch.setattr(host, "GATHER_ONCE_BYTES", 1)
    assert host.host_chunk_tokens(257, 3, 64, 2) < 257
    chunked = run(experts_class, problem, inputs, weights)
    assert relative_error(chunked, reference(problem, inputs, weights)) < TOLERANCE["bfloat16"]
    assert relative_error(chunked, whole.float()) < TOLERANCE["bfloat16"]


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
    inputs, weights = make_inputs(problem, 65), make_weights(problem)
    whole = run(experts_class, problem, inputs, weights)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 20_000)
    assert device.device_chunk_tokens(65, 1, 64, 2 * 96) < 65
    with CountConversions(weights) as conversions:
        chunked = run(experts_class, problem, inputs, weights)
    assert conversions.count == 2 * problem.num_experts
    assert relative_error(chunked, whole.float()) < TOLERANCE["float16"]


def test_temporaries_are_bounded() -> None:
    for hidden_size, intermediate_size, top_k in ((2048, 768, 8), (7168, 2048, 8), (6144, 16384, 2)):
        for itemsize in (2, 4):
            rows = host.routed_rows(1 << 20, top_k, hidden_size, itemsize)
            routed_bytes = rows * hidden_size * itemsize
            block = host.row_block(hidden_size, 2 * intermediate_size, itemsize)
            block_bytes = block * 2 * (hidden_size + 2 * intermediate_size) * itemsize
            assert routed_bytes + block_bytes <= 256 << 20
            assert rows == host.routed_rows(1 << 21, top_k, hidden_size, itemsize)


def test_workspaces_are_monotone_in_tokens() -> None:
    problem = make_problem(hidden_size=4096, top_k=8)
    experts = TorchPackedExperts(problem, Platform("cpu"))
    sizes = [experts.workspace_shapes(problem, num_tokens)[1][0] for num_tokens in range(1, 5000, 7)]
    assert sizes == sorted(sizes)


def test_buckets_are_few_and_small() -> None:
    for rows in range(1, host.MAX_BLOCK_ROWS + 1):
        given = host.bucket_rows(rows)
        assert rows <= given <= max(host.MIN_ROWS, rows + rows // 16)
    assert len({host.bucket_rows(rows) for rows in range(1, host.MAX_BLOCK_ROWS + 1)}) <= 112


def test_canonical_layout_is_read_too() -> None:
    """A layer whose weights were not packed, as on CPUs where packing does not pay."""
    problem = make_problem()
    weights, inputs = make_weights(problem), make_inputs(problem, 63)
    permuted = PermutedWeights("canonical", weights.tensors())
    out = run(TorchPackedExperts, problem, inputs, weights, permuted)
    assert relative_error(out, reference(problem, inputs, weights)) < TOLERANCE["bfloat16"]


def test_fp32_stays_canonical_on_intel() -> None:
    problem = make_problem(dtype="float32")
    weights = make_weights(problem)
    permuted = TorchPackedExperts(problem, Platform("cpu", device_name="Intel(R) Xeon(R)")).permute_weights(
        weights, problem
    )
    assert permuted["w13"] is weights.w13
    assert permuted.layout == "canonical"


def test_reload_replaces_packed_weights() -> None:
    problem = make_problem()
    weights, inputs = make_weights(problem), make_inputs(problem, 17)
    experts = TorchPackedExperts(problem, Platform("cpu"))
    permuted = experts.permute_weights(weights, problem)
    doubled = ExpertWeights(w13=weights.w13, w2=weights.w2 * 2)
    permuted.copy_from(experts.permute_weights(doubled, problem))
    out = run(TorchPackedExperts, problem, inputs, weights, permuted)
    # Weights may be packed or not, as this CPU likes; reload has to work for both.
    assert relative_error(out, reference(problem, inputs, doubled)) < TOLERANCE["bfloat16"]


def test_fake_tensors_notice_host_reads() -> None:
    """Negative control of the next test."""
    with FakeTensorMode():
        ids = torch.zeros(16, 2, dtype=torch.int32)
        with pytest.raises(DataDependentOutputException):
            ids.max().item()
        with pytest.raises(DynamicOutputShapeException):
            ids.nonzero()


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
    weights = make_weights(problem)
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
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.15


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

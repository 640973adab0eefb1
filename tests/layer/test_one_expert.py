"""One expert is read back and replaced, and nobody else's memory is written into."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereg import backend_calls, layer
from moereg.dispatch import explain_backends
from moereg.errors import ArgumentError, BackendError, LayoutNotInvertibleError
from moereg.inversion import same_bits
from moereg.layer import MoEKernel, make_kernel
from moereg.one_expert import OneExpert
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES
from moereg.testing.inputs import make_weights
from moereg.weights import ExpertWeights, PermutedWeights
from tests.layer.small_layers import CPU, INPUTS, call, copied, kernel_of, problem_of
from tests.support.fakes import FakeExperts

PLATFORMS = ("cpu", "cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "rocm:gfx950")

# Layouts that compute with what they are given: scales are folded into powers of their row's largest, and static
# activation scales are multiplied into others.
_FOLDED = "packed64_gate_up_interleaved"
NOT_INVERTIBLE = {
    *((_FOLDED, scheme) for scheme in ("mxfp4_w4a16", "mxfp4_mxfp8", "nvfp4", "nvfp4_w4a16")),
    ("flashinfer_cutedsl_interleaved", "nvfp4"),
    ("flashinfer_cutile_float4", "nvfp4"),
    ("flashinfer_cutile_float8", "fp8_tensor_static"),
    ("flashinfer_up_gate_pad16_scaled", "fp8_tensor_static"),
    ("flashinfer_trtllm_fp8_tensor", "fp8_tensor_static"),
}
# Its scales are those of all experts together.
NOT_APART = {"flashinfer_trtllm_fp8_tensor"}


@dataclasses.dataclass
class Permuted:
    """One problem's weights in one backend's layout."""

    one: OneExpert
    permuted: PermutedWeights
    again: Any


def permuted_everywhere(problem: MoEProblem, weights: ExpertWeights, platform: str) -> Iterator[Permuted]:
    """By every backend that fits and whose library is here; permuting needs no device of the platform."""
    selection = explain_backends(problem, platform)
    layouts: set[str] = set()
    for decision in selection.decisions:
        if not decision.accepted:
            continue
        chosen = dataclasses.replace(selection, decisions=(decision,))
        if decision.backend == "cutlass" and importlib.util.find_spec("quack") is None:
            continue
        experts = backend_calls.make_experts(chosen, decision)

        def again(weights: ExpertWeights, chosen: Any = chosen, experts: Any = experts) -> PermutedWeights:
            return backend_calls.permute(chosen, experts, weights)

        permuted = again(weights)
        if permuted.layout not in layouts:
            layouts.add(permuted.layout)
            one = OneExpert(chosen, decision, weights)
            yield Permuted(one, permuted.with_reader(one), again)


def replaced(weights: ExpertWeights, expert: int, others: ExpertWeights) -> ExpertWeights:
    """Weights with one expert of others; numbers that serve all experts stay."""
    tensors = {name: tensor.clone() for name, tensor in weights.tensors().items()}
    for name, tensor in tensors.items():
        if tensor.dim():
            tensor[expert] = others.tensors()[name][expert]
    return ExpertWeights.unchecked(tensors, weights.scheme)


def all_same(one: PermutedWeights, other: PermutedWeights) -> bool:
    mine, theirs = ({**each.per_expert, **each.shared} for each in (one, other))
    return mine.keys() == theirs.keys() and all(
        same_bits(left, right)
        for name in mine
        for left, right in zip(dense(mine[name]), dense(theirs[name]), strict=True)
    )


def dense(value: Any) -> list[torch.Tensor]:
    tensors = value if isinstance(value, list) else [value]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in tensors]


def check_problem(problem: MoEProblem, platform: str) -> None:
    weights, others = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    expert = problem.num_local_experts - 1
    for each in permuted_everywhere(problem, weights, platform):
        layout = each.permuted.layout
        if (layout, problem.quant.name) in NOT_INVERTIBLE:
            with pytest.raises(LayoutNotInvertibleError, match=r"keep the canonical weights$"):
                each.permuted.to_canonical(expert)
        else:
            found, wanted = each.permuted.to_canonical(expert).tensors(), weights.expert(expert).tensors()
            assert found.keys() == wanted.keys()
            assert all(same_bits(found[name], wanted[name]) for name in wanted), layout
        twin = copy.deepcopy(each.permuted)
        assert all_same(twin, each.permuted), layout
        if layout in NOT_APART and expert:
            with pytest.raises(BackendError, match="permutes an expert in another way beside others than alone"):
                each.one.rows_for(each.permuted, others.expert(expert))
            continue
        twin.write_expert(expert, each.one.rows_for(each.permuted, others.expert(expert)))
        assert all_same(twin, each.again(replaced(weights, expert, others))), layout
        assert all_same(each.permuted, each.again(weights)), "a copy shares memory"


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_calls, "_check_device", lambda *arguments: None)
    monkeypatch.setattr(backend_calls, "device_types", lambda *arguments: ("cpu",))


PROBLEMS = st.builds(
    MoEProblem,
    num_experts=st.integers(2, 4),
    num_local_experts=st.integers(1, 2),
    hidden_size=st.sampled_from([32, 96, 128, 160, 256]),
    intermediate_size=st.sampled_from([32, 64, 128, 192]),
    top_k=st.just(1),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    activation=st.sampled_from(["silu", "swigluoai", "relu2"]),
    has_bias=st.booleans(),
    activation_format=st.sampled_from(["standard", "batched"]),
)


@pytest.mark.parametrize(("scheme", "platform"), [("unquantized", "cpu"), ("int4_w4a16_g32_zp", "cuda:sm90")])
def test_experts_of_each_layout(scheme: str, platform: str, on_any_device: None) -> None:
    check_problem(
        problem_of(num_experts=2, hidden_size=64, intermediate_size=64, quant=scheme, dtype="bfloat16"), platform
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("scheme", sorted(QUANT_SCHEMES))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=PROBLEMS, platform=st.sampled_from(PLATFORMS))
def test_experts_of_every_layout_and_size(scheme: str, problem: MoEProblem, platform: str, on_any_device: None) -> None:
    check_problem(dataclasses.replace(problem, quant=QUANT_SCHEMES[scheme]), platform)


def of_default(problem: MoEProblem, weights: ExpertWeights, **keywords: Any) -> MoEKernel:
    return make_kernel(problem, weights, explain_backends(problem, "cpu", require="torch"), **keywords)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_expert_is_replaced_in_place(dtype: str) -> None:
    problem = problem_of(hidden_size=64, intermediate_size=32, dtype=dtype)
    inputs = dataclasses.replace(INPUTS, hidden_states=torch.randn(4, 64).to(problem.torch_dtype))
    weights, others = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    kernel = of_default(problem, weights, own_weights=True)
    storage = {name: value for name, value in kernel.weights.per_expert.items()}
    kernel.update_expert(3, others.expert(3))
    wanted = replaced(weights, 3, others)
    assert torch.equal(call(kernel, inputs), call(of_default(problem, wanted), inputs))
    assert all(kernel.weights.per_expert[name] is value for name, value in storage.items())
    for expert in range(8):
        found = kernel.weights.to_canonical(expert)
        assert all(same_bits(value, wanted.expert(expert).tensors()[name]) for name, value in found.tensors().items())


def test_nothing_is_written_where_others_read() -> None:
    """A reload of one of two kernels changed the other one, and the caller's tensors."""
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    before = copied(weights)
    for change in (lambda kernel: kernel.reload(other), lambda kernel: kernel.update_expert(0, other.expert(0))):
        one, two = kernel_of(problem, weights=weights), kernel_of(problem, weights=weights)
        assert one.weights["w13"].data_ptr() == weights.w13.data_ptr()
        wanted = call(two, INPUTS)
        change(one)
        assert not torch.equal(one.weights["w13"], before.w13)
        assert torch.equal(call(two, INPUTS), wanted)
        assert all(torch.equal(value, before.tensors()[name]) for name, value in weights.tensors().items())
        # The memory is the kernel's own from now on, and stays.
        pointer = one.weights["w13"].data_ptr()
        change(one)
        assert one.weights["w13"].data_ptr() == pointer
    # Weights that were written in place are there already.
    kernel = kernel_of(problem, weights=weights)
    kernel.reload(weights)
    assert kernel.weights["w13"].data_ptr() == weights.w13.data_ptr()
    kernel.reload(other, write_shared=True)
    assert torch.equal(weights.w13, other.w13)


def test_own_weights_are_copies_from_the_start() -> None:
    problem = problem_of()
    weights = make_weights(problem, CPU)
    kernel = kernel_of(problem, weights=weights, own_weights=True)
    before = call(kernel, INPUTS)
    weights.w13.zero_()
    assert torch.equal(call(kernel, INPUTS), before)


def test_what_a_graph_reads_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    monkeypatch.setattr(layer, "_may_be_captured", lambda device: True)
    kernel, own = kernel_of(problem, weights=weights), kernel_of(problem, weights=weights, own_weights=True)
    for each in (kernel, own):
        call(each, INPUTS)
    text = "this kernel reads w13, w2 where make_kernel was given them, and so does a captured graph; make the kernel"
    for change in (lambda: kernel.reload(other), lambda: kernel.update_expert(1, other.expert(1))):
        with pytest.raises(ArgumentError, match=f"^{re.escape(text)}"):
            change()
    own.reload(other)
    kernel.reload(other, write_shared=True)
    assert torch.equal(call(own, INPUTS), call(kernel, INPUTS))


class Together(FakeExperts):
    """Scales every expert by the largest number of all."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        tensors = weights.tensors()
        return PermutedWeights("canonical", {**tensors, "w13": weights.w13 / weights.w13.abs().amax()})


def test_experts_that_are_permuted_together_stay_together() -> None:
    kernel = kernel_of(problem_of(), Together)
    text = "backend 'fake' permutes an expert in another way beside others than alone, so one expert cannot be replaced"
    with pytest.raises(BackendError, match=f"^{re.escape(text)}"):
        kernel.update_expert(0, make_weights(problem_of(), CPU, seed=1).expert(0))


def test_an_expert_of_zeros_does_not_hide_that_experts_are_permuted_together() -> None:
    """The layout was tried with the first caller's numbers, and zeros, as of a pruned expert, show nothing."""

    class Clamped(FakeExperts):
        def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
            largest = weights.w13.abs().amax().clamp(min=1e-6)
            return PermutedWeights("canonical", {**weights.tensors(), "w13": weights.w13 / largest})

    kernel = kernel_of(problem_of(), Clamped)
    zeros = {
        name: torch.zeros_like(value) for name, value in make_weights(problem_of(), CPU).expert(0).tensors().items()
    }
    with pytest.raises(BackendError, match="permutes an expert in another way beside others than alone"):
        kernel.update_expert(0, ExpertWeights(**zeros))


def test_copies_know_what_they_share_among_each_other() -> None:
    """A reload of one copy changed the other, or the copied weights."""
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    one, two = copy.deepcopy([kernel_of(problem, weights=weights), kernel_of(problem, weights=weights)])
    held, three = copy.deepcopy((weights, kernel_of(problem, weights=weights)))
    assert one.weights["w13"].data_ptr() == two.weights["w13"].data_ptr()
    wanted = call(two, INPUTS)
    for each in (one, three):
        each.reload(other)
        assert not torch.equal(call(each, INPUTS), wanted)
    assert torch.equal(call(two, INPUTS), wanted)
    assert torch.equal(held.w13, weights.w13)


def test_own_copies_can_be_written_into() -> None:
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    for change in (lambda kernel: kernel.reload(other), lambda kernel: kernel.update_expert(0, other.expert(0))):
        kernel = kernel_of(problem, weights=weights)
        change(kernel)
        kernel.weights["w13"].mul_(1)


def test_a_reload_says_which_tensor_is_another() -> None:
    problem = problem_of(dtype="bfloat16", has_bias=True)
    weights = make_weights(problem, CPU)
    wide = {name: value.float() for name, value in weights.tensors("bias").items()}
    kernel = kernel_of(problem, weights=weights)
    text = (
        "reload needs weights of the same layout and shapes, got w13_bias (8, 24) torch.float32 for (8, 24) "
        "torch.bfloat16; convert the weights"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        kernel.reload(dataclasses.replace(weights, **wide))


class Rounded(FakeExperts):
    """Moves numbers, but loses the sign of some: nothing that carries positions, all positive, shows it."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("canonical", {**weights.tensors(), "w13": weights.w13.flip(1).clamp(min=-0.001)})


def test_numbers_that_no_move_makes_are_not_read_back() -> None:
    """Clamped numbers permute to themselves; a layout that halves them does not."""

    class Summed(FakeExperts):
        def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
            w13 = torch.where(weights.w13 < 0, weights.w13 / 2, weights.w13)
            return PermutedWeights("canonical", {**weights.tensors(), "w13": w13})

    kernel = kernel_of(problem_of(), Summed)
    text = "layout 'canonical' computes 'w13' from several numbers instead of moving them, so an expert cannot be read"
    with pytest.raises(LayoutNotInvertibleError, match=f"^{re.escape(text)}"):
        kernel.weights.to_canonical(0)
    # What the layout drops of a number cannot be known. What comes back permutes to the same bits.
    clamped = kernel_of(problem_of(), Rounded)
    found = clamped.weights.to_canonical(2)
    assert torch.equal(found.w13.flip(1)[0], clamped.weights["w13"][2])


def test_bad_experts_are_refused() -> None:
    problem = problem_of()
    kernel, weights = kernel_of(problem), make_weights(problem, CPU)
    plain = PermutedWeights("canonical", weights.tensors())
    biased = dataclasses.replace(problem, has_bias=True)
    for run, text in (
        (
            lambda: kernel.update_expert(8, weights.expert(0)),
            "expert must be a local expert in [0, 8), got 8; count this",
        ),
        (lambda: kernel.update_expert(-1, weights.expert(0)), "expert must be a local expert in [0, 8), got -1; count"),
        (lambda: kernel.update_expert(True, weights.expert(0)), "expert must be an integer, got True"),
        (lambda: kernel.update_expert(0, weights), "w13 must be [1, 24, 16] for "),
        (lambda: kernel.update_expert(0, None), "weights must be an ExpertWeights"),
        (lambda: kernel.update_expert(0, make_weights(biased, CPU).expert(0)), "the problem says has_bias=False"),
        (lambda: kernel.weights.to_canonical(8), "expert must be a local expert in [0, 8), got 8"),
        (lambda: weights.expert(9), "expert must be a local expert in [0, 8), got 9"),
        (
            lambda: plain.to_canonical(0),
            "how these 'canonical' weights were permuted is not known; read those of a kernel",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            run()


def test_weights_are_shown_on_one_line() -> None:
    """They were printed number by number."""
    kernel = kernel_of(problem_of())
    weights = make_weights(problem_of(has_bias=True), CPU)
    assert repr(weights) == (
        "ExpertWeights(8 experts, w13 [8, 24, 16], w2 [8, 16, 12], float32 unquantized, biases, 19.7 kB on cpu)"
    )
    assert repr(kernel.weights) == "PermutedWeights('canonical', 8 experts, w13, w2, 18.4 kB on cpu)"

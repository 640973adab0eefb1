"""One expert is read back and replaced, and nobody else's memory is written into."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.dispatch import explain_backends
from moereg.errors import ArgumentError, BackendError, LayoutNotInvertibleError
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.unpermute import same_bits
from tests.layer.small_layers import CPU, INPUTS, call, copied, kernel_of, problem_of, replaced
from tests.layer.small_plans import turning
from tests.support.fakes import FakeExperts


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


REFUSAL = "this kernel reads w13, w2 where its owner keeps them, got other numbers; write them into those tensors, say"


def test_nothing_is_written_where_others_read() -> None:
    """A reload of one of two kernels changed the other one, and the caller's tensors; then it took twice the memory."""
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    before = copied(weights)
    one, two = kernel_of(problem, weights=weights), kernel_of(problem, weights=weights)
    wanted = call(two, INPUTS)
    for change in (lambda: one.reload(other), lambda: one.update_expert(0, other.expert(0))):
        with pytest.raises(ArgumentError, match=f"^{re.escape(REFUSAL)}"):
            change()
        assert one.weights["w13"].data_ptr() == weights.w13.data_ptr()
        assert torch.equal(call(two, INPUTS), wanted)
        assert all(torch.equal(value, before.tensors()[name]) for name, value in weights.tensors().items())
    one.reload(weights)  # Written in place, it is there already.
    one.reload(other, write_shared=True)
    assert torch.equal(weights.w13, other.w13)
    one.update_expert(0, before.expert(0), write_shared=True)
    assert torch.equal(weights.w13[0], before.w13[0])
    assert torch.equal(call(one, INPUTS), call(two, INPUTS))


@pytest.mark.parametrize("own_weights", [False, True])
@pytest.mark.parametrize("experts", [FakeExperts, turning(1.0)], ids=["canonical", "turned"])
def test_what_is_made_in_inference_mode_can_be_written_and_differentiated_outside(
    experts: type[FakeExperts], own_weights: bool
) -> None:
    problem = problem_of()
    weights = make_weights(problem, CPU)
    with torch.inference_mode():
        kernel = kernel_of(problem, experts, weights=weights, own_weights=own_weights)
    for tensor in kernel.weights.flat():
        assert not tensor.is_inference()
        x = torch.ones(tensor.shape, requires_grad=True)
        (x * tensor).sum().backward()
        tensor.zero_()
    assert not call(kernel, INPUTS).any()


class Together(FakeExperts):
    """Scales every expert by the largest number of all."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        largest = weights.w13.abs().amax().clamp(min=1e-6)
        return PermutedWeights("canonical", {**weights.tensors(), "w13": weights.w13 / largest})


@pytest.mark.parametrize("factor", [1, 0], ids=["drawn", "zeros"])
def test_experts_that_are_permuted_together_stay_together(factor: int) -> None:
    """Zeros, as of a pruned expert, show nothing, so the layout is tried with other numbers than the caller's."""
    kernel, one = kernel_of(problem_of(), Together, own_weights=True), make_weights(problem_of(), CPU, seed=1).expert(0)
    text = "backend 'fake' permutes an expert in another way beside others than alone, so one expert cannot be replaced"
    with pytest.raises(BackendError, match=f"^{re.escape(text)}"):
        kernel.update_expert(0, ExpertWeights(w13=one.w13 * factor, w2=one.w2 * factor))


def test_copies_know_what_they_share_among_each_other() -> None:
    problem = problem_of()
    weights, other = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    one, two = copy.deepcopy([kernel_of(problem, weights=weights), kernel_of(problem, weights=weights)])
    held, three = copy.deepcopy((weights, kernel_of(problem, weights=weights)))
    assert one.weights["w13"].data_ptr() == two.weights["w13"].data_ptr() != weights.w13.data_ptr()
    with pytest.raises(ArgumentError, match=f"^{re.escape(REFUSAL)}"):
        three.reload(other)
    three.reload(other, write_shared=True)
    assert torch.equal(held.w13, other.w13)
    assert not torch.equal(weights.w13, other.w13)


def test_a_reload_says_which_tensor_is_another() -> None:
    problem = problem_of(dtype="bfloat16", has_bias=True)
    weights = make_weights(problem, CPU)
    wide = {name: value.float() for name, value in weights.tensors("bias").items()}
    kernel = kernel_of(problem, weights=weights, own_weights=True)
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


def permuting(change: Callable[[torch.Tensor], torch.Tensor], layout: str = "canonical") -> MoEKernel:
    """A kernel whose layout changes w13; with one expert it has the given name."""

    class Changed(FakeExperts):
        layouts = ("canonical", layout)

        def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
            name = layout if weights.num_experts == 1 else "canonical"
            return PermutedWeights(name, {**weights.tensors(), "w13": change(weights.w13)})

    return kernel_of(problem_of(), Changed, own_weights=True)


@pytest.mark.parametrize("change", [lambda w13: w13.flip(2), torch.neg], ids=["within 16 bytes", "negated"])
def test_numbers_are_read_back_wherever_they_are(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = permuting(change).weights.to_canonical(2)
    assert same_bits(found.w13, make_weights(problem_of(), CPU).expert(2).w13)


def test_numbers_that_a_layout_drops_are_not_made_up() -> None:
    with pytest.raises(LayoutNotInvertibleError, match="does not keep the numbers of w13 as they are"):
        permuting(lambda w13: w13[..., :-4]).weights.to_canonical(2)


def test_one_expert_has_the_layout_of_all() -> None:
    weights = make_weights(problem_of(), CPU).expert(0)
    with pytest.raises(BackendError, match="gives one expert the layout 'single', and the layer has 'canonical'"):
        permuting(torch.clone, "single").update_expert(1, weights)


def test_layers_of_one_problem_differ_in_the_dtypes_of_their_biases() -> None:
    problem = problem_of(dtype="bfloat16", has_bias=True)
    for dtype in (torch.bfloat16, torch.float32):
        made = make_weights(problem, CPU)
        assert made.w13_bias is not None
        assert made.w2_bias is not None
        weights = dataclasses.replace(made, w13_bias=made.w13_bias.to(dtype), w2_bias=made.w2_bias.to(dtype))
        found = kernel_of(problem, weights=weights).weights.to_canonical(3).tensors()
        own = weights.expert(3).tensors()
        assert all(same_bits(found[name], value) for name, value in own.items())


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
        (lambda: plain.to_canonical(0), "how these 'canonical' weights were permuted is not known; read those of a ke"),
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

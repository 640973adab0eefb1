"""Gradients in the kit: the reference and its bounds, planted faults, and classes that break one promise each."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import pytest
import torch

from moereg.author import ExpertAdapters, ExpertInputs, ExpertWeights, Gradients, MoEProblem, PermutedWeights
from moereg.backends._torch.training import activation_gradient
from moereg.kernels.plain.device import local_expert_ids
from moereg.numerics import gradients as bounds
from moereg.numerics.gradients import reference_gradients
from moereg.numerics.reference import reference_experts
from moereg.platforms import Platform
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.problem import GRADIENTS
from moereg.testing import gradients, suite
from moereg.testing.cases import Case, running_as
from moereg.testing.check import CHECK_KINDS, check_layer, chosen_machine
from moereg.testing.drawing import NATIVE, DrawnLayer, claimed_activations, draw_layer
from moereg.testing.faults import BackwardPass, plant_gradient_faults
from moereg.testing.gradients import GuardedTraining, check_gradients, gradient_cases
from moereg.testing.inputs import make_adapters, make_grad_out, make_inputs, make_weights
from moereg.weights.adapters import ADAPTER_TENSORS
from tests.support.fakes import EVERYTHING, LITTLE, FakeExperts, cell_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
CLAMPED: Final = [dataclasses.replace(ACTIVATIONS[name], limit=1.5) for name in ("silu", "gelu")]
SMALL: Final[dict[str, Any]] = {"num_experts": 4, "hidden_size": 40, "intermediate_size": 24, "top_k": 2}


ADAPTED: Final[dict[str, Any]] = {"gradients": GRADIENTS, "adapter_rank": 16}

Rows = tuple[torch.Tensor, torch.Tensor]
"""Tokens and slots of an expert's rows."""
Operands = dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]]
"""Left and right rows of each product by expert and tensor."""


class Adapter(NamedTuple):
    """One expert's adapter of one matrix in fp32; 0 where there is none."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class TrainingExperts(FakeExperts):
    """Rounds to the problem's dtype wherever a kernel of several launches may, and sums in fp32."""

    facts = dataclasses.replace(EVERYTHING, router_weight_on_input=False, gradients=frozenset(GRADIENTS))

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> Any:
        columns = problem.activation.num_halves * problem.intermediate_size
        return {"pre": ((num_tokens, problem.top_k, columns), problem.torch_dtype)}

    def apply_saving(
        self,
        out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        given = {"inputs": inputs, "weights": weights, "workspace13": workspace13, "workspace2": workspace2}
        self.forward(out=out, saved=saved, **given)

    def apply_backward(
        self,
        grads: Gradients,
        grad_out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        given = {"inputs": inputs, "weights": weights, "workspace13": workspace13, "workspace2": workspace2}
        self.backward(grads=grads, grad_out=grad_out, saved=saved, **given)

    def forward(self, *, out: torch.Tensor, saved: Any, inputs: ExpertInputs, weights: Any, **scratch: Any) -> None:
        """`apply_saving`."""
        if inputs.adapters is None:
            self.apply(out, inputs, weights, **scratch)
        else:
            in_fp32 = {name: tensor.float() for name, tensor in weights.per_expert.items()}
            merged = inputs.adapters.merged(ExpertWeights.unchecked(in_fp32, self.problem.quant))
            call = inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
            out.copy_(reference_experts(self.problem, merged, *call))
        for expert, rows in self.experts_with_rows(inputs):
            x, adapter = inputs.hidden_states[rows[0]].float(), self.adapter(inputs, "w13", expert)
            pre = x @ self.matrix(weights, "w13", expert).T + self.down(adapter, x) @ adapter.b.T
            if self.problem.has_bias:
                pre += weights["w13_bias"][expert].float()
            saved["pre"][rows] = pre.to(saved["pre"].dtype)

    def backward(
        self, *, grads: Gradients, grad_out: torch.Tensor, saved: Any, inputs: ExpertInputs, weights: Any, **_: Any
    ) -> None:
        """`apply_backward`."""
        by_route = torch.zeros(*inputs.topk_ids.shape, grad_out.shape[1])
        routing = torch.zeros_like(inputs.topk_weights)
        operands: Operands = {}
        for expert, rows in self.experts_with_rows(inputs):
            x, grad = inputs.hidden_states[rows[0]].float(), grad_out[rows[0]].float()
            scale = self.routing_weights(inputs, rows)
            of_w13, of_w2 = (self.adapter(inputs, name, expert) for name in ("w13", "w2"))
            grad_low = self.rounded(grad @ of_w2.b * of_w2.scaling)
            grad_act = self.rounded(grad @ self.matrix(weights, "w2", expert) + grad_low @ of_w2.a)
            act, grad_pre = self.act(saved["pre"][rows].float(), self.rounded(scale * grad_act))
            routing[rows] = self.routing_gradient(grad_act, act)
            grad_low13 = self.rounded(grad_pre @ of_w13.b * of_w13.scaling)
            by_route[rows] = self.rounded(grad_pre @ self.matrix(weights, "w13", expert) + grad_low13 @ of_w13.a)
            act = self.rounded(scale * act)
            operands[expert] = {"w13": (grad_pre, x), "w2": (grad, act)}
            operands[expert] |= {"w13_a": (grad_low13, x), "w13_b": (grad_pre, self.down(of_w13, x))}
            operands[expert] |= {"w2_a": (grad_low, act), "w2_b": (grad, self.down(of_w2, act))}
            if self.problem.has_bias:
                routing[rows] += (grad * weights["w2_bias"][expert].float()).sum(1)
                one = torch.ones(len(x), 1)
                operands[expert] |= {"w13_bias": (grad_pre, one), "w2_bias": (self.rounded(scale * grad), one)}
        parameters = {**weights.per_expert, **(inputs.adapters.tensors() if inputs.adapters else {})}
        of_experts = {name: torch.zeros(tensor.shape) for name, tensor in parameters.items()}
        for expert, pairs in self.deep(operands).items():
            for name in of_experts:
                left, right = pairs[name]
                of_experts[name][expert] = (left.T @ right).view(of_experts[name][expert].shape)
        found = {"hidden_states": by_route.sum(1), "topk_weights": routing, **of_experts}
        for name, tensor in found.items():
            self.write(name, getattr(grads, name), tensor, grads.accumulate and name in of_experts, inputs)

    def deep(self, operands: Operands) -> Operands:
        """The operands of the products that sum over an expert's rows."""
        return operands

    def write(
        self, name: str, out: torch.Tensor | None, found: torch.Tensor, accumulates: bool, inputs: ExpertInputs
    ) -> None:
        """Writes a gradient that is asked for."""
        if out is not None:
            out.copy_(out + found if accumulates else found)

    def experts_with_rows(self, inputs: ExpertInputs) -> Iterator[tuple[int, Rows]]:
        """Experts in order, each with its rows."""
        local = local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map)
        for expert in range(self.problem.num_local_experts):
            token, slot = torch.nonzero(local == expert, as_tuple=True)
            if len(token):
                yield expert, (token, slot)

    def matrix(self, weights: PermutedWeights, name: str, expert: int) -> torch.Tensor:
        """One expert's w13 or w2 in fp32."""
        return weights[name][expert].float()

    def adapters(self, inputs: ExpertInputs) -> ExpertAdapters | None:
        """Those that saved rows and gradients are computed with; the output is always right."""
        return inputs.adapters

    def adapter(self, inputs: ExpertInputs, name: str, expert: int) -> Adapter:
        """One expert's of w13 or w2."""
        problem, held = self.problem, self.adapters(inputs)
        if held is None or getattr(held, f"{name}_a") is None:
            hidden, width = problem.hidden_size, problem.intermediate_size
            rows, columns = (problem.activation.num_halves * width, hidden) if name == "w13" else (hidden, width)
            return Adapter(torch.zeros(1, columns), torch.zeros(rows, 1), 0.0)
        a, b = (getattr(held, f"{name}_{side}")[expert].float() for side in "ab")
        return Adapter(a, b, getattr(held, f"{name}_scaling"))

    def down(self, adapter: Adapter, rows: torch.Tensor) -> torch.Tensor:
        """Rows of low rank."""
        return self.rounded(rows @ adapter.a.T * adapter.scaling)

    def routing_weights(self, inputs: ExpertInputs, rows: Rows) -> torch.Tensor:
        """[rows, 1], which scale the gradients."""
        return inputs.topk_weights[rows].unsqueeze(1)

    def act(self, pre: torch.Tensor, grad: torch.Tensor) -> Rows:
        """The intermediate, and the gradient of what it is computed from."""
        activation = self.problem.activation
        return activation(pre), self.rounded(activation_gradient(activation, pre, grad))

    def routing_gradient(self, grad_act: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """[rows]."""
        return (grad_act * act).sum(1)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rounds to the problem's dtype."""
        return tensor.to(self.problem.torch_dtype).float()


def reference_of(problem: MoEProblem, num_tokens: int, routing: str, seed: int = 0) -> tuple[Any, ...]:
    """Weights, inputs, the output's gradient and the reference, with adapters if the problem has some."""
    weights, inputs = make_weights(problem, CPU, seed), make_inputs(problem, num_tokens, routing, CPU, seed)
    grad_out, adapters = make_grad_out(inputs, seed), make_adapters(problem, CPU, seed)
    return weights, inputs, grad_out, reference_gradients(problem, weights, *inputs.call, grad_out, adapters=adapters)


@pytest.mark.parametrize("activation", [*ACTIVATIONS.values(), *CLAMPED], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_reference_gradients_are_the_slopes_of_the_reference(activation: Activation, has_bias: bool) -> None:
    problem = MoEProblem(**SMALL, dtype="float32", activation=activation, has_bias=has_bias, **ADAPTED)
    weights, inputs, grad_out, found = reference_of(problem, 7, "unmapped")
    adapters = make_adapters(problem, CPU)
    assert adapters is not None
    generator = torch.Generator().manual_seed(1)
    tensors = {**vars(inputs), **weights.tensors(), **adapters.tensors()}
    del tensors["topk_ids"]
    assert set(found.tensors) == set(tensors)
    for name, gradient in found.tensors.items():
        step = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)

        def value(size: float, name: str = name, step: torch.Tensor = step) -> torch.Tensor:
            moved = {key: tensor.double() for key, tensor in tensors.items()}
            moved[name] += size * step
            call = moved.pop("hidden_states"), moved.pop("topk_weights"), inputs.topk_ids
            # By hand: ExpertAdapters.merged sums in fp32.
            factors = {key: moved.pop(key) for key in ADAPTER_TENSORS}
            moved["w13"] += 0.75 * factors["w13_b"] @ factors["w13_a"]
            moved["w2"] += 1.25 * factors["w2_b"] @ factors["w2_a"]
            held = ExpertWeights.unchecked(moved, problem.quant)
            return (reference_experts(problem, held, *call, dtype=torch.float64) * grad_out).sum()

        slope = (value(1e-6) - value(-1e-6)) / 2e-6
        assert torch.isclose(slope, (gradient * step).sum(), rtol=1e-5), name


def test_nothing_depends_on_experts_without_rows_and_routes_that_go_nowhere() -> None:
    problem = MoEProblem(**SMALL, has_bias=True)
    *_, found = reference_of(problem, 5, "one_expert")
    assert [bool(found.tensors["w13"][expert].any()) for expert in range(4)] == [False, False, True, True]
    for num_tokens, routing in ((5, "nowhere"), (0, "uniform")):
        *_, found = reference_of(problem, num_tokens, routing)
        assert not any(tensor.any() for tensor in found.tensors.values())
        assert all(each.error == each.bound == 0 for each in found.compare(found.tensors))
        wrong = {"w2": torch.full_like(found.tensors["w2"], 1e-9)}
        assert not any(each.error <= each.bound for each in found.compare(wrong))


def found_by(
    experts: type[TrainingExperts], problem: MoEProblem, weights: Any, inputs: Any, grad_out: Any, seed: int
) -> Any:
    case = Case(cell_of(experts), Platform.from_name("cpu"), problem)
    return GuardedTraining(case, weights, make_adapters(problem, CPU, seed)).run(inputs, grad_out)[1]


def drawn_layers(number: int) -> Iterator[DrawnLayer]:
    choose = random.Random(5).choice
    limits = dataclasses.replace(NATIVE, size=136, num_tokens=66, num_routes=200, num_experts=9)
    while number:
        layer = draw_layer(cell_of(TrainingExperts), choose, limits)
        if layer.num_tokens and layer.problem.placement == "contiguous" and not layer.problem.is_expert_parallel:
            number -= 1
            yield layer


def test_an_honest_kernel_is_within_its_bounds_and_these_are_tight() -> None:
    largest: dict[str, float] = {}
    for number, layer in enumerate(drawn_layers(60)):
        rank = (0, 4, 16, 40)[number % 4]
        gradients = set(GRADIENTS) - (set() if rank else {"adapters"})
        problem = dataclasses.replace(layer.problem, gradients=gradients, adapter_rank=rank)
        weights, inputs, grad_out, truth = reference_of(problem, layer.num_tokens, layer.routing, layer.seed)
        for each in truth.compare(found_by(TrainingExperts, problem, weights, inputs, grad_out, layer.seed)):
            assert each.error <= each.bound, (each, str(layer))
            if layer.problem.activation.limit is None and each.bound:
                kind = f"{layer.problem.dtype}, {each.name.partition(' ')[0]}"
                largest[kind] = max(largest.get(kind, 0.0), each.error / each.bound)
    of_16_bits = {kind: ratio for kind, ratio in largest.items() if "float32" not in kind}
    assert len(of_16_bits) == 20
    # Without any rounding it would be 0; biases of w2 have two roundings only.
    assert min(of_16_bits.values()) > 0.15, of_16_bits
    assert max(of_16_bits.values()) < 0.85, of_16_bits


def test_an_error_in_an_expert_with_one_row_is_seen_beside_experts_with_many() -> None:
    problem = MoEProblem(num_experts=2, hidden_size=40, intermediate_size=24, top_k=1)
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 99, "uniform", CPU)
    inputs.topk_ids[:] = torch.arange(99).view(-1, 1).clamp(max=1)
    truth = reference_gradients(problem, weights, *inputs.call, make_grad_out(inputs))
    for name in ("w13", "w2"):
        wrong = truth.tensors[name].clone()
        wrong[0] *= 1.03
        assert [each.name for each in truth.compare({name: wrong}) if each.error > each.bound] == [
            f"{name} of expert 0"
        ]


def test_equal_experts_have_equal_bounds() -> None:
    problem = MoEProblem(num_experts=2, hidden_size=40, intermediate_size=24, top_k=1)
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 9, "uniform", CPU)
    weights.w13[1], weights.w2[1] = weights.w13[0], weights.w2[0]
    bounds = []
    for expert in (0, 1):
        inputs.topk_ids[:] = expert
        truth = reference_gradients(problem, weights, *inputs.call, make_grad_out(inputs))
        bounds += [each.bound for each in truth.compare({"hidden_states": truth.tensors["hidden_states"]})]
    assert bounds[0] == bounds[1] > 0


def test_an_adapter_of_few_rows_and_ranks_is_judged_by_as_many_elements() -> None:
    problem = MoEProblem(
        num_experts=2, hidden_size=130, intermediate_size=128, top_k=1, **{**ADAPTED, "adapter_rank": 4}
    )
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 99, "uniform", CPU)
    inputs.topk_ids[:] = torch.arange(99).view(-1, 1).clamp(max=1)
    adapters, grad_out = make_adapters(problem, CPU), make_grad_out(inputs)
    truth = reference_gradients(problem, weights, *inputs.call, grad_out, adapters=adapters)
    bounds = {each.name: each.bound for each in truth.compare(truth.tensors)}
    many = bounds["w13 of expert 0"]  # 128 elements of one row, and 64 are many.
    assert bounds["w13_a of expert 0"] == bounds["w13_b of expert 0"] == pytest.approx(4 * many)
    assert bounds["w2_b of expert 0"] == pytest.approx(many * (64 / 3) ** 0.5)
    assert bounds["w2_b of expert 1"] == many


def test_a_sum_that_cancels_is_judged_by_its_terms() -> None:
    problem = MoEProblem(**{**SMALL, "top_k": 1}, dtype="float32")
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 1, "uniform", CPU)
    out = reference_experts(problem, weights, *inputs.call)
    grad_out = make_grad_out(inputs)
    grad_out -= out * (grad_out * out).sum() / out.square().sum()
    truth = reference_gradients(problem, weights, *inputs.call, grad_out)
    (compared,) = truth.compare({"topk_weights": truth.tensors["topk_weights"] + 1e-5})
    assert abs(float(truth.tensors["topk_weights"])) < 1e-4
    assert compared.error <= compared.bound < 1e-3


def test_a_clamp_allows_for_what_is_beside_it_and_no_more() -> None:
    problem = MoEProblem(**SMALL, activation=CLAMPED[0])
    weights, inputs, grad_out, truth = reference_of(problem, 33, "uniform")
    unclamped = dataclasses.replace(problem, activation=ACTIVATIONS["silu"])
    through = reference_gradients(unclamped, weights, *inputs.call, grad_out)
    wrong = truth.compare(through.tensors)
    assert all(each.error > 5 * each.bound for each in wrong)
    plain = reference_gradients(unclamped, weights, *inputs.call, grad_out).compare(through.tensors)
    for each, unbent in zip(wrong, plain, strict=True):
        is_bent = each.name.startswith(("w13", "hidden"))
        assert unbent.bound < each.bound < 20 * unbent.bound if is_bent else each.bound == unbent.bound


def test_a_clamp_may_cut_off_all_that_there_is() -> None:
    """A gradient of zeros then has no size: its error is relative to what rounding moves across the clamp."""
    _, _, _, truth = reference_of(MoEProblem(**SMALL, activation=CLAMPED[0]), 33, "uniform")
    one = torch.zeros_like(truth.tensors["w13"])
    one[:, 0, 0] = 1.0
    for size, moved, found, expected in (
        (0.0, 0.0, 0.0, (0.0, True)),
        (0.0, 0.0, 1.0, (math.inf, False)),
        (0.0, 2.0, 1.0, (0.5, True)),
        (0.0, 2.0, 8.0, (4.0, False)),
        (4.0, 2.0, 1.0, (0.25, True)),
        (4.0, 2.0, 4.0, (1.0, False)),
    ):
        held = dataclasses.replace(
            truth,
            tensors={"w13": torch.zeros_like(one)},
            sizes={"w13": torch.full((4,), size)},
            moved={"w13": torch.full((4,), moved)},
        )
        compared = held.compare({"w13": found * one})
        assert [(each.error, each.error <= each.bound) for each in compared] == [expected] * 4


def test_a_clamp_allows_for_twice_as_much_beside_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class rounds a product, and then its sum with the adapter's part."""
    problem = MoEProblem(**SMALL, activation=CLAMPED[0])
    weights, inputs, grad_out, truth = reference_of(problem, 33, "uniform")
    adapted = dataclasses.replace(problem, **ADAPTED)
    adapters = make_adapters(adapted, CPU)
    assert adapters is not None
    for tensor in adapters.tensors().values():
        tensor.zero_()
    found = reference_gradients(adapted, weights, *inputs.call, grad_out, adapters=adapters)
    monkeypatch.setitem(bounds._NEAR_CLAMP, problem.dtype, 2 * bounds._NEAR_CLAMP[problem.dtype])
    wide = reference_gradients(problem, weights, *inputs.call, grad_out)
    assert torch.equal(found.moved["w13"], wide.moved["w13"])
    assert (wide.moved["w13"] > truth.moved["w13"]).any()


def run_of(problem: MoEProblem, grad_out: torch.Tensor) -> Callable[..., dict[str, torch.Tensor]]:
    """A backward pass of the reference, to plant faults in."""
    return lambda weights, inputs, adapters: (
        reference_gradients(problem, weights, *inputs.call, grad_out, adapters=adapters).tensors
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_planted_fault_is_far_outside_of_the_bounds(dtype: str) -> None:
    for sizes in (SMALL, {**SMALL, "hidden_size": 130, "num_experts": 8}):
        problem = MoEProblem(**sizes, dtype=dtype, has_bias=True, **ADAPTED)
        weights, inputs, grad_out, truth = reference_of(problem, 17, "one_expert")
        run = run_of(problem, grad_out)
        backward = BackwardPass(run, weights, inputs, make_adapters(problem, CPU), truth.local_ids, truth.tensors)
        planted = dict(plant_gradient_faults(backward))
        assert len(planted) == 11
        for fault, wrong in planted.items():
            assert any(not each.error <= 10 * each.bound for each in truth.compare(wrong)), fault


def test_a_fault_that_a_layer_cannot_have_is_not_planted() -> None:
    problem = MoEProblem(num_experts=1, hidden_size=16, intermediate_size=16, top_k=1, activation="relu2")
    weights, inputs, grad_out, truth = reference_of(problem, 3, "uniform")
    backward = BackwardPass(run_of(problem, grad_out), weights, inputs, None, truth.local_ids, truth.tensors)
    assert {name for name, _ in plant_gradient_faults(backward)} == {
        "gradient of routing weights dropped",
        "gradients not scaled by routing weights",
        "gradients with the weights before a step",
    }


# Below: checks, and classes that break what they promise.
def case_of(experts: type[FakeExperts], **changes: Any) -> Case:
    problem = MoEProblem(**{**SMALL, "has_bias": True, **ADAPTED, **changes})
    return Case(cell_of(experts), Platform.from_name("cpu"), problem)


def writing_other(change: Callable[[str, torch.Tensor], torch.Tensor]) -> type[TrainingExperts]:
    """A class whose gradients are changed, by their names, before they are written."""

    class OtherExperts(TrainingExperts):
        def write(self, name: str, out: Any, found: torch.Tensor, *others: Any) -> None:
            super().write(name, out, change(name, found), *others)

    return OtherExperts


def adding_where(adds: Callable[[str, bool], bool]) -> type[TrainingExperts]:
    """A class that adds to a gradient of a name where it should not, or the other way round."""

    class AddingExperts(TrainingExperts):
        def write(self, name: str, out: Any, found: torch.Tensor, accumulates: bool, inputs: ExpertInputs) -> None:
            super().write(name, out, found, adds(name, accumulates), inputs)

    return AddingExperts


def overriding(**members: Any) -> type[TrainingExperts]:
    """A class with other methods."""
    return type("BrokenExperts", (TrainingExperts,), members)


SwappedExperts = writing_other(
    lambda name, found: torch.cat(found.chunk(2, 1)[::-1], 1) if name in ("w13", "w13_bias", "w13_b") else found
)
RotatedExperts = writing_other(lambda name, found: found.roll(1, 0) if name.startswith("w") else found)
DroppedRoutingExperts = writing_other(lambda name, found: found * (name != "topk_weights"))
OverwritingExperts = adding_where(lambda name, accumulates: False)
AddingExperts = adding_where(lambda name, accumulates: accumulates or name == "hidden_states")
OverwritingAdaptersExperts = adding_where(lambda name, accumulates: accumulates and name != "w2_a")
UnscaledExperts = overriding(routing_weights=lambda self, inputs, rows: torch.ones(len(rows[0]), 1))
CopyingExperts = overriding(
    permute_weights=lambda self, weights, problem: PermutedWeights(
        "canonical", {name: tensor.clone() for name, tensor in weights.tensors().items()}
    )
)
TF32Experts = overriding(rounded=lambda self, tensor: tensor.half().float())  # Of fp32 operands 11 bits stay.
IgnoringExperts = overriding(
    adapters=lambda self, inputs: (
        inputs.adapters
        and inputs.adapters.with_tensors({name: tensor * 0 for name, tensor in inputs.adapters.tensors().items()})
    )
)
UnscaledAdaptersExperts = overriding(
    adapters=lambda self, inputs: (
        inputs.adapters and dataclasses.replace(inputs.adapters, w13_scaling=1.0, w2_scaling=1.0)
    )
)


class TailExperts(TrainingExperts):
    """Sums over one row more than an expert has, which is the next expert's first."""

    def deep(self, operands: Operands) -> Operands:
        experts = list(operands)
        return {
            expert: {
                name: tuple(torch.cat([mine, more[:1]]) for mine, more in zip(pair, operands[after][name], strict=True))
                for name, pair in operands[expert].items()
            }
            for expert, after in itertools.pairwise(experts)
        } | {expert: operands[expert] for expert in experts[-1:]}  # type: ignore[return-value]


class UnwrittenExperts(TrainingExperts):
    def write(
        self, name: str, out: torch.Tensor | None, found: torch.Tensor, accumulates: bool, inputs: ExpertInputs
    ) -> None:
        if name.startswith("w") and out is not None:
            for expert, _ in self.experts_with_rows(inputs):
                super().write(name, out[expert], found[expert], accumulates, inputs)
        else:
            super().write(name, out, found, accumulates, inputs)


class StaleExperts(TrainingExperts):
    """Multiplies with the weights of its first call in the backward pass."""

    kept: dict[str, torch.Tensor]

    def backward(self, *, weights: Any, **others: Any) -> None:
        if not hasattr(self, "kept"):
            self.kept = {name: weights[name].clone() for name in weights.per_expert}
        super().backward(weights=PermutedWeights("canonical", self.kept), **others)


class AllExperts(TrainingExperts):
    """Computes w13's gradient only beside w2's."""

    w2: torch.Tensor | None = None

    def backward(self, *, grads: Any, **others: Any) -> None:
        self.w2 = grads.w2
        super().backward(grads=grads, **others)

    def write(self, name: str, out: Any, found: torch.Tensor, *others: Any) -> None:
        super().write(name, None if name == "w13" and self.w2 is None else out, found, *others)


def masking(grads: Any, grad_out: torch.Tensor, **_: Any) -> None:
    """Multiplies all tokens' rows with a mask, which NaN passes."""
    if grads.w2_bias is not None:
        grads.w2_bias.add_((grad_out * 0).sum(0))


class UnmaskedSlopeExperts(TrainingExperts):
    """Lets gradients through a clamp."""

    def act(self, pre: torch.Tensor, grad: torch.Tensor) -> Rows:
        clamped = self.problem
        self.problem = dataclasses.replace(clamped, activation=ACTIVATIONS["silu"])
        _, slope = super().act(pre, grad)
        self.problem = clamped
        return super().act(pre, grad)[0], slope


class VaryingExperts(TrainingExperts):
    num_calls = 0

    def write(self, name: str, out: Any, found: torch.Tensor, *others: Any) -> None:
        self.num_calls += name == "w2"
        super().write(name, out, found * (1 + 0.004 * (self.num_calls % 2)) if name == "w2" else found, *others)


class ScratchBitsExperts(TrainingExperts):
    """Its gradients are within their bounds, and depend on what scratch held before."""

    def backward(self, *, grads: Any, workspace2: torch.Tensor, **others: Any) -> None:
        super().backward(grads=grads, workspace2=workspace2, **others)
        if grads.w2 is not None and workspace2.flatten()[0].isfinite():
            grads.w2.mul_(1 + 2**-7)


def adding_scratch(grads: Any, workspace2: torch.Tensor, **_: Any) -> None:
    if grads.topk_weights is not None:
        grads.topk_weights.add_(workspace2.flatten()[0] * 0)


class WrongForwardExperts(TrainingExperts):
    def forward(self, *, out: torch.Tensor, **others: Any) -> None:
        super().forward(out=out, **others)
        out *= 1.1


class MisorderedAdaptersExperts(TrainingExperts):
    """Takes lora_B [rows, R*E], whose experts are fastest, for one whose ranks are."""

    def adapters(self, inputs: ExpertInputs) -> ExpertAdapters | None:
        held = inputs.adapters
        if held is None:
            return None
        stored = {name: b.permute(1, 2, 0).flatten(1) for name, b in held.tensors().items() if name.endswith("_b")}
        num_experts = self.problem.num_local_experts
        misread = {name: b.unflatten(1, (num_experts, -1)).transpose(0, 1) for name, b in stored.items()}
        return held.with_tensors(misread)


class StaleAdaptersExperts(TrainingExperts):
    kept: ExpertAdapters | None = None

    def adapters(self, inputs: ExpertInputs) -> ExpertAdapters | None:
        if self.kept is None and inputs.adapters is not None:
            held = inputs.adapters.tensors()
            self.kept = inputs.adapters.with_tensors({name: tensor.clone() for name, tensor in held.items()})
        return self.kept


class UnwrittenAdaptersExperts(UnwrittenExperts):
    def write(self, name: str, *others: Any) -> None:
        (super() if name in ADAPTER_TENSORS else super(UnwrittenExperts, self)).write(name, *others)


class BaseForwardExperts(TrainingExperts):
    """Infers without adapters, and computes right gradients."""

    def forward(self, *, out: torch.Tensor, inputs: ExpertInputs, weights: Any, **others: Any) -> None:
        super().forward(out=out, inputs=inputs, weights=weights, **others)
        self.compute(out, inputs, weights)


def then(spoil: Callable[..., object]) -> type[TrainingExperts]:
    """A class that does this at the end of its backward pass, with its tensors."""

    class SpoilingExperts(TrainingExperts):
        def backward(self, **given: Any) -> None:
            super().backward(**given)
            spoil(**given)

    return SpoilingExperts


def writing(reach: Callable[..., torch.Tensor]) -> type[TrainingExperts]:
    """A class that writes to a tensor of its backward pass."""
    return then(lambda **given: reach(**given).fill_(1))


def behind(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + tensor.numel())


def check_first(experts: type[FakeExperts], **changes: Any) -> None:
    with running_as(chosen_machine("cpu")):
        case = case_of(experts, **changes)
        CHECK_KINDS["gradients"](case.cell, {"problem": case.problem.to_dict(), "is_first": True})


def check_drawn(experts: type[FakeExperts]) -> None:
    case = case_of(experts, gradients=(), adapter_rank=0)
    layer = DrawnLayer(
        backend="fresh", experts="", rule="cpu", computes="", problem=case.problem, num_tokens=9, form="offset"
    )
    with running_as(chosen_machine("cpu")):
        check_layer(case, layer)


def check_of(kind: str, experts: type[FakeExperts]) -> None:
    with running_as(chosen_machine("cpu")):
        CHECK_KINDS[kind](cell_of(experts), None)


BROKEN: Final[list[tuple[str, Callable[[type[FakeExperts]], None], type[FakeExperts], str]]] = [
    ("gate and up", check_first, SwappedExperts, "likely cause: gradients of gate and up swapped"),
    ("experts", check_first, RotatedExperts, "likely cause: gradients of another expert"),
    ("routing", check_first, DroppedRoutingExperts, "likely cause: gradient of routing weights dropped"),
    ("unscaled", check_first, UnscaledExperts, "likely cause: gradients not scaled by routing weights"),
    ("tail", check_first, TailExperts, "likely cause: the next expert's first row in an expert's gradients"),
    ("unwritten", check_first, UnwrittenExperts, "likely cause: gradients of an expert without rows not written"),
    ("parts", check_first, AllExperts, "asked for w13 alone: gradient of w13 of expert 0"),
    ("overwrites", check_first, OverwritingExperts, "half of what is added to an equal gradient: gradient of w"),
    ("adds", check_first, AddingExperts, "gradient of hidden_states: error nan"),
    ("neighbors", check_first, then(masking), "token 5 is NaN, and another token or expert is wrong"),
    ("varies", check_first, VaryingExperts, "equal inputs gave other bits in gradients of w2"),
    ("scratch", check_first, then(adding_scratch), "gradient of topk_weights: error nan"),
    ("scratch bits", check_first, ScratchBitsExperts, "equal inputs gave other bits in gradients of w2"),
    ("forward", check_first, WrongForwardExperts, "the forward pass of training: error"),
    ("behind", check_first, writing(lambda grads, **_: behind(grads.w2)), "bytes behind gradient of w2 was written to"),
    ("saved", check_first, writing(lambda saved, **_: saved["pre"]), "saved pre was written to"),
    ("grad_out", check_first, writing(lambda grad_out, **_: grad_out), "grad_out was written to"),
    ("weights", check_first, writing(lambda weights, **_: weights["w2"]), "canonical w2 was written to"),
    ("scratch behind", check_first, writing(lambda workspace13, **_: behind(workspace13)), "behind workspace13"),
    ("drawn", check_drawn, SwappedExperts, "likely cause: gradients of gate and up swapped"),
    ("stale", lambda experts: check_of("training", experts), StaleExperts, "after a step: gradient of"),
    ("copies", lambda experts: check_of("training", experts), CopyingExperts, "copied weights that are read"),
    ("no adapters", check_first, IgnoringExperts, "likely cause: adapters ignored"),
    ("adapters unscaled", check_first, UnscaledAdaptersExperts, "likely cause: adapters not scaled"),
    ("lora_B", check_first, MisorderedAdaptersExperts, "likely cause: experts of lora_B misordered"),
    ("stale adapters", lambda experts: check_of("training", experts), StaleAdaptersExperts, "after a step: gradient"),
    (
        "adapters unwritten",
        check_first,
        UnwrittenAdaptersExperts,
        "gradient of w13_a of expert 1, and 7 more: error inf",
    ),
    ("adapters overwritten", check_first, OverwritingAdaptersExperts, "equal gradient: gradient of w2_a of expert"),
    ("base forward", check_first, BaseForwardExperts, "the forward pass of training: error"),
    ("adapters written", check_first, writing(lambda inputs, **_: inputs.adapters.w2_b), "w2_b was written to"),
    ("adapters behind", check_first, writing(lambda grads, **_: behind(grads.w13_b)), "behind gradient of w13_b"),
    ("clamp", lambda experts: check_first(experts, activation=CLAMPED[0]), UnmaskedSlopeExperts, ": error "),
    ("fp32", lambda experts: check_first(experts, dtype="float32"), TF32Experts, ": error "),
]


@pytest.mark.parametrize(("run", "experts", "text"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_a_broken_promise_is_seen(run: Any, experts: type[FakeExperts], text: str) -> None:
    with pytest.raises(Exception, match=re.escape(text)):
        run(experts)


def test_an_honest_class_keeps_every_promise() -> None:
    check_first(TrainingExperts)
    check_first(TF32Experts)
    check_drawn(TrainingExperts)
    for kind in ("gradient_faults", "training", "workspaces"):
        check_of(kind, TrainingExperts)


def test_each_fault_must_be_seen_well_above_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    for share in (30, 9):
        planted = lambda backward, share=share: [  # noqa: E731
            ("slightly larger", {name: tensor * (1 + share * 9.5e-3) for name, tensor in backward.right.items()})
        ]
        monkeypatch.setattr(gradients, "plant_gradient_faults", planted)
        text = "slightly larger, planted by this check: no gradient has an error"
        with pytest.raises(AssertionError, match=text) if share < 10 else contextlib.nullcontext():
            check_of("gradient_faults", TrainingExperts)


def test_wrong_gradients_are_no_missed_fault() -> None:
    with pytest.raises(AssertionError, match="likely cause: gradients of gate and up swapped"):
        check_of("gradient_faults", SwappedExperts)


def test_only_classes_that_compute_gradients_are_asked_for_them() -> None:
    for experts, is_asked in ((FakeExperts, False), (TrainingExperts, True)):
        kinds = {kind for kind, _ in suite._promises(cell_of(experts), False, False)}
        asked = {"gradients", "gradient_faults", "training"}
        assert kinds & asked == (asked if is_asked else set())
    assert not gradient_cases(cell_of(FakeExperts))


def test_gradients_are_checked_in_every_claimed_combination() -> None:
    found = [case.problem for case in gradient_cases(cell_of(TrainingExperts))]
    assert all(
        problem.gradients == set(GRADIENTS) - (set() if problem.adapter_rank else {"adapters"}) for problem in found
    )
    assert {problem.adapter_rank for problem in found} >= {0, 4, 5, 16, 64}
    combinations = {(problem.dtype, str(problem.activation), problem.has_bias) for problem in found}
    assert len(combinations) == 3 * len(claimed_activations(cell_of(TrainingExperts))) * 2
    assert {str(problem.activation) for problem in found} >= {*ACTIVATIONS, "silu(limit=1.5)", "silu(beta=0.5)"}
    assert {(problem.num_experts, problem.top_k) for problem in found} >= {(1, 1), (8, 8), (40, 3)}
    assert {problem.placement for problem in found if problem.is_expert_parallel} == {"contiguous", "map"}


class InputsOnlyExperts(TrainingExperts):
    facts = dataclasses.replace(LITTLE, gradients=frozenset({"hidden_states"}))


def test_a_class_is_asked_for_the_gradients_that_it_computes() -> None:
    cases = gradient_cases(cell_of(InputsOnlyExperts))
    assert {case.problem.gradients for case in cases} == {frozenset({"hidden_states"})}
    training = GuardedTraining(cases[0], make_weights(cases[0].problem, CPU), None)
    inputs = make_inputs(cases[0].problem, 5, "uniform", CPU)
    assert list(training.run(inputs, make_grad_out(inputs))[1]) == ["hidden_states"]
    check_gradients(cases[0], is_first=True)
    check_of("training", InputsOnlyExperts)
    check_of("gradient_faults", InputsOnlyExperts)


def test_an_imitated_class_is_asked_for_each_value_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "is_imitated", lambda cell: True)
    found = [case.problem for case in gradient_cases(cell_of(TrainingExperts))]
    first = [problem for problem in found if problem.num_experts == 6 and not problem.is_expert_parallel]
    assert len(first) == len(claimed_activations(cell_of(TrainingExperts)))
    assert {problem.dtype for problem in first} == {"bfloat16", "float16", "float32"}
    assert {problem.has_bias for problem in first} == {False, True}


def test_on_a_gpu_a_backward_pass_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    seen: list[str] = []

    class SeeingExperts(TrainingExperts):
        def backward(self, **given: Any) -> None:
            seen.append(modes[-1] if modes else "default")
            super().backward(**given)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_of("training", SeeingExperts)
    assert not modes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_of("training", SeeingExperts)
    assert seen == ["default", "default", "default", "error"]
    assert modes == ["error", "default"]

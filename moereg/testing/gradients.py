"""The kit's checks of gradients: a class's forward and backward pass against autograd in fp64.

They run for classes whose facts name gradients only.

pytest must not rewrite its assertions' messages: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from moereg.dispatch import evaluate
from moereg.experts import ExpertInputs, Gradients
from moereg.layer.backend_calls import make_experts, permute
from moereg.layer.checks import resolve_expert_map
from moereg.layer.factory import make_unchecked_kernel
from moereg.numerics.gradients import ReferenceGradients, reference_gradients
from moereg.numerics.reference import relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import BackendCell
from moereg.runtime.torch_state import plain_torch
from moereg.selection.request import Request
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import (
    Case,
    accepted_neighbor,
    calls_of,
    claimed_problems,
    is_imitated,
    runnable_platform,
    select_cell,
)
from moereg.testing.checks import check_capture, no_waiting
from moereg.testing.diagnosis import worded
from moereg.testing.drawing import DrawnLayer, claimed_activations
from moereg.testing.faults import BackwardPass, plant_gradient_faults
from moereg.testing.guards import GuardedMemory, GuardedWorkspaces, guard_weights
from moereg.testing.inputs import Inputs, make_adapters, make_expert_map, make_grad_out, make_inputs, make_weights
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import ExpertWeights
from moereg.weights.unpermute import same_bits

_SIZES: Final = ((72, 40), (130, 88), (255, 129), (64, 96), (128, 64))
# Several tiles of columns, and the last of them not full; too slow to interpret.
_WIDE_SIZES: Final = ((264, 392), (520, 328))
_FEWER_CALLS: Final = ((17, "unmapped"), (33, "skewed"), (1, "uniform"), (17, "one_expert"))
_SPOILED: Final = 5  # A token.
_RANKS: Final = (16, 0, 5, 64, 4, 96)


def _enough_tokens(case: Case) -> int:
    """Tokens that fill tiles: on a GPU so many that kernels for many rows an expert run."""
    return 1024 if case.device.type == "cuda" else 17


def with_gradients(case: Case, adapter_rank: int) -> Case | None:
    """The case with all gradients that its class computes, of adapters if it has some; None if it computes none."""
    names = case.cell.facts.gradients
    if not adapter_rank or "adapters" not in names:
        names, adapter_rank = names - {"adapters"}, 0
    if not names or case.problem.quant.weight is not None or case.problem.activation_format != "standard":
        return None
    problem = dataclasses.replace(case.problem, gradients=names, adapter_rank=adapter_rank)
    asked = evaluate(case.cell, problem, case.platform, Request(require=(case.cell.name,)))
    return dataclasses.replace(case, problem=problem) if asked.accepted else None


def gradient_cases(cell: BackendCell) -> list[Case]:
    """A layer of every claimed combination of dtype, activation, clamp and bias, and of other experts and placements.

    Ranks of adapters differ, if the class has some. An imitated class gets each value once only.
    """
    platform, facts = runnable_platform(cell), cell.facts
    assert platform is not None
    if not facts.gradients:
        return []
    first, *others = claimed_problems(cell)
    values: tuple[list[Any], ...] = (
        sorted(facts.dtypes),
        list(claimed_activations(cell)),
        [True, False] if facts.bias else [False],
    )
    combinations = list(itertools.product(*values))
    sizes = _SIZES if is_imitated(cell) else (*_SIZES, *_WIDE_SIZES)
    if is_imitated(cell):
        longest = max(map(len, values))
        combinations = list(itertools.islice(zip(*map(itertools.cycle, values), strict=True), longest))
    problems = [
        dataclasses.replace(
            first, dtype=dtype, activation=activation, has_bias=has_bias, hidden_size=size[0], intermediate_size=size[1]
        )
        for (dtype, activation, has_bias), size in zip(combinations, itertools.cycle(sizes), strict=False)
    ]
    problems += [other for other in others if other.num_experts != first.num_experts or other.is_expert_parallel]
    accepted = [accepted_neighbor(cell, problem, platform) for problem in problems]
    cases = [
        with_gradients(Case(cell, platform, problem), rank)
        for problem, rank in zip(accepted, itertools.cycle(_RANKS), strict=False)
        if problem is not None
    ]
    return list({case.problem: case for case in cases if case is not None}.values())


class Expected:
    """The expected gradients of a call, `truth`."""

    def __init__(
        self,
        problem: MoEProblem,
        weights: ExpertWeights,
        inputs: Inputs,
        grad_out: torch.Tensor,
        expert_map: torch.Tensor | None,
        adapters: ExpertAdapters | None,
    ) -> None:

        def run(weights: ExpertWeights, inputs: Inputs, adapters: ExpertAdapters | None) -> ReferenceGradients:
            return reference_gradients(problem, weights, *inputs.call, grad_out, expert_map, adapters)

        self.truth = truth = run(weights, inputs, adapters)
        self._backward = BackwardPass(
            lambda *call: run(*call).tensors, weights, inputs, adapters, truth.local_ids, truth.tensors
        )

    def check(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises AssertionError if an error exceeds its bound, naming usual mistakes that explain it."""
        wrong = [each for each in self.truth.compare(found) if not each.error <= each.bound]
        if not wrong:
            return
        worst = max(wrong, key=lambda each: math.inf if math.isnan(each.error) else each.error / (each.bound or 1))
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        text = f"gradient of {worst.name}{more}: error {worst.error:.2e}, bound {worst.bound:.0e}"
        causes: tuple[str, ...] = ()
        with contextlib.suppress(Exception):  # Such as a lack of memory: what was found above still holds.
            causes = tuple(self._causes(found))
        raise AssertionError(text + worded(causes))

    def _causes(self, found: Mapping[str, torch.Tensor]) -> Iterator[str]:
        right = {name: self.truth.tensors[name] for name in found}
        for name, wrong in plant_gradient_faults(dataclasses.replace(self._backward, right=right)):
            without_nan = [{key: tensor.nan_to_num() for key, tensor in each.items()} for each in (wrong, found)]
            compared = self.truth.with_tensors(without_nan[0]).compare(without_nan[1])
            is_alike = all(torch.equal(found[key].isnan(), tensor.isnan()) for key, tensor in wrong.items())
            if is_alike and all(each.error <= each.bound for each in compared):
                yield name


class GuardedTraining:
    """A case's experts class on canonical weights, with guard bands around all tensors; `names` are its gradients."""

    def __init__(
        self,
        case: Case,
        weights: ExpertWeights,
        adapters: ExpertAdapters | None,
        ep_rank: int = 0,
        form: str = "contiguous",
    ) -> None:
        self.case = case
        self._memory, self._scratch = GuardedMemory(case.device), GuardedMemory(case.device)
        self._workspaces = GuardedWorkspaces(self._scratch)
        self.weights = guard_weights(self._memory, weights, form, case.cell.experts.reads_in_place())
        given = make_expert_map(case.problem, case.device)
        self._expert_map = resolve_expert_map(case.problem, ep_rank, given, self.weights.w13.device)
        if self._expert_map is not None:
            self._expert_map = self._memory.copy("expert_map", self._expert_map)
        self.adapters = adapters
        if adapters is not None:
            copies = {name: self._memory.copy(name, tensor) for name, tensor in adapters.tensors().items()}
            self.adapters = adapters.with_tensors(copies)
        self._memory.freeze()
        selection = select_cell(case)
        self._experts = make_experts(selection, selection.decisions[0])
        self._permuted = permute(selection, self._experts, self.weights)
        self._memory.check()
        asked = case.problem.gradients
        self.names = tuple(sorted(asked - {"weights", "adapters"}))
        self.names += tuple(weights.tensors() if "weights" in asked else ())
        self.names += () if adapters is None else tuple(adapters.tensors())

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Weights and adapters by name."""
        return {**self.weights.tensors(), **({} if self.adapters is None else self.adapters.tensors())}

    def expected(self, inputs: Inputs, grad_out: torch.Tensor) -> Expected:
        """The expected gradients of a call."""
        return Expected(self.case.problem, self.weights, inputs, grad_out, self._expert_map, self.adapters)

    def run(
        self,
        inputs: Inputs,
        grad_out: torch.Tensor,
        fill: str = "nan",
        names: Collection[str] | None = None,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Runs copies of a call with at least one token forward and backward, into memory filled with NaN.

        Args:
            inputs, grad_out: The call, and [T,H].
            fill: Contents of the workspaces, one of `moereg.testing.guards.FILLS`.
            names: Gradients to ask for; all if None.
            before: Values to which gradients of weights and adapters are added; overwritten if None.

        Returns:
            The output, and the gradients by name.
        """
        problem, experts, num_tokens = self.case.problem, self._experts, len(grad_out)
        memory, written = GuardedMemory(self.case.device), GuardedMemory(self.case.device)
        copied = {name: memory.copy(name, tensor) for name, tensor in vars(inputs).items()}
        grad_out = memory.copy("grad_out", grad_out)
        memory.freeze()
        out = memory.allocate("out", tuple(grad_out.shape), grad_out.dtype)
        kept = experts.saved_shapes(problem=problem, num_tokens=num_tokens)
        saved = {name: memory.allocate(f"saved {name}", tuple(shape), dtype) for name, (shape, dtype) in kept.items()}
        grads = {
            name: written.copy(f"gradient of {name}", before[name])
            if before is not None and name in self.parameters
            else written.allocate(f"gradient of {name}", tuple(like.shape), like.dtype)
            for name, like in {**copied, **self.parameters}.items()
            if name in (self.names if names is None else names)
        }
        self._workspaces.fill = fill

        def given(workspace_shapes: Callable[..., tuple[tuple[int, ...], ...]]) -> dict[str, Any]:
            shapes = workspace_shapes(problem=problem, num_tokens=num_tokens)
            scratch = self._workspaces.take(shapes, problem.torch_dtype, self.case.device)
            inputs = ExpertInputs(**copied, expert_map=self._expert_map, adapters=self.adapters)
            call = {"inputs": inputs, "weights": self._permuted}
            return {**call, "workspace13": scratch[0], "workspace2": scratch[1]}

        with plain_torch():
            experts.apply_saving(out=out, saved=saved, **given(experts.workspace_shapes))
            memory.check()
            memory.freeze()  # Gradients have a memory of their own.
            targets = Gradients(**grads, accumulate=before is not None)
            experts.apply_backward(
                grads=targets, grad_out=grad_out, saved=saved, **given(experts.backward_workspace_shapes)
            )
        for each in (memory, written, self._memory, self._scratch):
            each.check()
        return out, grads

    def check(self, inputs: Inputs, num_calls: int = 2) -> None:
        """Compares a call with the reference, and its bits with those of calls at other addresses."""
        grad_out = make_grad_out(inputs)
        expected = self.expected(inputs, grad_out)
        out, found = self.run(inputs, grad_out)
        error = relative_error(out, expected.truth.output)
        bound = layer_tolerance(self.case.problem, len(out), self.case.computes)
        assert error <= bound, f"the forward pass of training: error {error:.2e}, bound {bound:.0e}"
        expected.check(found)
        for _ in range(num_calls - 1):
            again = self.run(inputs, grad_out, "huge")[1]
            differing = [name for name in found if not same_bits(found[name], again[name])]
            assert not differing, f"equal inputs gave other bits in gradients of {', '.join(differing)}"


def check_gradients(case: Case, is_first: bool = False) -> None:
    """A case's gradients agree with autograd, under guard bands; the first case of a class gets more calls."""
    training = _training(case)
    calls: Sequence[tuple[int, str]] = _FEWER_CALLS[:1] if case.is_imitated else [(63, "unmapped")]
    if case.device.type == "cuda":
        calls = [*calls, (_enough_tokens(case), "skewed")]
    if is_first:
        calls = _FEWER_CALLS if case.is_imitated else [call for call in calls_of(case, True) if call[0]]
    for num_tokens, routing in calls:
        inputs = make_inputs(case.problem, num_tokens, routing, case.device, seed=num_tokens)
        with _prefixed(f"T={num_tokens} {routing}"):
            training.check(inputs, 2 if is_first or not case.is_imitated else 1)
    if is_first:
        _check_parts(training)
        _check_neighbors(training)


def check_drawn_gradients(case: Case, layer: DrawnLayer) -> None:
    """The gradients of a drawn layer's call agree with the reference, if the class computes them."""
    trained = with_gradients(case, _RANKS[layer.seed % len(_RANKS)])
    if trained is not None and layer.num_tokens:
        inputs = make_inputs(case.problem, layer.num_tokens, layer.routing, case.device, layer.seed)
        _training(trained, layer.seed, layer.ep_rank, layer.form).check(inputs)


def _training(case: Case, seed: int = 0, ep_rank: int = 0, form: str = "contiguous") -> GuardedTraining:
    problem, device = case.problem, case.device
    weights, adapters = make_weights(problem, device, seed), make_adapters(problem, device, seed)
    return GuardedTraining(case, weights, adapters, ep_rank, form)


def check_gradient_faults(cell: BackendCell) -> None:
    """Faults of a backward pass give errors well above the bounds."""
    case = max(gradient_cases(cell)[:3], key=lambda case: (case.problem.adapter_rank > 0, case.problem.has_bias))
    training = _training(case)
    # All rows go to a few experts, so that others are empty.
    inputs = make_inputs(case.problem, 5 if case.is_imitated else 17, "one_expert", case.device)
    grad_out = make_grad_out(inputs)
    truth = training.expected(inputs, grad_out).truth

    def run(weights: ExpertWeights, inputs: Inputs, adapters: ExpertAdapters | None) -> dict[str, torch.Tensor]:
        return GuardedTraining(case, weights, adapters).run(inputs, grad_out)[1]

    right = training.run(inputs, grad_out)[1]
    backward = BackwardPass(run, training.weights, inputs, training.adapters, truth.local_ids, right)
    for fault, wrong in plant_gradient_faults(backward):
        if all(each.error <= 10 * each.bound for each in truth.compare(wrong)):
            training.check(inputs)  # Wrong gradients fail as what they are.
            raise AssertionError(f"{fault}, planted by this check: no gradient has an error above 10 bounds")


def check_training(cell: BackendCell) -> None:
    """A layer backpropagates, also without tokens and after a step in place.

    On a GPU it does not wait for it, and can be captured in a graph where the class says so.
    """
    case = gradient_cases(cell)[0]
    problem, expert_map = case.problem, make_expert_map(case.problem, case.device)
    tensors = {
        name: torch.nn.Parameter(tensor, requires_grad="weights" in problem.gradients)
        for name, tensor in make_weights(problem, case.device).tensors().items()
    }
    weights = ExpertWeights(**tensors)  # type: ignore[arg-type]
    adapters = make_adapters(problem, case.device)
    if adapters is not None:
        factors = {name: torch.nn.Parameter(tensor) for name, tensor in adapters.tensors().items()}
        adapters, tensors = adapters.with_tensors(factors), {**tensors, **factors}
    kernel = make_unchecked_kernel(problem, weights, selection=select_cell(case), expert_map=expert_map)
    enough = _enough_tokens(case)
    for call, num_tokens, seed in (("at first", enough, 0), ("without tokens", 0, 0), ("after a step", enough, 7)):
        with torch.no_grad():
            made = make_weights(problem, case.device, seed), make_adapters(problem, case.device, seed)
            for name, tensor in [pair for each in made if each is not None for pair in each.tensors().items()]:
                tensors[name].copy_(tensor)
        inputs = make_inputs(problem, num_tokens, "uniform", case.device)
        grad_out = make_grad_out(inputs)
        expected = Expected(problem, weights, inputs, grad_out, expert_map, adapters)
        leaves = {**vars(inputs), **tensors}
        for name in problem.gradients - {"weights", "adapters"}:
            leaves[name].requires_grad_()
        followed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        must_not_wait = call == "after a step" and torch.cuda.is_available()  # The first call may compile.
        with no_waiting() if must_not_wait else contextlib.nullcontext(), torch.enable_grad():
            out = kernel(*inputs.call, adapters=adapters)
            found = torch.autograd.grad(out, list(followed.values()), grad_out)
        with _prefixed(call):
            expected.check(dict(zip(followed, found, strict=True)))
    # A leaf's node in a graph belongs to a stream, and one of another stream cannot be captured.
    del out, found
    if cell.facts.graph_capture and case.device.type == "cuda":

        def step() -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                return torch.autograd.grad(kernel(*inputs.call, adapters=adapters), list(followed.values()), grad_out)

        others = [make_inputs(problem, len(grad_out), "skewed", case.device, seed=1)]
        check_capture(step, inputs, others, "other gradients")


def _check_parts(training: GuardedTraining) -> None:
    """Each gradient can be asked for alone, and those of weights are added to what is there."""
    inputs = make_inputs(training.case.problem, _enough_tokens(training.case), "skewed", training.case.device, seed=2)
    grad_out = make_grad_out(inputs)
    expected = training.expected(inputs, grad_out)
    for name in training.names:
        with _prefixed(f"asked for {name} alone"):
            expected.check(training.run(inputs, grad_out, names=(name,))[1])
    found = training.run(inputs, grad_out)[1]
    added = training.run(inputs, grad_out, before=found)[1]
    with _prefixed("half of what is added to an equal gradient"):
        halves = {name: tensor / 2 if name in training.parameters else tensor for name, tensor in added.items()}
        expected.check(halves)


def _check_neighbors(training: GuardedTraining) -> None:
    """A token of NaN spoils its own rows and the gradients of its own experts alone."""
    inputs = make_inputs(training.case.problem, _enough_tokens(training.case), "uniform", training.case.device, seed=3)
    grad_out = make_grad_out(inputs)
    spoiled = training.expected(inputs, grad_out).truth.local_ids[_SPOILED]
    others = inputs.clone()
    others.topk_ids[_SPOILED] = -1
    expected = training.expected(others, grad_out)
    inputs.hidden_states[_SPOILED] = grad_out[_SPOILED] = torch.nan
    found = training.run(inputs, grad_out)[1]
    for name, tensor in found.items():
        place = spoiled[spoiled >= 0] if name in training.parameters else _SPOILED
        tensor[place] = expected.truth.tensors[name][place].to(tensor.dtype)
    with _prefixed(f"token {_SPOILED} is NaN, and another token or expert is wrong"):
        expected.check(found)


@contextlib.contextmanager
def _prefixed(text: str) -> Iterator[None]:
    """Says in an assertion's message what was run."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{text}: {error}") from error

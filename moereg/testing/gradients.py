"""The kit's checks of gradients: a class's forward and backward pass against autograd in fp64.

They call the class itself, with guard bands around all that it is given. They run for classes whose facts name
gradients only.

pytest must not rewrite its assertions' messages: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch

from moereg.dispatch import evaluate
from moereg.experts import ExpertInputs, Gradients
from moereg.layer.backend_calls import make_experts, permute
from moereg.layer.expert_map import resolve_expert_map
from moereg.layer.factory import make_unchecked_kernel
from moereg.numerics.gradients import ReferenceGradients, reference_gradients
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import BackendCell
from moereg.runtime.gc_pause import collecting_later
from moereg.runtime.torch_state import plain_torch
from moereg.selection.request import Request
from moereg.testing.cases import Case, calls_of, is_imitated, runnable_platform, select_cell
from moereg.testing.diagnosis import worded
from moereg.testing.drawing import DrawnLayer
from moereg.testing.faults import BackwardPass, plant_gradient_faults
from moereg.testing.guards import GuardedMemory, GuardedWorkspaces, guard_weights
from moereg.testing.inputs import Inputs, make_expert_map, make_grad_out, make_inputs, make_weights
from moereg.testing.problems import accepted_neighbor, claimed_activations, claimed_problems
from moereg.weights.permuted import ExpertWeights
from moereg.weights.unpermute import same_bits

_SIZES: Final = ((72, 40), (130, 88), (255, 129), (64, 96), (128, 64))
_FEWER_CALLS: Final = ((17, "unmapped"), (63, "skewed"), (1, "uniform"), (17, "one_expert"))
_SPOILED: Final = 5


def with_gradients(case: Case) -> Case | None:
    """The case with all gradients that its class computes; None if it computes none for such a layer."""
    names = case.cell.facts.gradients
    if not names or case.problem.quant.weight is not None or case.problem.activation_format != "standard":
        return None
    problem = dataclasses.replace(case.problem, gradients=names)
    asked = evaluate(case.cell, problem, case.platform, Request(require=(case.cell.name,)))
    return dataclasses.replace(case, problem=problem) if asked.accepted else None


def gradient_cases(cell: BackendCell) -> list[Case]:
    """Layers to check a class's gradients with: every claimed combination of dtype, activation, clamp and bias.

    Further ones have other numbers of experts and placements. An imitated class gets each value once only.
    """
    platform = runnable_platform(cell)
    assert platform is not None
    facts = cell.facts
    if not facts.gradients:
        return []
    first = next(iter(claimed_problems(cell)))
    values = (sorted(facts.dtypes), claimed_activations(facts), [True, False] if facts.bias else [False])
    combinations = list(itertools.product(*values))
    if is_imitated(cell):
        count = max(map(len, values))
        combinations = list(itertools.islice(zip(*map(itertools.cycle, values), strict=True), count))
    problems = []
    for (dtype, activation, has_bias), (hidden_size, intermediate_size) in zip(
        combinations, itertools.cycle(_SIZES), strict=False
    ):
        changes = {"dtype": dtype, "activation": activation, "has_bias": has_bias, "hidden_size": hidden_size}
        problems.append(dataclasses.replace(first, **changes, intermediate_size=intermediate_size))
    problems += [
        problem
        for problem in claimed_problems(cell)
        if problem.num_experts != first.num_experts or problem.is_expert_parallel
    ]
    neighbors = (accepted_neighbor(cell, problem, platform) for problem in problems)
    cases = (with_gradients(Case(cell, platform, problem)) for problem in neighbors if problem is not None)
    return [case for case in {case.problem: case for case in cases if case is not None}.values()]


class GuardedTraining:
    """A cell's experts class on canonical weights, with guard bands around all tensors.

    Attributes:
        case: The case, whose problem has gradients.
        weights: The canonical weights.
        expert_map: [num_experts] int32, or None if all experts are local.
        experts, permuted: The class's instance, and the weights in its layout.
        workspaces: Scratch memory of both passes.
        names: Names of the gradients that the class computes.
    """

    def __init__(self, case: Case, weights: ExpertWeights, ep_rank: int = 0, form: str = "contiguous") -> None:
        """Permutes the weights.

        Args:
            case: The case.
            weights, form, ep_rank: As in `moereg.testing.checks.GuardedLayer`.
        """
        self.case = case
        self._memory = GuardedMemory(case.device)
        self._scratch = GuardedMemory(case.device)
        self.workspaces = GuardedWorkspaces(self._scratch)
        self.weights = guard_weights(self._memory, weights, form)
        given = make_expert_map(case.problem, case.device)
        expert_map = resolve_expert_map(case.problem, ep_rank, given, self.weights.w13.device)
        self.expert_map = None if expert_map is None else self._memory.copy("expert_map", expert_map)
        self._memory.freeze()
        selection = select_cell(case)
        self.experts = make_experts(selection, selection.decisions[0])
        self.permuted = permute(selection, self.experts, self.weights)
        self._memory.check()
        kinds = {"hidden_states": "hidden_states", "topk_weights": "topk_weights"}
        kinds |= dict.fromkeys(weights.tensors(), "weights")
        self.names = tuple(name for name, kind in kinds.items() if kind in case.problem.gradients)

    def reference(self, inputs: Inputs, grad_out: torch.Tensor) -> ReferenceGradients:
        """The expected gradients of a call."""
        return reference_gradients(self.case.problem, self.weights, *inputs.call, grad_out, self.expert_map)

    def run(
        self,
        inputs: Inputs,
        grad_out: torch.Tensor,
        fill: str = "nan",
        names: Collection[str] | None = None,
        before: Mapping[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Runs copies of the inputs forward and backward, into memory filled with NaN.

        Args:
            inputs: Inputs of one call with at least one token.
            grad_out: [T,H], the gradient of the output.
            fill: Contents of the workspaces, one of `moereg.testing.guards.FILLS`.
            names: Gradients to ask for; all if None.
            before: What the gradients are added to, where the contract says so; all are overwritten if None.

        Returns:
            The output [T,H], and the gradients by name.

        Raises:
            AssertionError: The class wrote outside of its memory, or to what it may only read.
        """
        call = _Call(self, inputs, grad_out, fill, self.names if names is None else names, before)
        call.forward()
        call.memory.check()
        call.memory.freeze()  # Gradients have a memory of their own.
        call.backward()
        for memory in (call.memory, call.written, self._memory, self._scratch):
            memory.check()
        return call.out, call.grads

    def check(self, inputs: Inputs, grad_out: torch.Tensor, num_calls: int = 2) -> None:
        """Runs a call and compares it with the reference, and its bits with those of calls at other addresses.

        Raises:
            AssertionError: Wrong numbers, or as `run` does.
        """
        truth = self.reference(inputs, grad_out)
        problem = self.case.problem
        out, found = self.run(inputs, grad_out)
        forward = relative_error(out, reference_experts(problem, self.weights, *inputs.call, self.expert_map))
        bound = layer_tolerance(problem, len(out), self.case.computes)
        assert forward <= bound, f"the forward pass of training: error {forward:.2e}, bound {bound:.0e}"
        self.check_close(inputs, grad_out, found, truth)
        for _ in range(num_calls - 1):
            again = self.run(inputs, grad_out, "huge")[1]
            differing = [name for name in found if not same_bits(found[name], again[name])]
            assert not differing, f"equal inputs gave other bits in gradients of {', '.join(differing)}"

    def check_close(
        self, inputs: Inputs, grad_out: torch.Tensor, found: Mapping[str, torch.Tensor], truth: ReferenceGradients
    ) -> None:
        """Raises AssertionError if an error exceeds its bound, naming usual mistakes that explain it."""
        _check_close(found, truth, self.weights, inputs, grad_out, self.expert_map)


def _check_close(
    found: Mapping[str, torch.Tensor],
    truth: ReferenceGradients,
    weights: ExpertWeights,
    inputs: Inputs,
    grad_out: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    wrong = [each for each in truth.compare(found) if not each.is_within]
    if not wrong:
        return

    def run(weights: ExpertWeights, inputs: Inputs) -> dict[str, torch.Tensor]:
        return reference_gradients(truth.problem, weights, *inputs.call, grad_out, expert_map).tensors

    worst = max(wrong, key=lambda each: math.inf if math.isnan(each.error) else each.error / (each.bound or 1))
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    causes: tuple[str, ...] = ()
    with contextlib.suppress(Exception):  # Such as a lack of memory: what was found above still holds.
        right = {name: truth.tensors[name] for name in found}
        causes = tuple(_causes(found, truth, BackwardPass(run, weights, inputs, truth.local_ids, right)))
    text = f"gradient of {worst.name}{others}: error {worst.error:.2e}, bound {worst.bound:.0e}"
    raise AssertionError(text + worded(causes))


def _causes(found: Mapping[str, torch.Tensor], truth: ReferenceGradients, backward: BackwardPass) -> Iterator[str]:
    """Names the faults that give the gradients that were found."""
    for name, wrong in plant_gradient_faults(backward):
        is_alike = all(torch.equal(found[key].isnan(), tensor.isnan()) for key, tensor in wrong.items())
        mistaken = truth.with_tensors(_without_nan(wrong))
        if is_alike and all(each.is_within for each in mistaken.compare(_without_nan(found))):
            yield name


def _without_nan(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.nan_to_num() for name, tensor in tensors.items()}


class _Call:
    """One forward and backward pass, with all of their tensors.

    Attributes:
        inputs, grad_out: Copies, frozen in `memory`.
        out: [T,H].
        grads: The gradients by name, in `written`.
    """

    def __init__(
        self,
        training: GuardedTraining,
        inputs: Inputs,
        grad_out: torch.Tensor,
        fill: str,
        names: Collection[str],
        before: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self._training, self._fill = training, fill
        self.memory, self.written = GuardedMemory(grad_out.device), GuardedMemory(grad_out.device)
        self.inputs = Inputs(
            *(self.memory.copy(each.name, getattr(inputs, each.name)) for each in dataclasses.fields(inputs))
        )
        self.grad_out = self.memory.copy("grad_out", grad_out)
        self.memory.freeze()
        self.out = self.memory.allocate("out", tuple(grad_out.shape), grad_out.dtype)
        shapes = training.experts.saved_shapes(problem=training.case.problem, num_tokens=len(grad_out))
        self.saved = {
            name: self.memory.allocate(f"saved {name}", tuple(shape), dtype) for name, (shape, dtype) in shapes.items()
        }
        like = {**training.weights.tensors(), **vars(self.inputs)}
        self.grads = {
            name: self.written.copy(f"gradient of {name}", before[name])
            if before is not None and name in training.weights.tensors()
            else self.written.allocate(f"gradient of {name}", tuple(like[name].shape), like[name].dtype)
            for name in names
        }
        self._accumulates = before is not None

    def forward(self) -> None:
        """Overwrites `out` and what is saved."""
        experts = self._training.experts
        with plain_torch():
            experts.apply_saving(out=self.out, saved=self.saved, **self._common(experts.workspace_shapes))

    def backward(self) -> None:
        """Writes the gradients."""
        experts = self._training.experts
        with plain_torch():
            experts.apply_backward(
                grads=Gradients(**self.grads, accumulate=self._accumulates),
                grad_out=self.grad_out,
                saved=self.saved,
                **self._common(experts.backward_workspace_shapes),
            )

    def _common(self, workspace_shapes: Callable[..., tuple[tuple[int, ...], ...]]) -> dict[str, Any]:
        training, problem = self._training, self._training.case.problem
        shapes = workspace_shapes(problem=problem, num_tokens=len(self.grad_out))
        workspaces = training.workspaces
        workspaces.fill = self._fill
        workspace13, workspace2 = workspaces.take(shapes, problem.torch_dtype, self.grad_out.device)
        inputs = ExpertInputs(*self.inputs.call, expert_map=training.expert_map)
        scratch = {"workspace13": workspace13, "workspace2": workspace2}
        return {"inputs": inputs, "weights": training.permuted, **scratch}


def check_gradients(case: Case, is_first: bool = False) -> None:
    """A case's gradients agree with autograd of the reference, under guard bands, with equal bits each time.

    Args:
        case: The case to run, whose problem has gradients.
        is_first: Whether it is the first of its class, which gets more calls.
    """
    training = GuardedTraining(case, make_weights(case.problem, case.device))
    calls = [call for call in calls_of(case, True) if call[0]] if is_first else _FEWER_CALLS[:2]
    if case.is_imitated:
        calls = _FEWER_CALLS if is_first else _FEWER_CALLS[:1]
    for num_tokens, routing in calls:
        inputs = make_inputs(case.problem, num_tokens, routing, case.device, seed=num_tokens)
        with _prefixed(f"T={num_tokens} {routing}"):
            training.check(inputs, make_grad_out(inputs), 2 if is_first or not case.is_imitated else 1)
    if is_first:
        _check_parts(training)
        _check_neighbors(training)


def check_drawn_gradients(case: Case, layer: DrawnLayer) -> None:
    """The gradients of a drawn layer's call agree with the reference, if the class computes them."""
    trained = with_gradients(case)
    if trained is not None and layer.num_tokens:
        inputs = make_inputs(case.problem, layer.num_tokens, layer.routing, case.device, layer.seed)
        weights = make_weights(case.problem, case.device, layer.seed)
        GuardedTraining(trained, weights, layer.ep_rank, layer.form).check(inputs, make_grad_out(inputs))


def check_gradient_faults(cell: BackendCell) -> None:
    """Faults of a backward pass give errors well above the bounds."""
    case = max(gradient_cases(cell)[:2], key=lambda case: case.problem.has_bias)
    training = GuardedTraining(case, make_weights(case.problem, case.device))
    # All rows go to a few experts, so that others are empty.
    inputs = make_inputs(case.problem, 5 if case.is_imitated else 17, "one_expert", case.device)
    grad_out = make_grad_out(inputs)
    truth = training.reference(inputs, grad_out)

    def run(weights: ExpertWeights, inputs: Inputs) -> dict[str, torch.Tensor]:
        return GuardedTraining(case, weights).run(inputs, grad_out)[1]

    right = training.run(inputs, grad_out)[1]
    for fault, wrong in plant_gradient_faults(BackwardPass(run, training.weights, inputs, truth.local_ids, right)):
        # NaN is no number to compare, and is seen.
        assert any(not each.error <= 10 * each.bound for each in truth.compare(wrong)), (
            f"{fault}, planted by this check: no gradient has an error above 10 bounds"
        )


def check_training(cell: BackendCell) -> None:
    """A layer backpropagates into its inputs and weights, without tokens too, and follows a step that wrote these."""
    case = gradient_cases(cell)[0]
    problem, expert_map = case.problem, make_expert_map(case.problem, case.device)
    tensors = {
        name: torch.nn.Parameter(tensor, requires_grad="weights" in problem.gradients)
        for name, tensor in make_weights(problem, case.device).tensors().items()
    }
    weights = ExpertWeights(**tensors)  # type: ignore[arg-type]
    kernel = make_unchecked_kernel(problem, weights, selection=select_cell(case), expert_map=expert_map)
    for call, num_tokens, seed in (("at first", 17, 0), ("without tokens", 0, 0), ("after a step", 17, 7)):
        with torch.no_grad():
            for name, tensor in make_weights(problem, case.device, seed).tensors().items():
                tensors[name].copy_(tensor)
        inputs = make_inputs(problem, num_tokens, "uniform", case.device)
        grad_out = make_grad_out(inputs)
        truth = reference_gradients(problem, weights, *inputs.call, grad_out, expert_map)
        leaves = {**vars(inputs), **tensors}
        for name in ("hidden_states", "topk_weights"):
            leaves[name].requires_grad_(name in problem.gradients)
        followed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        with torch.enable_grad():
            found = torch.autograd.grad(kernel(*inputs.call), list(followed.values()), grad_out)
        with _prefixed(call):
            _check_close(dict(zip(followed, found, strict=True)), truth, weights, inputs, grad_out, expert_map)


def check_gradient_launches(cell: BackendCell) -> None:
    """Neither pass waits for the device, and a replayed graph of both reads its inputs anew; needs a CUDA device."""
    case = gradient_cases(cell)[0]
    training = GuardedTraining(case, make_weights(case.problem, case.device))
    inputs = make_inputs(case.problem, 63, "uniform", case.device)
    call = _Call(training, inputs, make_grad_out(inputs), "stale", training.names, None)

    def both() -> None:
        call.forward()
        call.backward()

    both()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if not cell.facts.graph_capture:
        return
    graph = torch.cuda.CUDAGraph()
    with collecting_later(), torch.cuda.graph(graph):
        both()
    for seed in (3, 4):
        fresh = make_inputs(case.problem, 63, "skewed", case.device, seed)
        grad_out = make_grad_out(fresh, seed)
        for tensor, other in zip((*call.inputs.call, call.grad_out), (*fresh.call, grad_out), strict=True):
            tensor.copy_(other)
        for tensor in call.grads.values():
            tensor.fill_(torch.nan)
        graph.replay()
        expected = training.run(fresh, grad_out)[1]
        assert all(same_bits(call.grads[name], tensor) for name, tensor in expected.items()), (
            "a replayed graph gave other gradients than eager code"
        )


def _check_parts(training: GuardedTraining) -> None:
    """Each gradient can be asked for alone, and those of weights are added to what is there."""
    inputs = make_inputs(training.case.problem, 17, "skewed", training.case.device, seed=2)
    grad_out = make_grad_out(inputs)
    truth = training.reference(inputs, grad_out)
    for name in training.names:
        with _prefixed(f"asked for {name} alone"):
            training.check_close(inputs, grad_out, training.run(inputs, grad_out, names=(name,))[1], truth)
    found = training.run(inputs, grad_out)[1]
    added = training.run(inputs, grad_out, before=found)[1]
    halves = {name: tensor / 2 if name in training.weights.tensors() else tensor for name, tensor in added.items()}
    with _prefixed("half of what is added to an equal gradient"):
        training.check_close(inputs, grad_out, halves, truth)


def _check_neighbors(training: GuardedTraining) -> None:
    """A token of NaN spoils its own rows and the gradients of its own experts alone."""
    inputs = make_inputs(training.case.problem, 17, "uniform", training.case.device, seed=3)
    grad_out = make_grad_out(inputs)
    others = inputs.clone()
    others.topk_ids[_SPOILED] = -1
    truth = training.reference(others, grad_out)
    spoiled = training.reference(inputs, grad_out).local_ids[_SPOILED]
    inputs.hidden_states[_SPOILED] = grad_out[_SPOILED] = torch.nan
    found = training.run(inputs, grad_out)[1]
    for name, tensor in found.items():
        place = spoiled[spoiled >= 0] if name in training.weights.tensors() else _SPOILED
        tensor[place] = truth.tensors[name][place].to(tensor.dtype)
    with _prefixed(f"token {_SPOILED} of 17 is NaN, and another token or expert is wrong"):
        training.check_close(others, grad_out, found, truth)


@contextlib.contextmanager
def _prefixed(text: str) -> Iterator[None]:
    """Says in an assertion's message what was run."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{text}: {error}") from error

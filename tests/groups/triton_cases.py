"""What ranks of a gloo group do with Triton's kernels, interpreted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import moereg
from moereg.kernels.rows import batches, exchanged
from moereg.layer import make_kernel
from moereg.prepare_finalize import AllToAll, GroupFacts, GroupPrepareFinalize
from moereg.prepare_finalize.wire import CodedWire, PlainWire
from moereg.reference import relative_error
from moereg.testing.interpreter import patch_interpreter
from tests.groups.cases import numbers_of, numbers_of_tokens, problem_of, share_of, tokens_of


def codes_reach_triton(rank: int, size: int) -> dict[str, Any]:
    """The kernels are given codes, and give the bits that they give for tokens in 16 bits."""
    patch_interpreter()
    equal, worst = [], 0.0
    for way in ("all_to_all", "all_gather"):
        problem = problem_of(
            num_experts=4, top_k=2, dtype="bfloat16", quant="fp8_block128", intermediate_size=128, max_num_tokens=4
        )
        weights = numbers_of(problem)
        movement = moereg.select_movement(problem, GroupFacts(size, "gloo", "cpu"), "cpu", require=way)
        winner = movement.winner
        assert winner is not None
        selection = moereg.select_backend(movement.experts_problem(winner), "cuda:sm90", require="triton")
        own = share_of(weights, rank, size)
        kernel = make_kernel(problem, own, selection, group=dist.group.WORLD, prepare_finalize=way)
        moves = kernel.prepare_finalize
        assert isinstance(moves, GroupPrepareFinalize)
        given: list[torch.Tensor | None] = []
        apply = kernel.experts.apply

        def seen(inputs: Any, apply: Any = apply, given: Any = given, **rest: Any) -> None:
            given.append(inputs.hidden_scale)
            apply(inputs=inputs, **rest)

        kernel.experts.apply = seen  # type: ignore[method-assign]
        inputs = tokens_of(problem, rank, 4)
        found = [kernel(*inputs)]
        # Behind the codes the same tokens, restored, and those in 16 bits.
        for wire in (CodedWire(problem, problem.quant), PlainWire(problem)):
            moves.wire = wire
            found.append(kernel(*inputs))
        assert [scales is None for scales in given] == [False, True, True]
        equal.append(torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]))
        expected = make_kernel(problem, weights)(*inputs)
        worst = max(worst, relative_error(found[0], expected))
    return {"equal": equal, "error": worst}


class Operators(TorchDispatchMode):
    """Counts torch's operators, those of torch.distributed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def routes_in_triton(rank: int, size: int) -> dict[str, Any]:
    """What Triton's kernels send and lay out gives the bits of torch's, and ranks of both kinds understand each other.

    Also how much of it there is: launches and operators of torch in a call, without the experts.
    """
    patch_interpreter()
    launched: list[str] = []

    def count(module: Any, name: str, title: str | None) -> None:
        launches = getattr(module, name)

        def counted(*arguments: Any) -> None:
            launched.append(title or arguments[0])
            # A GPU replays what was recorded, with none of the interpreter's operators.
            with _disable_current_modes():
                launches(*arguments)

        setattr(module, name, counted)

    count(exchanged, "launch_remembered", None)
    count(batches, "_recorded", "sum_batches")
    found: dict[str, Any] = {}
    layers: dict[str, dict[str, Any]] = {
        "plain": {},
        "batched": {"activation_format": "batched"},
        "on_input": {"top_k": 1, "apply_router_weight_on_input": True},
        "fp8": {"dtype": "bfloat16", "quant": "fp8_block128", "intermediate_size": 128},
    }
    for name, changes in layers.items():
        problem = problem_of(**changes)
        weights = numbers_of(problem)
        kernel = make_kernel(
            problem, share_of(weights, rank, size), group=dist.group.WORLD, prepare_finalize="all_to_all"
        )
        moves = kernel.prepare_finalize
        assert isinstance(moves, AllToAll)
        assert not moves.in_triton
        worst = 0.0
        for num_tokens in numbers_of_tokens(rank, size):
            inputs = tokens_of(problem, rank, num_tokens)
            results = []
            for in_triton in (False, True, rank == 0):
                moves.in_triton = in_triton
                results.append(kernel(*inputs))
            worst = max(worst, *(float((result - results[0]).abs().max()) for result in results if len(result)), 0.0)
        found[name] = worst
        if name != "plain":
            continue
        moves.in_triton = True
        tokens = tokens_of(problem, rank, 5)
        moves.prepare(*tokens, moves.experts_problem, kernel.expert_map)
        launched.clear()
        with Operators() as operators:
            prepared = moves.prepare(*tokens, moves.experts_problem, kernel.expert_map)
            rows = prepared.inputs.hidden_states
            moves.finalize(torch.empty_like(tokens[0]), rows, prepared, moves.experts_problem)
        names = [each for each in operators.names if not each.startswith("c10d.")]
        # What only says how memory is to be read takes the host less than what computes.
        views = ("view", "unbind", "slice", "unsqueeze", "detach", "empty")
        found["launches"] = list(launched)
        found["views"] = sum(any(word in each for word in views) for each in names)
        found["computing"] = [each for each in names if not any(word in each for word in views)]
        found["collectives"] = len(operators.names) - len(names)
    return found

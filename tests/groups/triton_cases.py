"""What ranks of a gloo group do with Triton's kernels, interpreted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import moereg
from moereg.layer import make_kernel
from moereg.prepare_finalize import GroupFacts, GroupPrepareFinalize
from moereg.prepare_finalize.wire import CodedWire, PlainWire
from moereg.reference import relative_error
from moereg.testing.interpreter import patch_interpreter
from tests.groups.cases import numbers_of, problem_of, share_of, tokens_of


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

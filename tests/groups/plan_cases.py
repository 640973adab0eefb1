"""Layers over a group whose plan has several ranges; cases as in `cases`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

import moereg
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.platforms import platform_of
from moereg.prepare_finalize import Group
from moereg.selection.dispatcher import select_dispatcher
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from tests.groups.cases import CPU, MOST_TOKENS, numbers_of, numbers_of_tokens, problem_of, share_of, tokens_of
from tests.layer.small_plans import Ranges, experts_of, plan_of
from tests.support.fakes import BatchedExperts, FakeExperts, PerRouteExperts


def selection_for(problem: MoEProblem, dispatcher: str, ranges: Ranges) -> Selection:
    dispatcher = select_dispatcher(problem, Group(dist.group.WORLD, CPU).facts, platform_of(CPU), require=dispatcher)
    assert dispatcher.winner is not None
    return plan_of(dispatcher.experts_problem(dispatcher.winner), ranges, platform_of(CPU))


def by_tokens(rank: int, size: int, dispatcher: str, most: int = 8, **changes: Any) -> dict[str, Any]:
    """Up to so many rows that arrive, and more."""
    problem = problem_of(**changes)
    weights = numbers_of(problem)
    base = BatchedExperts if problem.activation_format == "batched" else FakeExperts
    order: list[str] = []

    def noted(name: str) -> Any:
        kind = experts_of(1.0, base)
        kind.calls = _Noting(order, name)
        return kind

    few, many = noted("few"), noted("many")
    selection = selection_for(problem, dispatcher, [(most, few), (None, many)])
    parts: dict[str, Any] = {"group": dist.group.WORLD, "prepare_finalize": dispatcher, "selection": selection}
    kernel = make_kernel(problem, share_of(weights, rank, size), **parts)
    one = make_kernel(problem_of(), weights)
    equal = True
    for num_tokens in (2, *numbers_of_tokens(rank, size)):
        inputs = tokens_of(problem, rank, num_tokens)
        equal = equal and torch.equal(kernel(*inputs), one(*inputs))
        order.append("|")
    assert sum(kernel.token_histogram().values()) == len(few.calls) + len(many.calls)
    return {"equal": equal, "few": few.calls, "many": many.calls, "order": "".join(order).split("|")}


class _Noting(list[int]):
    """Numbers of tokens of a class's calls, each of which is also noted among all classes' calls."""

    def __init__(self, order: list[str], name: str) -> None:
        super().__init__()
        self._order, self._name = order, name

    def append(self, count: int) -> None:
        super().append(count)
        self._order.append(self._name)


all_to_all = functools.partial(by_tokens, dispatcher="all_to_all")
all_to_all_batched = functools.partial(by_tokens, dispatcher="all_to_all", activation_format="batched")
# There is room for twice `MOST_TOKENS`.
all_gather = functools.partial(by_tokens, dispatcher="all_gather", most=2 * MOST_TOKENS)
all_gather_batched = functools.partial(
    by_tokens, dispatcher="all_gather", most=2 * MOST_TOKENS, activation_format="batched"
)


def float16_rows_of_two_kinds(rank: int, size: int) -> dict[str, Any]:
    """Few rows come back in fp32 and many in float16, where a class does so; some ranks have none."""
    problem = problem_of(dtype="float16")
    weights = make_weights(problem, CPU)
    few, many = experts_of(1.0, PerRouteExperts, wide_output=True), experts_of(1.0)
    selection = selection_for(problem, "all_to_all", [(8, few), (None, many)])
    parts: dict[str, Any] = {"group": dist.group.WORLD, "prepare_finalize": "all_to_all", "selection": selection}
    kernel = make_kernel(problem, share_of(weights, rank, size), **parts)
    errors = []
    for num_tokens in (1, MOST_TOKENS):
        hidden_states, topk_weights, topk_ids = tokens_of(problem, rank, num_tokens)
        # The first token's routes go to the last rank, all others to the first one.
        topk_ids = torch.tensor([[6, 7, 8], *[[0, 1, 2]] * (num_tokens - 1)], dtype=torch.int32)
        if rank and num_tokens == 1:
            topk_ids = topk_ids - 6
        truth = reference_experts(problem, weights, hidden_states, topk_weights, topk_ids, None)
        errors.append(relative_error(kernel(hidden_states, topk_weights, topk_ids), truth))
    return {"errors": errors, "few": few.calls, "many": many.calls}


def other_plans(rank: int, size: int) -> str:
    """Ranks whose first range ends elsewhere."""
    problem = problem_of()
    selection = selection_for(problem, "all_to_all", [(4 + 4 * rank, experts_of()), (None, experts_of())])
    parts: dict[str, Any] = {"group": dist.group.WORLD, "prepare_finalize": "all_to_all", "selection": selection}
    try:
        make_kernel(problem, share_of(numbers_of(problem), rank, size), **parts)
    except moereg.MoeregError as error:
        return f"{type(error).__name__}: {error}"
    return "made"

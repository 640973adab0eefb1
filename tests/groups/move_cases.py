"""What ranks of a group do in tests of experts that move; run by `tests/groups/ranks.py`."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moereg
from moereg.layer import move_experts as expert_moves
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.prepare_finalize.eplb import count_routes
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights
from tests.groups.cases import CPU, experts_of, numbers_of, problem_of, tokens_of


def ring(num_experts: int, size: int, shift: int, extra: int) -> moereg.ExpertPlacement:
    """Slices that have moved on by some experts, and the next experts as replicas."""
    share = num_experts // size
    starts = [rank * share + shift for rank in range(size)]
    ranks = [tuple((start + place) % num_experts for place in range(share + extra)) for start in starts]
    return moereg.ExpertPlacement(num_experts, tuple(ranks))


def moved(rank: int, size: int, dispatcher: str, backend: str | None = None, **changes: Any) -> dict[str, Any]:
    """Experts that move while calls go on, against the same layer on one rank."""
    problem = problem_of(**changes)
    weights = make_weights(problem, CPU)
    one = make_kernel(problem, weights, moereg.select_backend(problem, "cpu", require=backend))
    before = ring(problem.num_experts, size, 0, 1)
    own = experts_of(weights, before.experts_of_rank[rank])
    given = {name: tensor.clone() for name, tensor in own.tensors().items()}
    kernel = make_kernel(
        problem, own, group=dist.group.WORLD, prepare_finalize=dispatcher, expert_placement=before, own_weights=True
    )
    addresses = _addresses(kernel)
    worst, numbers = 0.0, []
    order = tuple(experts[::-1] for experts in ring(problem.num_experts, size, 5, 1).experts_of_rank)
    others = [ring(problem.num_experts, size, 1, 1), moereg.ExpertPlacement(problem.num_experts, order), before, before]
    for placement in [before, *others]:
        if placement is not before or numbers:
            numbers.append(kernel.move_experts(placement))
        assert kernel.expert_placement == placement
        for num_tokens in (5 + rank, 0 if rank else 8):
            inputs = tokens_of(problem, rank, num_tokens)
            found, expected = kernel(*inputs), one(*inputs)
            assert not found.isnan().any()
            if num_tokens:
                worst = max(worst, float((found - expected).double().norm() / expected.double().norm()))
        equal = _is_that_of(kernel, weights, placement.experts_of_rank[rank], problem)
        assert equal, placement
    return {
        "error": worst,
        "moved": numbers,
        "given": all(torch.equal(_bytes(given[name]), _bytes(tensor)) for name, tensor in own.tensors().items()),
        "in_place": addresses == _addresses(kernel),
        "backend": kernel.selection.backend,
    }


def _addresses(kernel: MoEKernel) -> list[int]:
    return [tensor.data_ptr() for tensor in kernel.weights.flat() if tensor.layout == torch.strided]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _is_that_of(kernel: MoEKernel, weights: ExpertWeights, experts: tuple[int, ...], problem: MoEProblem) -> bool:
    """Whether the weights are those of a kernel that was made with these experts."""
    held = experts_of(weights, experts)
    alone = dataclasses.replace(kernel.selection, problem=kernel.selection.problem)
    fresh = moereg.layer.backend_calls.permute(alone, kernel.experts, held)
    pairs = zip(kernel.weights.flat(), fresh.flat(), strict=True)
    dense = ((mine.to_dense(), theirs.to_dense()) if mine.is_mkldnn else (mine, theirs) for mine, theirs in pairs)
    return all(torch.equal(_bytes(mine), _bytes(theirs)) for mine, theirs in dense)


move_all_to_all = functools.partial(moved, dispatcher="all_to_all")
move_all_gather = functools.partial(moved, dispatcher="all_gather", activation_format="batched")
move_bf16 = functools.partial(moved, dispatcher="all_to_all", dtype="bfloat16")
move_fp8 = functools.partial(
    moved, dispatcher="all_to_all", dtype="bfloat16", quant="fp8_block128", intermediate_size=128
)
move_int4 = functools.partial(moved, dispatcher="all_gather", quant="int4_w4a16_g32", dtype="bfloat16")
move_with_bias = functools.partial(moved, dispatcher="all_gather", has_bias=True, activation="swigluoai")


def canonical(rank: int, size: int) -> dict[str, Any]:
    """As if no rank could copy another one's rows."""
    rows = expert_moves._copied_as
    expert_moves._copied_as = lambda weights: None
    try:
        return moved(rank, size, "all_to_all", quant="int8_w8a16", dtype="bfloat16")
    finally:
        expert_moves._copied_as = rows


def _kernel(rank: int, size: int, **arguments: Any) -> tuple[MoEKernel, ExpertWeights, moereg.ExpertPlacement]:
    problem = problem_of()
    weights = numbers_of(problem)
    before = ring(problem.num_experts, size, 0, 1)
    own = experts_of(weights, before.experts_of_rank[rank])
    kernel = make_kernel(problem, own, group=dist.group.WORLD, expert_placement=before, own_weights=True, **arguments)
    return kernel, weights, before


def _error_of(move: Any) -> str:
    try:
        move()
    except moereg.MoeregError as error:
        return f"{type(error).__name__}: {error}"
    return "moved"


def refusals(rank: int, size: int) -> dict[str, str]:
    kernel, _, before = _kernel(rank, size)
    texts = {
        "differ": _error_of(lambda: kernel.move_experts(ring(12, size, 1 + rank, 1))),
        "one alone": _error_of(lambda: kernel.move_experts(ring(12, size, 1, 1) if rank else "elsewhere")),
        "sizes": _error_of(lambda: kernel.move_experts(ring(12, size, 1, 2))),
        "layer": _error_of(lambda: kernel.move_experts(moereg.ExpertPlacement.contiguous(6, size))),
    }
    assert kernel.expert_placement == before
    kernel.held.borrowed = frozenset({"w2"}) if rank == 0 else frozenset()
    texts["borrowed"] = _error_of(lambda: kernel.move_experts(ring(12, size, 1, 1)))
    return texts


def copies_move_alone(rank: int, size: int) -> bool:
    kernel, weights, before = _kernel(rank, size)
    other = copy.deepcopy(kernel)
    kernel.move_experts(ring(12, size, 3, 1))
    inputs = tokens_of(kernel.problem, rank, 6)
    assert other.expert_placement == before
    assert not torch.equal(kernel.expert_map, other.expert_map)
    one = make_kernel(problem_of(), weights)
    return all(torch.equal(each(*inputs), one(*inputs)) for each in (kernel, other))


def a_call_beside_a_move(rank: int, size: int) -> str:
    """Another thread calls when experts have travelled, and before they are written."""
    kernel, _, _ = _kernel(rank, size)
    inputs, texts = tokens_of(kernel.problem, rank, 6), list[str]()

    exchange = expert_moves.exchange_experts

    def exchange_and_call(*arguments: Any) -> Any:
        arrived = exchange(*arguments)
        thread = threading.Thread(target=lambda: texts.append(_error_of(lambda: kernel(*inputs))))
        thread.start()
        thread.join()
        return arrived

    with mock.patch.object(expert_moves, "exchange_experts", exchange_and_call):
        kernel.move_experts(ring(12, size, 3, 1))
    return texts[0]


def balanced(rank: int, size: int) -> list[float]:
    """The busiest rank's share of the rows, before and after experts moved by counted loads."""
    kernel, _, before = _kernel(rank, size, prepare_finalize="all_to_all")
    hidden_states, topk_weights, _ = tokens_of(kernel.problem, rank, 8)
    # Most tokens want the experts of rank 0.
    topk_ids = torch.tensor([[0, 1, 2 + token % 10] for token in range(8)], dtype=torch.int32)
    rows = []
    for _ in range(2):
        prepared = kernel.prepare_finalize.prepare(
            hidden_states, topk_weights, topk_ids, kernel.selection.problem, kernel.expert_map
        )
        kernel.prepare_finalize.finalize(
            torch.empty_like(hidden_states), prepared.inputs.hidden_states, prepared, kernel.selection.problem
        )
        counts = torch.zeros(size, dtype=torch.int64)
        counts[rank] = prepared.num_tokens
        dist.all_reduce(counts)
        rows.append(float(counts.max() * size / counts.sum()))
        loads = count_routes(topk_ids, 12)
        dist.all_reduce(loads)
        kernel.move_experts(moereg.balance_experts(loads, size, before.num_replicas, before=kernel.expert_placement))
    return rows

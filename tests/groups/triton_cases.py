"""What ranks of a gloo group do with Triton's kernels, interpreted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import moereg
from moereg.kernels.quantized import rows_moved
from moereg.kernels.rows import all_gather, all_to_all, batches, low_latency
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import relative_error
from moereg.prepare_finalize import BatchedPrepareFinalize, Group, GroupFacts, GroupPrepareFinalize
from moereg.prepare_finalize.wire import CodedWire, PlainWire
from moereg.testing.interpreter import patch_interpreter
from tests.groups.cases import experts_of, numbers_of, problem_of, share_of, tokens_of
from tests.groups.gpu_cases import seen_by_experts


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


def _name_of(kernel: Any) -> str:
    name: str = kernel.__name__
    return name.strip("_").removesuffix("_kernel")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way with a layer whose tokens it moves."""

    name: str
    fewer: bool = False
    """Calls bring fewer tokens than there is room for."""
    replicas: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


CODED: Final = {"dtype": "bfloat16", "intermediate_size": 128, "top_k": 2}
WAYS: Final = {
    "all_gather": Way("all_gather"),
    "all_gather_fewer": Way("all_gather", fewer=True),
    "all_gather_replicas": Way("all_gather", replicas=True),
    "all_gather_deterministic": Way("all_gather", changes={"deterministic": True}),
    "all_gather_batched": Way("all_gather", changes={"activation_format": "batched"}),
    "all_gather_fp8": Way("all_gather", fewer=True, changes={**CODED, "quant": "fp8_block128", "hidden_size": 200}),
    "all_gather_mxfp8": Way("all_gather", changes={**CODED, "quant": "mxfp8"}),
    "low_latency": Way("low_latency"),
    "low_latency_replicas": Way("low_latency", fewer=True, replicas=True),
    "low_latency_on_input": Way("low_latency", changes={"top_k": 1, "apply_router_weight_on_input": True}),
    "low_latency_fp8": Way("low_latency", changes={**CODED, "quant": "fp8_block128", "hidden_size": 200}),
    "low_latency_mxfp8": Way("low_latency", fewer=True, changes={**CODED, "quant": "mxfp8"}),
    # CPUs that multiply int8 slowly would rather leave tokens in 16 bits.
    "low_latency_int8": Way(
        "low_latency", changes={**CODED, "quant": "int8_w8a8", "exact_activations": True, "hidden_size": 72}
    ),
    "all_to_all": Way("all_to_all"),
    "all_to_all_batched": Way("all_to_all", fewer=True, changes={"activation_format": "batched"}),
    "all_to_all_on_input": Way("all_to_all", changes={"top_k": 1, "apply_router_weight_on_input": True}),
    "all_to_all_fp8": Way("all_to_all", fewer=True, changes={**CODED, "quant": "fp8_block128"}),
    "all_to_all_sums": Way("all_to_all_sums", fewer=True),
    "all_to_all_sums_fp8": Way("all_to_all_sums", changes={**CODED, "quant": "fp8_block128"}),
}
"""What ranks do with the tokens of a call, in torch and in Triton."""

VIEWS: Final = frozenset(
    (
        *("view", "slice", "split", "split_with_sizes", "unsqueeze", "_unsafe_view", "select", "empty", "new_empty"),
        *("empty_like", "detach", "alias", "as_strided", "t", "transpose", "expand", "reshape", "empty_strided"),
        "unbind",
    )
)
"""Operators that launch nothing."""


class _Operators(TorchDispatchMode):
    """Notes operators that launch something on a GPU, or wait for it."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def noted(seen: list[str]) -> Iterator[None]:
    """Notes what movement launches on a GPU: kernels by name, exchanges, and torch's operators."""

    def noting(run: Any, name: str | None) -> Any:
        def run_and_note(*given: Any, **options: Any) -> None:
            seen.append(name or (given[0] if isinstance(given[0], str) else _name_of(given[0])))
            with _disable_current_modes():
                run(*given, **options)

        return run_and_note

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(batches, "launch", noting(batches.launch, None)))
        for module in (low_latency, all_gather, rows_moved, batches, all_to_all):
            stack.enter_context(mock.patch.object(module, "launch_again", noting(module.launch_again, None)))
        launch = noting(all_to_all.launch_remembered, None)
        stack.enter_context(mock.patch.object(all_to_all, "launch_remembered", launch))
        for exchange in ("all_gather", "all_gather_columns", "all_to_all", "reduce_scatter"):
            method = noting(getattr(Group, exchange), exchange)
            stack.enter_context(mock.patch.object(Group, exchange, method))
        stack.enter_context(_Operators(seen))
        yield


def moved(rank: int, size: int, way: Way) -> dict[str, Any]:
    """A way in torch, in Triton and in both by rank, from the same tokens."""
    patch_interpreter()
    problem = problem_of(**{"num_experts": 6, "hidden_size": 72, "max_num_tokens": 3, **way.changes})
    weights = numbers_of(problem)
    order = [5, 2, 0, 4, 1, 3]
    held = [order[each::size] for each in range(size)]
    if way.replicas:
        held[0].append(held[1][0])
    placement = moereg.ExpertPlacement(6, tuple(map(tuple, held)))
    kernel = make_kernel(
        problem,
        experts_of(weights, placement.experts_of_rank[rank]) if way.replicas else share_of(weights, rank, size),
        group=dist.group.WORLD,
        prepare_finalize=way.name,
        expert_placement=placement if way.replicas else None,
    )
    moves = kernel.prepare_finalize
    assert isinstance(moves, GroupPrepareFinalize)
    equal = True
    inputs = tokens_of(problem, rank, 3)
    for num_tokens in (1 + rank, 0) if way.fewer else (3,):
        inputs = tuple(tensor[:num_tokens] for tensor in tokens_of(problem, rank, 3))
        found = []
        for in_triton in (False, rank == 0, True):
            moves.wire.in_triton = in_triton
            out = kernel(*inputs)
            prepared = moves.prepare(*inputs, moves.experts_problem, kernel.expert_map)
            moves.finalize(torch.empty_like(out), kernel.run_experts(prepared), prepared, moves.experts_problem)
            found.append((out, *seen_by_experts(prepared.inputs)))
        equal = equal and all(torch.equal(mine[0], each) for mine in zip(*found, strict=True) for each in mine)
    seen: list[str] = []
    if way.fewer:
        inputs = tuple(tensor[:2] for tensor in tokens_of(problem, rank, 3))
        kernel(*inputs)  # What grows with the number of rows has grown.
    if moves.activation_format == "batched":
        moves.local = BatchedPrepareFinalize(in_triton=True)
    out = torch.empty_like(inputs[0])
    with noted(seen):
        prepared = moves.prepare(*inputs, moves.experts_problem, kernel.expert_map)
    seen.append("experts")
    expert_out = kernel.run_experts(prepared)
    with noted(seen):
        moves.finalize(out, expert_out, prepared, moves.experts_problem)
    return {"equal": equal, "launches": seen, "wire": moves.wire.name}


def ways_in_triton(rank: int, size: int) -> dict[str, Any]:
    return {name: moved(rank, size, way) for name, way in WAYS.items()}

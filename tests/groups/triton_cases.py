"""What ranks of a gloo group do with Triton's kernels, interpreted."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist

import moereg
from moereg.kernels.quantized import rows_moved
from moereg.kernels.rows import all_gather, all_to_all, batches
from moereg.layer.factory import make_kernel
from moereg.prepare_finalize import BatchedPrepareFinalize, Group, GroupPrepareFinalize
from moereg.testing.interpreter import patch_interpreter
from tests.groups.cases import experts_of, numbers_of, problem_of, share_of, tokens_of
from tests.groups.gpu_cases import seen_by_experts


def _name_of(kernel: Any) -> str:
    name: str = kernel.__name__
    return name.strip("_").removesuffix("_kernel")


@dataclasses.dataclass(frozen=True)
class Dispatcher:
    """A dispatcher with a layer whose tokens it moves.

    What it launches on a GPU around its experts: kernels and exchanges, in order.
    """

    name: str
    launches: tuple[str, ...]
    fewer: bool = False
    """Calls bring fewer tokens than there is room for."""
    replicas: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)


CODED: Final = {"dtype": "bfloat16", "intermediate_size": 128, "top_k": 2}
FP8: Final = {**CODED, "quant": "fp8_block128"}
BATCHED: Final = {"activation_format": "batched"}
ON_INPUT: Final = {"top_k": 1, "apply_router_weight_on_input": True}
# CPUs that multiply int8 slowly would rather leave tokens in 16 bits.
INT8: Final = {**CODED, "quant": "int8_w8a8", "exact_activations": True, "hidden_size": 72}
_GATHERED: Final = ("all_gather_columns", "experts", "reduce_scatter")
# The experts of a CPU take no codes, so that these are restored.
_RESTORED: Final = ("quantize_tokens", "all_gather_columns", "restore_tokens", "experts", "reduce_scatter")
_SENT: Final = ("place_routes", "all_to_all", "pack_tokens", "all_to_all")
_CODED: Final = ("place_routes", "all_to_all", "quantize_tokens", "pack_tokens", "all_to_all")
_HOME: Final = ("experts", "all_to_all", "reduce_sorted_rows")
_LAID_OUT: Final = ("place_tokens", "copy_rows", "experts", "reduce_sorted_rows")
_OWN: Final = ("all_gather_columns", "keep_own_routes", "experts", "reduce_scatter")
_BY_RANK: Final = ("all_gather_columns", "experts", "all_to_all", "sum_of_ranks")
DISPATCHERS: Final = {
    "all_gather": Dispatcher("all_gather", _GATHERED),
    "all_gather_fewer": Dispatcher("all_gather", ("pad_tokens", *_GATHERED), fewer=True),
    "all_gather_replicas": Dispatcher("all_gather", _OWN, replicas=True),
    "all_gather_deterministic": Dispatcher("all_gather", _BY_RANK, changes={"deterministic": True}),
    "all_gather_batched": Dispatcher(
        "all_gather", ("all_gather_columns", *_LAID_OUT, "reduce_scatter"), changes=BATCHED
    ),
    "all_gather_fp8": Dispatcher(
        "all_gather", ("pad_tokens", *_RESTORED), fewer=True, changes={**FP8, "hidden_size": 200}
    ),
    "all_gather_mxfp8": Dispatcher("all_gather", _RESTORED, changes={**CODED, "quant": "mxfp8"}),
    "all_gather_int8": Dispatcher("all_gather", _RESTORED, changes=INT8),
    "all_gather_on_input": Dispatcher("all_gather", _GATHERED, changes=ON_INPUT),
    "all_to_all": Dispatcher("all_to_all", (*_SENT, "unpack_tokens", *_HOME)),
    "all_to_all_batched": Dispatcher(
        "all_to_all",
        (*_SENT, "unpack_tokens", *_LAID_OUT, "all_to_all", "reduce_sorted_rows"),
        fewer=True,
        changes=BATCHED,
    ),
    "all_to_all_on_input": Dispatcher("all_to_all", (*_SENT, "unpack_tokens", *_HOME), changes=ON_INPUT),
    "all_to_all_fp8": Dispatcher(
        "all_to_all", (*_CODED, "unpack_tokens", "restore_tokens", *_HOME), fewer=True, changes=FP8
    ),
    "all_to_all_sums": Dispatcher("all_to_all_sums", (*_SENT, "split_rows", *_HOME), fewer=True),
    "all_to_all_sums_fp8": Dispatcher(
        "all_to_all_sums", (*_CODED, "split_rows", "restore_tokens", *_HOME), changes=FP8
    ),
}
"""What ranks do with the tokens of a call, in torch and in Triton."""


@contextlib.contextmanager
def noted(seen: list[str]) -> Iterator[None]:
    """Notes what dispatcher launches on a GPU: kernels by name, and exchanges."""

    def noting(run: Any, name: str | None) -> Any:
        def run_and_note(*given: Any, **options: Any) -> None:
            seen.append(name or (given[0] if isinstance(given[0], str) else _name_of(given[0])))
            run(*given, **options)

        return run_and_note

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(batches, "launch", noting(batches.launch, None)))
        for module in (all_gather, rows_moved, batches, all_to_all):
            stack.enter_context(mock.patch.object(module, "launch_again", noting(module.launch_again, None)))
        launch = noting(all_to_all.launch_remembered, None)
        stack.enter_context(mock.patch.object(all_to_all, "launch_remembered", launch))
        for exchange in ("all_gather", "all_gather_columns", "all_to_all", "reduce_scatter"):
            method = noting(getattr(Group, exchange), exchange)
            stack.enter_context(mock.patch.object(Group, exchange, method))
        yield


def moved(rank: int, size: int, dispatcher: Dispatcher) -> dict[str, Any]:
    """A dispatcher in torch, in Triton and in both by rank, from the same tokens."""
    patch_interpreter()
    problem = problem_of(**{"num_experts": 6, "hidden_size": 72, "max_num_tokens": 3, **dispatcher.changes})
    weights = numbers_of(problem)
    order = [5, 2, 0, 4, 1, 3]
    held = [order[each::size] for each in range(size)]
    if dispatcher.replicas:
        held[0].append(held[1][0])
    placement = moereg.ExpertPlacement(6, tuple(map(tuple, held)))
    kernel = make_kernel(
        problem,
        experts_of(weights, placement.experts_of_rank[rank]) if dispatcher.replicas else share_of(weights, rank, size),
        group=dist.group.WORLD,
        prepare_finalize=dispatcher.name,
        expert_placement=placement if dispatcher.replicas else None,
    )
    moves = kernel.prepare_finalize
    assert isinstance(moves, GroupPrepareFinalize)
    equal = True
    inputs = tokens_of(problem, rank, 3)
    for num_tokens in (1 + rank, 0) if dispatcher.fewer else (3,):
        inputs = tuple(tensor[:num_tokens] for tensor in tokens_of(problem, rank, 3))
        found = []
        for in_triton in (False, rank == 0, True):
            moves.wire.in_triton = in_triton
            out = kernel(*inputs)
            prepared = moves.prepare(*inputs, moves.experts_problem, kernel.expert_map)
            rows = kernel.ranged.run(prepared, kernel.weights)
            moves.finalize(torch.empty_like(out), rows, prepared, moves.experts_problem)
            found.append((out, *seen_by_experts(prepared.inputs)))
        equal = equal and all(torch.equal(mine[0], each) for mine in zip(*found, strict=True) for each in mine)
    seen: list[str] = []
    if dispatcher.fewer:
        inputs = tuple(tensor[:2] for tensor in tokens_of(problem, rank, 3))
        kernel(*inputs)  # What grows with the number of rows has grown.
    if moves.activation_format == "batched":
        moves.local = BatchedPrepareFinalize(in_triton=True)
    out = torch.empty_like(inputs[0])
    with noted(seen):
        prepared = moves.prepare(*inputs, moves.experts_problem, kernel.expert_map)
    seen.append("experts")
    expert_out = kernel.ranged.run(prepared, kernel.weights)
    with noted(seen):
        moves.finalize(out, expert_out, prepared, moves.experts_problem)
    return {"equal": equal, "launches": seen, "expected": dispatcher.launches, "wire": moves.wire.name}


def dispatchers_in_triton(rank: int, size: int) -> dict[str, Any]:
    return {name: moved(rank, size, dispatcher) for name, dispatcher in DISPATCHERS.items()}

"""`make_kernel`: makes a layer that is ready to run, on one rank or over a group."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from moereg.arguments import check_count, check_flag, check_instance
from moereg.dispatch import Selection, select_backend
from moereg.errors import ArgumentError
from moereg.layer import backend_calls
from moereg.layer.admission import (
    CheckResult,
    check_first_use,
    check_plan,
    mark_admitted,
    next_choice,
    unchecked_candidates,
)
from moereg.layer.checks import resolve_expert_map, winner_of
from moereg.layer.held_weights import HeldWeights
from moereg.layer.in_place import check_in_place
from moereg.layer.kernel import MoEKernel
from moereg.layer.one_expert import OneExpert
from moereg.layer.plan import DispatcherChoice, LayerArguments, plan_layer
from moereg.layer.ranges import make_ranges, only_candidate
from moereg.layer.warm_up import KERNEL_CACHE, use_shipped_kernels
from moereg.prepare_finalize import PrepareFinalize, local_prepare_finalize, resolve_prepare_finalize
from moereg.prepare_finalize.expert_placement import ExpertPlacement
from moereg.prepare_finalize.ranks_agree import agree
from moereg.runtime.graph_pools import outside_pools
from moereg.runtime.torch_state import plain_torch
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

__all__ = ["MoEKernel", "make_kernel", "make_unchecked_kernel"]


def make_kernel(
    problem: MoEProblem,
    weights: ExpertWeights,
    selection: Selection | None = None,
    prepare_finalize: DispatcherChoice = None,
    ep_rank: int = 0,
    expert_map: torch.Tensor | None = None,
    group: Any = None,
    own_weights: bool = False,
    expert_placement: ExpertPlacement | None = None,
) -> MoEKernel:
    """Permutes weights for the selected backend and returns the layer, ready to run.

    If nothing vouches for the backend on this machine, compares a few calls with the reference first. What fails is
    quarantined with one `AdmissionWarning`, and the next candidate is taken ([admission](docs/selection.md#admission)).

    Args:
        problem: The layer.
        weights: Canonical weights of this rank's experts. Never written unless `reload` is told to. A tensor that the
            backend's layout leaves unchanged is shared if it is contiguous: the kernel reads it in place and sees its
            owner's writes. Others are copied, with any strides.
        selection: From `select_backend`; made here if None. If its plan has several ranges, a call's number of tokens
            says whose experts run; they read one layout.
        prepare_finalize: The token dispatcher. With a group, a name such as `all_gather`, several names, or a selection
            from `select_dispatcher`; None takes the best one. Without a group, and for partial sums that the caller
            adds up, an object such as `StandardPrepareFinalize()`; None takes the one for the problem's format.
        ep_rank: Which slice of the experts this rank holds, if placement is `contiguous`.
        expert_map: [num_experts] int32, local expert or -1, if placement is `map`; kept, so update it in place. Several
            experts may share one local expert. Values are checked here, and after an update like those of routing.
        group: torch.distributed process group. Each rank makes the kernel with its own share of the experts and calls
            it as often as the others, with its own tokens, possibly none. If the problem says that all experts are
            local, each rank gets an equal share.
        own_weights: Whether to copy tensors that would be shared: for kernels that are reloaded or updated after
            graph capture, or whose canonical weights change. Not if the problem has gradients of weights: the kernel
            then keeps these tensors, reads them in place, and backpropagates into them.
        expert_placement: Which rank of the group holds which experts, replicas included; None means equal slices in
            rank order.

    Returns:
        The kernel. It outputs the whole sum, or without communication this rank's part.

    Raises:
        UnsupportedProblemError: Nothing fits.
        BackendError: The backend's own code raised or its numbers were wrong, and no other one fits; names it and its
            distribution.
        RanksDifferError: Ranks of the group have other problems, versions or choices, or one could not make its
            kernel; each of them raises.
        GroupError: A rank of the group has ended, calls a layer, or did not come within its time limit; or another
            thread uses the group.
        ArgumentError: Weights, expert_map or ep_rank do not belong to the problem, or the selection was made for
            another problem or machine.

    Example:
        >>> import torch
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, dtype="float32")
        >>> weights = moereg.ExpertWeights(w13=torch.randn(8, 2 * 32, 64), w2=torch.randn(8, 64, 32))
        >>> kernel = moereg.make_kernel(problem, weights, moereg.select_backend(problem, platform="cpu"))
        >>> isinstance(kernel, moereg.MoEKernel)
        True
        >>> topk_weights, topk_ids = moereg.routing.softmax_topk(torch.randn(5, 8), top_k=2, renormalize=True)
        >>> kernel(torch.randn(5, 64), topk_weights, topk_ids).shape
        torch.Size([5, 64])
    """
    check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
    check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(w13=..., w2=...)")
    if selection is not None:
        check_instance("selection", selection, Selection, "make one with select_backend(problem)")
    check_flag("own_weights", own_weights)
    check_count("ep_rank", ep_rank, minimum=-sys.maxsize)  # `resolve_expert_map` checks its range.
    if group is not None:
        asked = LayerArguments(prepare_finalize, expert_map, expert_placement, ep_rank)
        return _over_group(problem, weights, group, selection, asked, own_weights)
    if expert_placement is not None:
        raise ArgumentError(
            "expert_placement needs the group of ranks that tokens move between, got none; pass group=..."
        )
    make = _builder(problem, weights, prepare_finalize, ep_rank, expert_map, own_weights)
    selection = selection or select_backend(problem)
    while True:
        winner_of(selection, problem)
        selection = check_plan(selection, weights, make)
        kernel, found = check_first_use(selection, weights, make)
        if kernel is not None:
            return mark_admitted(kernel, found)
        selection = next_choice(selection, found.failure)


def make_unchecked_kernel(
    problem: MoEProblem,
    weights: ExpertWeights,
    selection: Selection,
    prepare_finalize: PrepareFinalize | None = None,
    ep_rank: int = 0,
    expert_map: torch.Tensor | None = None,
) -> MoEKernel:
    """As `make_kernel` without a group, for code that judges the winner itself: no check, and no other candidate."""
    make = _builder(problem, weights, prepare_finalize, ep_rank, expert_map, own_weights=False)
    winner_of(selection, problem)
    return make(selection)


def _builder(
    problem: MoEProblem,
    weights: ExpertWeights,
    prepare_finalize: DispatcherChoice,
    ep_rank: int,
    expert_map: torch.Tensor | None,
    own_weights: bool,
) -> Callable[[Selection], MoEKernel]:
    """Checks the arguments of a layer without a group, and makes its kernel for a selection."""
    device = weights.w13.device
    choice = local_prepare_finalize(problem.activation_format)
    if isinstance(prepare_finalize, PrepareFinalize):
        choice = resolve_prepare_finalize(problem, prepare_finalize)
    elif prepare_finalize is not None:
        cure = "leave it out for the one of the format; names of dispatchers need a group"
        check_instance("prepare_finalize", prepare_finalize, PrepareFinalize, cure)
    place = outside_pools(lambda: resolve_expert_map(problem, ep_rank, expert_map, device), device)
    weights.check_against(problem)
    if "weights" in problem.gradients:
        check_in_place(weights.tensors())
        if own_weights:
            raise ArgumentError(
                "own_weights copies weights, and gradients of weights train them in place; leave it out"
            )
    return functools.partial(_build, problem, weights, choice, place, own_weights)


def _over_group(
    problem: MoEProblem,
    weights: ExpertWeights,
    process_group: Any,
    selection: Selection | None,
    asked: LayerArguments,
    own_weights: bool,
) -> MoEKernel:
    """`make_kernel` over a group. If the kernel fails its check on one rank, all ranks take the next candidate."""
    while True:
        plan = plan_layer(problem, weights, process_group, selection, asked)
        make = functools.partial(_build, plan.problem, weights, plan.prepare_finalize, plan.expert_map, own_weights)
        kernel, found, error = None, CheckResult(), None
        try:
            kernel, found = check_first_use(plan.selection, weights, make)
        except Exception as raised:
            error = raised
        # The experts of a plan are checked one by one without a group; here a plan that needs that goes.
        own = found.failure, bool(unchecked_candidates(plan.selection))
        outcomes = agree(plan.group, "whether the kernel was made", {}, error, own)
        failures = [failure for failure, _ in outcomes]
        if kernel is not None and not any(failures):
            if not any(is_unchecked for _, is_unchecked in outcomes):
                return mark_admitted(kernel, found)
            selection = dataclasses.replace(plan.selection, ranges=())
            continue
        try:
            rank, failure = next((rank, text) for rank, text in enumerate(failures) if text)
            selection = next_choice(plan.selection, failure if found.failure else f"on rank {rank}: {failure}")
        except Exception as raised:
            error = raised
        agree(plan.group, "whether another backend fits", {}, error)


def _build(
    problem: MoEProblem,
    weights: ExpertWeights,
    prepare_finalize: PrepareFinalize,
    expert_map: torch.Tensor | None,
    own_weights: bool,
    selection: Selection,
) -> MoEKernel:
    """Permutes the weights for a selection that has a winner."""
    # First: making the experts may import a kernel library that only the selection's machine has.
    for _, decision in selection.plan:
        assert decision.cell is not None
        backend_calls.check_device(only_candidate(selection, decision), decision.cell.experts, weights.w13.device)
    if os.environ.get(KERNEL_CACHE):
        use_shipped_kernels(selection.platform)

    def make() -> MoEKernel:
        ranges = make_ranges(selection)
        own = ranges[-1].selection
        permuted = backend_calls.permute(own, ranges[-1].experts, weights)
        permuted = dataclasses.replace(permuted, reader=OneExpert(own, own.chosen, weights))
        borrowed = permuted.shared_with(weights)
        if own_weights:
            with plain_torch(), torch.inference_mode(False):
                permuted, borrowed = permuted.with_own(borrowed), frozenset()
        held = HeldWeights(problem, ranges, permuted, borrowed)
        kernel = MoEKernel(problem, selection, ranges, held, prepare_finalize, expert_map)
        if "weights" in problem.gradients:
            trained = weights.tensors()
            held.read_from(lambda: trained)
        held.watch(repr(kernel), weights)
        return kernel

    return outside_pools(make, weights.w13.device)

"""Trains a live module's experts in place, through moereg's differentiable operator."""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from typing import Any, Final

import torch

from moereg.dispatch import select_backend
from moereg.errors import MoeregError, one_line
from moereg.integrations._experts.adapters import adapters_of, parameter_of, rank_of
from moereg.integrations._experts.layouts import LiveExperts, read_experts
from moereg.integrations._experts.packed import FROZEN, is_packed, stored_in
from moereg.integrations._experts.serving import (
    NOT_IN_COMPILED_CODE,
    ServedExperts,
    attach,
    check_servable,
    kinds_of,
    served,
)
from moereg.layer.checks import check_call
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.in_place import check_in_place
from moereg.layer.train_op import WEIGHTS, reshaped, run_training
from moereg.platforms import platform_of
from moereg.runtime.graph_pools import outside_pools
from moereg.runtime.torch_op import new_handle
from moereg.selection.result import Selection
from moereg.spec.problem import GRADIENTS
from moereg.weights.permuted import ExpertWeights


class Trainer:
    """Differentiable calls of a module's experts.

    Its kernel keeps no weights: each call reads the module's parameters where they are, whoever wrote or moved them.
    Quantized ones are frozen, and the kernel shares the tensors that they are stored in.

    Attributes:
        problem: The layer with all gradients, of which a backward pass computes what autograd asks for.
        handle: The number by which the operator finds this object.
        is_frozen: Whether the weights are quantized.
    """

    def __init__(self, module: torch.nn.Module, live: LiveExperts, selection: Selection) -> None:
        self.problem = selection.problem
        self.handle = new_handle(self)
        self._module = weakref.ref(module)
        self._live = live
        self._selection = selection
        self.is_frozen = selection.problem.quant.weight is not None
        self._stored = _stored(module, live) if self.is_frozen else ()
        self._kernel: MoEKernel | None = None

    def training_kernel(self) -> MoEKernel:
        """The kernel, made at the first call."""
        if self._kernel is None:
            module = self._module()
            assert module is not None, "a layer's first call is a forward pass"
            with torch.no_grad():
                if self.is_frozen:
                    weights = self._live.canonical(module)
                else:
                    tensors: dict[str, Any] = self._tensors(module)
                    weights = ExpertWeights(**tensors)
                made = functools.partial(make_kernel, self.problem, weights, self._selection)
                kernel = outside_pools(made, weights.w13.device)
            if not self.is_frozen:
                kernel.held.read_from(dict)  # Each call brings its tensors.
            self._kernel = kernel
        return self._kernel

    def serves(self, module: torch.nn.Module) -> bool:
        """Whether the module still has the tensors that the kernel shares, and not others of the same kind."""
        now = _stored(module, self._live) if self.is_frozen else ()
        return len(now) == len(self._stored) and all(map(operator.is_, now, self._stored))

    def run(
        self, module: torch.nn.Module, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Runs the module as part of autograd's graph; arguments and result as in `ServedExperts.run`."""
        problem, adapters = self.problem, adapters_of(module)
        tensors = {} if self.is_frozen else self._tensors(module)
        assert not isinstance(adapters, str), "a plan is made for adapters that can be taken"
        if adapters is not None:
            adapters = adapters.computed_in(problem.torch_dtype)
        rows = hidden_states.reshape(-1, problem.hidden_size).to(problem.torch_dtype).contiguous()
        ids = topk_ids.reshape(rows.shape[0], problem.top_k).to(torch.int32).contiguous()
        weights = topk_weights.reshape(ids.shape).to(torch.float32).contiguous()
        check_call(problem, next(module.parameters()).device, rows, weights, ids, None)
        out = run_training(problem, rows, weights, ids, tensors, self.handle, adapters)
        return reshaped(out, hidden_states.shape).to(hidden_states.dtype)

    def _tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The canonical parameters by name, whatever adapters add to them, as autocast has them."""
        return {
            name: parameter_of(module, parameter).to(self.problem.torch_dtype)
            for name, parameter in zip(WEIGHTS, self._live.parameters, strict=False)
        }


def _stored(module: torch.nn.Module, live: LiveExperts) -> tuple[torch.Tensor, ...]:
    return tuple(each for name in live.parameters for each in stored_in(parameter_of(module, name)))


def trainer_of(module: torch.nn.Module, top_k: int) -> Trainer | str:
    """How moereg trains a module in a call with that top_k, or why it does not, as a clause."""
    adapters = adapters_of(module)
    if isinstance(adapters, str):
        return adapters
    rank, dtype = rank_of(adapters), _autocast_dtype(next(module.parameters()).device.type)
    found = served(module)
    key = (top_k, rank, dtype, *kinds_of(module))
    is_compiling = torch.compiler.is_compiling()
    answer: Trainer | str | None = None if found is None else found.trainers.get(key)
    if answer is None or (isinstance(answer, Trainer) and not answer.serves(module)):
        answer = (_plan_while_compiling if is_compiling else plan)(module, top_k, rank, dtype)
    if isinstance(answer, str):
        return answer
    if answer.is_frozen and any(each.requires_grad for each in module.parameters()):
        return f"its parameters require gradients, and {FROZEN}"
    if not is_compiling:
        try:
            answer.training_kernel()
        except MoeregError as error:
            attach(module).trainers[key] = reason = one_line(str(error))
            return reason
    return answer


def _autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype that autocast asks for; None without it."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def plan(module: torch.nn.Module, top_k: int, rank: int = 0, dtype: torch.dtype | None = None) -> Trainer | str:
    """Decides whether moereg trains a module in calls with that top_k and rank of adapters; makes no kernel yet.

    `dtype` is autocast's, or None.
    """
    found = attach(module)
    for key, known in list(found.trainers.items()):
        if isinstance(known, Trainer) and not known.serves(module):
            del found.trainers[key]  # Its kernel holds the old tensors.
    answer = found.trainers[(top_k, rank, dtype, *kinds_of(module))] = _planned(module, found, top_k, rank, dtype)
    return answer


_plan_while_compiling: Final = torch.compiler.disable(plan, reason=NOT_IN_COMPILED_CODE)


def _planned(
    module: torch.nn.Module, found: ServedExperts, top_k: int, rank: int, dtype: torch.dtype | None
) -> Trainer | str:
    if getattr(module, "_is_expert_parallel", False):
        return "other ranks have some of its experts"
    try:
        live = read_experts(module)
        if dtype is not None and live.dtype is not None:
            live = dataclasses.replace(live, dtype=str(dtype).removeprefix("torch."))
        is_frozen = is_packed(module)
        if live.moved is not None and not is_frozen:
            return live.moved
        device = check_servable(module, live)
        if not is_frozen:
            check_in_place({name: parameter_of(module, name) for name in live.parameters})
        gradients = set(GRADIENTS) - (set() if rank else {"adapters"}) - ({"weights"} if is_frozen else set())
        # The weights have a dtype of their own.
        asked: dict[str, Any] = {"gradients": gradients, "batch_invariant": found.batch_invariant}
        problem = live.problem(top_k, torch.float32, adapter_rank=rank, **asked)
        return Trainer(module, live, select_backend(problem, platform_of(device), **found.request))
    except MoeregError as error:
        return one_line(str(error))

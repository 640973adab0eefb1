"""The two directions of a call that trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from threading import get_ident
from typing import Any

import torch

from moereg.experts import Gradients, SavedShapes
from moereg.layer import backend_calls
from moereg.layer.checks import ids_in_32_bits
from moereg.layer.held_weights import InTurn
from moereg.layer.ranges import RangedExperts, Reads
from moereg.layer.train_op import cut_saved
from moereg.prepare_finalize import PrepareFinalize
from moereg.prepare_finalize.overlap import Tokens
from moereg.runtime.torch_state import plain_torch
from moereg.spec.problem import MoEProblem


class TrainingCalls:
    """Runs `apply_saving` and `apply_backward` of a plan's experts."""

    def __init__(
        self, problem: MoEProblem, ranged: RangedExperts, prepare_finalize: PrepareFinalize, in_turn: InTurn
    ) -> None:
        self._ranged = ranged
        self._prepare = prepare_finalize.prepare
        self._problem = problem
        self._in_turn = in_turn
        # The last number of tokens of each step, with its shapes.
        self._shapes: dict[str, tuple[int, tuple[backend_calls.Shapes, SavedShapes]]] = {}

    def forward(self, tokens: Tokens, reads: Reads, saved: torch.Tensor, out: torch.Tensor) -> None:
        """Runs a call of at least one token; overwrites `out` [T,H], and `saved`, uint8, for its backward pass."""
        self._ranged.count(len(tokens.topk_ids))
        self._run("apply_saving", tokens, reads, saved, out=out)

    def backward(
        self,
        tokens: Tokens,
        reads: Reads,
        saved: torch.Tensor,
        gradients: Mapping[str, torch.Tensor],
        grad_out: torch.Tensor,
    ) -> None:
        """Overwrites gradients of a call of `forward`, by the names of `Gradients`; `grad_out` [T,H] is contiguous."""
        if not len(grad_out):
            for tensor in gradients.values():
                tensor.zero_()
            return
        targets: dict[str, Any] = {**gradients}
        self._run("apply_backward", tokens, reads, saved, grads=Gradients(**targets), grad_out=grad_out)

    def _run(self, step: str, tokens: Tokens, reads: Reads, saved: torch.Tensor, **others: Any) -> None:
        thread, num_tokens = get_ident(), len(tokens.hidden_states)
        served = self._ranged.range_of(num_tokens)
        selection, experts = served.selection, served.experts
        try:
            self._in_turn.begin(thread)
            with plain_torch():
                known, shapes = self._shapes.get(step, (0, None))
                if shapes is None or known != num_tokens:
                    shapes = (
                        backend_calls.workspace_shapes(selection, experts, num_tokens, step),
                        backend_calls.saved_shapes(selection, experts, num_tokens, saved.numel()),
                    )
                    self._shapes[step] = num_tokens, shapes
                workspace13, workspace2 = self._ranged.scratch(served, shapes[0])
                topk_ids = ids_in_32_bits(tokens.topk_ids, self._problem)
                rows = tokens.hidden_states, tokens.topk_weights, topk_ids
                inputs = self._prepare(*rows, self._problem, reads.expert_map).inputs
                others |= {
                    "saved": cut_saved(saved, shapes[1]),
                    "inputs": dataclasses.replace(inputs, adapters=reads.adapters),
                    "weights": reads.weights,
                    "workspace13": workspace13,
                    "workspace2": workspace2,
                }
                try:
                    getattr(experts, step)(**others)
                except BaseException as error:
                    backend_calls.raise_named(selection, step, error)
        finally:
            self._in_turn.end(thread)

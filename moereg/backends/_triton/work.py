"""The arguments of a way through a layer, for any kind of weights, and what a way is.

Sizes: T tokens, K choices of each, N = T * K routes, H hidden size, R rows of the batched format, E * max_T.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from moereg.backends._loaded import Call
from moereg.backends._triton.workspace import Piece, cut
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.rows.block_map import BlockMap, plan_batches
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_routes
from moereg.kernels.rows.sort import sort_routes
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import PermutedWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """The arguments of a way: everything that each of its launches reads; a subclass adds the weights.

    Attributes:
        problem: the layer.
        call: tensors and workspaces.
        plan_bytes: in front of the second workspace, where the plan of the call's rows lies.
        overlap: whether a launch may start before the one in front of it has ended.
    """

    problem: MoEProblem
    call: Call
    plan_bytes: int
    overlap: bool

    @property
    def is_batched(self) -> bool:
        """Whether rows lie by expert already, [E, max_T, H]."""
        return self.call.inputs.expert_num_tokens is not None

    @property
    def num_rows(self) -> int:
        """N, or R in the batched format."""
        return len(self.tokens) if self.is_batched else self.call.inputs.topk_ids.numel()

    @property
    def top_k(self) -> int:
        """Rows of the first product that a token has: K, or 1 in the batched format."""
        return 1 if self.is_batched else self.problem.top_k

    @property
    def tokens(self) -> torch.Tensor:
        """[T, H], or [R, H]."""
        return _rows(self.call.inputs.hidden_states)

    @property
    def out(self) -> torch.Tensor:
        """The result, [T, H] or [R, H]."""
        return _rows(self.call.out)

    @property
    def epilogue(self) -> GateUpEpilogue:
        """Epilogue of the first product."""
        return gate_up_epilogue(self.problem, self.call.weights)

    @property
    def w2_bias(self) -> torch.Tensor | None:
        """[E, H], or None."""
        return self.call.weights.get("w2_bias")

    @property
    def input_weights(self) -> torch.Tensor | None:
        """The router's weights, [T, K], where they multiply the first product; else None."""
        on_input = self.problem.apply_router_weight_on_input and not self.is_batched
        return self.call.inputs.topk_weights if on_input else None

    @property
    def output_weights(self) -> torch.Tensor | None:
        """The router's weights where they multiply the second product; else None."""
        elsewhere = self.problem.apply_router_weight_on_input or self.is_batched
        return None if elsewhere else self.call.inputs.topk_weights

    @property
    def early_weights(self) -> torch.Tensor | None:
        """`output_weights` where they multiply rows before these are stored, also where a reduction could do it.

        float16 holds no row beyond 65,504 and few digits of small ones, of which a weight may make ordinary numbers.
        """
        return self.output_weights if self.call.out.dtype == torch.float16 else None

    @property
    def late_weights(self) -> torch.Tensor | None:
        """`output_weights` where they multiply rows that are reduced."""
        return self.output_weights if self.early_weights is None else None

    @property
    def behind_plan(self) -> torch.Tensor:
        """The second workspace behind the plan, as bytes."""
        return self.call.workspace2.view(torch.uint8)[self.plan_bytes :]

    def intermediate(self, guard: int = 0) -> torch.Tensor:
        """The front of the first workspace, [guard + N, I_pad] or [R, I_pad]."""
        return _rows(self.call.workspace13)[: guard + self.num_rows]

    def route_rows(self, guard: int = 0) -> torch.Tensor:
        """Rows [guard + N, H] to be reduced, in the dtype of the activations; weighted in float16, see `early_weights`.

        fp32 would double the layer's largest buffer and its traffic to save a rounding that the output makes anyway.
        """
        shape = (guard + self.num_rows, self.call.out.shape[-1])
        return cut(self.behind_plan, Piece(shape, self.call.out.dtype))[0]

    def direct_routes(self, block_m: int) -> DirectRoutes:
        """The routes of few tokens as they come."""
        inputs = self.call.inputs
        return DirectRoutes(inputs.topk_ids, inputs.expert_map, self.problem.num_experts, block_m)

    def sort_routes(self, block_m: int, **tiles: Any) -> RoutePlan:
        """Sorts the routes by expert; `tiles` as in `kernels.rows.sort.sort_routes`: slack, tall and so on."""
        inputs, counts = self.call.inputs, (self.problem.num_experts, self.problem.num_local_experts)
        given = inputs.topk_ids, inputs.expert_map, *counts, block_m, self._plan_words
        return sort_routes(*given, overlap=self.overlap, **tiles)

    def plan(self, block_m: int, **tiles: Any) -> BlockMap:
        """Lays tiles over sorted routes, or over the rows that count in the batched format."""
        counts = self.call.inputs.expert_num_tokens
        if counts is None:
            return self.sort_routes(block_m, **tiles)
        max_tokens = self.call.inputs.hidden_states.shape[1]
        return plan_batches(counts, max_tokens, block_m, self._plan_words, overlap=self.overlap, **tiles)

    @property
    def _plan_words(self) -> torch.Tensor:
        return self.call.workspace2.view(torch.uint8)[: self.plan_bytes].view(torch.int32)

    def reduce(self, route_rows: torch.Tensor) -> None:
        """Adds up each token's rows, [N, H], which are weighted already."""
        inputs = self.call.inputs
        reduce_routes(
            self.call.out,
            route_rows,
            inputs.topk_ids,
            expert_map=inputs.expert_map,
            num_experts=self.problem.num_experts,
            num_local_experts=self.problem.num_local_experts,
            overlap=self.overlap,
        )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[R, columns] of a tensor of two or three dimensions."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[2])


def gate_up_epilogue(problem: MoEProblem, weights: PermutedWeights) -> GateUpEpilogue:
    """The epilogue of a layer's first product."""
    activation = problem.activation
    return GateUpEpilogue(
        activation=activation.name,
        gated=activation.gated,
        alpha=activation.alpha,
        beta=activation.beta,
        limit=activation.limit,
        bias=weights.get("w13_bias"),
    )


AnyWork = TypeVar("AnyWork", bound=Work, contravariant=True)


class Way(abc.ABC, Generic[AnyWork]):
    """One way through a layer, selected for a call with its configurations."""

    @abc.abstractmethod
    def run(self, work: AnyWork) -> None:
        """Launches everything."""

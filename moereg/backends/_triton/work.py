"""The arguments of a way through a layer, for any kind of weights, and what a way is.

Sizes: T tokens, K choices of each, N = T * K routes, H hidden size.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from moereg.backends._loaded import Call
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.rows.block_map import BlockMap, plan_batches
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_routes
from moereg.kernels.rows.sort import sort_routes
from moereg.problem import MoEProblem
from moereg.weights import PermutedWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """The arguments of a way: everything that each of its launches reads; a subclass adds the weights.

    Attributes:
        problem: the layer.
        call: tensors and workspaces.
        plan_bytes: in front of the second workspace, where the plan of the call's rows lies.
        epilogue: of the first product.
        w2_bias: [E, H], or None.
        overlap: whether a launch may start before the one in front of it has ended.
    """

    problem: MoEProblem
    call: Call
    plan_bytes: int
    epilogue: GateUpEpilogue
    w2_bias: torch.Tensor | None
    overlap: bool

    @property
    def num_routes(self) -> int:
        """N."""
        return self.call.inputs.topk_ids.numel()

    @property
    def behind_plan(self) -> torch.Tensor:
        """The second workspace behind the plan, as bytes."""
        return self.call.workspace2.view(torch.uint8)[self.plan_bytes :]

    @property
    def _plan_words(self) -> torch.Tensor:
        return self.call.workspace2.view(torch.uint8)[: self.plan_bytes].view(torch.int32)

    def direct_routes(self, block_m: int) -> DirectRoutes:
        """The routes of few tokens as they come."""
        inputs = self.call.inputs
        return DirectRoutes(inputs.topk_ids, inputs.expert_map, self.problem.num_experts, block_m)

    def sort_routes(
        self,
        block_m: int,
        slack: int = 0,
        tall: int = 0,
        *,
        heavy_first: int = False,
        flags: torch.Tensor | None = None,
    ) -> RoutePlan:
        """Sorts the routes by expert."""
        problem, inputs = self.problem, self.call.inputs
        return sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            block_m,
            self._plan_words,
            slack=slack,
            overlap=self.overlap,
            tall=tall,
            heavy_first=heavy_first,
            flags=flags,
        )

    def plan_batches(self, block_m: int, slack: int = 0, tall: int = 0, *, heavy_first: int = False) -> BlockMap:
        """Lays tiles over the rows that count in the batched format."""
        inputs = self.call.inputs
        assert inputs.expert_num_tokens is not None
        max_tokens = inputs.hidden_states.shape[1]
        return plan_batches(
            inputs.expert_num_tokens,
            max_tokens,
            block_m,
            self._plan_words,
            slack=slack,
            overlap=self.overlap,
            tall=tall,
            heavy_first=heavy_first,
        )

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

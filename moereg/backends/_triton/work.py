"""The interface of a schedule, and its arguments for any kind of weights.

Sizes: T tokens, K experts per token, N = T * K routes, H hidden size, R = E * max_T rows of the batched format.
"""

from __future__ import annotations

import abc
from dataclasses import astuple, dataclass
from typing import Any, Generic, TypeVar

import torch

from moereg.backends._loaded import Call
from moereg.backends._workspace import Piece, cut
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.rows.block_map import BlockMap, plan_batches
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_routes
from moereg.kernels.rows.sort import sort_routes
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import PermutedWeights


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Work:
    """The arguments of a schedule: everything that its launches read; a subclass adds the weights.

    The row plan is at the front of the second workspace. With `overlap` a launch may start before the previous one
    ends.
    """

    problem: MoEProblem
    call: Call
    plan_bytes: int
    overlap: bool

    @property
    def is_batched(self) -> bool:
        """Whether rows are grouped by expert already, [E, max_T, H]."""
        return self.call.inputs.expert_num_tokens is not None

    @property
    def num_rows(self) -> int:
        """N, or R in the batched format."""
        return len(self.tokens) if self.is_batched else self.call.inputs.topk_ids.numel()

    @property
    def top_k(self) -> int:
        """Rows of the first GEMM per token: K, or 1 in the batched format."""
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
        """Epilogue of the first GEMM."""
        return gate_up_epilogue(self.problem, self.call.weights)

    @property
    def w2_bias(self) -> torch.Tensor | None:
        """[E, H], or None."""
        return self.call.weights.get("w2_bias")

    @property
    def input_weights(self) -> torch.Tensor | None:
        """Routing weights [T, K] if they multiply the first GEMM's rows, else None."""
        on_input = self.problem.apply_router_weight_on_input and not self.is_batched
        return self.call.inputs.topk_weights if on_input else None

    @property
    def output_weights(self) -> torch.Tensor | None:
        """Routing weights [T, K] if they multiply the second GEMM's rows, else None."""
        elsewhere = self.problem.apply_router_weight_on_input or self.is_batched
        return None if elsewhere else self.call.inputs.topk_weights

    @property
    def early_weights(self) -> torch.Tensor | None:
        """`output_weights` if rows must be multiplied before they are stored, even where a reduction could do it.

        float16 overflows beyond 65,504 and loses digits of small values that a weight would bring into range.
        """
        return self.output_weights if self.call.out.dtype == torch.float16 else None

    @property
    def late_weights(self) -> torch.Tensor | None:
        """`output_weights` if the reduction multiplies by them."""
        return self.output_weights if self.early_weights is None else None

    @property
    def tile_weights(self) -> torch.Tensor | None:
        """`output_weights` if Triton's tiles multiply by them; as Hopper's do where rows must keep their bits."""
        return self.early_weights if self.problem.batch_invariant else self.output_weights

    @property
    def behind_plan(self) -> torch.Tensor:
        """The second workspace after the plan, as bytes."""
        return self.call.workspace2.view(torch.uint8)[self.plan_bytes :]

    def intermediate(self, guard: int = 0) -> torch.Tensor:
        """The front of the first workspace, [guard + N, I_pad] or [R, I_pad]."""
        return _rows(self.call.workspace13)[: guard + self.num_rows]

    def route_rows(self, guard: int = 0) -> torch.Tensor:
        """Rows [guard + N, H] to reduce, in the activations' dtype; already weighted in float16, see `early_weights`.

        fp32 would double the layer's largest buffer and its traffic to save a rounding that the output does anyway.
        """
        shape = (guard + self.num_rows, self.call.out.shape[-1])
        return cut(self.behind_plan, Piece(shape, self.call.out.dtype))[0]

    def direct_routes(self, block_m: int) -> DirectRoutes:
        """The unsorted routes of few tokens."""
        inputs = self.call.inputs
        return DirectRoutes(inputs.topk_ids, inputs.expert_map, self.problem.num_experts, block_m)

    def sort_routes(self, block_m: int, **tiles: Any) -> RoutePlan:
        """Sorts the routes by expert; `tiles` as in `kernels.rows.sort.sort_routes`: slack, tall and so on."""
        inputs, counts = self.call.inputs, (self.problem.num_experts, self.problem.num_local_experts)
        given = inputs.topk_ids, inputs.expert_map, *counts, block_m, self._plan_words
        return sort_routes(*given, overlap=self.overlap, **tiles)

    def plan(self, block_m: int, **tiles: Any) -> BlockMap:
        """Plans tiles over sorted routes, or over the valid rows of the batched format."""
        counts = self.call.inputs.expert_num_tokens
        if counts is None:
            return self.sort_routes(block_m, **tiles)
        max_tokens = self.call.inputs.hidden_states.shape[1]
        return plan_batches(counts, max_tokens, block_m, self._plan_words, overlap=self.overlap, **tiles)

    @property
    def _plan_words(self) -> torch.Tensor:
        return self.call.workspace2.view(torch.uint8)[: self.plan_bytes].view(torch.int32)

    def reduce(self, route_rows: torch.Tensor) -> None:
        """Adds up each token's rows, [N, H], weighted already by `tile_weights`."""
        inputs = self.call.inputs
        reduce_routes(
            self.call.out,
            route_rows,
            inputs.topk_ids,
            topk_weights=self.late_weights if self.problem.batch_invariant else None,
            expert_map=inputs.expert_map,
            num_experts=self.problem.num_experts,
            num_local_experts=self.problem.num_local_experts,
            overlap=self.overlap,
        )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Flattens a tensor of two or three dimensions to [R, columns]."""
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[2])


def gate_up_epilogue(problem: MoEProblem, weights: PermutedWeights) -> GateUpEpilogue:
    """The epilogue of a layer's first GEMM."""
    return GateUpEpilogue(ActivationConstant(*astuple(problem.activation)), weights.get("w13_bias"))


AnyWork = TypeVar("AnyWork", bound=Work, contravariant=True)


class Schedule(abc.ABC, Generic[AnyWork]):
    """The launches of a call, selected with their configurations."""

    @abc.abstractmethod
    def run(self, work: AnyWork) -> None:
        """Launches everything."""

"""The interface between the caller's tokens and the experts, and its implementation without communication."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch

from moereg.experts import ExpertInputs
from moereg.spec.problem import MoEProblem


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The result of prepare.

    Attributes:
        inputs: For `Experts.apply`.
        num_tokens: T, or max_T in the batched format; workspaces are sized by it.
        row_of_route: [T,K] int64 or int32, row in the flattened [E * max_T] batched output of each route, -1 where it
            goes nowhere; None in the standard format.
    """

    inputs: ExpertInputs
    num_tokens: int
    row_of_route: torch.Tensor | None = None


class PrepareFinalize(abc.ABC):
    """Moves tokens to the experts and results back. Capture-safe, no host synchronization."""

    name: ClassVar[str]
    activation_format: ClassVar[str]

    @abc.abstractmethod
    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        """Makes the experts' inputs from this rank's tokens and, in a group, from those that arrive.

        Args:
            hidden_states: [T,H]; in a group T may be 0.
            topk_weights: [T,K] fp32.
            topk_ids: [T,K] int32, experts of the whole layer.
            problem: The layer as its experts see it.
            expert_map: [num_experts] int32 or None.

        Raises:
            GroupError: A rank has ended or stalled.
        """

    @abc.abstractmethod
    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        """Weights and sums the experts' rows into `out` [T,H], in fp32, slots in order; in a group on the home rank.

        Args:
            out: [T,H], overwritten.
            expert_out: [T,K,H] (standard) or [E,max_T,H] (batched); rows without a route are undefined. In a group also
                [rows,H], if the experts reduce.
            prepared: What `prepare` returned.
            problem: As in `prepare`; if routing weights have scaled the inputs, rows are summed as they are.

        Raises:
            GroupError: A rank has ended or stalled.
        """


def weighted_sum(out: torch.Tensor, rows: torch.Tensor, topk_weights: torch.Tensor | None, valid: torch.Tensor) -> None:
    """Sums the rows of each token's routes in fp32, multiplied by their weights.

    Args:
        out: [T,H], overwritten.
        rows: [T,K,H].
        topk_weights: [T,K] fp32; None if they were applied before.
        valid: [T,K] bool; where it is not, rows and weights may hold NaN, so they are masked.
    """
    values = rows.float() if topk_weights is None else rows.float() * topk_weights.unsqueeze(-1)
    out.copy_(torch.where(valid.unsqueeze(-1), values, 0.0).sum(dim=1))


def sum_routes(
    out: torch.Tensor,
    rows: torch.Tensor,
    row_of_route: torch.Tensor,
    topk_weights: torch.Tensor | None,
    in_triton: bool,
) -> None:
    """`weighted_sum` of `rows` [groups, rows, H] at any positions, in torch or in one launch of Triton.

    `row_of_route` is [T,K], row among those of all groups, -1 for none; other arguments are as in `weighted_sum`.
    """
    if not in_triton:
        flat = rows.flatten(0, 1)
        weighted_sum(out, flat[row_of_route.clamp(min=0)], topk_weights, row_of_route >= 0)
        return
    from moereg.kernels.rows.batches import sum_batches  # Loads Triton, which may not be there.

    with torch.cuda.device_of(out):
        sum_batches(out, rows, row_of_route, topk_weights)


class StandardPrepareFinalize(PrepareFinalize):
    """No communication: hands the caller's tensors [T,H] to the experts unchanged."""

    name = "standard"
    activation_format = "standard"

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        return Prepared(
            ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map), hidden_states.shape[0]
        )

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        from moereg.kernels.plain.device import local_expert_ids  # Loads torch, which choosing does without.

        inputs = prepared.inputs
        local = local_expert_ids(inputs.topk_ids, problem.num_local_experts, inputs.expert_map)
        weights = None if problem.apply_router_weight_on_input else inputs.topk_weights
        weighted_sum(out, expert_out, weights, local >= 0)

"""The interface between the caller's tokens and the experts."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch

from moereg.experts import ExpertInputs
from moereg.spec.problem import MoEProblem

__all__ = ["PrepareFinalize", "Prepared", "weighted_sum"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The result of prepare.

    Attributes:
        inputs: For `Experts.apply`.
        num_tokens: T, or max_T in the batched format: what workspaces are sized by.
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
    communicates: ClassVar[bool] = False
    """Whether tokens come from other ranks, so that every call counts, and `finalize` always follows."""

    @abc.abstractmethod
    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        """Makes the experts' inputs.

        Args:
            hidden_states: [T,H].
            topk_weights: [T,K] fp32.
            topk_ids: [T,K] int32, global.
            problem: The layer.
            expert_map: [num_experts] int32 or None.
        """

    @abc.abstractmethod
    def finalize(
        self,
        out: torch.Tensor,
        expert_out: torch.Tensor,
        prepared: Prepared,
        problem: MoEProblem,
    ) -> None:
        """Weights and sums the experts' rows into `out` [T,H], in fp32, slots in order.

        Args:
            out: [T,H], overwritten.
            expert_out: [T,K,H] (standard) or [E,max_T,H] (batched); rows of no route are undefined.
            prepared: What `prepare` returned.
            problem: The layer; where routing weights scaled the inputs already, rows are summed as they are.
        """


def weighted_sum(
    out: torch.Tensor,
    rows: torch.Tensor,
    topk_weights: torch.Tensor,
    valid: torch.Tensor,
    apply_router_weight_on_input: bool,
) -> None:
    """Sums the rows of each token's routes in fp32, times their weights.

    Rows and weights that are not valid may hold NaN, so they are masked.

    Args:
        out: [T,H], overwritten.
        rows: [T,K,H].
        topk_weights: [T,K] fp32.
        valid: [T,K] bool.
        apply_router_weight_on_input: The weights scaled the inputs already, so rows are summed as they are.
    """
    values = rows.float() if apply_router_weight_on_input else rows.float() * topk_weights.unsqueeze(-1)
    out.copy_(torch.where(valid.unsqueeze(-1), values, 0.0).sum(dim=1))

"""The interface between the caller's tokens and the experts."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import torch

from moereg.experts import ExpertInputs
from moereg.kernels.plain import device
from moereg.problem import MoEProblem

__all__ = ["PrepareFinalize", "Prepared", "local_expert_ids"]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The result of prepare.

    Attributes:
        inputs: For `Experts.apply`.
        num_tokens: T, or max_T in the batched format: what workspaces are sized by.
        row_of_route: [T,K] int64, row in the flattened [E * max_T] batched output of each route, -1 where it goes
            nowhere; None in the standard format.
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


def local_expert_ids(topk_ids: torch.Tensor, problem: MoEProblem, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert of each route, -1 for ids out of range or not mapped.

    Args:
        topk_ids: [T,K] int32.
        problem: The layer.
        expert_map: [num_experts] int32 or None.

    Returns:
        [T,K] int64.
    """
    return device.local_expert_ids(topk_ids, problem.num_local_experts, expert_map)


def weighted_sum(
    out: torch.Tensor, rows: torch.Tensor, topk_weights: torch.Tensor, valid: torch.Tensor, weights_applied: bool
) -> None:
    """out[t] = sum over k of weight * row where valid; other rows and weights may hold NaN, so they are masked.

    Args:
        out: [T,H], overwritten.
        rows: [T,K,H].
        topk_weights: [T,K] fp32.
        valid: [T,K] bool.
        weights_applied: Whether to sum without weights.
    """
    values = rows.float() if weights_applied else rows.float() * topk_weights.unsqueeze(-1)
    out.copy_(torch.where(valid.unsqueeze(-1), values, 0.0).sum(dim=1))

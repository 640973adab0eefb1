"""How an experts class that computes gradients loads its implementation; see `_loaded.py`.

A module of its own, so that the code of classes without gradients, and with it their evidence, stays what it was.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch

from moereg.backends._loaded import Call, Implementation, LoadedExperts
from moereg.experts import ExpertInputs, Gradients, SavedShapes
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import PermutedWeights


class TrainingImplementation(Implementation):
    """An implementation that also computes gradients."""

    @abc.abstractmethod
    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        """See `Experts.saved_shapes`."""

    @abc.abstractmethod
    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        """See `Experts.apply_saving`."""

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts.backward_workspace_shapes`."""
        return self.workspace_shapes(num_tokens)

    @abc.abstractmethod
    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        """See `Experts.apply_backward`.

        Args:
            call: Its `out` is the gradient of the output, only read.
            grads: Tensors to write.
            saved: As `run_saving` left them.
        """


class LoadedTrainingExperts(LoadedExperts):
    """Loaded experts that also compute gradients."""

    implementation: TrainingImplementation

    @abc.abstractmethod
    def _load(self) -> TrainingImplementation:
        """Imports the implementation and constructs it from `self`."""

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> SavedShapes:
        return self.implementation.saved_shapes(num_tokens)

    def apply_saving(
        self,
        out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        self.implementation.run_saving(Call(out, inputs, weights, workspace13, workspace2), saved)

    def backward_workspace_shapes(
        self, problem: MoEProblem, num_tokens: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.implementation.backward_workspace_shapes(num_tokens)

    def apply_backward(
        self,
        grads: Gradients,
        grad_out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        self.implementation.run_backward(Call(grad_out, inputs, weights, workspace13, workspace2), grads, saved)

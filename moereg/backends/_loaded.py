"""How an experts class, declared in a public module, loads its implementation.

A public module, `<name>_moe.py`, declares each class: decorators, `facts`, `layouts`, `unsupported_reasons`. Selecting
imports these modules, so they import no kernels. The code that runs is in a private package, `_<name>/`, as an
`Implementation`, whose module imports its kernels at the top. The class names it:

    class TritonBatchedExperts(LoadedExperts):
        facts = ...
        layouts = ...
        implemented_by = "moereg.backends._triton.plain:Batched"

It is imported when a layer makes an instance; deciding makes none.

A backend needs none of this: a class may also subclass `moereg.author.Experts` and do its work itself.
"""

from __future__ import annotations

import abc
import pkgutil
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch

from moereg.experts import ExpertInputs, Experts, Gradients, SavedShapes
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.permuted import ExpertWeights, PermutedWeights


class Call(NamedTuple):
    """The arguments of `Experts.apply`, for one call of a layer."""

    out: torch.Tensor
    inputs: ExpertInputs
    weights: PermutedWeights
    workspace13: torch.Tensor
    workspace2: torch.Tensor


class Implementation(abc.ABC):
    """Does an experts class's work, for the problem of one instance; see the methods of `Experts`.

    Attributes:
        problem, platform, computes: The experts' own.
        layouts: The class's layouts.
    """

    def __init__(self, experts: Experts) -> None:
        """Copies what it needs and keeps no reference to the experts."""
        self.problem = experts.problem
        self.platform = experts.platform
        self.computes = experts.computes
        self.layouts = experts.layouts

    @abc.abstractmethod
    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """See `Experts.permute_weights`."""

    @abc.abstractmethod
    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts.workspace_shapes`."""

    @abc.abstractmethod
    def run(self, call: Call) -> None:
        """See `Experts.apply`."""

    def saved_shapes(self, num_tokens: int) -> SavedShapes:
        """See `Experts.saved_shapes`."""
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

    def run_saving(self, call: Call, saved: Mapping[str, torch.Tensor]) -> None:
        """See `Experts.apply_saving`."""
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

    def backward_workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `Experts.backward_workspace_shapes`."""
        return self.workspace_shapes(num_tokens)

    def run_backward(self, call: Call, grads: Gradients, saved: Mapping[str, torch.Tensor]) -> None:
        """See `Experts.apply_backward`; the call's `out` is the gradient of the output, only read."""
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")


class LoadedExperts(Experts):
    """Experts that delegate to an implementation; a subclass declares its facts and names it, as `module:Class`."""

    implemented_by: ClassVar[str]

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        self.implementation = self._load()

    def _load(self) -> Implementation:
        """Imports the implementation and constructs it from `self`."""
        implementation: Implementation = pkgutil.resolve_name(self.implemented_by)(self)
        return implementation

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return self.implementation.permute_weights(weights)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.implementation.workspace_shapes(num_tokens)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        self.implementation.run(Call(out, inputs, weights, workspace13, workspace2))

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


def scaled_input_reasons(problem: MoEProblem) -> list[str]:
    """Refuses gradients where the routing weight scales inputs, which only the kernels that infer do."""
    if not problem.gradients or not problem.apply_router_weight_on_input:
        return []
    return ["requires apply_router_weight_on_input=False where gradients are asked, got True"]

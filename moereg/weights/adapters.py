"""ExpertAdapters: low-rank adapters (LoRA) of a layer's experts, in canonical order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.arguments import check_instance, check_list, check_number, check_one_of
from moereg.errors import ArgumentError
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import MATRICES
from moereg.weights.expert_weights import ExpertWeights

ADAPTER_TENSORS: Final = ("w13_a", "w13_b", "w2_a", "w2_b")
"""Names of the tensors, as in `ExpertAdapters`."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ExpertAdapters:
    """One adapter of each expert: it computes with `w13 + w13_scaling * w13_b @ w13_a`, and likewise with w2.

    R is the rank, which may differ between w13 and w2. Either of them may be without an adapter: None, in pairs.
    `MoEKernel` takes adapters at a call and `MoELayer` when made, for problems with gradients of `adapters`.

    Attributes:
        w13_a: [E,R,H], any float dtype; a layer computes in its own.
        w13_b: [E,2I,R], gate rows first; [E,I,R] without a gate.
        w2_a: [E,R,I].
        w2_b: [E,H,R].
        w13_scaling: alpha / R, or with rank stabilization alpha / sqrt(R).
        w2_scaling: Likewise.

    Raises:
        ArgumentError: A tensor comes without the other one of its pair, or a value has another type.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, gradients={"adapters"}, adapter_rank=4
        ... )
        >>> adapters = moereg.ExpertAdapters.initial(problem, alpha=8, targets=("w13",))
        >>> {name: list(tensor.shape) for name, tensor in adapters.tensors().items()}
        {'w13_a': [8, 4, 64], 'w13_b': [8, 64, 4]}
        >>> adapters.w13_scaling
        2.0
    """

    w13_a: torch.Tensor | None = None
    w13_b: torch.Tensor | None = None
    w2_a: torch.Tensor | None = None
    w2_b: torch.Tensor | None = None
    w13_scaling: float = 1.0
    w2_scaling: float = 1.0

    def __post_init__(self) -> None:
        """Checks types and pairs."""
        for name, tensor in self.tensors().items():
            check_instance(name, tensor, torch.Tensor, "pass one as in the text of ExpertAdapters")
        for name in MATRICES:
            if (getattr(self, f"{name}_a") is None) != (getattr(self, f"{name}_b") is None):
                raise ArgumentError(f"{name}_a and {name}_b are one adapter, got one of the two; pass both or none")
            if not torch.compiler.is_compiling():  # There a scaling may be a symbol, which has no value yet.
                check_number(f"{name}_scaling", getattr(self, f"{name}_scaling"))

    @classmethod
    def initial(
        cls,
        problem: MoEProblem,
        alpha: float,
        *,
        targets: tuple[str, ...] = MATRICES,
        rank_stabilized: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ExpertAdapters:
        """Adapters that change nothing yet: `a` is random as in torch's linear layers, `b` is zero.

        Args:
            problem: The layer; its `adapter_rank` is R.
            alpha: Numerator of the scaling.
            targets: Which matrices get one, of `w13` and `w2`.
            rank_stabilized: Whether to divide alpha by sqrt(R) instead of R.
            dtype: None means the problem's.
            device: None means torch's default.

        Raises:
            ArgumentError: The problem has no `adapter_rank`, or a value has another type.
            UnknownNameError: A target is unknown.
        """
        check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
        rank = problem.adapter_rank
        if not rank:
            raise ArgumentError(f"adapters have the problem's adapter_rank, got none in {problem}; make it with one")
        check_number("alpha", alpha)
        check_list("targets", targets, lambda name, value: check_one_of(name, value, MATRICES))
        tensors: dict[str, Any] = {
            name: torch.zeros(shape, dtype=dtype or problem.torch_dtype, device=device)
            for name, shape in adapter_shapes(problem, rank).items()
            if name.split("_")[0] in targets
        }
        for name, tensor in tensors.items():
            if name.endswith("_a"):
                tensor.uniform_(-1 / math.sqrt(tensor.shape[2]), 1 / math.sqrt(tensor.shape[2]))
        scaling = alpha / (math.sqrt(rank) if rank_stabilized else rank)
        return cls(**tensors, w13_scaling=scaling, w2_scaling=scaling)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        return {name: tensor for name in ADAPTER_TENSORS if (tensor := getattr(self, name)) is not None}

    def with_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> ExpertAdapters:
        """Others with the same scaling."""
        changed: dict[str, Any] = {**tensors}
        return dataclasses.replace(self, **changed)

    def computed_in(self, dtype: torch.dtype) -> ExpertAdapters:
        """Itself with contiguous tensors in a layer's dtype, which autograd follows."""
        tensors = self.tensors()
        if all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in tensors.values()):
            return self
        return self.with_tensors({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()})

    def check_against(self, problem: MoEProblem, device: torch.device) -> None:
        """Checks shapes, dtypes and devices.

        Args:
            problem: The layer.
            device: The layer's.

        Raises:
            ArgumentError: They are not of this layer, or their rank exceeds its `adapter_rank`.
        """
        for name in MATRICES:
            tensor = getattr(self, f"{name}_a")
            if tensor is None:
                continue
            rank = tensor.shape[1] if tensor.dim() == 3 else 1
            if rank < 1:
                raise ArgumentError(f"{name}_a must have a rank of 1 or more, got {list(tensor.shape)}; leave it out")
            if rank > problem.adapter_rank:
                raise ArgumentError(
                    f"{name}_a has rank {rank}, and the problem's adapter_rank is {problem.adapter_rank}; make the "
                    f"problem with adapter_rank={rank} or more"
                )
            for place, shape in adapter_shapes(problem, rank).items():
                if not place.startswith(name):
                    continue
                tensor = getattr(self, place)
                if tuple(tensor.shape) != shape or not tensor.dtype.is_floating_point or tensor.device != device:
                    raise ArgumentError(
                        f"{place} must be {list(shape)}, of a float dtype and on {device}, got {list(tensor.shape)} "
                        f"{tensor.dtype} on {tensor.device}"
                    )

    def merged(self, weights: ExpertWeights) -> ExpertWeights:
        """Weights of a layer that computes the same without adapters.

        Args:
            weights: The layer's, in 16 or 32 bits.

        Returns:
            New tensors for what has an adapter; sums are in fp32, rounded once, one expert after the other.

        Raises:
            ArgumentError: The weights are quantized.
        """
        if weights.scheme.weight is not None:
            raise ArgumentError(
                f"merging adapters requires weights in 16 or 32 bits, got {weights.scheme.name}; restore them first "
                "with moereg.quantize.dequantize_weights"
            )
        tensors = weights.tensors()
        for name in MATRICES:
            a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
            if a is None:
                continue
            scaling = getattr(self, f"{name}_scaling")
            with torch.no_grad():
                made = torch.empty_like(tensors[name], memory_format=torch.contiguous_format)
                for target, weight, left, right in zip(made, tensors[name], b, a, strict=True):
                    target.copy_(torch.addmm(weight.float(), left.float(), right.float(), alpha=scaling))
            tensors[name] = made
        return ExpertWeights.unchecked(tensors, weights.scheme)


def adapter_shapes(problem: MoEProblem, rank: int) -> dict[str, tuple[int, int, int]]:
    """Shapes of adapters of a rank, by name."""
    experts, hidden, width = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    return {
        "w13_a": (experts, rank, hidden),
        "w13_b": (experts, problem.activation.num_halves * width, rank),
        "w2_a": (experts, rank, width),
        "w2_b": (experts, hidden, rank),
    }

"""The Experts base class: the contract of a backend."""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Mapping
from typing import ClassVar, Final, TypeAlias

import torch

from moereg.platforms import Platform
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import CANONICAL, ExpertWeights, PermutedWeights

__all__ = ["INPUT_FORMS", "OUTPUT_FORMS", "ExpertInputs", "Experts", "Facts", "Gradients"]

OUTPUT_FORMS: Final = ("reduced", "per_route", "per_expert")
INPUT_FORMS: Final = ("unquantized", "quantized")

SavedShapes: TypeAlias = "Mapping[str, tuple[tuple[int, ...], torch.dtype]]"
"""Names of tensors to their shapes and dtypes."""


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """The inputs of `Experts.apply`.

    Attributes:
        hidden_states: [T,H], or [E,max_T,H] in the batched format.
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int32, global experts; ids outside [0, num_experts) and unmapped ones add nothing.
        expert_num_tokens: [E] int32, each expert's valid rows in the batched format, else None.
        expert_map: [num_experts] int32, local expert or -1; None if all experts are local.
        hidden_scale: Scales of `hidden_states` if they arrive quantized in the computed scheme: [T,groups] in its scale
            dtype, contiguous. Always None for a class whose `input_form` is not `quantized`.
        adapters: Low-rank adapters of the experts, in the problem's dtype, contiguous. Always None in `apply`.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_num_tokens: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    hidden_scale: torch.Tensor | None = None
    adapters: ExpertAdapters | None = None


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Outputs of `Experts.apply_backward`: contiguous tensors, None for what is not asked for.

    Attributes:
        hidden_states: [T,H] in the problem's dtype.
        topk_weights: [T,K] fp32; 0 for routes without an expert here.
        w13: [E,2I,H] in the problem's dtype, gate rows first as in `ExpertWeights`; [E,I,H] without a gate.
        w2: [E,H,I] in the problem's dtype.
        w13_bias: [E,2I] or [E,I] in the bias's dtype.
        w2_bias: [E,H] in the bias's dtype.
        w13_a: [E,R,H] in the problem's dtype; this and the next three as in `ExpertAdapters`.
        w13_b: [E,2I,R] or [E,I,R].
        w2_a: [E,R,I].
        w2_b: [E,H,R].
        accumulate: Whether gradients of weights, biases and adapters are added to what their tensors hold; otherwise
            those are overwritten. The first two are always overwritten.
    """

    hidden_states: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    w13: torch.Tensor | None = None
    w2: torch.Tensor | None = None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_a: torch.Tensor | None = None
    w13_b: torch.Tensor | None = None
    w2_a: torch.Tensor | None = None
    w2_b: torch.Tensor | None = None
    accumulate: bool = False


def _is_interpreted(value: object) -> bool:
    """Whether this is a Triton kernel that runs in the interpreter. Its class is known by name: nothing is imported."""
    while type(value).__module__ == "triton.runtime.autotuner":  # autotune and heuristics wrap a kernel.
        value = getattr(value, "fn", None)
    return type(value).__module__ == "triton.runtime.interpreter"


class Experts(abc.ABC):
    """One way to run the experts of one layer; holds no tensors.

    A subclass stands for a weight layout and calling convention, not for a scheme. It declares `facts`, may add reasons
    that these cannot express, permutes weights once and applies them many times. Layers with equal problems may share
    an instance.

    moereg passes all arguments by name. A subclass may omit those that have a default here, and add its own with
    defaults.

    Attributes:
        problem: The layer.
        platform: The platform to run on.
        computes: The scheme that it computes for the problem's weights.
    """

    facts: ClassVar[Facts] = Facts()
    output_form: ClassVar[str] = "reduced"
    """`reduced` [T,H] | `per_route` [T,K,H] | `per_expert` [E,max_T,H]; finalize weights and sums the last two."""
    input_form: ClassVar[str] = "unquantized"
    """`unquantized`, or `quantized` if `apply` also takes quantized tokens in the standard format, which
    `ExpertInputs.hidden_scale` then indicates."""
    wide_output: ClassVar[bool] = False
    """Whether `apply` writes fp32 in a float16 layer if finalize weights or adds its rows: unweighted rows may exceed
    float16's range even if the layer's output does not."""
    wide_intermediate: ClassVar[bool] = False
    """Whether a float16 layer with 16-bit activations is right where its intermediate exceeds 65,504, since the class
    keeps or recomputes it in fp32. In others, such a token's row is infinite or NaN."""
    layouts: ClassVar[tuple[str, ...]] = ()
    """Layouts of permuted weights that `apply` reads, preferred first."""
    shared_layouts: ClassVar[tuple[str, ...]] = ()
    """Those of `layouts` whose bytes are a documented convention: classes that declare the same name permute equal
    weights to equal bytes, and each reads, where tensors begin at multiples of 16 bytes, what another one permuted."""

    @property
    def rows_dtype(self) -> torch.dtype:
        """Dtype of the rows that `apply` writes."""
        dtype = self.problem.torch_dtype
        return torch.float32 if self.wide_output and dtype == torch.float16 else dtype

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        """Makes the experts of a layer, without weights.

        Args:
            problem: The layer; its `quant` is the weights' scheme.
            platform: The platform to run on.
            computes: The cell's scheme to compute: None means the problem's; otherwise it has the same weights with
                16-bit activations. `make_kernel` passes it; an override forwards it, or omits it and finds it in
                `self.computes` once methods are called.
        """
        self.problem = problem
        self.platform = platform
        self.computes = problem.quant if computes is None else computes

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """All reasons that `facts` cannot express; empty means supported.

        Pure, cheap, imports no kernel library and never raises; an exception is reported as the backend's bug. A reason
        is a lowercase clause, rule then fact: `requires hidden_size % 128 == 0, got 2880`.
        """
        return []

    @classmethod
    def reads_in_place(cls) -> bool:
        """Whether it reads the tensors of `ExpertWeights` where their owner keeps them, and never a copy."""
        return cls.layouts == (CANONICAL,)

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        """Torch device types whose tensors this reads when it runs for `platform`.

        The platform's, and the CPU if Triton's interpreter runs the kernels that the class's module names.
        """
        names = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        is_interpreted = any(_is_interpreted(value) for value in names.values())
        return (platform.device_type, "cpu") if is_interpreted else (platform.device_type,)

    @classmethod
    def tuning_state(cls) -> str:
        """A digest of files that decide this class's speed and that its own code does not name, such as tactics.

        Measured times hold while it stays the same. Cheap: asked once a process.
        """
        return ""

    @abc.abstractmethod
    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Reorders canonical weights into one of `layouts`.

        Pure: does not change inputs, returns views of tensors that are already right, and works expert by expert so
        that peak memory stays near one copy.

        Args:
            weights: The problem's weights, checked, contiguous and without gradients.
            problem: The layer.
        """

    @abc.abstractmethod
    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of workspace13 and workspace2 in the problem's dtype for `num_tokens`; monotonic in tokens.

        `num_tokens` is max_T in the batched format.
        """

    @abc.abstractmethod
    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts.

        Args:
            out: Overwritten; shape by `output_form`, dtype the problem's, or fp32 by `wide_output`; aliases no input.
            inputs: Only read; T is at least 1.
            weights: Weights in one of `layouts`.
            workspace13: Scratch memory of the shape from `workspace_shapes`, 256-byte aligned, contents undefined.
            workspace2: Likewise; the two do not overlap.

        No host synchronization and, if `facts.graph_capture`, no allocation that a capture forbids.
        """

    # Training: for classes whose facts name gradients. They read weights in layout `canonical` if these are trained,
    # or restored because a frozen layer is quantized.

    def saved_shapes(self, problem: MoEProblem, num_tokens: int) -> SavedShapes:
        """Shapes and dtypes, by name, of the tensors that a forward pass keeps for the backward pass.

        Inputs and weights are kept anyway. There is room for the rows before the activation, [N,2I] or without a gate
        [N,I] in the problem's dtype, for two rows [N,R] of the problem's `adapter_rank`, for as many rows again up to
        `GUARD_ROWS`, and for the order of routes: 24 bytes a route and 32 an expert.
        """
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

    def apply_saving(
        self,
        out: torch.Tensor,
        saved: Mapping[str, torch.Tensor],
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the experts like `apply`, with their adapters if there are any, and keeps what the backward pass needs.

        Args:
            out, inputs, weights, workspace13, workspace2: As in `apply`; the output form is `reduced`.
            saved: Overwritten: contiguous tensors of the shapes from `saved_shapes`, contents undefined.
        """
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

    def backward_workspace_shapes(
        self, problem: MoEProblem, num_tokens: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the workspaces of `apply_backward`, as `workspace_shapes` gives those of `apply`."""
        return self.workspace_shapes(problem=problem, num_tokens=num_tokens)

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
        """Computes the gradients that are asked for, and only those.

        Sums over routes and tokens in fp32 and in a fixed order: equal inputs give equal bits. Synchronizes with the
        host no more than `apply` does.

        Args:
            grads: Tensors to write: every element, with zeros for experts without tokens.
            grad_out: [T,H] in the problem's dtype, contiguous: the gradient of the output; only read.
            saved: As `apply_saving` left them; only read, since a graph may be kept for another backward pass.
            inputs, weights: As `apply_saving` got them, adapters included; only read.
            workspace13: Scratch memory of the shape from `backward_workspace_shapes`, as in `apply`.
            workspace2: Likewise.
        """
        raise NotImplementedError(f"{type(self).__name__} computes no gradients")

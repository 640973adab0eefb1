"""The Experts base class: what a backend's class declares and does."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Final

import torch

from moereg.platforms import Platform
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.permuted import ExpertWeights, PermutedWeights

__all__ = ["INPUT_FORMS", "OUTPUT_FORMS", "BuildPlan", "ExpertInputs", "Experts", "Facts", "KernelBuilder"]

OUTPUT_FORMS: Final = ("reduced", "per_route", "per_expert")
INPUT_FORMS: Final = ("unquantized", "quantized")


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """The inputs of `Experts.apply`.

    Attributes:
        hidden_states: [T,H], or [E,max_T,H] in the batched format.
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int32, global experts; ids outside [0, num_experts) and unmapped ones add nothing.
        expert_num_tokens: [E] int32, valid rows of each expert in the batched format, else None.
        expert_map: [num_experts] int32, local expert or -1; None if all experts are local.
        hidden_scale: Scales of `hidden_states` where those are codes of the scheme that the experts compute: [T,groups]
            in its scale dtype, contiguous. Only a class whose `input_form` is `quantized` is given them; else None.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expert_num_tokens: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None
    hidden_scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """A build as it would run.

    Attributes:
        parts: Names of the kernel sets to build, those that are built already left out.
        built: Names of those that are.
        num_steps: Files to compile, and links.
        cpu_seconds: Of one core, estimated from measured files; None where nothing was measured.
        bytes_per_job: Most memory that one compiler takes.
        target: The file that is written.
        token: What `build` needs to know beside; the builder's own.
    """

    parts: tuple[str, ...]
    built: tuple[str, ...]
    num_steps: int
    cpu_seconds: float | None
    bytes_per_job: int
    target: Path
    token: object = dataclasses.field(default=None, repr=False, compare=False)

    def num_jobs(self, num_cores: int, free_bytes: int | None) -> int:
        """Compilers to run at once: one a core, and no more than memory holds."""
        fitting = num_cores if free_bytes is None else free_bytes // self.bytes_per_job
        return max(1, min(num_cores, fitting))


class KernelBuilder(abc.ABC):
    """Builds the kernels of a backend ahead of time, on request and never by surprise: `moereg build-kernels`.

    A backend whose kernels take minutes or hours to compile offers one (`Experts.kernel_builder`). Its probe rejects it
    where they are not built, with the command that builds them.
    """

    @abc.abstractmethod
    def plan(
        self,
        platform: Platform,
        schemes: Sequence[QuantScheme],
        dtypes: Sequence[str],
        parts: Sequence[str],
        folder: Path | None,
    ) -> BuildPlan:
        """Plans a build without compiling anything.

        Args:
            platform: To build for; it need not be this machine.
            schemes: That the backend shall compute; all that it can on the platform where empty.
            dtypes: Of hidden states; bfloat16 alone where empty.
            parts: Sets of kernels to build beside, by the builder's own names.
            folder: To write into; where the backend looks for its kernels if None.

        Raises:
            ArgumentError: A scheme or dtype has no kernels there, or a tool that the build needs is missing.
        """

    @abc.abstractmethod
    def build(self, plan: BuildPlan, jobs: int, advance: Callable[[int, int], None]) -> None:
        """Builds what a plan says and puts it in place, whole or not at all.

        Args:
            plan: From `plan`.
            jobs: Compilers to run at once.
            advance: Called with (steps done, steps in all).

        Raises:
            MoeregError: A compiler failed; its last words are in the message.
        """


class Experts(abc.ABC):
    """One way to run the experts of one layer; holds no tensors.

    A subclass is bounded by the weight layout and calling convention, not by the scheme. It declares `facts`, may add
    reasons that a table cannot say, permutes weights once and applies them many times. Instances may be shared between
    layers of equal problems.

    moereg calls every method by the names of its arguments. A subclass may leave out those that have a default here,
    and may have more of its own that have one.

    Attributes:
        problem: The layer.
        platform: What it runs on.
        computes: The scheme that it computes for the problem's weights.
    """

    facts: ClassVar[Facts] = Facts()
    output_form: ClassVar[str] = "reduced"
    """`reduced` [T,H] | `per_route` [T,K,H] | `per_expert` [E,max_T,H]: finalize weights and sums the last two."""
    input_form: ClassVar[str] = "unquantized"
    """`unquantized`, or `quantized` where `apply` also takes tokens that arrive as codes with scales, standard format:
    `ExpertInputs.hidden_scale` says which call is which."""
    wide_output: ClassVar[bool] = False
    """Whether `apply` writes fp32 in a float16 layer where finalize weights or adds its rows: unweighted, they may be
    beyond the range of float16, though the layer's output is not."""
    layouts: ClassVar[tuple[str, ...]] = ()
    """Layouts of permuted weights that `apply` reads, preferred first."""

    @property
    def rows_dtype(self) -> torch.dtype:
        """Dtype of what `apply` writes for finalize."""
        dtype = self.problem.torch_dtype
        return torch.float32 if self.wide_output and dtype == torch.float16 else dtype

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        """Makes the experts of a layer, without weights.

        Args:
            problem: The layer, whose `quant` says what the weights hold.
            platform: To run on.
            computes: Which of the cell's schemes is computed: the problem's if None, or one of the same weights that
                leaves activations at 16 bits. `make_kernel` says which; an override hands it on to this, or
                leaves it out and finds it in `self.computes` from the first call of a method on.
        """
        self.problem = problem
        self.platform = platform
        self.computes = problem.quant if computes is None else computes

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Every reason that `facts` cannot express; empty means supported.

        Pure, cheap, imports no kernel library and never raises: one that raises is a bug, reported under the backend's
        name. A reason is a lowercase clause, rule then fact: `requires hidden_size % 128 == 0, got 2880`.
        """
        return []

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        """Torch device types that tensors may be on when this runs for `platform`."""
        return (platform.device_type,)

    @classmethod
    def kernel_builder(cls) -> KernelBuilder | None:
        """Builds this class's kernels ahead of time, for `moereg build-kernels`; None where nothing has to be built."""
        return None

    @abc.abstractmethod
    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Reorders canonical weights into one of `layouts`.

        Pure: inputs are unchanged, tensors that are already right are views, work goes expert by expert so that the
        peak stays near one copy.

        Args:
            weights: Of the problem, checked, contiguous and without gradients.
            problem: The layer.
        """

    @abc.abstractmethod
    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of workspace13 and workspace2 in the problem's dtype for a call of `num_tokens`; monotone in tokens.

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
            out: Overwritten, of the shape that `output_form` says, in the problem's dtype, or in fp32 as `wide_output`
                says; aliases no input.
            inputs: Read only; T is at least 1.
            weights: Weights in one of `layouts`.
            workspace13: Scratch of the shape that `workspace_shapes` said, at 256-byte alignment, contents undefined.
            workspace2: As workspace13; the two do not overlap.

        No host synchronization and, where `facts.graph_capture`, no allocation that a capture forbids.
        """

"""The Experts base class: what a backend's class declares, and what it does."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

import torch

from moereg.activations import ACTIVATIONS
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.weights import ExpertWeights, PermutedWeights

__all__ = ["REASON_CODES", "ExpertInputs", "Experts", "Facts", "Reason", "fact_reasons"]

REASON_CODES: Final = (
    "platform",
    "package",
    "probe",
    "denied",
    "not_required",
    "opt_in",
    "quant_scheme",
    "activation",
    "swiglu_limit",
    "bias",
    "dtype",
    "activation_format",
    "placement",
    "router_weight_on_input",
    "alignment",
    "size",
    "graph_capture",
    "deterministic",
    "precision",
    "backend",
    "predicate_error",
)

INPUT_FORMS: Final = ("unquantized", "quantized")
OUTPUT_FORMS: Final = ("reduced", "per_route", "per_expert")


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a cell cannot serve a problem: a closed code and a lowercase clause, rule then fact."""

    code: str
    text: str

    def __post_init__(self) -> None:
        assert self.code in REASON_CODES, self.code


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an experts class can do. Fail closed: what is not declared is rejected.

    Attributes:
        activations: Names.
        activation_scalars: Whether alpha and beta may differ from the activation's standard ones.
        swiglu_limit: Whether the clamp is applied. `swigluoai` has one.
        activation_formats: `standard`, `batched`.
        dtypes: Names of the dtypes of hidden states and output.
        bias: Whether w13_bias and w2_bias are applied.
        placements: `contiguous`, `map`.
        router_weight_on_input: Whether routing weights can scale the input.
        graph_capture: Whether `apply` can be captured in a CUDA graph.
        deterministic: Whether equal inputs give equal bits.
        requires_multiple: Problem field to divisor; other sizes are rejected.
        pads_to: Problem field to divisor; permute pads to it and the kernel slices.
        max_experts: Most local experts, or None.
        max_num_tokens: Most tokens of a call, or None.
    """

    activations: frozenset[str] = frozenset()
    activation_scalars: bool = False
    swiglu_limit: bool = False
    activation_formats: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    bias: bool = False
    placements: frozenset[str] = frozenset()
    router_weight_on_input: bool = False
    graph_capture: bool = False
    deterministic: bool = False
    requires_multiple: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    pads_to: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)
    max_experts: int | None = None
    max_num_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """What `Experts.apply` sees of a call.

    Attributes:
        hidden_states: [T,H], or [E,max_T,H] in the batched format.
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int32, global experts; ids outside [0, num_experts) or not mapped add nothing.
        hidden_scale: Scales of quantized hidden states, else None.
        expert_num_tokens: [E] int32, valid rows of each expert in the batched format, else None.
        expert_map: [num_experts] int32, local expert or -1; None where all experts are local.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    hidden_scale: torch.Tensor | None = None
    expert_num_tokens: torch.Tensor | None = None
    expert_map: torch.Tensor | None = None


class Experts(abc.ABC):
    """One way to run the experts of a layer: a frozen launch plan without tensors.

    A subclass is bounded by the weight layout and calling convention, not by the scheme. It declares `facts`, may add
    reasons that a table cannot say, permutes weights once and applies them many times. Instances may be shared between
    layers of equal problems.

    Attributes:
        problem: The layer.
        platform: What it runs on.
        computes: The scheme that it computes for the problem's weights.
    """

    facts: ClassVar[Facts] = Facts()
    input_form: ClassVar[str] = "unquantized"
    """`unquantized` | `quantized`: whether prepare quantizes hidden states first."""
    output_form: ClassVar[str] = "reduced"
    """`reduced` [T,H] | `per_route` [T,K,H] | `per_expert` [E,max_T,H]: finalize weights and sums the last two."""
    layouts: ClassVar[tuple[str, ...]] = ()
    """Layouts of permuted weights that `apply` reads, preferred first."""

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        """Makes a plan.

        Args:
            problem: The layer, whose `quant` says what the weights hold.
            platform: To run on.
            computes: Which of the cell's schemes is computed: the problem's (where None), or one of the same weights
                that leaves activations at 16 bits. `make_kernel` says which; an override hands it on to this.
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
            out: Overwritten, of the shape that `output_form` says, in the problem's dtype; aliases no input.
            inputs: Read only; T is at least 1.
            weights: Of one of `layouts`.
            workspace13: Scratch of the shape that `workspace_shapes` said, at 256-byte alignment, contents undefined.
            workspace2: As workspace13; the two do not overlap.

        No host synchronization and, where `facts.graph_capture`, no allocation that a capture forbids.
        """


def fact_reasons(facts: Facts, problem: MoEProblem) -> list[Reason]:
    """Every fact in the problem that the class does not declare."""
    activation = problem.activation
    standard = ACTIVATIONS[activation.name]
    # Texts are worded only where they are needed: this runs for every cell of every selection.
    reasons: list[Reason] = []
    if activation.name not in facts.activations:
        reasons.append(Reason("activation", _member("activation", activation.name, facts.activations)))
    if not facts.activation_scalars and (activation.alpha, activation.beta) != (standard.alpha, standard.beta):
        text = f"requires alpha={standard.alpha:g} and beta={standard.beta:g}, got {activation}"
        reasons.append(Reason("activation", text))
    if not facts.swiglu_limit and activation.limit is not None:
        reasons.append(Reason("swiglu_limit", f"does not apply the swiglu clamp, got limit {activation.limit}"))
    if not facts.bias and problem.has_bias:
        reasons.append(Reason("bias", "does not apply biases, got has_bias=True"))
    if problem.dtype not in facts.dtypes:
        reasons.append(Reason("dtype", _member("dtype", problem.dtype, facts.dtypes)))
    if problem.activation_format not in facts.activation_formats:
        text = _member("activation format", problem.activation_format, facts.activation_formats)
        reasons.append(Reason("activation_format", text))
    if problem.placement not in facts.placements:
        reasons.append(Reason("placement", _member("placement", problem.placement, facts.placements)))
    if not facts.router_weight_on_input and problem.apply_router_weight_on_input:
        text = "does not scale inputs by the routing weight, got apply_router_weight_on_input=True"
        reasons.append(Reason("router_weight_on_input", text))
    for field, divisor in sorted(facts.requires_multiple.items()):
        size = getattr(problem, field)
        if size % divisor:
            reasons.append(Reason("alignment", f"requires {field} % {divisor} == 0, got {size}"))
    for field, most in (("num_local_experts", facts.max_experts), ("max_num_tokens", facts.max_num_tokens)):
        count = getattr(problem, field)
        # A problem that does not say how many tokens may come can have too many.
        if most is not None and (count is None or count > most):
            reasons.append(Reason("size", f"requires {field} <= {most}, got {count}"))
    if not facts.graph_capture and problem.graph_capture:
        reasons.append(Reason("graph_capture", "cannot be captured in a CUDA graph, got graph_capture=True"))
    if not facts.deterministic and problem.deterministic:
        reasons.append(Reason("deterministic", "does not give the same bits each time, got deterministic=True"))
    return reasons


def _member(kind: str, name: str, known: Iterable[str]) -> str:
    return f"requires {kind} in ({', '.join(sorted(known)) or 'none'}), got {name}"

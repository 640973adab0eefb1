"""16- and 32-bit weights with gate and up rows alternating: their facts, their packing, and recorded launches."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from moereg.backends._triton.recorded import RecordedExperts
from moereg.experts import ExpertInputs, Facts
from moereg.layouts import aligned, interleave_gate_up, pad_columns, round_up
from moereg.platforms import Platform, PlatformRule
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.weights import ExpertWeights, PermutedWeights

if TYPE_CHECKING:
    from typing import TypeAlias

    from moereg.kernels.gemm.epilogue import GateUpEpilogue
    from moereg.kernels.packed.weights import PackedMatrix

    Matrix: TypeAlias = torch.Tensor | PackedMatrix

# As the kernels have it; repeated because this module must import without triton.
WEIGHT_PAD: Final = 64

# Up to this many rows an expert the Gluon kernels' tiles would be mostly padding: on an H200 they lose 3 % at 32 rows
# (gpt-oss-120b, 1,024 tokens) and win 6 % at 64 (qwen3-30b-a3b, 1,024 tokens).
_MIN_GLUON_ROWS = 40


class InterleavedExperts(RecordedExperts):
    """What does not depend on the activation format; a subclass adds the format to the facts, and the launches."""

    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        bias=True,
        placements=frozenset({"contiguous", "map"}),
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
        pads_to={"hidden_size": WEIGHT_PAD, "intermediate_size": WEIGHT_PAD},
        # The scan over experts keeps one value an expert and thread in registers.
        max_experts=1024,
    )
    layouts = ("gate_up_interleaved_pad64",)
    recorded_weights: ClassVar[tuple[str, ...]] = ("w13", "w2", "w13_bias", "w2_bias")

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        # Compiled for one architecture's own instructions.
        self._has_gluon = PlatformRule("cuda:sm90").matches(platform)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Sizes beyond the kernels' 32-bit offsets within one expert."""
        rows = problem.activation.num_halves * round_up(problem.intermediate_size, WEIGHT_PAD)
        elements = rows * round_up(problem.hidden_size, WEIGHT_PAD)
        if elements >= 2**31:
            return [f"requires fewer than 2**31 elements in one expert's w13, got {elements}"]
        return []

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Interleaves gate and up row by row and zero-pads H of w13 and I of both to multiples of 64.

        Returns:
            `w13` [E, 2 * I_pad, H_pad] (row 2j gate j, row 2j + 1 up j; [E, I_pad, H_pad] where not gated), `w2`
            [E, H, I_pad], and where there are biases `w13_bias` [E, 2 * I_pad] and `w2_bias` [E, H].
        """
        halves = problem.activation.num_halves
        per_expert = {
            "w13": interleave_and_pad(weights.w13, halves),
            "w2": _pad_experts(weights.w2),
        }
        return PermutedWeights(self.layouts[0], {**per_expert, **permute_biases(weights, halves)})

    def _launch(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        launch = self._launch_gluon if self._warp_specialized(inputs) else self._launch_triton
        launch(out, inputs, weights, workspace13, workspace2)

    # Bits of a packed weight; None where weights have the dtype of the activations.
    _packed_bits: int | None = None

    def _matrices(self, weights: PermutedWeights) -> tuple[Matrix, Matrix]:
        """w13 and w2 as the Triton kernels take them."""
        return weights["w13"], weights["w2"]

    @abc.abstractmethod
    def _warp_specialized(self, inputs: ExpertInputs) -> bool:
        """Whether a call runs on the Gluon kernels."""

    @abc.abstractmethod
    def _launch_triton(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """`apply` on the Triton kernels."""

    @abc.abstractmethod
    def _launch_gluon(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """`apply` on the Gluon kernels."""

    def _fits_gluon(self, hidden_states: torch.Tensor, rows_per_expert: float) -> bool:
        """Whether the Gluon kernels can read the rows of a call, and there are enough an expert for them to pay."""
        return (
            self._has_gluon
            and hidden_states.device.type != "cpu"
            and hidden_states.element_size() == 2
            and rows_per_expert > _MIN_GLUON_ROWS
            # Rows are copied by 16 bytes.
            and hidden_states.shape[-1] % 8 == hidden_states.stride(-2) % 8 == hidden_states.data_ptr() % 16 == 0
        )

    def _gate_up_keywords(self, weights: PermutedWeights) -> dict[str, Any]:
        """What either kind of kernel for the first GEMM is told of its epilogue."""
        activation = self.problem.activation
        return {
            "activation": activation.name,
            "gated": activation.gated,
            "alpha": activation.alpha,
            "beta": activation.beta,
            "limit": activation.limit,
            "bias": weights.get("w13_bias"),
        }

    def _epilogue(self, weights: PermutedWeights) -> GateUpEpilogue:
        from moereg.kernels.gemm.epilogue import GateUpEpilogue

        return GateUpEpilogue(**self._gate_up_keywords(weights))


def permute_biases(weights: ExpertWeights, halves: int) -> dict[str, torch.Tensor]:
    """`w13_bias` [E, 2 * I_pad] interleaved and `w2_bias` [E, H], where there are biases."""
    if weights.w13_bias is None or weights.w2_bias is None:
        return {}
    # A bias is a weight with one column, which is not padded.
    w13_bias = interleave_and_pad(weights.w13_bias.unsqueeze(2), halves, columns=1).squeeze(2)
    return {"w13_bias": w13_bias, "w2_bias": aligned(weights.w2_bias)}


def elements_of_plan(problem: MoEProblem, num_ints: int) -> int:
    """Elements of the problem's dtype that hold a plan of so many int32, at 256-byte granularity."""
    return round_up(4 * num_ints, 256) // problem.torch_dtype.itemsize


def interleave_and_pad(w13: torch.Tensor, halves: int, columns: int | None = None) -> torch.Tensor:
    """[E, halves * I, C], gate first, to [E, halves * I_pad, C_pad] interleaved; a view where that changes nothing."""
    num_experts, rows, width = w13.shape
    padded_rows = halves * round_up(rows // halves, WEIGHT_PAD)
    padded_columns = round_up(width, WEIGHT_PAD) if columns is None else columns
    if halves == 1 and (rows, width) == (padded_rows, padded_columns):
        return aligned(w13)
    permuted = w13.new_zeros(num_experts, padded_rows, padded_columns)
    for expert, padded in zip(w13, permuted[:, :rows, :width], strict=True):
        if halves == 2:
            interleave_gate_up(expert, out=padded)
        else:
            padded.copy_(expert)
    return permuted


def _pad_experts(weight: torch.Tensor) -> torch.Tensor:
    return aligned(pad_columns(weight, round_up(weight.shape[2], WEIGHT_PAD)))

"""ExpertWeights: the experts of a layer in canonical order."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Mapping

import torch

from moereg.arguments import check_count, check_device, check_instance
from moereg.errors import ArgumentError, described
from moereg.runtime.memory import format_bytes
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import MATRICES, TENSOR_ROLES, QuantScheme, TensorRole, get_scheme, tensor_name
from moereg.weights.checks import check_row, check_scale, check_zero_points, checks_values


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ExpertWeights:
    """The experts of one layer on one rank, in the one canonical order. E is `num_local_experts`.

    Attributes:
        w13: [E,2I,H], gate rows first, then up rows; [E,I,H] where the activation is not gated. Quantized schemes store
            K packed as the scheme's row says.
        w2: [E,H,I].
        w13_bias, w2_bias: [E,2I] (or [E,I]) and [E,H], in the problem's dtype or fp32.
        w13_scale, w2_scale: Group scales, w = (q - zero_point) * scale * scale_2; docs/quantization.md has the shapes.
        w13_scale_2, w2_scale_2: fp32 [E], w13 also [E,2] where gate and up differ.
        a13_scale, a2_scale: Static activation scales, fp32 [E] or a scalar; absent means dynamic.
        w13_zero_point, w2_zero_point: uint8, packed like the weights.
        quant: Scheme that the tensors are checked against.

    Raises:
        ArgumentError: A tensor is missing, superfluous, of another shape or dtype than the scheme's row, or on another
            device than w13; on a CPU, or with MOEREG_DEBUG=1, also a scale that is negative or not finite, a static
            activation scale that is not positive, or zero points that are packed otherwise.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w13_scale_2: torch.Tensor | None = None
    w2_scale_2: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    w13_zero_point: torch.Tensor | None = None
    w2_zero_point: torch.Tensor | None = None
    quant: QuantScheme | str = "unquantized"

    def __post_init__(self) -> None:
        object.__setattr__(self, "quant", get_scheme(self.quant))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_optional = field.default is None
            if field.name != "quant" and not (isinstance(value, torch.Tensor) or (value is None and is_optional)):
                raise ArgumentError(
                    f"{field.name} must be a tensor{' or None' * is_optional}, got {type(value).__name__}"
                )
            if isinstance(value, torch.Tensor) and value.layout != torch.strided:
                raise ArgumentError(f"{field.name} must be a dense tensor, got layout {value.layout}; call .to_dense()")
        for name, tensor in self.tensors().items():
            if tensor.device != self.w13.device:
                raise ArgumentError(
                    f"all expert weights must be on one device, got {name} on {tensor.device} and w13 on "
                    f"{self.w13.device}; move one of them"
                )
        if self.w13.dim() != 3 or self.w2.dim() != 3:
            raise ArgumentError(
                f"w13 must be [E,2I,H] (or [E,I,H] not gated) and w2 [E,H,I], got w13 {list(self.w13.shape)} "
                f"and w2 {list(self.w2.shape)}; stack the experts along dim 0"
            )
        if 0 in (*self.w13.shape, *self.w2.shape):
            raise ArgumentError(
                f"w13 and w2 must hold at least one expert, row and column, got w13 {list(self.w13.shape)} and w2 "
                f"{list(self.w2.shape)}; a rank without experts has no layer to run"
            )
        if self.w2.shape[0] != self.num_experts:
            raise ArgumentError(
                f"w13 and w2 must hold the same experts, got {self.num_experts} and {self.w2.shape[0]}; stack those of "
                "this rank along dim 0 of both"
            )
        fmt = self.scheme.weight
        if self.w13.shape[2] != self.scheme_columns(self.hidden_size) and fmt is not None and fmt.bits == 4:
            raise ArgumentError(
                f"w13 must have hidden_size / 2 columns in scheme {self.scheme.name}, two 4-bit codes to a byte, where "
                f"w2 has hidden_size rows, got w13 {list(self.w13.shape)} and w2 {list(self.w2.shape)}; "
                "pack codes with moereg.quantize.pack_nibbles, and let the loader transpose and trim checkpoints"
            )
        if self.w13.shape[2] != self.scheme_columns(self.hidden_size):
            raise ArgumentError(
                f"w13 columns and w2 rows must both be hidden_size, got w13 {list(self.w13.shape)} and w2 "
                f"{list(self.w2.shape)}; transposed checkpoints must be transposed by the loader"
            )
        if self.w2.shape[2] != self.scheme_columns(self.intermediate_size):
            raise ArgumentError(
                f"w13 must have 2*I rows (gated) or I rows (not gated) where w2 has I columns, got w13 "
                f"{list(self.w13.shape)} and w2 {list(self.w2.shape)}"
            )
        self._check_rows()
        self._check_values()

    @classmethod
    def unchecked(cls, tensors: Mapping[str, torch.Tensor], quant: QuantScheme) -> ExpertWeights:
        """Weights that are not checked: for parts of weights that were.

        Args:
            tensors: By field name.
            quant: Their scheme.
        """
        weights = object.__new__(cls)
        for field in dataclasses.fields(cls):
            object.__setattr__(weights, field.name, quant if field.name == "quant" else tensors.get(field.name))
        return weights

    @property
    def num_experts(self) -> int:
        """E, experts on this rank."""
        return self.w13.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w2.shape[1]

    @property
    def num_halves(self) -> int:
        """2 where w13 holds gate and up rows, else 1."""
        rows, columns = self.w13.shape[1], self.w2.shape[2]
        return 2 if rows % 2 == 0 and self.scheme_columns(rows // 2) == columns else 1

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.w13.shape[1] // self.num_halves

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors().values())

    def expert(self, expert: int) -> ExpertWeights:
        """One expert alone, E = 1: views of the same tensors. A static scale that serves all experts stays one number.

        Raises:
            ArgumentError: There is no such expert.
        """
        check_expert(expert, self.num_experts)
        tensors = {name: value[expert : expert + 1] if value.dim() else value for name, value in self.tensors().items()}
        return ExpertWeights.unchecked(tensors, self.scheme)

    def __repr__(self) -> str:
        dtype = str(self.w13.dtype).removeprefix("torch.")
        held = f"{dtype} {self.scheme.name}" if self.scheme.weight is None else self.scheme.name
        return (
            f"ExpertWeights({self.num_experts} experts, w13 {list(self.w13.shape)}, w2 {list(self.w2.shape)}, {held}"
            f"{', biases' if self.w13_bias is not None else ''}, {format_bytes(self.num_bytes)} on {self.w13.device})"
        )

    def scheme_columns(self, columns: int) -> int:
        """Stored columns of a row of `columns` elements in this scheme."""
        fmt = self.scheme.weight
        return columns if fmt is None else fmt.packed_columns(columns)

    def _check_rows(self) -> None:
        has_bias = self.w13_bias is not None or self.w2_bias is not None
        rows = self.scheme.tensor_rows(
            self.num_experts, self.hidden_size, self.intermediate_size, self.num_halves, has_bias
        )
        for row in rows:
            check_row(row, getattr(self, row.name), self.scheme)
        if unknown := set(self.tensors()) - {row.name for row in rows}:
            raise ArgumentError(
                f"scheme {self.scheme.name} has no tensor {sorted(unknown)[0]!r}; pass quant=... if the weights are of "
                "another scheme, or leave it out"
            )

    def _check_values(self) -> None:
        """Checks that need the values of tensors."""
        # A fake tensor claims to be on a CPU but has no values.
        if type(self.w13) not in (torch.Tensor, torch.nn.Parameter) or not checks_values(self.w13.device):
            return
        for name, scale in self.tensors("scale", "scale_2", "activation_scale").items():
            check_scale(name, scale)
        if self.scheme.weight is None or self.scheme.weight.bits != 4:
            return
        zero_points, scales = self.tensors("zero_point"), self.tensors("scale")
        for matrix in MATRICES:
            name = tensor_name(matrix, "zero_point")
            if name in zero_points:
                check_zero_points(name, zero_points[name], scales[tensor_name(matrix, "scale")].shape[-1])

    @property
    def scheme(self) -> QuantScheme:
        """`quant` as a value."""
        assert isinstance(self.quant, QuantScheme)
        return self.quant

    def tensors(self, *roles: TensorRole) -> dict[str, torch.Tensor]:
        """The present tensors by field name; only those of some roles, if any are given."""
        values = {name: getattr(self, name) for name, role in TENSOR_ROLES.items() if not roles or role in roles}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str) -> ExpertWeights:
        """The same weights on a device; itself if they are there already.

        Raises:
            ArgumentError: The argument is not a device, or this torch build cannot use it.
        """
        device = check_device("device", device)
        try:
            torch.empty(0, device=device)
        except torch.OutOfMemoryError:
            raise
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise ArgumentError(
                f"device must be one that this torch build can use, got {str(device)!r}: {described(error)}"
            ) from None
        moved = {name: tensor.to(device) for name, tensor in self.tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def contiguous(self) -> ExpertWeights:
        """The same weights as plain row-major tensors, as every `permute_weights` gets them.

        Returns:
            Views without gradients of tensors that are already in order; copies of expanded, transposed and other
            strided ones. Values are not checked again.
        """
        plain = copy.copy(self)
        for name, tensor in self.tensors().items():
            # The view has a new tensor's strides: where a size is 1, a contiguous tensor may have any stride.
            object.__setattr__(plain, name, tensor.detach().contiguous().view(-1).view(tensor.shape))
        return plain

    def check_against(self, problem: MoEProblem) -> None:
        """Checks that these are the weights of `problem`.

        Raises:
            ArgumentError: Sizes, dtype, biases or scheme disagree.
        """
        check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
        if self.scheme != problem.quant:
            raise ArgumentError(
                f"the weights are {self.scheme.description} but the problem says {problem.quant.description}; "
                "make both name the checkpoint's scheme"
            )
        hidden_size, intermediate_size = problem.hidden_size, problem.intermediate_size
        sizes = {
            "w13": (problem.activation.num_halves * intermediate_size, self.scheme_columns(hidden_size)),
            "w2": (hidden_size, self.scheme_columns(intermediate_size)),
        }
        for name, size in sizes.items():
            expected, found = [problem.num_local_experts, *size], list(self.tensors()[name].shape)
            if found != expected:
                raise ArgumentError(
                    f"{name} must be {expected} for {problem}, got {found}; "
                    "correct the problem's sizes or pass the weights of this rank"
                )
        for name, tensor in self.tensors("weight", "bias").items():
            is_bias = TENSOR_ROLES[name] == "bias"
            if not is_bias and self.scheme.weight is not None:
                continue
            allowed = (problem.torch_dtype, torch.float32) if is_bias else (problem.torch_dtype,)
            if tensor.dtype not in allowed:
                names = " or ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in allowed))
                raise ArgumentError(f"{name} must be {names} for this problem, got {tensor.dtype}; convert one")
        if problem.has_bias != (self.w13_bias is not None):
            word = "with" if self.w13_bias is not None else "without"
            raise ArgumentError(f"the problem says has_bias={problem.has_bias}, got weights {word} biases")


def check_expert(expert: int, num_experts: int) -> None:
    """Checks that a local expert is an integer in [0, num_experts)."""
    check_count("expert", expert, minimum=-sys.maxsize)
    if not 0 <= expert < num_experts:
        raise ArgumentError(f"expert must be a local expert in [0, {num_experts}), got {expert}; count this rank's")

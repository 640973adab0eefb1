"""How tokens travel: their bytes in the layer's dtype, or as codes with scales where the experts round them anyway."""

from __future__ import annotations

import abc
from typing import NamedTuple

import torch

from moereg.problem import MoEProblem
from moereg.quant import WHOLE, QuantScheme

__all__ = ["CodedWire", "PlainWire", "Received", "Wire", "as_bytes", "join_columns", "split_columns", "wire_scheme"]


class Received(NamedTuple):
    """Tokens that arrived.

    Attributes:
        hidden_states: [n,H] in the layer's dtype, or codes.
        hidden_scale: Scales of the codes; None where they were restored or never made.
    """

    hidden_states: torch.Tensor
    hidden_scale: torch.Tensor | None = None


class Wire(abc.ABC):
    """Tokens as bytes: every backend of torch.distributed moves uint8, and not every one moves 8-bit floats.

    Attributes:
        name: As texts and ranks compare it.
        widths: Bytes a token of each of its columns.
    """

    name: str
    widths: tuple[int, ...]

    @property
    def bytes_per_token(self) -> int:
        """Of hidden state and scales."""
        return sum(self.widths)

    @abc.abstractmethod
    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, width] uint8 columns of [T,H]."""

    @abc.abstractmethod
    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        """The inverse, of columns that are contiguous each."""


class PlainWire(Wire):
    """The bytes of the layer's dtype."""

    def __init__(self, problem: MoEProblem) -> None:
        self._dtype = problem.torch_dtype
        self.name = problem.dtype
        self.widths = (problem.hidden_size * self._dtype.itemsize,)

    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (as_bytes(hidden_states),)

    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        return Received(columns[0].view(self._dtype))


class CodedWire(Wire):
    """Codes and scales of the activation format that the experts compute with.

    What was restored to bfloat16 rounds to the same numbers again: the largest magnitude of a group is its scale times
    the largest code and is exact, or the scale is a power of two, and the others move by less than half a step. So
    experts that round for themselves give the same bits as with `PlainWire`.
    """

    def __init__(self, problem: MoEProblem, scheme: QuantScheme, keeps_codes: bool = False) -> None:
        """Reads sizes.

        Args:
            problem: The layer.
            scheme: What the experts compute.
            keeps_codes: Whether `decode` hands out codes and scales, for experts whose `input_form` is `quantized`.
        """
        fmt = scheme.activation
        assert fmt is not None
        assert wire_scheme(scheme, problem) is not None
        self._scheme, self._hidden_size, self._dtype = scheme, problem.hidden_size, problem.torch_dtype
        self._code_dtype = fmt.storage_dtype
        self._scale_dtype: torch.dtype = getattr(torch, fmt.scale_dtype)
        self._num_scales = 1 if fmt.group[1] == WHOLE else -(-problem.hidden_size // fmt.group[1])
        self._keeps_codes = keeps_codes
        self.name = f"{fmt.dtype} with {fmt.scale_dtype} scales"
        self.widths = (
            problem.hidden_size * self._code_dtype.itemsize,
            self._num_scales * self._scale_dtype.itemsize,
        )

    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from moereg.quantize import quantize_activations  # Loads torch, which choosing does without.

        if hidden_states.shape[0] == 0:
            return tuple(hidden_states.new_empty((0, width), dtype=torch.uint8) for width in self.widths)
        found = quantize_activations(hidden_states, self._scheme)
        return as_bytes(found.q), as_bytes(found.scale.reshape(len(found.q), -1))

    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        from moereg.quantize import Quantized, dequantize_activations

        codes, scales = columns[0].view(self._code_dtype), columns[1].view(self._scale_dtype)
        if self._keeps_codes:
            return Received(codes, scales)
        if codes.shape[0] == 0:
            return Received(codes.new_empty(codes.shape, dtype=self._dtype))
        restored = dequantize_activations(Quantized(codes, scales), self._scheme, self._hidden_size, torch.float32)
        return Received(restored.to(self._dtype))


def wire_scheme(scheme: QuantScheme, problem: MoEProblem) -> QuantScheme | None:
    """The scheme as tokens can travel in it, or None: where experts round each token alone to 8 bits, dynamically.

    Args:
        scheme: What the experts compute.
        problem: The layer. Where its routing weights scale inputs, rounding comes after that, at the experts. Codes of
            other dtypes than bfloat16 could come back as other codes.
    """
    fmt = scheme.activation
    if fmt is None or fmt.static or fmt.global_scale or fmt.group[0] != 1 or fmt.bits != 8:
        return None
    return None if problem.apply_router_weight_on_input or problem.dtype != "bfloat16" else scheme


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, bytes] of [n, columns]."""
    # A tensor of one element or none counts as contiguous whatever its strides are.
    if not tensor.is_contiguous() or tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)


def join_columns(columns: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """One row of bytes a token, [n, sum of widths], so that a token takes one exchange."""
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def split_columns(rows: torch.Tensor, widths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """The inverse of `join_columns`: contiguous columns, each aligned for any dtype."""
    if len(widths) == 1 and rows.is_contiguous() and rows.storage_offset() == 0:
        return (rows,)
    return tuple(part.clone(memory_format=torch.contiguous_format) for part in rows.split(widths, dim=1))

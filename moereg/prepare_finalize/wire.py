"""How tokens travel: as bytes of the layer's dtype, or as codes with scales if the experts quantize them anyway."""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING, NamedTuple

import torch

from moereg.prepare_finalize.batched import calls_kernels
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, QuantScheme

if TYPE_CHECKING:
    from moereg.kernels.quantized.operands import RowFormat


class Received(NamedTuple):
    """Tokens [n,H] that arrived, in the layer's dtype or as codes; only codes that were kept have `hidden_scale`."""

    hidden_states: torch.Tensor
    hidden_scale: torch.Tensor | None = None


class Wire(abc.ABC):
    """Tokens as bytes: every backend of torch.distributed moves uint8, and not every one moves 8-bit floats.

    Attributes:
        name: Name in messages, which ranks compare.
        widths: Bytes per token of each of its columns.
        dtypes: Dtypes of these columns: of numbers or codes, then of scales.
        group: Columns of codes that share a scale; 0 for all, or where there are no codes.
        in_triton: Whether Triton kernels handle tokens, or torch does; None: what the device of a call runs.
    """

    name: str
    widths: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    group: int = 0
    in_triton: bool | None = None

    def calls_kernels(self, tensor: torch.Tensor) -> bool:
        """Whether Triton kernels move tokens like these, or torch does; raises as `batched.calls_kernels`."""
        return calls_kernels(self.in_triton, tensor.device.type, self.dtypes[0] if len(self.dtypes) > 1 else None)

    @abc.abstractmethod
    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Encodes [T,H] as [T, width] uint8 columns."""

    @abc.abstractmethod
    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        """Inverts `encode`, for columns that are contiguous each."""


class PlainWire(Wire):
    """The bytes of the layer's dtype."""

    def __init__(self, problem: MoEProblem) -> None:
        self._dtype = problem.torch_dtype
        self.name = problem.dtype
        self.widths = (problem.hidden_size * self._dtype.itemsize,)
        self.dtypes = (self._dtype,)

    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (as_bytes(hidden_states),)

    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        return Received(columns[0].view(self._dtype))


class CodedWire(Wire):
    """Codes and scales of the activation format in which the experts compute.

    Numbers restored to bfloat16 quantize to the same codes again: a group's largest magnitude is its scale times the
    largest code and is exact, or the scale is a power of two, and the others move by less than half a step. So experts
    that quantize for themselves give the same bits as with `PlainWire`.
    """

    def __init__(self, problem: MoEProblem, scheme: QuantScheme, keeps_codes: bool = False) -> None:
        """For experts of a scheme; with `keeps_codes`, `decode` returns codes and scales, for those that take them."""
        fmt = scheme.activation
        assert fmt is not None
        assert wire_scheme(scheme, problem) is not None
        self._scheme, self._hidden_size, self._dtype = scheme, problem.hidden_size, problem.torch_dtype
        self._keeps_codes = keeps_codes
        self.name = f"{fmt.dtype} with {fmt.scale_dtype} scales"
        self.group = 0 if fmt.group[1] == WHOLE else fmt.group[1]
        self.dtypes = code_dtype, scale_dtype = fmt.storage_dtype, getattr(torch, fmt.scale_dtype)
        num_scales = -(-problem.hidden_size // self.group) if self.group else 1
        self.widths = (problem.hidden_size * code_dtype.itemsize, num_scales * scale_dtype.itemsize)

    def encode(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        from moereg.quantize import quantize_activations  # Loads torch, which choosing does without.

        num_tokens = hidden_states.shape[0]
        if num_tokens == 0 or self.calls_kernels(hidden_states):
            columns = tuple(hidden_states.new_empty((num_tokens, width), dtype=torch.uint8) for width in self.widths)
            if num_tokens:
                from moereg.kernels.quantized.rows_moved import quantize_tokens  # Loads Triton, which may not be there.

                codes, scales = (column.view(dtype) for column, dtype in zip(columns, self.dtypes, strict=True))
                with torch.cuda.device_of(hidden_states):
                    quantize_tokens(codes, as_stored(scales), hidden_states, self._row_format)
            return columns
        found = quantize_activations(hidden_states, self._scheme)
        return as_bytes(found.q), as_bytes(found.scale.reshape(len(found.q), -1))

    def decode(self, columns: tuple[torch.Tensor, ...]) -> Received:
        from moereg.quantize import Quantized, dequantize_activations

        codes, scales = (column.view(dtype) for column, dtype in zip(columns, self.dtypes, strict=True))
        if self._keeps_codes:
            return Received(codes, scales)
        if codes.shape[0] == 0:
            return Received(codes.new_empty(codes.shape, dtype=self._dtype))
        if self.calls_kernels(codes):
            from moereg.kernels.quantized.rows_moved import restore_tokens

            with torch.cuda.device_of(codes):
                return Received(restore_tokens(codes, as_stored(scales), self.group, self._dtype))
        restored = dequantize_activations(Quantized(codes, scales), self._scheme, self._hidden_size, torch.float32)
        return Received(restored.to(self._dtype))

    @functools.cached_property
    def _row_format(self) -> RowFormat:
        from moereg.kernels.quantized.operands import RowFormat
        from moereg.quantize import element_of

        fmt = self._scheme.activation
        assert fmt is not None
        element = element_of(fmt)
        return RowFormat(
            dtype=self.dtypes[0],
            min_code=element.min_value,
            max_code=element.max_value,
            group=self.group,
            e8m0=self.dtypes[1] == torch.float8_e8m0fnu,
        )


def wire_scheme(scheme: QuantScheme, problem: MoEProblem) -> QuantScheme | None:
    """The scheme if tokens can travel in it, or None: experts must quantize each token alone to 8 bits, dynamically.

    If the layer's routing weights scale inputs, experts quantize after that. Codes of dtypes other than bfloat16 could
    come back as other codes.
    """
    fmt = scheme.activation
    if fmt is None or fmt.static or fmt.global_scale or fmt.group[0] != 1 or fmt.bits != 8:
        return None
    return None if problem.apply_router_weight_on_input or problem.dtype != "bfloat16" else scheme


def as_stored(scales: torch.Tensor) -> torch.Tensor:
    """Scales as kernels read them: powers of two as their exponents."""
    return scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n, columns] as bytes, [n, bytes]."""
    # A tensor of one element or none counts as contiguous whatever its strides are.
    if not tensor.is_contiguous() or tensor.stride(-1) != 1:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8)

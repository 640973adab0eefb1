"""PackedExperts: a frozen parameter of the usual shape and dtype whose values are stored quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.quantize import dequantize_rows, expert_matrix, quantize_matrices
from moereg.runtime.memory import format_bytes
from moereg.spec.quant_schemes import QuantScheme

FROZEN: Final = (
    "quantized experts are frozen; moereg.integrations.transformers.dequantize_experts(model) gives parameters that "
    "can be written, such as by merging adapters"
)


_NOT_SHARDED: Final = (
    "quantized experts are not split over ranks, which would restore them to 16 bits; each rank keeps them whole with "
    'fully_shard(..., ignored_params={each for name, each in model.named_parameters() if ".experts." in name and not '
    "each.requires_grad})"
)


@dataclasses.dataclass(frozen=True)
class Form:
    """How a parameter [E, ...] is stored.

    Attributes:
        matrix: `w13` or `w2`.
        scheme: Of the stored tensors, which are in canonical order.
        rows, columns: Those of one canonical matrix.
        halves: 2 for gate and up rows, else 1.
        is_transposed: Whether the parameter has [columns, rows].
        is_alternating: Whether the parameter's gate and up rows alternate.
    """

    matrix: str
    scheme: QuantScheme
    rows: int
    columns: int
    halves: int = 1
    is_transposed: bool = False
    is_alternating: bool = False

    def shape(self, num_experts: int) -> tuple[int, int, int]:
        """The parameter's."""
        return (num_experts, *((self.columns, self.rows) if self.is_transposed else (self.rows, self.columns)))

    def canonical(self, values: torch.Tensor) -> torch.Tensor:
        """Canonical matrices [..., rows, columns] out of the parameter's."""
        values = values.transpose(-1, -2) if self.is_transposed else values
        return torch.cat([values[..., 0::2, :], values[..., 1::2, :]], dim=-2) if self.is_alternating else values

    def stored(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        if self.is_alternating:
            values = torch.stack(values.chunk(2, dim=-2), dim=-2).flatten(-3, -2)
        return values.transpose(-1, -2) if self.is_transposed else values

    def factors(self, left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors of canonical matrices, `b @ a`, out of those of the parameter, `left @ right`; autograd follows."""
        b, a = (right.transpose(-1, -2), left.transpose(-1, -2)) if self.is_transposed else (left, right)
        return dataclasses.replace(self, is_transposed=False).canonical(b), a


class PackedExperts(torch.Tensor):
    """Matrices of all experts, [E, ...] in a float dtype, stored quantized. An operation on it restores its values.

    Detached, cloned, moved and converted it stays packed: `.to(dtype)` changes the dtype to restore to. Copying plain
    values into it quantizes them; every other write is refused.

    Attributes:
        stored: Canonical tensors by field of `ExpertWeights`.
        form: How they are stored.
    """

    stored: Mapping[str, torch.Tensor]
    form: Form

    @staticmethod
    def __new__(cls, stored: Mapping[str, torch.Tensor], form: Form, dtype: torch.dtype) -> PackedExperts:
        """Makes one that shares the tensors' memory."""
        codes = stored[form.matrix]
        made: PackedExperts = torch.Tensor._make_wrapper_subclass(
            cls, form.shape(codes.shape[0]), dtype=dtype, device=codes.device
        )
        made.stored, made.form = stored, form
        return made

    def restored(self, expert: int | None = None) -> torch.Tensor:
        """The values of one expert, or [E, ...] of all, rounded once."""
        if expert is None:
            found = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            for index, target in enumerate(found):
                target.copy_(self.restored(index))
            return found
        form, fmt = self.form, self.form.scheme.weight
        assert fmt is not None
        matrix = expert_matrix(self.stored, form.matrix, expert, form.halves)
        return form.stored(dequantize_rows(matrix, fmt, form.columns, slice(None), self.dtype))

    def store_as(self, other: object) -> None:
        """Becomes stored as another one is."""
        if not isinstance(other, PackedExperts):
            raise ArgumentError(f"a PackedExperts can only be set to another one, got a plain tensor: {FROZEN}")
        self.stored, self.form = other.stored, other.form

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedExperts({list(self.shape)} {self.dtype}, {self.form.scheme.name} on {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], PackedExperts):
            args[0].store_as(args[1])  # torch replaces the tensor and leaves its attributes.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet, packed, others, named = func.overloadpacket, args[0] if args else None, args[1:], dict(kwargs or {})
        if isinstance(packed, PackedExperts):
            if packet in _STAYS_PACKED:
                dtype = named.pop("dtype", None) or packed.dtype
                stored = {name: func(each, *others, **named) for name, each in packed.stored.items()}
                return PackedExperts(stored, packed.form, dtype)
            if packet is _ATEN.empty_like:
                named["device"] = named.get("device") or packed.device
                return func(torch.empty(packed.shape, dtype=packed.dtype, device="meta"), *others, **named)
            if packet is _ATEN.select and others[0] == 0:  # As transformers' eager code takes experts.
                return packed.restored(range(packed.shape[0])[others[1]])
            if packet is _ATEN.set_:  # torch parametrizes a parameter by setting it to itself.
                packed.store_as(*others)
                return packed
            if packet is _ATEN.copy_:
                plain = others[0]
                source = plain if isinstance(plain, PackedExperts) else pack(plain.expand(packed.shape), packed.form)
                if source.form != packed.form:
                    raise ArgumentError(f"values must be stored as in {packed}, got {source}; quantize both alike")
                for name, target in packed.stored.items():
                    target.copy_(source.stored[name])
                return packed
            if packet is _ATEN.split and not others[1:] and not named:  # Of experts, as `fully_shard` begins.
                raise ArgumentError(_NOT_SHARDED)
            written = func._schema.arguments[0].alias_info
            if written is not None and written.is_write:
                raise ArgumentError(f"{packet} would write into a PackedExperts: {FROZEN}")
        args, named = torch.utils._pytree.tree_map_only(PackedExperts, PackedExperts.restored, (args, named))
        return func(*args, **named)


_ATEN: Final = torch.ops.aten
_STAYS_PACKED: Final = (_ATEN.detach, _ATEN.alias, _ATEN.clone, _ATEN._to_copy)
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


@torch.no_grad()
def pack(values: torch.Tensor, form: Form) -> PackedExperts:
    """Quantizes a parameter's values [E, ...], one expert after the other."""
    matrices = (form.canonical(matrix).contiguous() for matrix in values.detach())
    sizes = values.shape[0], form.rows, form.columns
    stored = quantize_matrices(form.matrix, matrices, sizes, form.scheme, form.halves, values.device)
    return PackedExperts(stored, form, values.dtype)


def packed_in(model: torch.nn.Module) -> str:
    """A line on all packed parameters of a model: layers, schemes, bytes, and whether rows were reordered."""
    found = [each for each in model.parameters() if isinstance(each, PackedExperts)]
    schemes = ", ".join(dict.fromkeys(each.form.scheme.name for each in found))
    size = format_bytes(sum(part.numel() * part.element_size() for each in found for part in stored_in(each)))
    order = ", gate and up rows put one after the other" if any(each.form.is_alternating for each in found) else ""
    return f"experts of {len(found) // 2} layers in {schemes}: {size}{order}"


def stored_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors with a parameter's memory: itself, or what it is stored in."""
    return tuple(tensor.stored.values()) if isinstance(tensor, PackedExperts) else (tensor,)


def is_packed(module: torch.nn.Module) -> bool:
    """Whether a module itself has experts that are stored quantized, parametrized ones too."""
    if any(isinstance(each, PackedExperts) for each in module._parameters.values()):
        return True
    parametrized: Any = module._modules.get("parametrizations")
    return parametrized is not None and any(isinstance(each.original, PackedExperts) for each in parametrized.values())

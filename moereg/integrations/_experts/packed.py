"""PackedExperts: a frozen parameter of the usual shape and dtype whose values are stored quantized."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
        form: How it is stored.
        fields: Names of the stored tensors, which are attributes; those of `ExpertWeights`.
    """

    form: Form
    fields: tuple[str, ...]

    @staticmethod
    def __new__(cls, stored: Mapping[str, torch.Tensor], form: Form, dtype: torch.dtype) -> PackedExperts:
        """Makes one out of canonical tensors by name."""
        codes = stored[form.matrix]
        made: PackedExperts = torch.Tensor._make_wrapper_subclass(
            cls, form.shape(codes.shape[0]), dtype=dtype, device=codes.device
        )
        made._set(stored, form)
        return made

    def _set(self, stored: Mapping[str, torch.Tensor], form: Form) -> None:
        self.form, self.fields = form, tuple(stored)
        for name, tensor in stored.items():
            setattr(self, name, tensor)

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        """The stored tensors by name."""
        return {name: getattr(self, name) for name in self.fields}

    def restored(self, experts: Iterable[int] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values of some experts, or of all, rounded once to a dtype, by default its own."""
        form, fmt, dtype = self.form, self.form.scheme.weight, dtype or self.dtype
        assert fmt is not None
        chosen = list(range(self.shape[0]) if experts is None else experts)
        found = torch.empty(form.shape(len(chosen)), dtype=dtype, device=self.device)
        for target, expert in zip(found, chosen, strict=True):
            matrix = expert_matrix(self.stored, form.matrix, expert, form.halves)
            target.copy_(form.stored(dequantize_rows(matrix, fmt, form.columns, slice(None), dtype)))
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedExperts({list(self.shape)} {self.dtype}, {self.form.scheme.name} on {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA:  # torch would replace the tensor and leave its attributes.
            packed, value = args
            if not (isinstance(packed, PackedExperts) and isinstance(value, PackedExperts)):
                raise ArgumentError(f"data of a PackedExperts must be another one, got a plain tensor: {FROZEN}")
            packed._set(value.stored, value.form)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if (handler := _HANDLERS.get(func.overloadpacket)) is not None and isinstance(args[0], PackedExperts):
            return handler(func, *args, **named)
        if func._schema.is_mutable and any(
            each.alias_info is not None and each.alias_info.is_write and isinstance(value, PackedExperts)
            for each, value in zip(func._schema.arguments, args, strict=False)
        ):
            raise ArgumentError(f"{func.overloadpacket} would write into a PackedExperts: {FROZEN}")
        plain = torch.utils._pytree.tree_map_only(PackedExperts, PackedExperts.restored, (args, named))
        return func(*plain[0], **plain[1])


_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _same(func: Any, packed: PackedExperts, *_: Any, **__: Any) -> PackedExperts:
    return PackedExperts(packed.stored, packed.form, packed.dtype)


def _cloned(func: Any, packed: PackedExperts, **_: Any) -> PackedExperts:
    return PackedExperts({name: each.clone() for name, each in packed.stored.items()}, packed.form, packed.dtype)


def _moved(
    func: Any, packed: PackedExperts, *, dtype: Any = None, device: Any = None, non_blocking: bool = False, **_: Any
) -> PackedExperts:
    # Converted to another dtype, it is stored as before.
    is_copied = dtype in (None, packed.dtype)
    moved = {
        name: each.to(device=device, non_blocking=non_blocking, copy=is_copied) for name, each in packed.stored.items()
    }
    return PackedExperts(moved, packed.form, dtype or packed.dtype)


def _like(func: Any, packed: PackedExperts, *others: Any, **named: Any) -> torch.Tensor:
    """New memory takes a shape alone."""
    like = torch.empty(packed.shape, dtype=packed.dtype, device="meta")
    found: torch.Tensor = func(like, *others, **{**named, "device": named.get("device") or packed.device})
    return found


def _selected(func: Any, packed: PackedExperts, dim: int, index: int) -> torch.Tensor:
    """One expert is restored alone: transformers' eager code takes one after the other."""
    if dim in (0, -3):
        return packed.restored([range(packed.shape[0])[index]])[0]
    found: torch.Tensor = func(packed.restored(), dim, index)
    return found


def _set(func: Any, packed: PackedExperts, source: Any = None, *_: Any) -> PackedExperts:
    """Torch parametrizes a parameter by setting it to itself."""
    if not isinstance(source, PackedExperts):
        raise ArgumentError(f"a PackedExperts must be set to another one, got a plain tensor: {FROZEN}")
    packed._set(source.stored, source.form)
    return packed


def _written(func: Any, packed: PackedExperts, source: torch.Tensor, *_: Any) -> PackedExperts:
    if not isinstance(source, PackedExperts):
        source = pack(source.expand(packed.shape), packed.form)
    if source.form != packed.form:
        raise ArgumentError(f"values must be stored as in {packed!r}, got {source!r}; quantize both alike")
    for name, target in packed.stored.items():
        target.copy_(getattr(source, name))
    return packed


_ATEN: Final = torch.ops.aten
_HANDLERS: Final[dict[Any, Callable[..., Any]]] = {
    _ATEN.detach: _same,
    _ATEN.alias: _same,
    _ATEN.clone: _cloned,
    _ATEN._to_copy: _moved,
    _ATEN.empty_like: _like,
    _ATEN.zeros_like: _like,
    _ATEN.ones_like: _like,
    _ATEN.select: _selected,
    _ATEN.copy_: _written,
    _ATEN.set_: _set,
}


@torch.no_grad()
def pack(values: torch.Tensor, form: Form) -> PackedExperts:
    """Quantizes a parameter's values [E, ...], one expert after the other."""
    matrices = (form.canonical(matrix) for matrix in values.detach())
    sizes = values.shape[0], form.rows, form.columns
    stored = quantize_matrices(form.matrix, matrices, sizes, form.scheme, form.halves, values.device)
    return PackedExperts(stored, form, values.dtype)


def packed_in(model: torch.nn.Module) -> str:
    """What a model has packed: layers, schemes, bytes, and whether rows were reordered."""
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

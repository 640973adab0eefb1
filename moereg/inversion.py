"""Inverts a layout without knowing it: numbers that say where they are show where a layout moves them.

Works for every layout that only moves numbers, or bits of them, besides padding them and flipping fixed bits. What was
found is no more than a guess: whatever is read back is permuted again and has to give the same bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Final

import torch

from moereg.errors import LayoutNotInvertibleError
from moereg.quant import TENSOR_ROLES, QuantScheme, tensor_name
from moereg.weights import ExpertWeights, PermutedWeights

__all__ = ["Moves", "Permute", "TensorSpecs", "expert_rows", "find_moves", "read_back", "same_bits"]

Permute = Callable[[ExpertWeights], PermutedWeights]
"""Permutes the weights of one expert."""

TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the canonical tensors of one expert, by field of `ExpertWeights`."""


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """How a dtype carries positions: patterns that are finite and normal, so that nothing rounds or flushes them.

    Attributes:
        bits: Of an element.
        base: The bits of every probe.
        digit_bits: Lowest bits, zero in `base`, that are free.
        parts: Bits of the units that a layout may move, coarsest first.
    """

    bits: int
    base: int
    digit_bits: int
    parts: tuple[int, ...]


_CODES: Final = _Numbers(bits=8, base=0, digit_bits=8, parts=(8, 4, 1))
_NUMBERS: Final[Mapping[torch.dtype, _Numbers]] = {
    torch.float32: _Numbers(bits=32, base=0x3F800000, digit_bits=23, parts=(32,)),
    torch.bfloat16: _Numbers(bits=16, base=0x3F80, digit_bits=7, parts=(16,)),
    torch.float16: _Numbers(bits=16, base=0x3C00, digit_bits=10, parts=(16,)),
    torch.float8_e4m3fn: _Numbers(bits=8, base=0x40, digit_bits=5, parts=(8,)),
    torch.float8_e5m2: _Numbers(bits=8, base=0x40, digit_bits=5, parts=(8,)),
    torch.float8_e8m0fnu: _Numbers(bits=8, base=0x40, digit_bits=6, parts=(8,)),
    torch.uint8: _CODES,
    torch.int8: _CODES,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
    """Where the units of one canonical tensor stand in an expert's permuted rows.

    Attributes:
        bits: Of a unit.
        source: [N] int32, unit of the rows that holds each unit of the tensor; -1 for bits that hold nothing.
        flip: [N], bits of each that the layout turns around.
    """

    bits: int
    source: torch.Tensor
    flip: torch.Tensor


def expert_rows(permuted: PermutedWeights, expert: int) -> dict[str, torch.Tensor]:
    """The per-expert tensors of one expert, dense."""
    rows = {name: value[expert] for name, value in permuted.per_expert.items()}
    return {name: row if row.layout == torch.strided else row.to_dense() for name, row in rows.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals itself."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bytes(one), _bytes(other))


def find_moves(permute: Permute, specs: TensorSpecs, quant: QuantScheme, device: torch.device) -> dict[str, Moves]:
    """Finds where a layout moves the units of each canonical tensor, by permuting a few experts.

    Args:
        permute: Permutes one expert.
        specs: The expert's canonical tensors.
        quant: Their scheme.
        device: That `permute` works on.

    Raises:
        LayoutNotInvertibleError: A tensor's numbers are not moved but computed with, or are not kept.
    """
    base = {
        name: _filled(shape, dtype, torch.tensor(_numbers(name, dtype).base, device=device))
        for name, (shape, dtype) in specs.items()
    }
    return {name: _moves_of(permute, base, quant, name) for name in base}


def read_back(
    permute: Permute, specs: TensorSpecs, quant: QuantScheme, moves: Mapping[str, Moves], rows: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Canonical tensors [1, ...] that permute to these rows bit for bit.

    Args:
        permute: As in `find_moves`.
        specs: As in `find_moves`.
        quant: As in `find_moves`.
        moves: What `find_moves` found.
        rows: An expert's permuted rows, as `expert_rows` gives them.

    Raises:
        LayoutNotInvertibleError: No moves of numbers made these rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in specs.items():
        found, numbers = moves[name], _numbers(name, dtype)
        units = _units(rows, found.bits, dtype)
        is_kept = found.source >= 0
        source = found.source.where(is_kept, 0).long()
        nothing = 0 if found.bits < numbers.bits else numbers.base
        values = torch.where(is_kept, units[source] ^ found.flip, nothing)
        tensors[name] = _joined(values, found.bits, shape, dtype)
    again = permute(ExpertWeights.unchecked(tensors, quant))
    for name, row in expert_rows(again, 0).items():
        if name not in rows or not same_bits(row, rows[name]):
            raise LayoutNotInvertibleError(
                f"layout {again.layout!r} computes {name!r} from several numbers instead of moving them, so an expert "
                "cannot be read back from it; keep the canonical weights"
            )
    return tensors


def _moves_of(permute: Permute, base: dict[str, torch.Tensor], quant: QuantScheme, name: str) -> Moves:
    shape, dtype = base[name].shape, base[name].dtype
    numbers = _numbers(name, dtype)
    needed = _used_bits(ExpertWeights.unchecked(base, quant), name)
    layout = ""

    def probe(values: torch.Tensor, bits: int) -> torch.Tensor:
        nonlocal layout
        tensor = _joined(values, bits, shape, dtype)
        permuted = permute(ExpertWeights.unchecked({**base, name: tensor}, quant))
        layout = permuted.layout
        return _units(expert_rows(permuted, 0), bits, dtype)

    for bits in numbers.parts:
        count = math.prod(shape) * numbers.bits // bits
        moves = _try_moves(probe, bits, numbers, count, needed, base[name].device)
        if moves is not None:
            return moves
    raise LayoutNotInvertibleError(
        f"layout {layout!r} does not keep the numbers of {name} as they are, so an expert cannot be read back from it; "
        "keep the canonical weights"
    )


def _try_moves(
    probe: Callable[[torch.Tensor, int], torch.Tensor],
    bits: int,
    numbers: _Numbers,
    count: int,
    needed: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Moves | None:
    """The moves of units of so many bits; None where the layout moves others, or none at all."""
    base = 0 if bits < numbers.bits else numbers.base
    digit_bits = min(numbers.digit_bits, bits)
    mask = (1 << digit_bits) - 1
    where = torch.arange(count, dtype=torch.int64, device=device)
    plain = probe(where * 0 + base, bits)
    changed = plain ^ probe(where * 0 + (base | mask), bits)
    if bool(((changed != 0) & (changed != mask)).any()):
        return None
    carriers = changed.nonzero().squeeze(1)
    index = torch.zeros_like(carriers)
    for shift in range(0, max(count - 1, 1).bit_length(), digit_bits):
        found = probe(base | (where >> shift) & mask, bits)
        index |= ((found ^ plain)[carriers] & mask).long() << shift
    if bool((index >= count).any()):
        return None
    source = torch.full((count,), -1, dtype=torch.int32, device=device)
    source[index] = carriers.int()
    if bool((needed(where * bits) & (source < 0)).any()):
        return None
    # Units of a coarser size may seem to move whole while halves of them part: other numbers show it.
    drawn = base | (where * 2654435761 >> 7) & mask
    flip = torch.where(source >= 0, plain[source.clamp(min=0).long()] ^ base, 0)
    read = probe(drawn, bits)[source.clamp(min=0).long()] ^ flip
    return None if bool(((read != drawn) & (source >= 0)).any()) else Moves(bits, source, flip)


def _used_bits(weights: ExpertWeights, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Tells which bits of a canonical tensor, by position, hold anything: an odd row of 4-bit codes has a spare one."""
    tensors, fmt = weights.tensors(), weights.scheme.weight
    matrix = name.partition("_")[0]
    role = TENSOR_ROLES[name]
    row_bits = used = 8 * tensors[name].shape[-1] if tensors[name].dim() else 8
    if fmt is not None and fmt.bits == 4 and role == "zero_point":
        used = 4 * tensors[tensor_name(matrix, "scale")].shape[-1]
    elif fmt is not None and fmt.bits == 4 and role == "weight":
        used = 4 * (weights.hidden_size if matrix == "w13" else weights.intermediate_size)
    if used == row_bits:
        return torch.ones_like
    return lambda position: position % row_bits < used


def _numbers(name: str, dtype: torch.dtype) -> _Numbers:
    numbers = _NUMBERS.get(dtype)
    if numbers is None:
        raise LayoutNotInvertibleError(
            f"an expert with {name} in {dtype} cannot be read back; keep the canonical weights"
        )
    return numbers


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # The copy begins at the start of its storage, so it can be viewed in any dtype.
    return tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _units(rows: Mapping[str, torch.Tensor], bits: int, dtype: torch.dtype) -> torch.Tensor:
    """All units of some rows, [M]; rows of wider floats also as numbers of `dtype`."""
    parts: list[torch.Tensor] = []
    for name in sorted(rows):
        row = rows[name]
        parts.append(_split(_bytes(row), bits))
        if row.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16):
            parts.append(_split(_bytes(row.to(dtype)), bits))
    return torch.cat(parts)


def _split(content: torch.Tensor, bits: int) -> torch.Tensor:
    if bits == 1:
        return (content.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=content.device) & 1).flatten()
    if bits == 4:
        return torch.stack((content & 15, content >> 4), dim=1).flatten()
    if bits == 8:
        return content
    missing = -len(content) % (bits // 8)
    whole = torch.nn.functional.pad(content, (0, missing)) if missing else content
    return whole.view(torch.int32) if bits == 32 else whole.view(torch.int16).int() & 0xFFFF


def _joined(units: torch.Tensor, bits: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if bits == 1:
        places = torch.arange(8, dtype=torch.int32, device=units.device)
        content = (units.int().view(-1, 8) << places).sum(1).to(torch.uint8)
    elif bits == 4:
        low, high = units.to(torch.uint8).view(-1, 2).unbind(1)
        content = low | high << 4
    elif bits == 8:
        content = units.to(torch.uint8)
    else:
        content = units.to(torch.int32 if bits == 32 else torch.int16)
    return content.view(dtype).view(shape)


def _filled(shape: tuple[int, ...], dtype: torch.dtype, pattern: torch.Tensor) -> torch.Tensor:
    return _joined(pattern.expand(math.prod(shape)), 8 * dtype.itemsize, shape, dtype)

"""Inverts an unknown layout: numbers that encode their own position show where the layout moves them.

Works for every layout that only moves numbers, or bits of them, besides padding them and flipping fixed bits. The moves
found are no more than a guess: whatever is read back is permuted again and must give the same bits.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch

from moereg.errors import LayoutNotInvertibleError
from moereg.spec.quant_schemes import TENSOR_ROLES, QuantScheme, tensor_name
from moereg.weights.permuted import ExpertWeights, PermutedWeights

Permute = Callable[[ExpertWeights], PermutedWeights]
"""Permutes the weights of one expert."""

TensorSpecs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes of the canonical tensors of one expert, by field of `ExpertWeights`."""


@dataclasses.dataclass(frozen=True)
class _Numbers:
    """How a dtype encodes positions: bit patterns that are finite and normal, so that nothing rounds or flushes them.

    Attributes:
        bits: Bits of an element.
        base: Bit pattern that every probe is based on.
        digit_bits: Number of lowest bits, zero in `base`, that are free.
        parts: Bits of the units that a layout may move, coarsest first.
    """

    bits: int
    base: int
    digit_bits: int
    parts: tuple[int, ...]

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Bits of units, and how many of them are tried as one run: runs of 16 bytes take little memory."""
        return (self.parts[0], 128 // self.parts[0]), *((bits, 1) for bits in self.parts)


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
    """Positions of one canonical tensor's units in an expert's permuted rows.

    Attributes:
        bits: Bits of a unit.
        run: Units that move together.
        source: [N / run] int32, run of the rows that holds each run of the tensor; -1 for unused bits.
        flip: [N], bits of each unit that the layout flips; None if it flips none.
    """

    bits: int
    run: int
    source: torch.Tensor
    flip: torch.Tensor | None

    def apply(self, units: torch.Tensor, nothing: int) -> torch.Tensor:
        """Gathers the tensor's units from those of the rows, with `nothing` where there is none."""

        def of(where: slice) -> torch.Tensor:
            source = self.source[_of_runs(where, self.run)].long().unsqueeze(1)
            values = units.view(-1, self.run)[source.squeeze(1).clamp(min=0)]
            if self.flip is not None:
                values ^= self.flip[where].view(-1, self.run)
            return values.where(source >= 0, nothing).flatten()

        return _by_pieces(self.run * len(self.source), units, of)


def expert_rows(permuted: PermutedWeights, expert: int) -> dict[str, torch.Tensor]:
    """The per-expert tensors of one expert, dense."""
    rows = {name: value[expert] for name, value in permuted.per_expert.items()}
    return {name: row if row.layout == torch.strided else row.to_dense() for name, row in rows.items()}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaN equals itself."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(_bytes(one), _bytes(other))


def find_moves(permute: Permute, specs: TensorSpecs, quant: QuantScheme, device: torch.device) -> dict[str, Moves]:
    """Finds where a layout moves the units of each canonical tensor of an expert, by permuting a few experts."""
    base = drawn_expert(specs, device, is_varied=False)
    return {name: _moves_of(permute, base, quant, name) for name in base}


def read_back(
    permute: Permute, specs: TensorSpecs, quant: QuantScheme, moves: Mapping[str, Moves], rows: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Canonical tensors [1, ...] that permute to an expert's rows, as `expert_rows` gives them, bit for bit."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in specs.items():
        found, numbers = moves[name], _numbers(name, dtype)
        nothing = 0 if found.bits < numbers.bits else numbers.base
        tensors[name] = _joined(
            found.apply(_units(rows, found.bits, dtype, found.run), nothing), found.bits, shape, dtype
        )
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

    def probe(values: torch.Tensor, bits: int, run: int) -> torch.Tensor:
        nonlocal layout
        tensor = _joined(values, bits, shape, dtype)
        permuted = permute(ExpertWeights.unchecked({**base, name: tensor}, quant))
        layout = permuted.layout
        rows = expert_rows(permuted, 0)
        del tensor, permuted  # Dense copies of opaque rows are there now.
        return _units(rows, bits, dtype, run)

    for bits, run in numbers.runs:
        count = math.prod(shape) * numbers.bits // bits
        moves = None if count % run else _try_moves(probe, bits, run, numbers, count, needed, base[name].device)
        if moves is not None:
            return moves
    raise LayoutNotInvertibleError(
        f"layout {layout!r} does not keep the numbers of {name} as they are, so an expert cannot be read back from it; "
        "keep the canonical weights"
    )


def _try_moves(
    probe: Callable[[torch.Tensor, int, int], torch.Tensor],
    bits: int,
    run: int,
    numbers: _Numbers,
    count: int,
    needed: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> Moves | None:
    """Finds the moves of runs of units of `bits` bits; None if the layout moves others, or none at all."""
    base = 0 if bits < numbers.bits else numbers.base
    digit_bits = min(numbers.digit_bits, bits)
    mask = (1 << digit_bits) - 1
    kind = torch.empty(0, dtype=_UNITS[bits], device=device)

    def ask(of: Callable[[torch.Tensor], torch.Tensor | int]) -> torch.Tensor:
        """Permutes units whose values are a function of their positions."""
        return probe(_by_pieces(count, kind, lambda where: of(_positions(where, device))), bits, run)

    plain = ask(lambda where: base)
    found = ask(lambda where: base | mask).bitwise_xor_(plain)
    if bool(((found != 0) & (found != mask)).any()) or not _is_in_runs(found, run):
        return None
    # -1 where nothing is carried, which stays -1 whatever digits come in.
    index = (found[::run] != 0).int() - 1
    for shift in range(0, max(count // run - 1, 1).bit_length(), digit_bits):
        del found
        found = ask(lambda where, shift=shift: base | (where // run >> shift) & mask)  # type: ignore[misc]
        found.bitwise_xor_(plain).bitwise_and_(mask)
        if not _is_in_runs(found, run):
            return None
        for piece in _pieces(len(index)):
            index[piece] |= found[::run][piece].int() << shift
    del found
    if bool((index >= count // run).any()):
        return None
    source = torch.full((count // run,), -1, dtype=torch.int32, device=device)
    for piece in _pieces(len(index)):
        carriers = (index[piece] >= 0).nonzero().squeeze(1)
        source[index[piece][carriers].long()] = (carriers + piece.start).int()
    del index
    for piece in _pieces(count):
        is_missing = (source[_of_runs(piece, run)] < 0).repeat_interleave(run)
        if bool((needed(_positions(piece, device) * bits) & is_missing).any()):
            return None
    bare = Moves(bits, run, source, None)
    flip = bare.apply(plain, base).bitwise_xor_(base)
    moves = Moves(bits, run, source, flip) if bool(flip.any()) else bare
    del plain, flip

    # Units may seem to move whole although the layout splits them: other numbers reveal it.
    def drawn(where: torch.Tensor) -> torch.Tensor:
        return _drawn(where, base, mask)

    read = moves.apply(ask(drawn), base)
    for piece in _pieces(count):
        wanted = drawn(_positions(piece, device)).to(read.dtype)
        is_there = (source[_of_runs(piece, run)] >= 0).repeat_interleave(run)
        if bool(((read[piece] != wanted) & is_there).any()):
            return None
    return moves


def _is_in_runs(units: torch.Tensor, run: int) -> bool:
    """Whether all units of each run are equal."""
    return run == 1 or all(bool((part == part[:, :1]).all()) for part in units.view(-1, run).split(_PIECE // run))


def drawn_expert(specs: TensorSpecs, device: torch.device, is_varied: bool = True) -> dict[str, torch.Tensor]:
    """Canonical tensors of a made-up expert, whose numbers are finite, normal and varied, or all equal."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in specs.items():
        numbers = _numbers(name, dtype)
        kind = torch.empty(0, dtype=_UNITS[numbers.bits], device=device)
        mask = (1 << numbers.digit_bits) - 1 if is_varied else 0
        units = _by_pieces(
            math.prod(shape),
            kind,
            lambda where, numbers=numbers, mask=mask: _drawn(_positions(where, device), numbers.base, mask),  # type: ignore[misc]
        )
        tensors[name] = _joined(units, numbers.bits, shape, dtype)
    return tensors


_PIECE: Final = 2**20
"""Units processed at once, a multiple of every run: their positions take 8 bytes each, many times the units' own
size."""

_UNITS: Final = {1: torch.uint8, 4: torch.uint8, 8: torch.uint8, 16: torch.int16, 32: torch.int32}
"""Dtype that holds units of so many bits, one per element."""


def _pieces(count: int) -> Iterator[slice]:
    return (slice(start, min(start + _PIECE, count)) for start in range(0, count, _PIECE))


def _of_runs(where: slice, run: int) -> slice:
    """Maps a slice of units to their runs."""
    return slice(where.start // run, where.stop // run)


def _by_pieces(count: int, kind: torch.Tensor, of: Callable[[slice], torch.Tensor | int]) -> torch.Tensor:
    """Makes a tensor of `count` elements, with the dtype and on the device of `kind`, piece by piece."""
    made = kind.new_empty(count)
    for piece in _pieces(count):
        made[piece] = of(piece)
    return made


def _positions(where: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(where.start, where.stop, dtype=torch.int64, device=device)


def _drawn(where: torch.Tensor, base: int, mask: int) -> torch.Tensor:
    return base | (where * 2654435761 >> 7) & mask


def _used_bits(weights: ExpertWeights, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a test of which bits of a canonical tensor are in use, by position: odd rows of 4-bit codes leave one."""
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


def _units(rows: Mapping[str, torch.Tensor], bits: int, dtype: torch.dtype, run: int) -> torch.Tensor:
    """All units of some rows, [M], each row in whole runs; rows of wider floats also as numbers of `dtype`."""
    parts: list[torch.Tensor] = []
    for name in sorted(rows):
        row = rows[name].detach()
        parts.append(row)
        if row.dtype == torch.float32 and dtype in (torch.float16, torch.bfloat16):
            parts.append(row.to(dtype))
    whole = max(1, run * bits // 8)
    starts = [0, *itertools.accumulate(-(-part.numel() * part.element_size() // whole) * whole for part in parts)]
    content = parts[0].new_zeros(starts[-1], dtype=torch.uint8)
    for start, part in zip(starts, parts, strict=False):
        flat = part.reshape(-1).view(torch.uint8)
        content[start : start + len(flat)] = flat
    return _split(content, bits)


def _split(content: torch.Tensor, bits: int) -> torch.Tensor:
    if bits >= 8:
        return content.view(_UNITS[bits])
    units = content.new_empty(len(content), 8 // bits)
    for place in range(8 // bits):
        units[:, place] = (content >> bits * place) & (1 << bits) - 1
    return units.flatten()


def _joined(units: torch.Tensor, bits: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if bits == 1:
        parts = units.view(-1, 8)
        units = parts[:, 0].clone()
        for place in range(1, 8):
            units |= parts[:, place] << place
    elif bits == 4:
        low, high = units.view(-1, 2).unbind(1)
        units = low | high << 4
    return units.view(dtype).view(shape)

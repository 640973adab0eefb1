"""Reads one expert back from permuted weights, and permutes one alone to replace it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Hashable, Iterator
from typing import Final

import torch

from moereg.arguments import check_instance
from moereg.errors import ArgumentError, BackendError
from moereg.layer import backend_calls
from moereg.selection.result import Decision, Selection
from moereg.spec.quant_schemes import TENSOR_ROLES
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.unpermute import Moves, TensorSpecs, drawn_expert, expert_rows, find_moves, read_back, same_bits

_MOST_PLANS: Final = 2
"""Layouts and shapes whose moves are cached. They take a quarter of an expert's bytes if 16 bytes move together, twice
its bytes if 16-bit numbers move separately, 4 times for 8-bit, 8 times for 4-bit and 32 times for single bits."""

_APART: Final[set[Hashable]] = set()
"""Layouts and shapes for which a check showed that experts are permuted independently."""

_LOCK: Final = threading.Lock()
_readers = 0
"""Number of active `keeping_moves`."""


class OneExpert:
    """Permutes and reads back single experts of one layer. Holds no weights.

    Attributes:
        specs: Shapes and dtypes of one expert's canonical tensors, by field of `ExpertWeights`.
    """

    def __init__(self, selection: Selection, winner: Decision, weights: ExpertWeights) -> None:
        """Records shapes and dtypes of the layer's canonical weights; calls no backend code."""
        self._selection = selection
        self._winner = winner
        self.backend = winner.backend
        self.quant = weights.scheme
        self.device = weights.w13.device
        self.specs: TensorSpecs = {
            name: ((1, *tensor.shape[1:]) if tensor.dim() else (), tensor.dtype)
            for name, tensor in weights.tensors().items()
        }
        cell = winner.cell
        assert cell is not None
        self._key: Hashable = (
            cell.experts,
            winner.scheme,
            selection.problem,
            str(selection.platform),
            tuple(self.specs.items()),
            str(self.device),
        )

    def read(self, permuted: PermutedWeights, expert: int) -> ExpertWeights:
        """Reads one expert as canonical weights, E = 1."""
        rows = expert_rows(permuted, expert)
        tensors = read_back(self.permute, self.specs, self.quant, _moves(self, permuted.layout), rows)
        return ExpertWeights.unchecked(tensors, self.quant)

    def rows_for(self, permuted: PermutedWeights, weights: ExpertWeights) -> PermutedWeights:
        """Permutes a new expert of the layer, E = 1, into rows to write into `permuted`."""
        check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(w13=..., w2=...)")
        self._check(weights)
        rows = self.permute(weights)
        if rows.layout != permuted.layout:
            raise self._refusal(f"gives one expert the layout {rows.layout!r}, and the layer has {permuted.layout!r}")
        self._check_apart()
        for name, tensor in permuted.shared.items():
            if name not in rows.shared or not same_bits(rows.shared[name], tensor):
                raise ArgumentError(
                    f"layout {permuted.layout!r} has {name!r} in common for all experts, and the new expert's differs; "
                    "reload the whole layer"
                )
        return rows

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneExpert) and other._key == self._key

    def permute(self, weights: ExpertWeights) -> PermutedWeights:
        """Permutes some of the layer's experts into the backend's layout."""
        problem = dataclasses.replace(self._selection.problem, num_local_experts=weights.num_experts)
        selection = dataclasses.replace(self._selection, problem=problem)
        return backend_calls.permute(selection, backend_calls.make_experts(selection, self._winner), weights)

    def _check(self, weights: ExpertWeights) -> None:
        problem = dataclasses.replace(self._selection.problem, num_local_experts=1)
        weights.check_against(problem)
        if weights.w13.device != self.device:
            raise ArgumentError(f"the new expert must be on {self.device}, got {weights.w13.device}; move it")
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.tensors().items()}
        if found != self.specs:
            raise ArgumentError(
                f"the new expert must have the layer's tensors, {_listed(self.specs)}, got {_listed(found)}; "
                "convert them"
            )

    def _check_apart(self) -> None:
        """Checks that two experts permuted together have the same rows as each alone."""
        if self._selection.problem.num_local_experts == 1 or self._key in _APART:
            return
        # Random, since the caller's numbers may be zeros, such as a pruned expert's, which show nothing.
        one = drawn_expert(self.specs, self.device)
        for name, tensor in one.items():
            if TENSOR_ROLES[name] in ("scale", "scale_2") and tensor.dim() == 2:
                tensor[:, 1:] = tensor[:, :1]  # Some backends require equal gate and up scales.
        other = {name: _changed(tensor) for name, tensor in one.items()}
        pair = {name: _stacked(tensor, other[name]) for name, tensor in one.items()}
        try:
            both = self.permute(ExpertWeights.unchecked(pair, self.quant))
        except BackendError as error:
            raise self._refusal("does not take every expert beside another one") from error
        for expert, tensors in enumerate((one, other)):
            alone = self.permute(ExpertWeights.unchecked(tensors, self.quant))
            mine, theirs = expert_rows(both, expert), expert_rows(alone, 0)
            same = mine.keys() == theirs.keys() and all(same_bits(mine[name], theirs[name]) for name in mine)
            if not same or not all(same_bits(both.shared[name], alone.shared[name]) for name in both.shared):
                raise self._refusal("permutes an expert in another way beside others than alone")
        _APART.add(self._key)

    def _refusal(self, fault: str) -> BackendError:
        winner = self._winner
        return BackendError(
            f"backend {winner.backend!r} {fault}, so one expert cannot be replaced; reload the whole layer",
            winner.backend,
            winner.origin,
        )


@functools.lru_cache(maxsize=_MOST_PLANS)
def _moves(reader: OneExpert, layout: str) -> dict[str, Moves]:
    return find_moves(reader.permute, reader.specs, reader.quant, reader.device)


@contextlib.contextmanager
def keeping_moves() -> Iterator[None]:
    """Caches all layouts' moves while many experts are read, and frees them when the outermost context ends."""
    global _readers
    with _LOCK:
        _readers += 1
    try:
        yield
    finally:
        with _LOCK:
            _readers -= 1
            if not _readers:
                _moves.cache_clear()


def read_all(permuted: PermutedWeights) -> ExpertWeights:
    """Reads back all experts of permuted weights, one by one, as new canonical ones."""
    stacked: dict[str, torch.Tensor] = {}
    with keeping_moves():
        for expert in range(permuted.num_experts):
            one = permuted.to_canonical(expert)
            for name, value in one.tensors().items():
                if name not in stacked:
                    stacked[name] = value.new_empty(permuted.num_experts, *value.shape[1:]) if value.dim() else value
                if value.dim():
                    stacked[name][expert] = value[0]
    return ExpertWeights.unchecked(stacked, one.scheme)


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """A valid tensor for another expert: rows are rolled and floats halved, so that every maximum differs."""
    if not tensor.dim():
        return tensor
    moved = _plain(tensor).roll(1, dims=min(1, tensor.dim() - 1)).view(tensor.dtype)
    return (moved.float() / 2).to(tensor.dtype) if tensor.is_floating_point() else moved


def _stacked(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.cat((_plain(one), _plain(other))).view(one.dtype) if one.dim() else one


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Views 8-bit elements as bytes, since torch lacks operations on 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _listed(specs: TensorSpecs) -> str:
    parts = (f"{name} {list(shape)} {str(dtype).removeprefix('torch.')}" for name, (shape, dtype) in specs.items())
    return ", ".join(parts)

"""ExpertWeights (canonical order) and PermutedWeights (as one kernel reads them)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import torch

from moereg.errors import ArgumentError, LayoutNotInvertibleError
from moereg.runtime.memory import format_bytes
from moereg.weights.expert_weights import ExpertWeights, check_expert

__all__ = ["CANONICAL", "CanonicalReader", "ExpertWeights", "PerExpert", "PermutedWeights"]

CANONICAL: Final = "canonical"
"""The layout of classes that read the tensors of `ExpertWeights` in place, under their names."""

PerExpert: TypeAlias = "torch.Tensor | list[torch.Tensor]"


class CanonicalReader(Protocol):
    """Reads experts back from weights that it saw permuted."""

    def read(self, permuted: PermutedWeights, expert: int) -> ExpertWeights:
        """One expert as canonical weights, E = 1."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PermutedWeights:
    """Weights in one backend's layout.

    Attributes:
        layout: Names order and padding; two backends that read the same layout may share the tensors.
        per_expert: By name: a tensor whose dim 0 is the local expert, or a list of one tensor per expert where the
            storage is opaque, so that experts can be moved and reloaded.
        shared: By name: tensors that belong to no one expert.
        reader: Used by `to_canonical`; `make_kernel` sets it, backends leave it out.
    """

    layout: str
    per_expert: Mapping[str, PerExpert]
    shared: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    reader: CanonicalReader | None = None

    def __post_init__(self) -> None:
        counts = {name: len(value) for name, value in self.per_expert.items()}
        if len(set(counts.values())) > 1:
            raise ArgumentError(f"per_expert tensors must hold the same number of experts, got {counts}")

    @classmethod
    def in_place(cls, tensors: Mapping[str, torch.Tensor], reader: CanonicalReader | None = None) -> PermutedWeights:
        """Canonical per-expert tensors as they lie, unchecked: hosts make one for each call."""
        made = cls.__new__(cls)
        made.__dict__.update(layout=CANONICAL, per_expert=tensors, shared={}, reader=reader)
        return made

    def __getitem__(self, name: str) -> torch.Tensor:
        """The stacked per-expert or shared tensor of that name."""
        value = self.per_expert[name] if name in self.per_expert else self.shared[name]
        assert isinstance(value, torch.Tensor), f"{name} is a list, one tensor an expert"
        return value

    def get(self, name: str) -> torch.Tensor | None:
        """As `[]`, or None if there is no tensor of that name."""
        return self[name] if name in self.per_expert or name in self.shared else None

    def experts(self, name: str) -> list[torch.Tensor]:
        """The list with one tensor per expert, if the name has one."""
        value = self.per_expert[name]
        assert isinstance(value, list), f"{name} is one stacked tensor"
        return value

    def flat(self) -> Iterator[torch.Tensor]:
        """All tensors, including those in lists."""
        for value in (*self.per_expert.values(), *self.shared.values()):
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from value

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.flat())

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(self.flat()).device

    @property
    def num_experts(self) -> int:
        """Local experts; 0 if no tensor belongs to one."""
        return len(next(iter(self.per_expert.values()), ()))

    def to_canonical(self, expert: int) -> ExpertWeights:
        """Reads one expert back.

        The first expert of a layout and shape takes about ten permutations of one expert, each later one a single one.
        Finding the moves takes five to seven times the expert's bytes where 16 bytes stay together, fifteen to
        twenty-five times where codes are repacked, and a hundred times where a layout moves single bits.

        Args:
            expert: Local expert.

        Returns:
            New canonical weights of that expert alone, E = 1, which permute to the same bits.

        Raises:
            LayoutNotInvertibleError: The layout does not keep the canonical numbers, or no kernel was made of these
                weights.
            ArgumentError: There is no such expert.
        """
        check_expert(expert, self.num_experts)
        if self.reader is None:
            raise LayoutNotInvertibleError(
                f"how these {self.layout!r} weights were permuted is not known; read those of a kernel, kernel.weights"
            )
        return self.reader.read(self, expert)

    def __repr__(self) -> str:
        """One line. A backend may have put in anything, and the error that says so shows it."""
        held = [value[0] if isinstance(value, list) and value else value for value in self.per_expert.values()]
        values = [*held, *self.shared.values()]
        names = ", ".join([*self.per_expert, *self.shared]) or "no tensors"
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            kinds = ", ".join(type(value).__name__ for value in values)
            return f"PermutedWeights({self.layout!r}, {names}{': ' if kinds else ''}{kinds})"
        size = f"{format_bytes(self.num_bytes)} on {self.device}"
        return f"PermutedWeights({self.layout!r}, {self.num_experts} experts, {names}, {size})"

    def shared_with(self, weights: ExpertWeights) -> frozenset[str]:
        """Names of the tensors that share memory with these canonical weights."""
        given = set(map(_memory, weights.tensors().values()))
        tensors = {**self.per_expert, **self.shared}
        return frozenset(
            name
            for name, value in tensors.items()
            for tensor in (value if isinstance(value, list) else [value])
            if tensor.layout == torch.strided and _memory(tensor) in given
        )

    def copied_from(self, weights: ExpertWeights) -> list[torch.Tensor]:
        """Canonical tensors whose memory holds none of these tensors."""
        held = {_memory(tensor) for tensor in self.flat() if tensor.layout == torch.strided}
        return [tensor for tensor in weights.tensors().values() if _memory(tensor) not in held]

    def elsewhere(self, names: Collection[str], other: PermutedWeights) -> frozenset[str]:
        """The names whose tensors `other` holds in other memory, so that copying them would write."""
        mine, theirs = {**self.per_expert, **self.shared}, {**other.per_expert, **other.shared}
        return frozenset(name for name in names if name not in theirs or not _is_same(mine[name], theirs[name]))

    def with_own(self, names: Collection[str]) -> PermutedWeights:
        """Returns the same weights, with the tensors of these names copied at the same strides."""

        def of(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: _copied(value) if name in names else value for name, value in values.items()}

        return dataclasses.replace(self, per_expert=of(self.per_expert), shared=of(self.shared))

    def write_expert(self, expert: int, other: PermutedWeights) -> None:
        """Writes the only expert of other weights into this one's storage; opaque tensors are replaced.

        Raises:
            ArgumentError: Layout, names, shapes or shared tensors differ.
        """
        mine, theirs = _signature(self, whole=False), _signature(other, whole=False)
        if other.num_experts != 1:
            raise ArgumentError(f"an expert needs weights of one expert, got {other.num_experts}; permute it alone")
        if mine != theirs:
            raise ArgumentError(
                f"an expert needs weights of the same layout and shapes, got {_difference(theirs, mine)}"
            )
        for name, value in self.per_expert.items():
            if isinstance(value, list):
                value[expert] = other.per_expert[name][0]
            else:
                _write(value[expert], other[name][0])

    def copy_from(self, other: PermutedWeights) -> None:
        """Writes another set of weights into this one's storage, so that captured graphs see them.

        Opaque per-expert tensors are replaced, since they cannot be written into.

        Raises:
            ArgumentError: Layout, names or shapes differ.
        """
        mine, theirs = _signature(self), _signature(other)
        if mine != theirs:
            raise ArgumentError(f"reload needs weights of the same layout and shapes, got {_difference(theirs, mine)}")
        for name, value in (*self.per_expert.items(), *self.shared.items()):
            source = other.per_expert[name] if name in other.per_expert else other.shared[name]
            if isinstance(value, list):
                value[:] = source
            else:
                assert isinstance(source, torch.Tensor)
                _write(value, source)

    def __deepcopy__(self, memo: dict[int, Any]) -> PermutedWeights:
        # Opaque tensors cannot be copied. Sharing them is safe, since nothing writes into them.
        def of(tensor: torch.Tensor) -> torch.Tensor:
            copied: torch.Tensor = copy.deepcopy(tensor, memo) if tensor.layout == torch.strided else tensor
            return copied

        per_expert = {
            name: [of(tensor) for tensor in value] if isinstance(value, list) else of(value)
            for name, value in self.per_expert.items()
        }
        shared = {name: of(value) for name, value in self.shared.items()}
        return PermutedWeights(self.layout, per_expert, shared, self.reader)


def _is_same(one: PerExpert, other: PerExpert) -> bool:
    if isinstance(one, list) or isinstance(other, list):
        return False
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    if _is_same(target, source):
        return
    # A view of the same storage, such as a transposed one, would be overwritten while it is read.
    same = target.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    target.copy_(source.clone() if same else source)


def _memory(tensor: torch.Tensor) -> tuple[str, int]:
    storage = tensor.untyped_storage()
    # Without memory, as on a meta device, the storage itself tells tensors apart.
    address = 0 if tensor.device.type == "meta" else storage.data_ptr()
    return str(tensor.device), address or storage._cdata


def _copied(value: PerExpert) -> PerExpert:
    if isinstance(value, list):
        return [tensor.clone() if tensor.layout == torch.strided else tensor for tensor in value]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


_Signature: TypeAlias = tuple[str, dict[str, tuple[Any, Any]]]


def _signature(weights: PermutedWeights, whole: bool = True) -> _Signature:
    """Layout, names, shapes and dtypes; of one expert and without shared tensors where not `whole`."""

    def of(value: PerExpert) -> tuple[Any, Any]:
        if not whole:
            return tuple(value[0].shape), value[0].dtype
        return (len(value), tuple(value[0].shape)) if isinstance(value, list) else (tuple(value.shape), value.dtype)

    tensors = {**weights.per_expert, **weights.shared} if whole else weights.per_expert
    return weights.layout, {name: of(value) for name, value in tensors.items()}


def _difference(theirs: _Signature, mine: _Signature) -> str:
    """Describes the first difference between what was given and what is held, and the way out."""
    if theirs[0] != mine[0]:
        return f"{theirs[0]!r} for {mine[0]!r}; permute them with the same class"
    given, held = theirs[1], mine[1]
    name = next(name for name in (*held, *given) if given.get(name) != held.get(name))
    texts = [f"{of[name][0]} {of[name][1]}" if name in of else "none" for of in (given, held)]
    return f"{name} {texts[0]} for {texts[1]}; convert the weights to the dtypes and shapes that the kernel was made of"

"""Numbers of tokens to warm up a layer for, and the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from moereg.arguments import check_count
from moereg.errors import ArgumentError, shown

_LARGEST_COUNT: Final = 16384
"""Default upper limit of tokens per call."""


@dataclasses.dataclass(frozen=True)
class CompiledVariant:
    """One specialization of a kernel that the layer launches.

    Attributes:
        name: The kernel's name; several variants share it.
        seconds: Compile time on one core.
        was_there: Whether the cache had it.
    """

    name: str
    seconds: float
    was_there: bool


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Kernels that were compiled for a layer.

    Attributes:
        backend: The layer's backend.
        token_counts: Numbers of tokens, ascending.
        kernels: Everything that calls with these numbers of tokens launch.
        num_run: Calls made on the device, to load kernels and to record launches.
        seconds: Total time.
        cache: Triton's cache folder; None if it was not used.
        notes: Further information for the user, one line each.
    """

    backend: str
    token_counts: tuple[int, ...] = dataclasses.field(repr=False)
    kernels: tuple[CompiledVariant, ...] = dataclasses.field(default=(), repr=False)
    num_run: int = 0
    seconds: float = 0.0
    cache: Path | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def of_ranges(cls, backend: str, counts: tuple[int, ...], parts: Sequence[WarmUp]) -> WarmUp:
        """Sums up what was done for the ranges of a plan; the backend is the open range's."""
        return cls(
            backend,
            counts,
            tuple(kernel for part in parts for kernel in part.kernels),
            sum(part.num_run for part in parts),
            sum(part.seconds for part in parts),
            next((part.cache for part in parts if part.cache is not None), None),
            tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        )

    @property
    def num_compiled(self) -> int:
        """Number of kernels that were compiled because the cache lacked them."""
        return sum(not kernel.was_there for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, for `moereg compile --json`."""
        return {
            "backend": self.backend,
            "token_counts": summary_of(self.token_counts),
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "num_compiled": self.num_compiled,
            "seconds": self.seconds,
            "cache": None if self.cache is None else str(self.cache),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        tokens = shown_counts(self.token_counts)
        if not self.kernels:
            done = f"{self.backend} compiled nothing ahead for {tokens}"
        else:
            num_there = len(self.kernels) - self.num_compiled
            done = f"{len(self.kernels)} kernels of {self.backend} for {tokens}: {self.num_compiled} compiled"
            done += f", {num_there} were in the cache" if num_there else ""
        runs = f", {self.num_run} calls made" if self.num_run else ""
        place = "" if self.cache is None else f"; cache {self.cache}"
        return "\n".join([f"{done}{runs}, {self.seconds:.1f} s{place}", *self.notes])


def check_token_counts(token_counts: object, most: int | None = None) -> tuple[int, ...]:
    """Checks and sorts numbers of tokens, without 0; None means 1 to `most`, or to 16,384 if that is not known."""
    if token_counts is None:
        return tuple(range(1, (most or _LARGEST_COUNT) + 1))
    if isinstance(token_counts, (str, bytes)) or not isinstance(token_counts, Iterable):
        raise ArgumentError(
            f"token_counts must be numbers of tokens such as [1, 16, 64] or range(1, 8193), got {shown(token_counts)}"
        )
    counts = {check_count("a number of token_counts", count, minimum=0) for count in token_counts}
    if found := sorted(counts - {0}):
        return tuple(found)
    raise ArgumentError(f"token_counts must have a number of at least 1, got {shown(token_counts)}")


def shown_counts(counts: Sequence[int]) -> str:
    """`1 token`, `1 to 64 tokens`, or `3 numbers of tokens from 1 to 64` if some are left out."""
    least, most = counts[0], counts[-1]
    if len(counts) == 1:
        return f"{least} token{'s' * (least > 1)}"
    if len(counts) == most - least + 1:
        return f"{least} to {most} tokens"
    return f"{len(counts)} numbers of tokens from {least} to {most}"


def summary_of(counts: Sequence[int]) -> dict[str, int]:
    """The JSON form of numbers of tokens."""
    return {"number": len(counts), "least": counts[0], "most": counts[-1]}

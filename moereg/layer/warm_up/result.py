"""Result of warming up a layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moereg.layer.warm_up.counts import shown_counts

__all__ = ["CompiledVariant", "WarmUp"]


@dataclasses.dataclass(frozen=True)
class CompiledVariant:
    """One kernel as some launch of the layer asks for it.

    Attributes:
        name: Of the kernel; several variants share it.
        seconds: Of one core.
        was_there: Whether the cache had it.
    """

    name: str
    seconds: float
    was_there: bool


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """Kernels that were compiled for a layer.

    Attributes:
        backend: The layer's.
        token_counts: Ascending.
        kernels: Everything that calls with so many tokens launch.
        num_run: Calls that were made on the device, to load what was compiled and to record launches.
        seconds: Altogether.
        cache: Triton's folder; None where nothing was asked of it.
        notes: What else a user may want to know, one line each.
    """

    backend: str
    token_counts: tuple[int, ...] = dataclasses.field(repr=False)
    kernels: tuple[CompiledVariant, ...] = dataclasses.field(default=(), repr=False)
    num_run: int = 0
    seconds: float = 0.0
    cache: Path | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_compiled(self) -> int:
        """Kernels that were compiled, which the cache did not have."""
        return sum(not kernel.was_there for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The part of `moereg compile --json` that says what was done."""
        counts = self.token_counts
        return {
            "backend": self.backend,
            "token_counts": {"number": len(counts), "least": counts[0], "most": counts[-1]},
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

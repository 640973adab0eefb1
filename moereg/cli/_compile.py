"""`moereg compile`: compiles what a layer launches, ahead of its first call and maybe on another machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moereg.cli._options import ProblemFlags, UsageError
from moereg.cli._subject import Subject
from moereg.discovery import current_platform, load_backends
from moereg.dispatch import explain_backends
from moereg.platforms import Platform
from moereg.selection import SCHEMA, Selection
from moereg.warm_up import WarmUp, check_shipped, check_token_counts, compile_ahead

__all__ = ["CheckedCache", "Compiled", "check_cache", "compile_layer", "parse_ranges"]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """Kernels that were compiled for a layer.

    Attributes:
        subject: The layer.
        selection: How its backend was chosen.
        result: What was done; None where nothing fits.
    """

    subject: Subject
    selection: Selection
    result: WarmUp | None

    @property
    def refusal(self) -> str | None:
        """Why nothing was compiled; None where something was, or was in the cache."""
        if self.result is None:
            return self.selection.refusal
        return None if self.result.kernels else self.result.notes[0]

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg compile --json` prints."""
        done = {} if self.result is None else self.result.to_dict()
        winner = self.selection.winner
        return {
            "schema": SCHEMA,
            "problem": self.selection.problem.to_dict(),
            "platform": str(self.selection.platform),
            "experts": None if winner is None else winner.experts,
            "backend": self.selection.backend,
            "token_counts": None,
            "kernels": [],
            "num_compiled": 0,
            "seconds": 0.0,
            "cache": None,
            **done,
            "notes": [*self.subject.notices, *done.get("notes", ())],
        }

    def __str__(self) -> str:
        return "\n".join([str(self.result), *self.subject.notices])


def compile_layer(
    flags: ProblemFlags, subject: Subject, tokens: str | None, cache: Path | None, jobs: int | None
) -> Compiled:
    """Compiles what a layer launches.

    Args:
        flags: The platform and the request.
        subject: The layer.
        tokens: What `--tokens` says.
        cache: Folder to compile into; Triton's own where None.
        jobs: Compilers at once.

    Raises:
        MoeregError: As `compile_ahead`, or tokens cannot be read.
    """
    counts = check_token_counts(None if tokens is None else parse_ranges(tokens), subject.problem.max_num_tokens)
    load_backends()  # A plugin's kind of platform is known once it is loaded.
    selection = explain_backends(subject.problem, flags.platform, **flags.request())
    result = None if selection.winner is None else compile_ahead(selection, counts, cache, jobs)
    return Compiled(subject, selection, result)


def parse_ranges(text: str) -> list[int]:
    """The numbers of `--tokens 1-512,1024`.

    Raises:
        UsageError: The text has another form.
    """
    found: list[int] = []
    for word in text.split(","):
        ends = [end.strip() for end in word.split("-")]
        if not 1 <= len(ends) <= 2 or not all(end.isdecimal() and int(end) for end in ends):
            raise UsageError(f"--tokens takes numbers of at least 1 and ranges such as 1-512,1024, got {text!r}")
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last - first >= 2**20:
            raise UsageError(f"--tokens takes ranges of at most 2**20 numbers that ascend, got {word.strip()!r}")
        found += range(first, last + 1)
    return found


@dataclasses.dataclass(frozen=True)
class CheckedCache:
    """A folder of compiled kernels that serves this machine's Triton.

    Attributes:
        folder: Where.
        platform: That was asked about.
        layers: What was compiled for it.
    """

    folder: Path
    platform: Platform
    layers: tuple[dict[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg compile --check --json` prints."""
        layers = [{name: value for name, value in layer.items() if name != "facts"} for layer in self.layers]
        return {"schema": SCHEMA, "platform": str(self.platform), "cache": str(self.folder), "layers": layers}

    def __str__(self) -> str:
        made = sum(layer["num_kernels"] for layer in self.layers)
        return f"{self.folder} serves {self.platform}: {len(self.layers)} layers, {made} kernels"


def check_cache(folder: Path | None, platform: str | None) -> CheckedCache:
    """Checks a folder that was compiled into, and rewrites the paths in it where it was moved.

    Args:
        folder: What `--cache` says.
        platform: To run on; this machine where None.

    Raises:
        UsageError: No folder is named, or nothing was compiled into it.
        ArgumentError: Triton would compile everything again.
    """
    if folder is None:
        raise UsageError("--check needs --cache, the folder to check")
    load_backends()
    target = current_platform() if platform is None else Platform.from_name(platform)
    place = folder.expanduser().absolute()
    note = check_shipped(place, target)
    if note is None:
        raise UsageError(f"--check takes a folder that moereg compile --cache has filled, got {folder}")
    layers = tuple(layer for layer in note["layers"] if layer["platform"] == str(target))
    return CheckedCache(place, target, layers)

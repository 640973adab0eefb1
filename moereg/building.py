"""Kernels that are built ahead of time, on request and never by surprise: what `moereg build-kernels` asks a backend.

A backend whose kernels take minutes or hours to compile offers a `KernelBuilder` (`Experts.kernel_builder`). Its probe
rejects it where they are not built, with the command that builds them.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from moereg.platforms import Platform
from moereg.quant import QuantScheme

__all__ = ["BuildPlan", "KernelBuilder", "num_cores"]


@dataclasses.dataclass(frozen=True)
class BuildPlan:
    """A build as it would run.

    Attributes:
        parts: Names of the kernel sets to build, those that are built already left out.
        built: Names of those that are.
        num_steps: Files to compile, and links.
        cpu_seconds: Of one core, estimated from measured files; None where nothing was measured.
        bytes_per_job: Most memory that one compiler takes.
        target: The file that is written.
        token: What `build` needs to know beside; the builder's own.
    """

    parts: tuple[str, ...]
    built: tuple[str, ...]
    num_steps: int
    cpu_seconds: float | None
    bytes_per_job: int
    target: Path
    token: object = dataclasses.field(default=None, repr=False, compare=False)

    def num_jobs(self, num_cores: int, free_bytes: int | None) -> int:
        """Compilers to run at once: one a core, and no more than memory holds."""
        fitting = num_cores if free_bytes is None else free_bytes // self.bytes_per_job
        return max(1, min(num_cores, fitting))


class KernelBuilder(abc.ABC):
    """Builds the kernels of a backend ahead of time."""

    @abc.abstractmethod
    def plan(
        self,
        platform: Platform,
        schemes: Sequence[QuantScheme],
        dtypes: Sequence[str],
        parts: Sequence[str],
        folder: Path | None,
    ) -> BuildPlan:
        """Plans a build without compiling anything.

        Args:
            platform: To build for; it need not be this machine.
            schemes: That the backend shall compute; all that it can on the platform where empty.
            dtypes: Of hidden states; bfloat16 alone where empty.
            parts: Sets of kernels to build beside, by the builder's own names.
            folder: To write into; where the backend looks for its kernels if None.

        Raises:
            ArgumentError: A scheme or dtype has no kernels there, or a tool that the build needs is missing.
        """

    @abc.abstractmethod
    def build(self, plan: BuildPlan, jobs: int, advance: Callable[[int, int], None]) -> None:
        """Builds what a plan says and puts it in place, whole or not at all.

        Args:
            plan: From `plan`.
            jobs: Compilers to run at once.
            advance: Called with (steps done, steps in all).

        Raises:
            MoeregError: A compiler failed; its last words are in the message.
        """


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

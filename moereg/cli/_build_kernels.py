"""`moereg build-kernels`: builds a backend's kernels ahead of time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moereg.cli._options import UsageError
from moereg.cli._progress import phase
from moereg.discovery import current_platform, find_scheme, load_backends
from moereg.errors import unknown_name_message
from moereg.experts import BuildPlan, KernelBuilder
from moereg.memory import free_memory_bytes
from moereg.platforms import Platform
from moereg.python_process import num_cores
from moereg.selection import SCHEMA
from moereg.waiting import duration

__all__ = ["Built", "build_kernels"]


@dataclasses.dataclass(frozen=True)
class Built:
    """Kernels that were built, or would be.

    Attributes:
        backend: Its name.
        platform: That the kernels are for.
        plan: What was to do.
        jobs: Compilers at once.
        seconds: Time that it took; None where it was not asked to be done.
    """

    backend: str
    platform: Platform
    plan: BuildPlan
    jobs: int
    seconds: float | None

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg build-kernels --json` prints."""
        return {
            "schema": SCHEMA,
            "backend": self.backend,
            "platform": str(self.platform),
            "parts": list(self.plan.parts),
            "built": list(self.plan.built),
            "num_steps": self.plan.num_steps,
            "cpu_seconds": self.plan.cpu_seconds,
            "jobs": self.jobs,
            "target": str(self.plan.target),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        plan = self.plan
        built = f", beside {', '.join(plan.built)}" if plan.built else ""
        if not plan.parts:
            return f"{plan.target} holds {', '.join(plan.built)} already"
        if self.seconds is None:
            return f"{estimate(plan, self.jobs)}: {', '.join(plan.parts)}{built}, into {plan.target}"
        return f"built {', '.join(plan.parts)}{built} in {duration(self.seconds)}: {plan.target}"


def estimate(plan: BuildPlan, jobs: int) -> str:
    """How long a build takes, as one line."""
    if plan.cpu_seconds is None:
        return f"{plan.num_steps} steps with {jobs} at once"
    took = duration(plan.cpu_seconds)
    return f"{plan.num_steps} steps, about {took} of one core and {duration(plan.cpu_seconds / jobs)} with {jobs} jobs"


def build_kernels(
    name: str,
    quant: Sequence[str],
    dtype: Sequence[str],
    parts: Sequence[str],
    platform: str | None,
    jobs: int | None,
    folder: Path | None,
    dry_run: bool,
) -> Built:
    """Builds a backend's kernels.

    Args:
        name: Of the backend.
        quant: Names of schemes that it shall compute; all on the platform where empty.
        dtype: Of hidden states.
        parts: Kernel sets to build beside, by the builder's own names.
        platform: To build for; this machine where None.
        jobs: Compilers at once; as many as cores and memory allow where None.
        folder: To write into; where the backend looks if None.
        dry_run: Whether to say what would be done alone.

    Raises:
        UsageError: The backend has nothing to build.
        MoeregError: Something has no kernels, a tool is missing, or a compiler failed.
    """
    builder = _builder(name)
    schemes = [find_scheme(scheme) for scheme in quant]
    target = current_platform() if platform is None else Platform.from_name(platform)
    plan = builder.plan(target, schemes, list(dtype), list(parts), folder)
    num_jobs = jobs or plan.num_jobs(num_cores(), free_memory_bytes(torch.device("cpu")))
    if dry_run or not plan.parts:
        return Built(name, target, plan, num_jobs, None)
    start = time.monotonic()
    with phase(f"building {', '.join(plan.parts)} for {name}: {estimate(plan, num_jobs)}") as advance:
        builder.build(plan, num_jobs, advance)
    return Built(name, target, plan, num_jobs, time.monotonic() - start)


def _builder(name: str) -> KernelBuilder:
    registry = load_backends()
    cells = registry.by_name(name)
    if not cells:
        raise UsageError(unknown_name_message("backend", name, registry.names))
    for cell in cells:
        if (builder := cell.experts.kernel_builder()) is not None:
            return builder
    offered = sorted({cell.name for cell in registry.cells if cell.experts.kernel_builder() is not None})
    raise UsageError(
        f"backend {name!r} has no kernels that are built ahead of time; those that have: {', '.join(offered) or 'none'}"
    )

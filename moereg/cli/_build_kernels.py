"""`moereg build-kernels`: builds a backend's kernels ahead of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moereg.cli._options import UsageError
from moereg.cli._progress import phase
from moereg.errors import unknown_name_message
from moereg.experts import BuildPlan, KernelBuilder
from moereg.platforms import Platform
from moereg.plugins.loader import current_platform, find_scheme, load_backends
from moereg.runtime.memory import free_memory_bytes
from moereg.runtime.progress import duration
from moereg.runtime.python_process import num_cores
from moereg.selection.result import SCHEMA


def estimate(plan: BuildPlan, jobs: int) -> str:
    """The estimated time of a build, as one line."""
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
) -> tuple[dict[str, Any], str]:
    """Builds a backend's kernels, or says what it would do (`dry_run`). Takes the options' values by name.

    Returns:
        The object that `moereg build-kernels --json` prints, and the line to show otherwise.

    Raises:
        UsageError: The backend has nothing to build.
        MoeregError: A scheme or platform has no kernels, a tool is missing, or a compiler failed.
    """
    builder = _builder(name)
    schemes = [find_scheme(scheme) for scheme in quant]
    target = current_platform() if platform is None else Platform.from_name(platform)
    plan = builder.plan(target, schemes, list(dtype), list(parts), folder)
    num_jobs = jobs or plan.num_jobs(num_cores(), free_memory_bytes(torch.device("cpu")))
    seconds = None
    if plan.parts and not dry_run:
        start = time.monotonic()
        with phase(f"building {', '.join(plan.parts)} for {name}: {estimate(plan, num_jobs)}") as advance:
            builder.build(plan, num_jobs, advance)
        seconds = time.monotonic() - start
    parts, beside = ", ".join(plan.parts), f", beside {', '.join(plan.built)}" if plan.built else ""
    if not plan.parts:
        text = f"{plan.target} holds {', '.join(plan.built)} already"
    elif seconds is None:
        text = f"{estimate(plan, num_jobs)}: {parts}{beside}, into {plan.target}"
    else:
        text = f"built {parts}{beside} in {duration(seconds)}: {plan.target}"
    return {
        "schema": SCHEMA,
        "backend": name,
        "platform": str(target),
        "parts": list(plan.parts),
        "built": list(plan.built),
        "num_steps": plan.num_steps,
        "cpu_seconds": plan.cpu_seconds,
        "jobs": num_jobs,
        "target": str(plan.target),
        "seconds": seconds,
    }, text


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

"""Compiles in another process, on all cores."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from moereg import errors
from moereg.errors import ArgumentError, BackendError, one_line
from moereg.layer.ranges import counts_by_range, only_candidate
from moereg.layer.warm_up.result import CompiledVariant, WarmUp, shown_counts
from moereg.layer.warm_up.shipped import note_layer, use_folder
from moereg.runtime.memory import free_memory_bytes
from moereg.runtime.progress import long_wait
from moereg.runtime.python_process import num_cores, python_command
from moereg.selection.modules import own_modules
from moereg.selection.result import Selection

_SECONDS_EACH: Final = 3.0
"""Mean seconds for a kernel on one core."""

_COMPILER_BYTES: Final = 1 << 30
"""Most memory of one compiler, besides what all share."""


@dataclasses.dataclass(frozen=True)
class Ahead:
    """Kernels that another process compiled into Triton's cache.

    Attributes:
        counts: Numbers of tokens whose calls together launch all of them.
        fault: Why nothing could be compiled ahead, or None.
        facts: Facts that the cache's keys depend on.
        notes: Lines for the user.
    """

    kernels: tuple[CompiledVariant, ...] = ()
    counts: tuple[int, ...] = ()
    fault: str | None = None
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def num_compilers(jobs: int | None = None) -> int:
    """Number of parallel compilers: as requested, else one per core as far as memory allows."""
    if jobs is not None:
        return jobs
    free = free_memory_bytes(torch.device("cpu"))
    return max(1, num_cores() if free is None else min(num_cores(), free // _COMPILER_BYTES))


def compile_ahead(
    selection: Selection, counts: Sequence[int], folder: Path | None = None, jobs: int | None = None
) -> WarmUp:
    """Compiles what a layer launches on the selection's platform, which need not be this machine.

    Args:
        selection: A selection with a winner.
        counts: Numbers of tokens, ascending.
        folder: Folder to compile into and to ship; None means Triton's own cache.
        jobs: Parallel compilers; None means as many as cores and memory allow.
    """
    start = time.monotonic()
    winner = selection.chosen
    platform = selection.platform
    if importlib.util.find_spec("triton") is None:
        raise ArgumentError(f"compiling for {platform} needs Triton here; pip install triton")
    from moereg.kernels.launch.ahead import Target

    if Target.of(platform.kind, platform.arch) is None:
        known = ", ".join(Target.known())
        raise ArgumentError(f"kernels can be compiled for {known}, got {platform}; name one of these")
    problem = selection.problem
    has_map = problem.is_expert_parallel or problem.placement == "map"
    with use_folder(platform, folder) as place:
        parts = []
        for number, inside in counts_by_range([most for most, _ in selection.plan], counts):
            own = only_candidate(selection, selection.plan[number][1])
            found = ask(own, inside, num_compilers(jobs), has_map=has_map)
            notes = found.notes
            if found.fault is not None:
                notes = (
                    f"backend {own.backend!r} compiles nothing ahead: {found.fault}; require one that does, such as "
                    "--require triton",
                )
            elif folder is not None:
                note_layer(place, own, inside, found.facts, len(found.kernels))
            parts.append(WarmUp(str(own.backend), inside, found.kernels, cache=place, notes=notes))
        done = WarmUp.of_ranges(winner.backend, tuple(counts), parts)
        return dataclasses.replace(done, seconds=time.monotonic() - start)


def ask(
    selection: Selection,
    counts: Sequence[int],
    jobs: int,
    *,
    has_map: bool,
    weights: dict[str, Any] | None = None,
    shared_bytes: int | None = None,
) -> Ahead:
    """Lets another process compile into this process's Triton cache; arguments as in `compile_ahead`.

    `has_map` says that calls have an expert map, `weights` is the result of `described`, or None for all that a
    checkpoint may hold, and `shared_bytes` the most shared memory of a program on a device that is present.
    """
    winner = selection.chosen
    request = {
        "modules": own_modules(winner.backend),
        "selection": selection.to_dict(),
        "counts": list(counts),
        "jobs": jobs,
        "has_map": has_map,
        "weights": weights,
        "shared_bytes": shared_bytes,
    }
    what = f"compiling {{}} kernels of {winner.backend} for {shown_counts(counts)}"
    answer = _run(request, what, jobs)
    if answer["fault"] is not None:
        return Ahead(fault=answer["fault"])
    failed = [kernel for kernel in answer["kernels"] if "error" in kernel]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise BackendError(
            f"backend {winner.backend!r} of {winner.provider}: {failed[0]['name']} did not compile for "
            f"{selection.platform}{more}: {one_line(failed[0]['error'])}; do without it (--deny {winner.backend}) and "
            "report it to its authors",
            winner.backend,
            winner.origin,
        )
    kernels = tuple(CompiledVariant(**kernel) for kernel in answer["kernels"])
    return Ahead(kernels, tuple(answer["counts"]), None, answer["facts"], tuple(answer["notes"]))


def _run(request: dict[str, Any], what: str, jobs: int) -> dict[str, Any]:
    from moereg.kernels.launch import cache

    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache.cache_folder()),
        # It gets no device, even if the machine has one, and no threads, so that it can fork.
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    # A process that interprets kernels cannot compile them.
    environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryFile() as errors_there, contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            python_command("moereg.layer.warm_up.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors_there,
            env=environment,
            start_new_session=True,
        )
        stack.callback(_end, process)
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode())
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        advance = None
        for line in process.stdout:
            values = json.loads(line)
            if "result" in values:
                return dict(values["result"])
            if "error" in values:
                raise getattr(errors, values["error"], ArgumentError)(values["message"])
            if not values["compiled"]:
                continue  # Cached kernels take no time.
            if advance is None:
                seconds = values["total"] * _SECONDS_EACH / jobs
                avoid = "moereg compile does it ahead, on any machine"
                advance = stack.enter_context(long_wait(what.format(values["total"]), seconds, avoid))
            advance(values["done"], values["total"])
        code = process.wait()
        errors_there.seek(0)
        last = collections.deque(errors_there.read().decode(errors="replace").splitlines(), maxlen=1)
        raise ArgumentError(
            f"the process that compiles ended with {code}: {one_line(''.join(last)) or 'it said nothing'}; "
            "look at the memory of this machine, and try fewer jobs"
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and its forks, which share its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()

"""The interface of a fuzz area: promises about bad input that can be drawn, checked, stored and replayed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import pkgutil
import random
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"

Case = Any
"""Anything that JSON has, so that it can be stored."""


@dataclasses.dataclass(frozen=True)
class Area:
    """One contract and the inputs that try to break it. Each module of this package with an `AREA` is one.

    Attributes:
        name: As its module is called.
        draw: A case from a seeded generator, and from nothing else: the same state draws the same case. Never a set's
            order, which differs between processes. check: None if the contract holds, else one line that says how it is
            broken. What it raises counts as broken too, and so do a case that takes longer or more memory than it may,
            and one that ends the process.
        smoke: Cases that `make test` draws.
        limit_s: CPU seconds of one case.
        memory_mib: What one case may allocate.
    """

    name: str
    draw: Callable[[random.Random], Case]
    check: Callable[[Case], str | None]
    smoke: int = 30
    limit_s: float = 5.0
    memory_mib: int = 1024


def module_names() -> list[str]:
    """The modules of this package, but for the one that runs it."""
    return sorted(info.name for info in pkgutil.iter_modules([str(Path(__file__).parent)]) if info.name != "__main__")


def find_areas() -> Mapping[str, Area]:
    """The areas of this package by name, in alphabetical order."""
    modules = [importlib.import_module(f"tests.fuzz.{name}") for name in module_names()]
    return {module.AREA.name: module.AREA for module in modules if hasattr(module, "AREA")}


def draw_case(area: Area, seed: int, index: int) -> Case:
    """Case `index` of a seed, whichever process asks for it."""
    return area.draw(random.Random(f"{seed}/{area.name}/{index}"))


def run_case(area: Area, case: Case) -> str | None:
    """Checks a case within the area's limits of CPU time and memory; None if the contract holds, else one line."""
    try:
        with _cpu_limit(area.limit_s), _memory_limit(area.memory_mib):
            failure = area.check(case)
    except _TimeUpError:
        failure = f"took over {area.limit_s} s of CPU time"
    except MemoryError:
        failure = f"took over {area.memory_mib} MiB"
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit too: nothing that moereg's functions are called with may end a process.
        failure = f"raised {type(error).__name__}: {error}"
    return None if failure is None else " ".join(failure.split())[:500]


def store_case(area: Area, case: Case, failure: str, corpus: Path = CORPUS) -> Path:
    """Writes a case that failed where `make test` replays it; the same case always to the same file."""
    digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
    path = corpus / area.name / f"{digest}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Names of temporary directories are of this machine.
    failure = re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/ ]*", "...", failure)
    path.write_text(json.dumps({"failure": failure, "case": case}, indent=1) + "\n")
    return path


def load_case(path: Path) -> Case:
    """The case of a file that `store_case` wrote."""
    return json.loads(path.read_text())["case"]


class _TimeUpError(BaseException):
    """Not an Exception, so that no code under test swallows it."""


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """CPU time instead of the clock's, so that a busy neighbor fails nothing. What sleeps forever is for the caller."""

    def stop(signum: int, frame: object) -> None:
        raise _TimeUpError

    previous = signal.signal(signal.SIGPROF, stop)
    # Once more after each second, in case the first one was raised where Python ignores it, such as a finalizer.
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


@contextlib.contextmanager
def _memory_limit(mib: int) -> Iterator[None]:
    """In addition to the present memory of the process. Only private memory counts: not mapped files and libraries."""
    status = Path("/proc/self/status").read_text()
    now_kib = int(next(line for line in status.splitlines() if line.startswith("VmData:")).split()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [now_kib * 1024 + mib * 2**20, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

"""The interface of a fuzz area: promises about bad input that can be drawn, checked, stored and replayed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"

# Clock seconds for each CPU second of a case: a case that waits would not use up CPU seconds.
_PATIENCE: Final = 10

Case = Any
"""Anything that JSON has, so that it can be stored."""


@dataclasses.dataclass(frozen=True)
class Area:
    """One contract and the inputs that try to break it.

    Attributes:
        draw: A case from a seeded generator, and from nothing else: the same state draws the same case. Never a set's
            order, which differs between processes.
        check: None if the contract holds, else one line that says how it is broken. What it raises counts as broken
            too, and so does a case that takes longer or more memory than it may.
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


def draw_case(area: Area, seed: int, index: int) -> Case:
    """Case `index` of a seed, whichever process asks for it."""
    return area.draw(random.Random(f"{seed}/{area.name}/{index}"))


def run_case(area: Area, case: Case) -> str | None:
    """Checks a case within the area's limits of time and memory; None if the contract holds, else one line."""
    try:
        with _time_limit(area.limit_s), _memory_limit(area.memory_mib):
            failure = area.check(case)
    except _TimeUpError as error:
        failure = str(error)
    except MemoryError:
        failure = f"took over {area.memory_mib} MiB"
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # SystemExit too: nothing that moereg's functions are called with may end a process.
        failure = f"raised {type(error).__name__}: {error}"
    return None if failure is None else " ".join(failure.split())[:500]


def store_case(area: Area, case: Case, failure: str) -> Path:
    """Writes a case that failed where `make test` replays it; the same case always to the same file."""
    digest = hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]
    path = CORPUS / area.name / f"{digest}.json"
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
def _time_limit(seconds: float) -> Iterator[None]:
    """CPU time, so that a busy neighbor fails nothing; and much more by the clock, for a case that waits."""
    limits = {
        signal.SIGPROF: (signal.ITIMER_PROF, seconds, f"took over {seconds} s of CPU time"),
        signal.SIGALRM: (signal.ITIMER_REAL, _PATIENCE * seconds, f"no answer after {_PATIENCE * seconds} s"),
    }

    def stop(number: int, frame: object) -> None:
        raise _TimeUpError(limits[signal.Signals(number)][2])

    handlers = {number: signal.signal(number, stop) for number in limits}
    # Once more after each second, in case the first one was raised where Python ignores it, such as a finalizer.
    timers = [(timer, signal.setitimer(timer, limit, 1.0)) for timer, limit, _ in limits.values()]
    try:
        yield
    finally:
        for timer, before in timers:  # The clock's may be pytest's.
            signal.setitimer(timer, *before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


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

"""Progress on standard error: a bar on a terminal, otherwise lines for work of more than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Final

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from moereg.cli._output import console, print_aside
from moereg.runtime.progress import Advance, duration

SILENT_SECONDS: Final = 2.0
"""Without a terminal, only work that takes longer is announced."""

EVERY_SECONDS: Final = 15.0
"""Without a terminal, long work says so often how far it is."""


@contextlib.contextmanager
def phase(description: str) -> Iterator[Advance]:
    """Shows a phase of work, such as `permuting weights`; yields a callback for (steps done, all steps), if any."""
    stream = sys.stderr
    if stream.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        times = TimeElapsedColumn(), TimeRemainingColumn()
        # Transient, so that only an error's line remains.
        with Progress(*columns, *times, console=console(stream), transient=True) as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)
        return
    last = began = time.monotonic()
    first: int | None = None

    def advance(done: int, total: int) -> None:
        nonlocal last, first
        first, now = done if first is None else first, time.monotonic()
        if now - last > EVERY_SECONDS:
            last = now
            left = f", about {duration((now - began) / (done - first) * (total - done))} left" if done > first else ""
            print_aside(f"{description}: {done} of {total}{left}")

    timer = threading.Timer(SILENT_SECONDS, print_aside, (f"{description} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()

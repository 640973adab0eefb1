"""Progress on standard error: a bar on a terminal, otherwise a line for phases longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from moereg.cli._output import console
from moereg.runtime.progress import duration

SILENT_SECONDS: Final = 2.0
"""Without a terminal, only work that takes longer is announced."""

EVERY_SECONDS: Final = 15.0
"""Without a terminal, long work says so often how far it is."""

Advance = Callable[[int, int], None]
"""Called with (steps done, all steps)."""


@contextlib.contextmanager
def phase(description: str) -> Iterator[Advance]:
    """Shows a phase of work.

    Args:
        description: The work, such as `permuting weights`.

    Yields:
        A callback for finished steps; without steps the phase only shows that it runs.
    """
    with _bar(description) if sys.stderr.isatty() else _line(description) as advance:
        yield advance


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Advance]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Transient, so that only an error's line remains.
    with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
        task = progress.add_task(description, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def _line(description: str) -> Iterator[Advance]:
    stream = sys.stderr
    timer = threading.Timer(SILENT_SECONDS, lambda: print(f"{description} ...", file=stream, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: None
    finally:
        timer.cancel()


@contextlib.contextmanager
def countdown(description: str) -> Iterator[Callable[[int, int, float | None], None]]:
    """Shows long work whose end is estimated.

    Args:
        description: The work.

    Yields:
        A callback for (steps done, all steps, seconds left or None).
    """
    if sys.stderr.isatty():
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=console(sys.stderr), transient=True) as progress:
            task = progress.add_task(description, total=None)
            yield lambda done, total, left: progress.update(
                task, completed=done, total=total, description=f"{description}{_left(left)}"
            )
        return
    last = time.monotonic()

    def line(done: int, total: int, left: float | None) -> None:
        nonlocal last
        if time.monotonic() - last > EVERY_SECONDS:
            last = time.monotonic()
            print(f"{description}: {done} of {total} points{_left(left)}", file=sys.stderr, flush=True)

    yield line


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", about {duration(seconds)} left"

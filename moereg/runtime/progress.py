"""Announces long waits before they start: what takes how long, and how to avoid it.

A backend wraps long compiling, tuning or loading in `long_wait`. It goes to the log of `moereg`, and the command line
shows it as progress.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Final

logger: Final = logging.getLogger("moereg")

Advance = Callable[[int, int], None]
"""Called with (steps done, all steps)."""

_Show = Callable[[str], AbstractContextManager[Advance]]

_SHOWING: list[_Show] = []
"""Progress displays of this process besides the log, the latest last."""

_WARNED_SECONDS: Final = 10.0
"""From this long on a user may think that the process hangs, so the line is a warning."""


@contextlib.contextmanager
def waits_shown_by(show: _Show) -> Iterator[None]:
    """Within this context shows waits with a function that takes a description and returns a progress context."""
    _SHOWING.append(show)
    try:
        yield
    finally:
        _SHOWING.remove(show)


@contextlib.contextmanager
def long_wait(what: str, seconds: float | None, avoid: str) -> Iterator[Advance]:
    """Announces a wait, such as `compiling 2 kernels`, of some seconds if they are known; shows its progress.

    `avoid` is a clause on how to avoid it the next time. Yields a callback for finished steps, if any.
    """
    time = "some time" if seconds is None else f"about {duration(seconds)}"
    level = logging.WARNING if seconds is None or seconds >= _WARNED_SECONDS else logging.INFO
    logger.log(level, "%s takes %s; %s", what, time, avoid)
    shown = _SHOWING[-1](f"{what} (about {duration(seconds)})" if seconds else what) if _SHOWING else None
    with shown if shown is not None else contextlib.nullcontext(lambda done, total: None) as advance:
        yield advance


def duration(seconds: float) -> str:
    """Formats a time in a natural unit: `2 s`, `50 min`, `8.7 h`."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 2 * 3600 else f"{seconds / 3600:.1f} h"

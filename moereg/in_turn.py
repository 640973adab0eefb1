"""Calls of a kernel, and what writes its weights, in turn."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

__all__ = ["InTurn"]

_POLL_SECONDS: Final = 1e-4


class InTurn:
    """Keeps calls and writes of one kernel apart: threads may call it together, and write its weights alone.

    It orders what the host does. A GPU does the work later, stream by stream.
    """

    def __init__(self) -> None:
        """Without calls."""
        self._calls: dict[int, None] = {}
        self._writer: int | None = None
        self._lock = threading.RLock()

    def begin(self) -> int:
        """A call begins, after a writer of another thread; `end` takes what this returns, in a `finally`."""
        me = threading.get_ident()
        # First the note, then the look: a writer does both the other way round.
        self._calls[me] = None
        while self._writer is not None and self._writer != me:
            del self._calls[me]
            with self._lock:
                self._calls[me] = None
        return me

    def end(self, call: int) -> None:
        """A call has ended."""
        self._calls.pop(call, None)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other thread calls or writes. Waits for calls that have begun."""
        me = threading.get_ident()
        with self._lock:
            outer, self._writer = self._writer, me
            try:
                while any(each != me for each in tuple(self._calls)):
                    time.sleep(_POLL_SECONDS)
                yield
            finally:
                self._writer = outer

"""Turns of a kernel's calls and of writes into its weights."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

_POLL_SECONDS: Final = 1e-4


class InTurn:
    """Keeps calls and writes of one kernel apart: threads may call it together, and write its weights alone.

    It orders what the host does. A GPU does the work later, stream by stream.
    """

    def __init__(self) -> None:
        """No calls have begun."""
        self._calls: dict[int, None] = {}
        self._writer: int | None = None
        self._lock = threading.RLock()

    def begin(self, me: int) -> None:
        """A call begins, after a writer of another thread.

        Args:
            me: This thread's number. Whatever interrupts this function, `end` must follow.
        """
        # First the note, then the look: a writer does both the other way round.
        self._calls[me] = None
        while self._writer is not None and self._writer != me:
            del self._calls[me]
            with self._lock:
                self._calls[me] = None

    def end(self, me: int) -> None:
        """A call of this thread has ended."""
        self._calls.pop(me, None)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for calls that have begun; other threads neither call nor write while this is held."""
        me = threading.get_ident()
        with self._lock:
            outer, self._writer = self._writer, me
            try:
                while any(each != me for each in tuple(self._calls)):
                    time.sleep(_POLL_SECONDS)
                yield
            finally:
                self._writer = outer

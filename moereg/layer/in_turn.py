"""Keeps a kernel's calls and writes to its weights apart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

_POLL_SECONDS: Final = 1e-4


class InTurn:
    """A readers-writer lock for one kernel: threads may call it together, but write its weights alone.

    It only orders the host. A GPU does the work later, stream by stream.
    """

    def __init__(self) -> None:
        """Starts without calls or a writer."""
        self._calls: dict[int, None] = {}
        self._writer: int | None = None
        self._lock = threading.RLock()

    def begin(self, me: int) -> None:
        """Begins a call, waiting for another thread's writer.

        Args:
            me: This thread's id. Even if this function is interrupted, `end` must follow.
        """
        # Register first, then look for a writer; a writer does both in the opposite order.
        self._calls[me] = None
        while self._writer is not None and self._writer != me:
            del self._calls[me]
            with self._lock:
                self._calls[me] = None

    def end(self, me: int) -> None:
        """Ends this thread's call."""
        self._calls.pop(me, None)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for running calls; while held, other threads neither call nor write."""
        me = threading.get_ident()
        with self._lock:
            outer, self._writer = self._writer, me
            try:
                while any(each != me for each in tuple(self._calls)):
                    time.sleep(_POLL_SECONDS)
                yield
            finally:
                self._writer = outer

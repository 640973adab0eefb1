"""Signals in tests, whatever the process that started them did to its own."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def ctrl_c_handled_by(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Handles SIGINT like that. A shell without job control starts `command &` with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

"""What importing a stranger's module may change for the whole process, and what it brings into it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from moereg.ambient import AmbientState
from moereg.errors import one_line, shown

__all__ = ["Interrupts", "ProcessState", "libraries_since", "origin_of", "put_back"]

logger: Final = logging.getLogger("moereg")

_EVERYTHING: Final = (None, Warning, None, 0)
"""Message, category, module and line of a filter for all warnings."""


def libraries_since(num_modules: int, module: str) -> list[str]:
    """Packages of others that were imported since `sys.modules` had so many entries.

    Args:
        num_modules: How many it had.
        module: Of the code that imported them; its own package does not count.
    """
    known = {module.partition(".")[0], "moereg", *sys.stdlib_module_names}
    return [name for name in list(sys.modules)[num_modules:] if "." not in name and name not in known]


class ProcessState(NamedTuple):
    """State of Python and torch that code can change for everybody who runs after it.

    Attributes:
        torch: Torch's.
        recursion_limit: Python's.
        folder: The current one; None where it is gone.
        filters: Of warnings.
        threads: Those that the end of the process waits for.
    """

    torch: AmbientState
    recursion_limit: int
    folder: str | None
    filters: tuple[Any, ...]
    threads: frozenset[threading.Thread]

    @classmethod
    def now(cls) -> ProcessState:
        """The present state."""
        folder = None
        with contextlib.suppress(OSError):
            folder = os.getcwd()
        threads = frozenset(thread for thread in threading.enumerate() if not thread.daemon)
        return cls(AmbientState.now(), sys.getrecursionlimit(), folder, tuple(warnings.filters), threads)

    def restore(self) -> tuple[str, ...]:
        """Puts this state back, but for threads.

        Returns:
            What differed, in words with the value found.
        """
        changes: list[str] = []
        if (limit := sys.getrecursionlimit()) != self.recursion_limit:
            sys.setrecursionlimit(self.recursion_limit)
            changes.append(f"recursion limit {limit}")
        found = ProcessState.now()
        if self.folder is not None and found.folder != self.folder:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
                changes.append(f"current folder {found.folder}")
        if _put_filters_back(self.filters, found.filters):
            changes.append("filters of all warnings")
        return (*changes, *self.torch.restore())

    def new_threads(self) -> list[threading.Thread]:
        """Threads that were started since, and that the end of the process waits for."""
        return sorted(ProcessState.now().threads - self.threads, key=lambda thread: thread.name)


def origin_of(thread: threading.Thread) -> str:
    """The module whose function a thread runs, as far as the thread says."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", None) or type(thread).__module__)


def put_back(state: ProcessState, who: str) -> None:
    """Restores a state, and says what was put back and which threads stay.

    Args:
        state: From before.
        who: Changed it, for the log.
    """
    if changes := state.restore():
        logger.warning(
            "%s changed %s for the whole process, which moereg has put back; report it to its authors",
            who,
            one_line(", ".join(changes)),
        )
    for thread in state.new_threads():
        logger.warning(
            "%s started thread %s of %s, which is no daemon: this process does not end before it; report it to its "
            "authors, or leave it out of MOEREG_PLUGINS",
            who,
            shown(thread.name),
            origin_of(thread),
        )


def _put_filters_back(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Puts filters back that are gone, and removes new ones for all warnings; whether there was anything to do.

    A library may add filters for its own warnings.
    """
    added = [each for each in now if each not in before]
    narrow = [each for each in added if tuple(each[1:]) != _EVERYTHING]
    if narrow == added and all(each in now for each in before):
        return False
    warnings.filters[:] = [*narrow, *before]  # type: ignore[index]  # typeshed says that it is a Sequence
    with warnings.catch_warnings():
        pass  # Forgets what was found by the filters so far.
    return True


class Interrupts:
    """Tells Ctrl-C from a KeyboardInterrupt that somebody's code raises by itself.

    Only the main thread can: signals reach no other. There, Python's own handler is replaced while the body runs.
    """

    def __init__(self) -> None:
        self._can_tell = False
        self._has_come = False

    def are_excluded(self) -> bool:
        """Whether no Ctrl-C has come inside the body."""
        return self._can_tell and not self._has_come

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Notes a Ctrl-C that comes inside; it raises KeyboardInterrupt as ever."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGINT)
        # A shell without job control starts `command &` with SIGINT ignored: no Ctrl-C can come.
        self._can_tell = is_main and handler in (signal.default_int_handler, signal.SIG_IGN)
        if not is_main or handler is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        self._has_come = True
        signal.default_int_handler(number, frame)

"""Processes that run cases, and are replaced where a case ends them or stops answering."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Final

from tests.fuzz.area import Area, draw_case, find_areas, module_names, run_case

# Forked from a process that has imported everything and started nothing: quick to replace, and safe to fork.
_PROCESSES: Final = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([f"tests.fuzz.{name}" for name in module_names()])
# Clock seconds for each CPU second of a case: a case that waits would not use up CPU seconds.
_PATIENCE: Final = 10
_START_S: Final = 120.0


@dataclasses.dataclass
class Worker:
    """A process that runs one case at a time.

    Attributes:
        areas: Called there for the areas.
    """

    areas: Callable[[], Mapping[str, Area]] = find_areas
    process: Any = None
    connection: Connection | None = None

    def run(self, area: Area, seed: int, index: int) -> str | None:
        """Draws a case and runs it; None if the contract holds, else one line."""
        connection = self.connection or self._start()
        connection.send((area.name, seed, index))
        try:
            if connection.poll(_PATIENCE * area.limit_s):
                return connection.recv()
            self.stop()
            return f"no answer after {_PATIENCE * area.limit_s} s"
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            self.stop()
            return f"ended the process with {signal.Signals(-code).name if code < 0 else code}"

    def stop(self) -> None:
        """Ends the process."""
        if self.connection is not None:
            self.connection.close()
            self.process.kill()
            self.process.join()
        self.process = self.connection = None

    def _start(self) -> Connection:
        self.connection, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_work, args=(theirs, self.areas), daemon=True)
        self.process.start()
        theirs.close()
        # Import before any case, so that no case pays for it.
        if not self.connection.poll(_START_S):
            raise TimeoutError(f"a process that runs cases did not start within {_START_S} s")
        self.connection.recv()
        return self.connection


def _work(connection: Connection, find: Callable[[], Mapping[str, Area]]) -> None:
    areas = find()
    connection.send("ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            name, seed, index = connection.recv()
            connection.send(run_case(areas[name], draw_case(areas[name], seed, index)))

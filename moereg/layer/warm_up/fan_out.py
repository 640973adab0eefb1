"""Spreads work over forks of this process, which inherit its state."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any


def fan_out(num_tasks: int, work: Callable[[int], Any], num_forks: int) -> Iterator[tuple[int, Any]]:
    """Runs tasks 0, 1, ... in forks of this process, which must be single-threaded, each taking the next one when free.

    Args:
        work: Maps a task's number to a picklable result; must not raise.

    Yields:
        Each task with its result, in order of completion; None if its process ended.
    """
    context = multiprocessing.get_context("fork")
    tasks = iter(range(num_tasks))
    forks: list[Any] = []
    at_work: dict[connection.Connection, int] = {}

    def hand_next(fork: connection.Connection) -> None:
        if (task := next(tasks, None)) is not None:
            at_work[fork] = task
            with contextlib.suppress(OSError):  # A fork that has ended sends nothing either.
                fork.send(task)

    try:
        for _ in range(min(num_forks, num_tasks)):
            here, there = context.Pipe()
            fork = context.Process(target=_serve, args=(there, [*at_work, here], work))
            fork.start()
            forks.append(fork)
            there.close()
            hand_next(here)
        while at_work:
            for answered in connection.wait(list(at_work)):
                assert isinstance(answered, connection.Connection)
                task, answer = at_work.pop(answered), None
                with contextlib.suppress(EOFError, OSError):
                    answer = answered.recv()
                    hand_next(answered)
                yield task, answer
        # No fork is left to do the rest.
        yield from ((task, None) for task in tasks)
    finally:
        for fork in forks:
            fork.kill()
            fork.join()


def _serve(tasks: connection.Connection, ends: list[connection.Connection], work: Callable[[int], Any]) -> None:
    """A fork's main loop; it closes its copies of the parent's pipe ends, so that it ends with the parent."""
    for end in ends:
        end.close()
    with contextlib.suppress(EOFError):
        while True:
            tasks.send(work(tasks.recv()))

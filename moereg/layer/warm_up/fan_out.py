"""Work spread over forks of this process, which inherit everything that it has made."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any


def fan_out(num_tasks: int, work: Callable[[int], Any], num_forks: int) -> Iterator[tuple[int, Any]]:
    """Does tasks 0, 1, ... in forks, which take the next one as they become free.

    The process must have no threads but its first.

    Args:
        num_tasks: How many.
        work: A function of a task's number whose result can be pickled, and that does not raise.
        num_forks: Processes at once.

    Yields:
        Each task with its answer, as they come; None for one whose process ended.
    """
    context = multiprocessing.get_context("fork")
    tasks = iter(range(num_tasks))
    forks: list[Any] = []
    at_work: dict[connection.Connection, int] = {}

    def hand_next(fork: connection.Connection) -> None:
        if (task := next(tasks, None)) is not None:
            at_work[fork] = task
            with contextlib.suppress(OSError):  # One that has ended does not answer either.
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
        # Nobody is left to do the rest.
        yield from ((task, None) for task in tasks)
    finally:
        for fork in forks:
            fork.kill()
            fork.join()


def _serve(tasks: connection.Connection, ends: list[connection.Connection], work: Callable[[int], Any]) -> None:
    """A fork's life; without the other ends of all pipes it ends with the process that it came from."""
    for end in ends:
        end.close()
    with contextlib.suppress(EOFError):
        while True:
            tasks.send(work(tasks.recv()))

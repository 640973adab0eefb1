"""Work spread over forks of this process, which inherit everything that it has made."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["MOST_TASKS", "fan_out"]

_WORD: Final = 4

MOST_TASKS: Final = 8192
"""Their numbers fit into a pipe."""


def fan_out(num_tasks: int, work: Callable[[int], Any], num_forks: int) -> Iterator[tuple[int, Any]]:
    """Does tasks 0, 1, ... in forks, which take the next one as they become free.

    The process must have no threads but its first.

    Args:
        num_tasks: How many, at most `MOST_TASKS`.
        work: A function of a task's number that returns JSON and does not raise.
        num_forks: Processes at once.

    Yields:
        Each task with its answer, as they come; None for one whose process ended.
    """
    assert num_tasks <= MOST_TASKS
    # The numbers of the tasks stand in a pipe, and each read takes one.
    tasks, tasks_there = os.pipe()
    os.write(tasks_there, b"".join(number.to_bytes(_WORD, "little") for number in range(num_tasks)))
    os.close(tasks_there)
    unanswered = set(range(num_tasks))
    forks: dict[int, tuple[int, bytearray]] = {}
    selector = selectors.DefaultSelector()
    try:
        for _ in range(min(num_forks, num_tasks)):
            answers, answers_there = os.pipe()
            pid = os.fork()
            if not pid:
                _serve(tasks, answers_there, work)
            os.close(answers_there)
            forks[answers] = (pid, bytearray())
            selector.register(answers, selectors.EVENT_READ)
        while forks:
            for key, _ in selector.select():
                pid, received = forks[key.fd]
                if not (more := os.read(key.fd, 1 << 16)):
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.waitpid(pid, 0)
                    del forks[key.fd]
                    continue
                received += more
                *lines, rest = received.split(b"\n")
                received[:] = rest
                for line in lines:
                    task, answer = json.loads(line)
                    unanswered.remove(task)
                    yield task, answer
        yield from ((task, None) for task in sorted(unanswered))
    finally:
        selector.close()
        os.close(tasks)
        for answers, (pid, _) in forks.items():
            os.close(answers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _serve(tasks: int, answers: int, work: Callable[[int], Any]) -> None:
    """A fork's life."""
    status = 1
    try:
        with os.fdopen(answers, "w", encoding="utf-8") as sink:
            while word := os.read(tasks, _WORD):
                task = int.from_bytes(word, "little")
                print(json.dumps([task, work(task)]), file=sink, flush=True)
        status = 0
    finally:
        os._exit(status)

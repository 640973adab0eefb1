"""Calls functions in a worker process, where a crash or a hang is an outcome, or in this process.

A `Request` goes to the worker process (`moereg.testing.worker`), which forks a child for it; an `Answer` comes back.
pytest must not rewrite the messages of this module's assertions: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final, Generic, TypeVar

import torch

from moereg import errors
from moereg.errors import ArgumentError, BackendError, MoeregError, WorkerError, described, one_line
from moereg.runtime.memory import free_memory_bytes
from moereg.runtime.python_process import python_command
from moereg.runtime.torch_state import AmbientState
from moereg.testing.check import Check
from moereg.testing.outcomes import Outcome

CHECK_SECONDS: Final = 120.0
"""A check's time limit. The slowest take some seconds."""

GPU_CHECK_SECONDS: Final = 300.0
"""A check's time limit with a GPU, for which some compile many kernels."""

_T = TypeVar("_T")

_VARIABLE: Final = "MOEREG_IN_WORKER"
_START_SECONDS: Final = 300.0
_SLACK_SECONDS: Final = 60.0
_LEAST_MEMORY: Final = 1 << 30
_MOST_MEMORY: Final = 16 << 30
_SHARE_OF_MEMORY: Final = 0.6


@dataclasses.dataclass(frozen=True)
class Request:
    """A call. It is pickled, so the function must be a module's.

    Attributes:
        function, arguments: The call.
        seconds: Time limit.
        memory_bytes: Memory limit.
        fresh: Whether to use a process that has answered nothing before.
        in_steps: Whether the function takes `tell` first, and the time limit is that of each step that it tells.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    seconds: float
    memory_bytes: int
    fresh: bool
    in_steps: bool = False


@dataclasses.dataclass(frozen=True)
class Answer(Generic[_T]):
    """The answer to a request.

    Attributes:
        value: The function's result.
        outcome: How the call ended if it did not return, or its result if that is an outcome.
        error: Name and message of an error that the user can fix.
        before: How many checks its process had run before.
        step: What the function told last, if its process did not return.
    """

    value: _T | None = None
    outcome: Outcome | None = None
    error: tuple[str, str] | None = None
    before: int = 0
    step: Any = None


def run_here(check: Check) -> Outcome:
    """Runs a check in this process."""
    state = AmbientState.now()
    try:
        try:
            check.run()
        finally:
            changed = state.restore()
        assert not changed, f"it changed torch's state for everybody ({', '.join(changed)})"
    except AssertionError as error:
        cause = error.__cause__
        message = one_line(str(cause if isinstance(cause, BackendError) else error)).partition("; do without it")[0]
        return Outcome("failed", message or "an assertion without a message")
    except MoeregError as error:
        return Outcome("failed", described(error))
    return Outcome("passed")


class Worker:
    """A process that answers requests; starts with the first one, and ends by `stop` or with this process.

    If a request ends it or takes too long, the answer says how. Thread-safe: one request at a time.
    """

    is_isolated: Final = True

    def __init__(self, memory_bytes: int | None = None, interprets: bool = True) -> None:
        """Starts nothing yet.

        Args:
            memory_bytes: Memory limit of a check; None means a share of what is free.
            interprets: Whether Triton kernels run in its interpreter if there is no GPU.
        """
        self._memory_bytes = memory_bytes
        self._interprets: Final = interprets
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Request, Answer[Any]] | None = None
        self._lock = threading.Lock()

    def ask(
        self, function: Callable[..., _T | None], *arguments: Any, seconds: float = CHECK_SECONDS, fresh: bool = False
    ) -> Answer[_T]:
        """Calls a function in the process.

        Args:
            function: A module's function that the process can import.
            *arguments: Its arguments.
            seconds: Time limit.
            fresh: Whether to use a process that has answered nothing before.

        Raises:
            MoeregError: The function raised it; the user can fix that.
        """
        return self._ask(Request(function, arguments, seconds, 0, fresh), seconds + _SLACK_SECONDS)

    def ask_in_steps(
        self,
        function: Callable[..., _T | None],
        *arguments: Any,
        seconds: float,
        fresh: bool = False,
        deadline: float = math.inf,
    ) -> Answer[_T]:
        """Calls a function that says what it does: its first argument is `tell`, to call before each step.

        Args:
            function: A module's function that the process can import.
            *arguments: Its arguments but the first.
            seconds: Time limit of each step. What comes before the first one has none.
            fresh: Whether to use a process that has answered nothing before.
            deadline: The end of all, in seconds of `time.monotonic`.

        Raises:
            MoeregError: The function raised it; the user can fix that.
            TimeoutError: The deadline passed.
        """
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        return self._ask(Request(function, arguments, seconds, 0, fresh, in_steps=True), left)

    def _ask(self, request: Request, seconds: float | None) -> Answer[Any]:
        with self._lock:
            pipe = self._pipe or self._start()
            assert self._memory_bytes is not None
            pipe.send(dataclasses.replace(request, memory_bytes=self._memory_bytes))
            answer = self._receive(pipe, seconds)
        if answer.error is not None:
            name, message = answer.error
            # UnsupportedProblemError takes more than a message.
            kind = BackendError if name == "UnsupportedProblemError" else getattr(errors, name, BackendError)
            raise kind(message)
        return answer

    def stop(self) -> None:
        """Ends the process; the next request starts another."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()  # Then it ends its child and itself.
        if process is not None:
            try:
                process.wait(timeout=0 if pipe is None else 10)  # While it starts it has no child yet.
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        atexit.unregister(self.stop)

    def _start(self) -> Connection[Request, Answer[Any]]:
        if not hasattr(os, "fork"):
            raise ArgumentError("a worker process needs a system that can fork; leave isolation out (--no-isolate)")
        if os.environ.get(_VARIABLE):
            raise ArgumentError(
                "a worker process of the conformance kit must not verify in turn; put the call below "
                "if __name__ == '__main__' of the module that registers the backend"
            )
        if self._memory_bytes is None:
            free = free_memory_bytes(torch.device("cpu")) or _MOST_MEMORY
            self._memory_bytes = int(min(max(_SHARE_OF_MEMORY * free, _LEAST_MEMORY), _MOST_MEMORY))
        environment = {**os.environ, _VARIABLE: "1"}
        if self._interprets and _is_interpreting():
            environment.setdefault("TRITON_INTERPRET", "1")
        pipe, there = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            python_command("moereg.testing.worker", str(there.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C goes to this process only, which ends the other.
        )
        there.close()
        atexit.register(self.stop)
        self._receive(pipe, _START_SECONDS)
        self._pipe = pipe
        return pipe

    def _receive(self, pipe: Connection[Request, Answer[Any]], seconds: float | None) -> Answer[Any]:
        try:
            if pipe.poll(seconds):
                return pipe.recv()
        except (EOFError, OSError):
            self.stop()
            raise WorkerError("the worker process ended") from None
        except BaseException:
            self.stop()  # Otherwise the next request would get the answer to this one.
            raise
        self.stop()
        raise TimeoutError("the worker process does not answer")


class Here:
    """As `Worker`, in this process, where a debugger may wait: nothing is isolated or given up."""

    is_isolated: Final = False

    def ask(
        self, function: Callable[..., _T | None], *arguments: Any, seconds: float = CHECK_SECONDS, fresh: bool = False
    ) -> Answer[_T]:
        """As `Worker.ask`, whatever the time."""
        start = time.monotonic()
        with interpreting():
            value = function(*arguments)
        if isinstance(value, Outcome):
            return Answer(outcome=dataclasses.replace(value, seconds=time.monotonic() - start))
        return Answer(value)

    def stop(self) -> None:
        """Does nothing."""


def _is_interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, because the only device is the CPU."""
    return not (torch.cuda.is_available() or torch.accelerator.is_available())


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Within this context imported kernels run in Triton's interpreter if there is no GPU."""
    if "TRITON_INTERPRET" in os.environ or "triton" in sys.modules or not _is_interpreting():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


_SHARED: Final = Worker()


def shared_worker() -> Worker:
    """The worker of `run_check`, which lives until this process ends."""
    return _SHARED

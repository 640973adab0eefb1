"""The side of a report that asks a worker process, and words what became of checks that ended it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg import errors
from moereg.errors import ArgumentError, BackendError
from moereg.memory import format_bytes, free_memory_bytes
from moereg.python_process import python_command
from moereg.testing.answers import answer
from moereg.testing.outcomes import Outcome

__all__ = ["CHECK_SECONDS", "GPU_CHECK_SECONDS", "Here", "Worker", "interpreting", "shared_worker"]

CHECK_SECONDS: Final = 120.0
"""The time that a check gets. The slowest take some seconds."""

GPU_CHECK_SECONDS: Final = 300.0
"""The time that a check gets beside a GPU, where some compile many kernels."""

_VARIABLE: Final = "MOEREG_IN_WORKER"
_START_SECONDS: Final = 300.0
_SLACK_SECONDS: Final = 60.0
_LEAST_MEMORY: Final = 1 << 30
_MOST_MEMORY: Final = 16 << 30
_SHARE_OF_MEMORY: Final = 0.6
_LONGEST_PRINTED: Final = 120


class Worker:
    """A process that answers requests; it starts with the first and is stopped by `stop` or with this process.

    A request that ends it or takes too long is answered with how it ended. Thread-safe: one request at a time.
    """

    is_isolated: Final = True

    def __init__(self, memory_bytes: int | None = None) -> None:
        """Starts nothing yet.

        Args:
            memory_bytes: Memory that a check may take; a share of what is free where None.
        """
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, seconds: float = CHECK_SECONDS, fresh: bool = False, **request: Any) -> dict[str, Any]:
        """The answer to a request of `moereg.testing.answers`.

        Args:
            seconds: Time that it gets.
            fresh: Whether it gets a process that has answered nothing before.
            **request: `op` and its arguments.

        Returns:
            What `answer` returns. If there is no answer, `outcome` is an `Outcome` that says how it ended.

        Raises:
            MoeregError: The answer is an error that the user can cure.
        """
        with self._lock:
            process = self._process or self._start()
            self._send(process, {**request, "seconds": seconds, "fresh": fresh, "memory_bytes": self._memory_bytes})
            found = self._receive(process, seconds + _SLACK_SECONDS)
        if found.get("error"):
            kind = getattr(errors, found["error"], BackendError)
            raise (kind if found["error"] != "UnsupportedProblemError" else BackendError)(found["message"])
        outcome = _outcome(found, seconds)
        if outcome is not None:
            return {"outcome": outcome, "before": found.get("before", 0)}
        return {**found["answer"], **_streams(found), "seconds": found["seconds"], "before": found["before"]}

    def stop(self) -> None:
        """Ends the process; the next request starts another."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None and process.stdout is not None:
            # It ends its child and itself when there can be no more requests.
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        atexit.unregister(self.stop)

    def _start(self) -> subprocess.Popen[bytes]:
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
        if _is_interpreting():
            environment.setdefault("TRITON_INTERPRET", "1")
        self._process = subprocess.Popen(
            python_command("moereg.testing.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process, which ends the other.
        )
        atexit.register(self.stop)
        self._receive(self._process, _START_SECONDS)
        return self._process

    def _send(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write((json.dumps(request) + "\n").encode())
        process.stdin.flush()

    def _receive(self, process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        pieces: list[bytes] = []
        while not (pieces and pieces[-1].endswith(b"\n")):
            ready, _, _ = select.select([process.stdout], [], [], seconds)
            piece = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not piece:
                self.stop()
                raise RuntimeError(f"the worker process {'ended' if ready else 'does not answer'}")
            pieces.append(piece)
        found: dict[str, Any] = json.loads(b"".join(pieces))
        return found


class Here:
    """As `Worker`, in this process: nothing is isolated, and only Python code can be given up."""

    is_isolated: Final = False

    def ask(self, seconds: float = CHECK_SECONDS, fresh: bool = False, **request: Any) -> dict[str, Any]:
        """As `Worker.ask`."""
        import time

        start = time.monotonic()
        try:
            with interpreting(), _given_up_after(seconds):
                found = answer(request)
        except _TimeUpError:
            return {"outcome": Outcome("timed_out", f"took longer than {seconds:g} s", seconds), "before": 0}
        return {**found, "seconds": time.monotonic() - start, "before": 0}

    def stop(self) -> None:
        """Nothing to stop."""


class _TimeUpError(BaseException):
    """The time of a check that runs in this process is over."""


def _raise_time_up(number: int, frame: object) -> None:
    raise _TimeUpError


@contextlib.contextmanager
def _given_up_after(seconds: float) -> Iterator[None]:
    """Raises `_TimeUpError` inside when the time is over; signals reach the main thread alone."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    handler = signal.signal(signal.SIGALRM, _raise_time_up)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, handler)


def _is_interpreting() -> bool:
    """Whether kernels in Triton's language run in its interpreter: where there is no device but the CPU."""
    return not (torch.cuda.is_available() or torch.accelerator.is_available())


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Inside, kernels that are imported run in Triton's interpreter if there is no GPU."""
    if "TRITON_INTERPRET" in os.environ or "triton" in sys.modules or not _is_interpreting():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def _outcome(found: dict[str, Any], seconds: float) -> Outcome | None:
    """How a request ended that was not answered."""
    if "answer" in found:
        return None
    place = f" in {found['place']}" if found.get("place") else ""
    status, ended = "crashed", found.get("ended", "error")
    if ended == "time":
        status, message = "timed_out", f"no end after {seconds:g} s{place}"
    elif ended == "memory":
        message = f"took {format_bytes(found['bytes'])} of memory{place}"
    elif ended == "output":
        message = f"wrote {format_bytes(found['bytes'])} to its standard streams{place}"
    elif ended == "signal":
        message = f"the process died of {_signal_name(found['signal'])}{place}"
    elif ended == "exit":
        message = f"the process was ended with exit code {found['code']}{place}"
    else:
        status, message = "failed", found.get("message", "")
    return Outcome(status, message, found.get("seconds", 0.0), **_streams(found))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _streams(found: dict[str, Any]) -> dict[str, Any]:
    printed, written = found.get("printed", ""), found.get("written", "")
    first = errors.one_line(printed, _LONGEST_PRINTED)
    return {"output": "\n".join(filter(None, [printed, written])), "printed": first}


_SHARED: Final = Worker()


def shared_worker() -> Worker:
    """The worker of `run_check`; it stays until this process ends."""
    return _SHARED

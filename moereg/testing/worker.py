"""Calls functions in a child process, where a crash, a hang and too much memory are outcomes.

`Worker` is the parent's side. The child is this module, run as a program: it answers one call after another.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any, Final

import torch

from moereg import errors
from moereg.errors import ArgumentError, BackendError, MoeregError, described, one_line
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.runtime.python_process import python_command
from moereg.testing.check import Outcome

CHECK_SECONDS: Final = 120.0
"""A check's time limit. The slowest take some seconds."""

GPU_CHECK_SECONDS: Final = 300.0
"""A check's time limit with a GPU, for which some compile many kernels."""

_VARIABLE: Final = "MOEREG_IN_WORKER"
_TICK_S: Final = 0.05
_START_SECONDS: Final = 300.0
_DUMP_SECONDS: Final = 5.0
_ORPHAN_SECONDS: Final = 60.0
_LONGEST_SECONDS: Final = 1e6  # More overflow the system's clock.
_LONGEST_OUTPUT: Final = 4000
_LONGEST_PRINTED: Final = 120
_MOST_OUTPUT: Final = 64 << 20
_LEAST_MEMORY: Final = 1 << 30
_MOST_MEMORY: Final = 16 << 30
_SHARE_OF_MEMORY: Final = 0.6


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a call: what the function returned, and the step that it told last.

    `outcome` is how the call ended if it did not return, or what it returned if that is an outcome.
    """

    value: Any = None
    outcome: Outcome | None = None
    step: Any = None


class Worker:
    """A child process that calls functions; it starts with the first call, and anew after one that failed.

    It ends by `stop` or with this process. Thread-safe: one call at a time.

    Attributes:
        is_isolated: Whether there is a child. Without, calls are made in this process, where a debugger may wait:
            they take their time, and a crash ends this process.
        has_run: For the caller to set: whether a backend's kernels ran in the child that lives.
    """

    def __init__(self, memory_bytes: int | None = None, interprets: bool = True, is_isolated: bool = True) -> None:
        """Starts nothing yet; the child's memory limit is a share of what is free if None.

        It `interprets` Triton kernels if there is no GPU.
        """
        self.is_isolated: Final = is_isolated
        self.has_run = False
        self._memory_bytes = memory_bytes
        self._interprets: Final = interprets
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: Final = threading.Lock()

    def ask(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        seconds: float = CHECK_SECONDS,
        in_steps: bool = False,
        fresh: bool = False,
        deadline: float = math.inf,
    ) -> Answer:
        """Calls a function, which the child must be able to import.

        Args:
            function: A module's function.
            *arguments: Its arguments.
            seconds: Time limit.
            in_steps: Whether its first argument is `tell`, to call with what it does next. Then each step has the time
                limit, and what comes before the first one has none.
            fresh: Whether to use a process that has answered nothing before.
            deadline: The end of all, in seconds of `time.monotonic`.

        Raises:
            MoeregError: The function raised it; the user can fix that.
            TimeoutError: The deadline passed.
        """
        start = time.monotonic()
        if not self.is_isolated:
            told: list[Any] = [None]
            with interpreting():
                value = function(*([told.append] if in_steps else []), *arguments)
            outcome = value if isinstance(value, Outcome) else None
            if outcome is not None:
                outcome = dataclasses.replace(outcome, seconds=time.monotonic() - start)
            return Answer(value, outcome, told[-1])
        with self._lock:
            try:
                if fresh:
                    self.stop()
                if self._process is None:
                    self._start()
                answer = self._exchange((function, arguments, seconds, in_steps), seconds, deadline)
            except BaseException:
                self.stop()  # Otherwise the next call would get the answer to this one.
                raise
            is_over = self._process is None or self._process.poll() is not None
            # After some errors of a device nothing runs on it in the process any more.
            if is_over or (answer.outcome is not None and answer.outcome.is_failure and not _is_interpreting()):
                self.stop()
        if isinstance(answer.value, MoeregError):
            raise answer.value
        return answer

    def stop(self) -> None:
        """Kills the child with all of its own children; the next call starts another."""
        process, self._process, self.has_run = self._process, None, False
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait()
            for each in (self._pipe, self._stdout, self._stderr):
                each.close()
            atexit.unregister(self.stop)

    def _start(self) -> None:
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
        self._stdout, self._stderr = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115
        self._pipe: Connection[Any, Any]
        self._pipe, there = Pipe()
        atexit.register(self.stop)
        self._process = subprocess.Popen(
            python_command("moereg.testing.worker", str(there.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            pass_fds=[there.fileno()],
            env=environment,
            start_new_session=True,  # Ctrl-C goes to this process only, which ends the other.
        )
        there.close()

    def _exchange(self, call: tuple[Any, ...], seconds: float, deadline: float) -> Answer:
        process = self._process
        assert process is not None
        for file in (self._stdout, self._stderr):
            file.seek(0)
            file.truncate()
        start = time.monotonic()
        limit = start + _START_SECONDS  # To import what the call needs.
        kind, value, step, end = "", None, None, ""
        try:
            self._pipe.send(call)
            while kind != "value" and not end:
                code = process.poll()  # Before the pipe is found empty, so that nothing in it is lost.
                if self._pipe.poll(_TICK_S):
                    kind, value = self._pipe.recv()
                    if kind == "begun":
                        limit = math.inf
                    elif kind == "step":
                        step, limit = value, time.monotonic() + seconds
                elif time.monotonic() > deadline:
                    raise TimeoutError("the deadline passed")
                else:
                    end = self._end(code, limit, seconds)
        except (EOFError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ORPHAN_SECONDS)  # It is ending; a busy machine may take long to dump its core.
            end = self._end(process.poll(), math.inf, seconds) or "the process closed its pipe"
        printed, written = _read(self._stdout), _read(self._stderr)
        outcome = value if isinstance(value, Outcome) else None
        if end:
            value, place = None, _place(written)
            status = "timed_out" if end.startswith("no end") else "crashed"
            outcome = Outcome(status, f"{end} in {place}" if place else end)
        if outcome is not None:
            outcome = dataclasses.replace(
                outcome,
                seconds=time.monotonic() - start,
                output="\n".join(filter(None, [printed, written])),
                printed=one_line(printed, _LONGEST_PRINTED),
            )
        return Answer(value, outcome, step)

    def _end(self, code: int | None, limit: float, seconds: float) -> str:
        """How the child has ended, or why it is ended; empty if it may go on."""
        process = self._process
        assert process is not None and self._memory_bytes is not None
        if code is not None:
            known = {-each.value: f"died of {each.name}" for each in signal.Signals}
            return f"the process {known.get(code, f'was ended with exit code {code}')}"
        used = _memory_bytes(process.pid)
        written = max(os.fstat(file.fileno()).st_size for file in (self._stdout, self._stderr))
        if time.monotonic() > limit:
            end = f"no end after {seconds:g} s"
        elif used > self._memory_bytes:
            end = f"took {format_bytes(used)} of memory"
        elif written > _MOST_OUTPUT:
            end = f"wrote {format_bytes(written)} to its standard streams"
        else:
            return ""
        process.send_signal(signal.SIGABRT)  # It dumps its stack.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DUMP_SECONDS)
        return end


def _memory_bytes(pid: int) -> int:
    """A process's memory in bytes; 0 if the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            fields = file.read().split()
        # Without shared pages, since a device's driver maps many.
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _read(file: IO[bytes]) -> str:
    """The end of a stream's text."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _LONGEST_OUTPUT))
    return file.read().decode(errors="replace")


def _place(written: str) -> str:
    """The innermost line of a backend's own code in a dump of `faulthandler`, or the plugin that was being imported."""
    # The first thread's frames, innermost first; libraries' frames come before the backend's.
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', written)
    own = [frame for frame in frames if not re.search(r"site-packages/(torch|triton|numpy)/|/lib/python3", frame[0])]
    own = [frame for frame in own if not re.search(r"/moereg/|<frozen|<string>", frame[0])] or frames
    if own:
        path, line, function = own[0]
        return f"{function} of {os.path.basename(path)}:{line}"
    imports = re.findall(r"^import(ing|ed) (\S+ of .+)$", written, re.MULTILINE)
    return f"import of {imports[-1][1]}" if imports and imports[-1][0] == "ing" else ""


def _is_interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, because the only device is the CPU."""
    return not (torch.cuda.is_available() or torch.accelerator.is_available())


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Within this context imported kernels run in Triton's interpreter if there is no GPU."""
    is_compiling = "triton" in sys.modules and "triton.runtime.interpreter" not in sys.modules
    if "TRITON_INTERPRET" in os.environ or is_compiling or not _is_interpreting():
        yield
        return
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        del os.environ["TRITON_INTERPRET"]


def _answer(pipe: Connection[Any, Any]) -> None:
    """Answers one call in the child."""
    function, arguments, seconds, in_steps = pipe.recv()

    def tell(step: Any) -> None:
        # If the parent has gone, nobody else ends a call that never returns.
        faulthandler.dump_traceback_later(min(seconds + _ORPHAN_SECONDS, _LONGEST_SECONDS), exit=True)
        pipe.send(("step", step))

    pipe.send(("begun", None))
    if not in_steps:
        tell(None)
    try:
        value = function(*([tell] if in_steps else []), *arguments)
    except MoeregError as error:
        # UnsupportedProblemError takes more than a message.
        name = type(error).__name__
        kind = BackendError if name == "UnsupportedProblemError" else getattr(errors, name, BackendError)
        value = kind(one_line(str(error)))
    except BaseException as error:
        value = Outcome("failed", described(error))
    faulthandler.cancel_dump_traceback_later()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    pipe.send(("value", value))


def main() -> None:
    """Answers calls until the parent has gone."""
    from moereg.testing.checks import watched_imports

    faulthandler.enable()  # So that a crash names its line of Python.
    logger = logging.getLogger("moereg")  # Logs the import of each plugin, so that a crash can name it.
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)
    pipe: Connection[Any, Any] = Connection(int(sys.argv[1]))
    with watched_imports(), contextlib.suppress(EOFError, ConnectionError):
        while True:
            _answer(pipe)


if __name__ == "__main__":
    main()
    os._exit(0)  # Taking torch down takes a while.


SHARED_WORKER: Final = Worker()
"""The worker of `run_check`, which lives until this process ends."""

"""`python -m moereg.testing.worker`: calls functions in a child process, and reports crashes and hangs.

It answers requests of `moereg.testing.workers`, which starts it. It imports torch and moereg once, touches no device,
loads no backend and starts no thread, so that it can fork at any time. The child loads the backends and answers
requests until one ends it or takes too long; then it is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import IO, Any, Final

from moereg.errors import MoeregError, described, one_line
from moereg.runtime.memory import format_bytes
from moereg.testing.listing import list_suite
from moereg.testing.outcomes import Outcome
from moereg.testing.workers import Answer, Request, run_here

_TICK_S: Final = 0.05
_DUMP_S: Final = 5.0
_LONGEST_OUTPUT: Final = 4000
_LONGEST_PRINTED: Final = 120
_MOST_OUTPUT: Final = 64 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class _Child:
    """A process that answers requests.

    Attributes:
        process: The process, whose id is its group's too.
        pipe: To it and from it.
        stdout, stderr: Files that its streams go to.
        num_checks: How many checks it has run.
    """

    def __init__(self) -> None:
        self.stdout, self.stderr = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115
        self.pipe: Connection[Request, Answer[Any]]
        self.pipe, there = multiprocessing.Pipe()
        self.num_checks = 0
        self.process = multiprocessing.get_context("fork").Process(target=_work, args=(self, there))
        self.process.start()
        there.close()

    def stop(self) -> None:
        """Kills it with all of its own children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.stdout.close()
        self.stderr.close()

    def dump(self) -> None:
        """Ends it after dumping its stack."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, signal.SIGABRT)
            self.process.join(_DUMP_S)

    def end(self, seconds: float | None = None) -> str | None:
        """How it ended; None where it has not after so many seconds."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None or code >= 0:
            return None if code is None else f"the process was ended with exit code {code}"
        known = {each.value: each.name for each in signal.Signals}
        return f"the process died of {known.get(-code, f'signal {-code}')}"


def _work(child: _Child, pipe: Connection[Answer[Any], Request]) -> None:
    """The child's main loop: answers requests until their pipe is closed."""
    child.pipe.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(child.stdout.fileno(), 1)
    os.dup2(child.stderr.fileno(), 2)
    # Before anything of a backend, so that a crash names its line of Python.
    faulthandler.enable(2)
    while True:
        request = pipe.recv()
        if request.function is list_suite:
            _log_to_stderr()
        arguments = request.arguments
        if request.in_steps:
            arguments = (functools.partial(_tell, pipe, request.seconds), *arguments)
        else:
            _dump_later(request.seconds)
        try:
            answer: Answer[Any] = Answer(request.function(*arguments))
        except MoeregError as error:
            answer = Answer(error=(type(error).__name__, one_line(str(error))))
        except BaseException as error:
            answer = Answer(outcome=Outcome("failed", described(error)))
        faulthandler.cancel_dump_traceback_later()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        pipe.send(answer)


def _tell(pipe: Connection[Answer[Any], Request], seconds: float, step: Any) -> None:
    _dump_later(seconds)
    pipe.send(Answer(step=step))


def _dump_later(seconds: float) -> None:
    """Dumps the stack of code that never returns to a file that the parent reads."""
    faulthandler.dump_traceback_later(seconds, file=2)


def _log_to_stderr() -> None:
    """Logs the import of each plugin, so that a crash report can name it."""
    logger = logging.getLogger("moereg")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)


class _Supervisor:
    """Forwards requests to a child, and answers for it if it ends."""

    def __init__(self, requests: Connection[Answer[Any], Request]) -> None:
        self._requests = requests
        self._child: _Child | None = None
        self._step: Any = None

    def handle(self, request: Request) -> Answer[Any]:
        if request.fresh:
            self.stop()
        child = self._child = self._child or _Child()
        for file in (child.stdout, child.stderr):
            file.seek(0)
            file.truncate()
        self._step = None
        before, start = child.num_checks, time.monotonic()
        found = self._exchange(child, request, math.inf if request.in_steps else start + request.seconds)
        printed, written = _read(child.stdout), _read(child.stderr)
        child.num_checks += request.function is run_here
        if isinstance(found, Answer):
            outcome = found.value if isinstance(found.value, Outcome) else found.outcome
        else:
            place = _place(written) or _imported(written)
            status = "timed_out" if found.startswith("no end") else "crashed"
            outcome = Outcome(status, f"{found} in {place}" if place else found)
            found = Answer()
        if outcome is None:
            return dataclasses.replace(found, before=before)
        if outcome.is_failure:
            # After some device errors nothing runs in the process any more.
            self.stop()
        outcome = dataclasses.replace(
            outcome,
            seconds=time.monotonic() - start,
            output="\n".join(filter(None, [printed, written])),
            printed=one_line(printed, _LONGEST_PRINTED),
        )
        return Answer(outcome=outcome, before=before, step=self._step)

    def _exchange(self, child: _Child, request: Request, deadline: float) -> Answer[Any] | str:
        """The child's answer, or how it ended."""
        try:
            child.pipe.send(request)
        except OSError:
            return child.end() or ""
        while True:
            ready = wait([child.pipe, self._requests], _TICK_S)
            if child.pipe in ready:
                try:
                    answer = child.pipe.recv()
                except (EOFError, OSError):
                    return child.end() or ""
                if answer.step is None:
                    return answer
                self._step, deadline = answer.step, time.monotonic() + request.seconds
                continue
            if self._requests in ready:
                # The parent sends nothing while it waits for an answer, so it has gone.
                raise EOFError
            if ended := child.end(0):
                return ended
            late = time.monotonic() - deadline
            # Wait for the child's own stack dump, which comes soon unless the machine is busy.
            if late > _DUMP_S or (late > 2 * _TICK_S and "most recent call first" in _read(child.stderr)):
                return f"no end after {request.seconds:g} s"
            used = _memory_bytes(child.process.pid)
            if used > request.memory_bytes:
                child.dump()
                return f"took {format_bytes(used)} of memory"
            written = max(os.fstat(file.fileno()).st_size for file in (child.stdout, child.stderr))
            if written > _MOST_OUTPUT:
                child.dump()
                return f"wrote {format_bytes(written)} to its standard streams"

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None


def _memory_bytes(pid: int | None) -> int:
    """A process's memory in bytes; 0 if the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            fields = file.read().split()
        # Without shared pages, since a device's driver maps many.
        return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _read(file: IO[bytes]) -> str:
    """The end of a stream's text."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _LONGEST_OUTPUT))
    text = file.read().decode(errors="replace")
    file.seek(0, os.SEEK_END)
    return text


def _place(written: str) -> str:
    """The innermost line of a backend's own code in a dump of `faulthandler`: `apply of my_backend.py:31`."""
    # The first thread's frames, innermost first; libraries' frames come before the backend's.
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', written)
    own = [frame for frame in frames if not re.search(r"site-packages/(torch|triton|numpy)/|/lib/python3", frame[0])]
    own = [frame for frame in own if "/moereg/" not in frame[0] and "<frozen" not in frame[0]] or frames
    if not own:
        return ""
    path, line, function = own[0]
    return f"{function} of {os.path.basename(path)}:{line}"


def _imported(written: str) -> str:
    """The plugin being imported: `import of my_module of my-wheel 1.0`; empty once its import has ended."""
    lines = re.findall(r"^import(ing|ed) (\S+ of .+)$", written, re.MULTILINE)
    return f"import of {lines[-1][1]}" if lines and lines[-1][0] == "ing" else ""


def main() -> int:
    """Answers requests until the asking process has gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # A working stdout for code that prints.
    requests: Connection[Answer[Any], Request] = Connection(int(sys.argv[1]))
    supervisor = _Supervisor(requests)
    requests.send(Answer())
    try:
        while True:
            requests.send(supervisor.handle(requests.recv()))
    except (EOFError, OSError):
        return 0
    finally:
        supervisor.stop()


if __name__ == "__main__":
    os._exit(main())  # Taking torch down takes a while, for which who interrupted it would wait.

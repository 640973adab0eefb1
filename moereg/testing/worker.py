"""`python -m moereg.testing.worker`: runs checks in a child process, and answers how it ended if it crashes or hangs.

Started by `moereg.testing.workers`, it reads requests from standard input and answers on standard output, one line of
JSON each. It imports torch and moereg once, touches no device, loads no backend and starts no thread, so that it can
fork at any time. The child loads the backends, answers requests until one ends it or takes too long, and is replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import re
import select
import signal
import sys
import tempfile
import time
from typing import IO, Any, Final

from moereg.errors import MoeregError, described, one_line
from moereg.testing.answers import answer

__all__ = ["main"]

_TICK_S: Final = 0.05
_DUMP_S: Final = 5.0
_LONGEST_OUTPUT: Final = 4000
_MOST_OUTPUT: Final = 64 << 20
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclasses.dataclass
class _Child:
    """A process that answers requests.

    Attributes:
        pid: Its id, which is its group's too.
        requests, answers: Ends of the pipes to it and from it.
        stdout, stderr: Files that its streams go to.
        num_answered: How many checks it has run.
        is_reaped: Whether it has ended and been waited for, after which its id may be another's.
    """

    pid: int
    requests: int
    answers: int
    stdout: IO[bytes]
    stderr: IO[bytes]
    num_answered: int = 0
    is_reaped: bool = False

    @classmethod
    def start(cls) -> _Child:
        stdout, stderr = (tempfile.TemporaryFile(buffering=0) for _ in range(2))  # noqa: SIM115
        requests_there, requests = os.pipe()
        answers, answers_there = os.pipe()
        pid = os.fork()
        if pid:
            os.close(requests_there)
            os.close(answers_there)
            return cls(pid, requests, answers, stdout, stderr)
        try:
            os.close(requests)
            os.close(answers)
            os.setsid()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            # Before anything else: a crash is told by the line of Python that it came from.
            faulthandler.enable(2)
            _work(requests_there, answers_there)
        finally:
            os._exit(0)

    def stop(self) -> None:
        """Ends it with all of its own children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if not self.is_reaped:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        os.close(self.requests)
        os.close(self.answers)
        self.stdout.close()
        self.stderr.close()

    def dump(self) -> None:
        """Makes it say where it is, by ending it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        deadline = time.monotonic() + _DUMP_S
        while not self.is_reaped and self.wait(os.WNOHANG) is None and time.monotonic() < deadline:
            time.sleep(_TICK_S)

    def wait(self, options: int = 0) -> dict[str, Any] | None:
        """How it ended; None where it has not and the options say not to wait."""
        pid, status = os.waitpid(self.pid, options)
        if not pid:
            return None
        self.is_reaped = True
        if os.WIFSIGNALED(status):
            return {"ended": "signal", "signal": os.WTERMSIG(status)}
        return {"ended": "exit", "code": os.waitstatus_to_exitcode(status)}


def _work(requests: int, answers: int) -> None:
    """The child: answers requests until their pipe is closed."""
    with os.fdopen(requests, "r", encoding="utf-8") as lines, os.fdopen(answers, "w", encoding="utf-8") as sink:
        for line in lines:
            request = json.loads(line)
            if request["op"] == "list":
                _log_to_stderr()
            # Says where the code is that never returns, to the file that the parent reads.
            faulthandler.dump_traceback_later(request["seconds"], file=2)
            try:
                found: dict[str, Any] = {"answer": answer(request)}
            except MoeregError as error:
                found = {"error": type(error).__name__, "message": one_line(str(error))}
            except BaseException as error:
                found = {"error": "", "message": described(error)}
            faulthandler.cancel_dump_traceback_later()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            sink.write(json.dumps(found) + "\n")
            sink.flush()


def _log_to_stderr() -> None:
    """Says which plugin is imported, for the message about one that ends the process."""
    logger = logging.getLogger("moereg")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.DEBUG)


class _Supervisor:
    """Gives requests to a child, and says what became of those that it does not answer."""

    def __init__(self, requests: int) -> None:
        self._requests = requests
        self._child: _Child | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("fresh"):
            self.stop()
        if self._child is None:
            self._child = _Child.start()
        child = self._child
        for file in (child.stdout, child.stderr):
            file.seek(0)
            file.truncate()
        before = child.num_answered
        start = time.monotonic()
        ended, text = self._exchange(child, request, start)
        found: dict[str, Any] = json.loads(text) if text else ended
        found["seconds"] = time.monotonic() - start
        found["before"] = before
        found["printed"], found["written"] = _read(child.stdout), _read(child.stderr)
        child.num_answered += request["op"] == "run"
        if not text:
            found["place"] = _place(found["written"]) or _imported(found["written"])
            self.stop()
        elif found.get("answer", {}).get("spoiled"):
            self.stop()
        return found

    def _exchange(self, child: _Child, request: dict[str, Any], start: float) -> tuple[dict[str, Any], str]:
        """The child's answer, or how it ended."""
        try:
            os.write(child.requests, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            return child.wait() or {}, ""
        pieces: list[bytes] = []
        deadline = start + request["seconds"]
        while not (pieces and pieces[-1].endswith(b"\n")):
            ready, _, _ = select.select([child.answers, self._requests], [], [], _TICK_S)
            if child.answers in ready:
                piece = os.read(child.answers, 1 << 16)
                pieces.append(piece)
                if not piece:
                    return child.wait() or {}, ""
            elif self._requests in ready:
                # Nothing is asked while an answer is awaited: the parent has gone.
                self.stop()
                sys.exit(0)
            elif ended := child.wait(os.WNOHANG):
                return ended, ""
            late = time.monotonic() - deadline
            # The child's own dump of where it is comes first, soon where the machine is not busy.
            if late > _DUMP_S or (late > 2 * _TICK_S and "most recent call first" in _read(child.stderr)):
                return {"ended": "time"}, ""
            used = _memory_bytes(child.pid)
            if used > request["memory_bytes"]:
                child.dump()
                return {"ended": "memory", "bytes": used}, ""
            written = max(os.fstat(file.fileno()).st_size for file in (child.stdout, child.stderr))
            if written > _MOST_OUTPUT:
                child.dump()
                return {"ended": "output", "bytes": written}, ""
        return {}, b"".join(pieces).decode()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
        self._child = None


def _memory_bytes(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not say."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            fields = file.read().split()
        # Shared pages do not count: a device's driver maps much.
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
    # The first thread's frames, innermost first; those of libraries lead to the backend's.
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', written)
    own = [frame for frame in frames if not re.search(r"site-packages/(torch|triton|numpy)/|/lib/python3", frame[0])]
    own = [frame for frame in own if "/moereg/" not in frame[0] and "<frozen" not in frame[0]] or frames
    if not own:
        return ""
    path, line, function = own[0]
    return f"{function} of {os.path.basename(path)}:{line}"


def _imported(written: str) -> str:
    """The plugin that was being imported: `import of my_module of my-wheel 1.0`; empty once its import has ended."""
    lines = re.findall(r"^import(ing|ed) (\S+ of .+)$", written, re.MULTILINE)
    return f"import of {lines[-1][1]}" if lines and lines[-1][0] == "ing" else ""


def main() -> int:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = os.dup(0)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What other code prints or reads is no answer and no request.
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    supervisor = _Supervisor(requests)
    answers.write('{"ready": true}\n')
    answers.flush()
    pending = b""
    try:
        while piece := os.read(requests, 1 << 16):
            pending += piece
            while b"\n" in pending:
                line, _, pending = pending.partition(b"\n")
                answers.write(json.dumps(supervisor.handle(json.loads(line))) + "\n")
                answers.flush()
    finally:
        supervisor.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())

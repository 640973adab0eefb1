"""The command line's output (results on standard output, all else on standard error) and exit codes."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TextIO

from rich.console import Console

from moereg.errors import MoeregWarning, one_line

OK: Final = 0
WRONG_NUMBERS: Final = 1
BAD_INPUT: Final = 2
NOTHING_FITS: Final = 3
UNFINISHED: Final = 4
"""Time is over; the same command goes on where it was."""
INTERNAL_ERROR: Final = 70
"""EX_SOFTWARE of sysexits.h: a bug in moereg. All other codes are about input, backends or the machine."""
OUTPUT_LOST: Final = 74
"""EX_IOERR of sysexits.h: the result was only partly written."""
INTERRUPTED: Final = 130
"""The shell's code of a process ended by SIGINT."""
BROKEN_PIPE: Final = 141
"""The shell's code of a process ended by SIGPIPE: the reader of the output left."""

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 wrong numbers or a backend that failed; 2 bad input or not enough memory for it; 3 nothing "
    "fits the problem; 4 unfinished, and the same command goes on; 70 a bug of moereg; 74 standard output could not be "
    "written, for instance to a full disk; 130 interrupted; 141 the reader of the output left. A stream that is closed "
    "from the start changes no code."
)


def code_of_verdict(passed: bool | None) -> int:
    """The exit code of a verdict: whether the numbers were right, or None if nothing could run."""
    return NOTHING_FITS if passed is None else OK if passed else WRONG_NUMBERS


@dataclasses.dataclass(frozen=True)
class Result:
    """A command's result: the object that `--json` prints, what prints the same as text, and the exit code."""

    values: Mapping[str, Any]
    show: Callable[[], object]
    code: int = OK

    def print(self, as_json: bool) -> None:
        """Writes it to standard output; in JSON on one line, with null for NaN and infinities."""
        if not as_json:
            self.show()
            return
        finite = json.loads(json.dumps(self.values), parse_constant=lambda name: None)
        print(json.dumps(finite, allow_nan=False))


def console(stream: TextIO) -> Console:
    """A console on a stream, as wide as COLUMNS or the terminal, else 80 columns.

    Brackets are plain text, and only a terminal gets colors, even with FORCE_COLOR.
    """
    return Console(file=stream, force_terminal=stream.isatty(), markup=False, highlight=False, emoji=False)


def picked(source: Any, *names: str) -> dict[str, Any]:
    """Attributes of an object by name, for JSON."""
    return {name: getattr(source, name) for name in names}


def print_aside(text: str) -> None:
    """Writes a line to standard error, if that can be written."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """Writes a message to standard error as one line."""
    lines = (one_line(line) for line in message.splitlines())
    print_aside(f"moereg: {'; '.join(line for line in lines if line)}")


@contextlib.contextmanager
def warnings_on_one_line() -> Iterator[None]:
    """Shows moereg's warnings like its errors, without the source line, which means nothing to a user."""
    before = warnings.formatwarning

    def formatted(message: Warning | str, category: type[Warning], *others: Any) -> str:
        if issubclass(category, MoeregWarning):
            return f"moereg: warning: {one_line(str(message))}\n"
        return before(message, category, *others)

    warnings.formatwarning = formatted  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.formatwarning = before


class _Strays(io.TextIOWrapper):
    """Standard error for what others print: where it is full or left, that is lost and nothing else."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


@contextlib.contextmanager
def only_results_on_stdout(is_verbose: bool = False) -> Iterator[None]:
    """Sends what others print while a command works to standard error, C libraries and child processes included.

    Verbose, it shows moereg's log there.
    """
    logger = logging.getLogger("moereg")
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    sys.stdout.flush()
    # A stream of its own, since a plugin may close it.
    strays = _Strays(open(os.dup(2), "wb"), errors="backslashreplace", line_buffering=True)  # noqa: SIM115
    saved = os.dup(1)
    os.dup2(2, 1)
    if is_verbose:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        with contextlib.redirect_stdout(strays), warnings_on_one_line():
            yield
    finally:
        with contextlib.suppress(OSError):
            strays.close()
        logger.removeHandler(handler)
        logger.setLevel(level)
        # Their buffers, while the descriptor still points there.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.__stdout__.flush()  # type: ignore[union-attr]
            ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)

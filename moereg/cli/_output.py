"""The command line's output (results on standard output, all else on standard error) and exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final, TextIO

from rich.console import Console

from moereg.cli._streams import others_print_to_stderr
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


def console(stream: TextIO) -> Console:
    """A console on a stream, as wide as COLUMNS or the terminal, else 80 columns.

    Brackets are plain text, and only a terminal gets colors, even with FORCE_COLOR.
    """
    return Console(file=stream, force_terminal=stream.isatty(), markup=False, highlight=False, emoji=False)


def print_json(values: Mapping[str, Any]) -> None:
    """Writes a JSON object on one line; NaN and infinities become null."""
    print(json.dumps(_finite(values), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_error(message: str) -> None:
    """Writes a message to standard error as one line."""
    lines = (one_line(line) for line in message.splitlines())
    print("moereg:", "; ".join(line for line in lines if line), file=sys.stderr)


@contextlib.contextmanager
def warnings_on_one_line() -> Iterator[None]:
    """Shows moereg's warnings like its errors, without the source line, which means nothing to a user."""
    before = warnings.formatwarning

    def formatted(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, MoeregWarning):
            return f"moereg: warning: {one_line(str(message))}\n"
        return before(message, category, filename, lineno, line)

    warnings.formatwarning = formatted
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextlib.contextmanager
def only_results_on_stdout(is_verbose: bool) -> Iterator[None]:
    """Sends output to standard error while a command works; results are printed afterwards.

    Args:
        is_verbose: Whether to show moereg's log.
    """
    with others_print_to_stderr(), warnings_on_one_line():
        if not is_verbose:
            yield
            return
        logger = logging.getLogger("moereg")
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)

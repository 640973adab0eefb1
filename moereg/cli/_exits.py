"""The exit codes of the command line."""

from __future__ import annotations

from typing import Final

__all__ = [
    "BAD_INPUT",
    "BROKEN_PIPE",
    "EXIT_CODES",
    "INTERNAL_ERROR",
    "INTERRUPTED",
    "NOTHING_FITS",
    "OK",
    "OUTPUT_LOST",
    "WRONG_NUMBERS",
    "code_of_verdict",
]

OK: Final = 0
WRONG_NUMBERS: Final = 1
BAD_INPUT: Final = 2
NOTHING_FITS: Final = 3
INTERNAL_ERROR: Final = 70
"""EX_SOFTWARE of sysexits.h: a bug of moereg; all other codes speak of input, backends or the machine."""
OUTPUT_LOST: Final = 74
"""EX_IOERR of sysexits.h: a reader of the result would get only a part of it."""
INTERRUPTED: Final = 130
"""As shells count a process that SIGINT ended."""
BROKEN_PIPE: Final = 141
"""As shells count a process that SIGPIPE ended: the reader of the output left."""

EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 wrong numbers or a backend that failed; 2 bad input or not enough memory for it; 3 nothing "
    "fits the problem; 70 a bug of moereg; 74 standard output could not be written, for instance to a full disk; 130 "
    "interrupted; 141 the reader of the output left. A stream that is closed from the start changes no code."
)


def code_of_verdict(passed: bool | None) -> int:
    """The exit code of a result: whether its numbers were right, None where nothing could run."""
    return NOTHING_FITS if passed is None else OK if passed else WRONG_NUMBERS

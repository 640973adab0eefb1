"""The `moereg` command: its entry point, and the exit codes of failures."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TextIO

import typer

from moereg.cli import _output
from moereg.cli._commands import app
from moereg.cli._output import print_error, warnings_on_one_line
from moereg.errors import (
    MoeregError,
    MoeregWarning,
    described,
    is_lack_of_memory,
    one_line,
    shown,
    unknown_name_message,
)
from moereg.runtime.progress import Advance, waits_shown_by

# The base class of usage errors: some versions of typer bundle click, others use the installed one.
_ClickException: Final[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command, by default the process's; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    _open_closed_streams()
    with waits_shown_by(_show_wait), warnings_on_one_line():
        error = _run(arguments)
    lost = _lost_of(sys.stdout)
    # Typer and rich exit where the reader left.
    cause = error.__context__ if isinstance(error, SystemExit) else error
    if isinstance(cause, OSError):
        lost = cause
    if lost is not None and lost.errno == errno.EPIPE:
        code = _output.BROKEN_PIPE
    elif lost is not None:
        print_error(f"standard output was lost: {lost.strerror or lost}; the output is incomplete")
        code = _output.OUTPUT_LOST
    else:
        code = error if isinstance(error, int) else _report(error, arguments)
    _lost_of(sys.stderr)  # Whoever wrote there, such as a line about waiting, may have left what found no room.
    return code


def _run(arguments: list[str]) -> int | BaseException:
    """Runs a command; returns its exit code or what it raised."""
    streams = sys.stdout, sys.stderr
    try:
        return app(args=arguments, prog_name="moereg", standalone_mode=False) or _output.OK
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return error
    finally:
        sys.stdout, sys.stderr = streams  # typer replaces them where the reader of its help left.


def _show_wait(what: str) -> AbstractContextManager[Advance]:
    from moereg.cli._progress import phase  # Rich takes a tenth of a second to import.

    return phase(what)


def _open_closed_streams() -> None:
    """Lets streams that were closed before Python started discard everything, and writes any character to the others.

    An opened file would otherwise get the descriptor of a closed stream.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Takes the lowest free descriptor.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def _lost_of(stream: TextIO) -> OSError | None:
    """Why a stream could not be written, if so; what it could not write is dropped."""
    try:
        stream.flush()
    except OSError as error:
        saved, null = os.dup(stream.fileno()), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        stream.flush()  # Otherwise the interpreter tries once more at its end.
        os.dup2(saved, stream.fileno())
        os.close(saved)
        os.close(null)
        return error
    return None


def _report(error: BaseException, arguments: Sequence[str]) -> int:
    """Writes a line about an error; returns the exit code."""
    if isinstance(error, (MoeregError, MoeregWarning)):  # A filter made a warning an error (python -W error).
        print_error(str(error))
    elif isinstance(error, _ClickException):
        print_error(_usage_text(error))
    elif isinstance(error, (typer.Abort, KeyboardInterrupt)):
        return _output.INTERRUPTED
    # Shell completion, or its setup, which typer ends so.
    elif isinstance(error, SystemExit) and (
        "_MOEREG_COMPLETE" in os.environ or {"--install-completion", "--show-completion"} & set(arguments)
    ):
        return error.code if isinstance(error.code, int) else _output.OK
    elif isinstance(error, Exception) and is_lack_of_memory(error):
        print_error(f"not enough memory: {one_line(str(error))}; make the layer or the call smaller")
    else:
        # A bug in moereg, not the user's mistake: -v shows the traceback that its authors need.
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exception(error)
        print_error(f"internal error, please report it: {described(error)} (-v shows the traceback)")
        return _output.INTERNAL_ERROR
    return _output.BAD_INPUT


def _usage_text(error: Any) -> str:
    """A typer usage error on one line, with a pointer to the help."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    text = error.format_message().rstrip(".")
    if type(error).__name__ == "NoSuchOption" and context is not None and option is not None:
        known = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        text = unknown_name_message("option", option, {*(name for name in known if name.startswith("-")), "--help"})
    if text.startswith("Got unexpected extra argument"):
        surplus = text.partition(" (")[2].rstrip(")")
        text = f"a command must have no surplus argument, got {shown(surplus)}; leave it out"
    return f"{text}; see {context.command_path if context is not None else 'moereg'} --help"

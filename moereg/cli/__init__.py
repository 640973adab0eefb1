"""The `moereg` command: which commands there are, and how a failure becomes an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final

import typer

from moereg._version import __version__
from moereg.cli._author_commands import build_kernels, new_backend, verify
from moereg.cli._exits import (
    BAD_INPUT,
    BROKEN_PIPE,
    EXIT_CODES,
    INTERNAL_ERROR,
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    OUTPUT_LOST,
    WRONG_NUMBERS,
)
from moereg.cli._layer_commands import bench, explain, info, run
from moereg.cli._output import print_error, warnings_on_one_line
from moereg.cli._streams import OutputLostError, guarded_streams
from moereg.errors import MoeregError, MoeregWarning, described, is_lack_of_memory, one_line
from moereg.waiting import Advance, waits_shown_by

__all__ = [
    "BAD_INPUT",
    "BROKEN_PIPE",
    "INTERNAL_ERROR",
    "INTERRUPTED",
    "NOTHING_FITS",
    "OK",
    "OUTPUT_LOST",
    "WRONG_NUMBERS",
    "main",
]

# typer keeps its own copy of click or uses the installed one, by version; either way this is the base of usage errors.
_ClickException: Final[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app: Final = typer.Typer(
    name="moereg",
    help="Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch.",
    epilog=EXIT_CODES,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich's boxes cut the names of options at 80 columns.
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments after the program's name; the process's where None.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    with guarded_streams(), waits_shown_by(_show_wait):
        try:
            code = _exit_code(arguments)
            sys.stdout.flush()
        except OutputLostError as error:
            if error.cause.errno == errno.EPIPE:
                return BROKEN_PIPE
            print_error(f"{error}; the output is incomplete")
            return OUTPUT_LOST
        finally:
            sys.stderr.flush()
        return code


def _show_wait(what: str) -> AbstractContextManager[Advance]:
    from moereg.cli._progress import phase  # Rich takes a tenth of a second to import.

    return phase(what)


def _exit_code(arguments: list[str]) -> int:
    try:
        with warnings_on_one_line():  # Also of what is read while results are shown.
            code: int | None = app(args=arguments, prog_name="moereg", standalone_mode=False)
    except OutputLostError:
        raise
    except (MoeregError, MoeregWarning) as error:  # A warning where a filter says so, such as that of python -W error.
        print_error(str(error))
        return BAD_INPUT
    except _ClickException as error:
        print_error(f"{error.format_message().rstrip('.')}; see moereg --help")
        return BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        if is_lack_of_memory(error):
            print_error(f"not enough memory: {one_line(str(error))}; make the layer or the call smaller")
            return BAD_INPUT
        # A bug of moereg, not of the user: -v shows the traceback that its authors need.
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exc()
        print_error(f"internal error, please report it: {described(error)} (-v shows the traceback)")
        return INTERNAL_ERROR
    return code or OK


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print("moereg", __version__)
        raise typer.Exit


@app.callback()
def _moereg(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch."""


app.command()(info)
app.command()(explain)
app.command()(run)
app.command()(bench)
app.command("new-backend")(new_backend)
app.command("build-kernels")(build_kernels)
app.command()(verify)


def _add_later_command(name: str, does: str) -> None:
    # Takes any arguments: they are not known yet, and the answer is the same.
    @app.command(name, help=f"Later: {does}", context_settings={"ignore_unknown_options": True})
    def later(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> int:
        print_error(f"{name} comes in a later release; moereg --help lists what is here")
        return BAD_INPUT


_add_later_command("tune", "measure what selection will use.")

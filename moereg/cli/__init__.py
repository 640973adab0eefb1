"""The `moereg` command: its subcommands, and the exit codes of failures."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Any, Final

import typer
import typer.core

from moereg._version import __version__
from moereg.cli._commands import COMMANDS
from moereg.cli._output import (
    BAD_INPUT,
    BROKEN_PIPE,
    EXIT_CODES,
    INTERNAL_ERROR,
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    OUTPUT_LOST,
    WRONG_NUMBERS,
    print_error,
    warnings_on_one_line,
)
from moereg.cli._streams import OutputLostError, guarded_streams
from moereg.errors import (
    MoeregError,
    MoeregWarning,
    UnknownNameError,
    described,
    is_lack_of_memory,
    one_line,
    shown,
    unknown_name_message,
)
from moereg.runtime.progress import Advance, waits_shown_by

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

# The base class of usage errors: some versions of typer bundle click, others use the installed one.
_ClickException: Final[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_ALSO_CALLED: Final = {
    **dict.fromkeys(("list", "ls"), ("info", "models", "schemes")),
    **dict.fromkeys(("backends", "doctor", "status"), ("info",)),
    **dict.fromkeys(("why", "choose", "select"), ("explain",)),
    **dict.fromkeys(("warm-up", "precompile", "build"), ("compile",)),
    "test": ("verify",),
    "check": ("verify", "run"),
    "quants": ("schemes",),
    "new": ("new-backend",),
}
"""Other words for commands, with the commands that they may mean."""


class _Commands(typer.core.TyperGroup):
    """The commands; a mistyped one gets moereg's usual error for unknown names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like click's, but checks that the first word is a command's name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownNameError(unknown_name_message("command", args[0], self.list_commands(ctx), _ALSO_CALLED))
        return super().resolve_command(ctx, args)


app: Final = typer.Typer(
    name="moereg",
    cls=_Commands,
    help="Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    # Rich's boxes truncate option names at 80 columns.
    rich_markup_mode=None,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments after the program's name; None means the process's.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
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
        with warnings_on_one_line():  # Covers errors while results are shown, too.
            code: int | None = app(args=arguments, prog_name="moereg", standalone_mode=False)
    except OutputLostError:
        raise
    except (MoeregError, MoeregWarning) as error:  # A filter made a warning an error (python -W error).
        print_error(str(error))
        return BAD_INPUT
    except _ClickException as error:
        print_error(_usage_text(error))
        return BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and _is_about_completion(arguments):
            return error.code if isinstance(error.code, int) else OK
        if is_lack_of_memory(error):
            print_error(f"not enough memory: {one_line(str(error))}; make the layer or the call smaller")
            return BAD_INPUT
        # A bug in moereg, not the user's mistake: -v shows the traceback that its authors need.
        if {"-v", "--verbose"} & set(arguments):
            traceback.print_exc()
        print_error(f"internal error, please report it: {described(error)} (-v shows the traceback)")
        return INTERNAL_ERROR
    return code or OK


_SURPLUS: Final = "Got unexpected extra argument"


def _usage_text(error: Any) -> str:
    """A typer usage error on one line, with a pointer to the help."""
    context, option = getattr(error, "ctx", None), getattr(error, "option_name", None)
    text = error.format_message().rstrip(".")
    if type(error).__name__ == "NoSuchOption" and context is not None and option is not None:
        known = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        text = unknown_name_message("option", option, {*(name for name in known if name.startswith("-")), "--help"})
    if text.startswith(_SURPLUS):
        surplus = text.partition(" (")[2].rstrip(")")
        text = f"a command must have no surplus argument, got {shown(surplus)}; leave it out"
    return f"{text}; see {context.command_path if context is not None else 'moereg'} --help"


def _is_about_completion(arguments: Sequence[str]) -> bool:
    """Whether this is shell completion or its setup, which typer ends by SystemExit."""
    return "_MOEREG_COMPLETE" in os.environ or bool({"--install-completion", "--show-completion"} & set(arguments))


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


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)

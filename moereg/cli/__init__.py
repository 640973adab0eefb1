"""The `moereg` command. `_EXIT_CODES` lists its exit codes, and the help shows them."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from moereg._version import __version__
from moereg.cli._info import collect_info, machine_shown, selection_with_evidence
from moereg.cli._options import JsonFlag, ProblemFlags, UsageError, VerboseFlag, takes_problem_flags
from moereg.cli._output import only_results_on_stdout, print_error, print_json, warnings_on_one_line
from moereg.cli._streams import OutputLostError, guarded_streams
from moereg.digest import files_stay
from moereg.discovery import load_backends
from moereg.dispatch import explain_backends
from moereg.errors import MoeregError, MoeregWarning, described, is_lack_of_memory, one_line
from moereg.selection import SCHEMA
from moereg.tuning.timing import ROUNDS
from moereg.waiting import Advance, waits_shown_by

__all__ = ["main"]

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

_EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 wrong numbers or a backend that failed; 2 bad input or not enough memory for it; 3 nothing "
    "fits the problem; 70 a bug of moereg; 74 standard output could not be written, for instance to a full disk; 130 "
    "interrupted; 141 the reader of the output left. A stream that is closed from the start changes no code."
)

# typer keeps its own copy of click or uses the installed one, by version; either way this is the base of usage errors.
_ClickException: Final[Any] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

app: Final = typer.Typer(
    name="moereg",
    help="Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch.",
    epilog=_EXIT_CODES,
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


@app.command()
def info(json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """Show this machine, the backends and the plugins."""
    with files_stay():
        with only_results_on_stdout(verbose):
            found = collect_info()
        if json:
            print_json(found)
        else:
            from moereg.cli._show import show_info

            show_info(found, machine_shown()[0])
    return OK


@app.command()
@takes_problem_flags
def explain(flags: ProblemFlags, json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """Show which backend a layer gets, and why."""
    with only_results_on_stdout(verbose):
        problem = flags.problem()  # A plugin's scheme loads the plugins, which may print.
        load_backends()  # A plugin's kind of platform is known once it is loaded.
        selection = explain_backends(problem, flags.platform, **flags.request())
        values = selection_with_evidence(selection) if json else {}
    if json:
        print_json(values)
    else:
        from moereg.cli._show import show_selection

        show_selection(selection, flags.model)
    return OK if selection.winner else NOTHING_FITS


@app.command()
@takes_problem_flags
def run(
    flags: ProblemFlags,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Read a layer of this checkpoint directory instead of making a random one.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer of the checkpoint; the first with experts if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of weights, hidden states and routing.")] = 0,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Run one layer, check it against the reference, time it."""
    from moereg.cli._run import run_layer
    from moereg.cli._show import show_run

    with only_results_on_stdout(verbose):
        result = run_layer(flags, checkpoint, layer, seed)
    if json:
        print_json(result.to_dict())
    else:
        show_run(result)
    if result.passed is None:
        return NOTHING_FITS
    return OK if result.passed else WRONG_NUMBERS


@app.command()
@takes_problem_flags
def bench(
    flags: ProblemFlags,
    tokens: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens, e.g. 1,16,64; 1 to 4096 on a GPU and 1 to 256 on a CPU if left out."),
    ] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf (popularity 1 / rank) or one_set (all to one set).")
    ] = "uniform",
    rounds: Annotated[
        int, typer.Option(min=1, help="Timed calls of each backend; fewer where they take longer than a second.")
    ] = ROUNDS,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of weights, hidden states and routing.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and share of the roofline into this file, e.g. bench.png.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Compare all backends that fit: numbers first, then speed."""
    from moereg.cli._bench import bench_layer, check_routing, parse_tokens
    from moereg.cli._plot import check_can_plot, plot_bench
    from moereg.cli._show import show_bench

    token_counts = None if tokens is None else parse_tokens(tokens)
    check_routing(routing)
    if plot is not None:
        check_can_plot(plot)
    with only_results_on_stdout(verbose):
        result = bench_layer(flags, token_counts, routing, rounds, seed)
        # First, so that a disk that is full by now leaves nothing on standard output.
        if plot is not None and result.rows:
            try:
                plot_bench(result, plot)
            except OSError as error:
                raise UsageError(f"--plot could not write {str(plot)!r}: {error.strerror}") from None
    if json:
        print_json(result.to_dict())
    else:
        show_bench(result)
    if result.passed is None:
        return NOTHING_FITS
    return OK if result.passed else WRONG_NUMBERS


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend, as requests will spell it, e.g. my_kernel.")],
    directory: Annotated[
        Path | None, typer.Option(help="Folder to write into, new or empty; moereg-NAME here if left out.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Write a wheel with one backend that works, to put a kernel into."""
    from moereg.cli._new_backend import write_wheel

    with only_results_on_stdout(verbose):
        written = write_wheel(name, directory)
    if json:
        print_json(written.to_dict())
    else:
        print(written)
    return OK


@app.command("build-kernels")
def build_kernels(
    name: Annotated[str, typer.Argument(help="A backend whose kernels are built ahead of time.")],
    quant: Annotated[
        list[str] | None, typer.Option(help="Scheme that it shall compute; all of the platform's if left out.")
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of hidden states; bfloat16 if left out.")] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Build this set too, by the backend's own name for it.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Build for it, e.g. cuda:sm90; this machine if left out.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once; as memory allows if left out.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write into; where the backend looks if left out.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and how long that takes.")] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Build a backend's kernels ahead of time."""
    from moereg.cli import _build_kernels

    with only_results_on_stdout(verbose):
        built = _build_kernels.build_kernels(name, quant or [], dtype or [], part or [], platform, jobs, out, dry_run)
    if json:
        print_json(built.to_dict())
    else:
        print(built)
    return OK


@app.command()
def verify(
    name: Annotated[
        str | None, typer.Argument(help="A backend, or a file that registers one, e.g. ./my_backend.py.")
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="Import this module or file first, e.g. my_package.backend.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Run as this machine, as its cpu, or as a platform that is imitated here.")
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Import and run the backend in a worker process alone.")
    ] = True,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Time for everything; layers are drawn until it is over.")
    ] = None,
    check_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Time for each check; 120, and 300 beside a GPU, if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of the drawn layers.")] = 0,
    check: Annotated[
        list[str] | None, typer.Option(help="Run only checks whose id has this text, or a drawn layer's JSON.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Record in this file which cells passed everything on this machine.")
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Reject what failed on this machine until its code or versions change.")
    ] = False,
    unquarantine: Annotated[
        bool, typer.Option("--unquarantine", help="Lift the backend's quarantine on this machine, and run nothing.")
    ] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Run the conformance kit on one backend."""
    from moereg.cli._quarantine import check_quarantine, lift_quarantine, quarantine_failures
    from moereg.cli._verify import Subject, check_ledger, record_verified, show_verify, verify_backend
    from moereg.testing.suite import run_again

    if unquarantine:
        if name is None or quarantine:
            raise UsageError("--unquarantine takes a backend's name, and does not go with --quarantine; leave one out")
        with only_results_on_stdout(verbose):
            lifted = lift_quarantine(name)
        if json:
            print_json({"schema": SCHEMA, "quarantine": lifted.to_dict()})
        else:
            print(lifted)
        return OK
    if quarantine:
        check_quarantine()
    subject = Subject(name, module or [])
    if ledger is not None:
        check_ledger(ledger, check or [])
    with only_results_on_stdout(verbose):
        report = verify_backend(subject, platform, isolate, seconds, check_seconds, seed, check or [])
        recorded = () if ledger is None else record_verified(report, ledger, subject)
        change = None
        if quarantine:
            change = quarantine_failures(report, not check, lambda found: run_again(found, isolate, check_seconds))
    if json:
        print_json(report.to_dict() if change is None else {**report.to_dict(), "quarantine": change.to_dict()})
    else:
        show_verify(report)
        if ledger is not None:
            print(f"{len(recorded)} of {len(report.cells)} cells are recorded in {ledger}")
        if change is not None:
            print(change)
    if report.has_no_time:
        return BAD_INPUT
    if report.passed is None:
        return NOTHING_FITS
    return OK if report.passed else WRONG_NUMBERS


def _add_later_command(name: str, does: str) -> None:
    # Takes any arguments: they are not known yet, and the answer is the same.
    @app.command(name, help=f"Later: {does}", context_settings={"ignore_unknown_options": True})
    def later(arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> int:
        print_error(f"{name} comes in a later release; moereg --help lists what is here")
        return BAD_INPUT


_add_later_command("tune", "measure what selection will use.")

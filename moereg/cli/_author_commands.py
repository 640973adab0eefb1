"""The commands for authors of backends: their options, and what each does in order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moereg.cli._completion import backend_names, platform_names, scheme_names
from moereg.cli._exits import BAD_INPUT, OK, code_of_verdict
from moereg.cli._options import JsonFlag, UsageError, VerboseFlag
from moereg.cli._output import only_results_on_stdout, print_json
from moereg.selection import SCHEMA

__all__ = ["build_kernels", "new_backend", "verify"]


def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend, as requests will spell it, e.g. my_kernel.")],
    directory: Annotated[
        Path | None, typer.Option(help="Folder to write into, new or empty; moereg-NAME here if left out.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Write a wheel with one backend, to put a kernel into."""
    from moereg.cli._new_backend import write_wheel

    with only_results_on_stdout(verbose):
        written = write_wheel(name, directory)
    if json:
        print_json(written.to_dict())
    else:
        print(written)
    return OK


def build_kernels(
    name: Annotated[
        str, typer.Argument(help="A backend whose kernels are built ahead of time.", autocompletion=backend_names)
    ],
    quant: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheme that it shall compute; all of the platform's if left out.", autocompletion=scheme_names
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of hidden states; bfloat16 if left out.")] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Build this set too, by the backend's own name for it.")
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(help="Build for it, e.g. cuda:sm90; this machine if left out.", autocompletion=platform_names),
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


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A backend, or a file that registers one, e.g. ./my_backend.py.", autocompletion=backend_names
        ),
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
    return code_of_verdict(report.passed)

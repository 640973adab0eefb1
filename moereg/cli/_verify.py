"""`moereg verify`: runs the conformance kit on a backend, shows the result, and records it."""

from __future__ import annotations

import collections
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from moereg.cli._options import UsageError, check_files
from moereg.cli._output import console, print_aside
from moereg.cli._progress import phase
from moereg.cli._show import new_table, print_notices, say
from moereg.errors import one_line
from moereg.evidence.ledger import Verification, merge_ledger, read_ledger
from moereg.registry import API_VERSION
from moereg.selection.modules import import_modules, is_file_name
from moereg.selection.plugin_status import BACKEND_GROUP
from moereg.testing.check import CellName, Outcome, Report, Result, chosen_machine
from moereg.testing.diagnosis import causes_in, split_message
from moereg.testing.suite import verify

_IMITATED: Final = (
    "imitated: this shows numbers, not hardware; Triton's interpreter, for one, compiles nothing, runs programs one "
    "after another, and takes an autotuner's first configuration"
)
_AS_PLUGIN: Final = (
    "to ship it: moereg new-backend {name} --from {file}; a plugin needs more than a file: an entry point in the group "
    f"{BACKEND_GROUP}, moereg_api = {API_VERSION!r}, and imports of kernel libraries inside functions alone"
)

_MOST_SHOWN: Final = 12

_COLUMNS: Final = {
    "choosing": ("deciding", "rejections"),
    "weights": ("permute", "reload"),
    "numbers": ("numbers",),
    "drawn": ("drawn",),
    "faults": ("faults", "rounding"),
    "gradients": ("gradients", "gradient_faults", "training"),
    "calls": ("workspaces", "equal_bits", "batch_invariance", "graph", "synchronization", "compile"),
}
"""The table's columns, with the kinds of checks that each counts."""


def subject_of(name: str | None, modules: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """A backend's name, empty for all that modules or files register, and these, which are to be imported."""
    files = [name] if name is not None and is_file_name(name) else []
    if name is None and not modules:
        raise UsageError(
            "say what to verify: a backend's name as in moereg info, or the file or --module that registers it"
        )
    check_files((), (*files, *modules))
    return "" if files or name is None else name, (*files, *modules)


def verify_backend(
    name: str, modules: Sequence[str], platform: str | None, isolate: bool, seconds: float | None, **options: Any
) -> Report:
    """Runs the kit and shows progress and failures on standard error; takes the arguments of `verify`."""
    num_printed = 0
    printed: set[str] = set()
    with phase("verifying") as advance:

        def progress(done: int, total: int, result: Result) -> None:
            nonlocal num_printed
            advance(done, total)
            outcome = result.outcome
            causes = causes_in(outcome.message)
            if outcome.is_failure and printed.isdisjoint(causes) and num_printed < _MOST_SHOWN:
                num_printed += 1
                printed.update(causes)
                print_aside(f"{outcome.status}: {result.check.id}: {outcome.message}")

        return verify(name, platform, isolate, seconds, modules=modules, progress=progress, **options)


def check_ledger(path: Path, only: Sequence[str]) -> None:
    """Checks before running that a file can become a ledger."""
    if only:
        raise UsageError("--ledger records cells that passed everything; leave --check out")
    try:
        if path.exists():
            read_ledger(path)
        elif not path.parent.is_dir():
            raise ValueError(f"its folder {one_line(str(path.parent))!r} does not exist")
    except ValueError as error:
        raise UsageError(f"--ledger must name a ledger or a new file, got {one_line(str(path))!r}: {error}") from None


def record_verified(report: Report, path: Path, modules: Sequence[str]) -> tuple[CellName, ...]:
    """Records each cell that ran natively, passed everything and skipped nothing; returns them."""
    cells = report.verified_cells
    if not cells:
        return ()
    # Code that passed may be imported here.
    import_modules(modules)
    platform = chosen_machine(report.platform)
    assert platform is not None
    try:
        merge_ledger(path, [Verification.of(name.find(), platform, count) for name, count in cells.items()])
    except OSError as error:
        raise UsageError(f"--ledger could not write {one_line(str(path))!r}: {error.strerror}") from None
    return tuple(cells)


def show_verify(report: Report, modules: Sequence[str]) -> None:
    """Prints the report, and what a file of these modules lacks as a plugin if it passed."""
    device = f" ({one_line(report.device)})" if report.device else ""
    versions = "".join(f", {name} {version}" for name, version in report.versions.items())
    say(f"{report.backend} on {report.platform or 'this machine'}{device}{versions}")
    if report.cells:
        rows = [_row(report, cell) for cell in report.cells]
        say(new_table("experts", "platforms", "computes", "runs", *_COLUMNS, rows=rows))
    by_cause = _by_cause(report.failures)
    for place, results in enumerate(by_cause[:_MOST_SHOWN]):
        _show_failures(report, results, in_full=place == 0)
    if len(by_cause) > _MOST_SHOWN:
        say(f"and {len(by_cause) - _MOST_SHOWN} more kinds of failures; --json has all of them")
    say(*(f"{cell} cannot run here: {reason}" for cell, reason in report.idle.items()))
    if report.imitated:
        say(_IMITATED)
    if report.unchecked:
        say(f"not checked on this machine: {', '.join(report.unchecked)}")
    print_notices(report.notes)
    outcomes = [result.outcome for result in report.results]
    skipped = collections.Counter(outcome.message for outcome in outcomes if outcome.status == "skipped")
    say(*(f"{count} skipped: {reason}" for reason, count in skipped.items()), _verdict(report))
    for file in filter(is_file_name, modules if report.passed else ()):
        one = "," not in report.backend  # A plugin has one backend.
        say(_AS_PLUGIN.format(name=report.backend if one else "NAME", file=shlex.quote(file)))


def _row(report: Report, cell: CellName) -> list[str | Text]:
    runs = "no" if cell in report.idle else "imitated" if cell in report.imitated else "natively"
    schemes = cell.schemes if len(cell.schemes) < 4 else (*cell.schemes[:2], f"and {len(cell.schemes) - 2} more")
    row: list[str | Text] = [cell.experts, ", ".join(cell.rules), ", ".join(schemes), runs]
    for kinds in _COLUMNS.values():
        own = [result.outcome for result in report.results if result.check.cell == cell and result.check.kind in kinds]
        row.append(_count(own))
    return row


def _count(outcomes: Sequence[Outcome]) -> str | Text:
    failed = [outcome for outcome in outcomes if outcome.is_failure]
    if failed:
        kinds = collections.Counter(outcome.status for outcome in failed)
        text = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in kinds.items())
        return Text(f"{text} of {len(outcomes)}", style="bold red")
    passed = sum(outcome.status == "passed" for outcome in outcomes)
    if passed < len(outcomes):
        return Text(f"{passed} of {len(outcomes)}", style="yellow")
    return str(passed) if passed else "-"


def _by_cause(failures: Sequence[Result]) -> list[list[Result]]:
    """Groups one cell's failures by cause, the most common cause first and in each the clearest failure first.

    What has a named cause goes first, and drawn layers, which are small and odd, go last.
    """
    groups = []
    for cell in dict.fromkeys(result.check.cell for result in failures):
        left = [(causes_in(result.outcome.message), result) for result in failures if result.check.cell == cell]
        while left:
            ((common, _),) = collections.Counter(cause for causes, _ in left for cause in causes).most_common(1)
            group = [result for causes, result in left if common in causes]
            groups.append(sorted(group, key=_unclearness))
            left = [(causes, result) for causes, result in left if common not in causes]
    return sorted(groups, key=lambda group: _unclearness(group[0])[:2])


def _unclearness(result: Result) -> tuple[bool, bool, int]:
    _, causes = split_message(result.outcome.message)
    return not causes, result.check.kind == "drawn", len(causes)


def _show_failures(report: Report, results: Sequence[Result], in_full: bool) -> None:
    """The first of failures that say the same of one cell, in full or on a line, and how many they are."""
    target = console(sys.stdout)
    first, *others = results
    check, (text, causes) = first.check, split_message(first.outcome.message)
    heading = f"{first.outcome.status.upper().replace('_', ' ')}: {check.id}"
    if not in_full:
        count = f" (and {len(others)} more)" if others else ""
        line = f"{heading}{count}: {', or '.join(causes) or text}"
        return target.print(Text(line, style="red"), soft_wrap=True)
    target.print(Text(heading, style="bold red"), soft_wrap=True)
    layer = first.outcome.layer
    lines = [f"layer: {layer.problem}, T={layer.num_tokens} {layer.routing}"] if layer is not None else []
    lines += [text, *(f"likely cause: {cause}" for cause in causes)]
    if others:
        rest = "does 1 other check" if len(others) == 1 else f"do {len(others)} other checks"
        lines.append(f"and so {rest} of {check.cell.experts}")
    for line in (*lines, f"again: {report.rerun_line(first)}"):
        target.print(f"  {line}", soft_wrap=True)


def _verdict(report: Report) -> Text:
    counts = collections.Counter(result.outcome.status for result in report.results)
    num_passed = counts["passed"]
    text = f"{num_passed} check{'' if num_passed == 1 else 's'} passed"
    if report.failures:
        text += f", {len(report.failures)} failed"
    if counts["skipped"]:
        text += f", {counts['skipped']} skipped"
    num_layers = sum(result.outcome.num_layers for result in report.results)
    text += f" in {report.seconds:.0f} s; {num_layers} layers were drawn, with --seed {report.seed}"
    if report.has_no_time:
        return Text(f"no time left for what runs here of {report.backend}; {text}", style="bold red")
    if report.passed is None:
        return Text(f"nothing of {report.backend} can run here; {text}", style="bold red")
    return Text(f"{report.backend}: {text}", style="bold green" if report.passed else "bold red")

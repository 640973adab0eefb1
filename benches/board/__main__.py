"""Measures the board, or goes on where a run of it was cut.

    python -m benches.board --json FILE [--seconds S] [--layers NAME ...] [--tokens N ...] [--routings R ...]
                            [--only PATTERN ...] [--deny PATTERN ...] [--no-opt-in] [--first-use]
                            [--rounds N] [--each S] [--libraries FOLDER] [--list]
    python -m benches.board --pack OUT FILE FILE...

A row is one layer, scheme, routing and number of tokens; every backend that fits is in it. Its numbers are compared
with the reference first, then calls are timed in turns (docs/measuring.md). The file is written after each row, so a
second run with the same file measures what is missing. What fails is in the row with its reason. Measuring runs in a
second process: a backend that crashes it, hangs or takes the device down is left out of the layer, and a new process
goes on. moereg's own Triton kernels are compiled ahead, and their first calls have no time; with `--first-use` nothing
is, so that first calls compare on a machine whose caches are empty. `--libraries` names a folder of
`benches.board.build_libraries`, whose libraries take part too. Exits with 1 where a backend failed or was wrong,
and with 3 where nothing ran. `--pack` measures nothing: it writes the times of two boards or more of one machine as
a pack that selection reads (docs/tuning.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from packaging.requirements import Requirement

from benches.board import libraries, variants
from benches.board.build_libraries import versions_of
from benches.board.layers import BoardLayer, layers_of
from benches.board.measure import COMPILED_AHEAD, Limits, Lost, Marker, Wanted, measure_board, patterns
from benches.board.pack import write_pack_of
from benches.board.store import Board
from benches.stored import instruction_set
from moereg.bench.inputs import ROUTINGS
from moereg.bench.timing import ROUNDS, SECONDS
from moereg.errors import RecordFileError
from moereg.evidence.on_machine import machine_of
from moereg.evidence.provenance import provenance
from moereg.platforms import Platform, current_platform
from moereg.selection.loader import load_backends

_LOST: Final = 75
_FROM_SIGNALS: Final = 128
_MOST_RESTARTS: Final = 12
_POLL_SECONDS: Final = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures in a second process; returns the exit code."""
    options = _parser().parse_args(arguments)
    if options.pack:
        return _pack(*options.pack)
    platform = current_platform()
    known = layers_of(platform.device_type)
    if options.list:
        for layer in known:
            print(f"{layer.name}: {', '.join(f'{point.routing} {point.tokens}' for point in layer.points)}")
        return 0
    try:
        layers = _chosen(known, options)
        board = Board(options.json, _measured_on(platform, options))
    except (ValueError, OSError) as error:
        print(f"benches.board: {error}", file=sys.stderr)
        return 2
    running = options.json.with_name(f"{options.json.name}.running")
    if options.child:
        return _measure(board, layers, platform, options, running)
    board.save()
    # Without it, a process that is ended from outside would leave the measuring one behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(_FROM_SIGNALS + number))
    deadline = time.monotonic() + options.seconds
    command = [sys.executable, "-m", "benches.board", *(sys.argv[1:] if arguments is None else arguments), "--child"]

    def measure() -> int:
        left = deadline - time.monotonic()
        limit = ["--seconds", f"{left:.1f}"] if math.isfinite(left) else []
        return run_child([*command, *limit], running, options.patience)

    supervise(measure, lambda: Board(options.json, _measured_on(platform, options)), running)
    running.unlink(missing_ok=True)
    return _exit_code(Board(options.json, _measured_on(platform, options)))


def _pack(out: pathlib.Path, *paths: pathlib.Path) -> int:
    try:
        print(write_pack_of(out, paths))
    except (ValueError, OSError, RecordFileError) as error:
        print(f"benches.board: {error}", file=sys.stderr)
        return 2
    return 0


def supervise(measure: Callable[[], int], reopen: Callable[[], Board], running: pathlib.Path) -> None:
    """Measures until a process ends by itself; what ended another one is left out from then on.

    Args:
        measure: Runs one process; returns its exit code, beyond 128 if it was killed.
        reopen: The board as it is on disk.
        running: Says whose code ran last.
    """
    for _ in range(_MOST_RESTARTS):
        code = measure()
        if code in (0, 1, 2, 3):
            return
        if code == _LOST:  # The process itself noted whose fault it was.
            continue
        mark = json.loads(running.read_text(encoding="utf-8")) if running.exists() else {}
        if not mark.get("backend"):
            print(f"benches.board: measuring ended with {_ending(code)}, and no backend ran", file=sys.stderr)
            return
        reason = f"it ended the process with {_ending(code)} in {mark['step']}"
        print(f"{mark['layer']}: {mark['backend']} ({mark['experts']}): {reason}", flush=True)
        reopen().put_out(mark["layer"], mark["backend"], mark["experts"], reason)


def _ending(code: int) -> str:
    if code > _FROM_SIGNALS:
        name = signal.Signals(code - _FROM_SIGNALS).name
        return f"{name} (stuck, or out of memory)" if name == "SIGKILL" else name
    return f"exit code {code}"


def run_child(command: Sequence[str], running: pathlib.Path, patience: float) -> int:
    """Runs a measuring process; one whose file has not changed for so many seconds is killed."""
    running.unlink(missing_ok=True)
    started = time.time()
    process = subprocess.Popen(command)
    try:
        while (code := process.poll()) is None:
            since = running.stat().st_mtime if running.exists() else started
            if time.time() - max(since, started) > patience:
                process.kill()
            time.sleep(_POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    return code if code >= 0 else _FROM_SIGNALS - code


def _measure(
    board: Board, layers: Sequence[BoardLayer], platform: Platform, options: argparse.Namespace, running: pathlib.Path
) -> int:
    variants.register()
    libraries.register(options.libraries)
    wanted = Wanted(patterns(options.only), patterns(options.deny), not options.no_opt_in)
    limits = Limits(options.seconds, options.rounds, options.each)
    try:
        measure_board(board, layers, platform, wanted, Marker(running), limits)
    except Lost as error:
        print(f"benches.board: {error}", file=sys.stderr, flush=True)
        return _LOST
    return 0


def _exit_code(board: Board) -> int:
    rows = board.document["rows"]
    failed = sum(one["failure"] is not None for row in rows for one in row["results"])
    print(f"{len(rows)} rows, {failed} results failed, {len(board.document['left_out'])} rows left out")
    return 3 if not rows else int(failed > 0)


def _chosen(known: Sequence[BoardLayer], options: argparse.Namespace) -> list[BoardLayer]:
    unknown = set(options.layers or ()) - {layer.name for layer in known}
    if unknown:
        raise ValueError(f"--layers takes names of --list, got {', '.join(sorted(unknown))}")
    chosen = [layer for layer in known if not options.layers or layer.name in options.layers]
    limited = [layer.limited(options.tokens, options.routings) for layer in chosen]
    if not any(layer.points for layer in limited):
        raise ValueError("--tokens and --routings keep no row of these layers; --list shows what there is")
    return [layer for layer in limited if layer.points]


def _measured_on(platform: Platform, options: argparse.Namespace) -> dict[str, Any]:
    requires = {Requirement(text).name for cell in load_backends().cells for text in cell.requires}
    ahead = [] if options.first_use or platform.kind != "cuda" else list(COMPILED_AHEAD)
    machine = dataclasses.asdict(machine_of(platform))
    found = {**provenance(platform, {"torch", *requires}), "compiled_ahead": ahead, "machine": machine}
    found["versions"] = {**found["versions"], **versions_of(options.libraries)}
    return found | ({"instruction_set": instruction_set()} if platform.kind == "cpu" else {})


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError(text)
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benches.board", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("board.json"), help="written and continued")
    parser.add_argument("--seconds", type=_positive, default=math.inf, help="after which no row is begun")
    parser.add_argument("--layers", nargs="*", metavar="NAME", help="of --list; all of this kind of machine by default")
    parser.add_argument("--tokens", nargs="*", type=int, help="rows with these numbers of tokens alone")
    parser.add_argument("--routings", nargs="*", choices=ROUTINGS, help="rows with these routings alone")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="these backends alone")
    parser.add_argument("--deny", nargs="*", default=[], metavar="PATTERN", help="none of these backends")
    parser.add_argument(
        "--first-use", action="store_true", help="compile nothing ahead, so that first calls compare; on new machines"
    )
    parser.add_argument("--no-opt-in", action="store_true", help="leave out what a request would have to name")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="samples of each backend in a row, at most")
    parser.add_argument("--each", type=_positive, default=SECONDS, help="seconds for timing each backend in a row")
    parser.add_argument("--patience", type=_positive, default=240.0, help="seconds for one step of one backend")
    parser.add_argument(
        "--pack", nargs="+", type=pathlib.Path, metavar=("OUT", "FILE"), help="write a pack from two boards or more"
    )
    parser.add_argument("--libraries", type=pathlib.Path, metavar="FOLDER", help="libraries that were built there")
    parser.add_argument("--list", action="store_true", help="the layers and their rows")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())

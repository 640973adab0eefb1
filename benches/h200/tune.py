"""Cost and worth of `moereg tune`: seconds, held-out numbers of tokens, and whether two runs choose alike.

    python -m benches.h200.tune --out tune.json
    python -m benches.h200.tune --without triton --seconds 560 --out tune.json
    python -m benches.h200.tune --layers qwen3-30b-a3b,gpt-oss-120b:mxfp4_w4a16 --out tune.json
    python -m benches.h200.tune --judge tune.json

A part is one layer with all installed backends, or without those of one --without. It has four steps:

    cold       moereg tune, with an empty cache of Triton's kernels
    warm       the same into another pack
    held_out   times numbers of tokens between those of the grid, with other inputs, in a fresh process
    plans      the choices of both packs side by side, and the first one's against its own times

Each step's result is written to --out as soon as there is one. A step that fails is named and the others go on. After
--seconds the command ends with exit 4, and the same command goes on where it was as long as the folder of --work is
there. What the steps printed, as `moereg tune` itself, is copied beside --out. --judge measures nothing: it says how
far choices by one of a result's two runs are above the fastest by the times of the other, and where both choose alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from packaging.requirements import Requirement

from moereg.bench.points import Point, midpoint, token_grid
from moereg.bench.session import candidates_to_time, key_of, tuning_candidates
from moereg.dispatch import explain_backends
from moereg.evidence.measured import Source
from moereg.evidence.pack import Pack, read_pack
from moereg.evidence.plans import LayerTimes, best_for_all
from moereg.evidence.provenance import clocks, provenance
from moereg.evidence.significance import ASKED
from moereg.platforms import current_platform
from moereg.selection.decide import candidate_of
from moereg.selection.loader import load_backends
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

_ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
_PRIMES: Final = (7, 13, 29, 61, 127, 251, 509, 1021, 2039, 4093, 8191)
_NUM_COMPARED: Final = 40
_SEED: Final = 1  # The sessions of a tune have 0.
_TIE: Final = 1.03
_SIZES: Final = ("experts", "hidden", "intermediate", "top_k")
_TUNES: Final = ("cold", "warm")
_GRACE_SECONDS: Final = 20.0
"""A program that hangs is ended so long after the time is over."""
_UNFINISHED: Final = 4
"""The exit code of `moereg tune` and of this program if the time is over."""


class _OutOfTime(Exception):
    pass


class _Failed(Exception):
    pass


def main() -> int:
    """Measures, prints and writes; returns the exit code: 1 if a step failed, 4 if the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="qwen3-30b-a3b", help="models as NAME or NAME:SCHEME, or sizes as E.H.I.K")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a call")
    parser.add_argument(
        "--without", action="append", help="a part does without these backends; may be given again ('' and triton)"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="end with exit 4 after so long")
    parser.add_argument("--work", type=pathlib.Path, default=_ROOT / "build" / "tune", help="delete it to start anew")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--judge", type=pathlib.Path, help="a result with both runs")
    parser.add_argument("--step", choices=("held_out", "plans"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.judge is not None:
        for found in json.loads(given.judge.read_text())["parts"]:
            _show_judged(found)
        return 0
    if given.out is None:
        parser.error("--out is required")
    if given.step is not None:
        return _in_own_process(given.step, given.layers, given.tokens, given.work, given.out, given.seconds)
    clock, out = _Clock(given.seconds), given.out.resolve()
    parts = [
        _Part(layer, without, given.tokens, given.work.resolve())
        for layer, without in itertools.product(given.layers.split(","), given.without or ["", "triton"])
    ]
    document = _provenance()
    code = 0
    for part, (name, step) in itertools.product(parts, _STEPS.items()):
        try:
            code = _run(part, name, step, clock) or code
        except _OutOfTime:
            clock.say(f"the time is over in {name} of {part}; the same command goes on")
            code = _UNFINISHED
            break
        finally:  # A machine may be taken back at any time.
            out.write_text(json.dumps({**document, "parts": [one.found for one in parts]}, indent=1) + "\n")
            for said in part.folder.glob("*.txt"):
                shutil.copyfile(said, out.with_name(f"{out.stem}-{part.folder.name}-{said.name}"))
    for part in parts:
        _show(part.found)
    return code


def _provenance() -> dict[str, Any]:
    platform = current_platform()
    required = {Requirement(text).name for cell in load_backends().cells for text in cell.requires}
    return {"schema": 1, **provenance(platform, {"moereg", "torch", "triton", *required}), **clocks(platform)}


class _Clock:
    """The seconds of this command, before each line on standard error."""

    def __init__(self, seconds: float) -> None:
        self._start: Final = time.monotonic()
        self._seconds: Final = seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.spent

    def check(self) -> None:
        """Raises _OutOfTime if the time is over."""
        if self.left < 1:
            raise _OutOfTime

    def say(self, text: str) -> None:
        print(f"[{self.spent:4.0f} s] {text}", file=sys.stderr, flush=True)

    def options(self) -> list[str]:
        self.check()
        return [] if self._seconds == math.inf else ["--seconds", f"{self.left:.0f}"]


class _Part:
    """One layer, without some backends.

    Attributes:
        found: Results by step, kept in the part's folder.
    """

    def __init__(self, layer: str, without: str, tokens: int, work: pathlib.Path) -> None:
        self.layer, self.without, self.tokens = layer, without, tokens
        self.folder = work / "-".join([layer.replace(":", "-"), str(tokens), *(["no", without] if without else [])])
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self.folder / "part.json"
        empty = {"layer": layer, "without": without, "seconds": {}, "failed": {}}
        self.found: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else empty

    def __str__(self) -> str:
        return f"{self.layer} without {self.without}" if self.without else self.layer

    def save(self) -> None:
        self._file.write_text(json.dumps(self.found, indent=1))

    def pack(self, which: str) -> pathlib.Path:
        return self.folder / f"{which}.json"

    def environment(self, which: str = "cold") -> dict[str, str]:
        """Packs, records and compiled kernels of its own."""
        denied = filter(None, (os.environ.get("MOEREG_DENY"), self.without))
        return {
            **os.environ,
            "MOEREG_DENY": ",".join(denied),
            "MOEREG_TUNING": str(self.pack(which)),
            "MOEREG_QUARANTINE": str(self.folder / "quarantine.json"),
            "MOEREG_ADMISSION": str(self.folder / "admitted.json"),
            "TRITON_CACHE_DIR": str(self.folder / "triton"),
        }


def _run(part: _Part, name: str, step: Callable[[_Part, str, _Clock], Any], clock: _Clock) -> int:
    """Does a step that has not been done, and keeps what it found."""
    if name in part.found:
        return 0
    clock.say(f"{part}: {name} ...")
    start = clock.spent
    part.found["failed"].pop(name, None)
    try:
        part.found[name] = step(part, name, clock)
    except _Failed as error:
        part.found["failed"][name] = str(error)
    finally:
        seconds = part.found["seconds"]
        seconds[name] = seconds.get(name, 0.0) + clock.spent - start
        part.save()
    if name in part.found["failed"]:
        clock.say(f"{part}: {name} FAILED: {part.found['failed'][name]}")
        return 1
    clock.say(f"{part}: {name} took {seconds[name]:.0f} s")
    return 0


def _tune(part: _Part, which: str, clock: _Clock) -> dict[str, Any]:
    command = ["moereg", "tune", *options_of(part.layer), "--tokens", str(part.tokens), *clock.options()]
    transcript = part.folder / f"{which}.txt"
    code = _speak([sys.executable, "-m", *command], part.environment(which), transcript, clock)
    if code not in (0, 1):  # A wrong backend is named in what it prints.
        raise _Failed(f"moereg tune ended with {code}; {transcript} has what it said")
    return {"code": code, "pack": json.loads(part.pack(which).read_text())}


def _held_out(part: _Part, name: str, clock: _Clock) -> dict[str, Any]:
    failure, out = None, part.folder / f"{name}.json"
    try:
        _child(part, name, clock)
    except _Failed as error:
        if not out.exists():
            raise
        failure = str(error)  # The rows before it count.
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {
        "failure": failure,
        "rows": rows,
        "lacking": sum(not set(row["choices"].values()) <= set(row["ratios"]) for row in rows),
        "regret": {plan: regrets(rows, plan) for plan in (rows[0]["choices"] if rows else ())},
        "slower_than_default": [row for row in rows if row["ratios"].get(row["choices"]["planned"], 0.0) > _TIE],
    }


def _plans(part: _Part, name: str, clock: _Clock) -> Any:
    return json.loads(_child(part, name, clock).read_text())


def _child(part: _Part, step: str, clock: _Clock) -> pathlib.Path:
    """Does a step in a process of its own; returns the file with what it found."""
    for pack in _TUNES if step == "plans" else _TUNES[:1]:
        if pack not in part.found:
            raise _Failed(f"{pack} has no pack")
    out = part.folder / f"{step}.json"
    command = [sys.executable, "-m", "benches.h200.tune", "--step", step, "--layers", part.layer]
    command += ["--tokens", str(part.tokens), "--work", str(part.folder), "--out", str(out), *clock.options()]
    code = _speak(command, part.environment(), part.folder / f"{step}.txt", clock)
    if code != 0:
        raise _Failed(f"it ended with {code}; {part.folder / f'{step}.txt'} has what it said")
    return out


_STEPS: Final[dict[str, Callable[[_Part, str, _Clock], Any]]] = {
    **dict.fromkeys(_TUNES, _tune),
    "held_out": _held_out,
    "plans": _plans,
}


def _speak(command: Sequence[str], environment: Mapping[str, str], transcript: pathlib.Path, clock: _Clock) -> int:
    """Runs a program whose lines go to a file, and to standard error with the time; returns its exit code."""
    with (
        transcript.open("a", encoding="utf-8") as file,
        subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):
        print("$", shlex.join(command), file=file, flush=True)
        assert process.stdout is not None
        end = threading.Timer(min(clock.left + _GRACE_SECONDS, threading.TIMEOUT_MAX), process.kill)
        end.daemon = True
        end.start()
        for line in process.stdout:
            file.write(line)
            file.flush()
            clock.say(line.rstrip("\n"))
        process.wait()
        end.cancel()
    if process.returncode == _UNFINISHED or clock.left < 0:
        raise _OutOfTime
    return process.returncode


def problem_of(layer: str, tokens: int) -> MoEProblem:
    """The problem of `NAME`, `NAME:SCHEME` or `E.H.I.K`."""
    name, _, scheme = layer.partition(":")
    if name[0].isdecimal():
        experts, hidden, intermediate, top_k = map(int, name.split("."))
        sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": top_k}
    else:
        sizes = get_shape(name).problem_keywords()
    return MoEProblem(**{**sizes, **({"quant": scheme} if scheme else {})}, max_num_tokens=tokens)


def options_of(layer: str) -> list[str]:
    """The same as options of a command."""
    name, _, scheme = layer.partition(":")
    quant = ["--quant", scheme] if scheme else []
    if not name[0].isdecimal():
        return ["--model", name, *quant]
    pairs = zip(_SIZES, name.split("."), strict=True)
    return [*(word for size, value in pairs for word in (f"--{size.replace('_', '-')}", value)), *quant]


def _in_own_process(step: str, layer: str, tokens: int, folder: pathlib.Path, out: pathlib.Path, seconds: float) -> int:
    problem = problem_of(layer, tokens)
    if step == "plans":
        out.write_text(json.dumps(compared(*(plans_of(problem, folder / f"{which}.json") for which in _TUNES))))
        return 0
    try:
        time_held_out(problem, tokens, plans_of(problem, folder / "cold.json"), out, _Clock(seconds))
    except _OutOfTime:
        return _UNFINISHED
    return 0


class Plans(NamedTuple):
    """A layer's choices by a pack.

    Attributes:
        note: The line on the choice that selection has.
        times: The layer's times.
        names: Cells by their index in the times.
        choices: The cell of a number of tokens, by plan: `default` by priority, `one_backend` (A), `planned` as
            selection reads it (B).
    """

    note: str
    times: LayerTimes
    names: Mapping[int, str]
    choices: Mapping[str, Callable[[int], str]]


def plans_of(problem: MoEProblem, pack: pathlib.Path) -> Plans:
    """Reads a pack; a line on what is wrong is the exit if it cannot be used."""
    os.environ["MOEREG_TUNING"] = str(pack)
    platform = current_platform()
    decisions = list(candidates_to_time(tuning_candidates(problem, platform)).values())
    candidates = [candidate_of(one, platform) for one in decisions]
    read = read_pack(pack, is_own=True)
    found, layer = Source(read).order(problem, platform, candidates), read.layers[-1]
    if not found.ranges:
        raise SystemExit(f"{pack} chooses nothing for this layer: {'; '.join(found.notes)}")
    times, wrong = LayerTimes(layer.rows, layer.default, layer.calls), dict(layer.wrong)
    names = {at: _name(read.cells[at].cell_key) for at in sorted(layer.cells) if at not in wrong}
    order = list(names)
    base = best_for_all(times, order)
    planned = [(most, _name(key_of(one, platform))) for most, one in explain_backends(problem).plan]
    return Plans(
        found.note,
        times,
        names,
        {
            "default": lambda tokens: names[order[0]],
            "one_backend": lambda tokens: names[base],
            "planned": lambda tokens: _at(planned, tokens),
        },
    )


def _name(key: Sequence[str]) -> str:
    return "/".join(key)


def _at(plan: Sequence[tuple[int | None, str]], tokens: int) -> str:
    return next(name for most, name in plan if most is None or tokens <= most)


def compared(first: Plans, second: Plans) -> dict[str, Any]:
    """At which share of numbers of tokens two packs choose alike, and where one's plan is slower in its own times."""
    grid = log_grid(first.times.tokens[-1])
    cells = {name: cell for cell, name in first.names.items()}
    slower = []
    for at in first.times.tokens:
        name = first.choices["planned"](at)
        ratios = first.times.at(cells[name], at) if name in cells else {}
        for routing in {key[1] for key in ratios}:
            mean = statistics.fmean(one.log for key, one in ratios.items() if key[1] == routing)
            if mean > 0:
                slower.append({"tokens": at, "routing": routing, "cell": name, "ratio": math.exp(mean)})
    return {
        "alike": {
            name: statistics.fmean(choice(at) == second.choices[name](at) for at in grid)
            for name, choice in first.choices.items()
        },
        "slower_in_own_pack": slower,
        "notes": [first.note, second.note],
    }


def judged(part: Mapping[str, Any]) -> tuple[dict[str, dict[str, float] | None], dict[str, float]]:
    """Regrets of choices by the first run's times in the second's, and where both runs choose alike, by plan."""
    layers = [Pack.from_json(json.dumps(part[which]["pack"])).layers[0] for which in _TUNES]
    first, second = (LayerTimes(layer.rows, layer.default, layer.calls) for layer in layers)
    order = sorted(layers[0].cells)

    def choices(times: LayerTimes) -> dict[str, Callable[[int], str]]:
        base = best_for_all(times, order)
        return {"default": lambda _: str(order[0]), "one_backend": lambda _: str(base)}

    chosen, others, rows = choices(first), choices(second), []
    for at, routing in itertools.product(second.tokens, ASKED):
        logs = {cell: [one.log for key, one in second.at(cell, at).items() if key[1] == routing] for cell in order}
        ratios = {str(cell): math.exp(statistics.fmean(found)) for cell, found in logs.items() if found}
        rows.append({"ratios": ratios, "choices": {name: choice(at) for name, choice in chosen.items()}})
    grid = log_grid(second.tokens[-1])
    alike = {name: statistics.fmean(choice(at) == others[name](at) for at in grid) for name, choice in chosen.items()}
    return {name: regrets(rows, name) for name in chosen}, alike


def _show_judged(part: Mapping[str, Any]) -> None:
    without = f" without {part['without']}" if part["without"] else ""
    print(f"{part['layer']}{without}: choices of one run by the times of another")
    found, alike = judged(part)
    for name, one in found.items():
        text = one and ", ".join(f"{key} {value:.2%}" for key, value in one.items())
        print(f"  regret of {name}: {text}; both choose alike at {alike[name]:.1%} of the numbers of tokens")


def held_out_counts(tokens: int) -> list[int]:
    """Numbers of tokens that no grid has: the middles of its neighbors, and primes."""
    middles = (midpoint(low, high) for low, high in itertools.pairwise(token_grid(tokens)))
    return sorted({*filter(None, middles), *(prime for prime in _PRIMES if prime <= tokens)})


def log_grid(tokens: int) -> list[int]:
    """Numbers of tokens at equal distances of their logarithms."""
    return [round(tokens ** (place / (_NUM_COMPARED - 1))) for place in range(_NUM_COMPARED)]


def time_held_out(problem: MoEProblem, tokens: int, plans: Plans, out: pathlib.Path, clock: _Clock) -> None:
    """Appends a line of JSON for each number of tokens and routing that the file lacks: times over the default's."""
    import torch

    from moereg.bench.inputs import random_weights
    from moereg.bench.session import LayerSession
    from moereg.evidence.significance import paired
    from moereg.platforms import torch_device

    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    known = {(row["routing"], row["tokens"]) for row in done}
    points = [Point(routing, at) for at in held_out_counts(tokens) for routing in ASKED]
    left = [point for point in points if point not in known]
    platform = current_platform()
    selection, device = tuning_candidates(problem, platform), torch_device(platform)
    selection = dataclasses.replace(selection, decisions=tuple(candidates_to_time(selection).values()))
    session = LayerSession(
        selection, lambda: random_weights(problem, torch.Generator().manual_seed(_SEED), device), device, _SEED
    )
    for number, point in enumerate(left, start=1 + len(points) - len(left)):
        clock.check()
        measured = session.measure(point)
        timed = {row.decision: row.timing for row in measured if row.timing is not None}
        failed = {_name(key_of(row.decision, platform)): row.reason for row in measured if row.timing is None}
        default = timed.get(selection.decisions[0])
        ratios = {
            _name(key_of(decision, platform)): math.exp(paired(default.samples_us, timing.samples_us)[0])
            for decision, timing in (timed.items() if default is not None else ())
        }
        row = {
            **point._asdict(),
            "default_us": default and default.median_us,
            "ratios": ratios,
            "failed": failed,
            "choices": {name: choice(point.tokens) for name, choice in plans.choices.items()},
        }
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"held out: {number} of {len(points)} points", flush=True)


def regrets(rows: Iterable[Mapping[str, Any]], name: str) -> dict[str, float] | None:
    """How far a choice is above the best measured: mean, 95th percentile and worst, as fractions; None without any."""
    pairs = [(row["ratios"].get(row["choices"][name]), row["ratios"]) for row in rows]
    found = sorted(own / min(ratios.values()) - 1 for own, ratios in pairs if own is not None)
    if not found:
        return None
    return {"mean": statistics.fmean(found), "p95": found[math.ceil(0.95 * len(found)) - 1], "worst": found[-1]}


def _show(part: Mapping[str, Any]) -> None:
    without = f" without {part['without']}" if part["without"] else ""
    print(f"{part['layer']}{without}: " + ", ".join(f"{name} {each:.0f} s" for name, each in part["seconds"].items()))
    held_out, plans = part.get("held_out"), part.get("plans")
    if held_out:
        for name, found in held_out["regret"].items():
            text = found and ", ".join(f"{key} {value:.2%}" for key, value in found.items())
            print(f"  regret of {name}: {text or 'not measured'}")
        for row in held_out["slower_than_default"]:
            print(f"  slower than the default: {row}")
        if held_out["failure"]:
            print(f"  {len(held_out['rows'])} rows, then: {held_out['failure']}")
        if held_out["lacking"]:
            print(f"  {held_out['lacking']} rows lack times of a choice")
    if plans:
        for name, share in plans["alike"].items():
            print(f"  two tunes choose alike by {name} at {share:.1%} of the numbers of tokens")
        for row in plans["slower_in_own_pack"]:
            print(f"  slower than the default in its own pack: {row}")
        print(f"  {plans['notes'][0] or 'nothing beats the default'}")
    for name, reason in part["failed"].items():
        print(f"  {name} FAILED: {reason}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

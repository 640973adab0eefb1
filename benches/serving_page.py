"""Tables of engines with moereg's experts beside their own, from runs of `benches.h200.serving` and `.sglang`."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from benches.markdown import table
from benches.stored import RESULTS, outcome, read

__all__ = ["TABLES"]

_FILES: Final = {"vLLM": RESULTS / "serving_h200.json", "SGLang": RESULTS / "sglang_h200.json"}
_MODES: Final = {"eager": "eager", "graphs": "graphs", "compiled": "compiled"}


class _Pair(NamedTuple):
    """A workload of one engine, with its own experts and with moereg's: the best of every run."""

    model: str
    mode: str
    workload: str
    is_prefill: bool
    theirs: float
    ours: float


_APART: Final = {"--compare", "--zero-experts", "--layers"}
"""Options of runs that are checks, or of part of a model."""

_LONG_S: Final = 1.0
"""No batch takes this long, so a first token that does has waited for something else."""


def _runs(name: str) -> list[dict[str, Any]]:
    return [run for run in read(_FILES[name])["runs"] if not run["wishes"] and not _APART & {*run["argv"]}]


def _is_ours(run: dict[str, Any]) -> bool:
    """Whether moereg ran the experts: the plugin may have been missing, or have left them to vLLM."""
    return run["plugin"] != "off" and run["experts"].get("moereg", "unknown") is not None


def _engine(run: dict[str, Any]) -> str:
    ranks = run.get("parallel", 1)
    if ranks == 1:
        return _MODES[run["mode"]]
    return f"{_MODES[run['mode']]}, TP {ranks}{' + EP' if run['experts_parallel'] else ''}"


def _best(name: str, mode: tuple[str, str, str], ours: bool) -> dict[tuple[int, int, int], dict[str, float]]:
    """The shortest times of each workload over the rounds."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for run in _runs(name):
        if (run["model"], run["quant"], _engine(run)) != mode or _is_ours(run) is not ours:
            continue
        for row in run["rows"]:
            known = found.setdefault((row["sequences"], row["prompt"], row["output"]), {})
            for key in ("first_s", "total_s"):
                known[key] = min(known.get(key, math.inf), row[key])
    return found


def _pairs(name: str) -> Iterator[_Pair]:
    runs = [run for run in _runs(name) if "tiny" not in run["model"]]
    for key in dict.fromkeys((run["model"], run["quant"], _engine(run)) for run in runs):
        theirs, ours = _best(name, key, ours=False), _best(name, key, ours=True)
        model = f"{key[0]} {key[1]}"
        for sequences, prompt, output in sorted(theirs.keys() & ours.keys()):
            work = f"{sequences} x {prompt:,}"
            left, right = theirs[sequences, prompt, output], ours[sequences, prompt, output]
            yield _Pair(model, key[2], work, True, left["first_s"], right["first_s"])
            if output > 1:
                steps = [one["total_s"] - one["first_s"] for one in (left, right)]
                yield _Pair(model, key[2], f"{work} + {output}", False, *steps)


def _mean(pairs: list[_Pair]) -> str:
    ratios = [pair.theirs / pair.ours for pair in pairs]
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    counts = Counter(map(outcome, ratios))
    counted = ", ".join(f"{counts[name]} {name}" for name in ("won", "tied", "lost") if counts[name])
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {counted}"


def summary_table(name: str) -> str:
    """For each engine, its time over moereg's: all first tokens, and the steps after them."""
    pairs = list(_pairs(name))
    rows = []
    for key in dict.fromkeys((pair.model, pair.mode) for pair in pairs):
        own = [pair for pair in pairs if (pair.model, pair.mode) == key]
        prefill, decode = ([pair for pair in own if pair.is_prefill is flag] for flag in (True, False))
        rows.append([*key, _mean(prefill), _mean(decode) if decode else ""])
    run = _runs(name)[-1]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    header = ["model", "engine", f"all first tokens, {name}'s time / moereg's", "the steps after them"]
    return f"{table(header, rows)}\n\n{run['device']}; {versions}."


def rows_table(name: str) -> str:
    """Every workload: milliseconds to all first tokens, and of a decode step."""
    rows = []
    for pair in _pairs(name):
        steps = 1 if pair.is_prefill else int(pair.workload.rpartition("+ ")[2]) - 1
        times = [f"{1000 * seconds / steps:,.2f}" for seconds in (pair.theirs, pair.ours)]
        what = "all first tokens" if pair.is_prefill else "step"
        ratio = pair.theirs / pair.ours
        rows.append([pair.model, pair.mode, pair.workload, what, *times, f"{ratio:.2f}", outcome(ratio)])
    header = ["model", "engine", "sequences x prompt + output", "time of", f"{name} ms", "moereg ms", "ratio", ""]
    return table(header, rows)


def arrivals_table(name: str) -> str:
    """Requests that arrive over time: the engine's own figures, then moereg's."""
    found: dict[tuple[str, str, float], dict[bool, dict[str, float]]] = {}
    for run in _runs(name):
        for row in run["arrivals"]:
            key = f"{run['model']} {run['quant']}", _engine(run), row["rate"]
            sides = found.setdefault(key, {})
            known = sides.setdefault(_is_ours(run), row)
            sides[_is_ours(run)] = min(known, row, key=lambda one: one["first_p99_s"])
    rows = []
    for key, sides in found.items():
        if len(sides) < 2:
            continue
        pair = sides[False], sides[True]
        cells = [" / ".join(f"{side['output_per_s']:,.0f}" for side in pair)]
        for field in ("first_p50_s", "first_p99_s", "between_p50_s", "between_p99_s"):
            cells.append(" / ".join(f"{1000 * side[field]:.1f}" for side in pair))
        waits = ["waits"] if any(side["first_p99_s"] > _LONG_S for side in pair) else [""]
        rows.append([key[0], f"{key[2]:g}", *cells, *waits])
    header = ["model", "requests / s", "output tokens / s", "first token p50", "p99", "between tokens p50", "p99", ""]
    return f"{table(header, rows)}\n\n{name} / moereg, milliseconds."


TABLES: Final[dict[str, Callable[[], str]]] = {
    "serving": functools.partial(summary_table, "vLLM"),
    "serving_arrivals": functools.partial(arrivals_table, "vLLM"),
    "serving_rows": functools.partial(rows_table, "vLLM"),
    "sglang": functools.partial(summary_table, "SGLang"),
    "sglang_rows": functools.partial(rows_table, "SGLang"),
}

"""Tables of vLLM engines with moereg's experts beside vLLM's own, from stored runs of `benches.h200.serving`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from benches.markdown import table
from benches.stored import RESULTS, outcome, read

__all__ = ["TABLES"]

_FILE: Final = RESULTS / "serving_h200.json"
_MODES: Final = {"eager": "eager", "graphs": "graphs of decode steps", "compiled": "graphs and compiler"}


class _Pair(NamedTuple):
    """A workload of one engine, with vLLM's experts and with moereg's: the best of every run."""

    model: str
    mode: str
    workload: str
    is_prefill: bool
    theirs: float
    ours: float


_APART: Final = {"--compare", "--zero-experts", "--layers"}
"""Options of runs that are checks, or of part of a model."""


def _runs() -> list[dict[str, Any]]:
    return [run for run in read(_FILE)["runs"] if not run["wishes"] and not _APART & {*run["argv"]}]


def _is_ours(run: dict[str, Any]) -> bool:
    """Whether moereg ran the experts: the plugin may have been missing, or have left them to vLLM."""
    return run["plugin"] != "off" and run["experts"].get("moereg", "unknown") is not None


def _engine(run: dict[str, Any]) -> str:
    ranks = run.get("parallel", 1)
    if ranks == 1:
        return _MODES[run["mode"]]
    return f"{_MODES[run['mode']]}, {ranks} GPUs, {'expert' if run['experts_parallel'] else 'tensor'} parallel"


def _best(mode: tuple[str, str, str], ours: bool) -> dict[tuple[int, int, int], dict[str, float]]:
    """The shortest times of each workload over the rounds."""
    found: dict[tuple[int, int, int], dict[str, float]] = {}
    for run in _runs():
        if (run["model"], run["quant"], _engine(run)) != mode or _is_ours(run) is not ours:
            continue
        for row in run["rows"]:
            known = found.setdefault((row["sequences"], row["prompt"], row["output"]), {})
            for key in ("first_s", "total_s"):
                known[key] = min(known.get(key, math.inf), row[key])
    return found


def _pairs() -> Iterator[_Pair]:
    modes = dict.fromkeys((run["model"], run["quant"], _engine(run)) for run in _runs() if "tiny" not in run["model"])
    for key in modes:
        theirs, ours = _best(key, ours=False), _best(key, ours=True)
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
    counts = [sum(outcome(ratio) == name for ratio in ratios) for name in ("won", "tied", "lost")]
    return f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); {counts[0]} won, {counts[1]} tied, {counts[2]} lost"


def summary_table() -> str:
    """For each engine, vLLM's time over moereg's: all first tokens, and the steps after them."""
    pairs = list(_pairs())
    rows = []
    for key in dict.fromkeys((pair.model, pair.mode) for pair in pairs):
        own = [pair for pair in pairs if (pair.model, pair.mode) == key]
        prefill, decode = ([pair for pair in own if pair.is_prefill is flag] for flag in (True, False))
        rows.append([*key, _mean(prefill), _mean(decode) if decode else ""])
    run = _runs()[0]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    header = ["model", "engine", "all first tokens, vLLM's time / moereg's", "the steps after them"]
    return f"{table(header, rows)}\n\n{run['device']}; {versions}."


def rows_table() -> str:
    """Every workload: milliseconds to all first tokens, and of a decode step."""
    rows = []
    for pair in _pairs():
        steps = 1 if pair.is_prefill else int(pair.workload.rpartition("+ ")[2]) - 1
        times = [f"{1000 * seconds / steps:,.2f}" for seconds in (pair.theirs, pair.ours)]
        what = "all first tokens" if pair.is_prefill else "step"
        ratio = pair.theirs / pair.ours
        rows.append([pair.model, pair.mode, pair.workload, what, *times, f"{ratio:.2f}", outcome(ratio)])
    header = ["model", "engine", "sequences x prompt + output", "time of", "vLLM ms", "moereg ms", "ratio", ""]
    return table(header, rows)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "serving": summary_table,
    "serving_rows": rows_table,
}

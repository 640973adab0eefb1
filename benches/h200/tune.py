"""Cost and worth of `moereg tune`: seconds, held-out numbers of tokens, and whether two runs choose alike.

    python -m benches.h200.tune --out benches/results/tune_h200.json
    python -m benches.h200.tune --layers qwen3-30b-a3b,gpt-oss-120b:mxfp4_w4a16 --out /tmp/tune.json

For each layer, with all installed backends and then without those of --without, it tunes twice into packs of their
own, first with an empty cache of Triton's kernels. A fresh process then times numbers of tokens between those of the
grid, with other inputs: of the planned choice, of the default and of all cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from packaging.requirements import Requirement

from moereg.dispatch import explain_backends
from moereg.evidence.provenance import clocks, provenance
from moereg.measured.pack import read_pack
from moereg.measured.pairs import paired
from moereg.measured.plans import LayerTimes, with_ranges
from moereg.measured.significance import ASKED
from moereg.plugins.loader import current_platform, load_backends
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.tuning.points import Point, midpoint, token_grid
from moereg.tuning.session import Key, entrants, key_of

_ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
_PRIMES: Final = (7, 13, 29, 61, 127, 251, 509, 1021, 2039, 4093, 8191)
_NUM_COMPARED: Final = 40
_SEED: Final = 1  # The sessions of a tune have 0.
_TIE: Final = 1.03
_SIZES: Final = ("experts", "hidden", "intermediate", "top_k")


def main() -> None:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="qwen3-30b-a3b", help="models as NAME or NAME:SCHEME, or sizes as E.H.I.K")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a call")
    parser.add_argument("--without", default="triton", help="backends that the second part does without")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--held-out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.held_out is not None:
        given.out.write_text(json.dumps(_held_out(given.held_out, given.tokens)))
        return
    platform = current_platform()
    required = {Requirement(text).name for cell in load_backends().cells for text in cell.requires}
    document: dict[str, Any] = {**provenance(platform, {"moereg", "torch", "triton", *required}), **clocks(platform)}
    document["parts"] = []
    for layer, without in itertools.product(given.layers.split(","), ("", given.without)):
        part = _part(layer, without, given.tokens)
        document["parts"].append(part)
        given.out.write_text(json.dumps(document, indent=1) + "\n")  # After each, since a machine may be taken back.
        _show(part)


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


def _part(layer: str, without: str, tokens: int) -> dict[str, Any]:
    """One layer, without some backends: two tunes, and what the first one's pack is worth."""
    with tempfile.TemporaryDirectory() as folder:
        packs = [pathlib.Path(folder) / f"{which}.json" for which in ("cold", "warm")]
        environment = {
            **os.environ,
            "MOEREG_DENY": ",".join(filter(None, (os.environ.get("MOEREG_DENY"), without))),
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        runs = [_tune(layer, tokens, {**environment, "MOEREG_TUNING": str(pack)}) for pack in packs]
        found = pathlib.Path(folder) / "held_out.json"
        command = [sys.executable, "-m", "benches.h200.tune", "--held-out", layer, "--tokens", str(tokens)]
        command += ["--out", str(found)]
        subprocess.run(command, cwd=_ROOT, env={**environment, "MOEREG_TUNING": str(packs[0])}, check=True)
        rows = json.loads(found.read_text())
        grid = log_grid(tokens)
        os.environ["MOEREG_DENY"], before = environment["MOEREG_DENY"], os.environ.get("MOEREG_DENY", "")
        plans = [planned(problem_of(layer, tokens), pack) for pack in packs]
        os.environ["MOEREG_DENY"] = before
        return {
            "layer": layer,
            "without": without,
            "cold_seconds": runs[0][0],
            "warm_seconds": runs[1][0],
            "tunes": [run for _, run in runs],
            "held_out": rows,
            "regret": {name: regrets(rows, name) for name in ("default", "planned", "every_layout")},
            "slower_than_default": [row for row in rows if row["planned"] > _TIE],
            "alike": {
                name: statistics.fmean(plans[0][name](at) == plans[1][name](at) for at in grid) for name in plans[0]
            },
            "pack": json.loads(packs[0].read_text()),
        }


def _tune(layer: str, tokens: int, environment: dict[str, str]) -> tuple[float, dict[str, Any]]:
    command = [sys.executable, "-m", "moereg", "tune", *options_of(layer), "--tokens", str(tokens), "--json"]
    start = time.monotonic()
    ran = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - start
    if ran.returncode not in (0, 1):  # A wrong backend is named in what it prints.
        raise SystemExit(f"moereg tune ended with {ran.returncode}")
    return seconds, json.loads(ran.stdout)


def planned(problem: MoEProblem, pack: pathlib.Path) -> dict[str, Callable[[int], Key]]:
    """The cell of a number of tokens, by what selection reads of a pack, and by its times whatever the layout."""
    os.environ["MOEREG_TUNING"] = str(pack)
    selection = explain_backends(problem)
    platform = selection.platform
    plan = [(most, key_of(decision, platform)) for most, decision in selection.plan]
    found, machine = read_pack(pack, is_own=True), entrants(problem, platform)
    places = {found.cells[index].cell_key: index for index in range(len(found.cells))}
    order = [places[key_of(decision, platform)] for decision in machine.decisions]
    (times,) = [LayerTimes(one.rows, one.default) for one in found.layers if one.rows and one.default == order[0]]
    order = [index for index in order if index in {row.cell for row in times.rows}]
    free = with_ranges(times, order, order[0], order[1:])
    every = [(most, found.cells[index].cell_key) for most, index in free]
    return {"planned": lambda tokens: _at(plan, tokens), "every_layout": lambda tokens: _at(every, tokens)}


def _at(plan: Sequence[tuple[int | None, Key]], tokens: int) -> Key:
    return next(key for most, key in plan if most is None or tokens <= most)


def held_out_counts(tokens: int) -> list[int]:
    """Numbers of tokens that no grid has: the middles of its neighbors, and primes."""
    middles = (midpoint(low, high) for low, high in itertools.pairwise(token_grid(tokens)))
    return sorted({*filter(None, middles), *(prime for prime in _PRIMES if prime <= tokens)})


def log_grid(tokens: int) -> list[int]:
    """Numbers of tokens at equal distances of their logarithms."""
    return [round(tokens ** (place / (_NUM_COMPARED - 1))) for place in range(_NUM_COMPARED)]


def _held_out(layer: str, tokens: int) -> list[dict[str, Any]]:
    """Times relative to the default's, in this process, by number of tokens and routing."""
    import torch

    from moereg.platforms import torch_device
    from moereg.tuning.inputs import random_weights
    from moereg.tuning.session import LayerSession

    problem, platform = problem_of(layer, tokens), current_platform()
    choices = planned(problem, pathlib.Path(os.environ["MOEREG_TUNING"]))
    machine, device = entrants(problem, platform), torch_device(platform)
    selection = dataclasses.replace(machine.selection, decisions=machine.decisions)
    session = LayerSession(
        selection, lambda: random_weights(problem, torch.Generator().manual_seed(_SEED), device), device, _SEED
    )
    rows = []
    for at, routing in itertools.product(held_out_counts(tokens), ASKED):
        timed = {row.decision: row.timing for row in session.measure(Point(routing, at)) if row.timing is not None}
        assert machine.default is not None
        default = timed[machine.default]
        ratios = {
            key_of(decision, platform): math.exp(paired(default.samples_us, timing.samples_us)[0])
            for decision, timing in timed.items()
        }
        best = min(ratios, key=ratios.__getitem__)
        rows.append(
            {
                "tokens": at,
                "routing": routing,
                "default_us": default.median_us,
                "default": 1.0,
                **{name: ratios[choice(at)] for name, choice in choices.items()},
                "best": ratios[best],
                "best_backend": best[0],
                "planned_backend": choices["planned"](at)[0],
            }
        )
    return rows


def regrets(rows: Iterable[dict[str, Any]], name: str) -> dict[str, float]:
    """How far a choice is above the best measured: mean, 95th percentile and worst, as fractions."""
    found = sorted(row[name] / row["best"] - 1 for row in rows)
    return {"mean": statistics.fmean(found), "p95": found[math.ceil(0.95 * len(found)) - 1], "worst": found[-1]}


def _show(part: dict[str, Any]) -> None:
    without = f" without {part['without']}" if part["without"] else ""
    print(f"{part['layer']}{without}: {part['cold_seconds']:.0f} s cold, {part['warm_seconds']:.0f} s warm", flush=True)
    for name, found in part["regret"].items():
        print(f"  regret of {name}: " + ", ".join(f"{key} {value:.2%}" for key, value in found.items()))
    for row in part["slower_than_default"]:
        print(f"  {row['planned_backend']} is {row['planned'] - 1:.1%} slower than the default: {row}")
    for name, share in part["alike"].items():
        print(f"  two tunes choose alike by {name} at {share:.1%} of the numbers of tokens")
    print(f"  {part['tunes'][0]['note']}", flush=True)


if __name__ == "__main__":
    main()

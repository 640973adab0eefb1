"""Times this checkout's `triton` kernels beside those of another commit, in one process.

    python -m benches.h200.paired make REVISION FOLDER
    python -m benches.h200.paired time FOLDER OUT.json [--layers NAME...] [--quantized] [--training] [--host]
        [--seconds S]

`make` writes that commit's package into FOLDER under the name `moereg_old`. `time` gives both packages the same weights
and calls, compares their outputs, and times replays of CUDA graphs in turns (old, new, new, old, ...); `--quantized`
takes the board's quantized layers, `--training` times a forward and backward pass, `--host` the host's time of an eager
call. A row is lost where the new time is more than 3 %
above the old one in both of two sessions, so run it twice.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import math
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

import moereg
from benches.board.layers import GPU_LAYERS
from moereg.bench.inputs import ROUTINGS, random_calls, random_weights
from moereg.bench.timing import capture, time_runs
from moereg.numerics.reference import relative_error
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

OLD: Final = "moereg_old"
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096)
_SKEWED: Final = (16, 64, 256, 1024, 4096)
_ROUNDS: Final = 40
_MOST_HOST_TOKENS: Final = 64
"""Above it the device is busy longer than the host."""


def make(revision: str, folder: Path) -> None:
    """Writes a commit's package under the name `moereg_old`."""
    archive = subprocess.run(["git", "archive", revision, "moereg"], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")
    (folder / "moereg").rename(folder / OLD)
    for file in (folder / OLD).rglob("*"):
        if file.suffix == ".py":
            file.write_text(file.read_text().replace("moereg", OLD))
        elif file.is_file():
            file.rename(file.with_name(file.name.replace("moereg", OLD)))


def problems(quantized: bool) -> dict[str, dict[str, Any]]:
    """Keywords of the board's quantized layers, or of its others and of shards whose rows are no multiple of 64."""
    if quantized:
        layers = [layer for layer in GPU_LAYERS if layer.scheme != "unquantized"]
        return {layer.name: {**layer.keywords, "quant": layer.scheme} for layer in layers}
    found = {layer.layer: dict(layer.keywords) for layer in GPU_LAYERS if layer.scheme == "unquantized"}
    for model, ranks in (("qwen3-30b-a3b", 4), ("gpt-oss-120b", 8)):
        keywords = get_shape(model).problem_keywords()
        found[f"{model} TP{ranks}"] = {**keywords, "intermediate_size": keywords["intermediate_size"] // ranks}
    return found


class Side(NamedTuple):
    """One package's kernel and weights of a layer."""

    package: ModuleType
    kernel: Any
    weights: dict[str, torch.Tensor]


def side(name: str, keywords: dict[str, Any], weights: dict[str, torch.Tensor], gradients: tuple[str, ...]) -> Side:
    """Makes a package's `triton` kernel."""
    package = importlib.import_module(name)
    problem = package.MoEProblem(**keywords, gradients=gradients)
    selection = package.select_backend(problem, require="triton")
    given = {key: tensor.detach().requires_grad_(bool(gradients)) for key, tensor in weights.items()}
    own = package.ExpertWeights(**given, quant=keywords.get("quant", "unquantized"))
    kernel = package.make_kernel(problem, own, selection)
    return Side(package, kernel, given)


def rows(skewed: bool) -> Iterator[tuple[str, int]]:
    """Routing and number of tokens of each row."""
    for routing in ROUTINGS if skewed else ROUTINGS[:1]:
        for tokens in TOKENS if routing == ROUTINGS[0] else _SKEWED:
            yield routing, tokens


def forward_runs(sides: dict[str, Side], calls: list[Any], row: dict[str, Any]) -> dict[str, list[Any]]:
    """Replays of each side's calls; the row gets the largest difference between their outputs."""
    outs = {key: [torch.full_like(call.hidden_states, math.nan) for call in calls] for key in sides}
    runs = {}
    for key, one in sides.items():
        eager = [
            lambda one=one, call=call, out=out: one.kernel(*call, out=out)
            for call, out in zip(calls, outs[key], strict=True)
        ]
        for run in eager:
            run()
        runs[key] = capture(eager)
    row["difference"] = max(relative_error(new, old) for new, old in zip(outs["new"], outs["old"], strict=True))
    return runs


def training_runs(sides: dict[str, Side], calls: list[Any], row: dict[str, Any]) -> dict[str, list[Any]]:
    """A forward and a backward pass of each side; the row gets the largest difference between their gradients."""
    found: dict[str, list[torch.Tensor]] = {}

    def step(one: Side, call: Any) -> list[torch.Tensor]:
        x, weights = (tensor.detach().requires_grad_() for tensor in (call.hidden_states, call.topk_weights))
        out = one.kernel(x, weights, call.topk_ids)
        return list(torch.autograd.grad(out.square().mean(), [x, weights, *one.weights.values()]))

    runs: dict[str, list[Callable[[], Any]]] = {}
    for key, one in sides.items():
        found[key] = step(one, calls[0])
        runs[key] = [lambda one=one, call=call: step(one, call) for call in calls]
    row["difference"] = max(relative_error(new, old) for new, old in zip(found["new"], found["old"], strict=True))
    return runs


def host_us(one: Side, call: Any) -> float:
    """The host's time of an eager call, while the device waits."""
    out = torch.empty_like(call.hidden_states)
    for _ in range(20):
        one.kernel(*call, out=out)
    torch.cuda.synchronize()
    # Fewer launches than the driver queues: the host never waits for the device.
    torch.cuda._sleep(100_000_000)
    start = time.perf_counter()
    for _ in range(60):
        one.kernel(*call, out=out)
    taken = (time.perf_counter() - start) / 60 * 1e6
    torch.cuda.synchronize()
    return taken


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, shown as they are measured."""
    device, found = torch.device("cuda", torch.cuda.current_device()), []
    gradients = ("hidden_states", "topk_weights", "weights") if arguments.training else ()
    for name, keywords in problems(arguments.quantized).items():
        if arguments.layers and name.replace(" ", "-") not in arguments.layers:
            continue
        weights = random_weights(MoEProblem(**keywords), torch.Generator().manual_seed(0), device).tensors()
        sides = {"old": side(OLD, keywords, weights, gradients), "new": side("moereg", keywords, weights, gradients)}
        for routing, tokens in rows(skewed=not arguments.training and not arguments.quantized):
            if arguments.training and tokens not in (16, 256, 1024, 4096):
                continue
            calls = random_calls(MoEProblem(**keywords), tokens, routing, tokens, device)
            row: dict[str, Any] = {"layer": name, "routing": routing, "tokens": tokens}
            runs = (training_runs if arguments.training else forward_runs)(sides, calls, row)
            times = time_runs(runs, device, rounds=_ROUNDS, seconds=arguments.seconds)
            row |= {f"{key}_us": timing.median_us for key, timing in times.items()}
            row["ratio"] = row["new_us"] / row["old_us"]
            if arguments.host and routing == ROUTINGS[0] and tokens <= _MOST_HOST_TOKENS:
                turns = [list(sides), list(sides)[::-1]] * 3
                hosts = [{key: host_us(sides[key], calls[0]) for key in turn} for turn in turns]
                row |= {f"{key}_host_us": statistics.median(each[key] for each in hosts) for key in sides}
            found.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
            del runs
        del sides, weights
        torch.cuda.empty_cache()
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Ratios by layer and routing, and their mean."""
    lines = [f"{'new / old':36} " + " ".join(f"{tokens:>6}" for tokens in TOKENS)]
    for layer, routing in dict.fromkeys((row["layer"], row["routing"]) for row in found):
        at = {row["tokens"]: row["ratio"] for row in found if (row["layer"], row["routing"]) == (layer, routing)}
        cells = (f"{at[tokens]:6.3f}" if tokens in at else " " * 6 for tokens in TOKENS)
        lines.append(f"{f'{layer} {routing}':36} " + " ".join(cells))
    mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in found))
    worst = max(found, key=lambda row: float(row["ratio"]))
    lines.append(
        f"mean {mean:.4f} over {len(found)} rows, worst {worst['ratio']:.3f} ({worst['layer']}, "
        f"{worst['routing']}, {worst['tokens']}), largest difference {max(r['difference'] for r in found):.2g}"
    )
    hosts = [row for row in found if "new_host_us" in row]
    if hosts:
        ratios = [row["new_host_us"] / row["old_host_us"] for row in hosts]
        lines.append(
            f"host of an eager call: {statistics.median(ratios):.3f} of the old time in the median "
            f"({hosts[0]['new_host_us']:.1f} and {hosts[0]['old_host_us']:.1f} us at {hosts[0]['tokens']} token)"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("revision")
    making.add_argument("folder", type=Path)
    timing = commands.add_parser("time")
    timing.add_argument("folder", type=Path)
    timing.add_argument("out", type=Path)
    timing.add_argument("--layers", nargs="+")
    timing.add_argument("--quantized", action="store_true")
    timing.add_argument("--training", action="store_true")
    timing.add_argument("--host", action="store_true")
    timing.add_argument("--seconds", type=float, default=0.25)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.revision, arguments.folder)
        return
    sys.path.insert(0, str(arguments.folder))
    found = measure(arguments)
    arguments.out.write_text(
        json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": found})
    )
    print(table(found))


if __name__ == "__main__":
    assert moereg
    main()

"""The cost of the first choice and of a later one beside one wheel and beside fifty, each in fresh interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.wheels import install

MOST_MORE_MS = 300.0
MOST_LATER_MS = 1.0
ROOT = Path(__file__).parents[1]
Costs = dict[str, float]
"""Milliseconds of CPU time: `scan`, `load`, `first` (the first selection, which loads) and `later` (each other one)."""

WHEEL = """
from moereg.author import Experts, Facts, PermutedWeights, register_moe_backend

moereg_api = "1"


@register_moe_backend(
    name={name!r}, priority={number}, quant_schemes=("unquantized", "nvfp4"),
    platforms=("cuda:sm80+", "rocm:gfx942", "cpu"), requires=("torch>=2.0",),
)
class Strangers(Experts):
    facts = Facts(
        activations=frozenset({{"silu"}}),
        activation_formats=frozenset({{"standard"}}),
        dtypes=frozenset({{"bfloat16"}}),
        placements=frozenset({{"contiguous"}}),
    )
    layouts = ("canonical",)

    @classmethod
    def unsupported_reasons(cls, problem, platform):
        return [] if problem.hidden_size % 128 == 0 else ["requires hidden_size % 128 == 0"]

    def permute_weights(self, weights, problem):
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        return (0,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        out.fill_(7.0)
"""
MEASURE = """
import json, time
import moereg.author, moereg.layer.factory
import moereg.backends.torch_moe, moereg.backends.triton_moe
from moereg.selection import loader as discovery
from moereg.selection import plugin_status as plugins

def spent(function, times=1):
    started = time.process_time()
    for _ in range(times):
        function()
    return (time.process_time() - started) * 1e3 / times

problem = moereg.MoEProblem(num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8)
select = lambda: moereg.select_backend(problem)
# The folders have been read once when the loader reads them.
costs = {"scan": spent(lambda: plugins.scan())}
costs["load"] = spent(discovery.load_backends)
costs["first"] = costs["load"] + spent(select)
costs["later"] = min(spent(select, 20) for _ in range(10))
print(json.dumps(costs))
"""


def install_wheels(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        name = f"wheel_{number:02d}"
        files = {f"moereg_{name}.py": WHEEL.format(name=name, number=number)}
        install(folder, f"moereg-{name}", {name: f"moereg_{name}"}, files)
    return folder


def costs_beside(folder: Path, rounds: int = 3) -> Costs:
    """The lowest cost of each step in several interpreters, the first of which writes the wheels' byte code."""
    paths = os.pathsep.join((str(folder), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    found: list[Costs] = []
    for _ in range(rounds + 1):
        process = subprocess.run(
            [sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        found.append(json.loads(process.stdout))
    return {step: min(costs[step] for costs in found[1:]) for step in found[0]}


def bench_first_selection_beside_fifty_wheels(benchmark: Any, tmp_path: Path) -> None:
    one = costs_beside(install_wheels(tmp_path / "one", 1))
    folder = install_wheels(tmp_path / "fifty", 50)
    fifty = benchmark.pedantic(costs_beside, args=(folder,), rounds=1)
    for step in one:
        benchmark.extra_info[step] = f"{one[step]:.2f} ms beside one wheel, {fifty[step]:.2f} beside fifty"
        print(f"\n{step:6} {benchmark.extra_info[step]}", end="")
    assert fifty["first"] - one["first"] < MOST_MORE_MS
    assert fifty["later"] < MOST_LATER_MS

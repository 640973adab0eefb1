"""A layer's training step beside SonicMoE's, each in a process of its own, in turns.

    python -m benches.h200.sonic_moe [--peer-path FOLDER...] [--shapes T,H,I,E,K...] [--json FILE]

SonicMoE (github.com/Dao-AILab/sonic-moe) pins a release of CuTe DSL that the `cutlass` backend excludes, so its process
has FOLDER in front of its PYTHONPATH. A step is forward and backward in bfloat16, for all gradients. Routing is given,
uniform and equal for both; each sorts it anew in every step. The output and gradients of a few tokens, and gradients of
the experts with the fewest and the most rows, are compared with fp64 autograd first: what is wrong is not timed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from subprocess import PIPE
from typing import Any, Final

import torch

from benches.h200.training import timed
from moereg.bench.inputs import random_call, random_weights
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import make_kernel
from moereg.numerics.gradients import GRADIENT_BOUNDS, reference_gradients
from moereg.numerics.reference import relative_error
from moereg.platforms import installed_versions, probe_platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

SHAPES: Final = ("24576,1536,256,128,8", "32768,4096,256,256,16", "16384,2048,768,128,8")
"""Two of SonicMoE's own rows, and Qwen3-30B-A3B."""
SIZES: Final = ("hidden_size", "intermediate_size", "num_experts", "top_k")
SIDES: Final = ("moereg", "sonic")
ROUNDS: Final = 9
LARGEST_ERROR: Final = GRADIENT_BOUNDS["bfloat16"]
GRADIENTS: Final = frozenset({"hidden_states", "topk_weights", "weights"})
PACKAGES: Final = ("moereg", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl", "torch", "triton")


def sonic_layer(w13: torch.Tensor, w2: torch.Tensor) -> Callable[..., torch.Tensor]:
    """SonicMoE 0.1.2's `moe_TC_softmax_topk_layer` behind its router, with gate and up rows of w13 in turn."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import TC_topk_router_metadata_triton, _DownProjection, _UpProjection

    num_experts = len(w13)
    w1, w2 = w13.permute(1, 2, 0), w2.permute(1, 2, 0)  # [2I, H, E] and [H, I, E]

    def run(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        (num_tokens, top_k), num_routes = topk_ids.shape, topk_ids.numel()
        counts, offsets = topk_ids.new_empty(num_experts), topk_ids.new_empty(num_experts + 1)
        indices = [topk_ids.new_empty(num_routes) for _ in range(3)]
        TC_topk_router_metadata_triton(topk_ids, num_experts, counts, offsets, *indices)
        common = *indices, None, False, ActivationType.SWIGLU  # All tokens have as many experts.
        act, pre = _UpProjection.apply(hidden_states, w1, None, offsets, num_routes, top_k, *common, False, False)
        return _DownProjection.apply(act, pre, w2, None, topk_weights, offsets, num_tokens, top_k, *common)

    return run


def in_turn(w13: torch.Tensor, size: int) -> torch.Tensor:
    """[E,2I,H] as `size` parts, with a row of each in turn: 2 interleaves gate and up, I separates them again."""
    return w13.unflatten(1, (size, -1)).transpose(1, 2).flatten(1, 2)


class Step:
    """One side's layer of a shape, and its inputs, which both sides draw from the same seeds."""

    def __init__(self, side: str, shape: str) -> None:
        num_tokens, *sizes = map(int, shape.split(","))
        self.problem = problem = MoEProblem(**dict(zip(SIZES, sizes, strict=True)), gradients=GRADIENTS)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.weights = weights = random_weights(problem, torch.Generator().manual_seed(0), device)
        self.call = random_call(problem, num_tokens, "uniform", torch.Generator(device).manual_seed(0))
        self.grad_out = self.call.hidden_states.roll(1, 0)
        self.is_sonic = side == "sonic"
        w13 = in_turn(weights.w13, 2) if self.is_sonic else weights.w13
        leaves = (self.call.hidden_states, self.call.topk_weights, w13, weights.w2)
        self.leaves = [leaf.requires_grad_() for leaf in leaves]
        chosen = select_backend(problem, require="triton" if device.type == "cuda" else None)
        self.layer = sonic_layer(w13, weights.w2) if self.is_sonic else make_kernel(problem, weights, chosen)

    def run(self) -> torch.Tensor:
        """Forward and backward; gradients are made anew. Returns the output."""
        for leaf in self.leaves:
            leaf.grad = None
        out = self.layer(*self.call)
        out.backward(self.grad_out)
        return out.detach()

    def check(self) -> dict[str, Any]:
        """The largest relative `errors` of the output and of each gradient, and what `failed` by them."""
        out, ids = self.run(), self.call.topk_ids
        hidden_states, topk_weights, w13, w2 = (leaf.grad for leaf in self.leaves)
        w13 = in_turn(w13, self.problem.intermediate_size) if self.is_sonic else w13
        tokens = torch.arange(len(ids), device=ids.device)
        some = tokens[:: len(ids) // 8]
        counts = ids.flatten().bincount(minlength=self.problem.num_experts)
        experts = torch.stack([counts.argmin(), counts.argmax()])
        found = self._compare(some, ids[some].unique(), out=out, hidden_states=hidden_states, topk_weights=topk_weights)
        found += self._compare(tokens, experts, w13=w13, w2=w2)
        errors = dict(sorted(found, key=lambda one: (one[1] != one[1], one[1])))  # NaN is the largest.
        wrong = ", ".join(name for name, error in errors.items() if not error <= LARGEST_ERROR)
        return {"errors": errors, **({"failed": f"wrong: {wrong}"} if wrong else {})}

    def _compare(self, tokens: torch.Tensor, experts: torch.Tensor, **given: torch.Tensor) -> list[tuple[str, float]]:
        """Names and errors of what depends on these tokens' routes to these experts alone."""
        expert_map = torch.full((self.problem.num_experts,), -1, dtype=torch.int32, device=experts.device)
        expert_map[experts] = torch.arange(len(experts), dtype=torch.int32, device=experts.device)
        problem = dataclasses.replace(self.problem, num_local_experts=len(experts), placement="map")
        weights = ExpertWeights(**{name: each.detach()[experts] for name, each in self.weights.tensors().items()})
        call = (each.detach()[tokens] for each in self.call)
        truth = reference_gradients(problem, weights, *call, self.grad_out[tokens], expert_map)
        rows = {name: each[experts if name in ("w13", "w2") else tokens] for name, each in given.items()}
        found = [("out", relative_error(rows.pop("out"), truth.output))] if "out" in rows else []
        return found + [(one.name.split()[0], one.error) for one in truth.compare(rows)]


def answers(side: str, questions: Iterable[str]) -> Iterator[dict[str, Any]]:
    """One side's answer to each line: of a shape, its check; of `go`, the time of a step of the last shape."""
    versions = {name: version for name, version in installed_versions().items() if name in PACKAGES}
    step: Any = None
    for question in map(str.strip, questions):
        try:
            if question == "go":
                step.run()  # The device comes from the other process.
                yield {"ms": timed(step.run)}
            else:
                step = None
                torch.cuda.empty_cache()
                step = Step(side, question)
                yield {"versions": versions, **step.check()}
        except Exception as error:  # It is this side's failure, whatever it is.
            yield {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def ask(process: subprocess.Popen[str], question: str) -> dict[str, Any]:
    """A process's answer, which says `failed` if it has ended."""
    with contextlib.suppress(BrokenPipeError):
        print(question, file=process.stdin, flush=True)
    line = process.stdout.readline() if process.stdout else ""
    return json.loads(line) if line else {"failed": f"the process ended with {process.wait()}"}


def measure(sides: dict[str, subprocess.Popen[str]], shape: str) -> dict[str, Any]:
    """One row: what each answered alone on the device, and its median `ms` over turns unless it failed."""
    row = {name: ask(side, shape) for name, side in sides.items()}
    turns: dict[str, list[float]] = {name: [] for name in sides}
    for name in list(sides) * ROUNDS:
        if "failed" not in row[name]:
            row[name] |= ask(sides[name], "go")
            turns[name].append(row[name].pop("ms", math.nan))
    for name, side in row.items():
        side |= {} if "failed" in side else {"ms": statistics.median(turns[name])}
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--peer-path", nargs="*", default=[])
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # What libraries print must not come between the answers.
        for answer in answers(options.side, sys.stdin):
            print(json.dumps(answer), file=out, flush=True)
        return 0
    sides, rows, platform = {}, {}, probe_platform()
    for name in reversed(SIDES):
        folders = [*(options.peer_path if name == "sonic" else []), os.environ.get("PYTHONPATH", "")]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
        command = [sys.executable, "-m", "benches.h200.sonic_moe", "--side", name]
        sides[name] = subprocess.Popen(command, env=os.environ | path, stdin=PIPE, stdout=PIPE, text=True)
    for shape in options.shapes:
        row = rows[shape] = measure(sides, shape)
        ours, theirs = (row[name].get("ms", math.nan) for name in SIDES)
        print(f"{shape}: {ours:.3f} ms / {theirs:.3f} ms = {theirs / ours:.3f} {json.dumps(row)}", flush=True)
        if options.json:
            found = {"schema": 1, **provenance(platform, PACKAGES), **clocks(platform), "rows": rows}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    for side in sides.values():
        side.communicate()
    return 0 if all("ms" in side for row in rows.values() for side in row.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

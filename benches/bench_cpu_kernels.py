"""The kernels of moereg-cpu on this CPU against other people's, on the same weights and in one process.

    make build-cpu .cpu-peers/.stamp
    PYTHONPATH=build/moereg-cpu/site:. python -m benches.bench_cpu_kernels [--layers NAME ...] [--schemes S ...]
        [--tokens T ...] [--threads N ...] [--rounds 7] [--json FILE]

Layers in bfloat16 run on moereg-cpu, on moereg's `torch`, on each experts implementation of transformers and on the
peers of `benches.cpu_peers`; quantized ones on moereg-cpu beside its own bfloat16. Every round runs each once, in
rotated order, on inputs and routings that rotate too, with cold caches; a time is the median. What misses the reference
gets no time, and what is missing says why. A row's bytes are those of its active experts, and stand beside the rate at
which as many threads of the same process read memory that was written before.

FILE keeps the rows of earlier runs with the same facts, so that a table can be measured in parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benches.bench_torch_cpu import CPU, OTHER_BYTES, TOLERANCE, Shape, peer_module
from benches.cpu_peers import PEERS, MissingPeer
from benches.stored import earlier_rows_of, instruction_set
from moereg.bench.inputs import Call, random_calls, random_weights
from moereg.bench.timing import time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import provenance
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import probe_platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

__all__ = ["LAYERS", "OURS", "main"]

OURS: Final = "moereg-cpu"
PLAIN: Final = "unquantized"
LAYERS: Final = (
    Shape("qwen3-30b-a3b", num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8),
    Shape("olmoe-1b-7b", num_experts=64, hidden_size=2048, intermediate_size=1024, top_k=8),
    Shape("mixtral-8x7b / 4", num_experts=8, hidden_size=4096, intermediate_size=3584, top_k=2),
    Shape("gpt-oss-20b, silu", num_experts=32, hidden_size=2880, intermediate_size=2880, top_k=4),
)
SCHEMES: Final = (PLAIN, "int8_w8a16", "int4_w4a16_g128", "int4_w4a16_g32", "mxfp4_w4a16")
NUM_TOKENS: Final = (1, 2, 4, 8, 16, 64, 256)
APART: Final = ("ktransformers",)
"""Timed after the others, since its threads spin on after a call and slow what comes next."""
READ_BYTES: Final = 1 << 30
CHECKED_TOKENS: Final = 4
"""Tokens of a call that are compared with the reference: each token's output is its own."""

Run = Callable[[Call], torch.Tensor]


def read_rate(num_threads: int) -> float:
    """GB/s of reading memory by the library's own loop, a part of it for each thread; the best of a few."""
    from moereg_cpu.library import load_library

    library = load_library()
    memory, part = torch.ones(READ_BYTES, dtype=torch.uint8), READ_BYTES // num_threads
    rates = []
    for _ in range(7):
        threads = [
            # ctypes lets go of the interpreter's lock.
            threading.Thread(target=library.read, args=(memory.data_ptr() + number * part, part, library.table()))
            for number in range(num_threads)
        ]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append(READ_BYTES / (time.perf_counter() - start) / 1e9)
    return max(rates)


def _runs(
    shape: Shape, problem: MoEProblem, weights: ExpertWeights, num_threads: int
) -> tuple[dict[str, Run], dict[str, str]]:
    """Kernels that run a bfloat16 layer, and reasons why others do not."""
    runs: dict[str, Run] = {OURS: _backend("cpu", problem, weights), "torch": _backend("torch", problem, weights)}
    notes: dict[str, str] = {}
    module = peer_module(shape, weights)

    def transformers(name: str, call: Call) -> torch.Tensor:
        module.config._experts_implementation = name
        result: torch.Tensor = module(call.hidden_states, call.topk_ids.long(), call.topk_weights)
        return result

    for name in ("eager", "grouped_mm"):
        runs[name] = functools.partial(transformers, name)
    for name, make in PEERS.items():
        try:
            run = make(problem, weights, num_threads)
        except (MissingPeer, OSError, ImportError) as error:
            notes[name] = str(error).partition("\n")[0]
        else:
            runs[name] = functools.partial(lambda run, call: run(*call), run)
    return runs, notes


def _backend(name: str, problem: MoEProblem, weights: ExpertWeights) -> Run:
    kernel = make_kernel(problem, weights, select_backend(problem, require=name))
    return lambda call: kernel(*call)


def _check(
    runs: dict[str, Run], problem: MoEProblem, weights: ExpertWeights, call: Call, bound: float, notes: dict[str, str]
) -> None:
    """Takes out what is wrong."""
    few = Call(*(each[:CHECKED_TOKENS] for each in call))
    expected = reference_experts(problem, weights, *few, computes=problem.quant)
    for name in list(runs):
        error = relative_error(runs[name](call)[:CHECKED_TOKENS], expected)
        if not error <= bound:
            notes[name] = f"wrong: error {error:.1e}"
            del runs[name]


def measure(
    layers: Sequence[Shape],
    schemes: Sequence[str],
    token_counts: Sequence[int],
    thread_counts: Sequence[int],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Rows, one layer's weights at a time."""
    rates = {}
    for num_threads in thread_counts:
        torch.set_num_threads(num_threads)
        rates[num_threads] = read_rate(num_threads)
        _progress(f"{num_threads} threads read {rates[num_threads]:.1f} GB/s")
    for shape in layers:
        plain = MoEProblem(**_sizes(shape), dtype="bfloat16")
        plain_weights = random_weights(plain, torch.Generator().manual_seed(1), CPU)
        ours_plain = _backend("cpu", plain, plain_weights)
        for scheme in schemes:
            problem = dataclasses.replace(plain, quant=scheme)
            is_plain = scheme == PLAIN
            weights = plain_weights if is_plain else random_weights(problem, torch.Generator().manual_seed(1), CPU)
            for num_threads in thread_counts:
                torch.set_num_threads(num_threads)
                if is_plain:
                    made, missing = _runs(shape, problem, weights, num_threads)
                else:
                    made, missing = {OURS: _backend("cpu", problem, weights)}, {}
                for num_tokens in token_counts:
                    calls = random_calls(problem, num_tokens, "uniform", 2, CPU)
                    runs, notes = dict(made), dict(missing)
                    bound = TOLERANCE["bfloat16"] if is_plain else layer_tolerance(problem, num_tokens, problem.quant)
                    _check(runs, problem, weights, calls[0], bound, notes)
                    if not is_plain:
                        runs["bfloat16"] = ours_plain
                    row = _row(weights, runs, calls, rounds)
                    yield {
                        "layer": shape.name,
                        "scheme": scheme,
                        "threads": num_threads,
                        "num_tokens": num_tokens,
                        "notes": notes,
                        "read_gbps": rates[num_threads],
                        **row,
                    }
                del made, runs
                gc.collect()
            del weights


def _sizes(shape: Shape) -> dict[str, int]:
    return {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape) if field.name != "name"}


def _row(weights: ExpertWeights, runs: Mapping[str, Run], calls: Sequence[Call], rounds: int) -> dict[str, Any]:
    other = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    times = {}
    for is_apart in (False, True):
        names = [name for name in runs if (name in APART) is is_apart]
        timed = {name: [functools.partial(runs[name], call) for call in calls] for name in names}
        timings = time_runs(timed, CPU, rounds, before=lambda: other.add_(1)) if timed else {}
        times |= {name: timing.median_us for name, timing in timings.items()}
    expert_bytes = sum(tensor[0].nbytes for tensor in weights.tensors().values())
    active = statistics.mean(len(call.topk_ids.unique()) for call in calls)
    gbps = active * expert_bytes / times[OURS] / 1e3 if OURS in times else None
    return {"times_us": times, "weights_gbps": gbps}


def _progress(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _line(row: Mapping[str, Any]) -> str:
    times = "  ".join(f"{name} {time_us / 1e3:.2f}" for name, time_us in row["times_us"].items())
    rate = "-" if row["weights_gbps"] is None else f"{row['weights_gbps'] / row['read_gbps']:.0%}"
    where = f"{row['layer']} {row['scheme']} {row['threads']} threads T={row['num_tokens']}"
    return f"{where}: {times} ms, {rate} of memory" + "".join(f"; {name}: {why}" for name, why in row["notes"].items())


_KEY: Final = ("layer", "scheme", "threads", "num_tokens")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench.

    Returns:
        0; 1 where our own result was wrong in some row; 2 where FILE is of another machine, commit or setting.
    """
    options = _parser().parse_args(arguments)
    names = ("torch", "transformers", "moereg-cpu")
    facts = {
        "kind": "cpu_kernels",
        **provenance(probe_platform(), names),
        "instruction_set": instruction_set(),
        "rounds": options.rounds,
    }
    try:
        rows = earlier_rows_of(options.json, facts, ("device", "versions", "commit", "instruction_set", "rounds"))
    except ValueError as error:
        print(f"bench_cpu_kernels: {error}", file=sys.stderr)
        return 2
    layers = [layer for layer in LAYERS if layer.name in options.layers]
    is_right = True
    with torch.inference_mode():
        for row in measure(layers, options.schemes, options.tokens, options.threads, options.rounds):
            print(_line(row), flush=True)
            is_right &= OURS in row["times_us"]
            rows = [one for one in rows if any(one[key] != row[key] for key in _KEY)] + [row]
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps({"schema": 1, **facts, "rows": rows}, indent=1) + "\n")
    return 0 if is_right else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The kernels of moereg-cpu against other people's, on this CPU.")
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=SCHEMES, metavar="S", help=", ".join(SCHEMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=NUM_TOKENS, help="of a call")
    parser.add_argument("--threads", nargs="+", type=int, default=(1, 2), help="1 and 2 by default")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each in a row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())

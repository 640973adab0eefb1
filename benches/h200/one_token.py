"""Breakdown of one token's time in bf16 on an H200: what graphs, launches and bytes cost without a layer.

    python -m benches.h200.one_token --json FILE [--models M ...]

Each row is timed as in `benches.h200.table`: CUDA graphs replayed over rotated inputs, median. Beside the layer, in the
same process and interleaved with it: a graph of as many kernels that do nothing, and one of a kernel that reads as many
bytes as the active experts have, from other places in each replay. The layer cannot be faster than either; what it
takes beyond both is finding the experts, waiting for the first product's slowest program, and filling the GPU twice.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from benches.h200.table import check, make_call, make_weights
from moereg.bench import roofline
from moereg.bench.inputs import num_calls
from moereg.bench.timing import Run, capture, kernel_runs, time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import make_kernel
from moereg.numerics.tolerances import tolerance
from moereg.platforms import probe_platform
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

SHARDS = {
    "olmoe-1b-7b": 1,
    "qwen3-30b-a3b": 1,
    "qwen3-30b-a3b TP4": 4,
    "gpt-oss-20b": 1,
    "deepseek-v2-lite": 1,
    "mixtral-8x7b": 1,
}
"""Layers by name: into how many shards their intermediate size is cut."""
_WORDS = 4096
"""fp32 elements that one program of the reader takes at a time: 16 KB."""


@triton.jit
def _nothing_kernel(out_ptr) -> None:
    """Reads and writes nothing; the argument is there because a launch has one."""


@triton.jit
def _read_kernel(words_ptr, out_ptr, first, num_pieces, WORDS: tl.constexpr) -> None:
    """Sums `num_pieces` pieces of WORDS fp32 elements; programs take them in turns, and some take one fewer."""
    column = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.float32)
    place = first + tl.program_id(0).to(tl.int64) * WORDS
    for _ in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0), num_stages=4):
        total += tl.load(words_ptr + place + column)
        place += tl.num_programs(0).to(tl.int64) * WORDS
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))


def nothing_runs(num_kernels: int, num_runs: int) -> list[Run]:
    """Graphs of `num_kernels` kernels that do nothing."""
    out = torch.empty(1, device="cuda")

    def launch() -> None:
        for _ in range(num_kernels):
            _nothing_kernel[(1,)](out)

    launch()
    return capture([launch] * num_runs)


class Reading(NamedTuple):
    """Bytes that the reader reads.

    Attributes:
        num_pieces: Of 16 KB each, side by side.
        places: First element of each run, a multiple of a piece's.
    """

    num_pieces: int
    places: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Time of one run."""
        return 4 * _WORDS * self.num_pieces


def place_runs(num_bytes: int, num_words: int, num_runs: int) -> Reading:
    """Lays runs over the words, side by side, starting again at the front where these end.

    Args:
        num_bytes: Rounded to whole pieces, at least one.
        num_words: fp32 elements that there are.
        num_runs: That many places.

    Raises:
        ValueError: The words are too few for one run.
    """
    num_pieces = max(1, round(num_bytes / 4 / _WORDS))
    room = num_words // _WORDS // num_pieces
    if room == 0:
        raise ValueError(f"a run of {num_bytes:,} bytes needs as many to read, got {4 * num_words:,}; take more words")
    return Reading(num_pieces, tuple(number % room * num_pieces * _WORDS for number in range(num_runs)))


def read_runs(reading: Reading, words: torch.Tensor) -> list[Run]:
    """Graphs of one kernel that reads some of `words`, each from another place.

    Args:
        reading: Of these words.
        words: [N] fp32, larger than the L2 by far.
    """
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    programs = min(4 * multiprocessors, reading.num_pieces)
    out = torch.empty(programs, device="cuda")

    def launch(place: int) -> None:
        _read_kernel[(programs,)](words, out, place, reading.num_pieces, WORDS=_WORDS, num_warps=8)

    runs = [functools.partial(launch, place) for place in reading.places]
    runs[0]()
    return capture(runs)


def kernels_us(runs: Sequence[Run]) -> dict[str, float]:
    """Time of each kernel of one run, by torch's profiler, in the order of launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for run in runs:
            run()
        torch.cuda.synchronize()
    times = {event.key: event.self_device_time_total / len(runs) for event in profile.key_averages()}
    # Calls of the host are events too.
    return {name: us for name, us in times.items() if us > 0}


def measure(name: str, words: torch.Tensor) -> dict[str, Any]:
    """One layer at one token."""
    keywords = {**get_shape(name.split()[0]).problem_keywords(), "activation": "silu", "has_bias": False}
    keywords["intermediate_size"] //= SHARDS[name]
    problem = MoEProblem(**keywords)
    weights = make_weights(problem)
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
    calls = [make_call(problem, 1) for _ in range(num_calls(1))]
    error = check(kernel, problem, weights, calls[0])
    if not error <= tolerance(problem.quant, problem.dtype):
        return {"model": name, "error": error}
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    layer = kernel_runs(kernel, calls, outs)
    parts = kernels_us(layer[:64])
    num_bytes = int(roofline.work_of(problem, calls[0]).num_bytes)
    reading = place_runs(num_bytes, words.numel(), len(calls))
    runs = {
        "layer": layer,
        "nothing": nothing_runs(len(parts), len(calls)),
        "one_nothing": nothing_runs(1, len(calls)),
        "read": read_runs(reading, words),
    }
    times = {key: timing.median_us for key, timing in time_runs(runs, outs[0].device, 400, 0.5).items()}
    return {
        "model": name,
        "error": error,
        "num_bytes": num_bytes,
        "read_bytes": reading.num_bytes,
        "kernels_us": parts,
        **times,
    }


def show(row: dict[str, Any]) -> str:
    """A row of the page's table."""
    if "layer" not in row:
        return f"| {row['model']} | wrong: {row['error']:.1e} |"
    beyond = row["layer"] - row["read"]
    kernels = ", ".join(f"{name} {us:.1f}" for name, us in row["kernels_us"].items())
    return (
        f"| {row['model']} | {row['layer']:.1f} | {row['num_bytes'] / 1e6:.1f} | {row['one_nothing']:.1f} | "
        f"{row['nothing']:.1f} | {row['read']:.1f} | {beyond:.1f} | {kernels} |"
    )


def main() -> int:
    """Measures, prints the table, writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--models", nargs="*", choices=list(SHARDS), default=list(SHARDS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benches.h200.one_token: needs a CUDA GPU; this machine has none", file=sys.stderr)
        return 3
    words = torch.ones(1 << 30, device="cuda")
    print(
        "| layer | us | MB | one empty kernel | as many empty kernels | reading the bytes | beyond reading | kernels |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name in arguments.models:
        rows.append(measure(name, words))
        print(show(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    platform = probe_platform()
    record = {"schema": 1, **provenance(platform, ("torch", "triton")), **clocks(platform), "rows": rows}
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any("layer" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

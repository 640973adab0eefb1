"""The `torch` backend on this CPU against transformers' own expert implementations, on the same weights.

    python -m benches.bench_torch_cpu [--shapes NAME ...] [--dtypes D ...] [--tokens T ...] [--rounds 15] [--each S]
                                      [--busy N] [--json FILE]

Every round times each implementation once, in rotated order, on inputs and routings that rotate too; a row's time is
the median over rounds. Caches are emptied before each such call, as the rest of a model does: peers share tensors, so
that each would find what the one before it has read. An implementation that misses the fp32 reference gets no number.
Ceilings are measured in the same process; a row's share is the larger of its share of the matmul rate and of the memory
bandwidth, and counts the weights of active experts only. `--busy N` measures beside N processes that compute without
end; means count there, since what a neighbor costs is a few calls that wait long.

FILE is written after each row. It keeps the rows of earlier runs with the same machine, versions, commit and settings,
so that a table can be measured in parts; a row that is measured again is replaced. As an older CPU:
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 before the command, and a file of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benches.stored import earlier_rows_of, instruction_set
from moereg.bench import roofline
from moereg.bench.inputs import Call, random_call, random_weights
from moereg.bench.timing import time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.platforms import probe_platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

__all__ = ["Ceilings", "Row", "Shape", "main", "measure", "peer_module"]

CPU: Final = torch.device("cpu")
OURS: Final = "moereg"
PEERS: Final = ("eager", "batched_mm", "grouped_mm")
NUM_TOKENS: Final = (1, 16, 128, 512)
DTYPES: Final = ("bfloat16", "float32")
NUM_INPUTS: Final = 4
# transformers rounds routing weights and sums to bf16, which the reference does not.
TOLERANCE: Final = {"bfloat16": 1.2e-2, "float32": 1e-5}
GATHERED_BYTES_LIMIT: Final = 8e9


@dataclasses.dataclass(frozen=True)
class Shape:
    """One model's experts."""

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int


OTHER_BYTES: Final = 128 << 20
"""Written before each call; more than the caches of the machines that this ran on."""

SHAPES: Final = (
    Shape("mixtral", num_experts=8, hidden_size=1024, intermediate_size=3584, top_k=2),
    Shape("olmoe", num_experts=64, hidden_size=2048, intermediate_size=1024, top_k=8),
    Shape("qwen3-moe", num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8),
    Shape("small", num_experts=32, hidden_size=1024, intermediate_size=512, top_k=4),
    Shape("tiny", num_experts=64, hidden_size=256, intermediate_size=256, top_k=8),
    Shape("few-256", num_experts=8, hidden_size=1024, intermediate_size=256, top_k=2),
    Shape("few-4096", num_experts=8, hidden_size=1024, intermediate_size=4096, top_k=2),
    Shape("many-256", num_experts=128, hidden_size=1024, intermediate_size=256, top_k=8),
    Shape("many-4096", num_experts=64, hidden_size=512, intermediate_size=4096, top_k=8),
)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Ceilings of this machine in this process.

    Attributes:
        gflops: By dtype, one large product.
        gbps: One large read.
    """

    gflops: dict[str, float]
    gbps: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured cell of the table.

    Attributes:
        shape, dtype, num_tokens: Which.
        times_us: Median time by implementation; absent where skipped or wrong.
        means_us: Likewise, of all calls; absent too where only one was made.
        notes: Why an implementation has no time.
        flop_share, bandwidth_share: Of the ceilings, ours.
    """

    shape: str
    dtype: str
    num_tokens: int
    times_us: dict[str, float]
    means_us: dict[str, float]
    notes: dict[str, str]
    flop_share: float
    bandwidth_share: float

    @property
    def best_peer(self) -> str:
        """The fastest peer."""
        return min((name for name in self.times_us if name != OURS), key=self.times_us.__getitem__)

    @property
    def ratio_of_means(self) -> float:
        """The smallest mean of a peer over ours; NaN where ours is wrong."""
        peers = (mean for name, mean in self.means_us.items() if name != OURS)
        return min(peers) / self.means_us.get(OURS, math.nan)

    @property
    def ratio(self) -> float:
        """The best peer's time over ours; NaN where ours is wrong."""
        return self.times_us[self.best_peer] / self.times_us.get(OURS, math.nan)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {"ratio": self.ratio, "ratio_of_means": self.ratio_of_means}
        return {**dataclasses.asdict(self), "best_peer": self.best_peer, **ratios}


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One call's inputs; ids in both widths, since transformers wants int64 and a conversion is no part of either."""

    call: Call
    topk_ids_long: torch.Tensor


def measure_ceilings() -> Ceilings:
    """Bounds of every dtype of the table."""
    found = {name: roofline.measure_ceilings(getattr(torch, name), CPU) for name in DTYPES}
    return Ceilings(
        gflops={name: ceilings.matmul_tflops * 1e3 for name, ceilings in found.items()},
        gbps=max(ceilings.read_gbps for ceilings in found.values()),
    )


def _make_inputs(problem: MoEProblem, num_tokens: int) -> list[Inputs]:
    generator = torch.Generator().manual_seed(2)
    calls = [random_call(problem, num_tokens, "uniform", generator) for _ in range(NUM_INPUTS)]
    return [Inputs(call, call.topk_ids.long()) for call in calls]


def peer_module(shape: Shape, weights: ExpertWeights) -> Any:
    """Mixtral experts of transformers, the common [E,2I,H] form, on our tensors."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        num_local_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_experts_per_tok=shape.top_k,
    )
    with torch.device("meta"):
        module: Any = MixtralExperts(config)
    module.gate_up_proj = torch.nn.Parameter(weights.w13, requires_grad=False)
    module.down_proj = torch.nn.Parameter(weights.w2, requires_grad=False)
    module.config = config
    return module


def _calls(shape: Shape, weights: ExpertWeights, kernel: MoEKernel) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    module = peer_module(shape, weights)

    def peer(name: str) -> Callable[[Inputs], torch.Tensor]:
        def call(inputs: Inputs) -> torch.Tensor:
            module.config._experts_implementation = name
            result: torch.Tensor = module(inputs.call.hidden_states, inputs.topk_ids_long, inputs.call.topk_weights)
            return result

        return call

    def ours(inputs: Inputs) -> torch.Tensor:
        return kernel(*inputs.call)

    return {OURS: ours, **{name: peer(name) for name in PEERS}}


def _gathered_bytes(shape: Shape, dtype: str, num_tokens: int) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return num_tokens * shape.top_k * 3 * shape.hidden_size * shape.intermediate_size * itemsize


def measure(
    shapes: Sequence[Shape],
    dtypes: Sequence[str],
    token_counts: Sequence[int],
    rounds: int,
    ceilings: Ceilings,
    each_seconds: float = math.inf,
) -> Iterator[Row]:
    """Measures every combination, one model's weights at a time."""
    for dtype in dtypes:
        for shape in shapes:
            problem = MoEProblem(
                num_experts=shape.num_experts,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                top_k=shape.top_k,
                dtype=dtype,
            )
            _progress(f"{shape.name} {dtype}: making and packing weights")
            weights = random_weights(problem, torch.Generator().manual_seed(1), CPU)
            kernel = make_kernel(problem, weights, select_backend(problem, require="torch"))
            calls = _calls(shape, weights, kernel)
            for num_tokens in token_counts:
                _progress(f"{shape.name} {dtype} T={num_tokens}")
                yield _measure_row(shape, problem, weights, calls, num_tokens, rounds, ceilings, each_seconds)
            del weights, kernel, calls
            gc.collect()


def _measure_row(
    shape: Shape,
    problem: MoEProblem,
    weights: ExpertWeights,
    calls: dict[str, Callable[[Inputs], torch.Tensor]],
    num_tokens: int,
    rounds: int,
    ceilings: Ceilings,
    each_seconds: float,
) -> Row:
    inputs = _make_inputs(problem, num_tokens)
    notes: dict[str, str] = {}
    reference = reference_experts(problem, weights, *inputs[0].call)
    for name, call in calls.items():
        if name == "batched_mm" and _gathered_bytes(shape, problem.dtype, num_tokens) > GATHERED_BYTES_LIMIT:
            notes[name] = "skipped: gathered weights over 8 GB"
            continue
        error = relative_error(call(inputs[0]), reference)
        if not error <= TOLERANCE[problem.dtype]:
            notes[name] = f"wrong: error {error:.1e}"
    runs = {name: [functools.partial(call, one) for one in inputs] for name, call in calls.items() if name not in notes}
    # Two or three orders of magnitude slower than the rest, so one round is enough.
    slow = {name: runs.pop(name) for name in ("batched_mm",) if num_tokens > 1 and name in runs}
    other = torch.zeros(OTHER_BYTES, dtype=torch.uint8)
    timings = time_runs(runs, CPU, rounds, each_seconds, before=lambda: other.add_(1))
    timings |= time_runs(slow, CPU, rounds=1, seconds=0.0)
    medians = {name: timing.median_us for name, timing in timings.items()}
    means = {name: statistics.fmean(timings[name].samples_us) for name in runs if name in timings}
    seconds = medians.get(OURS, math.nan) / 1e6
    active = statistics.mean(len(one.call.topk_ids.unique()) for one in inputs)
    expert_elements = 3 * shape.hidden_size * shape.intermediate_size
    flops = 2 * expert_elements * num_tokens * shape.top_k
    return Row(
        shape=shape.name,
        dtype=problem.dtype,
        num_tokens=num_tokens,
        times_us=medians,
        means_us=means,
        notes=notes,
        flop_share=flops / seconds / 1e9 / ceilings.gflops[problem.dtype],
        bandwidth_share=active * expert_elements * problem.torch_dtype.itemsize / seconds / 1e9 / ceilings.gbps,
    )


@contextlib.contextmanager
def neighbors(count: int) -> Iterator[None]:
    """`count` processes that compute without end, while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _progress(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _table(rows: Sequence[Row]) -> str:
    header = f"{'model':<10} {'dtype':<9} {'T':>4} " + " ".join(f"{name:>10}" for name in (OURS, *PEERS))
    columns = f"{'best peer':<10} {'ratio':>6} {'means':>6} {'flops':>6} {'bytes':>6}"
    return "\n".join([f"{header}  {columns}", *map(_line, rows)])


def _line(row: Row) -> str:
    times = " ".join(_cell(row, name) for name in (OURS, *PEERS))
    return (
        f"{row.shape:<10} {row.dtype:<9} {row.num_tokens:>4} {times}  {row.best_peer:<10} {row.ratio:>6.2f} "
        f"{row.ratio_of_means:>6.2f} {row.flop_share:>6.0%} {row.bandwidth_share:>6.0%}"
    )


def _cell(row: Row, name: str) -> str:
    if name in row.times_us:
        return f"{row.times_us[name] / 1e3:>8.2f}ms"
    return f"{row.notes[name].partition(':')[0]:>10}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the bench.

    Returns:
        0; 1 where our own result was wrong in some row; 2 where FILE is of another machine, commit or setting.
    """
    options = _parser().parse_args(arguments)
    _progress("measuring ceilings")
    ceilings = measure_ceilings()
    facts = {
        **provenance(probe_platform(), ("torch", "transformers")),
        "instruction_set": instruction_set(),
        "threads": torch.get_num_threads(),
        "rounds": options.rounds,
        "each_seconds": options.each,
        "neighbors": options.busy,
        "ceilings": dataclasses.asdict(ceilings),
    }
    try:
        document: dict[str, Any] = {"schema": 1, **facts, "rows": earlier_rows_of(options.json, facts, _SAME)}
    except ValueError as error:
        print(f"bench_torch_cpu: {error}", file=sys.stderr)
        return 2
    shapes = [shape for shape in SHAPES if shape.name in options.shapes]
    rows = []
    with torch.inference_mode(), neighbors(options.busy):
        for row in measure(shapes, options.dtypes, options.tokens, options.rounds, ceilings, options.each):
            rows.append(row)
            _progress(_line(row))
            if options.json:
                # Each row has the ceilings of its own process.
                found = {**row.to_dict(), "ceilings": facts["ceilings"]}
                document["rows"] = [one for one in document["rows"] if _key(one) != _key(found)] + [found]
                options.json.parent.mkdir(parents=True, exist_ok=True)
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(_table(rows))
    for dtype in options.dtypes:
        ratios = [row.ratio for row in rows if row.dtype == dtype and OURS in row.times_us]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            print(f"{dtype}: geometric mean {mean:.2f}x over {len(ratios)} rows, worst {min(ratios):.2f}x")
    rates = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in ceilings.gflops.items())
    print(f"ceilings: {rates}, read {ceilings.gbps:.0f} GB/s")
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(f"{facts['device']}, {facts['instruction_set']}, {facts['threads']} threads, {versions}, {facts['commit']}")
    for row in rows:
        for name, note in row.notes.items():
            print(f"{row.shape} {row.dtype} T={row.num_tokens} {name}: {note}")
    return 0 if all(OURS in row.times_us for row in rows) else 1


_SAME: Final = ("device", "versions", "commit", "instruction_set", "threads", "rounds", "each_seconds", "neighbors")


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["shape"], row["dtype"], row["num_tokens"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The torch backend against transformers' experts, on this CPU.")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES, help="both by default")
    parser.add_argument("--tokens", nargs="+", type=int, default=NUM_TOKENS, help="of a call; 1 16 128 512 by default")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each implementation in a row, at most")
    parser.add_argument("--each", type=float, default=10.0, metavar="S", help="seconds for each of them, after three")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="beside N processes that only compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())

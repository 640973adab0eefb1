"""A layer over a group of GPUs, against the layer without one and the bare collectives of the same bytes.

`torchrun --nproc-per-node N -m benches.h200.groups OUT.json [WAY...]`, or alone for a group of one. Ways that can
be captured are timed as replays of a CUDA graph, the others as calls. Each row: the kernel on the tokens that its
experts see, the bare collectives, the whole call, and what the call takes beyond these two.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import current_platform
from moereg.prepare_finalize import GroupPrepareFinalize
from moereg.routing import softmax_topk
from moereg.runtime.gc_pause import collecting_later
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights

LAYERS: Final[dict[str, Any]] = {
    "qwen3-30b-a3b": {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8},
    "deepseek-v3/8": {"num_experts": 32, "hidden_size": 7168, "intermediate_size": 2048, "top_k": 8},
}
DISPATCHERS: Final = ("all_gather", "all_to_all")
TOKENS: Final = (1, 16, 64, 256)
CALLS: Final = 50


def median_us(run: Callable[[], Any]) -> float:
    """Median of `CALLS` runs, each between two events."""
    for _ in range(5):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
    torch.cuda.synchronize()
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return 1000 * float(statistics.median(start.elapsed_time(end) for start, end in pairs))


def replayed(run: Callable[[], Any]) -> Callable[[], Any]:
    """The run as a graph's replay."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with collecting_later(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    torch.cuda.synchronize()
    return graph.replay


def bare(moves: GroupPrepareFinalize, num_tokens: int, dispatcher: str) -> Callable[[], Any]:
    """The collectives that a call makes, on bytes of its own."""
    problem, size = moves.problem, moves.group.size
    row = sum(moves.wire.widths) + 8 * problem.top_k
    back = problem.hidden_size * problem.torch_dtype.itemsize
    if dispatcher == "all_gather":
        sent = torch.zeros(num_tokens, row, dtype=torch.uint8, device="cuda")
        gathered = torch.zeros(size * num_tokens, row, dtype=torch.uint8, device="cuda")
        sums = torch.zeros(size * num_tokens, problem.hidden_size, dtype=problem.torch_dtype, device="cuda")
        mine = torch.zeros(num_tokens, problem.hidden_size, dtype=problem.torch_dtype, device="cuda")

        def gather_and_reduce() -> None:
            moves.group.all_gather(gathered, sent, "bytes")
            moves.group.reduce_scatter(mine, sums, "bytes")

        return gather_and_reduce
    rows, results = num_tokens * min(size, problem.top_k), num_tokens * problem.top_k
    rows, results = -(-rows // size) * size, -(-results // size) * size
    there = torch.zeros(2, rows, sum(moves.wire.widths), dtype=torch.uint8, device="cuda")
    home = torch.zeros(2, results, back, dtype=torch.uint8, device="cuda")

    def there_and_back() -> None:
        moves.group.all_to_all(there[0], there[1], "bytes")
        moves.group.all_to_all(home[0], home[1], "bytes")

    return there_and_back


@functools.cache
def weights_of(share: MoEProblem) -> ExpertWeights:
    """Those of a rank: the same for each number of tokens."""
    return make_weights(share, torch.device("cuda"))


def row_of(layer: str, num_tokens: int, dispatcher: str, quant: str) -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    can_capture = not dispatcher.startswith("all_to_all")
    problem = MoEProblem(**LAYERS[layer], quant=quant, max_num_tokens=num_tokens, graph_capture=can_capture)
    share = dataclasses.replace(
        problem, num_local_experts=problem.num_experts // size, max_num_tokens=None, graph_capture=False
    )
    kernel = make_kernel(problem, weights_of(share), group=dist.group.WORLD, prepare_finalize=dispatcher)
    moves = kernel.prepare_finalize
    assert isinstance(moves, GroupPrepareFinalize)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, device="cuda").bfloat16()
    logits = torch.randn(num_tokens, problem.num_experts, device="cuda")
    inputs = hidden_states, *softmax_topk(logits, top_k=problem.top_k, renormalize=True)
    out = torch.empty_like(hidden_states)
    arrived = moves.prepare(inputs[0], inputs[1], inputs[2], kernel.selection.problem, kernel.expert_map)
    alone = experts_alone(kernel, arrived)
    measured: dict[str, Callable[[], Any]] = {
        "experts": alone,
        "collectives": bare(moves, num_tokens, dispatcher),
        "call": lambda: kernel(*inputs, out=out),
    }
    if can_capture:
        measured = {name: replayed(run) for name, run in measured.items()}
    found = {name: median_us(run) for name, run in measured.items()}
    found["beyond"] = found["call"] - found["experts"] - found["collectives"]
    return {"layer": layer, "quant": quant, "dispatcher": dispatcher, "ranks": size, "tokens": num_tokens, **found}


def experts_alone(kernel: MoEKernel, arrived: Any) -> Callable[[], Any]:
    """The experts on what arrived, without anything around them."""
    problem, experts = kernel.selection.problem, kernel.experts
    shapes = experts.workspace_shapes(problem=problem, num_tokens=arrived.num_tokens)
    work = [torch.empty(shape, dtype=problem.torch_dtype, device="cuda") for shape in shapes]
    rows = (arrived.num_tokens, problem.hidden_size)
    if experts.output_form == "per_expert":
        rows = (problem.num_local_experts, *rows)  # type: ignore[assignment]
    elif experts.output_form == "per_route":
        rows = (*arrived.inputs.topk_ids.shape, problem.hidden_size)
    out = torch.empty(rows, dtype=problem.torch_dtype, device="cuda")
    return lambda: experts.apply(
        out=out, inputs=arrived.inputs, weights=kernel.weights, workspace13=work[0], workspace2=work[1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument(
        "dispatchers", nargs="*", metavar="DISPATCHER", help=f"of {', '.join(DISPATCHERS)}; all where none is named"
    )
    options = parser.parse_args()
    if unknown := sorted({*options.dispatchers}.difference(DISPATCHERS)):
        parser.error(f"dispatchers are {', '.join(DISPATCHERS)}, got {', '.join(unknown)}")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(rank)
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    else:
        store = f"file://{tempfile.mkdtemp()}/store"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    rows: list[dict[str, Any]] = []
    platform = current_platform()
    where = provenance(platform, ("torch", "triton"))
    for dispatcher in options.dispatchers or DISPATCHERS:
        for layer in LAYERS:
            for quant in ("unquantized", "fp8_block128"):
                for num_tokens in TOKENS:
                    try:
                        row = row_of(layer, num_tokens, dispatcher, quant)
                    except Exception as error:
                        row = {
                            "layer": layer,
                            "quant": quant,
                            "dispatcher": dispatcher,
                            "tokens": num_tokens,
                            "error": str(error)[:300],
                        }
                    rows.append(row)
                    if rank == 0:
                        print(show(row), flush=True)
                        document = {"schema": 1, **where, "clocks": clocks(platform), "rows": rows}
                        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    head = f"| {row['dispatcher']} | {row['layer']} | {row['quant']} | {row['tokens']} | "
    if "error" in row:
        return f"{head}{row['error']} |"
    return head + " | ".join(f"{row[name]:.1f}" for name in ("experts", "collectives", "call", "beyond")) + " |"


if __name__ == "__main__":
    main()

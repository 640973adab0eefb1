"""Layers over all GPUs of this machine, dispatcher by dispatcher, rows that matter most first, until a time is over.

`python -m benches.h200.ep OUT.json SECONDS [NAME...]` starts a process a GPU. Each row is that of `benches.over_ranks`:
the call against one rank with as many experts and routes, and against the bare collectives of the same bytes. A row
that hangs or ends its process is told, and the others go on in new processes. Parts are `first`, `more`, `zipf`
and `sums`, in this order; all where none is named. Names of dispatchers and layers leave out others.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

LAYERS: Final = {
    "qwen3": ("qwen3-30b-a3b", "unquantized"),
    "deepseek": ("deepseek-v3", "fp8_block128"),
    "gptoss_mxfp4": ("gpt-oss-120b", "mxfp4_w4a16"),
    "gptoss_bf16": ("gpt-oss-120b", "unquantized"),
}
MOST_SECONDS: Final = 70.0
"""Longest time of an item, after which its processes are killed."""
ROUNDS: Final = 24
SAMPLE_SECONDS: Final = 0.5


def problem_of(layer: str) -> MoEProblem:
    """A layer, with all of its experts."""
    model, quant = LAYERS[layer]
    return MoEProblem(**get_shape(model).problem_keywords(), quant=quant)


class Item(NamedTuple):
    """One measurement: some dispatchers at one number of tokens and one routing."""

    part: str
    layer: str
    tokens: int
    routing: str
    dispatchers: tuple[str, ...]


def items(names: tuple[str, ...]) -> list[Item]:
    """Everything that is named, what matters most first.

    Raises:
        ValueError: A name is of no part, layer or dispatcher.
    """
    both, found = ("all_gather", "all_to_all"), []
    for tokens in (8192, 64):
        found += [Item("first", layer, tokens, "uniform", both) for layer in LAYERS]
    for tokens in (1024, 1):
        found += [Item("more", layer, tokens, "uniform", both) for layer in LAYERS]
    for tokens in (8192, 64, 1024, 1):
        found += [Item("zipf", layer, tokens, "zipf", both) for layer in LAYERS]
    for tokens in (8192, 64, 1024, 1):
        found += [Item("sums", layer, tokens, "uniform", ("all_to_all_sums",)) for layer in LAYERS]
    groups = (
        {item.part for item in found},
        set(LAYERS),
        {dispatcher for item in found for dispatcher in item.dispatchers},
    )
    if unknown := sorted(set(names).difference(*groups)):
        known = "; ".join(", ".join(sorted(group)) for group in groups)
        raise ValueError(f"names must be of parts, layers and dispatchers ({known}), got {', '.join(unknown)}")
    parts, layers, dispatchers = (group.intersection(names) or group for group in groups)
    found = [
        item._replace(dispatchers=tuple(dispatcher for dispatcher in item.dispatchers if dispatcher in dispatchers))
        for item in found
    ]
    return [item for item in found if item.dispatchers and item.part in parts and item.layer in layers]


def run_rank(rank: int, size: int, folder: Path, end: float) -> None:
    """One rank: items in turn, until rank 0 says that the time is over; rank 0 writes rows."""
    import torch
    import torch.distributed as dist

    from benches.over_ranks import Job, Rank
    from moereg.errors import EmulationWarning, MoeregError

    warnings.simplefilter("ignore", EmulationWarning)
    left = [Item(*item[:4], tuple(item[4])) for item in json.loads((folder / "left").read_text())]
    has_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=2 * MOST_SECONDS),
        device_id=device if has_gpus else None,
    )
    layers: dict[str, Any] = {}
    for place, item in enumerate(left):
        go = torch.tensor([time.time() + 8 < end], dtype=torch.int32, device=device)
        dist.broadcast(go, src=0)
        if not int(go):
            return
        if rank == 0:
            _write(folder / "progress", {"begin": place, "time": time.time()})
        if item.layer not in layers:
            job = Job(problem_of(item.layer), rounds=ROUNDS, seconds=SAMPLE_SECONDS)
            with torch.no_grad():
                layers[item.layer] = Rank(job, device)
        of_layer = layers[item.layer]
        of_layer.job = dataclasses.replace(
            of_layer.job,
            dispatchers=item.dispatchers,
            tokens=(item.tokens,),
            routings=(item.routing,),
        )
        try:
            with torch.no_grad():
                for row in of_layer.rows():
                    if rank == 0:
                        _write(folder / "rows", {"layer": item.layer, **row})
        except MoeregError as error:
            if rank == 0:
                _write(folder / "progress", {"failed": place, "why": str(error)[:200]})
        if rank == 0:
            _write(folder / "progress", {"end": place, "time": time.time()})


def _write(path: Path, value: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextlib.contextmanager
def _ranks(size: int, folder: Path, end: float, log: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    children = []
    with log.open("ab") as file:
        for rank in range(size):
            command = [sys.executable, "-m", "benches.h200.ep", "--rank", str(rank), str(size), str(folder), str(end)]
            children.append(subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True))
        try:
            yield children
        finally:
            for child in children:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def measure(left: list[Item], size: int, end: float, log: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what is missing with why."""
    rows: list[dict[str, Any]] = []
    lost: list[str] = []
    while left and time.time() + 20 < end:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "left").write_text(json.dumps(left))
            began, why = time.time(), ""
            with _ranks(size, folder, end, log) as children:
                while any(child.poll() is None for child in children):
                    time.sleep(0.2)  # Looks at processes; nothing here is timed by it.
                    if any(child.poll() for child in children):
                        why = "a rank ended"
                        break
                    steps = [step["time"] for step in _read(folder / "progress") if "time" in step]
                    if time.time() - (steps[-1] if steps else began) > MOST_SECONDS:
                        why = f"hung for {MOST_SECONDS:g} s"
                        break
                    if time.time() > end + 5:
                        why = "the time was over"
                        break
            rows += _read(folder / "rows")
            progress = _read(folder / "progress")
        lost += [f"{left[step['failed']]}: {step['why']}" for step in progress if "failed" in step]
        begun = [step["begin"] for step in progress if "begin" in step]
        ended = {step["end"] for step in progress if "end" in step}
        if not begun:
            lost.append(f"all {len(left)} that were left: {why or 'nothing began'}")
            break
        if begun[-1] not in ended:
            lost.append(f"{left[begun[-1]]}: {why or 'ended early'}")
        elif not why:
            left = left[begun[-1] + 1 :]
            break
        left = left[begun[-1] + 1 :]
    lost += [f"{item}: no time left" for item in left]
    return rows, lost


def document_of(rows: list[dict[str, Any]], lost: list[str], size: int) -> dict[str, Any]:
    """As `benches/results/h200_ep.json` has it: a bench a layer."""
    from moereg.evidence.provenance import clocks, provenance
    from moereg.platforms import current_platform

    platform = current_platform()
    where = provenance(platform, ("torch", "triton"))
    found = []
    for name, (model, _) in LAYERS.items():
        of_layer = [{key: row[key] for key in row if key != "layer"} for row in rows if row["layer"] == name]
        found.append(
            {
                "model": model,
                "problem": problem_of(name).to_dict(),
                "ranks": size,
                "transport": "cuda:nccl",
                "balanced": False,
                "replicas": 0,
                "rows": of_layer,
            }
        )
    head = {name: where[name] for name in ("device", "versions", "commit", "date")}
    note = "benches.h200.ep: rows of benches.over_ranks; clocks right after the last row"
    link = "NVLink, multicast off"
    return {"schema": 1, **head, "clocks": clocks(platform), "link": link, "note": note, "lost": lost, "benches": found}


def main() -> int:
    if sys.argv[1:2] == ["--rank"]:
        rank, size = int(sys.argv[2]), int(sys.argv[3])
        run_rank(rank, size, Path(sys.argv[4]), float(sys.argv[5]))
        sys.stdout.flush()
        os._exit(0)  # NCCL may wait for graphs while it is taken down.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("seconds", type=float, metavar="SECONDS")
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    try:
        left = items(tuple(options.names))
    except ValueError as error:
        parser.error(str(error))
    import torch

    from benches.markdown import table
    from benches.over_ranks import HEAD, cells

    size = torch.cuda.device_count() or 2
    rows, lost = measure(left, size, time.time() + options.seconds, options.out.with_suffix(".log"))
    options.out.write_text(json.dumps(document_of(rows, lost, size), indent=1) + "\n")
    print(table(("layer", *HEAD), ([row["layer"], *cells(row)] for row in rows)))
    for text in lost:
        print("missing:", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

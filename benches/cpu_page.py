"""The tables of `torch` on CPUs beside transformers' experts, from every stored file of `bench_torch_cpu`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from benches.board.page import counted
from benches.markdown import table
from benches.stored import RESULTS, beats_ceilings, outcome, read

__all__ = ["TABLES"]

Document = dict[str, Any]

_OURS: Final = "moereg"
_NAMES: Final = (_OURS, "eager", "batched_mm", "grouped_mm")
_BUSY: Final = "_busy"


def _documents(is_busy: bool = False) -> dict[str, Document]:
    found = {
        path.name: read(path)
        for path in sorted(RESULTS.glob("cpu_*.json"))
        if path.stem.endswith(_BUSY) is is_busy and "before_after" not in path.stem
    }
    if not found:
        raise FileNotFoundError(RESULTS / "cpu_*.json")
    return found


def _machine(document: Document) -> str:
    instructions = document.get("instruction_set", "instruction set not stored")
    # Tells processors of one name apart. Files of several runs have a ceiling of each.
    ceilings = [document["ceilings"], *(row.get("ceilings", document["ceilings"]) for row in document["rows"])]
    rate = max(one["gflops"]["float32"] for one in ceilings)
    return f"{document['device']}, {instructions}, {document['threads']} threads, {rate:.0f} GFLOP/s"


def _where(name: str, document: Document) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
    return f"`{name}`: {_machine(document)}, {versions}, commit {document['commit'][:12]}, {document['date']}."


def summary_table() -> str:
    """For each file and dtype, rows won, tied and lost, and how far ahead of the best peer."""
    rows = []
    for document in _documents().values():
        for dtype in dict.fromkeys(row["dtype"] for row in document["rows"]):
            ratios = [row["ratio"] for row in document["rows"] if row["dtype"] == dtype]
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            outcomes = counted([outcome(ratio) for ratio in ratios])
            rows.append([_machine(document), dtype, outcomes, f"{mean:.2f}", f"{min(ratios):.2f}"])
    where = "\n".join(f"- {_where(*item)}" for item in _documents().items())
    return f"{table(['machine', 'dtype', 'rows', 'ratio, mean', 'worst'], rows)}\n\n{where}"


def losses_table() -> str:
    """Rows in which a peer is faster, worst first."""
    found = [
        (row["ratio"], [_machine(document), row["dtype"], row["shape"], str(row["num_tokens"]), *_times(row)])
        for document in _documents().values()
        for row in document["rows"]
        if outcome(row["ratio"]) == "lost"
    ]
    if not found:
        return "No row is lost."
    header = ["machine", "dtype", "layer", "T", "ours ms", "best peer ms", "ratio"]
    return table(header, [cells for _, cells in sorted(found)])


def rows_table() -> str:
    """Every row of every file, with its share of the ceilings where no row of its dtype beats them."""
    parts = []
    for name, document in _documents().items():
        rows = []
        for dtype in dict.fromkeys(row["dtype"] for row in document["rows"]):
            own = [row for row in document["rows"] if row["dtype"] == dtype]
            shares = [max(row["flop_share"], row["bandwidth_share"]) for row in own]
            is_beaten = beats_ceilings(shares)
            for row, share in zip(own, shares, strict=True):
                text = "-" if is_beaten else f"{share:.0%}"
                rows.append([f"{row['shape']} {dtype}", str(row["num_tokens"]), *_times(row), text])
        header = ["layer", "T", "ours ms", "best peer ms", "ratio", "share of the ceiling"]
        parts.append(f"{table(header, rows)}\n\n{_where(name, document)}")
    return "\n\n".join(parts)


def _times(row: dict[str, Any]) -> list[str]:
    times = row["times_us"]
    best = min((name for name in times if name != _OURS), key=lambda name: times[name])
    return [f"{times[_OURS] / 1e3:.2f}", f"{times[best] / 1e3:.2f} ({best})", f"{times[best] / times[_OURS]:.2f}"]


def busy_table() -> str:
    """The same beside processes that only compute, by means of all calls."""
    parts = []
    for name, document in _documents(is_busy=True).items():
        rows = []
        for row in document["rows"]:
            means = [row["means_us"].get(peer) for peer in _NAMES]
            times = ["-" if mean is None else f"{mean / 1e3:.2f}" for mean in means]
            ratios = [f"{row[key]:.2f}" for key in ("ratio_of_means", "ratio")]
            rows.append([f"{row['shape']} {row['dtype']}", str(row["num_tokens"]), *times, *ratios])
        labels = ("ours" if peer == _OURS else peer for peer in _NAMES)
        header = ["layer", "T", *(f"{label} ms, mean" for label in labels), "ratio of means", "of medians"]
        beside = (
            f"{document['neighbors']} process running beside it, {document['rounds']} rounds. {_where(name, document)}"
        )
        parts.append(f"{table(header, rows)}\n\n{beside}")
    return "\n\n".join(parts)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "torch_cpu": summary_table,
    "torch_cpu_losses": losses_table,
    "torch_cpu_rows": rows_table,
    "torch_cpu_busy": busy_table,
}

"""The tables of CPUs: `torch` beside transformers' experts, and moereg-cpu beside other people's kernels.

They show every stored file of `bench_torch_cpu`, of `bench_cpu_kernels` and of `cpu_models`.
"""

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
    for name, document in _documents().items():
        for dtype in dict.fromkeys(row["dtype"] for row in document["rows"]):
            ratios = [row["ratio"] for row in document["rows"] if row["dtype"] == dtype]
            mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
            outcomes = counted([outcome(ratio) for ratio in ratios])
            rows.append([f"`{name}`", dtype, outcomes, f"{mean:.2f}", f"{min(ratios):.2f}"])
    return table(["file", "dtype", "rows", "ratio, mean", "worst"], rows)


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


_KERNELS: Final = "moereg-cpu"
_NOT_PEERS: Final = (_KERNELS, "torch")


def _kernel_documents() -> dict[str, Document]:
    found = {path.name: read(path) for path in sorted(RESULTS.glob("kernels_cpu_*.json"))}
    if not found:
        raise FileNotFoundError(RESULTS / "kernels_cpu_*.json")
    return found


def _kernel_machine(document: Document, threads: int) -> str:
    return f"{document['device']}, {document['instruction_set']}, {threads} thread{'s' if threads > 1 else ''}"


def _best_peer(row: dict[str, Any]) -> str:
    return min((name for name in row["times_us"] if name not in _NOT_PEERS), key=row["times_us"].__getitem__)


def _kernel_ratio(row: dict[str, Any]) -> float:
    """The fastest peer's time over ours; in a quantized scheme our own bfloat16's."""
    times: dict[str, float] = row["times_us"]
    return times[_best_peer(row)] / times[_KERNELS]


def _by_threads() -> list[tuple[Document, int, list[dict[str, Any]]]]:
    return [
        (
            document,
            threads,
            [row for row in document["rows"] if row["threads"] == threads and _KERNELS in row["times_us"]],
        )
        for document in _kernel_documents().values()
        for threads in sorted({row["threads"] for row in document["rows"]})
    ]


def _mean(values: list[float]) -> str:
    return f"{math.exp(math.fsum(map(math.log, values)) / len(values)):.2f}" if values else "-"


def kernels_table() -> str:
    """Per machine and threads: against the fastest peer in bfloat16, and at one token against memory and bfloat16."""
    lines = []
    for document, threads, rows in _by_threads():
        plain = [row for row in rows if row["scheme"] == "unquantized"]
        few, many = (
            [_kernel_ratio(row) for row in plain if (row["num_tokens"] <= 16) is is_few] for is_few in (True, False)
        )
        shares = [row["weights_gbps"] / row["read_gbps"] for row in plain if row["num_tokens"] == 1]
        schemes = []
        for scheme in ("int8_w8a16", "int4_w4a16_g128", "int4_w4a16_g32", "mxfp4_w4a16"):
            own = [1 / _kernel_ratio(row) for row in rows if row["scheme"] == scheme and row["num_tokens"] == 1]
            schemes.append(_mean(own))
        worst = f"{min(few + many):.2f}" if plain else "-"
        lines.append([_kernel_machine(document, threads), _mean(few), _mean(many), worst, _mean(shares), *schemes])
    header = [
        "machine",
        "1-16 tokens",
        "64, 256",
        "worst",
        "of memory's rate",
        "int8",
        "int4 g128",
        "int4 g32",
        "mxfp4",
    ]
    where = "\n".join(
        f"- `{name}`: {', '.join(f'{package} {version}' for package, version in document['versions'].items())}, commit "
        f"{document['commit'][:12]}, {document['date']}. {_missing(document)}".rstrip()
        for name, document in _kernel_documents().items()
    )
    return f"{table(header, lines)}\n\n{where}"


def _missing(document: Document) -> str:
    """Peers without a time, with the reason."""
    reasons = {name: why for row in document["rows"] for name, why in row["notes"].items()}
    return "; ".join(f"no {name}: {why}" for name, why in sorted(reasons.items()))


def kernels_rows_table() -> str:
    """Every row in bfloat16 of every file, the lost ones first; then the quantized ones."""
    parts = []
    for document, threads, rows in _by_threads():
        plain = sorted((row for row in rows if row["scheme"] == "unquantized"), key=_kernel_ratio)
        lines = [
            [
                row["layer"],
                str(row["num_tokens"]),
                *_kernel_times(row),
                f"{_kernel_ratio(row):.2f}",
                outcome(_kernel_ratio(row)),
            ]
            for row in plain
        ]
        header = ["layer", "T", "ours ms", "`torch` ms", "fastest peer ms", "ratio", ""]
        quantized = [
            [
                row["layer"],
                row["scheme"],
                str(row["num_tokens"]),
                f"{times[_KERNELS] / 1e3:.2f}",
                f"{1 / _kernel_ratio(row):.2f}",
            ]
            for row in rows
            if row["scheme"] != "unquantized" and (times := row["times_us"])
        ]
        parts.append(f"### {_kernel_machine(document, threads)}\n\n{table(header, lines)}")
        if quantized:
            parts.append(table(["layer", "scheme", "T", "ours ms", "of its time in bfloat16"], quantized))
    return "\n\n".join(parts)


def _kernel_times(row: dict[str, Any]) -> list[str]:
    times, best = row["times_us"], _best_peer(row)
    own = f"{times['torch'] / 1e3:.2f}" if "torch" in times else "-"
    return [f"{times[_KERNELS] / 1e3:.2f}", own, f"{times[best] / 1e3:.2f} ({best})"]


_MODEL_PEERS: Final = ("eager", "grouped_mm", "batched_mm", "llama.cpp")


def models_table() -> str:
    """Tokens a second of whole models; per case, moereg's over the fastest other's."""
    parts = []
    for path in sorted(RESULTS.glob("models_cpu_*.json")):
        document = read(path)
        cases: dict[tuple[Any, ...], dict[str, Document]] = {}
        for row in document["rows"]:
            key = tuple(row[name] for name in ("model", "scheme", "phase", "batch", "tokens", "threads"))
            cases.setdefault(key, {})[row["implementation"]] = row
        lines = []
        for (model, scheme, phase, batch, tokens, threads), found in sorted(cases.items()):
            rates = {name: row["tokens_per_s"] for name, row in found.items() if row.get("tokens_per_s")}
            ours, best = rates.pop(_OURS, None), max(rates.values(), default=None)
            ratio = ours / best if ours and best else None
            share = found.get(_OURS, {}).get("read_share") if batch == 1 else None
            shown = [f"{rate:.1f}" if rate else "-" for rate in (ours, *map(rates.get, _MODEL_PEERS))]
            what = f"{phase} {batch} x {tokens}"
            ends = [f"{ratio:.2f} {outcome(ratio)}" if ratio else "-", f"{share:.0%}" if share else "-"]
            lines.append([model, scheme, what, str(threads), *shown, *ends])
        header = ["model", "experts", "case", "threads", _OURS, *_MODEL_PEERS, "ratio", "of memory's rate"]
        versions = {f"llama-cpp-python {row['version']}" for row in document["rows"] if "version" in row}
        others = "".join(f", {version}" for version in sorted(versions)) or ", llama.cpp not measured"
        facts = ", ".join(f"{package} {version}" for package, version in document["versions"].items())
        where = f"`{path.name}`: {document['device']}, {document['instruction_set']}, {facts}{others}"
        parts.append(f"{table(header, lines)}\n\n{where}, commit {document['commit'][:12]}, {document['date']}.")
    if not parts:
        raise FileNotFoundError(RESULTS / "models_cpu_*.json")
    return "\n\n".join(parts)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "torch_cpu": summary_table,
    "torch_cpu_losses": losses_table,
    "torch_cpu_rows": rows_table,
    "torch_cpu_busy": busy_table,
    "cpu_kernels": kernels_table,
    "cpu_kernels_rows": kernels_rows_table,
    "cpu_models": models_table,
}

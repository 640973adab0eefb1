"""The tables of docs/scale.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from benches.markdown import table
from benches.scale.model import (
    ASSUMED,
    LAYERS,
    MODELLED,
    RESULTS,
    Dispatcher,
    Layer,
    alone,
    bare_us,
    cost,
    wire_bytes,
)
from benches.scale.routes import num_replicas, shares

__all__ = ["CASES", "RANKS", "TABLES", "best", "dispatchers_of"]

RANKS: Final = (2, 4, 8, 64)
PHASES: Final = {"decode": 64, "prefill": 8192}
"""Tokens of each rank."""
CASES: Final = (("uniform", False), ("zipf", False), ("zipf", True))
"""Routing, and whether experts were balanced by their loads with replicas."""
_TOKENS: Final = (1, 16, 64, 256, 1024, 8192)
_MEASURED: Final = "h200_ep.json"
_MEASURED_BEFORE: Final = "h200_ep_*.json"
"""Rows of earlier code that the file above lacks."""
_REGISTERED: Final = {dispatcher.registered for dispatcher in MODELLED}
"""Files also have rows of a dispatcher that moereg no longer has."""
_CAPTURED: Final = {dispatcher.registered for dispatcher in MODELLED if dispatcher.captured}
_FLOORS: Final = {"qwen3-30b-a3b": 1.35, "gpt-oss-120b": 1.25, "deepseek-v3": 1.2}


def dispatchers_of(layer: Layer) -> Iterator[Dispatcher]:
    """The dispatchers that can carry the layer's tokens."""
    return (dispatcher for dispatcher in MODELLED if not dispatcher.coded or layer.problem.quant.activation is not None)


def best(layer: Layer, num_ranks: int, num_tokens: int, routing: str, balanced: bool) -> dict[str, float]:
    """Times of the dispatchers, the fastest first."""
    found = {
        dispatcher.name: cost(layer, dispatcher, num_ranks, num_tokens, routing, balanced).total_us
        for dispatcher in dispatchers_of(layer)
    }
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _case(routing: str, balanced: bool) -> str:
    return f"{routing}, balanced" if balanced else routing


def links_table() -> str:
    """The collectives that were measured, and what was not."""
    document = json.loads((RESULTS / "h200_links.json").read_text(encoding="utf-8"))
    names = [name.removesuffix("_us") for name in document["rows"][0] if name != "bytes"]
    rows = [
        [f"{row['bytes'] / 1024:,.0f}", *(f"{row[f'{name}_us']:.1f}" for name in names)] for row in document["rows"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    where = f"{document['device']}, {document['link']}, {versions}, {document['date']}. {document['note']}"
    assumed = [
        ["`host_us`", f"{ASSUMED.host_us:g} us", "the part of a collective's measured time that capturing saves"],
        [
            "`eager_us`",
            f"{ASSUMED.eager_us:g} us",
            "host time of an eager call beyond the device's: the median of `all_to_all` at 1 and 64 tokens",
        ],
        ["`hop_us`", f"{ASSUMED.hop_us:g} us", "each rank beyond two in a ring (all_gather, reduce_scatter)"],
        ["`gather_us`", f"{ASSUMED.gather_us:g} us", "kernels around the experts with `all_gather`"],
        ["`sort_us`", f"{ASSUMED.sort_us:g} us", "sorting and counting routes with the other dispatchers"],
        ["`pass_rate`", f"{ASSUMED.pass_rate:g}", "copying and summing rows, as a share of the read rate"],
        ["`gpus_per_host`", f"{ASSUMED.gpus_per_host}", "ranks joined by NVLink, each at the rate of two"],
        ["`network_rate`", f"{ASSUMED.network_rate / 1e3:g} GB/s", "of one rank's 400 Gb/s adapter"],
        ["`network_us`", f"{ASSUMED.network_us:g} us", "latency beyond NVLink's"],
    ]
    measured = table(["KiB", *(f"{name} us" for name in names)], rows)
    return f"{measured}\n\n{where}\n\n{table(['assumed', 'value', 'what'], assumed)}"


def bytes_table() -> str:
    """MiB that the busiest rank sends or receives, out and back, under uniform routing."""
    lines = []
    for layer in LAYERS:
        problem = layer.problem
        for size in RANKS:
            (ranks,) = shares(problem.num_experts, size, problem.top_k, "uniform", balanced=False)
            for tokens in PHASES.values():
                cells = []
                for dispatcher in MODELLED:
                    out, back = wire_bytes(layer, dispatcher, tokens, ranks)
                    can = dispatcher in dispatchers_of(layer)
                    cells.append(f"{out / 2**20:,.2f} + {back / 2**20:,.2f}" if can else "-")
                lines.append([layer.name, str(size), f"{tokens:,}", *cells])
    return table(["layer", "ranks", "T a rank", *(dispatcher.name for dispatcher in MODELLED)], lines)


def _times(tokens: int) -> str:
    lines = []
    for layer in LAYERS:
        for size in RANKS:
            for routing, balanced in CASES:
                fastest = next(iter(best(layer, size, tokens, routing, balanced)))
                cells = []
                for dispatcher in MODELLED:
                    time = cost(layer, dispatcher, size, tokens, routing, balanced).total_us
                    cells.append(
                        _bold(f"{time:,.0f}", dispatcher.name == fastest)
                        if dispatcher in dispatchers_of(layer)
                        else "-"
                    )
                kernel = alone(layer, size, tokens, routing, balanced)
                lines.append([layer.name, str(size), _case(routing, balanced), f"{kernel:,.0f}", *cells])
    header = ["layer", "ranks", "routing", "experts alone us", *(dispatcher.name for dispatcher in MODELLED)]
    return table(header, lines)


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def decode_table() -> str:
    """Times of a layer at 64 tokens a rank."""
    return _times(PHASES["decode"])


def prefill_table() -> str:
    """Times of a layer at 8,192 tokens a rank."""
    return _times(PHASES["prefill"])


def winners_table() -> str:
    """The fastest dispatcher at each number of tokens, under Zipf routing with balanced experts."""
    lines = []
    for layer in LAYERS:
        for size in RANKS:
            cells = []
            for tokens in _TOKENS:
                times = list(best(layer, size, tokens, "zipf", balanced=True).items())
                cells.append(f"{times[0][0]} ({times[1][1] / times[0][1]:.2f})")
            lines.append([layer.name, str(size), *cells])
    return table(["layer", "ranks", *(f"T {tokens:,}" for tokens in _TOKENS)], lines)


def replicas_table() -> str:
    """Cost of slices of skewed experts: the slowest rank's time over that with balanced experts."""
    lines = []
    for layer in LAYERS:
        for size in RANKS:
            extra = num_replicas(layer.problem.num_experts, size)
            cells = []
            for tokens in PHASES.values():
                slices, moved = (alone(layer, size, tokens, "zipf", balanced) for balanced in (False, True))
                cells += [f"{slices:,.0f}", f"{moved:,.0f}", f"{slices / moved:.2f}"]
            lines.append([layer.name, str(size), str(extra), *cells])
    header = ["layer", "ranks", "replicas", "decode, slices us", "balanced us", "gain"]
    return table([*header, "prefill, slices us", "balanced us", "gain"], lines)


def predictions_table() -> str:
    """Two ranks, against one rank with the same share of experts and routes: predicted, and measured where it was."""
    measured = _measurements()
    lines = []
    for layer in LAYERS:
        for tokens in (1, 64, 1024, 8192):
            kernel, bare = alone(layer, 2, tokens), bare_us(layer, 2, tokens)
            for dispatcher in dispatchers_of(layer):
                total = cost(layer, dispatcher, 2, tokens, "uniform", balanced=False).total_us
                found = measured.get((layer.model, layer.quant, dispatcher.name, tokens))
                lines.append(
                    [
                        layer.name,
                        f"{tokens:,}",
                        dispatcher.name,
                        f"{kernel:,.0f}",
                        f"{bare:,.0f}",
                        f"{total:,.0f}",
                        f"{total / kernel:.2f}",
                        *(_measured_cells(found, total)),
                    ]
                )
    header = [
        "layer",
        "T per rank",
        "dispatcher",
        "experts alone us",
        "bare collectives us",
        "predicted us",
        "over alone",
    ]
    return table([*header, "measured us", "over alone", "measured / predicted", "commit"], lines)


def _measured_cells(row: dict[str, Any] | None, predicted: float) -> list[str]:
    if row is None:
        return ["not measured", "", "", ""]
    commit = f"`{row['commit'][:7]}`"
    if row["time_us"] is None:
        return [row["failure"] or "wrong", "", "", commit]
    over = f"{row['time_us'] / row['one_rank_us']:.2f}" if row.get("one_rank_us") else ""
    return [f"{row['time_us']:,.0f}", over, f"{row['time_us'] / predicted:.2f}", commit]


def _measurements() -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Rows of stored benches over two ranks under uniform routing, by layer, scheme, dispatcher and tokens a rank.

    A row has the `commit` of its file. Those of the newest file count.
    """
    found = {}
    for path in (*sorted(RESULTS.glob(_MEASURED_BEFORE)), RESULTS / _MEASURED):
        if not path.exists():
            continue
        document = json.loads(path.read_text(encoding="utf-8"))
        for bench in document["benches"]:
            if bench["ranks"] != 2 or bench["balanced"]:
                continue
            for row in bench["rows"]:
                # Files have rows of calls in two parts, which moereg no longer splits.
                if row["routing"] == "uniform" and row.get("batches", 1) == 1 and row["dispatcher"] in _REGISTERED:
                    name = row["dispatcher"].replace("_sums", ", sums")
                    if "float8" in row["wire"]:
                        name += ", fp8"
                    key = bench["model"], bench["problem"]["quant"], name, row["tokens"]
                    found[key] = {**row, "commit": document["commit"]}
    return found


def one_rank_table() -> str:
    """A group of one: what a call takes beyond its experts and the bare collectives."""
    document = json.loads((RESULTS / "h200_group_of_one.json").read_text(encoding="utf-8"))
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in document["rows"]:
        if row["dispatcher"] not in _REGISTERED:
            continue
        key = f"{row['layer']} {row['quant']}", row["dispatcher"], "graph" if row["dispatcher"] in _CAPTURED else "call"
        parts = f"{row['experts']:.0f} + {row['collectives']:.0f}: {row['call']:.0f} ({row['beyond']:+.1f})"
        found.setdefault(key, {})[row["tokens"]] = parts
    tokens = sorted({row["tokens"] for row in document["rows"]})
    lines = [[*key, *(cells[count] for count in tokens)] for key, cells in found.items()]
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    where = f"{document['device']}, {versions}, commit {document['commit'][:7]}, {document['date']}."
    return f"{table(['layer', 'dispatcher', 'timed as', *(f'T {count}' for count in tokens)], lines)}\n\n{where}"


def floors_table() -> str:
    """Goal for two ranks at 8,192 tokens each, the best dispatcher's prediction, and the best that was measured."""
    lines = []
    measured = _measurements()
    for layer in LAYERS:
        name, time = next(iter(best(layer, 2, 8192, "uniform", balanced=False).items()))
        ran = [
            (row["time_us"] / row["one_rank_us"], key[2])
            for key, row in measured.items()
            if key[:2] == (layer.model, layer.quant) and key[3] == 8192 and row["time_us"]
        ]
        over, dispatcher = min(ran, default=(None, ""))
        lines.append(
            [
                layer.name,
                name,
                f"{time / alone(layer, 2, 8192):.2f}",
                f"{_FLOORS[layer.model]:.2f}",
                "not measured" if over is None else f"{over:.2f}, {dispatcher}",
            ]
        )
    return table(["layer", "best dispatcher", "predicted over alone", "at most", "measured"], lines)


def dispatchers_table() -> str:
    """Each dispatcher with what it sends."""
    return table(
        ["dispatcher", "captured", "sends"],
        [
            [f"`{dispatcher.name}`", "yes" if dispatcher.captured else "no: the host reads sizes", dispatcher.note]
            for dispatcher in MODELLED
        ],
    )


TABLES: Final[dict[str, Callable[[], str]]] = {
    "links": links_table,
    "dispatchers": dispatchers_table,
    "wire": bytes_table,
    "decode": decode_table,
    "prefill": prefill_table,
    "winners": winners_table,
    "replicas": replicas_table,
    "one_rank": one_rank_table,
    "floors": floors_table,
    "predictions": predictions_table,
}

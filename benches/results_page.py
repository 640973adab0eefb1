"""The tables of moereg's own kernels on an H200, from the stored results.

Those of a CPU are `benches/cpu_page.py`'s, those beside other people's kernels `benches/board/peers.py`'s.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from benches.h200 import leave_one_out
from benches.markdown import table
from benches.stored import beats_ceilings, earlier_rows, load

RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def _load(name: str) -> dict[str, Any]:
    return load(name, RESULTS)


def _where(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"Measured on {document['device']} with {versions} at commit {document['commit'][:12]}, {document['date']}."


def full_size_table() -> str:
    """Errors of every backend at full size on a GPU."""
    document = _load("h200_full_size.json")
    rows = [
        [
            row["model"],
            row["dtype"],
            row["backend"],
            str(row["tokens"]),
            f"{row['relative_error']:.1e}",
            f"{row['bound']:.0e}",
            "equal" if row["replay_equals_eager"] else "DIFFERS",
        ]
        for row in document["rows"]
    ]
    return f"{table(['layer', 'dtype', 'backend', 'T', 'error', 'bound', 'replay'], rows)}\n\n{_where(document)}"


def h200_table() -> str:
    """The triton backend on an H200, with its shares of the roofline."""
    document = _load("h200_table_bf16.json")
    rows = [[row["model"], str(row["tokens"]), *_times(row)] for row in _with_shares(document["rows"])]
    header = ["layer", "T", "ours us", "roofline us", "share", "error"]
    return f"{table(header, rows)}\n\n{_h200_summary(document)}"


def second_gpu_table() -> str:
    """Rows of the H200 table from another H200, as far as they tell the GPUs apart."""
    document = _load("h200_table_bf16_second_gpu.json")
    first = {(row["model"], row["tokens"]): row for row in _load("h200_table_bf16.json")["rows"]}
    rows = []
    for row in document["rows"]:
        slower = first[row["model"], row["tokens"]]["ours_us"] / row["ours_us"]
        rows.append([row["model"], str(row["tokens"]), f"{row['ours_us']:.1f}", f"{slower:.3f}"])
    return f"{table(['layer', 'T', 'ours us', 'time above / here'], rows)}\n\n{_h200_summary(document)}"


def _h200_summary(document: dict[str, Any]) -> str:
    ceilings = document["ceilings"]
    found = {name: value for name, value in document["summary"].items() if name.startswith("share ")}
    shares = ", ".join(f"{name.removeprefix('share ')} {value:.1%}" for name, value in found.items())
    lines = [f"Shares, geometric means: {shares}."] if shares else []
    lines.append(
        f"Ceilings in the same process: {ceilings['matmul_tflops']:.0f} TFLOP/s, {ceilings['read_tbps']:.2f} TB/s."
    )
    if "read_stream_tbps" in ceilings:
        lines.append(
            f"Measured but not used for shares: {ceilings['matmul_cold_tflops']:.0f} TFLOP/s over the first 0.15 s and "
            f"{ceilings['read_stream_tbps']:.2f} TB/s by the fastest known reader."
        )
    lines.append(_where(document))
    if note := document.get("note"):
        lines.append(f"{note[0].upper()}{note[1:]}.")
    return " ".join(lines)


def experts_table() -> str:
    """All registered backends side by side, by pytest-benchmark."""
    document = _load("h200_experts.json")
    times: dict[tuple[str, str], dict[str, str]] = {}
    clocks = []
    for bench in document["benchmarks"]:
        layer, tokens, backend, _ = bench["param"].rsplit("-", 3)
        facts = bench["extra_info"]
        clocks.append(facts["clocks"]["sm_mhz"])
        row = times.setdefault((layer, tokens.removeprefix("T")), {})
        # A backend may have several classes; a user gets the fastest at best.
        time_us = bench["stats"]["median"] * 1e6
        if backend not in row or time_us < float(row[backend].split()[0].replace(",", "")):
            row[backend] = f"{time_us:,.1f} ({facts['share_of_roofline']:.0%})"
    names = sorted({name for row in times.values() for name in row}, reverse=True)
    rows = [[layer, tokens, *(row.get(name, "-") for name in names)] for (layer, tokens), row in times.items()]
    ceilings = document["benchmarks"][0]["extra_info"]["ceilings"]
    where = (
        f"Times in us, of a backend's fastest class, and shares of {ceilings['matmul_tflops']:.0f} TFLOP/s in bf16 or "
        f"{ceilings['read_gbps'] / 1e3:.2f} TB/s, the latter by the fastest known reader. {_where(document)} "
        f"SM clocks right after a bench: {min(clocks)} to {max(clocks)} MHz."
    )
    return f"{table(['layer', 'T', *names], rows)}\n\n{where}"


def shapes_table() -> str:
    """The triton backend on layers that no peer was measured on."""
    document = _load("h200_shapes.json")
    skewed = _skewed_layers(document)
    rows = [row for row in _with_shares(document["rows"]) if row["layer"] not in skewed]
    lines = [[row["layer"], str(row["tokens"]), *_times(row)] for row in rows]
    return _with_notes(table(["layer", "T", "ours us", "roofline us", "share", "error"], lines), document)


def skewed_table() -> str:
    """The triton backend under skewed routing, beside uniform routing in the same process."""
    document = _load("h200_shapes.json")
    skewed = _skewed_layers(document)
    uniform = {
        (row["layer"], row["tokens"]): row
        for row in document["rows"]
        if row["layer"] in skewed and row["routing"] == "uniform" and not row["wrong"]
    }
    lines = []
    for row in _with_shares(document["rows"]):
        if row["routing"] != "uniform":
            beside = uniform.get((row["layer"], row["tokens"]))
            ours, *others = _times(row)
            even = f"{beside['ours_us']:.1f}" if beside else "-"
            lines.append([row["layer"], str(row["tokens"]), row["routing"], ours, even, *others])
    header = ["layer", "T", "routing", "ours us", "uniform us", "roofline us", "share", "error"]
    return _with_notes(table(header, lines), document)


def _skewed_layers(document: dict[str, Any]) -> set[str]:
    return {row["layer"] for row in document["rows"] if row["routing"] != "uniform"}


def _times(row: dict[str, Any]) -> list[str]:
    """Our time, the roofline, the share and the error."""
    if row["wrong"]:
        return ["wrong", "-", "-", "NaN" if row["relative_error"] is None else f"{row['relative_error']:.1e}"]
    roofline = ["-", "-"] if row["share"] is None else [f"{row['roof_us']:.1f}", f"{row['share']:.0%}"]
    return [f"{row['ours_us']:.1f}", *roofline, f"{row['relative_error']:.1e}"]


def _with_shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one set of ceilings, without shares where one of them beats these."""
    is_beaten = beats_ceilings(row.get("share") for row in rows)
    return [{**row, "share": None} if is_beaten and "share" in row else row for row in rows]


def _with_notes(table: str, document: dict[str, Any]) -> str:
    """The table, its machine, the ceilings there and the missing rows."""
    notes = []
    if "ceilings" in document:
        ceilings = document["ceilings"]
        notes.append(
            f"Ceilings in the same process: {ceilings['matmul_tflops']:.0f} TFLOP/s, {ceilings['read_tbps']:.2f} TB/s."
        )
    notes.append(_where(document))
    if document["left_out"]:
        names = ((row.get("scheme"), row.get("layer") or row["model"]) for row in document["left_out"])
        heads = (" ".join(filter(None, name)) for name in names)
        rows = (f"{head} T {row['tokens']}" for head, row in zip(heads, document["left_out"], strict=True))
        notes.append(f"Left out: {', '.join(dict.fromkeys(rows))}.")
    return f"{table}\n\n{' '.join(notes)}"


def host_time_table() -> str:
    """Host time of eager calls of the triton backend."""
    document = _load("h200_host_time.json")
    lines = []
    for row in document["rows"]:
        names = ("host_us", "inference_host_us", "eager_us")
        times = ["wrong"] * 3 if row["wrong"] else [f"{row[name]:.1f}" for name in names]
        lines.append([row["model"], str(row["tokens"]), *times])
    filled = table(["layer", "T", "host us", "in inference mode us", "end to end us"], lines)
    summary = f"Longest host time {document['worst_us']:.1f} us, bound {document['bound_us']:.0f} us."
    return f"{_with_notes(filled, document)} {summary}"


def sweep_table() -> str:
    """How far a shape that was left out of the tuning is from its own tuned result."""
    document = _load("h200_sweep.json")
    found = leave_one_out.leave_one_out(document["rows"])
    names = ("ratio_worst", "ratio_mean", "shipped_ratio_worst", "shipped_ratio_mean")
    lines = [
        [
            str(line["tokens"]),
            str(line["shapes"]),
            *("-" if line[name] is None else f"{line[name]:.3f}" for name in names),
        ]
        for line in leave_one_out.by_tokens(found)
    ]
    filled = table(["T", "shapes", "left out: worst", "mean", "shipped: worst", "mean"], lines)
    timed = sum(len(row["times_us"]) for row in document["rows"])
    skipped = sum(len(row["skipped"]) for row in document["rows"])
    alone = [f"{row['model']} T {row['tokens']}" for row in found if row["ratio"] is None]
    summary = (
        f"{timed} candidates timed, {skipped} skipped for lack of shared memory; "
        f"worst {leave_one_out.worst(found):.3f}, bound {document['bound']}."
    )
    if alone:
        summary += f" Alone in their class: {', '.join(alone)}."
    return f"{_with_notes(filled, document)} {summary}"


def quant_table() -> str:
    """The triton backend in quantized schemes on an H200."""
    tables = [_quant_table(document) for document in (_load("h200_quant.json"), *earlier_rows(RESULTS))]
    return "\n\nRows from an earlier commit, not measured again:\n\n".join(tables)


def _quant_table(document: dict[str, Any]) -> str:
    lines = []
    by_scheme: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        by_scheme.setdefault(row["scheme"], []).append(row)
    # A scheme has the ceiling of the elements that it multiplies.
    rows = [row for own in by_scheme.values() for row in _with_shares(own)]
    without = {row["scheme"] for row in rows if row.get("share", 0.0) is None}
    for row in rows:
        plain = [f"{row['bf16_us']:.1f}", f"{row['share_of_byte_ratio']:.0%}"] if "bf16_us" in row else ["", ""]
        lines.append([row["scheme"], row["model"], str(row["tokens"]), *_times(row), *plain])
    header = ["scheme", "layer", "T", "ours us", "roofline us", "share", "error", "bf16 us"]
    # Files of before have ratios to times of another machine, which say nothing.
    summaries = {
        scheme: [
            _summary_text(name, value)
            for name, value in line.items()
            if "peer" not in name and not (scheme in without and name.startswith("share T"))
        ]
        for scheme, line in document["summary"].items()
        if scheme in by_scheme
    }
    summary = [f"- `{scheme}`: {'; '.join(texts)}." for scheme, texts in summaries.items()]
    rates = document["ceilings"]
    notes = [
        f"Ceilings in the same process: {rates['read_tbps']:.2f} TB/s",
        *(f"{name.removesuffix('_tflops')} {rate:.0f} TFLOP/s" for name, rate in rates.items() if name != "read_tbps"),
    ]
    filled = table([*header, "share of the byte ratio"], lines)
    text = "\n\n".join([filled, "\n".join(summary), f"{', '.join(notes)}."])
    return _with_notes(text, _without(document, "ceilings"))


def one_token_table() -> str:
    """One token in bf16 beside what a graph, its launches and its bytes cost alone."""
    document = _load("h200_one_token.json")
    rows = []
    for row in document["rows"]:
        times = [f"{row[name]:.1f}" for name in ("layer", "one_nothing", "nothing", "read")]
        rows.append([row["model"], f"{row['num_bytes'] / 1e6:.1f}", *times])
    header = ["layer", "MB", "ours us", "an empty kernel us", "as many empty kernels us", "reading the bytes us"]
    return _with_notes(table(header, rows), {"left_out": [], **document})


def cold_start_table() -> str:
    """Cost of a layer's kernels from an empty cache."""
    document = _load("h200_cold_start.json")
    rows = []
    for row in document["rows"]:
        ahead = f"{row['compile_seconds']:.1f}" if "compile_seconds" in row else ""
        counts = [str(row[name]) for name in ("kernels", "compiled")]
        after = f"{row['compiled_by_calls']} in {row['calls']}"
        rows.append([row["quant"], row["how"], ahead, *counts, f"{row['seconds']:.1f}", after])
    header = ["scheme", "how", "ahead s", "kernels", "compiled by warm_up", "warm_up s", "compiled by calls after it"]
    return f"{table(header, rows)}\n\n{document['cores']} cores. {_where(document)} {document['note']}"


def _summary_text(name: str, value: dict[str, Any] | float) -> str:
    name = name.replace("share_of_byte_ratio", "share of the byte ratio")
    if isinstance(value, dict):
        return f"{name} {value['value']:.3f} ({value['model']} T {value['tokens']})"
    return f"{name} {value:.3f}"


def _without(document: dict[str, Any], field: str) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != field}


TABLES: dict[str, Callable[[], str]] = {
    "full_size": full_size_table,
    "h200": h200_table,
    "second_gpu": second_gpu_table,
    "experts": experts_table,
    "shapes": shapes_table,
    "skewed": skewed_table,
    "quant": quant_table,
    "one_token": one_token_table,
    "host_time": host_time_table,
    "sweep": sweep_table,
    "cold_start": cold_start_table,
}

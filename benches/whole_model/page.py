"""The tables and the picture of docs/whole-models.md."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benches.markdown import table
from benches.stored import RESULTS
from benches.whole_model.models import CONTEXT
from moereg.cli._whole_model_page import Bar, draw_bars

__all__ = ["TABLES", "draw_whole_models", "records", "summary"]

_OURS: Final = "moereg"
_RIVALS: Final = ("eager", "batched_mm", "grouped_mm")
_NAMES: Final = {**{name: name for name in (*_RIVALS, _OURS)}, "moereg_mxfp4": "moereg, mxfp4"}
_ORDER: Final = ("qwen3-30b-a3b", "gpt-oss-20b", "olmoe-1b-7b", "mixtral-8x7b")
_MODES: Final = {"eager": "called", "compiled": "torch.compile"}

Rows = dict[tuple[str, str, int, int], dict[str, dict[str, Any]]]


def records(folder: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
    """The stored files, in the order of the page.

    Raises:
        FileNotFoundError: There is none.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("whole_model_*.json")]
    if not found:
        raise FileNotFoundError(f"no whole_model_*.json in {folder}")
    return sorted(found, key=lambda record: (*_ORDER, record["model"]).index(record["model"]))


def _rows(record: Mapping[str, Any]) -> Rows:
    """By case, then by implementation."""
    found: Rows = {}
    for row in record["rows"]:
        key = row["phase"], row["mode"], row["batch"], row["tokens"]
        found.setdefault(key, {})[row["implementation"]] = row
    return found


def _gain(rows: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The fastest other implementation's time over ours, on the same weights."""
    others = [rows[name]["ms"] for name in _RIVALS if "ms" in rows.get(name, {})]
    if not others or "ms" not in rows.get(_OURS, {}):
        return None
    ratio: float = min(others) / rows[_OURS]["ms"]
    return ratio


def _speeds(
    found: Sequence[Mapping[str, Any]], wanted: Callable[[str, str], bool], what: Callable[[str, str, int, int], str]
) -> str:
    names = [name for name in _NAMES if any(row["implementation"] == name for each in found for row in each["rows"])]
    lines = []
    for record in found:
        for (phase, mode, batch, tokens), rows in _rows(record).items():
            if wanted(phase, mode):
                gain = _gain(rows)
                best = max((row["tokens_per_s"] for row in rows.values() if "ms" in row), default=0.0)
                cells = [_speed(rows.get(name), best) for name in names]
                ratio = "" if gain is None else f"{gain:.2f}"
                lines.append([record["model"], what(phase, mode, batch, tokens), *cells, ratio])
    return table(["model", "tokens a second", *(_NAMES[name] for name in names), "moereg / best other"], lines)


def _speed(row: Mapping[str, Any] | None, best: float) -> str:
    if row is None:
        return "-"
    if "ms" not in row:
        return str(row["outcome"]).partition(":")[0].replace("|", "/")[:60]
    text = f"{row['tokens_per_s']:,.0f}"
    return f"**{text}**" if row["tokens_per_s"] == best else text


def _case(phase: str, mode: str, batch: int, tokens: int) -> str:
    return f"prefill {batch} x {tokens:,}" if phase == "prefill" else f"decode, batch {batch}"


def speeds_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Prefill, and decode steps in CUDA graphs."""
    found = records() if found is None else found
    return _speeds(found, lambda phase, mode: phase == "prefill" or mode == "graph", _case)


def readme_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Speed of the fastest other implementation and of moereg, by model, for what a reader asks first."""
    asked = [("prefill", "eager", 1, 4096), *(("decode", "graph", batch, CONTEXT) for batch in (1, 16, 64))]
    lines = []
    for record in records() if found is None else found:
        cells = []
        for case in asked:
            rows = _rows(record).get(case, {})
            gain, other = _gain(rows), max((rows.get(name, {}).get("tokens_per_s", 0) for name in _RIVALS), default=0)
            cells.append(f"{other:,.0f} → {_speed(rows.get(_OURS), 0)}" + (f" ({gain:.2f}x)" if gain else ""))
        lines.append([record["model"], *cells])
    heads = [f"decoding {batch} sequence{'s' * (batch > 1)}" for _, _, batch, _ in asked[1:]]
    return table(["tokens a second", "prompt of 4,096 tokens", *heads], lines)


def calls_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Decode steps that are called and compiled."""

    def what(phase: str, mode: str, batch: int, tokens: int) -> str:
        return f"decode, batch {batch}, {_MODES[mode]}"

    found = records() if found is None else found
    return _speeds(found, lambda phase, mode: phase == "decode" and mode != "graph", what)


def checks_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Distances of experts' outputs and of logits from those in fp32."""
    lines = []
    for record in records() if found is None else found:
        for name, check in record["checks"].items():
            if "norm" not in check:
                lines.append([record["model"], _NAMES[name], check["outcome"], "", "", "", ""])
                continue
            same = f"{check['same_token']:.1%}", f"{check['to_eager']['same_token']:.1%}"
            distances = (f"{check[of]:.4f}" for of in ("layers", "norm", "max"))
            lines.append([record["model"], _NAMES[name], *distances, *same])
        zeros = record["control"]
        control = "1.0000", f"{zeros['norm']:.4f}", f"{zeros['max']:.4f}", f"{zeros['same_token']:.1%}"
        bounds = f"bounds {record['layer_bound']:.4f} and {record['bound']:.4f}"
        lines.append([record["model"], f"experts return zeros ({bounds})", *control, ""])
    logits = ["logits' distance", "largest", "same token as fp32", "same as eager"]
    header = ["model", "experts", "experts' distance from fp32", *logits]
    return table(header, lines)


def memory_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Weights, what `prepare` takes and leaves, and where it was measured."""
    lines = []
    for record in records() if found is None else found:
        freed, kept = record.get("prepare_free", {}), record.get("prepare", {})
        # Older files have the first where the next one did not overwrite it.
        made = record.get("first_prepare", freed if kept else {})
        rows = [row for row in record["rows"] if row["implementation"] == _OURS and "extra_bytes" in row]
        quantized = record.get("quantized")
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        lines.append(
            [
                record["model"],
                f"{record['parameters'] / 1e9:.1f} B",
                _gb(record["weights_bytes"]),
                _gb(kept.get("bytes_after")),
                _gb(freed.get("bytes_after")),
                _gb(quantized["bytes"]) if quantized else "-",
                _gb(max((row["extra_bytes"] for row in rows), default=None)),
                f"{made['seconds']:.1f} + {made['warm_up_seconds']:.1f}" if made else "-",
                f"{record['device']}, {versions}, moereg {record['commit'][:7]}, {record['date']}",
            ]
        )
    header = ["model", "parameters", "weights", "prepared", "with `free=True`", "experts in mxfp4", "most beside them"]
    return table([*header, "prepare + warm up, s", "where"], lines)


def _gb(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def host_table(found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Host time of a decode step that is called, and of its experts."""
    lines = []
    for record in records() if found is None else found:
        for row in record.get("host", []):
            step, experts = row["step_ms"], row["experts_us"] * record["layers"] / 1e3
            name = _NAMES[row["implementation"]]
            cells = f"{step:.1f}", f"{experts:.1f}", f"{row['experts_us']:.0f}"
            lines.append([record["model"], str(row["batch"]), name, *cells])
    return table(["model", "batch", "experts", "step, ms", "of it experts, ms", "us a layer"], lines)


def functions_table(record: Mapping[str, Any], batch: int | None = None) -> str:
    """Host time of moereg's experts, by function."""
    lines = []
    for row in record.get("host", []):
        if "functions" in row and batch in (None, row["batch"]):
            for name, calls, own, total in row["functions"]:
                lines.append([str(row["batch"]), name, f"{calls:.1f}", f"{own:.1f}", f"{total:.1f}"])
    return table(["batch", "function", "calls a layer", "own us", "us with what it calls"], lines)


def picture() -> str:
    """The line that shows the picture, once there is one."""
    names = ", ".join(record["model"] for record in records())
    return f"![Speed of {names} with each experts implementation over that with grouped_mm](whole_models.svg)"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "whole_models_picture": picture,
    "whole_models": speeds_table,
    "whole_models_summary": readme_table,
    "whole_models_calls": calls_table,
    "whole_models_checks": checks_table,
    "whole_models_memory": memory_table,
    "whole_models_host": host_table,
}


def summary(found: Sequence[Mapping[str, Any]]) -> str:
    """All tables of these files, and what is missing."""
    complete = [record for record in found if "checks" in record and "layers" in record]
    parts = [make(complete) for make in (checks_table, memory_table, host_table, calls_table, speeds_table)]
    failed = [f"{record['model']} failed: {record['failed']}" for record in found if "failed" in record]
    late: dict[str, list[str]] = {}
    for record in found:
        for row in record["left_out"]:
            case = f"{record['model']} {_case(row['phase'], row['mode'], row['batch'], row['tokens'])} {row['mode']}"
            late.setdefault(f"{row['why']}: {case}", []).append(row["implementation"])
    left = ["\n".join(f"{case}: {', '.join(names)}" for case, names in late.items())] if late else []
    return "\n\n".join([*(functions_table(record, 1) for record in complete), *left, *parts, *failed])


def draw_whole_models(path: pathlib.Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Speed over that of grouped_mm: a panel for each model, a group of bars for each case.

    Args:
        path: An SVG, overwritten.
        found: Stored files.
    """
    panels: dict[str, dict[str, dict[str, Bar]]] = {}
    for record in found:
        groups = panels.setdefault(record["model"], {})
        for key, rows in _rows(record).items():
            if (key[0] == "prefill" or key[1] == "graph") and "ms" in rows.get("grouped_mm", {}):
                base = rows["grouped_mm"]["ms"]
                groups[_case(*key).replace("prefill ", "prefill, ")] = {
                    name: Bar(base / row["ms"], base / row["p90_ms"], base / row["p10_ms"], f"{base / row['ms']:.2f}")
                    for name, row in rows.items()
                    if "ms" in row
                }
    title = "Models in transformers, by experts implementation: speed over grouped_mm"
    path.write_text(draw_bars(panels, _NAMES, title), encoding="utf-8")


if __name__ == "__main__":
    print(summary([json.loads(pathlib.Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:]]))

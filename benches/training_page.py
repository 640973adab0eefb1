"""The tables and the picture of docs/training.md."""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any, Final

from benches.markdown import table, wrapped
from benches.stored import RESULTS, load

__all__ = ["CURVE", "TABLES", "WHOLE", "curve_table", "draw_training_curve", "load_curve", "whole_training_table"]

WHOLE: Final = "whole_training_h200.json"
WHOLE_NF4: Final = "whole_training_nf4_h200.json"
CURVE: Final = "training_curve_h200.json"
_REFERENCE: Final = "grouped_mm-checkpoint"
_NAMES: Final = {
    "grouped_mm": "PEFT on grouped_mm",
    "moereg": "PEFT on moereg",
    "moereg_4bit": "PEFT on moereg, 4-bit experts",
}
_RECOMPUTED: Final = {
    "checkpoint": "layers recomputed",
    "selective": "all but the experts' products recomputed",
    "": "nothing recomputed",
}
# Okabe and Ito's, which everyone can tell apart.
_COLORS: Final = {"eager": "#000000", "grouped_mm": "#E69F00", "moereg": "#0072B2"}
_LAST: Final = 20
"""Steps whose mean stands for the end of a curve."""


def _name(side: str) -> str:
    implementation, _, recomputes = side.partition("-")
    return f"{_NAMES[implementation]}, {_RECOMPUTED[recomputes]}"


def whole_training_table(record: Mapping[str, Any] | None = None) -> str:
    """Tokens a second and peak memory of each side, its losses, and its distance from the reference."""
    record = load(WHOLE, RESULTS) if record is None else record
    rows = {row["side"]: row for row in record["rows"]}
    reference = rows.get(_REFERENCE, {})
    lines = []
    for side, row in rows.items():
        if "ms" not in row:
            lines.append([_name(side), row["outcome"], *[""] * 6])
            continue
        ratio = f"{reference['ms'] / row['ms']:.2f}x" if "ms" in reference else "-"
        peak = f"{row['peak_bytes'] / 1e9:.1f} GB" if "peak_bytes" in row else "-"
        difference = row.get("difference", {})
        gradients = f"{max(difference['gradients'].values()):.3f}" if difference else "-"
        speed = [f"{row['tokens_per_s']:,.0f}", f"{row['ms']:,.0f}", ratio, peak]
        losses = " ".join(f"{loss:.4f}" for loss in (*row["losses"][:3], row["losses"][-1]))
        lines.append([_name(side), *speed, losses, f"{difference['losses']:.3f}" if difference else "-", gradients])
    first = f"losses of steps 1, 2, 3, {len(next((row['losses'] for row in rows.values() if 'losses' in row), []))}"
    heads = ["tokens a second", "ms a step", "speed", "peak memory", first]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    where = (
        f"{record['model']}, {record['layers']} layers, {record['sequences']} x {record['length']:,} tokens a step, "
        f"rank {record['rank']}; {record['device']}, {versions}, commit {record['commit'][:7]}, {record['date']}."
    )
    return table(["side", *heads, "losses' distance", "gradients' distance"], lines) + f"\n\n{wrapped(where)}"


def whole_nf4_table() -> str:
    """Experts in 16 bits and in NF4: tokens a second, and memory by what needs it."""
    record = load(WHOLE_NF4, RESULTS)
    lines = []
    for row in record["rows"]:
        terms = *row["memory"].values(), row["peak_bytes"] - sum(row["memory"].values()), row["peak_bytes"]
        experts = "NF4" if row["quantizes"] else "16 bits"
        lines.append([experts, f"{row['tokens_per_s']:,.0f}", *(f"{value / 1e9:.1f} GB" for value in terms)])
    heads = ["experts in", "tokens a second", *record["rows"][0]["memory"], "the rest", "peak"]
    return f"{table(heads, lines)}\n\n{record['device']}, commit {record['commit'][:7]}, {record['date']}."


def load_curve(folder: pathlib.Path = RESULTS) -> dict[str, Any]:
    """The stored curve.

    Raises:
        FileNotFoundError: It is not there.
    """
    found: dict[str, Any] = json.loads((folder / CURVE).read_text(encoding="utf-8"))
    return found


def curve_table(record: Mapping[str, Any] | None = None) -> str:
    """Losses on the way, and whether the second run had the first one's bits."""
    record = load_curve() if record is None else record
    steps, runs = record["steps"], [run for run in record["runs"] if run["text"] == 0]
    places = [0, *(steps * part // 4 - 1 for part in (1, 2, 3))]
    heads = [f"step {place + 1}" for place in places]
    last = min(_LAST, steps)
    lines = []
    for run in runs:
        losses = [f"{run['losses'][place]:.4f}" for place in places]
        lines.append([run["name"], *losses, f"{statistics.mean(run['losses'][-last:]):.4f}", run["digest"][:12]])
    same = {what: "equal bit for bit" if is_equal else "not equal" for what, is_equal in record["equal_bits"].items()}
    warned = sorted({warning for run in runs if run["implementation"] == "moereg" for warning in run["warnings"]})
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    said = "; ".join(f"`{one}`" for one in warned) or "none"
    ends = ", ".join(f"{end:+.1%}" for end in record["ends"])
    spread = ""
    if len(record["ends"]) > 1:
        spread = f" with a standard error of {statistics.stdev(record['ends']) / len(record['ends']) ** 0.5:.1%}"
    quarter = {run["name"]: statistics.mean(run["losses"][-max(1, steps // 4) :]) for run in runs}
    from_eager = ", ".join(f"{name} {quarter[name] / quarter['eager'] - 1:+.1%}" for name in ("grouped_mm", "moereg"))
    facts = (
        f"Averaged over the last {steps // 4} steps, losses differ from eager's by: {from_eager}. moereg's differ from "
        f"grouped_mm's by {ends} on {len(record['ends'])} texts, this one first: on average by "
        f"{statistics.mean(record['ends']):+.1%}{spread}. Of the two runs of moereg, losses of all {steps} steps are "
        f"{same['losses']} and final parameters {same['parameters']}. Operations in them that torch calls "
        f"nondeterministic: {said}. {record['tokens']:,} tokens a step; {record['device']}, {versions}, commit "
        f"{record['commit'][:7]}, {record['date']}."
    )
    return table(["run", *heads, f"mean of the last {last}", "sha256 of parameters"], lines) + f"\n\n{wrapped(facts)}"


def _picture() -> str:
    record = load_curve()
    return (
        f"![Loss over {record['steps']} steps of a small language model with moereg and with transformers' eager, "
        "and their difference](training_curve.svg)"
    )


TABLES: Final[dict[str, Callable[[], str]]] = {
    "whole_training": whole_training_table,
    "whole_training_nf4": whole_nf4_table,
    "training_curve_picture": _picture,
    "training_curve": curve_table,
}


def draw_training_curve(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Losses over steps, and beneath them each implementation's difference from eager.

    Args:
        path: An SVG, overwritten.
        record: The stored curve.
    """
    import matplotlib
    from matplotlib.figure import Figure

    runs = {run["name"]: run["losses"] for run in record["runs"] if run["text"] == 0 and run["name"] in _COLORS}
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": path.name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained", facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        steps = range(1, record["steps"] + 1)
        for name, losses in runs.items():
            above.plot(steps, losses, color=_COLORS[name], label=name, linewidth=1, linestyle=_line(name))
            if name != "eager":
                difference = [loss - eager for loss, eager in zip(losses, runs["eager"], strict=True)]
                below.plot(steps, difference, color=_COLORS[name], linewidth=1)
        above.set_ylabel("loss, nats a byte")
        above.legend(frameon=False)
        below.axhline(0.0, color="#777777", linewidth=0.8, zorder=0)
        below.set_ylabel("minus eager")
        below.set_xlabel("step")
        figure.suptitle("A small MoE language model in bfloat16, by experts implementation", x=0.01, ha="left", size=9)
        figure.savefig(path, metadata={"Date": None})


def _line(name: str) -> str:
    return "--" if name == "moereg" else "-"

"""Output of `moereg quantize`: a table, a sketch for the terminal, and a picture."""

from __future__ import annotations

import math
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from moereg.cli._output import console
from moereg.cli._plot import COLORS, FAINT, INK, STYLE, axis_us
from moereg.cli._quantize_result import QuantizeResult, SchemeRow
from moereg.cli._units import format_us
from moereg.memory import format_bytes
from moereg.selection import nearest_by_backend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_quantize", "show_quantize"]

_LETTERS: Final = string.ascii_lowercase + string.ascii_uppercase
_SKETCH: Final = (60, 12)
_FEWEST_POINTS: Final = 3
_EMULATION: Final = "~"
_LABEL_PIXELS: Final = (8, 16)
"""Width and height of a letter in the picture."""


def show_quantize(result: QuantizeResult) -> None:
    """Prints the comparison and what was written or, if nothing fitted, the reasons."""
    target = console(sys.stdout)
    question, original = result.question, result.original
    target.print(f"{result.subject}: {result.problem}")
    versions = ", ".join(f"{name} {version}" for name, version in result.measured_on["versions"].items())
    target.print(f"on {result.measured_on['device']} ({result.platform}), {versions}, {result.measured_on['date']}")
    if original is not None:
        what = "the layer's own inputs" if result.inputs == "given" else "random hidden states"
        target.print(f"errors against the original in fp32, of weights and of output, on {what}")
        target.print(_table(result, original))
        _print_notes(target.print, result)
        if len(result.rows) >= _FEWEST_POINTS:
            target.print(f"\nerror of the output (log) over size, up to the original's {_size(original)}:")
            for line in sketch(result):
                target.print(f"  {line}")
    why: dict[str, list[str]] = {}
    for name, selection in result.skipped:
        nearest = nearest_by_backend(selection.decisions)[0]
        why.setdefault(f"{nearest.backend}: {nearest.reasons[0].text}", []).append(name)
    for reason, names in why.items():
        target.print(f"not on this machine: {', '.join(names)} ({reason})")
    if result.original is None and not result.skipped:
        target.print("nothing here computes the original, which the others are compared with")
    for row in (*([original] if original else []), *result.rows):
        for measured in row.measured:
            if problem := measured.failure or measured.damage:
                label = f"{row.quant} on {row.decision.backend}"
                target.print(Text(f"{label} FAILED at {measured.num_tokens} tokens: {problem}", style="bold red"))
            elif not measured.passed:
                target.print(
                    Text(
                        f"{row.quant} on {row.decision.backend} is WRONG at {measured.num_tokens} tokens: "
                        f"{measured.relative_error:.1e} > {measured.tolerance:.1e} from its own reference",
                        style="bold red",
                    )
                )
    saved = result.saved
    if saved is not None:
        layers = f"layer {saved.layers[0]}" if len(saved.layers) == 1 else f"{len(saved.layers)} layers"
        back = "the same bits" if result.read_back else "OTHER BITS"
        target.print(f"wrote {saved.path}: {layers} in {saved.quant.name}, {format_bytes(saved.num_bytes)} in all")
        target.print(f"read back by load_experts, layer {question.layer}: {back}")
    elif question.out is not None and result.rows:
        target.print("nothing was written, since something was wrong")
    elif result.rows:
        target.print("nothing was written; --quant NAME --out DIR writes a checkpoint with the experts of all layers")


def _print_notes(show: Any, result: QuantizeResult) -> None:
    unbeaten = [row.quant for row in result.unbeaten()]
    if len(result.rows) > 1 and unbeaten:
        show("* no other is smaller, nearer and faster at once")
    if any(row.decision.tier != "kernel" for row in result.rows):
        show(f"{_EMULATION} an emulation here: the scheme's numbers without its speed")
    others = [row for row in result.rows if row.decision.computes != row.quant]
    if others:
        names = ", ".join(f"{row.quant} as {row.decision.computes}" for row in others)
        show(f"computed with 16-bit activations, which are nearer: {names}")
    backends = sorted({row.decision.backend for row in result.rows})
    show(f"ran on {', '.join(backends)}; x is the speed against the original beside it")


def _table(result: QuantizeResult, original: SchemeRow) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in ("scheme", "size", "weights", "output", *(f"T={count}" for count in result.question.token_counts)):
        table.add_column(column, overflow="fold", justify="left" if column == "scheme" else "right")
    unbeaten = result.unbeaten() if len(result.rows) > 1 else ()
    table.add_row(_original(original), _size(original), "", "", *_times(original, None))
    table.add_section()
    for letter, row in zip(_letters(result.rows), result.rows, strict=True):
        mark = "*" if row in unbeaten else ""
        table.add_row(
            Text(f"{letter} {row.quant}{mark}", style="bold green" if mark else ""),
            _size(row),
            f"{row.weights_error:.1%}",
            f"{row.output_error:.1%}",
            *_times(row, row.original_us),
        )
    return table


def _original(row: SchemeRow) -> str:
    return "original" if row.quant == "unquantized" else f"original, {row.quant}"


def _letters(rows: Sequence[SchemeRow]) -> str:
    return (_LETTERS * (len(rows) // len(_LETTERS) + 1))[: len(rows)]


def _size(row: SchemeRow) -> str:
    return format_bytes(row.num_bytes)


def _times(row: SchemeRow, original_us: Sequence[float] | None) -> list[str | Text]:
    mark = _EMULATION if row.decision.tier != "kernel" else ""
    found: list[str | Text] = []
    for place, measured in enumerate(row.measured):
        if measured.timing is None:
            found.append(Text("WRONG", style="bold red"))
            continue
        ratio = "" if original_us is None else f" {original_us[place] / measured.time_us:.1f}x"
        found.append(f"{mark}{format_us(measured.time_us)}{ratio}")
    return found


def sketch(result: QuantizeResult) -> list[str]:
    """Error of the output, log, over size: the letters of the table in a frame."""
    width, height = _SKETCH
    rows = [row for row in result.rows if row.output_error > 0]
    assert result.original is not None
    if not rows:
        return []
    low, high = (math.log10(choose(row.output_error for row in rows)) for choose in (min, max))
    right = max(result.original.num_bytes, *(row.num_bytes for row in rows))
    left = min(row.num_bytes for row in rows)
    grid = [[" "] * width for _ in range(height)]
    for letter, point in zip(_letters(result.rows), result.rows, strict=True):
        if point not in rows:
            continue
        x = round((point.num_bytes - left) / max(right - left, 1) * (width - 1))
        y = round((high - math.log10(point.output_error)) / max(high - low, 1e-9) * (height - 1))
        # Points on one spot stand around it; a letter is twice as high as it is wide.
        free = [(row, column) for row in range(height) for column in range(width) if grid[row][column] == " "]
        y, x = min(free, key=lambda cell, at=(y, x): (2 * abs(cell[0] - at[0]) + abs(cell[1] - at[1]), cell))  # type: ignore[misc]
        grid[y][x] = letter
    marks = {0: f"{10**high:.1%}", height - 1: f"{10**low:.1%}"}
    lines = [f"{marks.get(y, ''):>7} |{''.join(cells).rstrip()}" for y, cells in enumerate(grid)]
    first, last = format_bytes(left), format_bytes(right)
    return [*lines, f"{'':>7} +{'-' * width}", f"{'':>9}{first}{last:>{width - len(first)}}"]


def plot_quantize(result: QuantizeResult, path: Path) -> None:
    """Writes the picture; the file's ending says its format.

    Args:
        result: With rows.
        path: As `check_can_plot` wants it; overwritten.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    original = result.original
    assert original is not None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 5.4), dpi=150, facecolor="white")
        sizes, times = figure.subplots(1, 2, sharey=True)
        figure.subplots_adjust(left=0.07, right=0.79, top=0.8, bottom=0.11, wspace=0.07)
        sizes.set_yscale("log")
        sizes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        sizes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        sizes.yaxis.set_minor_locator(NullLocator())
        sizes.set_ylabel("error of the output")
        sizes.set_xlabel("size of the layer's experts, MB")
        times.set_xscale("log")
        times.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        times.xaxis.set_major_formatter(FuncFormatter(axis_us))
        times.xaxis.set_minor_locator(NullLocator())
        times.set_xlabel(f"time of a call of {result.question.token_counts[-1]} tokens")
        _draw(sizes, result.rows, [row.num_bytes / 1e6 for row in result.rows], original.num_bytes / 1e6)
        sizes.set_xlim(left=0)
        _draw(times, result.rows, [row.measured[-1].time_us for row in result.rows], original.measured[-1].time_us)
        figure.canvas.draw()
        for axes in (sizes, times):
            _label(axes, _letters(result.rows))
        title = f"{result.subject}, on {result.measured_on['device']}"
        figure.text(0.07, 0.93, title, fontsize=15, fontweight="bold", color=INK)
        inputs = "its own inputs" if result.inputs == "given" else "random hidden states"
        facts = ("dashed: the original", "hollow: an emulation", f"errors on {inputs}", result.measured_on["date"])
        figure.text(0.07, 0.88, " · ".join(map(str, (result.problem, *facts))), fontsize=10, color=FAINT)
        for place, (letter, row) in enumerate(zip(_letters(result.rows), result.rows, strict=True)):
            y = 0.78 - 0.036 * place
            figure.text(0.805, y, letter, fontsize=10, fontweight="bold", color=_color(row, result.rows))
            figure.text(0.825, y, row.quant, fontsize=10, color=INK)
        figure.savefig(path)


def _color(row: SchemeRow, rows: Sequence[SchemeRow]) -> str:
    families = list(dict.fromkeys(row.quant.partition("_")[0] for row in rows))
    return COLORS[families.index(row.quant.partition("_")[0]) % len(COLORS)]


def _draw(axes: Axes, rows: Sequence[SchemeRow], values: Sequence[float], original: float) -> None:
    for row, value in zip(rows, values, strict=True):
        color = _color(row, rows)
        filled = color if row.decision.tier == "kernel" else "white"
        error = row.output_error if row.output_error > 0 else math.nan  # A logarithm has no place for none.
        axes.plot([value], [error], "o", color=color, markerfacecolor=filled, markersize=7, zorder=3)
    axes.axvline(original, color=FAINT, linestyle=(0, (4, 3)), linewidth=1.6)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)


def _label(axes: Axes, letters: str) -> None:
    """Writes each point's letter beside it; points whose labels would touch share one."""
    labels: list[tuple[tuple[float, float], tuple[float, float], list[str]]] = []
    for letter, line in zip(letters, axes.get_lines(), strict=False):
        data: Any = line.get_data()
        x, y = (float(values[0]) for values in data)
        if not (math.isfinite(x) and math.isfinite(y)):
            continue
        across, up = axes.transData.transform((x, y))
        for _, (left, bottom), found in labels:
            width = _LABEL_PIXELS[0] * (2 * len(found) + 1)  # With commas, and the new letter.
            if left - width < across < left + width and abs(up - bottom) < _LABEL_PIXELS[1]:
                found.append(letter)
                break
        else:
            labels.append(((x, y), (across, up), [letter]))
    for point, _, found in labels:
        axes.annotate(",".join(found), point, (6, 4), textcoords="offset points", fontsize=9, color=INK)

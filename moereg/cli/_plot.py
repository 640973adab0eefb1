"""The plot of `moereg bench`: time and percent of the roofline over tokens, one line per backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from moereg.cli._bench import BenchResult
from moereg.cli._options import UsageError
from moereg.cli._show import versions_of
from moereg.tuning.compare import Measurement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.ticker import Locator

Result = TypeVar("Result")

# Okabe and Ito's colors, which color-blind readers can tell apart, strong ones first.
COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_MARKERS: Final = "osD^vPX"
INK: Final = "#222222"
FAINT: Final = "#777777"
STYLE: Final[dict[Any, Any]] = {
    "font.family": "sans-serif",
    "font.size": 11,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titlecolor": INK,
    "axes.titlepad": 10,
    "legend.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "svg.fonttype": "none",
}

_ROOFLINE: Final = "roofline"
# Inches, except for the left margin; the legend takes as many rows as it needs.
_WIDTH: Final = 11.5
_PANEL_HEIGHT: Final = 3.7
_LEGEND_TOP: Final = 0.95
_LEGEND_ROW: Final = 0.26
_LEFT: Final = 0.07
_LINE_LETTERS: Final = 120
_FEW_DECADES: Final = 1e3
_LEAST_SHARE: Final = 0.1


def check_can_plot(path: Path) -> None:
    """Checks before measuring that a plot can be made and written.

    Raises:
        UsageError: matplotlib is missing or cannot write this format, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed; pip install 'moereg[plot]'") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise UsageError(
            f"--plot takes a file such as bench.png, got {str(path)!r} (known: {', '.join(sorted(known))})"
        )
    if not path.parent.is_dir():
        raise UsageError(f"--plot writes into an existing folder, got {str(path)!r}; make {path.parent} first")
    was_there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"--plot needs a file that can be written, got {str(path)!r}: {error.strerror}") from None
    if not was_there:
        path.unlink()


def write_plot(draw: Callable[[Result, Path], None], result: Result, path: Path) -> None:
    """Draws a result into a file.

    Raises:
        UsageError: The file cannot be written, such as on a full disk.
    """
    try:
        draw(result, path)
    except OSError as error:
        raise UsageError(f"--plot could not write {str(path)!r}: {error.strerror}") from None


def plot_bench(result: BenchResult, path: Path) -> None:
    """Writes the plot in the format of the file's suffix.

    Args:
        result: A result with rows.
        path: A path that `check_can_plot` accepts; overwritten.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # A separate figure instead of pyplot, to leave display and settings alone.
    with matplotlib.rc_context(STYLE):
        names = [*result.labels().values(), _ROOFLINE]
        columns = max(1, min(len(names), _LINE_LETTERS // (max(map(len, names)) + 8)))
        legend_rows = -(-len(names) // columns)
        above = _LEGEND_TOP + _LEGEND_ROW * legend_rows + 0.45
        height = above + _PANEL_HEIGHT + 0.65
        figure = Figure(figsize=(_WIDTH, height), dpi=150, facecolor="white")
        # A pane of shares near 0 shows nothing.
        if max(row.share for row in result.rows) < _LEAST_SHARE:
            times, shares = figure.subplots(), None
        else:
            times, shares = figure.subplots(1, 2, width_ratios=(1.25, 1))
        figure.subplots_adjust(left=_LEFT, right=0.985, top=1 - above / height, bottom=0.65 / height, wspace=0.17)
        _draw_lines(result, times, shares)
        _finish_axes(result, times, shares)
        for axes in figure.axes:
            hide_ticks_that_meet(axes)
        problem, ceilings, measured_on = result.selection.problem, result.ceilings, result.measured_on
        assert ceilings is not None
        title = f"{result.subject}, {problem.quant.name} {problem.dtype}, on {measured_on['device']}"
        rates = f"{ceilings.matmul_tflops:.3g} TFLOP/s, {ceilings.read_gbps:,.0f} GB/s"
        facts = (
            f"{problem} · {result.routing} routing · median of a call, shaded from p10 to p90",
            f"ceilings {rates} · {versions_of(measured_on)} · {measured_on['date']}",
        )
        figure.text(_LEFT, 1 - 0.38 / height, title, fontsize=15, fontweight="bold", color=INK)
        for line, text in enumerate(facts):
            figure.text(_LEFT, 1 - (0.62 + 0.2 * line) / height, text, fontsize=10, color=FAINT)
        figure.legend(
            *times.get_legend_handles_labels(),
            loc="upper left",
            bbox_to_anchor=(_LEFT - 0.007, 1 - _LEGEND_TOP / height),
            ncols=columns,
            frameon=False,
            borderaxespad=0.0,
        )
        figure.savefig(path)


def _draw_lines(result: BenchResult, times: Axes, shares: Axes | None) -> None:
    for number, (decision, label) in enumerate(result.labels().items()):
        rows = [row for row in result.rows if row.decision == decision]
        tokens = [row.num_tokens for row in rows]
        color = COLORS[number % len(COLORS)]
        look: dict[str, Any] = {"color": color, "marker": _MARKERS[number % len(_MARKERS)], "clip_on": False}
        look |= {"markeredgecolor": "white", "markeredgewidth": 1.0, "zorder": 3}
        times.plot(tokens, [row.time_us for row in rows], label=label + _wrong_at(rows), **look)
        if shares is not None:
            shares.plot(tokens, [100 * row.share for row in rows], **look)
        timed = [row for row in rows if row.timing is not None]
        times.fill_between(
            [row.num_tokens for row in timed],
            [row.timing.p10_us for row in timed if row.timing],
            [row.timing.p90_us for row in timed if row.timing],
            color=color,
            alpha=0.15,
            linewidth=0,
        )
    roofline = {row.num_tokens: row.roofline_us for row in result.rows}
    look = {"color": FAINT, "linestyle": (0, (4, 3)), "linewidth": 1.6}
    times.plot(list(roofline), list(roofline.values()), label=_ROOFLINE, **look)
    if shares is not None:
        shares.axhline(100, **look)


def _wrong_at(rows: list[Measurement]) -> str:
    wrong = [str(row.num_tokens) for row in rows if not row.passed]
    return f", wrong at {', '.join(wrong)}" if wrong else ""


def tick(axis: Axis, form: Callable[[float, object], str], locator: Locator | None = None) -> None:
    """Labels an axis at a locator's ticks; None means 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)) if locator is None else locator)
    axis.set_major_formatter(FuncFormatter(form))
    axis.set_minor_locator(NullLocator())


def hide_ticks_that_meet(axes: Axes) -> None:
    """Hides the labels of ticks that would lie over the ones before them, where the axes stand now."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        before = None
        axis.get_ticklabels()  # Brings the ticks up to date.
        for mark in axis.get_major_ticks():
            box = mark.label1.get_window_extent()
            if not low <= mark.get_loc() <= high:
                continue
            if before is not None and box.overlaps(before):
                mark.label1.set_visible(False)
            else:
                before = box.padded(2)


def show_grid(axes: Axes) -> None:
    """Draws grid lines behind the data instead of ticks."""
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0)


def _finish_axes(result: BenchResult, times: Axes, shares: Axes | None) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator

    for axes in (times, *([] if shares is None else [shares])):
        axes.set_xscale("log", base=2)
        tick(axes.xaxis, lambda value, _: f"{value:,.0f}", FixedLocator(list(result.token_counts)))
        axes.set_xlabel("tokens")
        show_grid(axes)
    times.set_yscale("log")
    low, high = times.dataLim.intervaly
    tick(times.yaxis, axis_us, None if high < _FEW_DECADES * low else LogLocator(subs=(1.0,)))
    times.set_title("time of a call")
    if shares is None:
        return
    shares.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    shares.set_ylim(0, max(105.0, 1.05 * shares.dataLim.y1))
    shares.set_title("share of the roofline")


def axis_us(value: float, _: object = None) -> str:
    for unit, scale in (("s", 1e6), ("ms", 1e3)):
        if value >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g} µs"

"""The pictures of the docs, from the stored results."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Final

from benches.board.compare import Comparison
from benches.board.rows import Standing

__all__ = ["draw_board", "draw_peers"]

# Okabe and Ito's, which everyone can tell apart.
COLORS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")


def draw_peers(path: pathlib.Path, groups: Mapping[str, Sequence[Comparison]]) -> None:
    """Best peer's time over ours, over tokens: a panel for each group, a line for each layer, scheme and routing.

    Args:
        path: An SVG, overwritten.
        groups: Rows of one process each, by the name of their group; one without ratios at two numbers of tokens has no
            line and no panel.
    """
    import matplotlib
    from matplotlib.figure import Figure

    shown = {name: [one for one in found if one.ratio is not None] for name, found in groups.items()}
    shown = {name: found for name, found in shown.items() if len({one.place.tokens for one in found}) > 1}
    style = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": path.name}
    with matplotlib.rc_context(style):
        height = math.ceil(len(shown) / 2)
        figure = Figure(figsize=(9, 0.5 + 3.6 * height), layout="constrained", facecolor="white")
        panels = figure.subplots(height, 2, squeeze=False).flat
        for (name, found), axes in itertools.zip_longest(shown.items(), panels, fillvalue=("", ())):
            if not name:
                axes.set_axis_off()
                continue
            lines: dict[str, list[Comparison]] = {}
            for one in found:
                lines.setdefault(f"{one.place.layer} {one.place.scheme} {one.place.routing}", []).append(one)
            axes.axhspan(1e-3, 1.0, color="#f2f2f2", zorder=0)
            axes.axhline(1.0, color="#777777", linewidth=1, linestyle="--", zorder=1)
            for number, (label, points) in enumerate(lines.items()):
                color, marker = COLORS[number % len(COLORS)], MARKERS[number // len(COLORS) % len(MARKERS)]
                x, y = [one.place.tokens for one in points], [one.ratio for one in points]
                axes.plot(x, y, marker=marker, color=color, label=label.removesuffix(" uniform"), markersize=4)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            ratios = [one.ratio or 1.0 for one in found]
            low, high = min(0.9, *ratios) * 0.95, max(1.2, *ratios) * 1.05
            axes.set_ylim(low, high)
            ticks = [tick for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 3, 4) if low <= tick <= high]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            counts = sorted({one.place.tokens for one in found})
            axes.set_xticks(counts, [f"{count:,}" for count in counts])
            axes.minorticks_off()
            axes.set_title(name, loc="left", size=9)
            # Below, where no line is.
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2, frameon=False, fontsize=6.5)
        figure.suptitle(
            "Time of the fastest other kernels over the time of moereg's triton, by tokens, each row in one process:\n"
            "above the line moereg's are faster, in the gray they are slower",
            x=0.01,
            ha="left",
            size=9,
        )
        figure.savefig(path, metadata={"Date": None})


def draw_board(found: Sequence[Standing], path: pathlib.Path) -> None:
    """A map: who is fastest in each row, and the fastest other backend's time over the default's.

    Args:
        found: Rows of a board.
        path: An SVG, overwritten.
    """
    import matplotlib
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure

    lines = list(dict.fromkeys((one.layer, one.scheme, one.routing) for one in found))
    tokens = sorted({one.tokens for one in found})
    style = {"font.size": 9, "svg.hashsalt": path.name, "svg.fonttype": "none"}
    with matplotlib.rc_context(style):
        size = (2.8 + 1.2 * len(tokens), 1.3 + 0.3 * len(lines))
        figure = Figure(figsize=size, layout="constrained", facecolor="white")
        axes = figure.subplots()
        norm = TwoSlopeNorm(0.0, -1.0, 1.0)
        colors = matplotlib.colormaps["PuOr"]
        for one in found:
            x, y = tokens.index(one.tokens), lines.index((one.layer, one.scheme, one.routing))
            ratio = one.ratio
            shade = 0.0 if ratio is None else max(-1.0, min(1.0, math.log2(max(ratio, 0.25))))
            axes.add_patch(matplotlib.patches.Rectangle((x, y), 1, 1, facecolor=colors(norm(shade)), edgecolor="white"))
            # A class has a line of its own, so that it stays in its cell.
            text = one.ranking[0].name.replace(" (", "\n(") if one.ranking else "none"
            text += "" if ratio is None else f" {ratio:.2f}"
            dark = abs(shade) > 0.75
            axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", size=7, color="white" if dark else "#222222")
        axes.set_xlim(0, len(tokens))
        axes.set_ylim(len(lines), 0)
        axes.set_xticks([x + 0.5 for x in range(len(tokens))], [f"T {count:,}" for count in tokens])
        axes.set_yticks([y + 0.5 for y in range(len(lines))], [" ".join(line) for line in lines])
        axes.tick_params(length=0)
        axes.xaxis.tick_top()
        figure.suptitle(
            "The fastest backend, and the fastest other one's time over the default's:\n"
            "purple where the default leads, orange where it lags, grey where it is alone",
            x=0.01,
            ha="left",
            size=9,
        )
        for spine in axes.spines.values():
            spine.set_visible(False)
        figure.savefig(path, metadata={"Date": None})

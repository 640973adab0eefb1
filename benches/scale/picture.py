"""The picture of docs/scale.md."""

from __future__ import annotations

import pathlib
from typing import Final

from benches.scale.model import LAYERS, MODELLED, alone, cost
from benches.scale.page import PHASES, dispatchers_of

__all__ = ["draw_scale"]

_RANKS: Final = (2, 4, 8, 16, 32, 64)
# Okabe and Ito's, which everyone can tell apart.
_COLORS: Final = ("#0072B2", "#56B4E9", "#000000", "#D55E00", "#E69F00")
_MARKERS: Final = ("o", "s", ".", "^", "P")


def draw_scale(path: pathlib.Path) -> None:
    """Predicted times over ranks: panels for decode and for prefill, a column per layer, a line per dispatcher.

    Args:
        path: An SVG, overwritten.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": path.name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 6.6), layout="constrained", facecolor="white")
        grid = figure.subplots(len(PHASES), len(LAYERS), sharex=True, squeeze=False)
        for panels, (phase, tokens) in zip(grid, PHASES.items(), strict=True):
            for axes, layer in zip(panels, LAYERS, strict=True):
                times = [alone(layer, size, tokens, "zipf", balanced=True) for size in _RANKS]
                axes.plot(_RANKS, times, color="#777777", linestyle="--", label="experts alone")
                for dispatcher, color, marker in zip(MODELLED, _COLORS, _MARKERS, strict=True):
                    if dispatcher in dispatchers_of(layer):
                        times = [
                            cost(layer, dispatcher, size, tokens, "zipf", balanced=True).total_us for size in _RANKS
                        ]
                        axes.plot(_RANKS, times, f"{marker}-", color=color, label=dispatcher.name, markersize=4)
                axes.axvline(8, color="#cccccc", linewidth=1, zorder=0)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log")
                axes.set_xticks(_RANKS, [str(size) for size in _RANKS])
                axes.minorticks_off()
                axes.set_title(f"{layer.name}\n{phase}, {tokens:,} tokens a rank", size=9, loc="left")
        for axes in grid[-1]:
            axes.set_xlabel("ranks")
        for panels in grid:
            panels[0].set_ylabel("predicted us a layer")
        handles, labels = grid[0][1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        figure.suptitle(
            "Zipf routing, experts balanced by load with replicas; behind the gray line ranks are on several hosts",
            x=0.01,
            ha="left",
            size=10,
        )
        figure.savefig(path, metadata={"Date": None})

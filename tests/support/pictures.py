"""Labels of pictures, and which of them lie over each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text


def labels_that_meet(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of labels whose boxes intersect by more than a pixel, as drawn."""
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _labels(figure)]
    return [
        (one, other)
        for (one, box), (other, other_box) in itertools.combinations(boxes, 2)
        if min(box.x1, other_box.x1) - max(box.x0, other_box.x0) > 1
        and min(box.y1, other_box.y1) - max(box.y0, other_box.y0) > 1
    ]


def _labels(figure: Figure) -> Iterator[Text]:
    """The texts that are shown; an axis also holds those of ticks outside of what it shows."""
    unseen: set[Any] = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high]
            unseen.update(label for tick in ticks for label in (tick.label1, tick.label2))
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip() and text not in unseen:
            yield text

"""Plan C: which cells get memory for the layer's weights in a layout of their own. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from moereg.measured.plans import LayerTimes, best_for_all, with_ranges
from moereg.measured.significance import mean_gain


def second_layouts(
    times: LayerTimes, order: Sequence[int], layouts: Mapping[int, Hashable], num_bytes: float
) -> dict[int, int]:
    """Grants layouts memory one by one, first the one that saves the most time a byte.

    Args:
        times: The layer's times.
        order: Cells in the order of static priority.
        layouts: The layout of each cell; equal ones are one copy of the weights.
        num_bytes: Memory for further copies of one layer's weights.

    Returns:
        Cells that win somewhere by it, with the bytes of their layout.
    """
    base = best_for_all(times, order)
    sizes: dict[Hashable, int] = {}
    for row in times.rows:
        if row.cell in layouts:
            layout = layouts[row.cell]
            sizes[layout] = max(1, row.permuted_bytes, sizes.get(layout, 0))

    def winners(held: set[Hashable]) -> list[int]:
        """The cell of each measured number of tokens."""
        ranges = with_ranges(times, order, base, [cell for cell in order if layouts[cell] in held])
        return [next(cell for most, cell in ranges if most is None or at <= most) for at in times.tokens]

    def cost(held: set[Hashable]) -> float:
        """The time of all calls over that of the default."""
        gains = [
            mean_gain(times.at(cell, at), times.at(order[0], at))
            for at, cell in zip(times.tokens, winners(held), strict=True)
        ]
        return math.fsum(
            share * math.exp(gain) for share, gain in zip(times.shares(times.tokens, order[0]), gains, strict=True)
        )

    held = {layouts[base]}
    left = num_bytes
    while True:
        before = cost(held)
        saved = {
            layout: (before - cost({*held, layout})) / size
            for layout, size in sizes.items()
            if layout not in held and size <= left
        }
        best = max(saved, key=saved.__getitem__, default=None)
        if best is None or saved[best] <= 0:
            return {cell: sizes[layouts[cell]] for cell in winners(held) if layouts[cell] != layouts[base]}
        held.add(best)
        left -= sizes[best]

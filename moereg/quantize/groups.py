"""Groups of elements that share a scale, as views of a matrix; the last group of a row or column may be short."""

from __future__ import annotations

import torch

from moereg.spec.quant_schemes import WHOLE

__all__ = ["expand_groups", "group_extrema", "group_rows"]


def group_rows(group: tuple[int, int], rows: int) -> int:
    """Rows of one group in a matrix of `rows` rows."""
    return rows if group[0] == WHOLE else group[0]


def group_extrema(x: torch.Tensor, group: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest element of each group, or 0 where all are on one side of it.

    Args:
        x: [..., R, K].
        group: (rows, columns), `WHOLE` for all.

    Returns:
        Two of [..., ceil(R/rows), ceil(K/columns)], NaN where the group holds one.
    """
    rows, columns = x.shape[-2:]
    extent_rows, extent_columns = (
        max(size, 1) if extent == WHOLE else extent for size, extent in zip((rows, columns), group, strict=True)
    )
    num_rows, num_columns = (
        1 if extent == WHOLE else -(-size // extent) for size, extent in zip((rows, columns), group, strict=True)
    )
    missing = (num_columns * extent_columns - columns, num_rows * extent_rows - rows)
    if any(missing):
        # Zeros do not change the minimum and maximum, which are clamped to 0 below.
        x = torch.nn.functional.pad(x, (0, missing[0], 0, missing[1]))
    blocks = x.unflatten(-1, (num_columns, extent_columns)).unflatten(-3, (num_rows, extent_rows))
    low, high = blocks.amin((-3, -1)), blocks.amax((-3, -1))
    return low.clamp(max=0), high.clamp(min=0)


def expand_groups(values: torch.Tensor, group: tuple[int, int], rows: int, columns: int) -> torch.Tensor:
    """Repeats one value per group for each of its elements.

    Args:
        values: [..., ceil(R/group rows), ceil(K/group columns)].
        group: (rows, columns), `WHOLE` for all.
        rows: R.
        columns: K.

    Returns:
        Broadcastable to [..., R, K].
    """
    for dim, size, extent in ((-2, rows, group[0]), (-1, columns, group[1])):
        if extent not in (1, WHOLE) and extent < size:
            values = values.repeat_interleave(extent, dim).narrow(dim, 0, size)
    return values

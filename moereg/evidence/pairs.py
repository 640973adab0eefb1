"""The ratio of two kernels' times from samples that were taken in pairs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

_SMALL: Final = (12.7062, 4.3027, 3.1824, 2.7764)
"""The quantile for 1 to 4 degrees of freedom, where the series below is not exact."""
_NORMAL: Final = 1.959964


def student_t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t for a number of degrees of freedom of at least 1.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    if freedom <= len(_SMALL):
        return _SMALL[freedom - 1]
    z = _NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def paired(default_us: Sequence[float], other_us: Sequence[float]) -> tuple[float, float]:
    """Compares two kernels' samples of the same inputs in the same rounds, in order.

    A mean over pairs, not a ratio of medians: calls that hit different numbers of experts are not alike.

    Args:
        default_us: Samples of the one that is compared with, in us.
        other_us: Samples of the other. Pairs end with the shorter one; at least two are needed.

    Returns:
        The mean of ln(other / default), and half of its 95 % interval by Student's t.
    """
    logs = [math.log(other / default) for default, other in zip(default_us, other_us, strict=False)]
    if len(logs) < 2:
        raise ValueError(f"at least two pairs are needed, got {len(logs)}")
    return statistics.fmean(logs), student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))

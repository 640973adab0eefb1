"""Whether one measured cell is faster than another, beyond noise. Pure: floats only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

ASKED: Final = ("uniform", "zipf")
"""Routings whose mean has to be faster. In others a winner only must not be slower."""

NUM_SESSIONS: Final = 2
"""Fewer sessions than these choose nothing: two processes of the same code differ too, and a session's own interval
does not show by how much."""

_LEAST_GAIN: Final = math.log(0.97)
"""Largest mean of a winner: the noise between processes."""

_LEAST_SURE: Final = math.log(0.99)
"""Largest upper end of a winner's interval."""

_ROUNDING: Final = 1e-12
"""Sums of the same logarithms in another order may differ by this."""


class Ratio(NamedTuple):
    """The logarithm of a cell's time over the default's, and half of its 95 % interval."""

    log: float
    half_width: float


Ratios = Mapping[tuple[int, str], Ratio]
"""A cell's ratios by session and routing. A session that is there has all of its routings."""


def beats(challenger: Ratios, incumbent: Ratios, guards: Iterable[Ratios]) -> bool:
    """Whether a challenger is faster than the incumbent in every session of both, at least two.

    In each session the mean over the asked routings gains 3 % and the upper end of its interval 1 %. In no routing is
    the challenger slower than the incumbent or than one of the guards, in the mean over sessions.
    """
    sessions = _asked_sessions(challenger) & _asked_sessions(incumbent)
    return (
        len(sessions) >= NUM_SESSIONS
        and all(gains(challenger, incumbent, session) for session in sessions)
        and all(_is_nowhere_slower(challenger, other) for other in (incumbent, *guards))
    )


def num_shared_sessions(one: Ratios, other: Ratios) -> int:
    """Number of sessions in which two cells can be compared."""
    return len(_asked_sessions(one) & _asked_sessions(other))


def mean_gain(challenger: Ratios, incumbent: Ratios) -> float:
    """Mean logarithm of the challenger's time over the incumbent's in the asked routings of the sessions of both."""
    keys = [key for key in challenger.keys() & incumbent.keys() if key[1] in ASKED]
    return math.fsum(challenger[key].log - incumbent[key].log for key in keys) / len(keys)


def _asked_sessions(ratios: Ratios) -> set[int]:
    return {session for session, routing in ratios if routing in ASKED}


def gains(challenger: Ratios, incumbent: Ratios, session: int) -> bool:
    """Whether the mean over the asked routings gains 3 % in a session, and the upper end of its interval 1 %."""
    keys = [key for key in challenger if key[0] == session and key[1] in ASKED]
    mean = math.fsum(challenger[key].log - incumbent[key].log for key in keys) / len(keys)
    # Errors of different cells and routings are taken as independent.
    half_width = math.hypot(*(each[key].half_width for key in keys for each in (challenger, incumbent))) / len(keys)
    return mean <= _LEAST_GAIN and mean + half_width <= _LEAST_SURE


def _is_nowhere_slower(challenger: Ratios, other: Ratios) -> bool:
    """Also False if they have no session in common."""
    differences: dict[str, list[float]] = {}
    for key in challenger.keys() & other.keys():
        differences.setdefault(key[1], []).append(challenger[key].log - other[key].log)
    return bool(differences) and all(math.fsum(each) <= _ROUNDING for each in differences.values())


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
    """The mean of ln(other / default) over pairs of samples, and half of its 95 % interval by Student's t.

    Samples, in us, are of the same inputs in the same rounds, in order. A mean over pairs, not a ratio of medians:
    calls that hit different numbers of experts are not alike. Pairs end with the shorter one; at least two are needed.
    """
    logs = [math.log(other / default) for default, other in zip(default_us, other_us, strict=False)]
    if len(logs) < 2:
        raise ValueError(f"at least two pairs are needed, got {len(logs)}")
    return statistics.fmean(logs), student_t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))

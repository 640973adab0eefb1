"""Telling whether one measured cell is faster than another, beyond noise. Pure: floats only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
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

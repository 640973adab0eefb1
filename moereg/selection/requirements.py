"""Checks a platform against a cell's requirements: the right platform, packages, and what probes look for."""

from __future__ import annotations

import functools
import threading
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.errors import described, one_line, shown, stops_the_process
from moereg.platforms import Platform, PlatformRule
from moereg.registry import Cell, Probe
from moereg.spec.reasons import Reason


def clause(reason: str) -> str:
    """A backend's reason on one line that can be printed."""
    return one_line(reason) or "no text"


_PROBING: Final = threading.RLock()
"""Threads that ask at once wait for one. A probe may select in turn."""

_ANSWERS: Final[dict[tuple[Probe, Platform], Reason | None]] = {}
"""A machine does not change while a process runs, and a probe may take seconds."""


def ask_probe(probe: Probe, platform: Platform) -> Reason | None:
    """The reason by which a probe says that a cell cannot run there, or None; it runs once a platform."""
    key = (probe, platform)
    if key not in _ANSWERS:
        with _PROBING:
            if key not in _ANSWERS:
                _ANSWERS[key] = _answer(probe, platform)
    return _ANSWERS[key]


def _answer(probe: Probe, platform: Platform) -> Reason | None:
    try:
        text: object = probe(platform)
    except BaseException as error:  # As with predicates: the bug of one backend must not affect the others.
        if stops_the_process(error):
            raise
        return Reason("predicate_error", f"its {_probe_name(probe)} raised {described(error)}")
    if text is None:
        return None
    # An empty text is no reason, nor does it say that all is well.
    if not isinstance(text, str) or not text.strip():
        return Reason("predicate_error", f"its {_probe_name(probe)} has to return a text or None, got {shown(text)}")
    return Reason("probe", clause(text))


def _probe_name(probe: Probe) -> str:
    return f"probe {getattr(probe, '__name__', type(probe).__name__)}"


def lacks(cell: Cell, rule: PlatformRule | None, platform: Platform, is_asked: bool = True) -> list[Reason]:
    """Why a cell cannot run on a platform for any problem; a named platform is assumed to meet packages and probes.

    Takes the cell's rule for the platform, if any. Its probes run if it `is_asked`.
    """
    reasons: list[Reason] = []
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({cell.rules_text}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None and is_asked and cell.probes:
            reasons.extend(reason for probe in cell.probes if (reason := ask_probe(probe, platform)))
    return reasons


def assumptions(cell: Cell, platform: Platform) -> tuple[str, ...]:
    """Requirements that are assumed to be met on a named platform."""
    return () if platform.probed else (*cell.requires, *map(_probe_name, cell.probes))


@functools.lru_cache(maxsize=4096)
def _requirement_reason(text: str, version: str | None) -> Reason | None:
    if version is None:
        return Reason("package", f"requires {text}, which is not installed")
    try:
        met = Requirement(text).specifier.contains(version, prereleases=True)
    except InvalidVersion:
        met = False
    return None if met else Reason("package", f"requires {text}, got {version}")


@functools.lru_cache(maxsize=256)
def _requirement_name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)

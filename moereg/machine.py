"""Needs of a cell that a platform lacks for any problem: the right platform, packages, and what probes look for."""

from __future__ import annotations

import functools
import threading
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.errors import described, one_line, shown, stops_the_process
from moereg.platforms import Platform, PlatformRule
from moereg.reasons import Reason
from moereg.registration import Probe
from moereg.registry import BackendCell

__all__ = ["PROBES", "Probes", "assumptions", "clause", "lacks", "machine_reasons"]

_LONGEST_CLAUSE: Final = 2000


def clause(reason: object) -> str:
    """A backend's reason on one line that can be printed."""
    return one_line(reason, _LONGEST_CLAUSE) if isinstance(reason, str) else shown(reason)


class Probes:
    """Runs each probe once a platform and keeps its answer. Thread-safe."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Probe, Platform], Reason | None] = {}
        # Probes may be slow: threads that select at once wait for one. Reentrant, since a probe may select in turn.
        self._lock = threading.RLock()

    def reason(self, probe: Probe, platform: Platform) -> Reason | None:
        """The reason by which a probe says that a cell cannot run there, or None."""
        key = (probe, platform)
        if key not in self._answers:
            with self._lock:
                if key not in self._answers:
                    self._answers[key] = _run_probe(probe, platform)
        return self._answers[key]


PROBES: Final = Probes()
"""The probes of this process: a machine does not change while one runs, and a probe may take seconds."""


def _run_probe(probe: Probe, platform: Platform) -> Reason | None:
    try:
        text: object = probe(platform)
    except BaseException as error:  # As with predicates: the bug of one backend must not affect the others.
        if stops_the_process(error):
            raise
        return Reason("predicate_error", f"its probe {_probe_name(probe)} raised {described(error)}")
    return None if text is None else Reason("probe", clause(text))


def _probe_name(probe: Probe) -> str:
    return getattr(probe, "__name__", type(probe).__name__)


def machine_reasons(cell: BackendCell, platform: Platform) -> list[Reason]:
    """Why a cell cannot run on a platform for any problem; a named platform is assumed to meet packages and probes."""
    return lacks(cell, cell.rule_for(platform), platform, PROBES)


def lacks(cell: BackendCell, rule: PlatformRule | None, platform: Platform, probes: Probes) -> list[Reason]:
    """As `machine_reasons`, where the cell's rule for the platform is resolved already."""
    reasons: list[Reason] = []
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({cell.rules_text}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None:
            reasons.extend(reason for probe in cell.probes if (reason := probes.reason(probe, platform)))
    return reasons


def assumptions(cell: BackendCell, platform: Platform) -> tuple[str, ...]:
    """Requirements that are assumed to be met on a named platform."""
    if platform.probed:
        return ()
    return (*cell.requires, *(f"probe {_probe_name(probe)}" for probe in cell.probes))


@functools.lru_cache(maxsize=4096)
def _requirement_reason(text: str, version: str | None) -> Reason | None:
    requirement = Requirement(text)
    if version is None:
        return Reason("package", f"requires {text}, which is not installed")
    try:
        met = requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        met = False
    if not met:
        return Reason("package", f"requires {text}, got {version}")
    return None


@functools.lru_cache(maxsize=256)
def _requirement_name(text: str) -> str:
    return canonicalize_name(Requirement(text).name)

"""Needs of a cell that a platform lacks for any problem: the right platform, packages, and what probes look for."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from moereg.errors import described, one_line, shown, stops_the_process
from moereg.platforms import Platform, PlatformRule
from moereg.reasons import Reason
from moereg.registration import Probe

__all__ = ["PROBES", "Needs", "Probes", "assumptions", "clause", "lacks", "private_copy", "probe_name"]

T = TypeVar("T")

_LONGEST_CLAUSE: Final = 2000


def clause(reason: str) -> str:
    """A backend's reason on one line that can be printed."""
    # A subclass of str may bring methods of its own.
    return one_line(str.__str__(reason), _LONGEST_CLAUSE) or "no text"


def private_copy(value: T) -> T:
    """A copy of a problem or platform for a stranger's code: what that changes in it, nobody else sees."""
    copy: Any = object.__new__(type(value))
    parts = copy.__dict__
    for name, part in vars(value).items():
        if isinstance(part, Mapping):
            part = dict(part)
        elif hasattr(part, "__dict__") and dataclasses.is_dataclass(part):
            part = private_copy(part)
        parts[name] = part
    return copy  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class _Running:
    """A probe that a thread is running."""

    thread: int
    done: threading.Event


class Probes:
    """Runs each probe once a platform and keeps its answer. Thread-safe: threads that ask at once wait for one."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Probe, Platform], Reason | None] = {}
        self._running: dict[tuple[Probe, Platform], _Running] = {}
        self._lock = threading.Lock()

    def has_answer(self, probe: Probe, platform: Platform) -> bool:
        """Whether asking for the reason takes no time."""
        return (probe, platform) in self._answers

    def reason(self, probe: Probe, platform: Platform) -> Reason | None:
        """The reason by which a probe says that a cell cannot run there, or None."""
        key = (probe, platform)
        while key not in self._answers:
            with self._lock:
                running = self._running.setdefault(key, _Running(threading.get_ident(), threading.Event()))
            # No lock is held while a probe runs: one that never returns must not stop others, and one may select.
            if running.thread != threading.get_ident():
                running.done.wait()
                continue
            try:
                self.keep(probe, platform, _run_probe(probe, platform))
            finally:
                self._end(key)
        return self._answers[key]

    def keep(self, probe: Probe, platform: Platform, answer: Reason | None) -> None:
        """Keeps an answer, unless there is one: a probe that was given up may return in the end."""
        with self._lock:
            self._answers.setdefault((probe, platform), answer)
        self._end((probe, platform))

    def _end(self, key: tuple[Probe, Platform]) -> None:
        with self._lock:
            running = self._running.pop(key, None)
        if running is not None:
            running.done.set()


PROBES: Final = Probes()
"""The probes of this process: a machine does not change while one runs, and a probe may take seconds."""


def _run_probe(probe: Probe, platform: Platform) -> Reason | None:
    try:
        text: object = probe(private_copy(platform))
    except BaseException as error:  # As with predicates: the bug of one backend must not affect the others.
        if stops_the_process(error):
            raise
        return Reason("predicate_error", f"its {probe_name(probe)} raised {described(error)}")
    if text is None:
        return None
    # An empty text is no reason, nor does it say that all is well.
    if not isinstance(text, str) or not str.strip(text):
        return Reason("predicate_error", f"its {probe_name(probe)} has to return a text or None, got {shown(text)}")
    return Reason("probe", clause(text))


def probe_name(probe: Probe) -> str:
    """What to call a probe in a text."""
    return f"probe {getattr(probe, '__name__', type(probe).__name__)}"


class Needs(Protocol):
    """What a cell asks of a machine: of a backend, or of a way to move tokens."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Distribution version ranges."""

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Checks of the machine at hand."""

    @property
    def rules_text(self) -> str:
        """All its platform rules, as one string."""


def lacks(cell: Needs, rule: PlatformRule | None, platform: Platform, probes: Probes | None) -> list[Reason]:
    """Why a cell cannot run on a platform for any problem; a named platform is assumed to meet packages and probes.

    Args:
        cell: The cell.
        rule: Its rule for the platform, if any.
        platform: The machine.
        probes: Keeps the answers of probes; none is asked where None.
    """
    reasons: list[Reason] = []
    if rule is None:
        reasons.append(Reason("platform", f"requires platform in ({cell.rules_text}), got {platform}"))
    if platform.probed:
        for text in cell.requires:
            if reason := _requirement_reason(text, platform.versions.get(_requirement_name(text))):
                reasons.append(reason)
        if rule is not None and probes is not None:
            reasons.extend(reason for probe in cell.probes if (reason := probes.reason(probe, platform)))
    return reasons


def assumptions(cell: Needs, platform: Platform) -> tuple[str, ...]:
    """Requirements that are assumed to be met on a named platform."""
    if platform.probed:
        return ()
    return (*cell.requires, *(probe_name(probe) for probe in cell.probes))


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

"""Entry points of installed distributions, found in one scan, and which of the distributions a module belongs to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import importlib_metadata

from moereg.errors import RegistrationError, described, one_line
from moereg.plugins import BACKEND_GROUP, LoadFailure, PluginStatus, is_reserved

__all__ = ["Owner", "Owners", "PluginPoint", "scan"]

_MARK = "moereg."
"""Each group's name starts so. Only entry points that have it somewhere are parsed."""
_LONGEST = 100
"""Of the names and versions that tables show, in characters. A text of another's metadata may be anything."""


class Owner(NamedTuple):
    """A distribution.

    Attributes:
        origin: Its name.
        version: Its version.
    """

    origin: str
    version: str


@dataclasses.dataclass(frozen=True)
class PluginPoint:
    """An entry point of one of moereg's groups.

    Attributes:
        group, name, value: As the distribution declares them.
        module: The module that the value names.
        owner: The distribution.
        point: Loads it.
    """

    group: str
    name: str
    value: str
    module: str
    owner: Owner
    point: importlib_metadata.EntryPoint = dataclasses.field(repr=False, compare=False)

    def load(self) -> Any:
        """Imports the module; returns what the value names."""
        return self.point.load()

    @property
    def status(self) -> PluginStatus:
        """The status of one that loaded."""
        return PluginStatus(self.group, self.name, self.value, " ".join(self.owner), "loaded")

    def has_file_of(self, root: str) -> bool:
        """Whether its distribution installed a module or package of that name beside its others."""
        record = None
        with contextlib.suppress(Exception):  # The remains of an interrupted uninstall may raise anything.
            record = None if self.point.dist is None else self.point.dist.read_text("RECORD")
        return re.search(rf"^\"?{re.escape(root)}[/.]", record or "", re.MULTILINE) is not None


def scan(groups: Sequence[str]) -> tuple[list[PluginPoint], list[PluginStatus]]:
    """Entry points of all groups, in one walk over the installed distributions.

    Returns:
        The entry points by group, name and value, and a failed status for each that cannot be read.
    """
    points: list[PluginPoint] = []
    broken: list[PluginStatus] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
            if text is None or _MARK not in text:
                continue
        except UnicodeDecodeError as error:
            if _MARK.encode() in error.object:
                owner = _owner(distribution)
                name = owner.origin if owner else "unknown"
                broken.append(_unreadable(BACKEND_GROUP, name, "entry_points.txt", owner, error))
            continue
        except OSError:
            continue
        owner = _owner(distribution)
        if owner is not None:
            if owner.origin in seen:
                continue
            seen.add(owner.origin)
            # An older copy further down the path does not count.
            with contextlib.suppress(importlib_metadata.PackageNotFoundError):  # Its folder has another name than it.
                distribution = importlib_metadata.distribution(distribution.name)
            owner = _owner(distribution)
        try:
            found = [point for point in distribution.entry_points if point.group in groups]
        except Exception as error:
            name = owner.origin if owner else "unknown"
            said: Exception = _no_module(str(error.args[-1])) if _refuses_a_name(error) else error
            broken.append(_unreadable(BACKEND_GROUP, name, "entry_points.txt", owner, said))
            continue
        for point in found:
            try:
                module = str(point.module)
            except Exception:
                broken.append(_unreadable(point.group, point.name, point.value, owner, _no_module(point.value)))
                continue
            if (refusal := _refusal(owner, point.name)) is not None:
                broken.append(_unreadable(point.group, point.name, point.value, owner, refusal))
                continue
            known = owner or _nobody(point.value)
            points.append(PluginPoint(point.group, point.name, point.value, module, known, point))
    return sorted(points, key=lambda point: (groups.index(point.group), point.name, point.value)), broken


def _owner(distribution: Any) -> Owner | None:
    """Name and version; the remains of an interrupted uninstall have neither."""
    try:
        name, version = distribution.name, distribution.version
    except Exception:  # What is raised differs between versions of importlib_metadata.
        return None
    if not isinstance(name, str) or not name.strip():
        return None
    return Owner(one_line(name, _LONGEST), one_line(str(version), _LONGEST))


def _nobody(value: str) -> Owner:
    return Owner(f"unknown distribution of {one_line(value, _LONGEST)}", "unknown")


def _refusal(owner: Owner | None, name: str) -> RegistrationError | None:
    """Why an entry point is not loaded: its distribution would pass for moereg, or no table could show its name."""
    if owner is not None and is_reserved(owner.origin):
        return RegistrationError(f"the name {owner.origin!r} stands for moereg itself")
    if one_line(name, _LONGEST) != name:
        return RegistrationError(f"an entry point's name is at most {_LONGEST} printable characters; choose another")
    return None


def _no_module(value: str) -> ValueError:
    return ValueError(f"{value!r} names no module; write moereg_mine or moereg_mine:provide")


def _refuses_a_name(error: Exception) -> bool:
    """Whether importlib-metadata refused a point while it read the file, as 9.0 does; 10 does once it is asked."""
    return type(error) is ValueError and len(error.args) == 2 and "object reference" in str(error.args[0])


def _unreadable(group: str, name: str, value: str, owner: Owner | None, error: Exception) -> PluginStatus:
    distribution = " ".join(owner or _nobody(value))
    name, value = one_line(name, _LONGEST), one_line(value, _LONGEST)
    return PluginStatus(group, name, value, distribution, "failed", LoadFailure(described(error), error))


class Owners:
    """Which distribution a module belongs to, as far as entry points tell.

    A module below the module of an entry point belongs to its distribution, and so does one below the same root
    package. Other modules are looked up among the files of distributions, which is slow and seldom needed.
    """

    def __init__(self, points: Iterable[PluginPoint] = ()) -> None:
        self._backends: dict[Owner, list[PluginPoint]] = {}
        self._by_module: dict[str, list[PluginPoint]] = {}
        self._by_root: dict[str, list[PluginPoint]] = {}
        for point in points:
            self._by_module.setdefault(point.module, []).append(point)
            self._by_root.setdefault(_root(point.module), []).append(point)
            if point.group == BACKEND_GROUP:
                self._backends.setdefault(point.owner, []).append(point)

    def of(self, module: str, importer: PluginPoint | None = None) -> Owner | None:
        """The distribution of a module.

        Args:
            module: Its full name.
            importer: The entry point whose import runs it; a module that nobody else claims is of its distribution.
        """
        near = self._nearest(module) or self._by_root.get(_root(module), [])
        if importer is None:
            return near[0].owner if near else None
        if importer.owner in {point.owner for point in near}:
            return importer.owner
        if near:
            return near[0].owner
        points = (importer, *(points[0] for points in self._backends.values()))
        mine = next((point for point in points if point.has_file_of(_root(module))), None)
        return (mine.owner if mine else _owner_of_root(_root(module))) or importer.owner

    def home(self, module: str, name: str, importer: PluginPoint | None = None) -> PluginPoint | None:
        """The entry point that brings a backend: of its module, else of its name, in the module's distribution.

        Args:
            module: The module that registers it.
            name: The backend's.
            importer: As in `of`.
        """
        owner = self.of(module, importer)
        if owner is None:
            # Imported before plugins were loaded, by a module that stands beside the entry point's.
            named = [point for points in self._backends.values() for point in points if point.name == name]
            return next((point for point in named if point.has_file_of(_root(module))), None)
        mine = self._backends.get(owner, [])
        pool = [point for point in self._nearest(module) if point in mine] or mine
        fitting = [point for point in pool if point.name == name] or [point for point in pool if point == importer]
        return next(iter([*fitting, *pool]), None)

    def _nearest(self, module: str) -> list[PluginPoint]:
        """Entry points of the module itself, else of the package that is nearest to it."""
        while module not in self._by_module and "." in module:
            module = module.rpartition(".")[0]
        return self._by_module.get(module, [])


def _root(module: str) -> str:
    return module.partition(".")[0]


@functools.cache
def _owner_of_root(root: str) -> Owner | None:
    try:
        names = importlib_metadata.packages_distributions().get(root, [])
        return _owner(importlib_metadata.distribution(names[0])) if names else None
    except Exception:  # One unreadable distribution is enough to make it raise.
        return None

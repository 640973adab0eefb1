"""The entry points of installed distributions, and the status of each; `moereg.selection.loader` loads them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import importlib_metadata

from moereg.errors import ArgumentError, MoeregError, PluginError, RegistrationError, described, one_line, shown

BACKEND_GROUP: Final = "moereg.backends"
PLATFORM_GROUP: Final = "moereg.platforms"
DISPATCHER_GROUP: Final = "moereg.prepare_finalize"

_GROUPS: Final = (PLATFORM_GROUP, BACKEND_GROUP, DISPATCHER_GROUP)
"""In the order of loading: platform plugins bring the kinds of machines that the others name in their rules."""

_LONGEST: Final = 100
"""Longest name or version that tables show, in characters."""

_ADD: Final = "add it there"
_REPAIR: Final = "repair or uninstall that distribution"


class Owner(NamedTuple):
    """A distribution, by its name and version."""

    origin: str
    version: str


@dataclasses.dataclass(frozen=True)
class PluginStatus:
    """One entry point and its status.

    Attributes:
        group, name, value: As the distribution declares them.
        distribution: Its name and version.
        status: `loaded`, `failed` or `skipped` (by MOEREG_PLUGINS).
        failure: The exception, where it failed.
        loaded: The object that the entry point names, where it loaded.
        module: The module that the value names; empty where it names none.
        owner: The distribution.
        point: Loads it.
    """

    group: str
    name: str
    value: str
    distribution: str
    status: str
    failure: BaseException | None = None
    loaded: Any = dataclasses.field(default=None, repr=False, compare=False)
    module: str = dataclasses.field(default="", repr=False, compare=False)
    owner: Owner = dataclasses.field(default=Owner("", ""), repr=False, compare=False)
    point: importlib_metadata.EntryPoint | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def error(self) -> str | None:
        """Why it did not load, in one line."""
        return None if self.failure is None else described(self.failure)

    @property
    def kind(self) -> str:
        """Its group, as texts name what it brings."""
        return self.group.removeprefix("moereg.").removesuffix("s")

    def to_dict(self) -> dict[str, Any]:
        """As `moereg info --json` shows it."""
        shown_fields = ("group", "name", "value", "distribution", "status", "error")
        return {name: getattr(self, name) for name in shown_fields}

    def failed(self, error: BaseException) -> PluginStatus:
        """The same with an error."""
        return dataclasses.replace(self, status="failed", failure=error, loaded=None)


def scan() -> tuple[list[PluginStatus], list[PluginStatus]]:
    """Entry points of moereg's groups, in one walk over the installed distributions.

    By group, name and value, as if loaded; and a failed status for each that cannot be read.
    """
    points: list[PluginStatus] = []
    broken: list[PluginStatus] = []
    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        owner = None
        try:
            # Most distributions have none of ours; parsing every file would take longer than all the rest.
            if "moereg." not in (distribution.read_text("entry_points.txt") or ""):
                continue
            owner = _owner(distribution)
            if owner is not None:
                if owner.origin in seen:
                    continue
                seen.add(owner.origin)
                # An older copy further down the path does not count.
                with contextlib.suppress(importlib_metadata.PackageNotFoundError):  # Its folder has another name.
                    distribution = importlib_metadata.distribution(distribution.name)
                owner = _owner(distribution)
            found = [point for point in distribution.entry_points if point.group in _GROUPS]
        except Exception as error:  # Metadata that an interrupted uninstall left behind may raise anything.
            if isinstance(error, OSError) or (isinstance(error, UnicodeDecodeError) and b"moereg." not in error.object):
                continue
            if type(error) is ValueError and len(error.args) == 2:  # importlib-metadata 9 refuses a name here already.
                error = _no_module(str(error.args[-1]))
            owner = owner or _owner(distribution)
            name = owner.origin if owner else "unknown"
            broken.append(_unreadable(BACKEND_GROUP, name, "entry_points.txt", owner, error))
            continue
        for point in found:
            try:
                points.append(_read_point(point, owner or _nobody(point.value)))
            except ValueError as error:
                broken.append(_unreadable(point.group, point.name, point.value, owner, error))
    return sorted(points, key=lambda point: (_GROUPS.index(point.group), point.name, point.value)), broken


def _owner(distribution: Any) -> Owner | None:
    """Name and version; the remains of an interrupted uninstall have neither."""
    with contextlib.suppress(Exception):  # What is raised differs between versions of importlib_metadata.
        name, version = distribution.name, distribution.version
        if name.strip():
            return Owner(one_line(name, _LONGEST), one_line(str(version), _LONGEST))
    return None


def _nobody(value: str) -> Owner:
    return Owner(f"unknown distribution of {one_line(value, _LONGEST)}", "unknown")


def _read_point(point: importlib_metadata.EntryPoint, owner: Owner) -> PluginStatus:
    """Checks an entry point before it is imported; raises ValueError if it names no module, or its group no table."""
    try:
        module = str(point.module)
    except Exception:  # What is raised differs between versions of importlib_metadata.
        raise _no_module(point.value) from None
    if one_line(point.name, _LONGEST) != point.name:
        raise RegistrationError(f"an entry point's name is at most {_LONGEST} printable characters; choose another")
    return PluginStatus(
        point.group, point.name, point.value, " ".join(owner), "loaded", module=module, owner=owner, point=point
    )


def _no_module(value: str) -> ValueError:
    return ValueError(f"{value!r} names no module; write moereg_mine or moereg_mine:provide")


def _unreadable(group: str, name: str, value: str, owner: Owner | None, error: Exception) -> PluginStatus:
    name, text = one_line(name, _LONGEST), one_line(value, _LONGEST)
    return PluginStatus(group, name, text, " ".join(owner or _nobody(value)), "failed").failed(error)


def is_allowed(text: str | None, group: str, name: str) -> bool:
    """Whether MOEREG_PLUGINS lets a plugin load; None, where the variable is not set, allows all, an empty text none.

    A name allows plugins of that name in any group. `group:name`, such as `platforms:mine`, allows that one plugin, and
    alone leaves other groups as they are. Raises ArgumentError if a group is not known.
    """
    if text is None:
        return True
    entries = _entries(text)
    for of_group, plugin in entries:
        if of_group not in ("", *_GROUPS):
            raise ArgumentError(
                "MOEREG_PLUGINS must name plugins or group:name with group backends, platforms or prepare_finalize, "
                f"got {shown(f'{of_group}:{plugin}'.removeprefix('moereg.'))}"
            )
    if ("", name) in entries or (group, name) in entries:
        return True
    groups = {of_group for of_group, _ in entries}
    return bool(groups) and "" not in groups and group not in groups


def _entries(text: str) -> list[tuple[str, str]]:
    """Group and name of each plugin that MOEREG_PLUGINS allows; no group where the entry has none."""
    found = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        group, colon, name = entry.rpartition(":")
        found.append((f"moereg.{group.strip().removeprefix('moereg.')}" if colon else "", name.strip()))
    return found


def unknown_names(text: str | None, statuses: Sequence[PluginStatus]) -> str | None:
    """The warning about entries of MOEREG_PLUGINS that name no installed plugin; None where all do.

    An environment outlives wheels, so it is no error.
    """
    known = {(group, status.name) for status in statuses for group in ("", status.group)}
    unknown = [
        shown(f"{group}:{name}".removeprefix(":").removeprefix("moereg."))
        for group, name in _entries(text or "")
        if name and (group, name.removeprefix("moereg.")) not in known
    ]
    if not unknown:
        return None
    installed = ", ".join(sorted({status.name for status in statuses})) or "none"
    return (
        f"MOEREG_PLUGINS must name installed plugins (installed: {installed}), got {', '.join(unknown)}; leave it out "
        "or correct it"
    )


def _cured(status: PluginStatus, cure: str = _REPAIR) -> str:
    """The error with a cure; it has one already where it is about another plugin and ends with the cure for that."""
    return f"{status.error}" if str(status.error).endswith((_ADD, _REPAIR)) else f"{status.error}; {cure}"


def unusable(status: PluginStatus) -> MoeregError:
    """The error for a request that names a backend or machine whose plugin is not loaded."""
    kind = status.kind if status.group == BACKEND_GROUP else f"{status.kind} plugin"
    who = f"{kind} {status.name!r} of {status.distribution}"
    if status.failure is None:
        return PluginError(f"{who} is not in MOEREG_PLUGINS; {_ADD}")
    error = PluginError(f"{who} failed to load: {_cured(status)}")
    error.__cause__ = status.failure
    return error


def failure_text(status: PluginStatus, fault: str = "did not load") -> str:
    """The text of the warning about a plugin that failed: the distribution, the fault and error, the cure."""
    text = _cured(status, f"{_REPAIR}, or leave it out of MOEREG_PLUGINS")
    return f"{status.kind} {status.name!r} of {status.distribution} {fault}: {text}"

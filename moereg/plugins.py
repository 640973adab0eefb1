"""Plugins: entry points of other distributions with the status of each. `moereg.discovery` loads them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Final

from moereg.errors import ArgumentError, MoeregError, PluginError, shown

__all__ = [
    "BACKEND_GROUP",
    "MOVEMENT_GROUP",
    "PLATFORM_GROUP",
    "LoadFailure",
    "PluginStatus",
    "failure_text",
    "is_allowed",
    "is_reserved",
    "unknown_names",
    "unusable",
]

BACKEND_GROUP: Final = "moereg.backends"
PLATFORM_GROUP: Final = "moereg.platforms"
MOVEMENT_GROUP: Final = "moereg.prepare_finalize"

_ADD: Final = "add it there"
_REPAIR: Final = "repair or uninstall that distribution"
_RESERVED: Final = ("builtin", "moereg")


def is_reserved(name: str) -> bool:
    """Whether a name stands for moereg itself, so that no other distribution may have it."""
    return re.sub(r"[-_.]+", "-", name).lower() in _RESERVED


@dataclasses.dataclass(frozen=True)
class LoadFailure:
    """Why a plugin did not load.

    Attributes:
        error: One line.
        exception: The original exception.
    """

    error: str
    exception: BaseException


@dataclasses.dataclass(frozen=True)
class PluginStatus:
    """One entry point and its status.

    Attributes:
        group, name, value: As the distribution declares them.
        distribution: Its name and version.
        status: `loaded`, `failed` or `skipped` (by MOEREG_PLUGINS).
        failure: Set where it failed.
        loaded: The object that the entry point names, where it loaded.
    """

    group: str
    name: str
    value: str
    distribution: str
    status: str
    failure: LoadFailure | None = None
    loaded: Any = dataclasses.field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """As `moereg info --json` shows it."""
        return {
            "group": self.group,
            "name": self.name,
            "value": self.value,
            "distribution": self.distribution,
            "status": self.status,
            "error": self.failure.error if self.failure else None,
        }


def is_allowed(text: str | None, group: str, name: str) -> bool:
    """Whether MOEREG_PLUGINS lets a plugin load.

    A name allows plugins of that name in any group. `group:name`, such as `platforms:mine`, allows that one plugin, and
    alone leaves other groups as they are. An empty text allows none.

    Args:
        text: The variable's value; None, which allows all, where it is not set.
        group, name: The plugin's.

    Raises:
        ArgumentError: An entry's group is not known.
    """
    if text is None:
        return True
    names: set[str] = set()
    grouped: dict[str, set[str]] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        prefix, colon, plugin = entry.rpartition(":")
        if not colon:
            names.add(entry)
            continue
        of_group = f"moereg.{prefix.strip().removeprefix('moereg.')}"
        if of_group not in (BACKEND_GROUP, PLATFORM_GROUP, MOVEMENT_GROUP):
            raise ArgumentError(
                "MOEREG_PLUGINS must name plugins or group:name with group backends, platforms or prepare_finalize, "
                f"got {shown(entry)}"
            )
        grouped.setdefault(of_group, set()).add(plugin.strip())
    if name in names or name in grouped.get(group, ()):
        return True
    return bool(grouped) and not names and group not in grouped


def unknown_names(text: str | None, statuses: Sequence[PluginStatus]) -> str | None:
    """The warning about entries of MOEREG_PLUGINS that name no installed plugin; None where all do.

    An environment outlives wheels, so it is no error.
    """
    known = {name for status in statuses for name in (status.name, f"{_group(status)}:{status.name}")}
    entries = (":".join(part.strip() for part in entry.split(":")) for entry in (text or "").split(","))
    unknown = [
        entry
        for entry in (found.removeprefix("moereg.") for found in entries)
        if entry and not entry.endswith(":") and entry not in known
    ]
    if not unknown:
        return None
    installed = ", ".join(sorted({status.name for status in statuses})) or "none"
    names = ", ".join(map(shown, unknown))
    return (
        f"MOEREG_PLUGINS must name installed plugins (installed: {installed}), got {names}; leave it out or correct it"
    )


def _group(status: PluginStatus) -> str:
    return status.group.removeprefix("moereg.")


def _described(status: PluginStatus) -> str:
    kind = status.group.removeprefix("moereg.").removesuffix("s")
    return f"{kind} plugin {status.name!r} of {status.distribution}"


def _cure(failure: LoadFailure, cure: str = _REPAIR) -> str:
    """A cure to append; nothing where the error is about another plugin and ends with the cure for that."""
    return "" if failure.error.endswith((_ADD, _REPAIR)) else f"; {cure}"


def unusable(status: PluginStatus) -> MoeregError:
    """The error for a request that names a backend or machine whose plugin is not loaded."""
    who = f"backend {status.name!r} of {status.distribution}" if status.group == BACKEND_GROUP else _described(status)
    if status.failure is None:
        return PluginError(f"{who} is not in MOEREG_PLUGINS; {_ADD}")
    error = PluginError(f"{who} failed to load: {status.failure.error}{_cure(status.failure)}")
    error.__cause__ = status.failure.exception
    return error


def failure_text(status: PluginStatus, fault: str = "did not load") -> str:
    """The text of the warning about a plugin that failed: the distribution, the fault and error, the cure."""
    assert status.failure is not None
    kind = status.group.removeprefix("moereg.").removesuffix("s")
    cure = _cure(status.failure, f"{_REPAIR}, or leave it out of MOEREG_PLUGINS")
    return f"{kind} {status.name!r} of {status.distribution} {fault}: {status.failure.error}{cure}"

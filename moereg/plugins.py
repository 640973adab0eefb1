"""Plugins: entry points of other distributions with the status of each. `moereg.discovery` loads them."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from moereg.errors import MoeregError, PluginError

__all__ = ["BACKEND_GROUP", "PLATFORM_GROUP", "LoadFailure", "PluginStatus", "unusable", "warning_of"]

BACKEND_GROUP: Final = "moereg.backends"
PLATFORM_GROUP: Final = "moereg.platforms"


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


def unusable(status: PluginStatus) -> MoeregError:
    """The error for a request that names a backend whose plugin is not loaded."""
    if status.failure is None:
        return PluginError(f"backend {status.name!r} of {status.distribution} is not in MOEREG_PLUGINS; add it there")
    error = PluginError(
        f"backend {status.name!r} of {status.distribution} failed to load: {status.failure.error}; "
        "repair or uninstall that distribution"
    )
    error.__cause__ = status.failure.exception
    return error


def warning_of(status: PluginStatus) -> str:
    """The text of the warning about a plugin that failed: the distribution, the error, the cure."""
    assert status.failure is not None
    kind = status.group.removeprefix("moereg.").removesuffix("s")
    return (
        f"{kind} {status.name!r} of {status.distribution} did not load: {status.failure.error}; repair or uninstall "
        "that distribution, or leave it out of MOEREG_PLUGINS"
    )

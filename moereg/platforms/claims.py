"""Claims of platform plugins: accepts what entry points name, and decides which one describes this machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from moereg.errors import PluginError, one_line, shown
from moereg.platforms.kinds import PlatformKind, register_platform_kind
from moereg.platforms.platform import Platform
from moereg.platforms.probe import installed_versions


def accept_plugin(value: str, loaded: object) -> None:
    """Checks the object that an entry point names, a kind or a probe, and registers a kind.

    Raises:
        TypeError: It is neither a `PlatformKind` nor a function.
        ArgumentError: Another kind has that name.
    """
    if isinstance(loaded, PlatformKind):
        register_platform_kind(loaded)
    elif not callable(loaded):
        found = f"the module; name one of its values: {value}:KIND" if isinstance(loaded, ModuleType) else shown(loaded)
        raise TypeError(
            f"{value} must name a PlatformKind, or a function that returns a Platform or None, and it is {found}"
        )


def claim_of(value: str, loaded: Any) -> Platform | None:
    """This machine as described by an accepted plugin; None if the plugin does not know it.

    Raises:
        TypeError: The probe returned something else.
        ValueError: It returned a platform of another kind.
        BaseException: Anything that the probe raises.
    """
    probe = loaded.probe if isinstance(loaded, PlatformKind) else loaded
    if probe is None:
        return None
    platform: object = probe()
    if platform is None:
        return None
    if not isinstance(platform, Platform):
        raise TypeError(f"{value} must return a Platform or None, got {type(platform).__name__}")
    if isinstance(loaded, PlatformKind) and platform.kind != loaded.name:
        raise ValueError(f"the probe of {value} must return a platform of kind {loaded.name}, got {platform}")
    return platform


def decide_claims(claims: Mapping[str, Platform]) -> Platform | None:
    """This machine according to plugins, keyed `name of distribution version`; None if none claims it.

    Raises:
        PluginError: Several plugins claim this machine.
    """
    if len(claims) > 1:
        names = sorted(claims)
        raise PluginError(
            f"one platform plugin may claim this machine, got {len(claims)}: {', '.join(names)}; choose one by "
            f"MOEREG_PLUGINS=platforms:{names[0].partition(' ')[0]} or uninstall the others"
        )
    for plugin, platform in claims.items():
        name, _, distribution = plugin.partition(" of ")
        # A plugin always describes this machine, even if it does not say so.
        return dataclasses.replace(
            platform,
            claimed_by=one_line(f"platform plugin {name!r} of {distribution}"),
            versions=platform.versions or installed_versions(),
            probed=True,
        )
    return None

"""The machine at hand: as a platform plugin describes it if one claims it, else as the probe does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from moereg.errors import ArgumentError, PluginError, one_line, shown
from moereg.platforms.kinds import PlatformKind, register_platform_kind
from moereg.platforms.platform import Platform
from moereg.platforms.probe import installed_versions, probe_cpu, probe_platform

if TYPE_CHECKING:
    import torch

_ASK_PLUGINS: Final[list[Callable[[], Platform | None]]] = []
"""The function that asks platform plugins, from a higher layer; at most one."""


def ask_plugins_with(ask: Callable[[], Platform | None]) -> None:
    """Sets the function that returns this machine as a platform plugin describes it, or None."""
    _ASK_PLUGINS[:] = [ask]


def current_platform() -> Platform:
    """The machine at hand: from a platform plugin, else from the probe.

    Plugins are asked once `moereg.selection.loader` is imported, as by whatever selects or makes a kernel.

    Raises:
        PluginError: Two plugins claim this machine.
    """
    claimed = [platform for ask in _ASK_PLUGINS if (platform := ask()) is not None]
    return claimed[0] if claimed else probe_platform()


def read_platform(platform: Platform | str | None) -> Platform:
    """The platform that a caller names, errors as in `Platform.from_name`; where None, `current_platform()`."""
    if platform is None:
        return current_platform()
    if isinstance(platform, str):
        return Platform.from_name(platform)
    if not isinstance(platform, Platform):
        raise ArgumentError(f"platform must be a Platform or a name such as 'cuda:sm90', got {shown(platform)}")
    return platform


def platform_of(device: torch.device) -> Platform:
    """This machine's platform whose backends read tensors on a device; an ArgumentError if it has no such device."""
    for probe in (current_platform, probe_cpu):
        platform = probe()
        if platform.device_type == device.type:
            return platform
    here = current_platform()
    raise ArgumentError(f"the layer is on {device}, and this machine is {here}; move it to {here.device_type!r}")


def accept_plugin(value: str, loaded: object) -> None:
    """Checks the object that an entry point names and registers a kind; a TypeError if it is neither kind nor probe."""
    if isinstance(loaded, PlatformKind):
        register_platform_kind(loaded)
    elif not callable(loaded):
        found = f"the module; name one of its values: {value}:KIND" if isinstance(loaded, ModuleType) else shown(loaded)
        raise TypeError(
            f"{value} must name a PlatformKind, or a function that returns a Platform or None, and it is {found}"
        )


def claim_of(value: str, loaded: Any) -> Platform | None:
    """This machine as described by an accepted plugin; None if the plugin does not know it.

    Raises what the probe raises, a TypeError if it returned something else, a ValueError for another kind's platform.
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

    A PluginError if several do.
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

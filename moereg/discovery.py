"""Loads every backend once: built-in modules, then other distributions' entry points.

The only module that imports backends. A plugin that fails is recorded and never takes the others down.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import sys
import threading
from collections.abc import Sequence
from typing import Final

import importlib_metadata

from moereg.errors import (
    PluginError,
    RegistrationError,
    UnknownBackendError,
    described,
    stops_the_process,
    unknown_name_message,
)
from moereg.platforms import Platform, installed_versions, probe_platform
from moereg.plugins import BACKEND_GROUP, PLATFORM_GROUP, LoadFailure, PluginStatus
from moereg.registry import API_VERSION, BUILTIN, REGISTRY, BackendCell, BackendRegistry, registering_origin

__all__ = ["current_platform", "list_backends", "list_cells", "load_backends", "plugin_statuses"]

_GROUPS: Final = (BACKEND_GROUP, PLATFORM_GROUP)


class _Loader:
    """Loads once, under a lock, so that threads that select at the same time see all backends or wait."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._lock = threading.RLock()
        self._statuses: tuple[PluginStatus, ...] | None = None
        self._platform: Platform | None = None

    def load(self) -> tuple[PluginStatus, ...]:
        if self._statuses is None:
            with self._lock:
                if self._statuses is None:
                    _import_builtins()
                    self._statuses = tuple(self._load_plugin(point) for point in _entry_points())
        return self._statuses

    def _load_plugin(self, point: importlib_metadata.EntryPoint) -> PluginStatus:
        origin, version = _distribution(point)
        status = PluginStatus(point.group, point.name, point.value, f"{origin} {version}", "loaded")
        allowed = _allowed_plugins()
        if allowed is not None and point.name not in allowed:
            return dataclasses.replace(status, status="skipped")
        before = self._registry.snapshot()
        try:
            with registering_origin(origin, version):
                loaded = point.load()
            _check_api_version(point)
            if point.group == BACKEND_GROUP:
                self._check_backend_name(point, (origin, version), before)
        except BaseException as error:  # A stranger's module may raise anything.
            if stops_the_process(error):
                raise
            self._registry.restore(before)
            return _failed(status, error)
        return dataclasses.replace(status, loaded=loaded)

    def _check_backend_name(
        self, point: importlib_metadata.EntryPoint, origin: tuple[str, str], before: Sequence[BackendCell]
    ) -> None:
        added = {cell.name for cell in self._registry.cells} - {cell.name for cell in before}
        added |= {cell.name for cell in self._registry.adopt(point.module, *origin)}
        if added != {point.name}:
            raise RegistrationError(
                f"entry point {point.name!r} must register a backend of that name and no other, got "
                f"{', '.join(sorted(added)) or 'none'}"
            )

    def platform(self) -> Platform:
        if self._platform is None:
            with self._lock:
                if self._platform is None:
                    self._platform = self._provided_platform() or probe_platform()
        return self._platform

    def _provided_platform(self) -> Platform | None:
        provided: dict[str, Platform] = {}
        statuses = list(self.load())
        for place, status in enumerate(statuses):
            if status.group != PLATFORM_GROUP or status.status != "loaded":
                continue
            try:
                platform = status.loaded()
                if not (platform is None or isinstance(platform, Platform)):
                    raise TypeError(f"{status.value} must return a Platform or None, got {type(platform).__name__}")
            except BaseException as error:  # As with modules: one bad provider must not affect the others.
                if stops_the_process(error):
                    raise
                statuses[place] = _failed(status, error)
                continue
            if platform is not None:
                provided[f"{status.name} of {status.distribution}"] = platform
        self._statuses = tuple(statuses)
        if len(provided) > 1:
            raise PluginError(
                f"one platform plugin may claim this machine, got {len(provided)}: {', '.join(sorted(provided))}; "
                "name the one to load in MOEREG_PLUGINS or uninstall the other"
            )
        for platform in provided.values():
            # A provider describes the machine at hand, whether or not it says so.
            return dataclasses.replace(platform, versions=platform.versions or installed_versions(), probed=True)
        return None


def _distribution(point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    """Name and version of an entry point's distribution; the remains of an interrupted uninstall have neither."""
    try:
        assert point.dist is not None
        return point.dist.name, point.dist.version
    except (AssertionError, KeyError, OSError, TypeError):
        return f"unknown distribution of {point.value}", "unknown"


def _check_api_version(point: importlib_metadata.EntryPoint) -> None:
    found = getattr(sys.modules[point.module], "moereg_api", None)
    if found != API_VERSION:
        raise RegistrationError(
            f"{point.module} must say moereg_api = {API_VERSION!r}, the version of moereg.author it was written for, "
            f"got {found!r}"
        )


def _failed(status: PluginStatus, error: BaseException) -> PluginStatus:
    return dataclasses.replace(status, status="failed", failure=LoadFailure(described(error), error), loaded=None)


def _import_builtins() -> None:
    package = importlib.import_module("moereg.backends")
    with registering_origin(BUILTIN):
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            if not module.startswith("_"):
                importlib.import_module(f"moereg.backends.{module}")


def _entry_points() -> list[importlib_metadata.EntryPoint]:
    found = [point for group in _GROUPS for point in importlib_metadata.entry_points(group=group)]
    return sorted(found, key=lambda point: (_GROUPS.index(point.group), point.name, point.value))


def _allowed_plugins() -> frozenset[str] | None:
    text = os.environ.get("MOEREG_PLUGINS")
    return None if text is None else frozenset(name.strip() for name in text.split(",") if name.strip())


_LOADER: Final = _Loader(REGISTRY)


def load_backends() -> BackendRegistry:
    """Imports every built-in backend and plugin, the first time it is called.

    Returns:
        The global registry.
    """
    _LOADER.load()
    return REGISTRY


def list_backends() -> tuple[str, ...]:
    """Names of all backends that are registered, built-in and of plugins, sorted."""
    return load_backends().names


def list_cells(name: str | None = None) -> tuple[BackendCell, ...]:
    """Cells of one backend, or of all, in order of registration.

    Raises:
        UnknownBackendError: No backend has that name.
    """
    registry = load_backends()
    if name is None:
        return registry.cells
    if name not in registry.names:
        raise UnknownBackendError(unknown_name_message("backend", name, registry.names))
    return registry.by_name(name)


def plugin_statuses() -> tuple[PluginStatus, ...]:
    """Every entry point of moereg's groups with its status."""
    return _LOADER.load()


def current_platform() -> Platform:
    """The machine at hand: from a platform plugin, else from the probe.

    Raises:
        PluginError: Two plugins claim this machine.
    """
    return _LOADER.platform()

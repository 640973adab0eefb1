"""Loads every backend once: built-in modules, then other distributions' entry points.

The only module that imports backends. A plugin is trusted code that may be buggy: one that fails is recorded with its
error, leaves nothing registered, and never takes the others down.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import importlib
import logging
import os
import pkgutil
import re
import sys
import threading
import time
import warnings
from typing import Any, Final

from moereg.errors import (
    MoeregError,
    PluginError,
    PluginWarning,
    RegistrationError,
    UnknownBackendError,
    UnknownSchemeError,
    shown,
    stops_the_process,
    unknown_name_message,
)
from moereg.platforms import Platform
from moereg.platforms.claims import accept_plugin, ask_plugins_with, claim_of, decide_claims
from moereg.platforms.kinds import kinds_of_plugin, load_kinds_with, miss_kinds_of
from moereg.prepare_finalize.cells import DISPATCHERS, DispatcherRegistry
from moereg.registry import API_VERSION, REGISTRY, BackendCell, BackendRegistry, Cell, Registry
from moereg.selection.plugin_status import (
    BACKEND_GROUP,
    DISPATCHER_GROUP,
    PLATFORM_GROUP,
    Owner,
    PluginStatus,
    failure_text,
    is_allowed,
    scan,
    unknown_names,
    unusable,
)
from moereg.spec.quant_schemes import QUANT_SCHEMES, SCHEMES_CALLED, QuantScheme

logger: Final = logging.getLogger("moereg")

_SLOW_SECONDS: Final = 0.5
"""An import that takes longer is logged with its plugin's name."""

_LOADING: Final[contextvars.ContextVar[PluginStatus | None]] = contextvars.ContextVar("moereg_loading", default=None)
"""The entry point that this thread imports."""


class _Loader:
    """Loads once, under a lock, so that threads that select at the same time see all backends or wait."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._registries: dict[str, Registry[Any]] = {BACKEND_GROUP: registry, DISPATCHER_GROUP: DISPATCHERS}
        self._lock = threading.RLock()
        self._done: dict[PluginStatus, PluginStatus] = {}
        # Registered while plugins were imported, and not visible yet, each with the entry point that brings it.
        self._pending: list[tuple[PluginStatus | None, Cell]] = []
        self._statuses: tuple[PluginStatus, ...] | None = None
        self._has_platforms = False
        self._claimed: tuple[Platform | None, ...] = ()

    def load(self) -> tuple[PluginStatus, ...]:
        if self._statuses is not None:  # Without the lock: another thread may hold it while a plugin's probe selects.
            return self._statuses
        with self._lock:
            if self._statuses is None:
                self._statuses = self._load_all()
                # Last: a user's filter may turn these into errors.
                for status in self._statuses:
                    _warn(status)
                if (unknown := unknown_names(os.environ.get("MOEREG_PLUGINS"), self._statuses)) is not None:
                    warnings.warn(unknown, PluginWarning, stacklevel=_outside())
            return self._statuses

    def _load_all(self) -> tuple[PluginStatus, ...]:
        if (loading := _LOADING.get()) is not None:
            raise PluginError(
                f"{loading.module} of {loading.distribution} asked for backends while it was imported; "
                "a plugin may ask inside its functions, when all plugins are loaded"
            )
        self.load_platforms()
        package = importlib.import_module("moereg.backends")
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            if not module.startswith("_"):
                importlib.import_module(f"moereg.backends.{module}")
        points, broken = self._scanned
        return (*map(self._load_once, points), *broken)

    def load_platforms(self) -> None:
        """Loads platform plugins alone: all that naming a machine needs."""
        if self._has_platforms:
            return
        with self._lock:
            # A platform plugin that names its own kind while it is imported gets the error about an unknown kind.
            if self._has_platforms or _LOADING.get() is not None:
                return
            for registry in self._registries.values():
                registry.owner_of = functools.partial(self._owner, registry)
                registry.collect = functools.partial(self._collect, registry)
            for point in self._scanned[0]:
                if point.group == PLATFORM_GROUP:
                    status = self._load_once(point)
                    if status.status != "loaded":
                        miss_kinds_of(point.name, str(unusable(status)))
            self._has_platforms = True

    @functools.cached_property
    def _scanned(self) -> tuple[list[PluginStatus], list[PluginStatus]]:
        return scan()

    def _load_once(self, point: PluginStatus) -> PluginStatus:
        # Some are loaded already: platforms, and others if Ctrl-C ended the first attempt.
        if point not in self._done:
            self._done[point] = self._load_plugin(point)
        return self._done[point]

    def _load_plugin(self, point: PluginStatus) -> PluginStatus:
        if not is_allowed(os.environ.get("MOEREG_PLUGINS"), point.group, point.name):
            return dataclasses.replace(point, status="skipped")
        assert point.point is not None, "what names no module is not loaded"
        # First, and written at once: code that hangs or ends the process leaves no other trace.
        logger.debug("importing %s of %s", point.module, point.distribution)
        started, token = time.perf_counter(), _LOADING.set(point)
        try:
            with kinds_of_plugin(point.owner.origin, point.module):
                loaded = point.point.load()
                _check_api_version(point)
                if point.group == PLATFORM_GROUP:
                    accept_plugin(point.value, loaded)
            self._publish(point)
        except BaseException as error:  # A stranger's module may raise anything.
            if (registry := self._registries.get(point.group)) is not None:
                registry.publish((), replaced=self._early(point, registry))
            if stops_the_process(error):
                logger.warning("interrupted while %s of %s was imported", point.module, point.distribution)
                raise
            return point.failed(error)
        finally:
            _LOADING.reset(token)
            # What modules of other entry points registered waits for these; what failed leaves nothing.
            self._pending = [
                (home, cell)
                for home, cell in self._pending
                if home not in (None, point) and cell.implementation.__module__ in sys.modules
            ]
            _log_if_slow(f"importing {point.module}", point.distribution, started)
        return dataclasses.replace(point, loaded=loaded)

    def _owner(self, registry: Registry[Any], name: str, module: str) -> Owner | None:
        """The distribution of what a module registers; None where that is moereg or not known before all is loaded."""
        if (loading := _LOADING.get()) is not None:
            home = self._home(loading, registry, name, module)
            return home.owner if home is not None else None if module.startswith("moereg.") else loading.owner
        return None if self._statuses is None or module.startswith("moereg.") else self._owner_of(module)

    def _collect(self, registry: Registry[Any], cell: Cell) -> bool:
        """Keeps what a module registers until its entry point has loaded."""
        if (loading := _LOADING.get()) is None:
            return False
        self._pending.append((self._home(loading, registry, cell.name, cell.implementation.__module__), cell))
        return True

    def _home(self, loading: PluginStatus, registry: Registry[Any], name: str, module: str) -> PluginStatus | None:
        """The entry point that brings what a module registers under a name, None where there is none.

        The plugin that is imported may import another one first, for instance to subclass its class.
        """
        for owner in (loading.owner, self._owner_of(module)):
            for point in self._scanned[0]:
                if (point.owner, point.name) == (owner, name) and self._registries.get(point.group) is registry:
                    return point
        return None

    def _owner_of(self, module: str) -> Owner | None:
        """The distribution that has an entry point in a module's package, the nearest one."""
        while module:
            for point in self._scanned[0]:
                if f"{point.module}.".startswith(f"{module}."):
                    return point.owner
            module = module.rpartition(".")[0]
        return None

    def _publish(self, point: PluginStatus) -> None:
        registry = self._registries.get(point.group)
        cells = [cell for home, cell in self._pending if home == point]
        names = {cell.name for home, cell in self._pending if home in (None, point)}
        early = [] if registry is None else self._early(point, registry)
        names.update(cell.name for cell in early)
        origin, version = point.owner
        cells += [dataclasses.replace(cell, origin=origin, origin_version=version) for cell in early]
        if names != ({point.name} if registry is not None else set()):
            what = "no backend" if registry is None else f"a {registry.kind.noun} of that name and no other"
            same = (other for other in self._scanned[0] if other.module == point.module)
            others = {other.distribution for other in same if other.owner != point.owner}
            shared = f"; {point.module} is of {', '.join(sorted(others))} too, uninstall one" if others else ""
            raise RegistrationError(
                f"entry point {point.name!r} must register {what}, got {', '.join(sorted(names)) or 'none'}{shared}"
            )
        if registry is not None:
            registry.publish(cells, replaced=early)

    def _early(self, point: PluginStatus, registry: Registry[Any]) -> list[Any]:
        """Cells that a direct import of the entry point's modules made visible, before their distribution was known."""
        return [
            cell
            for cell in registry.cells
            if (cell.name, cell.origin, cell.origin_version) == (point.name, cell.implementation.__module__, "")
            and self._owner_of(cell.implementation.__module__) == point.owner
        ]

    @property
    def claimed(self) -> Platform | None:
        # No cached_property: its own lock, up to Python 3.11, would be taken before that of the loader.
        if not self._claimed:
            with self._lock:
                self._claimed = self._claimed or (decide_claims(self._claims),)
        return self._claimed[0]

    @functools.cached_property
    def _claims(self) -> dict[str, Platform]:
        """The platforms that plugins say this machine is, by plugin. Each is asked once."""
        claims: dict[str, Platform] = {}
        statuses = list(self.load())
        failed: list[PluginStatus] = []
        for place, status in enumerate(statuses):
            if status.group != PLATFORM_GROUP or status.status != "loaded":
                continue
            started = time.perf_counter()
            try:
                platform = claim_of(status.value, status.loaded)
            except BaseException as error:  # As with modules: one bad plugin must not affect the others.
                if stops_the_process(error):
                    raise
                statuses[place] = status.failed(error)
                failed.append(statuses[place])
                continue
            finally:
                _log_if_slow(f"asking {status.value}", status.distribution, started)
            if platform is not None:
                claims[f"{status.name} of {status.distribution}"] = platform
        self._statuses = tuple(statuses)
        for status in failed:
            _warn(status, "could not say whether this machine is its own, and moereg goes on without it")
        return claims


def _check_api_version(point: PluginStatus) -> None:
    found = getattr(sys.modules.get(point.module), "moereg_api", None)
    if not isinstance(found, str) or not re.fullmatch(rf"{re.escape(API_VERSION)}(\.\d+)*", found):
        raise RegistrationError(
            f"{point.module} must say moereg_api = {API_VERSION!r}, the version of moereg.author it was written for, "
            f"got {shown(found)}"
        )


def _log_if_slow(doing: str, distribution: str, started: float) -> None:
    if (seconds := time.perf_counter() - started) >= _SLOW_SECONDS:
        logger.info("%s of %s took %.1f s", doing, distribution, seconds)


def _warn(status: PluginStatus, fault: str = "did not load") -> None:
    if status.failure is not None:
        warnings.warn(failure_text(status, fault), PluginWarning, stacklevel=_outside())


def _outside() -> int:
    """The stack level of whoever called moereg, for a warning by the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "moereg":
        level, frame = level + 1, frame.f_back
    return level


_LOADER: Final = _Loader(REGISTRY)
load_kinds_with(_LOADER.load_platforms)
ask_plugins_with(lambda: _LOADER.claimed)


def load_backends() -> BackendRegistry:
    """The global registry, with every built-in backend and plugin: imported the first time it is called."""
    _LOADER.load()
    return REGISTRY


def load_dispatchers() -> DispatcherRegistry:
    """The global registry of token dispatchers, with every built-in one and plugin, as `load_backends`."""
    _LOADER.load()
    return DISPATCHERS


def list_backends() -> tuple[str, ...]:
    """Names of all backends that are registered, built-in and of plugins, sorted.

    Example:
        >>> "triton" in moereg.list_backends()
        True
    """
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


def find_scheme(name: str) -> QuantScheme:
    """The scheme of that name, moereg's own or one that a registered backend brings; else an UnknownSchemeError."""
    if name in QUANT_SCHEMES:
        return QUANT_SCHEMES[name]
    known = {scheme.name: scheme for cell in load_backends().cells for scheme in cell.schemes}
    if name not in known:
        raise UnknownSchemeError(unknown_name_message("quant scheme", name, {*QUANT_SCHEMES, *known}, SCHEMES_CALLED))
    return known[name]


def plugin_statuses() -> tuple[PluginStatus, ...]:
    """Every entry point of moereg's groups with its status."""
    return _LOADER.load()


def missing_backend(name: str) -> MoeregError | None:
    """The error for a request that names a backend whose plugin is not loaded; None where no plugin has the name."""
    for status in plugin_statuses():
        if (status.group, status.name) == (BACKEND_GROUP, name) and status.status != "loaded":
            return unusable(status)
    return None

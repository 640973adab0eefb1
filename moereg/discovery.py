"""Loads every backend once: built-in modules, then other distributions' entry points.

The only module that imports backends. A plugin that fails is recorded and never takes the others down.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import pkgutil
import re
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from typing import Final

from moereg.collecting import Collection
from moereg.entry_points import Owners, PluginPoint, scan
from moereg.errors import (
    PluginError,
    PluginWarning,
    RegistrationError,
    UnknownBackendError,
    UnknownSchemeError,
    described,
    shown,
    stops_the_process,
    unknown_name_message,
)
from moereg.platforms import (
    Platform,
    accept_plugin,
    claim_of,
    decide_claims,
    kinds_of_plugin,
    load_kinds_with,
    miss_kinds_of,
    probe_platform,
)
from moereg.plugins import (
    BACKEND_GROUP,
    MOVEMENT_GROUP,
    PLATFORM_GROUP,
    LoadFailure,
    PluginStatus,
    failure_text,
    is_allowed,
    unknown_names,
    unusable,
)
from moereg.prepare_finalize.cells import MOVEMENTS, MovementRegistry, registering_movements
from moereg.process_state import Interrupts, ProcessState, libraries_since, put_back
from moereg.quant import QUANT_SCHEMES, SCHEMES_CALLED, QuantScheme
from moereg.registry import API_VERSION, BUILTIN, REGISTRY, BackendCell, BackendRegistry, registering_origin

__all__ = [
    "current_platform",
    "find_scheme",
    "list_backends",
    "list_cells",
    "load_backends",
    "load_movements",
    "plugin_statuses",
]

logger: Final = logging.getLogger("moereg")

_GROUPS: Final = (PLATFORM_GROUP, BACKEND_GROUP, MOVEMENT_GROUP)
"""In the order of loading: platform plugins bring the kinds of machines that the others name in their rules."""
_SLOW_SECONDS: Final = 0.5
"""An import that takes longer is logged with its plugin's name."""
_LONG_SECONDS: Final = 10.0
"""An import that takes longer is told while it goes on: it may never end."""
_LONGEST_WAIT_SECONDS: Final = 60.0
"""For a thread that names an unknown kind of machine while another one loads."""


class _Loader:
    """Loads once, under a lock, so that threads that select at the same time see all backends or wait."""

    def __init__(self, registry: BackendRegistry) -> None:
        self._registry = registry
        self._lock = threading.RLock()
        self._collection = Collection(registry)
        self._done: dict[PluginPoint, PluginStatus] = {}
        self._loading: PluginPoint | None = None
        self._statuses: tuple[PluginStatus, ...] | None = None
        self._scanned: tuple[list[PluginPoint], list[PluginStatus]] | None = None
        self._has_platforms = False
        self._claims: dict[str, Platform] | None = None
        self._platform: Platform | None = None

    def load(self) -> tuple[PluginStatus, ...]:
        if self._statuses is None:
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
        if self._loading is not None:
            raise PluginError(
                f"{self._loading.module} of {' '.join(self._loading.owner)} asked for backends while it was imported; "
                "a plugin may ask inside its functions, when all plugins are loaded"
            )
        self.load_platforms()
        _import_builtins()
        points, broken = self._scan()
        for point in points:
            self._load_once(point)
        for cells in self._collection.take_homeless():
            try:
                self._registry.publish(cells)
            except RegistrationError as error:
                logger.warning("cells of a module without an entry point are left out: %s", error)
        self._registry.owner_of = MOVEMENTS.owner_of = self._collection.owners.of
        return (*(self._done[point] for point in points), *broken)

    def load_platforms(self) -> None:
        """Loads platform plugins alone: all that naming a machine needs."""
        if self._has_platforms:
            return
        # A plugin that a thread imports by hand may name a kind while the thread that loads waits for its module.
        if not self._lock.acquire(timeout=_LONGEST_WAIT_SECONDS):
            loading = self._loading
            who = f"{loading.module} of {' '.join(loading.owner)}" if loading else "another thread"
            raise PluginError(
                f"{who} has been loading for more than {_LONGEST_WAIT_SECONDS:g} s, and platforms that plugins bring "
                "are not known before; report it to its authors, or leave it out of MOEREG_PLUGINS"
            )
        try:
            # A platform plugin that names its own kind while it is imported gets the error about an unknown kind.
            if self._has_platforms or self._loading is not None:
                return
            for point in self._scan()[0]:
                if point.group == PLATFORM_GROUP:
                    status = self._load_once(point)
                    if status.status != "loaded":
                        miss_kinds_of(point.name, str(unusable(status)))
            self._has_platforms = True
        finally:
            self._lock.release()

    def _scan(self) -> tuple[list[PluginPoint], list[PluginStatus]]:
        if self._scanned is None:
            self._scanned = scan(_GROUPS)
            self._collection.owners = Owners(self._scanned[0])
        return self._scanned

    def _load_once(self, point: PluginPoint) -> PluginStatus:
        # Some are loaded already: platforms, and others if Ctrl-C ended the first attempt.
        if point not in self._done:
            self._done[point] = self._load_plugin(point)
        return self._done[point]

    def _load_plugin(self, point: PluginPoint) -> PluginStatus:
        status = point.status
        if not is_allowed(os.environ.get("MOEREG_PLUGINS"), point.group, point.name):
            return dataclasses.replace(status, status="skipped")
        # First, and written at once: code that ends the process leaves no other trace.
        logger.debug("importing %s of %s", point.module, status.distribution)
        started, num_modules = time.perf_counter(), len(sys.modules)
        state, interrupts = ProcessState.now(), Interrupts()
        overdue = threading.Timer(_LONG_SECONDS, _say_overdue, (point,))
        overdue.daemon = True
        overdue.start()
        movements = MOVEMENTS.snapshot()
        try:
            self._loading = point
            with interrupts.watched(), kinds_of_plugin(point.owner.origin, point.module):
                with self._collection.importing(point), registering_movements(*point.owner) as moving:
                    loaded = point.load()
                _check_api_version(point)
                if point.group == PLATFORM_GROUP:
                    accept_plugin(point.value, loaded)
            MOVEMENTS.publish(moving)
            if point.group == BACKEND_GROUP:
                self._publish(point)
            if point.group == MOVEMENT_GROUP:
                _check_movements(point)
        except BaseException as error:  # A stranger's module may raise anything.
            if stops_the_process(error) and not (isinstance(error, KeyboardInterrupt) and interrupts.are_excluded()):
                logger.warning("interrupted while %s of %s was imported", point.module, status.distribution)
                raise
            if point.group == BACKEND_GROUP:
                _, early = self._collection.take(point)
                self._registry.publish((), replaced=early)
            MOVEMENTS.restore(movements)
            return _failed(status, error)
        finally:
            self._loading = None
            put_back(state, f"importing {point.module} of {' '.join(point.owner)}")
            overdue.cancel()
            logger.debug("imported %s of %s", point.module, status.distribution)
            libraries = libraries_since(num_modules, point.module)
            _log_if_slow(f"importing {point.module}", status.distribution, started, libraries)
        return dataclasses.replace(status, loaded=loaded)

    def _publish(self, point: PluginPoint) -> None:
        cells, early = self._collection.take(point)
        names = {cell.name for cell in cells}
        if names != {point.name}:
            # What a direct import of its modules made visible goes with the rest.
            self._registry.publish((), replaced=early)
            same = (other for other in self._scan()[0] if other.module == point.module)
            others = {" ".join(other.owner) for other in same if other.owner != point.owner}
            shared = f"; {point.module} is of {', '.join(sorted(others))} too, uninstall one" if others else ""
            raise RegistrationError(
                f"entry point {point.name!r} must register a backend of that name and no other, got "
                f"{', '.join(sorted(names)) or 'none'}{shared}"
            )
        self._registry.publish(cells, replaced=early)

    def platform(self) -> Platform:
        if self._platform is None:
            with self._lock:
                if self._platform is None:
                    self._platform = decide_claims(self._claimed()) or probe_platform()
        return self._platform

    def _claimed(self) -> dict[str, Platform]:
        """The platforms that plugins say this machine is, by plugin. Each is asked once."""
        if self._claims is None:
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
                    statuses[place] = _failed(status, error)
                    failed.append(statuses[place])
                    continue
                finally:
                    _log_if_slow(f"asking {status.value}", status.distribution, started)
                if platform is not None:
                    claims[f"{status.name} of {status.distribution}"] = platform
            self._statuses, self._claims = tuple(statuses), claims
            for status in failed:
                _warn(status, "could not say whether this machine is its own, and moereg goes on without it")
        return self._claims


def _check_api_version(point: PluginPoint) -> None:
    found = getattr(sys.modules.get(point.module), "moereg_api", None)
    if not isinstance(found, str) or not re.fullmatch(rf"{re.escape(API_VERSION)}(\.\d+)*", found):
        raise RegistrationError(
            f"{point.module} must say moereg_api = {API_VERSION!r}, the version of moereg.author it was written for, "
            f"got {shown(found)}"
        )


def _check_movements(point: PluginPoint) -> None:
    """Checks what an entry point brought, with this import or that of another entry point of its module."""
    names = {cell.name for cell in MOVEMENTS.cells if cell.movement.__module__ == point.module}
    if names != {point.name}:
        raise RegistrationError(
            f"entry point {point.name!r} must register a prepare/finalize of that name and no other, got "
            f"{', '.join(sorted(names)) or 'none'}"
        )


def _log_if_slow(doing: str, distribution: str, started: float, libraries: Iterable[str] = ()) -> None:
    seconds = time.perf_counter() - started
    if seconds >= _SLOW_SECONDS:
        brought = (
            f", with {named}; its authors may import that in permute_weights or apply"
            if (named := ", ".join(libraries))
            else ""
        )
        logger.info("%s of %s took %.1f s%s", doing, distribution, seconds, brought)


def _say_overdue(point: PluginPoint) -> None:
    logger.warning(
        "%s of %s is still being imported after %g s, and choosing waits for it; report it to its authors, or leave it "
        "out of MOEREG_PLUGINS",
        point.module,
        " ".join(point.owner),
        _LONG_SECONDS,
    )


def _warn(status: PluginStatus, fault: str = "did not load") -> None:
    if status.failure is not None:
        warnings.warn(failure_text(status, fault), PluginWarning, stacklevel=_outside())


def _outside() -> int:
    """The stack level of whoever called moereg, for a warning by the caller of this function."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "moereg":
        level, frame = level + 1, frame.f_back
    return level


def _failed(status: PluginStatus, error: BaseException) -> PluginStatus:
    return dataclasses.replace(status, status="failed", failure=LoadFailure(described(error), error), loaded=None)


def _import_builtins() -> None:
    package = importlib.import_module("moereg.backends")
    with registering_origin(BUILTIN):
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            if not module.startswith("_"):
                importlib.import_module(f"moereg.backends.{module}")


_LOADER: Final = _Loader(REGISTRY)
load_kinds_with(_LOADER.load_platforms)


def load_backends() -> BackendRegistry:
    """Imports every built-in backend and plugin, the first time it is called.

    Returns:
        The global registry.
    """
    _LOADER.load()
    return REGISTRY


def load_movements() -> MovementRegistry:
    """Imports every built-in way of moving tokens and every plugin, the first time it is called.

    Returns:
        The global registry.
    """
    _LOADER.load()
    return MOVEMENTS


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
    """The scheme of that name: moereg's own, or one that a registered backend brings.

    Raises:
        UnknownSchemeError: Neither has it.
    """
    if name in QUANT_SCHEMES:
        return QUANT_SCHEMES[name]
    known = {scheme.name: scheme for cell in load_backends().cells for scheme in cell.schemes}
    if name not in known:
        raise UnknownSchemeError(unknown_name_message("quant scheme", name, {*QUANT_SCHEMES, *known}, SCHEMES_CALLED))
    return known[name]


def plugin_statuses() -> tuple[PluginStatus, ...]:
    """Every entry point of moereg's groups with its status."""
    return _LOADER.load()


def current_platform() -> Platform:
    """The machine at hand: from a platform plugin, else from the probe.

    Raises:
        PluginError: Two plugins claim this machine.
    """
    return _LOADER.platform()

"""Kinds of machines: how their architectures are spelled and ordered, and which plugins add kinds."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from moereg.arguments import check_count, check_instance, check_text
from moereg.errors import (
    ArgumentError,
    UnknownPlatformError,
    described,
    shown,
    stops_the_process,
    unknown_name_message,
)


@dataclasses.dataclass(frozen=True)
class PlatformKind:
    """A family of machines whose architectures can be compared.

    Attributes:
        name: `cuda`, `rocm`, `cpu`, ... or a plugin's.
        device_type: torch's type of its devices.
        arch_pattern: Regular expression that an architecture must match.
        arch_number: Orders architectures; None if `+` and family rules do not apply.
        family_size: Architectures with the same `arch_number // family_size` are one family; 0 for none.
        example: An architecture for error messages, or empty.
        probe: Returns this machine as a `Platform` if it is of this kind, else None. Called once, when moereg probes
            this machine, and not to select for another one.
    """

    name: str
    device_type: str
    arch_pattern: str
    # Kinds are parts of cache keys, and functions may not be hashable.
    arch_number: Callable[[str], int] | None = dataclasses.field(default=None, hash=False)
    family_size: int = 0
    example: str = ""
    probe: Callable[[], Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        for field in ("name", "device_type", "arch_pattern", "example"):
            check_text(f"{field} of a PlatformKind", getattr(self, field))
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            raise ArgumentError(
                f"name of a PlatformKind must be lower-case letters, digits and underscores, got {shown(self.name)}"
            )
        try:
            pattern = re.compile(self.arch_pattern)
        except re.error as error:
            raise ArgumentError(
                f"arch_pattern of a PlatformKind must be a regular expression, got {shown(self.arch_pattern)}: {error}"
            ) from None
        for field in ("arch_number", "probe"):
            function = getattr(self, field)
            if function is not None and not callable(function):
                raise ArgumentError(f"{field} of a PlatformKind must be a function or None, got {shown(function)}")
        check_count("family_size of a PlatformKind", self.family_size, minimum=0)
        if self.example and not pattern.fullmatch(self.example):
            raise ArgumentError(
                f"example of a PlatformKind must match its arch_pattern {shown(self.arch_pattern)}, "
                f"got {shown(self.example)}"
            )

    @property
    def has_order(self) -> bool:
        """Whether `+` rules apply."""
        return self.arch_number is not None

    @property
    def hint(self) -> str:
        """An example name for error messages, as a clause, or empty."""
        if not self.example:
            return "" if self.has_order else f", for instance {self.name!r}"
        return f", for instance {self.name + ':' + self.example!r}"

    def number(self, arch: str) -> int:
        """The number of an architecture of this kind, which has an order.

        An UnknownPlatformError if `arch_number`, possibly a plugin's, raised or did not return an integer.
        """
        return _number(self, arch)


@functools.lru_cache(maxsize=4096)
def _number(kind: PlatformKind, arch: str) -> int:
    assert kind.arch_number is not None
    try:
        number: object = kind.arch_number(arch)
    except BaseException as error:
        if stops_the_process(error):
            raise
        fault = f"raised {described(error)}"
    else:
        if isinstance(number, int) and not isinstance(number, bool):
            return number
        fault = f"returned {shown(number)}"
    raise UnknownPlatformError(
        f"arch_number of platform kind {kind.name!r} must return an integer for {shown(arch)}, and it {fault}; "
        f"name another architecture{kind.hint} and report it to the authors of {_OWNERS.get(kind.name, 'the kind')}"
    )


def _digits(arch: str) -> int:
    return int("".join(character for character in arch if character.isdigit()))


KINDS: Final[dict[str, PlatformKind]] = {
    kind.name: kind
    for kind in (
        PlatformKind("cuda", "cuda", r"sm\d{2,3}", _digits, family_size=10, example="sm90"),
        PlatformKind("rocm", "cuda", r"gfx[0-9a-f]{3,4}", example="gfx942"),
        PlatformKind("cpu", "cpu", r"[a-z0-9_]+"),
        PlatformKind("tpu", "xla", r"v\d+[a-z]*", example="v5e"),
        PlatformKind("npu", "npu", r"[a-z0-9_]+"),
        PlatformKind("xpu", "xpu", r"[a-z0-9_]+"),
    )
}
"""Kinds by name: moereg's and those of loaded plugins."""

_BUILTIN: Final = dict(KINDS)
_OPEN: Final = frozenset({"tpu", "npu", "xpu"})
"""Kinds that moereg names but neither probes nor orders. A plugin may redefine them."""

_OWNERS: Final[dict[str, str]] = {}
"""The distributions, or modules, that added other kinds."""

_LOCK: Final = threading.RLock()


_BRINGING: contextvars.ContextVar[tuple[str, dict[str, str]] | None] = contextvars.ContextVar("kinds", default=None)
"""The plugin being imported, and the kinds that it registers, with the registering modules."""


@contextlib.contextmanager
def kinds_of_plugin(origin: str, own: str) -> Iterator[None]:
    """Attributes kinds registered within the context to a distribution, whose entry point names the module `own`.

    If the plugin fails, drops the kinds of failed modules. Those of another distribution's loaded module stay.
    """
    modules: dict[str, str] = {}
    token = _BRINGING.set((origin, modules))
    try:
        yield
    except BaseException:
        with _LOCK:
            for name, module in modules.items():
                # Python removes a module whose import fails from sys.modules.
                if module not in sys.modules or f"{module}.".startswith(f"{own}."):
                    _forget(name)
        raise
    finally:
        _BRINGING.reset(token)


def _forget(name: str) -> None:
    _OWNERS.pop(name, None)
    if name in _BUILTIN:
        KINDS[name] = _BUILTIN[name]
    else:
        KINDS.pop(name, None)


def register_platform_kind(kind: PlatformKind) -> None:
    """Adds a plugin's kind of machine; adding the same kind twice changes nothing.

    A package need not call it: its `moereg.platforms` entry point names the kind. One plugin may redefine `tpu`, `npu`
    or `xpu`, which moereg neither probes nor orders.

    Raises:
        ArgumentError: Another kind has that name.
    """
    check_instance("kind", kind, PlatformKind, "make one")
    caller = inspect.currentframe()
    assert caller is not None and caller.f_back is not None
    module = str(caller.f_back.f_globals.get("__name__", "nowhere"))
    origin, modules = _BRINGING.get() or (module, {})
    with _LOCK:
        known = KINDS.get(kind.name)
        if known == kind:
            return
        is_open = kind.name in _OPEN and known is _BUILTIN[kind.name]
        if known is not None and not is_open:
            raise ArgumentError(
                f"platform kind {kind.name!r} is already registered by {_OWNERS.get(kind.name, 'moereg')} and cannot "
                f"be by {origin}; choose another name or uninstall one of them"
            )
        KINDS[kind.name] = kind
        _OWNERS[kind.name] = origin
    modules[kind.name] = module


_LOADS: Final[list[Callable[[], Any]]] = []
"""The function that loads platform plugins, from a higher layer; at most one."""

_MISSED: Final[dict[str, str]] = {}
"""Why platform plugins added nothing."""


def load_kinds_with(load: Callable[[], Any]) -> None:
    """Sets the function that loads platform plugins, called when an unknown kind is first named."""
    _LOADS[:] = [load]


def miss_kinds_of(plugin: str, sentence: str) -> None:
    """Records why a platform plugin added nothing, for errors about unknown kinds.

    The sentence has the cure: `platform plugin 'x' of y 1.0 failed to load: ...; repair or uninstall it`.
    """
    _MISSED[plugin] = sentence


def find_kind(name: str) -> PlatformKind | None:
    """The kind of that name, from moereg or an installed plugin, or None."""
    if name not in KINDS:
        for load in _LOADS:
            load()
    return KINDS.get(name)


def unknown_kind(what: str, name: str, known: Iterable[str], kind: str | None = None) -> str:
    """The error message for an unknown `platform kind` or `platform`, with plugins that failed to load.

    `kind` is the kind in the name, if that is not all of it.
    """
    message = unknown_name_message(what, name, known)
    # Blame the plugin of that name; without one, any of them may have had the kind.
    blamed = [_MISSED[kind or name]] if (kind or name) in _MISSED else list(_MISSED.values())
    return "; ".join([message, *blamed])

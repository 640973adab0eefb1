"""Kinds of machines: how the architectures of each are spelled and ordered, and who brings a kind."""

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
        device_type: Torch's name for its devices.
        arch_pattern: Regular expression that an architecture has to match.
        arch_number: Orders architectures; None where `+` and family rules mean nothing.
        family_size: Architectures with the same `arch_number // family_size` are one family; 0 for none.
        example: An architecture for error messages; empty where the kind has none to show.
        probe: Returns the machine at hand as a `Platform` if it is of this kind, else None. Called once, when moereg
            probes this machine, and not when somebody asks for another one.
    """

    name: str
    device_type: str
    arch_pattern: str
    arch_number: Callable[[str], int] | None = None
    family_size: int = 0
    example: str = ""
    probe: Callable[[], Any] | None = None

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

    def __hash__(self) -> int:
        # Kinds are parts of keys wherever rules are read, and their functions may not hash.
        return hash(self.name)

    @property
    def has_order(self) -> bool:
        """Whether `+` means something."""
        return self.arch_number is not None

    @property
    def hint(self) -> str:
        """An instance of a name for error messages, as a clause; empty if the kind shows none."""
        if not self.example:
            return "" if self.has_order else f", for instance {self.name!r}"
        return f", for instance {self.name + ':' + self.example!r}"

    def number(self, arch: str) -> int:
        """The place of an architecture in the order of this kind, which has one.

        Raises:
            UnknownPlatformError: Its `arch_number`, which may be a stranger's, raised or returned no integer.
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
"""Kinds by name: moereg's and those of plugins that are loaded."""

_BUILTIN: Final = dict(KINDS)
_OPEN: Final = frozenset({"tpu", "npu", "xpu"})
"""Kinds that moereg names and neither probes nor orders. A plugin that can describes one of them in its place."""

_OWNERS: Final[dict[str, str]] = {}
"""The distributions, or modules, that brought the kinds that are not moereg's."""

_LOCK: Final = threading.RLock()


_BRINGING: contextvars.ContextVar[tuple[str, dict[str, str]] | None] = contextvars.ContextVar("kinds", default=None)
"""The plugin that is imported, and the kinds that it registers, each with the module that did."""


@contextlib.contextmanager
def kinds_of_plugin(origin: str, own: str) -> Iterator[None]:
    """Kinds registered inside belong to that distribution. If the plugin fails, those of the modules that fail go.

    A kind of another distribution's module that loaded stays: the plugin only imported it.

    Args:
        origin: The distribution.
        own: The module that its entry point names.
    """
    modules: dict[str, str] = {}
    token = _BRINGING.set((origin, modules))
    try:
        yield
    except BaseException:
        with _LOCK:
            for name, module in modules.items():
                # Python takes a module whose import fails out of sys.modules.
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

    A wheel need not call it: its entry point of `moereg.platforms` names the kind. `tpu`, `npu` and `xpu`, which moereg
    neither probes nor orders, can be described anew by one plugin.

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
"""Loads the plugins that bring kinds, far above this module; one at most."""

_MISSED: Final[dict[str, str]] = {}
"""Why platform plugins brought nothing."""


def load_kinds_with(load: Callable[[], Any]) -> None:
    """Says what loads the plugins that bring kinds. It is called once somebody names a kind that is not known."""
    _LOADS[:] = [load]


def miss_kinds_of(plugin: str, sentence: str) -> None:
    """Notes why a platform plugin, by its entry point, brought nothing, for the errors about kinds that are not known.

    The sentence says the cure: `platform plugin 'x' of y 1.0 failed to load: ...; repair or uninstall it`.
    """
    _MISSED[plugin] = sentence


def find_kind(name: str) -> PlatformKind | None:
    """The kind of that name, of moereg or of an installed plugin; None if there is none."""
    if name not in KINDS:
        for load in _LOADS:
            load()
    return KINDS.get(name)


def unknown_kind(what: str, name: str, known: Iterable[str], kind: str | None = None) -> str:
    """The message of the error about an unknown kind, with the plugins that failed to bring theirs.

    Args:
        what: `platform kind` or `platform`.
        name: What somebody wrote.
        known: Names that would have been accepted.
        kind: The kind in it, where that is not all of it.
    """
    message = unknown_name_message(what, name, known)
    # The plugin of that very name is to blame; without one, any of them may have brought the kind.
    blamed = [_MISSED[kind or name]] if (kind or name) in _MISSED else list(_MISSED.values())
    return "; ".join([message, *blamed])

"""Requests: which backends or token dispatchers a caller requires, prefers or denies, in code and the environment."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from moereg.arguments import check_mapping
from moereg.errors import (
    MoeregError,
    RequestError,
    UnknownBackendError,
    UnknownNameError,
    UnknownSchemeError,
    shown,
    unknown_name_message,
)
from moereg.registry import AUTO, BackendCell
from moereg.spec.quant_schemes import QUANT_SCHEMES

Names = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""`"triton"`, `("triton", "torch")`, `"flashinfer_*"`, `"nvfp4=flashinfer_cutlass,unquantized=triton"`, or
`{"nvfp4": "triton"}`."""

DispatcherNames = str | Sequence[str] | None
"""`"all_to_all"`, `("all_to_all", "all_gather")`, `"all_*"`: token dispatchers."""


class Preference(NamedTuple):
    """A request as it concerns one name.

    Attributes:
        required, preferred: The name's place in these lists; infinite where it is not in the list.
        is_denied: Whether the name is among those denied.
        is_named: Whether require or prefer writes the name out, as what is opt-in needs: a pattern names nobody.
    """

    required: float
    preferred: float
    is_denied: bool
    is_named: bool


def _place(name: str, wished: Sequence[str]) -> float:
    for place, wish in enumerate(wished):
        if wish == name or ("*" in wish and fnmatch.fnmatchcase(name, wish)):
            return place
    return math.inf


def _is_among(name: str, wished: Sequence[str]) -> bool:
    return _place(name, wished) < math.inf


@dataclasses.dataclass(frozen=True)
class Request:
    """A caller's wishes, resolved for one scheme. `*` in a name stands for any characters.

    Attributes:
        require: Names of which one must be used, tried in this order; empty for any.
        prefer: Names that go first, in this order.
        deny: Names that must not be used.
        notices: Names in the environment that mean nothing here, and patterns that match nothing: one line each.
    """

    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    notices: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @classmethod
    def resolve(
        cls,
        scheme: str,
        require: Names = None,
        prefer: Names = None,
        deny: Names = None,
        *,
        environ: Mapping[str, str],
        cells: Sequence[BackendCell],
        missing: Callable[[str], MoeregError | None] = lambda name: None,
    ) -> Request:
        """Joins arguments and environment: for require and prefer arguments win, denials add up.

        A value for the scheme beats a value for all schemes of the same source. MOEREG_PREFER and MOEREG_DENY may name
        what is not installed, since an environment outlives wheels: a notice says so.

        Args:
            scheme: Name of the problem's scheme.
            require, prefer, deny: As in `select_backend`.
            environ: Holds MOEREG_REQUIRE, MOEREG_PREFER and MOEREG_DENY.
            cells: Their names and schemes are known.
            missing: The error about a backend whose plugin did not load, by its name.

        Raises:
            PluginError: A backend's plugin did not load; carries its error.
            RequestError: A name is both required and denied, or something is not a name.
            UnknownNameError: A backend or scheme is not known.
        """
        required, preferred, denied = _by_word(_read_source, "MOEREG_", environ, require, prefer, deny)
        # Wishes for other schemes are checked too: a misspelled name would go unnoticed until that scheme is loaded.
        notices = [
            notice
            for wish in (*required, *preferred, *denied)
            for notice in (*_check_schemes(wish, scheme, cells), *_check_backends(wish, cells, missing))
        ]
        request = cls(
            require=_strongest(required, scheme),
            prefer=_strongest(preferred, scheme),
            deny=tuple(dict.fromkeys(name for wish in denied for name in wish.all_for(scheme))),
            notices=tuple(dict.fromkeys(notices)),
        )
        # A pattern leaves room for exceptions (`flashinfer_*` without `flashinfer_b12x`); a name written out does not.
        for name in request._contradictions:
            asking = next(wish.source for wish in required if wish.for_scheme(scheme))
            denying = next(wish.source for wish in denied if _is_among(name, wish.all_for(scheme)))
            said = f"backend {name!r} is both required and denied (by {asking} and {denying})"
            raise RequestError(f"{said}; remove it from one of the two")
        return request

    @classmethod
    def resolve_dispatchers(
        cls,
        require: DispatcherNames = None,
        prefer: DispatcherNames = None,
        deny: DispatcherNames = None,
        *,
        environ: Mapping[str, str],
        known: Iterable[str],
    ) -> Request:
        """As `resolve`, for token dispatchers, which know no schemes. `known` has the names of all."""
        read = functools.partial(_dispatchers, known=sorted(known))
        required, preferred, denied = _by_word(read, "MOEREG_EP_", environ, require, prefer, deny)
        request = cls(
            require=required[0] or required[1],
            prefer=preferred[0] or preferred[1],
            deny=tuple(dict.fromkeys((*denied[0], *denied[1]))),
        )
        for name in request._contradictions:
            raise RequestError(f"dispatcher {name!r} is both required and denied; remove it from one of the two")
        return request

    @property
    def _contradictions(self) -> list[str]:
        return [name for name in self.require if "*" not in name and _is_among(name, self.deny)]

    def preference(self, name: str) -> Preference:
        """The request's wish about a name; worked out once."""
        if name not in self._preferences:
            is_named = name in (*self.require, *self.prefer)
            places = _place(name, self.require), _place(name, self.prefer)
            self._preferences[name] = Preference(*places, _is_among(name, self.deny), is_named)
        return self._preferences[name]

    @functools.cached_property
    def _preferences(self) -> dict[str, Preference]:
        return {}

    def to_dict(self) -> dict[str, list[str]]:
        """Lists by word."""
        return {"require": list(self.require), "prefer": list(self.prefer), "deny": list(self.deny)}


S = TypeVar("S")


def _by_word(
    read: Callable[[Any, str], S], prefix: str, environ: Mapping[str, str], *values: object
) -> Iterator[tuple[S, S]]:
    """The answers of each word's argument and variable: require, prefer, deny."""
    for word, value in zip(("require", "prefer", "deny"), values, strict=True):
        variable = f"{prefix}{word.upper()}"
        yield read(value, word), read(environ.get(variable), variable)


@dataclasses.dataclass(frozen=True)
class _Source:
    """The names of one word from one source.

    Attributes:
        source: As a user spells it: the word, or the environment variable.
        names: By scheme; `""` is every scheme.
    """

    source: str
    names: Mapping[str, tuple[str, ...]]

    @property
    def word(self) -> str:
        return self.source.removeprefix("MOEREG_").lower()

    def notice(self, error: MoeregError) -> str:
        """The notice of a name that means nothing here, where the source may have such; else raises the error."""
        if self.source not in ("MOEREG_PREFER", "MOEREG_DENY"):
            raise error
        return f"{self.source} is ignored where it names unknown things: {error}"

    def for_scheme(self, scheme: str) -> tuple[str, ...]:
        return self.names.get(scheme) or self.names.get("", ())

    def all_for(self, scheme: str) -> tuple[str, ...]:
        return (*self.names.get(scheme, ()), *self.names.get("", ()))


def _strongest(wishes: Iterable[_Source], scheme: str) -> tuple[str, ...]:
    names = next(filter(None, (wish.for_scheme(scheme) for wish in wishes)), ())
    return () if names == (AUTO,) else names


def _read_source(names: Names, word: str) -> _Source:
    found: dict[str, tuple[str, ...]] = {}
    if isinstance(names, Mapping):
        for scheme, value in check_mapping(word, names).items():
            found[scheme] = _split(value, f"{word} for {shown(scheme)}")
    else:
        for item in _split(() if names is None else names, word):
            scheme, _, name = (part.strip() for part in item.rpartition("="))
            found[scheme] = (*found.get(scheme, ()), *_split(name, word))
        if isinstance(names, str) and names.strip() and not found:
            raise RequestError(
                f"{word} must name backends, such as 'triton,torch', got {shown(names)}; leave it out for any"
            )
    if empty := sorted(scheme for scheme, listed in found.items() if not listed):
        raise RequestError(f"{word} for scheme {shown(empty[0])} must name a backend, got none; leave it out for any")
    source = _Source(word, found)
    for listed in found.values():
        if AUTO in listed and (source.word == "deny" or len(listed) > 1):
            raise RequestError(
                f"{AUTO!r} in a request stands alone in require or prefer and means no wish, got {shown(listed)} "
                f"in {word}; leave it out"
            )
    return source


def _check_schemes(wish: _Source, wanted: str, cells: Sequence[BackendCell]) -> Iterator[str]:
    """Checks that schemes are known, of which the problem's is one; yields notices."""
    for name in wish.names:
        if name and name != wanted and name not in QUANT_SCHEMES:
            known = {wanted, *QUANT_SCHEMES, *(scheme.name for cell in cells for scheme in cell.schemes)}
            if name not in known:
                yield wish.notice(UnknownSchemeError(unknown_name_message("quant scheme", name, known)))


def _check_backends(
    wish: _Source, cells: Iterable[BackendCell], missing: Callable[[str], MoeregError | None]
) -> Iterator[str]:
    """Checks that backends are known; yields notices. A backend whose plugin did not load may still be denied."""
    known = {cell.name for cell in cells}
    for name in (name for listed in wish.names.values() for name in listed):
        if name == AUTO or any(_is_among(one, (name,)) for one in known):
            continue
        if "*" in name and wish.word != "require":
            yield f"{wish.source}: no backend matches {name!r} (known: {', '.join(sorted(known)) or 'none'})"
        elif (error := missing(name)) is None:
            yield wish.notice(UnknownBackendError(unknown_name_message("backend", name, known)))
        elif wish.word != "deny":
            yield wish.notice(error)


def _split(names: object, word: str, of: str = "backends") -> tuple[str, ...]:
    items = names.split(",") if isinstance(names, str) else names
    if not isinstance(items, (Sequence, Set)) or isinstance(items, (bytes, bytearray)):
        raise RequestError(f"{word} must be a name or a tuple of names, got {shown(names)}")
    for item in items:
        if not isinstance(item, str):
            raise RequestError(f"{word} must hold names of {of}, got {shown(item)}")
    # A set has no order of its own, and ranks must agree on one.
    stripped = (item.strip() for item in (sorted(items) if isinstance(items, Set) else items))
    return tuple(item for item in stripped if item)


def _dispatchers(value: object, source: str, known: Sequence[str]) -> tuple[str, ...]:
    names = _split(() if value is None else value, source, "dispatchers")
    for name in names:
        if not any(_is_among(one, (name,)) for one in known):
            raise UnknownNameError(unknown_name_message(f"dispatcher in {source}", name, known))
    return names

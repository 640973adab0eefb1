"""Requests: which backends a caller requires, prefers or denies, in code and in the environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from moereg.arguments import check_mapping, check_text
from moereg.errors import RequestError, UnknownBackendError, UnknownSchemeError, shown, unknown_name_message
from moereg.plugins import BACKEND_GROUP, PluginStatus, unusable
from moereg.quant import QUANT_SCHEMES
from moereg.registry import BackendCell

__all__ = ["Names", "Request"]

Names = str | Sequence[str] | Mapping[str, str | Sequence[str]] | None
"""`"triton"`, `("triton", "torch")`, `"nvfp4=flashinfer_cutlass,unquantized=triton"`, or `{"nvfp4": "triton"}`."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A caller's wishes, resolved for one scheme.

    Attributes:
        require: Backends of which one must be used; empty for any.
        prefer: Backends that go first, in this order.
        deny: Backends that must not be used.
    """

    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

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
        plugins: Sequence[PluginStatus] = (),
    ) -> Request:
        """Joins arguments and environment: for require and prefer arguments win, denials add up.

        A value for the scheme beats a value for all schemes of the same source.

        Args:
            scheme: Name of the problem's scheme.
            require: As in `select_backend`.
            prefer: As in `select_backend`.
            deny: As in `select_backend`.
            environ: Holds MOEREG_REQUIRE, MOEREG_PREFER and MOEREG_DENY.
            cells: Their names and schemes are known.
            plugins: Statuses of plugins, for the error about a backend whose plugin did not load.

        Raises:
            PluginError: A backend's plugin did not load; carries its error.
            RequestError: A name is both required and denied, or something is not a name.
            UnknownNameError: A backend or scheme is not known.
        """
        check_text("scheme of a request", scheme)
        check_mapping("environ", environ)
        required, preferred, denied = (
            (_by_scheme(names, word), _by_scheme(environ.get(variable), variable))
            for word, names, variable in (
                ("require", require, "MOEREG_REQUIRE"),
                ("prefer", prefer, "MOEREG_PREFER"),
                ("deny", deny, "MOEREG_DENY"),
            )
        )
        # Wishes for other schemes are checked too: a misspelled name would go unnoticed until that scheme is loaded.
        # The problem's own scheme may be named even if no backend has it.
        for error in _unknown_schemes(scheme, (*required, *preferred, *denied), cells):
            raise error
        for asked in (required, preferred, denied):
            _check_backends(asked, cells, plugins, may_have_failed=asked is denied)

        def names_for_scheme(source: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
            return source.get(scheme) or source.get("", ())

        request = cls(
            require=next(filter(None, map(names_for_scheme, required)), ()),
            prefer=next(filter(None, map(names_for_scheme, preferred)), ()),
            deny=tuple(
                dict.fromkeys(name for source in denied for key in (scheme, "") for name in source.get(key, ()))
            ),
        )
        if both := sorted(set(request.require) & set(request.deny)):
            raise RequestError(f"backend {both[0]!r} is both required and denied; remove it from one of the two")
        return request

    def to_dict(self) -> dict[str, list[str]]:
        """Lists by word."""
        return {"require": list(self.require), "prefer": list(self.prefer), "deny": list(self.deny)}


def _by_scheme(names: Names, word: str) -> dict[str, tuple[str, ...]]:
    """Names by scheme; `""` is every scheme."""
    if isinstance(names, Mapping):
        found = {
            scheme: _split(value, f"{word} for {shown(scheme)}") for scheme, value in check_mapping(word, names).items()
        }
    else:
        found = {}
        for item in _split(() if names is None else names, word):
            scheme, _, name = (part.strip() for part in item.rpartition("="))
            found[scheme] = (*found.get(scheme, ()), *_split(name, word))
        if isinstance(names, str) and names.strip() and not found:
            raise RequestError(
                f"a request names backends, such as 'triton,torch', got {shown(names)}; leave it out for any"
            )
    if empty := sorted(scheme for scheme, listed in found.items() if not listed):
        raise RequestError(
            f"a request for scheme {shown(empty[0])} must name a backend, got none; leave it out for any"
        )
    return found


def _unknown_schemes(
    wanted: str, sources: Iterable[Mapping[str, object]], cells: Iterable[BackendCell]
) -> Iterator[UnknownSchemeError]:
    """An error for each scheme that is neither the problem's, nor moereg's, nor a cell's."""
    others = [name for source in sources for name in source if name and name not in QUANT_SCHEMES]
    if others:
        known = {wanted, *QUANT_SCHEMES, *(scheme.name for cell in cells for scheme in cell.schemes)}
        for name in others:
            if name not in known:
                yield UnknownSchemeError(unknown_name_message("quant scheme", name, known))


def _check_backends(
    sources: Iterable[Mapping[str, Sequence[str]]],
    cells: Iterable[BackendCell],
    plugins: Iterable[PluginStatus],
    may_have_failed: bool,
) -> None:
    """Checks that backends are known. A backend whose plugin did not load may still be denied."""
    names = [name for source in sources for listed in source.values() for name in listed]
    if not names:
        return
    known = {cell.name for cell in cells}
    for name in names:
        if name in known:
            continue
        failed = [status for status in plugins if status.group == BACKEND_GROUP and status.name == name]
        if not failed:
            raise UnknownBackendError(unknown_name_message("backend", name, known))
        if not may_have_failed:
            raise unusable(failed[0])


def _split(names: object, word: str) -> tuple[str, ...]:
    items = names.split(",") if isinstance(names, str) else names
    if not isinstance(items, (Sequence, Set)) or isinstance(items, (bytes, bytearray)):
        raise RequestError(f"{word} must be a name or a tuple of names, got {shown(names)}")
    for item in items:
        if not isinstance(item, str):
            raise RequestError(f"{word} must hold names of backends, got {shown(item)}")
    return tuple(item.strip() for item in items if item.strip())

"""Requests for the way of tokens between ranks, in code and in the environment."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from moereg.errors import RequestError, UnknownNameError, shown, unknown_name_message

__all__ = ["MovementRequest", "WayNames", "way_place"]

WayNames = str | Sequence[str] | None
"""`"all_to_all"`, `("low_latency", "all_gather")`, `"all_*"`."""

_VARIABLES: Final = {"require": "MOEREG_EP_REQUIRE", "prefer": "MOEREG_EP_PREFER", "deny": "MOEREG_EP_DENY"}


@dataclasses.dataclass(frozen=True)
class MovementRequest:
    """A caller's wishes for the way of tokens. `*` in a name stands for any characters.

    Attributes:
        require: Ways of which one must be used, tried in this order; empty for any.
        prefer: Ways that go first, in this order.
        deny: Ways that must not be used.
    """

    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    @classmethod
    def resolve(
        cls,
        require: WayNames = None,
        prefer: WayNames = None,
        deny: WayNames = None,
        *,
        environ: Mapping[str, str],
        known: Iterable[str],
    ) -> MovementRequest:
        """Joins arguments and environment: for require and prefer arguments win, denials add up.

        Args:
            require, prefer, deny: As in `explain_movements`.
            environ: Holds MOEREG_EP_REQUIRE, MOEREG_EP_PREFER and MOEREG_EP_DENY.
            known: Names of all ways.

        Raises:
            RequestError: A name is both required and denied, or something is not a name.
            UnknownNameError: A way is not known.
        """
        names = sorted(known)
        given = {
            word: (_names(value, word, names), _names(environ.get(_VARIABLES[word]), _VARIABLES[word], names))
            for word, value in (("require", require), ("prefer", prefer), ("deny", deny))
        }
        request = cls(
            given["require"][0] or given["require"][1],
            given["prefer"][0] or given["prefer"][1],
            tuple(dict.fromkeys((*given["deny"][0], *given["deny"][1]))),
        )
        for name in request.require:
            if "*" not in name and way_place(name, request.deny) is not None:
                raise RequestError(f"way {name!r} is both required and denied; remove it from one of the two")
        return request

    def to_dict(self) -> dict[str, list[str]]:
        """Lists by word."""
        return {"require": list(self.require), "prefer": list(self.prefer), "deny": list(self.deny)}


def _names(value: object, source: str, known: Sequence[str]) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else () if value is None else value
    if not isinstance(items, (tuple, list)) or not all(isinstance(item, str) for item in items):
        raise RequestError(f"{source} must be a name of a way or a tuple of names, got {shown(value)}")
    names = tuple(filter(None, (item.strip() for item in items)))
    for name in names:
        if not any(fnmatch.fnmatchcase(one, name) for one in known):
            raise UnknownNameError(unknown_name_message(f"way in {source}", name, known))
    return names


def way_place(name: str, wished: Sequence[str]) -> int | None:
    """Place of the first name that is a way's, or None. `*` in a name stands for any characters."""
    return next((place for place, wish in enumerate(wished) if fnmatch.fnmatchcase(name, wish)), None)

"""Reads JSON that others may have written as values of annotated types, which say what their fields may hold."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Final

import msgspec

from moereg.errors import ArgumentError, MoeregError, described, one_line, shown

# Without controls, formats, separators other than the space, surrogates and private characters.
_PRINTABLE: Final = (
    r"\A[^\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f"
    r"\u2028-\u202f\u205f-\u206f\u3000\ud800-\uf8ff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e00ff\U000e01f0-\U0010ffff]*\Z"
)
_DATE: Final = r"\A[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])\Z"
_LARGEST: Final = 2**63 - 1

Text = Annotated[str, msgspec.Meta(pattern=_PRINTABLE)]
"""A text that prints on one line, without control characters."""

Date = Annotated[str, msgspec.Meta(pattern=_DATE)]
"""A text that looks like 2026-11-30."""

Whole = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
"""An integer of at least 0."""

Count = Annotated[int, msgspec.Meta(ge=1, le=_LARGEST)]
"""An integer of at least 1."""

Size = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number of at least 0."""

_MISSING: Final = "Object missing required field `"
_UNKNOWN: Final = "Object contains unknown field "
_WORDS: Final = {
    "array": "a list",
    "bool": "True or False",
    "float": "a finite number",
    "int": "an integer",
    "object": "an object",
    "str": "a text",
}


def decode(content: bytes | str, kind: Any, what: str, cure: str = "") -> Any:
    """Reads a text of JSON as a type that msgspec knows; errors call the whole `what`.

    Raises:
        ArgumentError: It is no JSON, which the cause says and `cure` ends, or no value of that type; as `convert`.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, TypeError, UnicodeError, RecursionError) as error:
        if kind is Any or not isinstance(error, msgspec.ValidationError):
            raise ArgumentError(f"{what} must be readable JSON, got {described(error)}{cure}") from error
    return convert(decode(content, Any, what, cure), kind, what)  # Whose error shows the value that is wrong.


def convert(values: Any, kind: Any, what: str) -> Any:
    """As `decode`, of mappings, lists and so on.

    Raises:
        ArgumentError: It is no value of that type; the message has the path, the rule and the value found.
        MoeregError: A class refused its own fields with this error.
    """
    try:
        return msgspec.convert(values, kind)
    except UnicodeError as error:
        raise ArgumentError(f"{what} must have texts of Unicode, got {described(error)}") from None
    except msgspec.ValidationError as error:
        text, own = one_line(str(error)), error.__cause__
    rule, _, place = text.partition(" - at `")
    path = place.rpartition("$")[2].strip("`")
    name = path.lstrip(".") or what
    if isinstance(own, MoeregError):
        raise type(own)(f"{name}: {own}" if path else str(own))
    for step in re.findall(r"\w+", path):  # Up to a mapping, of whose values msgspec does not say which.
        values = values[int(step)] if isinstance(values, (list, tuple)) else values[step]
    if rule.startswith(_MISSING):
        field = f"{path}.{rule[len(_MISSING) :]}".strip(".`").replace("`", "")
        raise ArgumentError(f"{field} is required, got an object with {shown(list(values))}")
    if rule.startswith(_UNKNOWN):
        raise ArgumentError(f"{name} has no field {rule[len(_UNKNOWN) :].strip('`')}, got {shown(values)}; delete it")
    for pattern, words in ((_PRINTABLE, "printable on one line"), (_DATE, "an ISO date")):
        rule = rule.replace(f"`str` matching regex {pattern!r}", words)
    rule = rule.partition(", got")[0].replace("`", "").replace(" | ", " or ")
    rule = re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), rule)
    rule = f" must be {rule[9:]}" if rule.startswith("Expected ") else f": {rule}"
    raise ArgumentError(f"{name}{rule}, got {shown(values)}")

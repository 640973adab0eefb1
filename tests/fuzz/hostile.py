"""Values that a careless reader takes for another, and changes of JSON that keep most of it."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Edit = list[Any]
"""[path, "set" or "add", value] or [path, "delete"]; a path is a list of keys and indices."""

_TEXTS: Final = (
    "", " ", "\0", "\n", "a\nb", "\x1b[31mred", "\x1b]0;title\x07", "\u202e", "\ud800", "\ufeff", "\u0663", "\u00e9",
    "true", "false", "null", "nan", "inf", "1", "1.9", "-1", "1e999", "0x10", "..", "../x", "/etc/passwd", "~root",
    "~nosuchuser/x", "%s%n", "{0}", "${HOME}", "`id`", "re:", "re:(", "re:.*", "*", "[", "**", "?", "-:", "+:",
    "Linear", "lm_head", "model", "model.layers.0.mlp", "model.layers.0.mlp.experts.0", "float", "int", "group",
    "channel", "tensor", "fp8", "mixtral", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_moe", "silu", "gelu",
    "bfloat16", "float64", "F8_E4M3",
)  # fmt: skip
_NUMBERS: Final = (
    0, -1, 1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 96, 127, 128, 129, 255, 1023, 4096, 65_536, 10**6, 10**7, 10**9, 2**31,
    2**31 - 1, 2**32, 2**63, 2**63 - 1, 2**64, -(2**63), 10**30, 10**400, 4.0, 1.9, 0.5, -0.0, 1e-320, 1e30, 1e308,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip


def draw_text(rng: random.Random) -> str:
    """A text that is empty, long, not printable, or not what it looks like."""
    kind = rng.randrange(10)
    if kind == 0:
        return rng.choice("ax9(. \x1b\u20ac") * rng.choice((255, 256, 300, 5_000, 100_000))
    if kind == 1:
        return "".join(
            chr(rng.choice((rng.randrange(32), rng.randrange(128), rng.randrange(0x3000)))) for _ in range(8)
        )
    return rng.choice(_TEXTS)


def draw_file_name(rng: random.Random) -> str:
    """A name that a file can have, with non-UTF-8 bytes as Python passes them."""
    text = draw_text(rng).replace("\0", "\x01").replace("/", "\x02").replace("\ud800", "\udcff")[:60]
    return f"x{text}"


def draw_value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    kind = rng.randrange(12)
    if kind < 3:
        return rng.choice((None, True, False))
    if kind < 7:
        return rng.choice(_NUMBERS)
    if kind < 9 or depth > 2:
        return draw_text(rng)
    if kind == 9:
        return [draw_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 3, 200)))]
    if kind == 10:
        return {draw_text(rng): draw_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    value: Any = rng.choice(_NUMBERS)
    for _ in range(rng.choice((1, 2, 50))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


# Ways to match the same text that double with each character, and an end that never comes.
_ATOMS: Final = (
    "a", ".", r"\w", r"\d", "[a-z]", "[^.]", "mlp", "experts", "gate_proj", r"\.", "model", "layers", "(?!x)",
    "(?=m)", "^", "$", r"\b", r"\1", r"\2", "(?P=n)", "[", "]", "(?i)", "(?x)", "(?<=a)", "(?<!b)", "(?R)",
    "(?:.|.)*", r"(?:\w|[a-z])+", "(.*)*", "(?!)", "(?!)", r"\p{L}", r"\Z", "|", "{", "\\",
)  # fmt: skip
# Their engine can only try everything.
_ENDLESS: Final = ("(?:.|.)*(?!)", r"(.)*(?:.|.)*\1\1\1$", r"(?:(?=(\w|\w+))\1|.)*(?!)")
_REPEATS: Final = (
    "*", "+", "?", "*?", "+?", "++", "{2}", "{1,9}", "{0,60000}", "{1000}", "{,}", "{e<=2}", "{99999999999}",
)  # fmt: skip


def draw_pattern(rng: random.Random, depth: int = 0) -> str:
    """A regular expression, most often a valid one; mainly repeats inside repeats."""
    if depth == 0 and rng.random() < 0.05:
        opened, closed = rng.choice((("(", ")"), ("(?:", ")"), ("[", "]"), ("(?=", ")")))
        count = rng.choice((20, 500, 3000))
        return opened * count + "a" + closed * count
    if depth == 0 and rng.random() < 0.05:
        return rng.choice(("", "model", ".*")) + rng.choice(_ENDLESS)
    parts = []
    for _ in range(rng.randrange(1, 5)):
        if depth < 4 and rng.random() < 0.4:
            opened = rng.choice(("(", "(?:", "(?P<n>", "(?>", "(?|", "(?=", "(?!"))
            inner = "|".join(draw_pattern(rng, depth + 1) for _ in range(rng.choice((1, 1, 2, 3))))
            part = f"{opened}{inner})"
        else:
            part = rng.choice(_ATOMS)
        parts.append(part + (rng.choice(_REPEATS) if rng.random() < 0.4 else ""))
    return "".join(parts)


def _places(value: Any, path: Sequence[str | int] = ()) -> Iterator[list[str | int]]:
    """Paths to everything inside a JSON value, not to itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield [*path, key]
        yield from _places(item, [*path, key])


def draw_edit(
    rng: random.Random, value: Any, draw: Callable[[random.Random], Any] = draw_value, under: Sequence[str] = ()
) -> Edit:
    """A change of one place of a JSON object, which may be made of parts of the object itself.

    Args:
        rng: Seeded.
        value: The object.
        draw: A new value.
        under: Only below this place.
    """
    places = [path for path in _places(value) if path[: len(under)] == list(under)]
    path = rng.choice(places)
    kind = rng.randrange(12)
    if kind == 0:
        return [path, "delete"]
    if kind == 1:
        return [[*path[:-1], draw_text(rng)], "add", draw(rng)]
    if kind == 2:
        return [path, "set", copy.deepcopy(_at(value, rng.choice(places)))]
    if kind == 3 and isinstance(number := _at(value, path), int):
        return [
            path,
            "set",
            rng.choice((float(number), -number, number + 1, number - 1, 2 * number, str(number), [number])),
        ]
    return [path, "set", draw(rng)]


def apply_edits(value: Any, edits: Sequence[Edit]) -> Any:
    """A changed copy; an edit whose place is gone by then changes nothing."""
    value = copy.deepcopy(value)
    for path, action, *new in edits:
        try:
            holder = _at(value, path[:-1])
            if action == "delete":
                del holder[path[-1]]
            elif isinstance(holder, list):
                holder.append(new[0]) if action == "add" else holder.__setitem__(path[-1], new[0])
            else:
                holder[path[-1]] = new[0]
        except (KeyError, IndexError, TypeError):
            continue
    return value


def _at(value: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        value = value[key]
    return value


def dumped(value: Any) -> bytes:
    """As JSON, with lone surrogates as escapes, as files have them."""
    return json.dumps(value).encode()

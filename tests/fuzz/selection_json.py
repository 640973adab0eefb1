"""Altered JSON of selections: read right, or refused with the path of the fault."""

from __future__ import annotations

import copy
import functools
import json
import random
from typing import Any, Final

from moereg.dispatch import explain_backends
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.fuzz.area import Area, Case
from tests.fuzz.contract import NOTHING, breach_of

__all__ = ["AREA"]

_SIZES: Final = {"num_experts": 8, "hidden_size": 64, "intermediate_size": 32, "top_k": 2}
_BASES: Final[dict[str, tuple[dict[str, Any], str, dict[str, Any]]]] = {
    "cpu": (_SIZES, "cpu", {}),
    "h100": ({**_SIZES, "quant": "fp8_block128", "max_num_tokens": 64}, "cuda:sm90", {"prefer": "triton"}),
    "nothing fits": ({**_SIZES, "activation": "swigluoai(limit=3.0)"}, "tpu:v5e", {"require": "triton"}),
    "own scheme": (
        {**_SIZES, "quant": {"name": "mine", "weight": {"dtype": "int8", "group": [1, 32]}, "activation": None}},
        "rocm:gfx942",
        {"deny": "triton"},
    ),
}
_MOST_DECISIONS: Final = 4

_NAMES: Final = [
    "torch", "triton", "nonsense", "", "a\nb", "\x1b[31m", "\ud800", "cuda:sm90", "kernel", "silu", "x" * 300,
]  # fmt: skip
_NUMBERS: Final = [0, 1, -1, 2**31, 2**63, 10**30, 0.5, 1e308, float("nan"), float("inf")]
# Python reads integers of at most 4,300 digits, and nests a thousand calls.
_HOSTILE: Final = [{"$": "digits", "count": 5000}, {"$": "deep", "depth": 100}, {"$": "deep", "depth": 100_000}]


@functools.cache
def _base(name: str) -> str:
    keywords, platform, request = _BASES[name]
    selection = explain_backends(MoEProblem.from_dict(keywords), platform, **request)
    return json.dumps({**selection.to_dict(), "decisions": selection.to_dict()["decisions"][:_MOST_DECISIONS]})


def _value(draw: random.Random) -> Any:
    kind = draw.randrange(6)
    if kind == 0:
        return draw.choice(_NAMES)
    if kind == 1:
        return draw.choice(_NUMBERS)
    if kind == 2:
        return draw.choice([None, True, False])
    if kind == 3:
        return [_value(draw) for _ in range(draw.randrange(3))]
    if kind == 4:
        return {draw.choice(_NAMES): _value(draw) for _ in range(draw.randrange(3))}
    return dict(draw.choice(_HOSTILE))


def _draw(draw: random.Random) -> Case:
    edits = [
        {
            # Read against the registered backends, so that a case outlives a change of them.
            "path": [draw.randrange(64) for _ in range(draw.choice([1, 1, 2, 2, 3, 4, 5]))],
            "do": draw.choice(["set", "set", "set", "delete", "add", "repeat", "swap"]),
            "value": _value(draw),
        }
        for _ in range(draw.choice([1, 1, 1, 2, 3]))
    ]
    case: dict[str, Any] = {"base": draw.choice(sorted(_BASES)), "edits": edits, "as": draw.choice(["json", "dict"])}
    if draw.random() < 0.15:
        case["bytes"] = [[draw.random(), draw.randrange(256)] for _ in range(draw.randrange(1, 4))]
    elif draw.random() < 0.1:
        case["cut"] = draw.random()
    elif draw.random() < 0.05:
        case["whole"] = _value(draw)
    return case


def _check(case: Case) -> str | None:
    case = copy.deepcopy(case)  # Later edits may change the values of earlier ones.
    values = json.loads(_base(case["base"]))
    for edit in case["edits"]:
        _edit(values, edit)
    if "whole" in case:
        values = case["whole"]
    text = _text(values)
    if case["as"] == "dict" and not any(key in case for key in ("bytes", "cut")):
        try:
            plain = json.loads(text)
        except (RecursionError, ValueError):
            plain = None
        breach, found = breach_of(lambda: Selection.from_dict(plain))
    else:
        raw = bytearray(text.encode(errors="surrogatepass"))
        for place, byte in case.get("bytes", []):
            raw[int(place * len(raw))] = byte
        del raw[int(case.get("cut", 1.0) * len(raw)) :]
        breach, found = breach_of(lambda: Selection.from_json(bytes(raw)))
    if breach is not None or found is NOTHING:
        return breach
    again = Selection.from_json(found.to_json())
    if again != found or again.fingerprint != found.fingerprint or again.to_dict() != found.to_dict():
        return "what was read is not what is written"
    found.table()
    assert found.refusal
    return None


def _edit(values: Any, edit: dict[str, Any]) -> None:
    place = values
    *steps, last = edit["path"]
    for step in steps:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        inner = place[keys[step % len(keys)]] if keys else None
        if not isinstance(inner, (dict, list)) or not inner or "$" in inner:
            last = step
            break
        place = inner
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    if not keys:
        return
    key = keys[last % len(keys)]
    if edit["do"] == "delete":
        del place[key]
    elif edit["do"] == "add" and isinstance(place, dict):
        place[f"more {last}"] = edit["value"]
    elif edit["do"] == "repeat" and isinstance(place, list):
        place.append(place[key])
    elif edit["do"] == "swap":
        other = keys[(last + 1) % len(keys)]
        place[key], place[other] = place[other], place[key]
    else:
        place[key] = edit["value"]


def _text(values: Any) -> str:
    """As JSON, with what JSON would not hold in a stored case."""
    if isinstance(values, dict) and "$" in values:
        return "1" * values["count"] if values["$"] == "digits" else "[" * values["depth"] + "]" * values["depth"]
    if isinstance(values, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_text(value)}" for key, value in values.items()) + "}"
    if isinstance(values, list):
        return "[" + ", ".join(map(_text, values)) + "]"
    return json.dumps(values)


AREA: Final = Area("selection_json", _draw, _check)

"""Area: checkpoint directories of any content. `load_experts` loads them or says in one line why not."""

from __future__ import annotations

import random
from typing import Any

from tests.fuzz.area import Area
from tests.fuzz.hostile import draw_edit, draw_file_name, draw_text, draw_value
from tests.fuzz.small_checkpoints import BASES, KINDS, base, broken_promise

_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "hf_quant_config.json")
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "layer": (0, 1, 2, -1, 10**9, 10**400, True, 1.0, "1", None),
    "num_local_experts": (0, 1, 2, 4, 5, -1, 10**9, 10**400),
    "ep_rank": (0, 1, 2, -1, 10**9, 10**400),
    "dtype": ("float32", "bf16", "float64", "", "\x1b"),
    "device": ("cpu", "cuda", "cpu:7", "nothing", "", "\x1b"),
    "max_memory_fraction": (0.5, 0, -1, 1.5, float("nan"), 1e-300),
}


def _draw(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(BASES)
    good = base(name)
    case: dict[str, Any] = {"base": name}
    if rng.random() < 0.1:
        case["directory"] = draw_file_name(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(20)
        if kind < 8:
            case.setdefault("config", []).append(draw_edit(rng, good.config))
        elif kind < 11:
            case.setdefault("header", []).append(draw_edit(rng, good.header))
        elif kind < 14:
            case.setdefault("index", []).append(draw_edit(rng, good.index, _draw_file, ("weight_map",)))
        elif kind == 14:
            case.setdefault("index", []).append([["weight_map", draw_text(rng)], "set", _draw_file(rng)])
        elif kind == 15:
            case.setdefault("sizes", []).append([rng.choice(_FILES), rng.choice((0, 1, 7, 8, 9, 100, 4096, 2**40))])
        elif kind == 16:
            replaced = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8))))
            position = rng.choice((0.0, 0.0, rng.random() * 0.1, rng.random()))
            case.setdefault("bytes", []).append([rng.choice(_FILES[:2]), position, replaced.hex()])
        elif kind == 17:
            case.setdefault("kinds", []).append([rng.choice(_FILES), rng.choice(KINDS)])
        elif kind == 18:
            argument = rng.choice(list(_ARGUMENTS))
            case.setdefault("arguments", {})[argument] = rng.choice(_ARGUMENTS[argument])
        else:
            case["hf_quant_config"] = {"quantization": draw_value(rng)} if rng.random() < 0.7 else draw_value(rng)
    return case


def _draw_file(rng: random.Random) -> Any:
    return draw_text(rng) if rng.random() < 0.7 else draw_value(rng)


AREA = Area("checkpoints", _draw, broken_promise, smoke=40, limit_s=2.0, memory_mib=512)

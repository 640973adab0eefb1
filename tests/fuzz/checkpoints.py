"""Checkpoint directories of any content: `load_experts` loads them or says in one line why not.

One area changes anything; the other quantization_config over good tensors, with patterns made to take forever.
"""

from __future__ import annotations

import json
import random
from typing import Any, Final

from tests.fuzz.area import Area
from tests.fuzz.hostile import draw_edit, draw_file_name, draw_pattern, draw_text, draw_value
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


def _draw_checkpoint(rng: random.Random) -> dict[str, Any]:
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


_KEY = "quantization_config"
_QUANTIZED = [name for name in BASES if _KEY in base(name).config]
_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def _draw_quantization_config(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(_QUANTIZED)
    config = base(name).config
    edits = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind < 4:
            edits.append(draw_edit(rng, config, under=(_KEY,)))
        elif kind == 4:
            edits.append([[_KEY, "quant_method"], "set", rng.choice(_METHODS)])
        elif kind == 5:
            edits.append([[_KEY, "dynamic"], "set", {_pattern(rng, ("", "-:", "+:")): _rule(rng) for _ in range(3)}])
        elif kind == 6:
            edits.append([[_KEY, "config_groups", "group_0", "targets"], "set", _patterns(rng)])
        else:
            edits.append([[_KEY, rng.choice(_LISTS)], "set", _patterns(rng)])
    case: dict[str, Any] = {"base": name, "config": edits}
    if rng.random() < 0.1:
        # Instead of in config.json.
        case["config"] = [[[_KEY], "delete"]]
        case["hf_quant_config"] = {"quantization": json.loads(json.dumps(config[_KEY]))}
        case["hf_quant_config"]["quantization"]["exclude_modules"] = _patterns(rng)
    return case


def _pattern(rng: random.Random, prefixes: tuple[str, ...] = ("", "re:", "re:")) -> str:
    return rng.choice(prefixes) + (draw_text(rng) if rng.random() < 0.1 else draw_pattern(rng))


def _patterns(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return draw_value(rng)
    return [_pattern(rng) for _ in range(rng.choice((1, 2, 5, 60)))]


def _rule(rng: random.Random) -> Any:
    return rng.choice(({}, {"bits": 8}, {"sym": rng.choice((True, False, "true"))}, draw_value(rng)))


AREAS: Final = {
    area.name: area
    for area in (
        Area("checkpoints", _draw_checkpoint, broken_promise, smoke=40, limit_s=2.0, memory_mib=512),
        Area("quantization_config", _draw_quantization_config, broken_promise, smoke=30, limit_s=4.0, memory_mib=512),
    )
}

"""Area: quantization_config of any content over good tensors, with patterns that were made to take forever."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.fuzz.area import Area
from tests.fuzz.hostile import draw_edit, draw_pattern, draw_text, draw_value
from tests.fuzz.small_checkpoints import BASES, base, broken_promise

_KEY = "quantization_config"
_QUANTIZED = [name for name in BASES if _KEY in base(name).config]
_METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
_LISTS = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


def _draw(rng: random.Random) -> dict[str, Any]:
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


AREA = Area("quantization_config", _draw, broken_promise, smoke=30, limit_s=4.0, memory_mib=512)

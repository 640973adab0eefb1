"""Checkpoint directories of any content: `load_experts` loads them or says in one line why not.

One area changes anything; the other quantization_config over good tensors, with patterns made to take forever.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from moereg.checkpoints import CheckpointLayer, load_experts, moe_layers, read_problem
from moereg.errors import MoeregError
from tests.checkpoints.published_layers import LAYERS, made
from tests.fuzz.area import Area
from tests.fuzz.hostile import apply_edits, draw_edit, draw_file_name, draw_pattern, draw_text, draw_value, dumped

_STORED: Final = Path(__file__).parents[1] / "checkpoints" / "stored"
_SIZES: Final = {"num_hidden_layers": 2, "hidden_size": 8, "num_experts_per_tok": 2, "hidden_act": "silu"}
_DEEPSEEK: Final = {
    **_SIZES,
    "moe_intermediate_size": 6,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
}
_QWEN: Final = {**_SIZES, "moe_intermediate_size": 6, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]}
_FUSED: Final = {**_SIZES, "intermediate_size": 6, "num_local_experts": 4}
_CONFIGS: Final[Mapping[str, dict[str, Any]]] = {
    "deepseek_v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy", "scoring_func": "softmax"},
    "deepseek_v3": {**_DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True},
    "gpt_oss": {**_FUSED, "swiglu_limit": 7.0},
    "llama4_text": {**_FUSED, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": [1]},
    "mixtral": {**_SIZES, "intermediate_size": 6, "num_local_experts": 4},
    "qwen3_moe": _QWEN,
    "olmoe": {**_SIZES, "intermediate_size": 6, "num_experts": 4, "norm_topk_prob": False},
}
BASES: Final = (
    *_CONFIGS,
    "multimodal",
    *LAYERS,
    *sorted(path.name for path in _STORED.iterdir() if path.is_dir() and path.name != "__pycache__"),
)


class Base:
    """Files of a small checkpoint: config.json, an index that it is complete without, and the safetensors file's parts.

    `layer` has experts.
    """

    def __init__(self, config: dict[str, Any], content: bytes, layer: int) -> None:
        start = 8 + int.from_bytes(content[:8], "little")
        self.config, self.layer, self.data = config, layer, content[start:]
        self.header: dict[str, Any] = json.loads(content[8:start])
        names = [name for name in self.header if name != "__metadata__"]
        self.index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}


@functools.cache
def base(name: str) -> Base:
    """A good checkpoint of that name."""
    if name in _CONFIGS:
        return Base({"model_type": name, **_CONFIGS[name]}, save(_tensors(name)), 1)
    if name == "multimodal":
        text = {"model_type": "qwen3_moe", **_QWEN}
        return Base({"model_type": "x", "text_config": text, "vision_config": {}}, save(_tensors("qwen3_moe")), 1)
    if name in LAYERS:
        layer = made(name)
        return Base(layer.config, save(layer.tensors), 0)
    config = json.loads((_STORED / name / "config.json").read_text())
    return Base(config, (_STORED / name / "model.safetensors").read_bytes(), 0)


def _tensors(model_type: str) -> dict[str, torch.Tensor]:
    num_experts, hidden, intermediate = 4, 8, 6
    block, router = {
        "mixtral": ("block_sparse_moe", "gate"),
        "gpt_oss": ("mlp", "router"),
        "llama4_text": ("feed_forward", "router"),
    }.get(model_type, ("mlp", "gate"))
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    root = f"model.layers.1.{block}"
    shapes: dict[str, tuple[int, ...]] = {f"{root}.{router}.weight": (num_experts, hidden)}
    if model_type in ("gpt_oss", "llama4_text"):
        shapes[f"{root}.experts.gate_up_proj"] = (num_experts, hidden, 2 * intermediate)
        shapes[f"{root}.experts.down_proj"] = (num_experts, intermediate, hidden)
    else:
        for expert in range(num_experts):
            shapes[f"{root}.experts.{expert}.{gate}.weight"] = (intermediate, hidden)
            shapes[f"{root}.experts.{expert}.{up}.weight"] = (intermediate, hidden)
            shapes[f"{root}.experts.{expert}.{down}.weight"] = (hidden, intermediate)
    if model_type == "gpt_oss":
        shapes[f"{root}.{router}.bias"] = (num_experts,)
        shapes[f"{root}.experts.gate_up_proj_bias"] = (num_experts, 2 * intermediate)
        shapes[f"{root}.experts.down_proj_bias"] = (num_experts, hidden)
    tensors = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in shapes.items()}
    if model_type == "deepseek_v3":
        tensors[f"{root}.{router}.e_score_correction_bias"] = torch.zeros(num_experts)
    return tensors


@contextlib.contextmanager
def checkpoint_directory(case: Mapping[str, Any]) -> Iterator[Path]:
    """A directory with the checkpoint of a case, changed as it says.

    Args:
        case: `base`, its name; `directory`, what the directory is called; edits of `config`, `header` and `index`,
            which is written only then; `hf_quant_config`, a file; `bytes` of [file, position, replaced bytes as
            hexadecimal digits]; `sizes` of [file, bytes]; `kinds` of [file, kind of thing that stands in its place].
    """
    good = base(case["base"])
    root = Path(tempfile.mkdtemp(prefix="moereg-fuzz-"))
    path = root / case.get("directory", "checkpoint")
    try:
        path.mkdir()
        (path / "config.json").write_bytes(dumped(apply_edits(good.config, case.get("config", ()))))
        if "index" in case:
            index = dumped(apply_edits(good.index, case["index"]))
            (path / "model.safetensors.index.json").write_bytes(index)
        if "hf_quant_config" in case:
            (path / "hf_quant_config.json").write_bytes(dumped(case["hf_quant_config"]))
        header = dumped(apply_edits(good.header, case.get("header", ())))
        (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + good.data)
        for file, position, replaced in case.get("bytes", ()):
            _replace_bytes(path / file, position, bytes.fromhex(replaced))
        for file, size in case.get("sizes", ()):
            if (path / file).exists():
                os.truncate(path / file, size)
        for file, kind in case.get("kinds", ()):
            (path / file).unlink(missing_ok=True)
            _KINDS[kind](path / file)
        yield path
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _replace_bytes(file: Path, position: float, replaced: bytes) -> None:
    if file.exists():
        content = file.read_bytes()
        start = int(position * len(content))
        file.write_bytes(content[:start] + replaced + content[start + len(replaced) :])


_KINDS: Final[Mapping[str, Callable[[Path], object]]] = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "loop": lambda file: file.symlink_to(file.name),
    "zeros": lambda file: file.symlink_to("/dev/zero"),
    "nowhere": lambda file: file.symlink_to("nothing"),
    "empty": Path.touch,
    "deep": lambda file: file.write_bytes(b'{"a":' * 50_000),
    "pickle": lambda file: (file.parent / "pytorch_model.bin").write_bytes(b""),
    "nothing": lambda file: None,
}
KINDS: Final = tuple(_KINDS)
"""What may stand in a file's place."""


def broken_promise(case: Mapping[str, Any]) -> str | None:
    """The promise that `load_experts`, `read_problem` or `moe_layers` breaks for a case, or None.

    Args:
        case: As `checkpoint_directory` takes it; `arguments` are keywords of `load_experts`.
    """
    arguments = case.get("arguments", {})
    with checkpoint_directory(case) as path:
        layer = arguments.get("layer", base(case["base"]).layer)
        calls = {
            "moe_layers": lambda: moe_layers(path),
            "read_problem": lambda: read_problem(path, layer),
            "load_experts": lambda: load_experts(path, **{"layer": layer, **arguments}),
        }
        results: dict[str, Any] = {}
        for name, call in calls.items():
            try:
                results[name] = call()
            except (MoeregError, ValueError) as error:
                if not isinstance(error, MoeregError) and not arguments:
                    return f"{name} raised a foreign {type(error).__name__}: {error}"
                if failure := error_failure(str(error)):
                    return f"{name}: {failure}"
        loaded = results.get("load_experts")
        if isinstance(loaded, CheckpointLayer) and not arguments:
            if loaded.problem != results.get("read_problem"):
                return f"load_experts loaded {loaded.problem}, read_problem said {results.get('read_problem')}"
            loaded.sample_routes(torch.ones(1, loaded.problem.hidden_size, dtype=loaded.problem.torch_dtype))
    return None


def error_failure(message: str, longest: int = 2_500) -> str | None:
    """Why a text is no message for a terminal: it must be one line, printable and shorter than a page."""
    if not message.isprintable():
        return f"a message that is not printable: {message[:200]!r}"
    return f"a message of {len(message)} characters: {message[:200]!r}" if len(message) > longest else None


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
_METHODS = ("auto-round", "awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "quark")
_LISTS = ("exclude", "ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules")


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

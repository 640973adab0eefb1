"""Engines that serve a model with random weights: what the benches of vLLM and of SGLang share."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benches.whole_model.models import MODELS

_FP8: Final = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_INT4: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
        }
    },
}
_MXFP4: Final = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
QUANT: Final[Mapping[str, Mapping[str, Any] | None]] = {"bf16": None, "fp8": _FP8, "int4": _INT4, "mxfp4": _MXFP4}
"""Published quantization configurations."""

_ARCHITECTURES: Final = {"qwen3_moe": "Qwen3MoeForCausalLM", "gpt_oss": "GptOssForCausalLM"}
# Root mean squares of formats' values under equally likely codes.
_E2M1_RMS: Final = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_INT4_RMS: Final = math.sqrt(sum(v * v for v in range(-8, 8)) / 16)
_LARGE: Final = 50_000
"""Prompt tokens of a workload above which it is timed once."""
_REPEATS: Final = 6
_REPEAT_SECONDS: Final = 4.0
"""Others are timed at least twice, and up to `_REPEATS` times while that takes no longer than this."""


def config_of(model: str, quant: str, num_layers: int | None) -> dict[str, Any]:
    """A model's config.json."""
    from transformers import AutoConfig

    fields = dict(MODELS[model].config)
    # Heads of 16, as tiny models have them, are too small for attention kernels, and a layer's sizes for experts'.
    if model.startswith("tiny"):
        fields |= {"hidden_size": 256, "head_dim": 64, "vocab_size": 2048, "num_hidden_layers": 4}
        fields |= {key: 256 for key in ("intermediate_size", "moe_intermediate_size") if key in fields}
    kind = fields.pop("model_type")
    config: dict[str, Any] = AutoConfig.for_model(kind, **fields).to_dict()
    config |= {"architectures": [_ARCHITECTURES[kind]], "model_type": kind, "torch_dtype": "bfloat16"}
    if num_layers:
        config["num_hidden_layers"] = num_layers
        config |= {"layer_types": config["layer_types"][:num_layers]} if config.get("layer_types") else {}
    if QUANT[quant] is not None:
        config["quantization_config"] = json.loads(json.dumps(QUANT[quant]))
    if quant == "fp8":
        names = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        layers = range(config["num_hidden_layers"])
        config["quantization_config"]["modules_to_not_convert"] = [
            "lm_head",
            *(f"model.layers.{layer}.{name}" for layer in layers for name in names),
        ]
    return config


def _filled_part(leaf: str, data: Any, config: Mapping[str, Any]) -> Any:
    """The part of an expert parameter that a checkpoint fills: vLLM pads those of mxfp4 for some kernels."""
    if config.get("quantization_config", {}).get("quant_method") != "mxfp4" or not leaf.startswith(("w13_", "w2_")):
        return data
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    rows, depth = (2 * inner, hidden) if leaf.startswith("w13_") else (hidden, inner)
    if leaf.endswith("bias"):
        return data[:, :rows]
    return data[:, :rows, : depth // (32 if leaf.endswith("scale") else 2)]


def _values(leaf: str, like: Any, generator: Any, is_embedding: bool) -> Any:
    """Random values for a parameter, or None to leave it as it is; dequantized weights have deviation K**-0.5."""
    import torch

    shape, dtype, options = tuple(like.shape), like.dtype, {"generator": generator, "device": like.device}
    if any(word in leaf for word in ("g_idx", "sort_indices", "weight_shape", "zero_point")):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if leaf in ("q_scale", "k_scale", "v_scale", "prob_scale") or leaf.endswith("input_scale"):
        return None
    if dtype == torch.uint8 and leaf.endswith("scale"):
        power = round(math.log2((shape[-1] * 32) ** -0.5 / _E2M1_RMS))
        return torch.randint(126 + power, 129 + power, shape, dtype=dtype, **options)
    if dtype in (torch.uint8, torch.int8, torch.int32):
        size = like.element_size()
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, **options)
        return codes.view(dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"no rule for {leaf} of {dtype} {shape}")
    if "scale" in leaf:
        is_fp8 = leaf.endswith("scale_inv")  # else int4: experts [E,K/128,N], linear layers [N,K/128]
        depth = 128 * (shape[1] if len(shape) == 3 and not is_fp8 else shape[-1])
        spread = 0.75 + 0.5 * torch.rand(shape, dtype=torch.float32, **options)
        return spread * depth**-0.5 / (1.0 if is_fp8 else _INT4_RMS)
    if leaf.endswith("bias"):
        return torch.randn(shape, dtype=torch.float32, **options) * 0.1
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=like.device)
    if dtype.itemsize == 1:
        return torch.randn(shape, dtype=torch.bfloat16, **options)
    # Embeddings of size 1: with smaller ones greedy decoding repeats one token.
    std = 1.0 if is_embedding else shape[-1] ** -0.5
    return torch.randn(shape, dtype=dtype, **options).mul_(std)


def fill(model: Any, config: Mapping[str, Any], zero_experts: bool) -> int:
    """Fills every parameter, by its name and its unpadded shape alone; returns the bytes."""
    import torch

    num_bytes = 0
    for name, parameter in model.named_parameters():
        leaf, data = name.rpartition(".")[2], parameter.data
        part = _filled_part(leaf, data, config)
        seed = zlib.crc32(name.replace(".routed_experts.", ".").encode())
        generator = torch.Generator(data.device).manual_seed(seed)
        values = _values(leaf, part, generator, "embed_tokens" in name or ".embedding." in name)
        if values is None:
            continue
        if part is not data:
            data.zero_()
        if zero_experts and leaf.startswith("w2_") and "scale" not in leaf:
            is_int4 = values.dtype == torch.int32  # Its zero is 8.
            values = values.view(torch.uint8).fill_(0x88).view(torch.int32) if is_int4 else torch.zeros_like(values)
        part.copy_(values)
        num_bytes += data.numel() * data.element_size()
    return num_bytes


class Compared:
    """Compares every eager call of the experts of a served engine with fp32 on canonical weights, which it keeps.

    Attributes:
        worst: The largest relative error over its bound, by layer.
        errors: The largest relative error, by layer.
        calls: Calls of experts, those in CUDA graphs' captures too.
        compared: Calls of them that were compared.
    """

    def __init__(self, hook: Any, inputs_of: Callable[..., tuple[Any, Any, Any]]) -> None:
        """Patches the hook of a plugin.

        Args:
            hook: Module with `take_weights` and `_apply`.
            inputs_of: From the arguments of `_apply` after the layer to hidden states, routing weights and ids.
        """
        self.worst: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.calls = self.compared = 0
        self._weights: dict[int, Any] = {}
        take, run = hook.take_weights, hook._apply

        def take_weights(layer: Any, *rest: Any) -> Any:
            weights = take(layer, *rest)
            kept = {name: tensor.clone() for name, tensor in weights.tensors().items()}
            self._weights[id(layer)] = type(weights).unchecked(kept, weights.scheme)
            return weights

        def apply(method: Any, layer: Any, *args: Any, **named: Any) -> Any:
            out = run(method, layer, *args, **named)
            inputs = inputs_of(*args, **named)
            self._compare(method.moereg, self._weights[id(layer)], *inputs, getattr(out, "hidden_states", out))
            return out

        hook.take_weights, hook._apply = take_weights, apply

    def _compare(self, ours: Any, weights: Any, x: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        import torch

        from moereg.numerics.reference import reference_experts, relative_error
        from moereg.numerics.tolerances import layer_tolerance

        self.calls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self.compared += 1
        problem, computes = ours.kernel.problem, ours.selection.winner.scheme
        expected = reference_experts(problem, weights, x, topk_weights, topk_ids, computes=computes)
        error = relative_error(out, expected)
        bound = layer_tolerance(problem, x.shape[0], computes)
        self.errors[ours.name] = max(self.errors.get(ours.name, 0.0), error)
        self.worst[ours.name] = max(self.worst.get(ours.name, 0.0), error / bound)


def parse_workload(text: str) -> tuple[int, int, int]:
    """SEQUENCESxPROMPT+OUTPUT."""
    sequences, _, rest = text.partition("x")
    prompt, _, output = rest.partition("+")
    return int(sequences), int(prompt), int(output)


def arguments(doc: str, modes: Sequence[str], quants: Sequence[str], variable: str) -> argparse.ArgumentParser:
    """The options of every engine.

    Args:
        doc: The bench's docstring.
        modes: Its modes, its default one last.
        quants: Its quantizations, the default one first.
        variable: The plugin's environment variable.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in MODELS if "mixtral" not in name], default="qwen3-30b-a3b")
    parser.add_argument("--quant", choices=quants, default=quants[0])
    parser.add_argument("--mode", choices=modes, default=modes[-1])
    parser.add_argument("--plugin", choices=("off", "auto", "require"), default="off", help=variable)
    parser.add_argument("--workload", action="append", type=parse_workload, metavar="SxP+O")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--zero-experts", action="store_true", help="a control: the experts' output is zero")
    parser.add_argument("--compare", action="store_true", help="compare every eager call of experts with fp32")
    parser.add_argument("--round", default="", help="a name for the run, such as the GPU that it ran on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, help="write this file of the runs that follow, and measure nothing")
    parser.add_argument("runs", nargs="*", type=Path)
    return parser


def head_of(options: argparse.Namespace, engine: str, version: str) -> dict[str, Any]:
    """What a stored run says besides its measurements."""
    import torch

    import moereg

    wishes = {name: os.environ[name] for name in ("MOEREG_REQUIRE", "MOEREG_PREFER") if name in os.environ}
    return {
        "argv": [*(f"{name}={value}" for name, value in wishes.items()), *_argv()],
        "round": options.round,
        "model": options.model,
        "quant": options.quant,
        "mode": options.mode,
        "plugin": options.plugin,
        "wishes": wishes,
        "versions": {engine: version, "torch": torch.__version__, "moereg": moereg.__version__},
        "commit": os.environ.get("MOEREG_COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Sends prompts to an engine, and returns as many new tokens of each as asked for, greedy."""


def measure(generate: Generate, workload: tuple[int, int, int], vocabulary: int) -> dict[str, Any]:
    """One workload: the time to all first tokens, and to all tokens."""
    import torch

    count, length, output = workload
    is_large = count * length > _LARGE
    generator = torch.Generator().manual_seed(count * 1000003 + length)
    prompts = torch.randint(0, vocabulary - 1024, (count, length), generator=generator).tolist()

    def run(num_tokens: int) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        answers = generate(prompts, num_tokens)
        return time.perf_counter() - start, answers

    # Decoding compiles kernels of its own, which must not fall into the times.
    run(min(output, 4))
    start = time.perf_counter()
    firsts, runs = [], []
    least, most = (2, 2) if is_large else (2, _REPEATS)
    while len(runs) < least or (len(runs) < most and time.perf_counter() - start < _REPEAT_SECONDS):
        firsts.append(run(1)[0])
        runs.append(run(output))
    totals, tokens = [seconds for seconds, _ in runs], runs[0][1]
    first, total = min(firsts), min(totals)
    return {
        "sequences": count,
        "prompt": length,
        "output": output,
        "first_s": first,
        "total_s": total,
        "all_first_s": firsts,
        "all_total_s": totals,
        "step_ms": 1000 * (total - first) / max(output - 1, 1),
        "output_per_s": count * output / total,
        "hash": hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:12],
        "distinct": len({token for row in tokens for token in row}),
        "tokens": tokens[0][:16],
    }


def measure_all(
    options: argparse.Namespace,
    result: dict[str, Any],
    generate: Generate,
    vocabulary: int,
    state: Callable[[], dict[str, Any]],
) -> None:
    """Measures each workload into `result["rows"]`, prints it, and stores what is known by then.

    Args:
        state: What the engine knows after a workload: peak memory, and with `--compare` the fields of `compared_state`.
    """
    result["rows"] = []
    print(json.dumps(result), flush=True)
    for workload in options.workload:
        row = measure(generate, workload, vocabulary)
        result["rows"].append(row)
        print(
            f"{options.model} {options.quant} {options.mode} {options.plugin} {options.round} "
            f"{row['sequences']}x{row['prompt']}+{row['output']}: first {1000 * row['first_s']:.1f} ms, "
            f"step {row['step_ms']:.2f} ms, {row['output_per_s']:.0f} tokens/s, {row['hash']} {row['tokens']}",
            flush=True,
        )
        result |= state()
        if options.json:
            options.json.write_text(json.dumps(result))
    if options.compare:
        if not result["compared"]:
            raise SystemExit(f"compared none of {result['calls']} calls of experts that moereg runs")
        worst, error = result["worst"], max(result["errors"].values())
        count = f"{result['compared']} of {result['calls']} calls"
        print(f"compared {count}, worst error {error:.2e}, {worst:.2f} of its bound", flush=True)


def compared_state(compared: Compared | None) -> dict[str, Any]:
    """What was compared, and this process's peak of GPU memory."""
    import torch

    found: dict[str, Any] = {}
    if compared is not None:
        worst = max(compared.worst.values(), default=None)
        found = {"calls": compared.calls, "compared": compared.compared, "errors": compared.errors, "worst": worst}
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def merge(options: argparse.Namespace) -> int:
    """Writes one file of several runs, with the rows of workloads that it had for other runs."""
    from benches.stored import read

    known = read(options.merge)["runs"] if options.merge.exists() else []
    runs = {json.dumps([run["argv"], run["round"]]): run for run in known}
    for path in options.runs:
        run = json.loads(path.read_text())
        runs[json.dumps([run["argv"], run["round"]])] = run
    last = list(runs.values())[-1]
    document = {
        "schema": 1,
        "device": last["device"],
        "versions": last["versions"],
        "date": max(run["date"] for run in runs.values()),
        "commit": last["commit"],
        "note": "clocks not read; one engine at a time",
        "runs": list(runs.values()),
    }
    options.merge.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _argv() -> list[str]:
    """The command line without names of files and runs."""
    words = ["", *sys.argv[1:]]
    hidden = {"--json", "--round"}
    return [word for before, word in itertools.pairwise(words) if not {before, word} & hidden]

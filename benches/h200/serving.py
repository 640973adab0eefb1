"""One vLLM engine with random weights: the tokens that it gives, and its speed, with moereg's experts or vLLM's own.

python -m benches.h200.serving --model qwen3-30b-a3b --plugin auto --workload 16x1024+128 --json OUT.json
python -m benches.h200.serving --merge benches/results/serving_h200.json OUT.json...

Needs vLLM, and vllm-moereg for anything but `--plugin off`. Greedy decoding without prefix caching. A workload is
SEQUENCESxPROMPT+OUTPUT, all sent at once; times are of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
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
MODES: Final = ("eager", "graphs", "compiled")
"""`compiled` is vLLM's default, Inductor and CUDA graphs; `graphs` has CUDA graphs of whole decode steps alone."""

# Root mean squares of formats' values under equally likely codes.
_E2M1_RMS: Final = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_INT4_RMS: Final = math.sqrt(sum(v * v for v in range(-8, 8)) / 16)
_LARGE: Final = 50_000
"""Prompt tokens of a workload above which it is timed once."""
_REPEATS: Final = 6
_REPEAT_SECONDS: Final = 4.0
"""Others are timed at least twice, and up to `_REPEATS` times while that takes no longer than this."""
_HOST_ROUNDS: Final = 60
_HOST_CALLS: Final = 20


def config_of(model: str, quant: str, num_layers: int | None) -> dict[str, Any]:
    """A model's config.json."""
    from transformers import AutoConfig

    fields = dict(MODELS[model].config)
    # Heads of 16, as tiny models have them, are too small for vLLM's attention, and a layer's sizes for its kernels.
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


def served(model: Any) -> dict[str, Any]:
    """The kernel of the first layer of experts."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "get_fused_moe_quant_config"):
            continue
        ours, kernel = getattr(method, "moereg", None), getattr(method, "moe_kernel", None)
        backend = next((str(value) for key, value in vars(method).items() if key.endswith("backend")), None)
        experts = type(getattr(kernel, "fused_experts", None)).__name__
        return {
            "layer": name,
            "method": type(method).__name__,
            "vllm_backend": backend,
            "experts": experts,
            "moereg": ours and ours.selection.backend,
        }
    return {}


class Compared:
    """Compares every call of the experts of a served engine with fp32 on canonical weights, which it keeps.

    Attributes:
        worst: The largest relative error over its bound, by layer.
        calls: Calls of experts.
    """

    def __init__(self) -> None:
        from vllm_moereg import hook

        self.worst: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.calls = 0
        self._weights: dict[int, Any] = {}
        take, run = hook.take_weights, hook._apply

        def take_weights(layer: Any, *rest: Any) -> Any:
            weights = take(layer, *rest)
            kept = {name: tensor.clone() for name, tensor in weights.tensors().items()}
            self._weights[id(layer)] = type(weights).unchecked(kept, weights.scheme)
            return weights

        def apply(method: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *rest: Any, **named: Any) -> Any:
            out = run(method, layer, x, topk_weights, topk_ids, *rest, **named)
            self._compare(method.moereg, self._weights[id(layer)], x, topk_weights, topk_ids, out)
            return out

        hook.take_weights, hook._apply = take_weights, apply

    def _compare(self, ours: Any, weights: Any, x: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        import torch

        from moereg.numerics.reference import reference_experts, relative_error
        from moereg.numerics.tolerances import layer_tolerance

        self.calls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        problem, computes = ours.kernel.problem, ours.selection.winner.scheme
        expected = reference_experts(problem, weights, x, topk_weights, topk_ids, computes=computes)
        error = relative_error(out, expected)
        bound = layer_tolerance(problem, x.shape[0], computes)
        self.errors[ours.name] = max(self.errors.get(ours.name, 0.0), error)
        self.worst[ours.name] = max(self.worst.get(ours.name, 0.0), error / bound)


def serve_every_other_layer() -> None:
    """Leaves odd layers to vLLM, so that both kinds stand beside each other in one process."""
    from vllm_moereg import hook

    serve = hook._serve

    def every_other(layer: Any, name: str, method: Any, config: Any) -> None:
        if int(name.partition("layers.")[2].partition(".")[0]) % 2 == 0:
            serve(layer, name, method, config)

    hook._serve = every_other


def host_times(model: Any) -> dict[str, dict[str, float]]:
    """Microseconds of the host for one call of a layer's experts, medians: moereg's and vLLM's, in turns."""
    import torch

    layers = {}
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "get_fused_moe_quant_config"):
            layers.setdefault("vllm" if getattr(method, "moereg", None) is None else "moereg", module)
    served = layers["moereg"].quant_method.moereg.kernel
    problem, device = served.problem, served.weights.device
    found: dict[str, dict[str, float]] = {}
    for num_tokens in (1, 16):
        generator = torch.Generator().manual_seed(num_tokens)
        x = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(device, problem.torch_dtype)
        logits = torch.randn(num_tokens, problem.num_experts, generator=generator)
        weights, ids = logits.softmax(-1).topk(problem.top_k)
        weights, ids = weights.to(device), ids.int().to(device)
        samples: dict[str, list[float]] = {name: [] for name in layers}
        for number in range(_HOST_ROUNDS + 1):
            for name, layer in layers.items():
                start = time.perf_counter()
                for _ in range(_HOST_CALLS):
                    layer.quant_method.apply(layer, x, weights, ids, None, None)
                if number:  # The first round compiles.
                    samples[name].append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
                if device.type == "cuda":
                    torch.cuda.synchronize()
        found[str(num_tokens)] = {name: statistics.median(values) for name, values in samples.items()}
    return found


def parse_workload(text: str) -> tuple[int, int, int]:
    """SEQUENCESxPROMPT+OUTPUT."""
    sequences, _, rest = text.partition("x")
    prompt, _, output = rest.partition("+")
    return int(sequences), int(prompt), int(output)


def arguments() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in MODELS if "mixtral" not in name], default="qwen3-30b-a3b")
    parser.add_argument("--quant", choices=QUANT, default="bf16")
    parser.add_argument("--mode", choices=MODES, default="compiled")
    parser.add_argument("--plugin", choices=("off", "auto", "require"), default="off", help="MOEREG_VLLM")
    parser.add_argument("--moe-backend", default="auto", help="vLLM's option")
    parser.add_argument("--workload", action="append", type=parse_workload, metavar="SxP+O")
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--zero-experts", action="store_true", help="a control: the experts' output is zero")
    parser.add_argument("--compare", action="store_true", help="compare every eager call of experts with fp32")
    parser.add_argument("--host-time", action="store_true", help="time every other layer's experts beside vLLM's own")
    parser.add_argument("--parallel", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts-parallel", action="store_true")
    parser.add_argument("--round", default="", help="a name for the run, such as the GPU that it ran on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, help="write this file of the runs that follow, and measure nothing")
    parser.add_argument("runs", nargs="*", type=Path)
    return parser.parse_args()


def build(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The engine, filled."""
    import torch
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        start = time.perf_counter()
        num_bytes = fill(model, config, options.zero_experts)
        print(f"filled {num_bytes / 2**30:.1f} GiB in {time.perf_counter() - start:.1f} s", flush=True)

    dummy_loader.DummyModelLoader.load_weights = load_weights
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    sequences = max(count for count, _, _ in options.workload)
    length = max(prompt + output for _, prompt, output in options.workload)
    keywords: dict[str, Any] = {}
    if torch.cuda.is_available():
        # vLLM's own choice needs a kernel library that an offline machine may lack.
        keywords |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.9}
    if options.mode != "eager":
        sizes = {2**power for power in range(9)} | {count for count, _, _ in options.workload}
        capture = {"cudagraph_capture_sizes": sorted(size for size in sizes if size <= sequences)}
        whole = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"} if options.mode == "graphs" else {}
        keywords["compilation_config"] = capture | whole
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        seed=0,
        enable_prefix_caching=False,
        enforce_eager=options.mode == "eager",
        max_model_len=-(-length // 64) * 64 + 64,
        max_num_seqs=sequences,
        max_num_batched_tokens=8192,
        moe_backend=options.moe_backend,
        tensor_parallel_size=options.parallel,
        enable_expert_parallel=options.experts_parallel,
        **keywords,
    )


def measure(engine: Any, workload: tuple[int, int, int], vocabulary: int) -> dict[str, Any]:
    """One workload: the time to all first tokens, and to all tokens."""
    import torch
    from vllm import SamplingParams

    count, length, output = workload
    is_large = count * length > _LARGE
    generator = torch.Generator().manual_seed(count * 1000003 + length)
    prompts = torch.randint(0, vocabulary - 1024, (count, length), generator=generator).tolist()

    def run(num_tokens: int) -> tuple[float, list[list[int]]]:
        wanted = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return time.perf_counter() - start, [list(answer.outputs[0].token_ids) for answer in answers]

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


def main() -> int:
    """Runs one engine, or merges runs."""
    options = arguments()
    if options.merge:
        return merge(options)
    os.environ["MOEREG_VLLM"] = options.plugin
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    start = time.perf_counter()
    import torch
    import vllm

    import moereg

    compared = Compared() if options.compare else None
    if options.host_time:
        serve_every_other_layer()
    imported = time.perf_counter()
    config = config_of(options.model, options.quant, options.layers)
    engine = build(options, config)
    wishes = {name: os.environ[name] for name in ("MOEREG_REQUIRE", "MOEREG_PREFER") if name in os.environ}
    result: dict[str, Any] = {
        "argv": [*(f"{name}={value}" for name, value in wishes.items()), *_argv()],
        "round": options.round,
        "model": options.model,
        "quant": options.quant,
        "mode": options.mode,
        "plugin": options.plugin,
        "moe_backend": options.moe_backend,
        "wishes": wishes,
        "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "moereg": moereg.__version__},
        "commit": os.environ.get("MOEREG_COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "import_s": imported - start,
        "start_s": time.perf_counter() - imported,
        "experts": engine.apply_model(served)[0] if options.parallel == 1 else {},
        "calls_at_start": compared and compared.calls,
        "host_us": engine.apply_model(host_times)[0] if options.host_time else None,
        "rows": [],
    }
    print(json.dumps(result), flush=True)
    for workload in options.workload:
        row = measure(engine, workload, config["vocab_size"])
        result["rows"].append(row)
        print(
            f"{options.model} {options.quant} {options.mode} {options.plugin} {options.round} "
            f"{row['sequences']}x{row['prompt']}+{row['output']}: first {1000 * row['first_s']:.1f} ms, "
            f"step {row['step_ms']:.2f} ms, {row['output_per_s']:.0f} tokens/s, {row['hash']} {row['tokens']}",
            flush=True,
        )
        if compared is not None:
            result |= {"calls": compared.calls, "errors": compared.errors, "worst": max(compared.worst.values())}
        if torch.cuda.is_available():
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if options.json:
            options.json.write_text(json.dumps(result))
    if compared is not None:
        worst, error = max(compared.worst.values()), max(compared.errors.values())
        print(f"compared {compared.calls} calls, worst error {error:.2e}, {worst:.2f} of its bound", flush=True)
    print(f"all {time.perf_counter() - start:.1f} s, of it start {result['start_s']:.1f} s", flush=True)
    return 0


def _argv() -> list[str]:
    """The command line without names of files and runs."""
    words = ["", *sys.argv[1:]]
    hidden = {"--json", "--round"}
    return [word for before, word in itertools.pairwise(words) if not {before, word} & hidden]


if __name__ == "__main__":
    sys.exit(main())

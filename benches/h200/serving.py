"""One vLLM engine with random weights: the tokens that it gives, and its speed, with moereg's experts or vLLM's own.

python -m benches.h200.serving --model qwen3-30b-a3b --plugin auto --workload 16x1024+128 --json OUT.json
python -m benches.h200.serving --merge benches/results/serving_h200.json OUT.json...

Needs vLLM, and vllm-moereg for anything but `--plugin off`. Greedy decoding without prefix caching. A workload is
SEQUENCESxPROMPT+OUTPUT, all sent at once; times are of `LLM.generate`. `--arrivals RATExCOUNT` sends COUNT requests at
random times, RATE a second in the mean, with prompts of 128 to 2,048 tokens and 32 to 256 tokens of output.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benches.whole_model.models import MODELS

SETTINGS: Final = "MOEREG_SERVING"
"""The environment variable that `serving_rank` reads: `{"config", "shards", "zero_experts", "compare"}` in JSON, the
model's config.json, the parts of experts' columns, whether experts give zeros, and whether to compare their calls."""

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
MODES: Final = ("eager", "compiled")
"""`compiled` is vLLM's default, Inductor and CUDA graphs."""

_LARGE: Final = 50_000
"""Prompt tokens of a workload above which it is timed once."""
_REPEATS: Final = 6
_REPEAT_SECONDS: Final = 4.0
"""Others are timed at least twice, and up to `_REPEATS` times while that takes no longer than this."""
_SMALL: Final = 1_024
_SMALL_REPEATS: Final = 24
"""The first tokens of workloads of so few prompt tokens wait for the host, and are timed so often."""
_PROMPTS: Final = 128, 2048
_OUTPUTS: Final = 32, 256
"""Tokens of requests that arrive over time, drawn evenly."""


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


def parse_workload(text: str) -> tuple[int, int, int]:
    """SEQUENCESxPROMPT+OUTPUT."""
    sequences, _, rest = text.partition("x")
    prompt, _, output = rest.partition("+")
    return int(sequences), int(prompt), int(output)


def parse_arrivals(text: str) -> tuple[float, int]:
    """RATExCOUNT."""
    rate, _, count = text.partition("x")
    return float(rate), int(count)


def options_of(doc: str | None, modes: Sequence[str], variable: str) -> argparse.ArgumentParser:
    """The options of every engine: `modes`, its default one last, and the environment variable of moereg's plugin."""
    assert doc is not None
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model", choices=[name for name in MODELS if "mixtral" not in name], default="qwen3-30b-a3b")
    parser.add_argument("--mode", choices=modes, default=modes[-1])
    parser.add_argument("--plugin", choices=("off", "auto", "require"), default="off", help=variable)
    parser.add_argument("--workload", action="append", type=parse_workload, metavar="SxP+O", default=[])
    parser.add_argument("--layers", type=int, help="fewer layers")
    parser.add_argument("--zero-experts", action="store_true", help="a control: the experts' output is zero")
    parser.add_argument("--compare", action="store_true", help="compare every eager call of experts with fp32")
    parser.add_argument("--round", default="", help="a name for the run, such as the GPU that it ran on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--merge", type=Path, help="write this file of the runs that follow, and measure nothing")
    parser.add_argument("runs", nargs="*", type=Path)
    return parser


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options_of(__doc__, MODES, "MOEREG_VLLM")
    parser.add_argument("--quant", choices=QUANT, default="bf16")
    parser.add_argument("--moe-backend", default="auto", help="vLLM's option")
    parser.add_argument("--arrivals", action="append", type=parse_arrivals, metavar="RATExCOUNT", default=[])
    parser.add_argument("--attention", help="vLLM's attention backend; its own choice without")
    parser.add_argument("--parallel", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts-parallel", action="store_true")
    parser.add_argument("--wait-for", type=Path, help="import everything, then wait until this file exists")
    return parser.parse_args()


def build(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The engine, filled."""
    import torch
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    lengths = [prompt + output for _, prompt, output in options.workload]
    sequences = [count for count, _, _ in options.workload]
    if options.arrivals:
        lengths.append(_PROMPTS[1] + _OUTPUTS[1])
        sequences.append(256)  # vLLM's default.
    keywords: dict[str, Any] = {}
    if options.attention:
        keywords["attention_backend"] = options.attention
    if torch.cuda.is_available():
        keywords["gpu_memory_utilization"] = 0.9
    if options.mode == "compiled":
        # Half of vLLM's default sizes, since each takes time to capture.
        sizes = {1, 2, 4, 8, *range(16, 257, 16), *sequences}
        captured = sorted(size for size in sizes if size <= max(sequences))
        keywords["compilation_config"] = {"cudagraph_capture_sizes": captured}
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        worker_extension_cls="benches.h200.serving_rank.Rank",
        dtype="bfloat16",
        seed=0,
        enable_prefix_caching=False,
        enforce_eager=options.mode == "eager",
        max_model_len=-(-max(lengths) // 64) * 64 + 64,
        max_num_seqs=max(sequences),
        max_num_batched_tokens=8192,
        moe_backend=options.moe_backend,
        tensor_parallel_size=options.parallel,
        enable_expert_parallel=options.experts_parallel,
        **keywords,
    )


Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Sends prompts to an engine, and returns so many new tokens of each, greedy."""


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
    if count * length <= _SMALL:
        firsts.extend(run(1)[0] for _ in range(_SMALL_REPEATS - len(firsts)))
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


def arrive(engine: Any, arrivals: tuple[float, int], vocabulary: int) -> dict[str, Any]:
    """Requests at random times: output tokens a second, and seconds to the first token and between tokens."""
    import numpy as np
    from vllm import SamplingParams

    rate, count = arrivals
    draw = np.random.default_rng(count)
    times = np.cumsum(draw.exponential(1 / rate, count))
    prompts = [draw.integers(0, vocabulary - 1024, draw.integers(*_PROMPTS, endpoint=True)).tolist() for _ in times]
    outputs = draw.integers(*_OUTPUTS, count, endpoint=True)
    seen: dict[str, list[float]] = {str(number): [] for number in range(count)}
    running, sent = engine.llm_engine, 0
    start = time.perf_counter()
    while sent < count or running.has_unfinished_requests():
        now = time.perf_counter() - start
        while sent < count and times[sent] <= now:
            wanted = SamplingParams(temperature=0.0, max_tokens=int(outputs[sent]), ignore_eos=True, detokenize=False)
            running.add_request(str(sent), {"prompt_token_ids": prompts[sent]}, wanted)
            sent += 1
        if not running.has_unfinished_requests():
            time.sleep(max(times[sent] - now, 0.0))
            continue
        answers = running.step()
        now = time.perf_counter() - start
        for answer in answers:
            known = seen[answer.request_id]
            known += [now] * (len(answer.outputs[0].token_ids) - len(known))
    total = time.perf_counter() - start
    first = [known[0] - sent_at for known, sent_at in zip(seen.values(), times, strict=True)]
    between = np.concatenate([np.diff(known) for known in seen.values()])
    return {
        "rate": rate,
        "requests": count,
        "total_s": total,
        "prompt_tokens": sum(map(len, prompts)),
        "output_per_s": int(outputs.sum()) / total,
        **{f"first_p{part}_s": float(np.percentile(first, part)) for part in (50, 99)},
        **{f"between_p{part}_s": float(np.percentile(between, part)) for part in (50, 99)},
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
        "note": "clocks not read",
        "runs": list(runs.values()),
    }
    options.merge.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def head_of(options: argparse.Namespace, engine: str, version: str) -> dict[str, Any]:
    """A stored run without its measurements."""
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
        "rows": [],
    }


def measure_all(options: argparse.Namespace, result: dict[str, Any], generate: Generate, vocabulary: int) -> None:
    """Measures each workload into `result["rows"]`, prints it, and stores what is known by then."""
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
        if options.json:
            options.json.write_text(json.dumps(result))


def finish(options: argparse.Namespace, result: dict[str, Any], compared: Sequence[Any], seconds: float) -> None:
    """Prints what each rank compared, stores the run, and says how long it took."""
    if options.compare:
        result["compared"] = compared
        for rank, found in enumerate(compared):
            calls, error, worst = (found[key] for key in ("calls", "error", "worst"))
            print(f"rank {rank}: {calls} calls, worst error {error:.2e}, {worst:.2f} of its bound", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result))
    print(f"all {seconds:.1f} s, of it start {result['start_s']:.1f} s", flush=True)


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
    import vllm
    from vllm import SamplingParams

    imported = time.perf_counter()
    print("imported", flush=True)
    while options.wait_for and not options.wait_for.exists():
        time.sleep(0.05)
    waited = time.perf_counter()
    config = config_of(options.model, options.quant, options.layers)
    os.environ[SETTINGS] = json.dumps(
        {
            "config": config,
            "shards": 1 if options.experts_parallel else options.parallel,
            "zero_experts": options.zero_experts,
            "compare": options.compare,
        }
    )
    engine = build(options, config)
    result = head_of(options, "vllm", vllm.__version__) | {
        "moe_backend": options.moe_backend,
        "import_s": imported - start,
        "start_s": time.perf_counter() - waited,
        "parallel": options.parallel,
        "experts_parallel": options.experts_parallel,
        "attention": options.attention,
        "experts": engine.collective_rpc("bench_served")[0],
        "arrivals": [],
    }

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        wanted = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    measure_all(options, result, generate, config["vocab_size"])
    for arrivals in options.arrivals:
        arrive(engine, (arrivals[0], 16), config["vocab_size"])  # What a first batch compiles falls into no time.
        row = arrive(engine, arrivals, config["vocab_size"])
        result["arrivals"].append(row)
        print(f"{options.model} {options.quant} {options.plugin} {options.round} {json.dumps(row)}", flush=True)
    finish(options, result, engine.collective_rpc("bench_compared"), time.perf_counter() - waited)
    return 0


def _argv() -> list[str]:
    """The command line without names of files and runs."""
    words = ["", *sys.argv[1:]]
    hidden = {"--json", "--round", "--wait-for"}
    return [word for before, word in itertools.pairwise(words) if not {before, word} & hidden]


if __name__ == "__main__":
    sys.exit(main())

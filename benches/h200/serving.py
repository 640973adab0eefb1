"""One vLLM engine with random weights: the tokens that it gives, and its speed, with moereg's experts or vLLM's own.

python -m benches.h200.serving --model qwen3-30b-a3b --plugin auto --workload 16x1024+128 --json OUT.json
python -m benches.h200.serving --merge benches/results/serving_h200.json OUT.json...

Needs vLLM, and vllm-moereg for anything but `--plugin off`. Greedy decoding without prefix caching. A workload is
SEQUENCESxPROMPT+OUTPUT, all sent at once; times are of `LLM.generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benches.h200.engines import (
    QUANT,
    Compared,
    arguments,
    compared_state,
    config_of,
    fill,
    head_of,
    measure_all,
    merge,
)

MODES: Final = ("eager", "graphs", "compiled")
"""`compiled` is vLLM's default, Inductor and CUDA graphs; `graphs` has CUDA graphs of whole decode steps alone."""

_HOST_ROUNDS: Final = 60
_HOST_CALLS: Final = 20


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


def parse() -> argparse.Namespace:
    """The command line."""
    assert __doc__ is not None
    parser = arguments(__doc__, MODES, list(QUANT), "MOEREG_VLLM")
    parser.add_argument("--moe-backend", default="auto", help="vLLM's option")
    parser.add_argument("--host-time", action="store_true", help="time every other layer's experts beside vLLM's own")
    parser.add_argument("--parallel", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts-parallel", action="store_true")
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


def main() -> int:
    """Runs one engine, or merges runs."""
    options = parse()
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

    compared = None
    if options.compare:
        from vllm_moereg import hook

        compared = Compared(hook, lambda x, topk_weights, topk_ids, *_, **__: (x, topk_weights, topk_ids))
    if options.host_time:
        serve_every_other_layer()
    imported = time.perf_counter()
    config = config_of(options.model, options.quant, options.layers)
    engine = build(options, config)
    result = head_of(options, "vllm", vllm.__version__) | {
        "moe_backend": options.moe_backend,
        "import_s": imported - start,
        "start_s": time.perf_counter() - imported,
        "experts": engine.apply_model(served)[0] if options.parallel == 1 else {},
        "calls_at_start": compared and compared.calls,
        "host_us": engine.apply_model(host_times)[0] if options.host_time else None,
    }

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        wanted = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    measure_all(options, result, generate, config["vocab_size"], lambda: compared_state(compared))
    print(f"all {time.perf_counter() - start:.1f} s, of it start {result['start_s']:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""One SGLang engine with random weights: its tokens and its speed, with moereg's experts or SGLang's own.

python -m benches.h200.sglang --model qwen3-30b-a3b --plugin auto --workload 16x1024+128 --json OUT.json

Needs SGLang, and sglang-moereg for anything but `--plugin off`. Greedy decoding without prefix caching. A workload is
SEQUENCESxPROMPT+OUTPUT, all sent at once; times are of `Engine.generate`, whose scheduler is another process.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benches.h200.engines import Compared, fill
from benches.h200.serving import config_of, finish, head_of, measure_all, merge, options_of

MODES: Final = ("eager", "graphs")
"""`graphs` is SGLang's default: CUDA graphs of decode steps, and of the layers' parts of prompts."""

_CHUNK: Final = 8192


def run_scheduler(options: argparse.Namespace, config: dict[str, Any], *args: Any) -> None:
    """SGLang's scheduler process, which holds the model: with our weights, and a report that the bench asks for."""
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.model_loader import loader

    compared = None
    if options.compare:
        from sglang_moereg import hook

        def inputs_of(dispatch_output: Any) -> tuple[Any, Any, Any]:
            routes = dispatch_output.topk_output
            return dispatch_output.hidden_states, routes.topk_weights, routes.topk_ids

        compared = Compared(hook, inputs_of)

    def report(scheduler: Any, path: str) -> None:
        experts = served(scheduler.tp_worker.model_runner.model)
        Path(path).write_text(json.dumps({"experts": experts, "compared": compared and compared.found()}))

    loader.initialize_dummy_weights = lambda model: fill(model, config, 1, options.zero_experts)
    Scheduler.report_to_bench = report
    run_scheduler_process(*args)


def served(model: Any) -> dict[str, Any]:
    """The kernel of the first layer of experts."""
    for name, module in model.named_modules():
        if type(module).__name__ == "FusedMoE":
            method = module.quant_method
            ours, runner = getattr(method, "moereg", None), getattr(method, "runner", None)
            return {
                "layer": name,
                "method": type(method).__name__,
                "sglang_runner": str(getattr(runner, "runner_backend", None)),
                "moereg": ours and ours.selection.backend,
            }
    return {}


def build(options: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The engine, filled."""
    import torch
    from sglang.srt.entrypoints.engine import Engine

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    sequences = max(count for count, _, _ in options.workload)
    length = -(-max(prompt + output for _, prompt, output in options.workload) // 64) * 64 + 64
    if torch.cuda.is_available():
        sizes = {2**power for power in range(9)} | {count for count, _, _ in options.workload}
        keywords: dict[str, Any] = {
            # SGLang's own choice needs a kernel library of 1.8 GB.
            "attention_backend": "triton",
            "cuda_graph_bs_decode": sorted(size for size in sizes if size <= sequences),
        }
    else:
        keywords = {"device": "cpu", "attention_backend": "torch_native", "disable_overlap_schedule": True}
    Engine.run_scheduler_process_func = staticmethod(functools.partial(run_scheduler, options, config))
    return Engine(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        random_seed=0,
        disable_radix_cache=True,
        disable_cuda_graph=options.mode == "eager",
        context_length=length,
        max_running_requests=sequences,
        max_total_tokens=max(2 * sequences * length, _CHUNK),
        chunked_prefill_size=_CHUNK,
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_server_warmup=True,
        log_level="info",
        **keywords,
    )


def main() -> int:
    """Runs one engine, or merges runs."""
    parser = options_of(__doc__, MODES, "MOEREG_SGLANG")
    parser.set_defaults(quant="bf16")
    options = parser.parse_args()
    if options.merge:
        return merge(options)
    os.environ["MOEREG_SGLANG"] = options.plugin
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    start = time.perf_counter()
    import sglang

    imported = time.perf_counter()
    config = config_of(options.model, options.quant, options.layers)
    engine = build(options, config)
    started = time.perf_counter()

    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        sampling = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        return [list(answer["output_ids"]) for answer in answers]

    result = head_of(options, "sglang", sglang.__version__)
    result |= {"import_s": imported - start, "start_s": started - imported}
    measure_all(options, result, generate, config["vocab_size"])
    path = Path(tempfile.mkdtemp()) / "report.json"
    engine.collective_rpc("report_to_bench", path=str(path))
    report = json.loads(path.read_text())
    result["experts"] = report["experts"]
    finish(options, result, [report["compared"]], time.perf_counter() - start)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's LoRA on experts, with moereg's products or vLLM's own: greedy tokens with each adapter and with none.

python -m benches.h200.adapters --json OUT.json [--dtype bfloat16] [--parallel 2]

A small Qwen3-MoE checkpoint and two adapters of its experts are written, and served by an engine with vLLM's kernels
and by one with moereg's. Tokens of the two are compared, and, as a control, those with an adapter to those without.
With --large, layers have the size of Qwen3-30B-A3B's, and the engines are timed. Needs a GPU, vLLM and vllm-moereg.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benches.h200.eplb import CONFIG, drawn, write_checkpoint

RANK: Final = 16
ENGINES: Final = {"vllm": "off", "moereg": "require"}
SEQUENCES: Final = 24
PROMPT: Final = 64
OUTPUT: Final = 32
LARGE: Final[Mapping[str, Any]] = {
    **CONFIG,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
TIMED: Final = (1, 1024, 128), (16, 256, 128), (64, 64, 128), (16, 1024, 1)
"""Sequences, tokens of each prompt and of each answer."""


def write_adapter(folder: Path, number: int, dtype: str, config: Mapping[str, Any]) -> None:
    """Writes an adapter of every expert's matrices in PEFT's form, large enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors: dict[str, Any] = {}
    for layer in range(config["num_hidden_layers"]):
        for expert in range(config["num_experts"]):
            for module, (rows, columns) in sizes.items():
                name = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{module}"
                for part, shape in (("lora_A", (RANK, columns)), ("lora_B", (rows, RANK))):
                    values = drawn(f"{name} {part} {number}", shape) * 1.5 * shape[1] ** -0.5
                    tensors[f"{name}.{part}.weight"] = values.to(getattr(torch, dtype)).cpu()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(sizes), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens of sequences that take turns with no adapter, the first and the second; and of all of them without."""
    import torch
    import vllm
    from vllm.lora.request import LoRARequest

    engine = vllm.LLM(
        str(options.folder / "model"),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        seed=0,
        enable_prefix_caching=False,
        max_model_len=max(prompt + output for _, prompt, output in TIMED),
        max_num_seqs=64,
        max_num_batched_tokens=16384,
        tensor_parallel_size=options.parallel,
        enable_expert_parallel=options.experts_parallel,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=RANK,
        attention_backend="TRITON_ATTN",
        gpu_memory_utilization=0.2,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, CONFIG["vocab_size"], (SEQUENCES, PROMPT), generator=generator).tolist()
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    adapters = [LoRARequest(str(number), number, str(options.folder / str(number))) for number in (1, 2)]
    found: dict[str, Any] = {"vllm": vllm.__version__, "device": torch.cuda.get_device_name()}
    for name, chosen in (("adapted", [None, *adapters]), ("plain", [None])):
        requests = [chosen[place % len(chosen)] for place in range(SEQUENCES)]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        answers = engine.generate(inputs, wanted, use_tqdm=False, lora_request=requests)
        found[name] = [list(answer.outputs[0].token_ids) for answer in answers]
    for count, length, output in TIMED if options.large else ():
        wanted = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        prompts = torch.randint(0, CONFIG["vocab_size"], (count, length), generator=generator).tolist()
        seconds = []
        for _ in range(6):  # The first compiles.
            start = time.perf_counter()
            inputs = [{"prompt_token_ids": ids} for ids in prompts]
            engine.generate(inputs, wanted, use_tqdm=False, lora_request=[adapters[i % 2] for i in range(count)])
            seconds.append(time.perf_counter() - start)
        found.setdefault("seconds", {})[f"{count}x{length}+{output}"] = seconds[1:]
    return found


def share(mine: list[list[int]], theirs: list[list[int]], length: int) -> float:
    """The share of sequences whose first tokens are equal."""
    return sum(a[:length] == b[:length] for a, b in zip(mine, theirs, strict=True)) / len(mine)


def main() -> int:
    """Runs both engines in processes of their own, or with `--plugin` one of them in this one."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--parallel", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--experts-parallel", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        options.json.write_text(json.dumps(run_engine(options)))
        return 0
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LARGE if options.large else CONFIG
        write_checkpoint(folder / "model", "none", options.dtype, zeroed=False, config=config)
        for number in (1, 2):
            write_adapter(folder / str(number), number, options.dtype, config)
        for engine, mode in ENGINES.items():
            out = folder / f"{engine}.json"
            command = [sys.executable, "-m", "benches.h200.adapters", *sys.argv[1:], "--json", str(out)]
            command += ["--folder", str(folder)]
            if subprocess.run(command, env={**environment, "MOEREG_VLLM": mode}, check=False).returncode == 0:
                runs[engine] = json.loads(out.read_text())
    if options.json:
        options.json.write_text(json.dumps({"argv": sys.argv[1:], "runs": runs}))
    for engine, found in runs.items():
        changed = [1 - share(found["adapted"][turn::3], found["plain"][turn::3], OUTPUT) for turn in range(3)]
        print(f"{engine}: changed by no adapter, the first, the second: {changed}", flush=True)
    if len(runs) == len(ENGINES):
        pairs = {key: (runs["moereg"][key], runs["vllm"][key]) for key in ("adapted", "plain")}
        equal = {key: [share(*pair, length) for length in (1, 4, OUTPUT)] for key, pair in pairs.items()}
        print(f"equal to vLLM's first token, first 4, all {OUTPUT}: {equal}", flush=True)
        for work, theirs in runs["vllm"].get("seconds", {}).items():
            ours = runs["moereg"]["seconds"][work]
            print(
                f"{work}: vLLM {min(theirs):.3f} s, moereg {min(ours):.3f} s: {min(theirs) / min(ours):.2f}", flush=True
            )
    return 0 if len(runs) == len(ENGINES) else 1


if __name__ == "__main__":
    sys.exit(main())

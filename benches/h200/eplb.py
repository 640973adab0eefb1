"""vLLM's expert load balancer over two GPUs, with moereg's experts: whether tokens stay the same while experts move.

python -m benches.h200.eplb --json OUT.json [--quant int4] [--engines plain,blocking,asynchronous,stale,zeroed]

A small Qwen3-MoE checkpoint is written and served by one engine after the other, each with TP 2 and its experts over
both GPUs. Compared are greedy tokens, and sums over each physical expert's bytes with the map that vLLM keeps. Needs
vLLM and vllm-moereg. On a CPU, where vLLM has no load balancer, `plain` and `zeroed` run without.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

BALANCED: Final = {"window_size": 8, "step_interval": 16, "num_redundant_experts": 4}
ENGINES: Final[Mapping[str, Mapping[str, Any] | None]] = {
    "plain": None,
    "blocking": {**BALANCED, "use_async": False},
    "asynchronous": {**BALANCED, "use_async": True},
    # Controls: vLLM moves copies of what kernels read; the experts' output is zero.
    "stale": {**BALANCED, "use_async": False},
    "zeroed": None,
}
ROUNDS: Final = 4
SEQUENCES: Final = 16
PROMPT: Final = 64
OUTPUT: Final = 40
GROUP: Final = 128
CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
INT4: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors."""
    hidden, inner, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        rows = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
        found |= {f"{prefix}self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
        found |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        found |= {f"{prefix}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        found[f"{prefix}mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            matrices = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            found |= {f"{prefix}mlp.experts.{expert}.{name}_proj.weight": shape for name, shape in matrices.items()}
    return found


def drawn(name: str, shape: tuple[int, ...]) -> Any:
    """Standard normal numbers that depend on a tensor's name alone, drawn on the GPU where there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device)


def write_checkpoint(folder: Path, quant: str, dtype: str, zeroed: bool, config: Mapping[str, Any] = CONFIG) -> None:
    """Writes a model whose experts' part is large, so that the residual does not hide it."""
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=getattr(torch, dtype))
            continue
        is_expert = ".experts." in name
        scale = 1.0 if "embed" in name else (3.0 if is_expert else 1.0) * shape[1] ** -0.5
        matrix = drawn(name, shape) * scale
        if zeroed and "down_proj" in name:
            matrix.zero_()
        if is_expert and quant == "int4":
            tensors |= packed(name.removesuffix(".weight"), matrix, getattr(torch, dtype))
        else:
            tensors[name] = matrix.to(getattr(torch, dtype)).cpu()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    settings = {"quantization_config": INT4} if quant == "int4" else {}
    (folder / "config.json").write_text(json.dumps({**config, **settings, "torch_dtype": dtype}))


def packed(module: str, matrix: Any, dtype: Any) -> dict[str, Any]:
    """A matrix in compressed-tensors' form: words of eight columns, the first in the lowest bits."""
    import torch

    groups = matrix.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(2) / 7.5).clamp(min=1e-6).to(dtype)
    codes = (groups / scale.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8, device=codes.device)).sum(2)
    return {
        f"{module}.weight_packed": torch.where(words < 2**31, words, words - 2**32).int().cpu(),
        f"{module}.weight_scale": scale.cpu(),
        f"{module}.weight_shape": torch.tensor(matrix.shape),
    }


def placed(worker: Any) -> dict[str, Any]:
    """A rank's map, [layers][physical experts], and a sum over the bytes of each of its experts, by layer."""
    import torch

    state = next(iter(worker.model_runner.eplb_state.model_states.values()))
    sums = []
    for tensors in state.model.expert_weights:
        total = torch.zeros(len(tensors[0]), dtype=torch.float64, device=tensors[0].device)
        for number, rows in enumerate(tensors):
            values = rows.contiguous().view(torch.uint8).double()
            total += (values * (1 + torch.arange(values.shape[1], device=values.device) % 251)).sum(1) * (number + 1)
        sums.append(total.tolist())
    return {"map": state.physical_to_logical_map.tolist(), "sums": sums}


def keep_copies() -> None:
    """Makes vLLM move copies of what kernels read."""
    from vllm_moereg import hook

    rows_of_experts = hook.rows_of_experts
    hook.rows_of_experts = lambda kernel: [rows.clone() for rows in rows_of_experts(kernel)]


def run_engine(options: argparse.Namespace) -> dict[str, Any]:
    """One engine's tokens by round, and where experts are after each."""
    import torch
    import vllm

    eplb = ENGINES[options.engine] if torch.cuda.is_available() else None
    if options.engine == "stale":
        keep_copies()
    keywords: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        keywords = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.2}
        keywords["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if eplb is not None:
        communicator = {"communicator": options.communicator} if options.communicator else {}
        keywords |= {"enable_eplb": True, "eplb_config": {**eplb, **communicator}}
    engine = vllm.LLM(
        str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        seed=0,
        enable_prefix_caching=False,
        max_model_len=PROMPT + OUTPUT + 24,
        max_num_seqs=SEQUENCES,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        distributed_executor_backend="mp",
        **keywords,
    )
    wanted = vllm.SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    result: dict[str, Any] = {"engine": options.engine, "eplb": eplb, "vllm": vllm.__version__, "rounds": []}
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    first = engine.collective_rpc(placed) if eplb is not None else None
    for number in range(ROUNDS):
        generator = torch.Generator().manual_seed(number)
        # Few different tokens in a round, so that some experts get more of them than others.
        words = torch.randint(0, CONFIG["vocab_size"], (24,), generator=generator)
        prompts = words[torch.randint(0, 24, (SEQUENCES, PROMPT), generator=generator)].tolist()
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        found: dict[str, Any] = {"tokens": tokens}
        if first is not None:
            found |= compared(first, engine.collective_rpc(placed))
            first = found.pop("ranks")
        result["rounds"].append(found)
    return result


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> dict[str, Any]:
    """How many physical experts are others than before, and how many of all have bytes that are not their expert's."""
    was, now = before[0]["map"], after[0]["map"]
    num_moved = sum(a != b for old, new in zip(was, now, strict=True) for a, b in zip(old, new, strict=True))
    num_wrong = 0
    for layer, places in enumerate(now):
        sums = [value for rank in before for value in rank["sums"][layer]]
        bytes_of = dict(zip(was[layer], sums, strict=True))
        found = [value for rank in after for value in rank["sums"][layer]]
        num_wrong += sum(bytes_of[expert] != value for expert, value in zip(places, found, strict=True))
    return {"num_moved": num_moved, "num_wrong": num_wrong, "ranks": after}


def agreement(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, list[float]]:
    """By round, the share of equal sequences and of equal first tokens."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(mine["rounds"], theirs["rounds"], strict=True)]
    return {
        "sequences": [sum(x == y for x, y in zip(a, b, strict=True)) / len(a) for a, b in pairs],
        "first_tokens": [sum(x[0] == y[0] for x, y in zip(a, b, strict=True)) / len(a) for a, b in pairs],
    }


def main() -> int:
    """Runs the engines in processes of their own, or with `--engine` one of them in this one."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--quant", choices=("none", "int4"), default="none")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32, or bfloat16 with int4")
    parser.add_argument("--plugin", choices=("off", "auto", "require"), default="require", help="MOEREG_VLLM")
    parser.add_argument("--communicator", help="vLLM's own choice if left out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.quant == "none" else "bfloat16")
    if options.engine:
        options.json.write_text(json.dumps(run_engine(options)))
        return 0
    environment = {
        **os.environ,
        "MOEREG_VLLM": options.plugin,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for zeroed in (False, True):
            write_checkpoint(folder / str(zeroed), options.quant, options.dtype, zeroed)
        for engine in options.engines.split(","):
            out = folder / f"{engine}.json"
            command = [sys.executable, "-m", "benches.h200.eplb", "--engine", engine, "--json", str(out)]
            command += ["--checkpoint", str(folder / str(engine == "zeroed")), "--dtype", options.dtype]
            command += ["--communicator", options.communicator] if options.communicator else []
            process = subprocess.run(command, env=environment, check=False)
            if process.returncode:
                print(f"{engine}: failed with {process.returncode}", flush=True)
                continue
            runs[engine] = json.loads(out.read_text())
            if engine != "plain" and "plain" in runs:
                runs[engine] |= agreement(runs[engine], runs["plain"])
            moves = [(each.get("num_moved"), each.get("num_wrong")) for each in runs[engine]["rounds"]]
            equal = {key: runs[engine].get(key) for key in ("sequences", "first_tokens")}
            print(
                f"{options.quant} {engine}: moved and wrong experts by round {moves}, equal to plain {equal}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps({"argv": sys.argv[1:], "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

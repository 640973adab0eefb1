"""A model of random weights in llama.cpp, for `benches.cpu_models`.

It is a program of its own, for a Python that has gguf, numpy and llama-cpp-python:

    python llama_models.py CONFIG.json TYPE FILE.gguf    # its rows as JSON on standard output

The JSON has the model's `config`, the `cases` (phase, sequences, tokens), the numbers of `threads`, and `seconds` of a
median. All matrices are of TYPE (BF16 or Q4_0) but for the routers, which llama.cpp wants in fp32. A time is that of
`llama_decode` until it is done, and the cache is as before each.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

ROOM: Final = 128
BLOCK: Final = {"BF16": (1, 2), "Q4_0": (32, 18)}
"""Weights of a block and its bytes."""
_POOL_BYTES: Final = 18 << 20


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors, rows first."""
    hidden, vocabulary, experts = (config[name] for name in ("hidden_size", "vocab_size", "num_experts"))
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", hidden // heads)
    # OLMoE normalizes all heads at once.
    norms = (heads * head, key_heads * head) if config["model_type"] == "olmoe" else (head, head)
    yield "token_embd", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "attn_norm": (hidden,),
            "attn_q": (heads * head, hidden),
            "attn_k": (key_heads * head, hidden),
            "attn_v": (key_heads * head, hidden),
            "attn_output": (hidden, heads * head),
            "attn_q_norm": norms[:1],
            "attn_k_norm": norms[1:],
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (experts, hidden),
            "ffn_gate_exps": (experts, inner, hidden),
            "ffn_up_exps": (experts, inner, hidden),
            "ffn_down_exps": (experts, hidden, inner),
        }.items():
            yield f"blk.{layer}.{name}", shape
    yield "output_norm", (hidden,)
    yield "output", (vocabulary, hidden)


def write(config: dict[str, Any], kind: str, path: pathlib.Path) -> None:
    """Writes the model, its matrices cut from one pool of random blocks."""
    np, gguf = importlib.import_module("numpy"), importlib.import_module("gguf")
    writer = gguf.GGUFWriter(path, config["model_type"].replace("_", ""))
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    writer.add_feed_forward_length(inner)
    writer.add_expert_feed_forward_length(inner)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    generator = np.random.default_rng(0)
    weights, num_bytes = BLOCK[kind]
    if kind == "BF16":
        pool = generator.normal(0, 0.02, _POOL_BYTES // 2).astype(np.float32).view(np.uint32) >> 16
        pool = pool.astype(np.uint16).view(np.uint8)
    else:
        blocks = generator.integers(0, 256, (_POOL_BYTES // num_bytes, num_bytes), dtype=np.uint8)
        # 4-bit integers of -8 to 7 deviate by 4.6.
        scales = generator.uniform(0.8, 1.2, (len(blocks), 1)) * 0.02 / 4.6
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
        pool = blocks.reshape(-1)
    is_wide = {name: len(shape) == 1 or "gate_inp" in name for name, shape in shapes(config)}
    for name, shape in shapes(config):
        if is_wide[name]:
            writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        else:
            packed = (*shape[:-1], shape[-1] // weights * num_bytes)
            kinds = np.dtype(np.uint8), int(np.prod(packed)), gguf.GGMLQuantizationType[kind]
            writer.add_tensor_info(f"{name}.weight", packed, *kinds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (name, shape) in enumerate(shapes(config)):
        if is_wide[name]:
            tensor = np.ones(shape) if len(shape) == 1 else generator.normal(0, 0.02, shape)
            writer.write_tensor_data(tensor.astype(np.float32))
        else:
            # Prime, so that no two layers begin at the same block.
            own = np.roll(pool, number * 9973 * num_bytes)
            writer.write_tensor_data(np.resize(own, int(np.prod(shape)) // weights * num_bytes))
    writer.close()


class LoadedModel:
    """A model of llama.cpp with a cache for so many sequences."""

    def __init__(self, path: pathlib.Path, vocabulary: int, sequences: int, tokens: int) -> None:
        self._llama, self._vocabulary, self._tokens = importlib.import_module("llama_cpp"), vocabulary, tokens
        self._llama.llama_backend_init()
        model = self._llama.llama_model_load_from_file(str(path).encode(), self._llama.llama_model_default_params())
        settings = self._llama.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = sequences * (tokens + ROOM), sequences
        settings.n_batch = settings.n_ubatch = max(tokens, sequences)
        self._context = self._llama.llama_init_from_model(model, settings) if model else None
        if not self._context:
            raise MemoryError(f"llama.cpp does not load {path}")
        self._memory = self._llama.llama_get_memory(self._context)

    def run(self, places: list[tuple[int, int]]) -> None:
        """Computes a random token for each (sequence, position), and the logits of the last of each sequence."""
        batch = self._llama.llama_batch_init(len(places), 0, 1)
        batch.n_tokens = len(places)
        last = dict(places)
        for number, (sequence, position) in enumerate(places):
            batch.token[number] = (7919 * (position + 1) + 104729 * sequence) % self._vocabulary
            batch.pos[number], batch.n_seq_id[number], batch.seq_id[number][0] = position, 1, sequence
            batch.logits[number] = last[sequence] == position
        code = self._llama.llama_decode(self._context, batch)
        self._llama.llama_synchronize(self._context)
        logits = self._llama.llama_get_logits_ith(self._context, -1)
        self._llama.llama_batch_free(batch)
        found = {logits[token] for token in range(8)}
        if code or len(found) == 1 or any(logit != logit for logit in found):
            raise ArithmeticError(f"llama_decode: code {code}, logits {found}")

    def times(self, case: dict[str, Any], threads: int, seconds: float) -> list[float]:
        """Seconds of each of at most 20 samples, behind one that is not counted."""
        self._llama.llama_set_n_threads(self._context, threads, threads)
        tokens, is_prompt = case["tokens"], case["phase"] == "prefill"
        prompt = [(0, position) for position in range(tokens)]
        self._llama.llama_memory_clear(self._memory, True)
        if not is_prompt:
            self.run(prompt)
            for sequence in range(1, case["batch"]):
                self._llama.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)
        places = prompt if is_prompt else [(sequence, tokens) for sequence in range(case["batch"])]
        found: list[float] = []
        while len(found) < 4 or (sum(found[1:]) < seconds and len(found) < 21):
            start = time.perf_counter()
            self.run(places)
            found.append(time.perf_counter() - start)
            for sequence in {sequence for sequence, _ in places}:
                self._llama.llama_memory_seq_rm(self._memory, sequence, places[0][1], -1)
        return found[1:]


def main(asked: str, kind: str, file: str) -> None:
    """Writes the model unless it is there, and prints its rows."""
    wanted, path = json.loads(pathlib.Path(asked).read_text(encoding="utf-8")), pathlib.Path(file)
    if not path.exists():
        write(wanted["config"], kind, path)
    cases = wanted["cases"]
    most = max(case["batch"] for case in cases), max(case["tokens"] for case in cases)
    model, rows = LoadedModel(path, wanted["config"]["vocab_size"], *most), []
    for threads in wanted["threads"]:
        for case in cases:
            times = model.times(case, threads, wanted["seconds"])
            rows.append({**case, "threads": threads, "ms": statistics.median(times) * 1e3, "samples": len(times)})
            print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps({"version": importlib.import_module("llama_cpp").__version__, "type": kind, "rows": rows}))


if __name__ == "__main__":
    main(*sys.argv[1:])

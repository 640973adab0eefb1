"""Engines of one process, one after the other: `python engines.py JOB.json` runs a job's runs and writes what came out.

A run loads a tiny checkpoint that transformers wrote, and generates greedily from two prompts.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SIZES = dict(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    bos_token_id=510,
    eos_token_id=511,
)
_GROUPED = dict(moe_intermediate_size=64, norm_topk_prob=True, first_k_dense_replace=1, routed_scaling_factor=2.5)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": dict(model_type="qwen3_moe", num_experts=8, moe_intermediate_size=128, norm_topk_prob=True),
    # Biases; gate and up rows alternate, and gates are clamped.
    "gpt_oss": dict(model_type="gpt_oss", num_local_experts=8, sliding_window=16),
    # Shared experts, groups, a selection bias and a factor; its first layer has no experts.
    "deepseek": dict(
        model_type="deepseek_v3",
        n_routed_experts=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        q_lora_rank=32,
        kv_lora_rank=512,  # The sizes that vLLM's attention on a CPU is built for.
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        num_key_value_heads=4,
        **_GROUPED,
    ),
}
PROMPTS = (list(range(5, 25)), [400, 3, 77, 210, 9, 121, 330])
NUM_TOKENS = 16
PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Variables of a process that runs engines, set before it imports vLLM."""
RUN = "=== run "
HOOK = "vllm_moereg.hook"
CACHE_BYTES = 1 << 24
"""For keys and values, which vLLM zeroes for each engine; its variable for CPUs takes whole GiB."""
EXPERT_SCALE = 4.0
"""So much larger are experts' weights than the others, so that the residual does not hide what experts give."""


def write_checkpoint(folder: Path, model: str, dtype: str, quant: str | None, version: int = 0) -> Path:
    """Writes a checkpoint whose tensors depend on their names and its version alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.checkpoints.generate.compressed_tensors import quantized_copy

    path = folder / f"{model}-{dtype}-{version}"
    if not path.exists():
        config = AutoConfig.for_model(**_SIZES | MODELS[model], dtype=dtype)
        made = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + version)
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                tensor.data.fill_(1)
            elif tensor.dim() > 1:
                scale = EXPERT_SCALE if ".experts." in name else 1.0
                tensor.data.copy_(drawn * scale * tensor.shape[-1] ** -0.5)
            elif "inv_freq" not in name:
                tensor.data.copy_(drawn * 0.1)
        made.save_pretrained(path)
    if quant is None:
        return path
    copy = folder / f"{path.name}-{quant}"
    if not copy.exists():
        quantized_copy(path, copy, quant)
    return copy


class Watch:
    """Notes calls of moereg's kernels in this process, in compiled code too, and may zero what they give."""

    def __init__(self, keeps_tensors: bool = True) -> None:
        from moereg import MoEKernel

        self.calls: list[Any] = []
        self.zeroes = False
        original = MoEKernel.check_and_run

        def check_and_run(kernel: Any, *call: Any) -> None:
            original(kernel, *call)
            if self.zeroes:
                call[3].zero_()
            else:
                self.calls.append((kernel, *(each.clone() for each in call[:4] if keeps_tensors)))

        MoEKernel.check_and_run = check_and_run  # type: ignore[method-assign]

    def largest_errors(self, path: Path, dtype: str, layers: dict[int, Any]) -> dict[int, float]:
        """By layer, the largest share of its bound that a call is off by, with weights that moereg itself read."""
        from moereg import load_experts
        from moereg.numerics.reference import reference_experts, relative_error
        from moereg.numerics.tolerances import layer_tolerance

        found = {}
        for layer, kernel in layers.items():
            loaded = load_experts(path, layer, dtype=dtype)
            found[layer] = max(
                relative_error(out, reference_experts(loaded.problem, loaded.weights, *inputs))
                / layer_tolerance(loaded.problem, len(out))
                for called, *inputs, out in self.calls
                if called is kernel
            )
        return found


def run(
    folder: Path,
    watch: Watch,
    model: str = "qwen3",
    dtype: str = "float32",
    quant: str | None = None,
    mode: str | None = None,
    control: bool = False,
    compare: bool = False,
    version: int = 0,
    reload: int | None = None,
    sleeps: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """One engine.

    Args:
        folder: For checkpoints.
        watch: This process's.
        model, dtype, quant, version: Name the checkpoint.
        mode: Value of MOEREG_VLLM.
        control: Whether to generate again with experts that give zeros.
        compare: Whether to compare each call of a layer with the reference.
        reload: The version that the running engine loads afterwards, to generate again.
        sleeps: Whether the engine sleeps and generates again, and sleeps so deep before it loads that all is lost.
        settings: For `vllm.LLM`.
    """
    from vllm import LLM

    os.environ.pop("MOEREG_VLLM", None)
    if mode is not None:
        os.environ["MOEREG_VLLM"] = mode
    path = write_checkpoint(folder, model, dtype, quant, version)
    defaults = dict(enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False, max_model_len=128)
    sizes = dict(max_num_seqs=4, kv_cache_memory_bytes=CACHE_BYTES)
    try:
        llm = LLM(str(path), dtype=dtype, seed=0, **defaults | sizes | settings)
        watch.calls.clear()
        tokens = greedy(llm, PROMPTS)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

    result: dict[str, Any] = {"tokens": tokens, "calls": len(watch.calls), "hooked": HOOK in sys.modules}
    result["experts"] = sorted({type(kernel.experts).__name__ for kernel, *_ in watch.calls})
    if compare:
        result["errors"] = watch.largest_errors(path, dtype, kernels(llm))
    if control:
        watch.zeroes = True
        result["zeroed"] = greedy(llm, PROMPTS)
        watch.zeroes = False
    if sleeps:
        llm.sleep(level=1)
        llm.wake_up()
        result["woken"] = greedy(llm, PROMPTS)
    if reload is not None:
        if sleeps:
            llm.sleep(level=2)
            llm.wake_up()
        other = write_checkpoint(folder, model, dtype, quant, reload)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        result["reloaded"] = greedy(llm, PROMPTS)
        if quant == "int4_w4a16_g64":
            result["single_loads"] = single_loads(llm, path)  # Others than it has.
            result["kept"] = greedy(llm, PROMPTS)
    close(llm)
    return result


def single_loads(llm: Any, path: Path) -> list[str]:
    """Loads single tensors of experts, a checkpoint's scales and then dense weights as TRL has them; what vLLM says."""
    import torch
    from safetensors.torch import load_file

    experts = "model.layers.1.mlp.experts."
    stored = load_file(path / "model.safetensors")
    given = {name: tensor for name, tensor in stored.items() if name.startswith(experts) and name.endswith("scale")}
    given[f"{experts}gate_up_proj"] = torch.ones(8, 256, 64)
    said = []

    def load(model: Any) -> None:
        for name, tensor in given.items():
            try:
                said.append(f"{name}: {model.load_weights([(name, tensor)])}")
            except Exception as error:
                said.append(f"{name}: {type(error).__name__}: {error}")

    llm.apply_model(load)
    return said


def greedy(llm: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """An engine's tokens after prompts that it gets at once."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False, ignore_eos=True)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [list(each.outputs[0].token_ids) for each in llm.generate(asked, params, use_tqdm=False)]


def close(llm: Any) -> None:
    """Ends an engine of this process, so that another can start."""
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def kernels(llm: Any) -> dict[int, Any]:
    """moereg's kernels by the model's layer."""
    from vllm_moereg.hook import served_by

    found: dict[int, Any] = {}

    def visit(model: Any) -> None:
        for name, module in model.named_modules():
            served = served_by(getattr(module, "quant_method", None))
            if served is not None:
                found[int(name.split(".")[2])] = served.kernel

    llm.apply_model(visit)
    return found


def pretend_amx() -> None:
    """Lets vLLM make its methods for integers, whose kernels for a CPU need AMX; where moereg serves, they never run.

    Elsewhere it says `No WNA16 MoE backend supports the deployment configuration.` before a plugin sees a layer, and
    the same of Int8; and, for groups of 32 or zero points, on each CPU.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in ("CPUExpertsInt4", "CPUExpertsInt8"):
        getattr(cpu_moe, name)._supports_current_device = staticmethod(lambda: True)


def route_on_a_cpu() -> None:
    """Lets vLLM before 0.30 route outside its own experts, where moereg would decline, by softmax."""
    import torch
    from vllm import _custom_ops
    from vllm_moereg import hook

    def topk_softmax(topk_weights: Any, topk_ids: Any, _: Any, logits: Any, renormalize: bool, **__: Any) -> None:
        weights, ids = torch.topk(logits.float().softmax(-1), topk_ids.shape[1])
        topk_weights.copy_(weights / weights.sum(-1, keepdim=True) if renormalize else weights)
        topk_ids.copy_(ids)

    if not hook._can_route(torch.device("cpu")):
        hook._can_route = lambda device: True  # type: ignore[assignment]
        _custom_ops.topk_softmax = topk_softmax


def main(job: Path) -> None:
    """Runs a job, a list of runs, and writes JOB.out.json."""
    import torch
    from vllm.model_executor.models import registry

    # vLLM looks at a model's class in a process of its own, which takes 9 s, to leave CUDA alone in this one.
    registry._run_in_subprocess = lambda look: look()
    if not torch.cuda.is_available():
        pretend_amx()
        if os.environ.get("MOEREG_VLLM") != "off":
            route_on_a_cpu()
    # It also collects the whole heap eight times per engine, which takes as long as all else that an engine does. With
    # older objects frozen, it looks at those of the engine alone.
    freeze, gc.freeze, gc.unfreeze = gc.freeze, lambda: None, lambda: None
    watch = Watch()
    results = []
    for settings in json.loads(job.read_text()):
        gc.collect()
        freeze()
        print(f"{RUN}{json.dumps(settings)}", flush=True)
        results.append(run(job.parent, watch, **settings))
        print("RESULT", json.dumps(results[-1]), flush=True)
    job.with_suffix(".out.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

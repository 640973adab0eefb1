"""Real SGLang engines on a CPU, in processes of their own: `make test-sglang` installs what they need.

There is no CPU build of `sgl_kernel`, SGLang's kernel library. A stub has its names; on a CPU without AMX SGLang runs
torch instead, its MoE layers too, so that greedy tokens can be compared.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

Run = Callable[..., subprocess.CompletedProcess[str]]
SIZES = {
    **{"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024},
    **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
}
STUB = """
import importlib.abc, importlib.machinery, sys, types

__version__ = "0.0.0"

class Missing(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(f"{self.__name__}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(self.__name__)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Missing(spec.name)

    def exec_module(self, module):
        pass

sys.modules[__name__].__class__ = Missing
sys.meta_path.append(Finder())
"""
STRANGER = """
import os
from moereg.author import Experts, ExpertWeights, Facts, PermutedWeights, reference_experts, register_moe_backend

moereg_api = "1"

@register_moe_backend("stranger", priority=1, quant_schemes=("unquantized",), platforms=("cpu",))
class StrangerExperts(Experts):
    facts = Facts(
        activations=frozenset({"silu"}), activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"float32"}), placements=frozenset({"contiguous"}),
    )
    layouts = ("stranger",)

    def permute_weights(self, weights, problem):
        return PermutedWeights(self.layouts[0], per_expert={"w13": weights.w13, "w2": weights.w2})

    def workspace_shapes(self, problem, num_tokens):
        return (0,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        weights = ExpertWeights(w13=weights["w13"], w2=weights["w2"])
        routes = inputs.topk_weights, inputs.topk_ids, inputs.expert_map
        sums = reference_experts(self.problem, weights, inputs.hidden_states, *routes)
        out.copy_(float(os.environ["STRANGER"]) * sums)
"""
ENGINE = """
import json
import sys

if __name__ == "__main__":
    import sglang

    engine = sglang.Engine(
        device="cpu", skip_tokenizer_init=True, attention_backend="torch_native", sampling_backend="pytorch",
        disable_cuda_graph=True, disable_overlap_schedule=True, disable_radix_cache=True, max_total_tokens=2048,
        mem_fraction_static=0.3, max_running_requests=4, chunked_prefill_size=512, context_length=512,
        grammar_backend="none", random_seed=0, skip_server_warmup=True, log_level="info", **json.loads(sys.argv[1]),
    )
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    outputs = engine.generate(input_ids=[[5, 6, 7, 8, 9], [100, 200, 300]], sampling_params=sampling)
    print("TOKENS", json.dumps([output["output_ids"] for output in outputs]), flush=True)
    engine.shutdown()
"""
FP8 = {
    **{"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "ignored_layers": ["qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj"],
}


def write_checkpoints(plain: Path, fp8: Path) -> None:
    """A tiny Qwen3-MoE whose experts say more than its residuals, so that the control tells; and its experts in fp8."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=(3 if "experts" in name else 1) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(plain)
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        scale = tensors[f"{name}_scale_inv"] = (tensors[name].abs().max() / 448).reshape(1, 1)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    fp8.mkdir()
    save_file(tensors, fp8 / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (fp8 / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    for name in ("sglang", "sglang-moereg"):
        try:
            print(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {name}, which `make test-sglang` installs")
    folder = tmp_path_factory.mktemp("engine")
    points = "[moereg.backends]\nstranger = stranger\n"
    for name, text in {
        **{"sgl_kernel/__init__.py": STUB, "stranger.py": STRANGER, "engine.py": ENGINE},
        "moereg_stranger-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: moereg-stranger\nVersion: 1.0\n",
        "moereg_stranger-1.0.dist-info/entry_points.txt": points,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    write_checkpoints(folder / "plain", folder / "fp8")

    def start(model: str, engine: Mapping[str, object], **environment: str) -> subprocess.CompletedProcess[str]:
        given = {"model_path": str(folder / model), "dtype": "float32" if model == "plain" else "bfloat16", **engine}
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        cpu = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        cpu["MOEREG_ADMISSION"] = "off"  # It would see that a stranger's kernel gives zeros.
        command = [sys.executable, str(folder / "engine.py"), json.dumps(given)]
        environ = {**os.environ, **cpu, "PYTHONPATH": path, **environment}
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=400, check=False, cwd=folder
        )

    return start


def tokens(process: subprocess.CompletedProcess[str]) -> list[list[int]]:
    lines = [line for line in process.stdout.splitlines() if line.startswith("TOKENS")]
    assert lines, process.stderr[-4000:]
    found: list[list[int]] = json.loads(lines[0].removeprefix("TOKENS"))
    assert [len(each) for each in found] == [16, 16]
    return found


def said(process: subprocess.CompletedProcess[str]) -> str:
    """The line of choice, which is said once though there are two layers."""
    (line,) = [line for line in process.stderr.splitlines() if "moereg runs" in line]
    print(line)
    return line.partition("] ")[2]


def test_tokens_are_those_of_sglang(run: Run) -> None:
    off = run("plain", {}, MOEREG_SGLANG="off")
    own = tokens(off)
    assert "moereg runs" not in off.stdout + off.stderr
    chosen = run("plain", {}, MOEREG_SGLANG="require")
    asked = run("plain", {}, MOEREG_SGLANG="require", MOEREG_REQUIRE="stranger", STRANGER="1")
    zero = run("plain", {}, MOEREG_SGLANG="require", MOEREG_REQUIRE="stranger", STRANGER="0")
    print(importlib.metadata.version("sglang"), own, tokens(chosen), tokens(asked), tokens(zero), sep="\n")
    assert tokens(chosen) == own
    assert said(chosen).startswith("moereg runs layer 0 and layers like it: MoE E8 H128 I128 k2 float32 unquantized")
    assert tokens(asked) == own
    assert "stranger (StrangerExperts) of moereg-stranger 1.0" in said(asked)
    assert tokens(zero) != own


def test_fp8_blocks_are_served(run: Run) -> None:
    process = run("fp8", {}, MOEREG_SGLANG="require")
    print(tokens(process))
    assert "bfloat16 fp8_block128 silu on cpu: torch" in said(process)


def test_a_declined_layer_is_an_error_where_moereg_is_required(run: Run) -> None:
    process = run("plain", {"moe_runner_backend": "triton"}, MOEREG_SGLANG="require")
    assert process.returncode != 0
    assert "TOKENS" not in process.stdout
    assert "MOEREG_SGLANG=require, but moereg leaves MoE layers such as layer 0" in process.stderr
    assert "got --moe-runner-backend triton" in process.stderr

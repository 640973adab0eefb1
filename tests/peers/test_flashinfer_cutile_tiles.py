"""Tiles of `flashinfer_cutile` beside those that FlashInfer's untuned runners take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg.author import MoEProblem
from moereg.backends import flashinfer_moe as page
from moereg.backends._flashinfer import claims
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.spec.quant_schemes import QuantScheme

pytestmark = pytest.mark.peers

H200 = Platform.from_name("cuda:sm90")

SIZES = (
    (8, 64, 64),
    (8, 128, 64),
    (8, 64, 128),
    (8, 4096, 14336),
    (128, 2048, 768),
    (32, 2880, 2880),
    (256, 7168, 2048),
)

CASES = {
    "bf16": ("CuTileBf16Runner", page.FlashInferCuTileExperts, "unquantized", None),
    "fp8": ("CuTileFp8PerTensorRunner", page.FlashInferCuTileFloat8Experts, "fp8_tensor_dynamic", None),
    "fp8-a16": (
        "CuTileFp8PerTensorBf16Runner",
        page.FlashInferCuTileFloat8Experts,
        "fp8_tensor_dynamic",
        claims.FP8_TENSOR_W8A16,
    ),
    "mxfp8-a16": ("CuTileMxfp8Bf16Runner", page.FlashInferCuTileFloat8Experts, "mxfp8", claims.MXFP8_W8A16),
    "nvfp4-a16": ("CuTileNvfp4Bf16Runner", page.FlashInferCuTileFloat4Experts, "nvfp4_w4a16", None),
    "mxfp4-a16": ("CuTileMxfp4Bf16Runner", page.FlashInferCuTileFloat4Experts, "mxfp4_w4a16", None),
}


def _theirs(runner: Any, num_tokens: int, problem: MoEProblem) -> tuple[int, ...]:
    """Rows of a tile, then columns, reduced columns and programs of both products."""
    x = torch.empty(num_tokens, problem.hidden_size, device="meta")
    ids = torch.empty(num_tokens, problem.top_k, device="meta")
    if hasattr(runner, "_fp4_fallback_tactic"):
        rows, _, *tiles = runner._fp4_fallback_tactic([x, x, ids])
    else:
        rows, *tiles = runner._fallback_tactic([x, x, ids])
    return (rows, *tiles)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(("name", "cls", "quant", "computes"), CASES.values(), ids=CASES)
def test_tiles_are_flashinfers_untuned_ones(
    name: str, cls: type[Experts], quant: str, computes: QuantScheme | None, activation: str
) -> None:
    import flashinfer.fused_moe.runners as library

    runner = object.__new__(getattr(library, name))
    runner._device_arch, runner._num_sms = 90, 132
    for experts, hidden, intermediate in SIZES:
        problem = MoEProblem(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
            top_k=4,
            quant=quant,
            activation=activation,
        )
        runner.config = SimpleNamespace(
            activation=SimpleNamespace(is_gated=problem.activation.gated),
            routing=SimpleNamespace(num_experts=experts, top_k=4),
            experts=SimpleNamespace(intermediate_size=intermediate),
        )
        layer: Any = cls(problem, H200, computes or problem.quant).implementation  # type: ignore[attr-defined]
        for num_tokens in (1, 2, 3, 16, 64, 100, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 40000):
            rows, first, second = layer.tiles(num_tokens * 4)
            found = (rows, *first, *second)
            assert found == _theirs(runner, num_tokens, problem), (experts, num_tokens)
            assert rows in layer.block_rows

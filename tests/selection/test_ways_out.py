"""What a selection without a winner names instead: a plugin of the tree, another machine, weights in 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moereg.dispatch import explain_backends, select_backend
from moereg.errors import UnsupportedProblemError
from moereg.selection.ways_out import ways_out
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

BRINGS = "(in moereg's source tree) adds the backend"
DEQUANTIZED = "moereg.quantize.dequantize_weights makes 16-bit weights, which {} runs"


def deepseek(**keywords: Any) -> MoEProblem:
    return MoEProblem(**{**get_shape("deepseek-v3").problem_keywords(), **keywords})


@pytest.mark.parametrize(
    ("quant", "platform", "plugins", "others"),
    [
        (
            "fp8_block128",
            "cuda:sm80",
            [f"./plugins/moereg-{name}" for name in (f"humming {BRINGS} humming", f"vllm {BRINGS} marlin")],
            ["fp8_block128 on cuda:sm89+ or cpu, not on cuda:sm80", DEQUANTIZED.format("triton (TritonExperts)")],
        ),
        (
            "fp8_block128",
            "rocm:gfx942",
            [],
            ["fp8_block128 on cuda:sm89+ or cpu, not on rocm:gfx942", DEQUANTIZED.format("triton (TritonExperts)")],
        ),
        (
            "fp8_block128",
            "rocm:gfx950",
            [f"./plugins/moereg-aiter {BRINGS} aiter; it is opt-in: require='aiter'"],
            ["fp8_block128 on cuda:sm89+ or cpu, not on rocm:gfx950", DEQUANTIZED.format("torch (TorchDenseExperts)")],
        ),
    ],
)
def test_a_plugin_then_a_machine_then_16_bits(quant: str, platform: str, plugins: list[str], others: list[str]) -> None:
    problem = deepseek(quant=quant)
    found = ways_out(explain_backends(problem, platform))
    assert found == (*(f"pip install {each}" for each in plugins), f"installed kernels compute {others[0]}", others[1])
    with pytest.raises(UnsupportedProblemError) as raised:
        select_backend(problem, platform)
    assert str(raised.value).splitlines()[-len(found) :] == [f"way out: {way}" for way in found]


def test_no_plugin_for_who_asked_for_others_or_for_exact_activations() -> None:
    layer = deepseek(quant="fp8_block128")
    exact = dataclasses.replace(layer, exact_activations=True)
    for selection in (explain_backends(layer, "cuda:sm80", "triton"), explain_backends(exact, "cuda:sm80")):
        found = ways_out(selection)
        assert len(found) == 2
        assert not [way for way in found if "pip install" in way]


def test_nothing_where_the_reasons_say_it() -> None:
    refused = explain_backends(deepseek(), "cuda:sm90", deny="*")
    assert refused.winner is None
    assert ways_out(refused) == ()

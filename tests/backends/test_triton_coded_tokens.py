"""Tokens that arrive as codes give the bits of those in 16 bits, restored ones included; interpreted on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moereg.backends._loaded import Call
from moereg.backends._triton import quantized_schedules
from moereg.backends._triton.recorded import Recorded
from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.experts import ExpertInputs
from moereg.platforms import Platform
from moereg.prepare_finalize.wire import CodedWire
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import default_device
from moereg.testing.inputs import make_inputs, make_weights
from tests.support.experts_run import apply_experts
from tests.support.tensors import split_columns

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")


def arrived(problem: MoEProblem, hidden_states: torch.Tensor, keeps_codes: bool) -> tuple[torch.Tensor, Any]:
    """The tokens behind the wire."""
    wire = CodedWire(problem, problem.quant, keeps_codes)
    sent = torch.cat(wire.encode(hidden_states), dim=1)
    received = wire.decode(split_columns(sent, wire.widths))
    return received.hidden_states, received.hidden_scale


# A row of 136 columns has to be filled up to 256; 20 tokens are sorted, 5 are not.
@pytest.mark.parametrize(
    ("scheme", "num_tokens", "hidden_size"),
    [
        ("fp8_block128", 5, 256),
        ("int8_w8a8", 20, 136),
        pytest.param("fp8_block128", 20, 136, marks=pytest.mark.slow),
        pytest.param("fp8_channel_token", 20, 136, marks=pytest.mark.slow),
        pytest.param("fp8_channel_token", 5, 256, marks=pytest.mark.slow),
    ],
)
def test_codes_give_the_bits_of_tokens_that_are_rounded_again(
    scheme: str, num_tokens: int, hidden_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = MoEProblem(
        num_experts=4, hidden_size=hidden_size, intermediate_size=128, top_k=2, quant=scheme, dtype="bfloat16"
    )
    layer = TritonQuantizedExperts(problem, SM90)
    assert layer.input_form == "quantized"
    permuted = layer.permute_weights(make_weights(problem, DEVICE), problem)
    inputs = make_inputs(problem, num_tokens, "uniform", DEVICE)
    hidden_states, weights, ids = inputs.call
    rounded: list[int] = []
    quantize = quantized_schedules.quantize_rows

    def counted(out: Any, x: torch.Tensor, *rest: Any, **keywords: Any) -> None:
        rounded.append(x.shape[1])
        quantize(out, x, *rest, **keywords)

    monkeypatch.setattr(quantized_schedules, "quantize_rows", counted)
    found = []
    received = [(hidden_states, None), *(arrived(problem, hidden_states, keeps_codes) for keeps_codes in (False, True))]
    for rows, scales in received:
        rounded.clear()
        found.append(apply_experts(layer, ExpertInputs(rows, weights, ids, hidden_scale=scales), permuted))
        # Nothing rounds tokens a second time.
        assert (hidden_size in rounded) is (scales is None)
    assert torch.isfinite(found[0]).all()
    assert received[2][1] is not None
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_recording_knows_the_scales_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie elsewhere in each call; and a call without them is another recording."""
    problem = MoEProblem(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, quant="fp8_block128")
    layer = TritonQuantizedExperts(problem, SM90)
    permuted = layer.permute_weights(make_weights(problem, DEVICE), problem)
    inputs = make_inputs(problem, 3, "uniform", DEVICE)
    known: list[dict[str, torch.Tensor | None]] = []

    def run(self: Recorded, call: Call) -> None:
        known.append({name: call.weights.get(name) for name in self.recorded_weights})

    monkeypatch.setattr(Recorded, "run", run)
    rows, scales = arrived(problem, inputs.hidden_states, keeps_codes=True)
    nothing = torch.empty(0, device=DEVICE)
    for hidden_states, hidden_scale in ((rows, scales), (inputs.hidden_states, None)):
        given = ExpertInputs(hidden_states, inputs.topk_weights, inputs.topk_ids, hidden_scale=hidden_scale)
        layer.apply(torch.empty_like(inputs.hidden_states), given, permuted, nothing, nothing)
    assert known[0].pop("hidden_scale") is scales
    assert known[1].pop("hidden_scale") is None
    assert known[0].keys() == known[1].keys()
    assert all(known[0][name] is known[1][name] for name in known[0])
    assert permuted.get("hidden_scale") is None

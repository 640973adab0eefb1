"""The Gluon kernels of packed weights and of 8-bit codes, on a Hopper GPU only: Gluon has no interpreter.

Layers must agree with the reference within the scheme's tolerance, and repeated calls bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._loaded import Call
from moereg.backends._triton.packed import HopperPacked
from moereg.backends._triton.quantized_schedules import Hopper
from moereg.bench.inputs import random_call
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.kernels.hopper.packed_config import PACKED_RULES
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

MXFP4, NVFP4, INT4, INT4_ROWS = "mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_g128", "int4_w4a16_gall"
PACKED_INT8, BLOCK, CHANNEL, INT8 = "int8_w8a16", "fp8_block128", "fp8_channel_token", "int8_w8a8"
GIVEN, DYNAMIC = "fp8_tensor_static", "fp8_tensor_dynamic"
BIASED, MAPPED = {"has_bias": True}, {"num_local_experts": 8, "placement": "map"}
FP16, ON_INPUT = {"dtype": "float16"}, {"apply_router_weight_on_input": True}

# Scheme, tokens, experts, top_k, hidden, intermediate, activation, what else the problem says, and of packed weights
# the rule. Few, because each takes seconds to compile.
CASES: list[tuple[str, int, int, int, int, int, str, dict[str, Any], int | None]] = [
    (MXFP4, 130, 8, 2, 256, 192, "swigluoai", BIASED, 0),
    (NVFP4, 150, 8, 2, 264, 320, "silu", {}, 0),
    (INT4, 130, 8, 2, 512, 384, "silu", {}, 0),
    (PACKED_INT8, 130, 8, 2, 328, 200, "silu", BIASED, 0),
    (MXFP4, 301, 8, 2, 520, 328, "silu", BIASED, 1),
    (INT4_ROWS, 301, 8, 2, 320, 256, "gelu_tanh", {}, 1),
    (PACKED_INT8, 301, 8, 2, 456, 320, "relu2", BIASED, 1),
    (NVFP4, 600, 16, 4, 512, 320, "silu", MAPPED, 2),
    (INT4, 600, 8, 2, 520, 384, "swigluoai", BIASED, 2),
    (PACKED_INT8, 600, 8, 2, 256, 256, "silu", {}, 2),
    # More routes than one launch sorts.
    (MXFP4, 2101, 8, 2, 256, 328, "relu2", {}, 3),
    (INT4, 900, 8, 2, 640, 192, "silu", {}, 3),
    (PACKED_INT8, 900, 8, 2, 328, 320, "gelu", BIASED, 3),
    (BLOCK, 512, 4, 2, 512, 384, "silu", {}, None),
    # A short last block of columns, of the reduced dimension, and of rows; an odd number of steps.
    (BLOCK, 613, 8, 4, 328, 128, "silu", BIASED, None),
    (BLOCK, 700, 8, 4, 648, 256, "swigluoai", BIASED, None),
    (BLOCK, 700, 8, 4, 512, 384, "relu2", BIASED, None),
    (BLOCK, 900, 4, 1, 256, 256, "gelu_tanh", ON_INPUT, None),
    (BLOCK, 900, 16, 4, 512, 256, "silu", MAPPED, None),
    (BLOCK, 800, 4, 2, 512, 384, "gelu", FP16, None),
    # More routes than one launch sorts, and no multiple of 16.
    (BLOCK, 2101, 8, 2, 256, 128, "silu", {}, None),
    (CHANNEL, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (CHANNEL, 700, 4, 2, 648, 200, "relu2", FP16, None),
    (INT8, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (INT8, 700, 8, 4, 1096, 520, "swigluoai", {"num_local_experts": 4, "placement": "contiguous"}, None),
    # Few rows an expert: weights are asked for early where there are as many steps as slots, right guesses and wrong.
    (BLOCK, 100, 8, 4, 1032, 640, "silu", BIASED, None),
    (BLOCK, 301, 16, 4, 520, 512, "swigluoai", MAPPED, None),
    (BLOCK, 220, 8, 4, 640, 1152, "gelu_tanh", FP16, None),
    # Many: the first warpgroup leads.
    (BLOCK, 700, 8, 4, 1032, 640, "relu2", {}, None),
    # One scale a tensor: codes leave the first product where it is given, and need all rows where it is not.
    (GIVEN, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (GIVEN, 700, 4, 2, 648, 200, "relu2", FP16, None),
    (GIVEN, 900, 16, 4, 512, 256, "swigluoai", MAPPED, None),
    (GIVEN, 900, 4, 1, 256, 256, "gelu_tanh", ON_INPUT, None),
    (DYNAMIC, 613, 8, 4, 328, 136, "silu", BIASED, None),
    (DYNAMIC, 900, 16, 4, 512, 256, "relu2", MAPPED, None),
]


def kernel_of(problem: MoEProblem) -> tuple[MoEKernel, ExpertWeights]:
    device = torch.device("cuda")
    weights, expert_map = make_weights(problem, device), None
    if problem.placement == "map":
        expert_map = torch.full((problem.num_experts,), -1, dtype=torch.int32, device=device)
        local = torch.arange(problem.num_local_experts, dtype=torch.int32, device=device)
        expert_map[3 : 3 + problem.num_local_experts] = local
    return make_kernel(problem, weights, select_backend(problem, require="triton"), expert_map=expert_map), weights


def worst_row(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Each token by itself, so that one wrong row does not drown in the others."""
    return ((out.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1)).max()


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{case[6]}-{case[1]}-{case[4]}" for case in CASES])
def test_layers(case: tuple[str, int, int, int, int, int, str, dict[str, Any], int | None]) -> None:
    scheme, tokens, experts, top_k, hidden, inter, activation, keywords, rule = case
    problem = MoEProblem(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        top_k=top_k,
        quant=scheme,
        activation=activation,
        **keywords,
    )
    kernel, weights = kernel_of(problem)
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(tokens))
    inputs = ExpertInputs(call.hidden_states, call.topk_weights, call.topk_ids)
    nothing = torch.empty(0, device="cuda")
    schedule = kernel.experts.implementation.select(Call(nothing, inputs, kernel.weights, nothing, nothing))  # type: ignore[attr-defined]
    assert isinstance(schedule, Hopper if rule is None else HopperPacked), "the case is not for these kernels"
    assert rule is None or schedule.config is PACKED_RULES[rule]
    outs = []
    for _ in range(3):
        WORKSPACES.release()  # The next one is poisoned again.
        outs.append(kernel(*call, out=torch.full_like(call.hidden_states, math.nan)))
    truth = reference_experts(problem, weights, *call, expert_map=kernel.expert_map)
    assert relative_error(outs[0], truth) <= tolerance(problem.quant, problem.dtype, tokens * hidden)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def check_counts(scheme: str, size: int, *borders: Sequence[int]) -> None:
    """First most tokens go to one expert; then counts lie about the borders of tiles."""
    problem = MoEProblem(num_experts=8, hidden_size=size, intermediate_size=size, top_k=1, quant=scheme)
    kernel, weights = kernel_of(problem)
    for counts in ((900, 0, 0, 0, 0, 0, 0, 37), *borders):
        experts = torch.arange(8, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
        order = torch.randperm(len(experts), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        ids = experts[order].int().unsqueeze(1)
        call = random_call(problem, len(ids), "uniform", torch.Generator("cuda").manual_seed(3))
        out = kernel(call.hidden_states, call.topk_weights, ids, out=torch.full_like(call.hidden_states, math.nan))
        truth = reference_experts(problem, weights, call.hidden_states, call.topk_weights, ids)
        bound = tolerance(problem.quant, problem.dtype, len(ids) * size)
        assert relative_error(out, truth) <= bound, counts
        assert float(worst_row(out, truth)) <= 4 * bound, counts


@pytest.mark.parametrize("rule", PACKED_RULES)
def test_experts_of_few_and_of_many_rows_of_packed_weights(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.backends._triton.packed.select_packed_config", lambda _rows: rule)
    m, slack = rule.down.block_m, rule.down.slack
    check_counts(MXFP4, 256, (m // 2, m // 2 + 1, m, m + 1, m + slack, m + slack + 1, 2 * m + slack, 1))


@pytest.mark.parametrize("scheme", [BLOCK, CHANNEL, INT8, GIVEN, DYNAMIC])
def test_experts_of_few_and_of_many_rows_of_codes(scheme: str) -> None:
    for size in (256, 640):
        check_counts(scheme, size, (1, 63, 64, 65, 127, 128, 129, 300), (192, 193, 1, 2, 3, 256, 257, 0))


@pytest.mark.parametrize("tokens", [100, 400])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_gates_far_from_zero(activation: str, tokens: int) -> None:
    """Sigmoids that are 0 and 1, gates close to 0, and a token that is NaN, with both rules of block scales."""
    sizes = {"num_experts": 8, "hidden_size": 640, "intermediate_size": 640, "top_k": 4}
    problem = MoEProblem(**sizes, quant=BLOCK, activation=activation)
    kernel, weights = kernel_of(problem)
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(4))
    call.hidden_states[::3] *= 1e4
    call.hidden_states[1::3] *= 1e-4
    truth = reference_experts(problem, weights, *call)
    call.hidden_states[7] = math.nan
    out = kernel(*call, out=torch.zeros_like(call.hidden_states))
    assert out[7].isnan().all()
    sound = torch.arange(tokens, device="cuda") != 7
    assert out[sound].isfinite().all()
    assert float(worst_row(out[sound], truth[sound])) <= 4 * tolerance(problem.quant, problem.dtype, tokens * 640)

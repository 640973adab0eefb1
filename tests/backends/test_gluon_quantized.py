"""The Gluon kernels of 8-bit codes, on a Hopper GPU only: Gluon has no interpreter.

Layers must agree with the reference within the scheme's tolerance, and repeated calls bit by bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._loaded import Call
from moereg.backends._triton.quantized_ways import Hopper
from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.tuning.inputs import random_call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

BLOCK, CHANNEL, INT8 = "fp8_block128", "fp8_channel_token", "int8_w8a8"
GIVEN, DYNAMIC = "fp8_tensor_static", "fp8_tensor_dynamic"

# scheme, tokens, experts, top_k, hidden, intermediate, activation, and what else the problem says
CASES: list[tuple[str, int, int, int, int, int, str, dict[str, Any]]] = [
    (BLOCK, 512, 4, 2, 512, 384, "silu", {}),
    # A short last block of columns, of the reduced dimension, and of rows; an odd number of steps.
    (BLOCK, 613, 8, 4, 328, 128, "silu", {"has_bias": True}),
    (BLOCK, 700, 8, 4, 648, 256, "swigluoai", {"has_bias": True}),
    (BLOCK, 700, 8, 4, 512, 384, "relu2", {"has_bias": True}),
    (BLOCK, 900, 4, 1, 256, 256, "gelu_tanh", {"apply_router_weight_on_input": True}),
    (BLOCK, 900, 16, 4, 512, 256, "silu", {"num_local_experts": 8, "placement": "map"}),
    (BLOCK, 800, 4, 2, 512, 384, "gelu", {"dtype": "float16"}),
    # More routes than one launch sorts, and no multiple of 16.
    (BLOCK, 2101, 8, 2, 256, 128, "silu", {}),
    (CHANNEL, 613, 8, 4, 328, 136, "silu", {"has_bias": True}),
    (CHANNEL, 700, 4, 2, 648, 200, "relu2", {"dtype": "float16"}),
    (INT8, 613, 8, 4, 328, 136, "silu", {"has_bias": True}),
    (INT8, 700, 8, 4, 1096, 520, "swigluoai", {"num_local_experts": 4, "placement": "contiguous"}),
    # Few rows an expert: weights are asked for early where there are as many steps as slots, right guesses and wrong.
    (BLOCK, 100, 8, 4, 1032, 640, "silu", {"has_bias": True}),
    (BLOCK, 301, 16, 4, 520, 512, "swigluoai", {"num_local_experts": 8, "placement": "map"}),
    (BLOCK, 220, 8, 4, 640, 1152, "gelu_tanh", {"dtype": "float16"}),
    # Many: the first warpgroup leads.
    (BLOCK, 700, 8, 4, 1032, 640, "relu2", {}),
    # One scale a tensor: codes leave the first product where it is given, and need all rows where it is not.
    (GIVEN, 613, 8, 4, 328, 136, "silu", {"has_bias": True}),
    (GIVEN, 700, 4, 2, 648, 200, "relu2", {"dtype": "float16"}),
    (GIVEN, 900, 16, 4, 512, 256, "swigluoai", {"num_local_experts": 8, "placement": "map"}),
    (GIVEN, 900, 4, 1, 256, 256, "gelu_tanh", {"apply_router_weight_on_input": True}),
    (DYNAMIC, 613, 8, 4, 328, 136, "silu", {"has_bias": True}),
    (DYNAMIC, 900, 16, 4, 512, 256, "relu2", {"num_local_experts": 8, "placement": "map"}),
]


@pytest.mark.parametrize(
    ("scheme", "tokens", "experts", "top_k", "hidden", "inter", "activation", "keywords"),
    CASES,
    ids=[f"{case[0]}-{case[6]}-{number}" for number, case in enumerate(CASES)],
)
def test_layers(
    scheme: str,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    activation: str,
    keywords: dict[str, Any],
) -> None:
    act: Activation = ACTIVATIONS[activation]
    problem = MoEProblem(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        top_k=top_k,
        quant=scheme,
        activation=act,
        **keywords,
    )
    device = torch.device("cuda")
    weights = make_weights(problem, device)
    expert_map = None
    if problem.placement == "map":
        expert_map = torch.full((experts,), -1, dtype=torch.int32, device=device)
        expert_map[3 : 3 + problem.num_local_experts] = torch.arange(
            problem.num_local_experts, dtype=torch.int32, device=device
        )
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"), expert_map=expert_map)
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(tokens))
    inputs = ExpertInputs(call.hidden_states, call.topk_weights, call.topk_ids)
    assert isinstance(kernel.experts, TritonQuantizedExperts)
    nothing = torch.empty(0, device=device)
    way = kernel.experts.implementation.select(Call(nothing, inputs, kernel.weights, nothing, nothing))  # type: ignore[attr-defined]
    assert isinstance(way, Hopper), "the case is not for these kernels"
    outs = []
    for _ in range(3):
        WORKSPACES.release()  # The next one is poisoned again.
        outs.append(kernel(*call, out=torch.full_like(call.hidden_states, math.nan)))
    truth = reference_experts(problem, weights, *call, expert_map=kernel.expert_map)
    bound = tolerance(problem.quant, problem.dtype, tokens * hidden)
    assert relative_error(outs[0], truth) <= bound
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("scheme", [BLOCK, CHANNEL, INT8, GIVEN, DYNAMIC])
def test_experts_of_few_and_of_many_rows(scheme: str) -> None:
    """First all tokens go to two experts; then counts lie about the borders of a warpgroup and of a tile."""
    for size in (256, 640):
        _check_counts(MoEProblem(num_experts=8, hidden_size=size, intermediate_size=size, top_k=1, quant=scheme))


def _check_counts(problem: MoEProblem) -> None:
    weights = make_weights(problem, torch.device("cuda"))
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
    for counts in ((900, 0, 0, 0, 0, 0, 0, 37), (1, 63, 64, 65, 127, 128, 129, 300), (192, 193, 1, 2, 3, 256, 257, 0)):
        experts = torch.arange(8, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
        order = torch.randperm(len(experts), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        ids = experts[order].int().unsqueeze(1)
        call = random_call(problem, len(ids), "uniform", torch.Generator("cuda").manual_seed(3))
        out = kernel(call.hidden_states, call.topk_weights, ids, out=torch.full_like(call.hidden_states, math.nan))
        truth = reference_experts(problem, weights, call.hidden_states, call.topk_weights, ids)
        bound = tolerance(problem.quant, problem.dtype, len(ids) * problem.hidden_size)
        assert relative_error(out, truth) <= bound, counts
        # Each token by itself, so that one wrong row does not drown in the others.
        worst = ((out.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1)).max()
        assert float(worst) <= 4 * bound, counts


@pytest.mark.parametrize("tokens", [100, 400])
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_gates_far_from_zero(activation: str, tokens: int) -> None:
    """Sigmoids that are 0 and 1, gates close to 0, and a token that is NaN, with both rules of block scales."""
    act: Activation = ACTIVATIONS[activation]
    problem = MoEProblem(num_experts=8, hidden_size=640, intermediate_size=640, top_k=4, quant=BLOCK, activation=act)
    weights = make_weights(problem, torch.device("cuda"))
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
    call = random_call(problem, tokens, "uniform", torch.Generator("cuda").manual_seed(4))
    call.hidden_states[::3] *= 1e4
    call.hidden_states[1::3] *= 1e-4
    truth = reference_experts(problem, weights, *call)
    call.hidden_states[7] = math.nan
    out = kernel(*call, out=torch.zeros_like(call.hidden_states))
    assert out[7].isnan().all()
    sound = torch.arange(tokens, device="cuda") != 7
    assert out[sound].isfinite().all()
    worst = ((out.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1))[sound].max()
    assert float(worst) <= 4 * tolerance(problem.quant, problem.dtype, tokens * 640)

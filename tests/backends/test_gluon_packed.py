"""The Gluon kernels of packed weights, on a Hopper GPU only: Gluon has no interpreter.

Layers must agree with the reference within the scheme's tolerance, and repeated calls bit by bit.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._loaded import Call
from moereg.backends._triton.packed import HopperPacked
from moereg.backends.triton_moe import TritonPackedExperts
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.kernels.hopper.packed_config import PACKED_RULES
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.tuning.inputs import random_call

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

MXFP4, NVFP4, INT4, INT4_ROWS, INT8 = (
    "mxfp4_w4a16",
    "nvfp4_w4a16",
    "int4_w4a16_g128",
    "int4_w4a16_gall",
    "int8_w8a16",
)

# rule, scheme, tokens, experts, top_k, hidden, intermediate, activation, and what else the problem says. Few, because
# each takes seconds to compile.
CASES: list[tuple[int, str, int, int, int, int, int, str, dict[str, Any]]] = [
    (0, MXFP4, 130, 8, 2, 256, 192, "swigluoai", {"has_bias": True}),
    (0, NVFP4, 150, 8, 2, 264, 320, "silu", {}),
    (0, INT4, 130, 8, 2, 512, 384, "silu", {}),
    (0, INT8, 130, 8, 2, 328, 200, "silu", {"has_bias": True}),
    (1, MXFP4, 301, 8, 2, 520, 328, "silu", {"has_bias": True}),
    (1, INT4_ROWS, 301, 8, 2, 320, 256, "gelu_tanh", {}),
    (1, INT8, 301, 8, 2, 456, 320, "relu2", {"has_bias": True}),
    (2, NVFP4, 600, 16, 4, 512, 320, "silu", {"num_local_experts": 8, "placement": "map"}),
    (2, INT4, 600, 8, 2, 520, 384, "swigluoai", {"has_bias": True}),
    (2, INT8, 600, 8, 2, 256, 256, "silu", {}),
    # More routes than one launch sorts.
    (3, MXFP4, 2101, 8, 2, 256, 328, "relu2", {}),
    (3, INT4, 900, 8, 2, 640, 192, "silu", {}),
    (3, INT8, 900, 8, 2, 328, 320, "gelu", {"has_bias": True}),
]


@pytest.mark.parametrize(
    ("rule", "scheme", "tokens", "experts", "top_k", "hidden", "inter", "activation", "keywords"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[7]}" for case in CASES],
)
def test_layers(
    rule: int,
    scheme: str,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inter: int,
    activation: str,
    keywords: dict[str, Any],
) -> None:
    problem = MoEProblem(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=inter,
        top_k=top_k,
        quant=scheme,
        activation=activation,
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
    assert isinstance(kernel.experts, TritonPackedExperts)
    nothing = torch.empty(0, device=device)
    way = kernel.experts.implementation.select(Call(nothing, inputs, kernel.weights, nothing, nothing))  # type: ignore[attr-defined]
    assert isinstance(way, HopperPacked), "the case is not for these kernels"
    assert way.config is PACKED_RULES[rule]
    outs = []
    for _ in range(3):
        WORKSPACES.release()  # The next one is poisoned again.
        outs.append(kernel(*call, out=torch.full_like(call.hidden_states, math.nan)))
    truth = reference_experts(problem, weights, *call, expert_map=kernel.expert_map)
    assert relative_error(outs[0], truth) <= tolerance(problem.quant, problem.dtype, tokens * hidden)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("rule", range(len(PACKED_RULES)))
def test_experts_of_few_and_of_many_rows(rule: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First most tokens go to one expert; then counts lie about the borders of half a tile, a tile and its slack."""
    monkeypatch.setattr("moereg.backends._triton.packed.select_packed_config", lambda _rows: PACKED_RULES[rule])
    problem = MoEProblem(num_experts=8, hidden_size=256, intermediate_size=256, top_k=1, quant=MXFP4)
    weights = make_weights(problem, torch.device("cuda"))
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton"))
    m, slack = PACKED_RULES[rule].down.block_m, PACKED_RULES[rule].down.slack
    borders = (m // 2, m // 2 + 1, m, m + 1, m + slack, m + slack + 1, 2 * m + slack, 1)
    for counts in ((900, 0, 0, 0, 0, 0, 0, 37), borders):
        experts = torch.arange(8, device="cuda").repeat_interleave(torch.tensor(counts, device="cuda"))
        order = torch.randperm(len(experts), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
        ids = experts[order].int().unsqueeze(1)
        call = random_call(problem, len(ids), "uniform", torch.Generator("cuda").manual_seed(3))
        out = kernel(call.hidden_states, call.topk_weights, ids, out=torch.full_like(call.hidden_states, math.nan))
        truth = reference_experts(problem, weights, call.hidden_states, call.topk_weights, ids)
        bound = tolerance(problem.quant, problem.dtype, len(ids) * 256)
        assert relative_error(out, truth) <= bound, counts
        # Each token by itself, so that one wrong row does not drown in the others.
        worst = ((out.float() - truth.float()).norm(dim=1) / truth.float().norm(dim=1)).max()
        assert float(worst) <= 4 * bound, counts

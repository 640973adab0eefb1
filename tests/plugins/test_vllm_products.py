"""The two products by route that a layer with adapters is made of, against torch; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which interprets kernels on a CPU")

from vllm_moereg.products import RouteProducts

from moereg.numerics.reference import relative_error
from tests.backends.conftest import _interpreter  # noqa: F401
from tests.kernels.references import down_reference
from tests.kernels.triton_cases import BF16, FP32, bound, make_map, make_plan, random, route


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_local"), [(1, 6), (5, 3), (40, 3)])
def test_products_by_route(num_tokens: int, num_local: int, has_bias: bool, dtype: torch.dtype) -> None:
    ids, placed = route("out_of_range", num_tokens, 2, 6), make_map(6, num_local)
    tokens, weights = random(num_tokens, 80, dtype=dtype), random(num_tokens, 2, dtype=FP32)
    w13, w2 = random(num_local, 96, 80, dtype=dtype, scale=0.1), random(num_local, 80, 48, dtype=dtype, scale=0.1)
    biases = [random(num_local, rows, dtype=FP32) if has_bias else None for rows in (96, 80)]
    rows = random(num_tokens * 2, 48, dtype=dtype)
    held = {"w13": w13, "w2": w2, "w13_bias": biases[0], "w2_bias": biases[1]}
    problem = SimpleNamespace(num_experts=6, num_local_experts=num_local, torch_dtype=dtype)
    products = RouteProducts(SimpleNamespace(problem=problem, expert_map=placed, weights=held), ids)  # type: ignore[arg-type]
    found = products.gate_up(tokens), products.down(rows, weights)
    plan = make_plan(ids, placed, 6, num_local, 16)
    routes = plan.sorted_routes.clamp(0, num_tokens * 2 - 1).long()
    expected = (
        down_reference(tokens[routes // 2], w13, plan, bias=biases[0]),
        down_reference(rows[routes], w2, plan, bias=biases[1], topk_weights=weights),
    )
    for mine, theirs, columns in zip(found, expected, (96, 80), strict=True):
        assert mine.shape == (num_tokens, 2, columns)
        theirs = theirs.nan_to_num(0.0).view_as(mine)
        assert (mine[plan.route_expert.view(num_tokens, 2) < 0] == 0).all()
        assert relative_error(mine, theirs) < bound(dtype, roundings=1)

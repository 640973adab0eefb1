"""Activations rounded to a scheme's numbers in 16 bits, and layers that do so: interpreted, or on a CUDA device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moereg.backends._triton import emulated
from moereg.backends.triton_moe import TritonEmulatedExperts
from moereg.kernels.quantized.emulate import SmallFloats, requantize_rows
from moereg.kernels.rows.plan import RoutePlan, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.platforms import Platform
from moereg.quantize import dequantize_activations, quantize_activations, quantize_dequantize_activations
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.testing.cases import default_device

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")
BF16, FP16 = torch.bfloat16, torch.float16
SCHEMES = ("nvfp4", "mxfp4_mxfp8")
# Scheme, and each dtype that its cells have.
FORMS = (("nvfp4", BF16), ("nvfp4", FP16), ("mxfp4_mxfp8", BF16))
each_form = pytest.mark.parametrize(("scheme", "dtype"), FORMS, ids=str)


def make_problem(scheme: str, hidden: int = 130, intermediate: int = 200, **keywords: Any) -> MoEProblem:
    sizes = {"num_experts": 4, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": scheme, **keywords})


def grid_of(scheme: str) -> SmallFloats:
    return emulated.Standard(TritonEmulatedExperts(make_problem(scheme), SM90)).grid()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape))).to(DEVICE)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, with one NaN for all."""
    return torch.where(tensor.isnan(), torch.nan, tensor.float()).view(torch.int32)


def expected_rows(
    x: torch.Tensor, scheme: str, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The numbers of the codes without the global scale, in fp32, and that scale of each row."""
    quantized = quantize_activations(x, scheme, scale)
    if quantized.scale_2 is None:
        return quantize_dequantize_activations(x, scheme), None
    # A scale of 1 changes no number, which leaves codes times group scales.
    stripped = dataclasses.replace(quantized, scale_2=torch.ones((), device=x.device))
    values = dequantize_activations(stripped, scheme, x.shape[1])
    return values, quantized.scale_2.expand(len(x), 1).squeeze(1)


def assert_rounded(x: torch.Tensor, scheme: str, static: torch.Tensor | None = None) -> None:
    grid = grid_of(scheme)
    out = torch.full_like(x, 77.0)
    factors = torch.full((len(x),), math.nan, device=DEVICE) if grid.global_scale else None
    requantize_rows(out, x, grid, factors=factors, static_scale=static)
    values, scale_2 = expected_rows(x, scheme, None if static is None else static.reshape(()))
    if scale_2 is not None and factors is not None:
        assert torch.equal(bits(factors), bits(scale_2))
        # The scale alone makes the rest of such a row NaN.
        values, out = values[~scale_2.isnan()], out[~scale_2.isnan()]
    assert torch.equal(bits(out), bits(values)), "not what the codes stand for"
    assert torch.equal(bits(values.to(x.dtype)), bits(values)), "what codes stand for has to fit 16 bits"


@each_form
@pytest.mark.parametrize("columns", [16, 130, 1100])
def test_rows_are_what_codes_stand_for(scheme: str, dtype: torch.dtype, columns: int) -> None:
    x = random(9, columns) * torch.logspace(-4, 3, 9, device=DEVICE).unsqueeze(1)
    # Groups of one row that differ by more than a group's scale can.
    x[3] *= torch.logspace(-6, 2, columns, device=DEVICE)
    assert_rounded(x.to(dtype), scheme)


@each_form
def test_odd_numbers(scheme: str, dtype: torch.dtype) -> None:
    x = random(10, 96).to(dtype)
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    x[0] = 0.0
    x[1, :32] = 0.0
    x[2] = -0.0
    x[3, 5] = math.nan
    x[4, 70] = -math.inf
    x[5] = (random(96) * tiny).to(dtype)
    x[6] = (torch.arange(96, device=DEVICE) * tiny * torch.finfo(dtype).eps).to(dtype)
    x[7] = largest / 2
    x[8, 0] = largest / 4
    x[9] = torch.linspace(-6, 6, 96).to(dtype)
    assert_rounded(x, scheme)


@each_form
def test_ties_go_to_even_codes(scheme: str, dtype: torch.dtype) -> None:
    fmt = get_scheme(scheme).activation
    assert fmt is not None
    values = torch.arange(0, 97, device=DEVICE) / 16 if fmt.bits == 4 else torch.arange(0, 449, device=DEVICE) / 32
    # Every group's largest magnitude is the largest code, so that its scale is 1.
    largest = 6.0 if fmt.bits == 4 else 448.0
    groups = torch.nn.functional.pad(values, (0, -len(values) % (fmt.group[1] - 1))).view(-1, fmt.group[1] - 1)
    x = torch.nn.functional.pad(groups, (0, 1), value=largest).reshape(1, -1)
    assert_rounded(torch.cat([x, -x]).to(dtype), scheme, torch.ones(1, device=DEVICE) if fmt.global_scale else None)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("static", [1e-6, 0.0007, 0.02, 5.0, 1e30, 1e-38])
def test_static_global_scales(dtype: torch.dtype, static: float) -> None:
    """Too small scales saturate, too large ones leave the smallest group scale."""
    x = random(5, 130).to(dtype)
    x[1, 3], x[2, 5], x[3] = math.inf, math.nan, 0.0
    assert_rounded(x, "nvfp4", torch.tensor([static], device=DEVICE))


def sorted_plan(ids: torch.Tensor) -> RoutePlan:
    workspace = ids.new_empty(route_workspace_numel(*ids.shape, 4, 16))
    return sort_routes(ids, None, 4, 4, 16, workspace)


IDS = torch.tensor([[3, 1], [0, -1], [4, 2], [1, 3], [0, 3]], dtype=torch.int32, device=DEVICE)
STATIC = torch.tensor([0.001, 0.002, 0.004, 0.008], device=DEVICE)


def test_rows_of_routes_have_their_experts_scales() -> None:
    x, out = random(5, 48).to(BF16), torch.full((10, 48), math.nan, dtype=BF16, device=DEVICE)
    factors = torch.full((10,), math.nan, device=DEVICE)
    plan = sorted_plan(IDS)
    route_expert = plan.route_expert
    requantize_rows(out, x, grid_of("nvfp4"), factors=factors, static_scale=STATIC, route_expert=route_expert)
    for route, expert in enumerate(IDS.flatten().tolist()):
        if expert not in range(4):
            assert out[route].isnan().all(), "a row without an expert was written to"
            continue
        values, _ = expected_rows(x[route // 2, None], "nvfp4", STATIC[expert])
        assert torch.equal(bits(out[route, None]), bits(values))
        assert factors[route] == STATIC[expert]


@pytest.mark.parametrize("scale", [STATIC, STATIC[:1], None])
def test_sorted_rows_in_place(scale: torch.Tensor | None) -> None:
    x = random(10, 48).to(BF16)
    out, factors = x.clone(), torch.full((10,), math.nan, device=DEVICE)
    plan = sorted_plan(IDS)
    requantize_rows(out, out, grid_of("nvfp4"), factors=factors, static_scale=scale, plan=plan)
    num_rows = int(plan.expert_offsets[-1])
    assert num_rows == 8
    assert torch.equal(out[num_rows:], x[num_rows:]), "rows that are not in use were written to"
    for row in range(num_rows):
        expert = int(plan.route_expert[plan.sorted_routes[row]])
        own = None if scale is None else scale.expand(4)[expert]
        values, factor = expected_rows(x[row, None], "nvfp4", own)
        assert torch.equal(bits(out[row, None]), bits(values))
        assert factor is not None
        assert factors[row] == factor


def test_batched_rows_and_repeated_factors() -> None:
    x = random(12, 48).to(BF16)
    out, factors = torch.full_like(x, math.nan), torch.full((12,), math.nan, device=DEVICE)
    counts = torch.tensor([3, 0, 2, 1], dtype=torch.int32, device=DEVICE)
    grid = grid_of("nvfp4")
    requantize_rows(out, x, grid, factors=factors, static_scale=STATIC, expert_num_tokens=counts)
    for row in range(12):
        expert = row // 3
        if row % 3 >= counts[expert]:
            assert out[row].isnan().all(), "a row that is not valid was written to"
            continue
        assert torch.equal(bits(out[row, None]), bits(expected_rows(x[row, None], "nvfp4", STATIC[expert])[0]))
        assert factors[row] == STATIC[expert]
    repeated = torch.full((36,), math.nan, device=DEVICE)
    requantize_rows(out, x, grid, factors=repeated)
    assert torch.equal(repeated.view(12, 3), expected_rows(x, "nvfp4")[1][:, None].expand(12, 3))  # type: ignore[index]


def test_routing_weights_are_rounded_in_first() -> None:
    x, weights = random(5, 64).to(BF16), torch.rand(5, device=DEVICE) + 0.1
    out = torch.empty_like(x)
    requantize_rows(out, x, grid_of("mxfp4_mxfp8"), topk_weights=weights)
    weighted = (x.float() * weights.unsqueeze(1)).to(BF16)
    assert torch.equal(bits(out), bits(expected_rows(weighted, "mxfp4_mxfp8")[0]))

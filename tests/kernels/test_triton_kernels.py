"""The Triton products, and kernels that move or add up rows, against torch: interpreted on a CPU, or on a GPU.

`triton_cases` says what an error is, and how large it may be.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moereg.kernels.gemm.activation import softcap
from moereg.kernels.gemm.config import GemvConfig, GroupedGemmConfig
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.plain.device import local_expert_ids
from moereg.kernels.rows import reduce
from moereg.kernels.rows.direct import DirectRoutes, local_routes
from moereg.kernels.rows.reduce import copy_rows, reduce_routes, reduce_sorted_rows
from moereg.kernels.rows.tiles import tile_of_number
from moereg.numerics.reference import relative_error
from moereg.testing.interpreter import patch_interpreter
from tests.kernels.references import copy_rows_reference, down_reference, gate_up_reference, reduce_routes_reference
from tests.kernels.triton_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Guarded,
    bound,
    far_apart,
    make_plan,
    random,
    route,
    rows_with_gaps,
)

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@triton.jit
def _tiles_kernel(out, num_blocks, GROUP_M: tl.constexpr):
    block, column_tile = tile_of_number(tl.program_id(0), num_blocks, 3, GROUP_M)
    tl.store(out + block * 3 + column_tile, tl.program_id(0))


@pytest.mark.parametrize("group_m", [1, 4])
@pytest.mark.parametrize("num_blocks", [1, 4, 6])
def test_every_tile_has_one_number_and_a_group_takes_its_columns_in_turn(num_blocks: int, group_m: int) -> None:
    out = torch.full((num_blocks, 3), -1, dtype=torch.int32, device=DEVICE)
    _tiles_kernel[(num_blocks * 3,)](out, num_blocks, GROUP_M=group_m)
    groups = torch.arange(num_blocks * 3, dtype=torch.int32, device=DEVICE).split(group_m * 3)
    assert torch.equal(out, torch.cat([group.view(3, -1).t() for group in groups]))


@triton.jit
def _softcap_kernel(x, out, size, CAP: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, softcap(tl.load(x + offsets, offsets < size, 0.0), CAP)[0], offsets < size)


@pytest.mark.parametrize("cap", [0.75, 4.0, 25.0])
def test_soft_caps_keep_the_digits_of_small_numbers(cap: float) -> None:
    """As sigmoids alone, relative errors near 0 would be 5e-2."""
    small = torch.logspace(-6, math.log10(50), 20001, device=DEVICE) * cap
    ends = torch.tensor([0.0, 1e38, math.inf, math.nan], device=DEVICE)
    x = torch.cat([small, -small, ends, -ends])
    out = torch.full_like(x, -7)
    _softcap_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), CAP=cap, BLOCK=1024)
    torch.testing.assert_close(out.double(), cap * torch.tanh(x.double() / cap), rtol=5e-7, atol=0, equal_nan=True)


@triton.jit
def _square_kernel(a, product, rounded):
    # The least depth of a tensor core's 8-bit product.
    offsets = tl.arange(0, 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(a + offsets)
    # Not loaded back, since another thread than the one that stored an element may load it.
    squared = tl.dot(x, x)
    tl.store(product + offsets, squared)
    tl.store(rounded + offsets, squared.to(tl.float32).to(tl.bfloat16))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.int8], ids=str)
def test_products_and_rounding_are_those_of_a_device(dtype: torch.dtype) -> None:
    """All tests below rely on this in the interpreter: see `patch_interpreter`."""
    patch_interpreter()
    patch_interpreter()
    x = (random(32, 32, dtype=FP32) * 30).to(dtype)
    product = torch.empty(32, 32, dtype=torch.int32 if dtype == torch.int8 else FP32, device=DEVICE)
    rounded = torch.empty(32, 32, dtype=BF16, device=DEVICE)
    _square_kernel[(1,)](x, product, rounded)
    assert relative_error(product, x.double() @ x.double()) < 1e-6
    assert torch.equal(rounded, product.to(BF16))


WIDE = GroupedGemmConfig(block_m=16, block_n=128, block_k=64, group_m=1, num_warps=4, num_stages=2)
# Short steps, as 32-bit operands have them.
SHORT = GroupedGemmConfig(block_m=32, block_n=64, block_k=32, group_m=2, num_warps=4, num_stages=2)
GATE_UP_GEMV = GemvConfig(block_n=16, block_k=128, num_warps=4, num_stages=2)
DOWN_GEMV = GemvConfig(block_n=8, block_k=64, num_warps=4, num_stages=2)
SQUARE = GroupedGemmConfig(block_m=32, block_n=64, block_k=128, group_m=2, num_warps=4, num_stages=2)


@dataclasses.dataclass(frozen=True)
class StageCase:
    """Inputs of one GEMM."""

    num_tokens: int
    top_k: int
    num_experts: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype
    activation: str = "silu"
    bias: torch.dtype | None = None
    weights: bool = False
    kind: str = "random"
    config: GroupedGemmConfig = WIDE
    scalars: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        size = f"T{self.num_tokens}k{self.top_k}E{self.num_experts}H{self.hidden_size}I{self.intermediate_size}"
        return f"{size}-{str(self.dtype)[6:]}-{self.activation}"


OAI = {"alpha": 1.702, "beta": 1.0, "limit": 0.7}
CAPS = {"beta": 0.5, "limit": 1.5, "gate_softcap": 0.5, "up_softcap": 0.75}

STAGE_CASES = [
    StageCase(1, 1, 4, 64, 64, BF16),
    StageCase(2, 2, 8, 72, 40, FP16, "gelu", bias=FP16),
    StageCase(17, 2, 4, 130, 88, BF16, "gelu_tanh", bias=FP32, weights=True, kind="out_of_range", config=SQUARE),
    StageCase(17, 4, 8, 256, 129, BF16, "swigluoai", bias=BF16, scalars=OAI),
    StageCase(63, 2, 4, 255, 64, FP32, "silu", kind="one_expert", config=SQUARE, scalars={"limit": 0.5}),
    StageCase(17, 4, 8, 136, 72, FP32, "situ", bias=FP32, scalars=CAPS),
    StageCase(9, 2, 4, 72, 40, BF16, "situ", config=SQUARE, scalars={"gate_softcap": 4.0}),
    StageCase(17, 2, 8, 72, 129, FP32, "relu2", bias=FP32, weights=True, config=SQUARE),
    # Rows end at the end of a step of the loop, and within one.
    StageCase(17, 2, 4, 96, 40, FP32, config=SHORT),
    StageCase(5, 1, 60, 128, 40, FP16, "relu2", kind="out_of_range"),
    StageCase(17, 1, 4, 64, 64, BF16, kind="nothing"),
]


def check_stages(case: StageCase, way: str) -> None:
    """Both products by tiles of sorted rows, by tiles whose rows are tokens ("direct") or by a vector a route."""
    gated, hidden, inter = case.activation != "relu2", case.hidden_size, case.intermediate_size
    halves, tokens, top_k, experts = 2 if gated else 1, case.num_tokens, case.top_k, case.num_experts
    hidden_states = rows_with_gaps(tokens, hidden, case.dtype)
    # NaN behind the last rows, so that reading past one shows.
    w13 = Guarded(experts, halves * inter, hidden, dtype=case.dtype).tensor
    w13.copy_(random(*w13.shape, dtype=case.dtype, scale=hidden**-0.5))
    if gated:
        w13[:, :inter] *= 2
    w2 = Guarded(experts, hidden, inter, dtype=case.dtype).tensor
    w2.copy_(random(*w2.shape, dtype=case.dtype, scale=0.1))
    w13_bias = w2_bias = None
    if case.bias is not None:
        w13_bias, w2_bias = (random(*w.shape[:2], dtype=case.bias) for w in (w13, w2))
    topk_weights = random(tokens, top_k, dtype=FP32).abs()
    ids = route(case.kind, tokens, top_k, experts)
    plan = make_plan(ids, None, experts, experts, case.config.block_m)
    epilogue = GateUpEpilogue(ActivationConstant(case.activation, gated, **case.scalars), w13_bias)
    first: dict[str, Any] = {"top_k": top_k, "route_factors": topk_weights if case.weights else None}
    second: dict[str, Any] = {"bias": w2_bias, "topk_weights": None if case.weights else topk_weights}
    valid = plan.route_expert >= 0
    order = plan.sorted_routes[: int(valid.sum())].long()
    config, routes, places = case.config, plan, torch.arange(len(order), device=DEVICE)
    if way != "sorted":
        routes, places = DirectRoutes(ids, None, experts, max(16, 1 << (tokens - 1).bit_length())), order
        config = GroupedGemmConfig(
            block_m=routes.block_m, block_n=32, block_k=128, group_m=1, num_warps=4, num_stages=2, mask_rows=True
        )
    # Rows of a workspace are longer than the product's.
    intermediate = Guarded(ids.numel(), inter + 8, dtype=case.dtype)
    if way == "gemv":
        gate_up_gemv(intermediate.tensor, hidden_states, w13, routes, GATE_UP_GEMV, epilogue, **first)
    else:
        gate_up_gemm(intermediate.tensor, hidden_states, w13, routes, config, epilogue, **first)
    intermediate.check()
    is_written = torch.zeros_like(valid).index_fill_(0, places, True)
    assert intermediate.tensor[~is_written].isnan().all()
    assert intermediate.tensor[:, inter:].isnan().all()
    reference = gate_up_reference(hidden_states, w13, plan, epilogue, **first)
    if len(order):
        assert relative_error(intermediate.tensor[places, :inter], reference) < bound(case.dtype, 1)

    by_route = down_reference(intermediate.tensor[places], w2, plan, **second)
    if way == "gemv":
        out = Guarded(tokens, case.hidden_size, dtype=case.dtype)
        down_gemv(out.tensor, intermediate.tensor, w2, routes, DOWN_GEMV, **second)
        expected, found = reduce_routes_reference(by_route, plan.route_expert, tokens), out.tensor
        assert len(order) or (found == 0).all()
    else:
        out = Guarded(ids.numel(), case.hidden_size, dtype=case.dtype)
        down_gemm(out.tensor, intermediate.tensor, w2, routes, config, **second)
        assert out.tensor[~valid].isnan().all()
        expected, found = by_route[valid], out.tensor[valid]
    out.check()
    if len(order):
        assert relative_error(found, expected) < bound(case.dtype, 1)


@pytest.mark.parametrize("case", STAGE_CASES, ids=str)
def test_sorted_stages(case: StageCase) -> None:
    check_stages(case, "sorted")


# As many tokens as either way ships for, and one more of the vectors: interpreted, more take seconds each.
@pytest.mark.few(most=8)
@pytest.mark.parametrize(
    ("way", "case"),
    [
        (way, dataclasses.replace(case, num_tokens=min(case.num_tokens, most)))
        for way, most in (("gemv", 2), ("direct", 16))
        for case in STAGE_CASES
    ],
    ids=str,
)
def test_unsorted_stages(case: StageCase, way: str) -> None:
    check_stages(case, way)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "dtype"),
    [(1, 1, 64, BF16), (5, 8, 130, FP32), (63, 2, 255, BF16), (2, 3, 72, FP16)],
)
def test_reduce_routes(
    num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_tokens > 5:
        monkeypatch.setattr(reduce, "_COLUMNS", 256)
    route_expert = route("out_of_range", num_tokens, top_k, 8).flatten()
    route_expert[0] = -1
    rows = random(num_tokens * top_k, hidden_size, dtype=dtype)
    rows[route_expert < 0] = math.nan
    out = Guarded(num_tokens, hidden_size, dtype=dtype)
    reduce_routes(out.tensor, rows, route_expert)
    out.check()
    reference = reduce_routes_reference(rows, route_expert, num_tokens)
    if reference.norm() == 0:
        assert (out.tensor == 0).all()
    else:
        assert relative_error(out.tensor, reference) < bound(dtype, 1)


def test_reduce_routes_by_their_weights() -> None:
    """As `reduce_sorted_rows` does, bit for bit; weights of routes that add nothing may be anything."""
    route_expert = route("out_of_range", 17, 4, 8).flatten()
    rows, weights = random(68, 72, dtype=BF16), random(17, 4, dtype=FP32)
    weights.view(-1)[route_expert < 0] = math.nan
    found, expected = torch.empty(2, 17, 72, dtype=BF16, device=rows.device)
    reduce_routes(found, rows, route_expert, topk_weights=weights)
    own_rows = torch.where(route_expert < 0, -1, torch.arange(68, device=rows.device)).int()
    reduce_sorted_rows(expected, rows, own_rows, weights)
    assert torch.equal(found, expected)


def test_order_within_an_expert_does_not_change_bits() -> None:
    """The claim of determinism rests on this, in case a faster sort is not stable."""
    ids = route("random", 33, 2, 4)
    hidden_states, w13 = random(33, 128, dtype=BF16), random(4, 128, 128, dtype=BF16, scale=0.1)
    w2 = random(4, 64, 64, dtype=BF16, scale=0.1)
    results = []
    for flip in (False, True):
        plan = make_plan(ids, None, 4, 4, 16)
        offsets = plan.expert_offsets.tolist()
        for row, end in itertools.pairwise(offsets):
            if flip:
                plan.sorted_routes[row:end] = plan.sorted_routes[row:end].flip(0)
        intermediate, rows = (Guarded(66, 64, dtype=BF16).tensor for _ in range(2))
        epilogue = GateUpEpilogue(ActivationConstant("silu", True))
        gate_up_gemm(intermediate, hidden_states, w13, plan, WIDE, epilogue, top_k=2)
        down_gemm(rows, intermediate, w2, plan, WIDE)
        results.append(rows)
    assert torch.equal(*results)


@pytest.fixture(autouse=True)
def _programs_of_few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "_COLUMNS", 64)


def rows_of_routes(num_tokens: int, top_k: int, num_valid: int) -> torch.Tensor:
    """[T * K] int32: the rows of some routes, in no order, and -1 for the others."""
    rows = torch.full((num_tokens * top_k,), -1)
    generator = torch.Generator().manual_seed(num_tokens)
    rows[torch.randperm(num_tokens * top_k, generator=generator)[:num_valid]] = torch.arange(num_valid)
    return rows.int().to(DEVICE)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "num_valid", "dtype"),
    [(1, 1, 64, 1, BF16), (5, 3, 130, 11, FP16), (7, 2, 72, 0, FP32), (3, 4, 255, 12, BF16)],
)
def test_tokens_are_copied_to_the_rows_of_all_their_routes(
    num_tokens: int, top_k: int, hidden_size: int, num_valid: int, dtype: torch.dtype
) -> None:
    tokens = random(num_tokens, hidden_size, dtype=dtype)
    route_row = rows_of_routes(num_tokens, top_k, num_valid)
    rows = torch.full((num_tokens * top_k, hidden_size), math.nan, dtype=dtype, device=DEVICE)
    copy_rows(rows, tokens, route_row)
    assert torch.equal(rows[:num_valid], copy_rows_reference(tokens, route_row))
    assert rows[num_valid:].isnan().all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "num_valid"),
    [(1, 1, 64, 1), (5, 3, 130, 11), (7, 2, 72, 0), (3, 4, 255, 12)],
)
def test_sorted_rows_are_added_with_the_weights_of_their_routes(
    num_tokens: int, top_k: int, hidden_size: int, num_valid: int, early: bool, weighted: bool
) -> None:
    route_row = rows_of_routes(num_tokens, top_k, num_valid)
    rows = random(num_tokens * top_k, hidden_size, dtype=FP32)
    rows[num_valid:] = math.nan
    weights = random(num_tokens, top_k, dtype=FP32) if weighted else None
    if weights is not None:
        # Of routes that add nothing.
        weights[(route_row < 0).view_as(weights)] = math.nan
    out = torch.full((num_tokens, hidden_size), math.nan, device=DEVICE)
    reduce_sorted_rows(out, rows, route_row, weights, early=early)
    expected = torch.zeros_like(out)
    for place, row in enumerate(route_row.tolist()):
        if row >= 0:
            token, choice = divmod(place, top_k)
            expected[token] += rows[row] * (1.0 if weights is None else weights[token, choice])
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sorted_rows", [True, False])
def test_routes_are_added_from_the_first_choice_to_the_last(sorted_rows: bool) -> None:
    """The order is promised: equal inputs give equal bits whatever the plan."""
    # In fp32 2^24 + 1 is 2^24, so the sum is 0 in this order and 2 in the other.
    rows = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)], device=DEVICE).unsqueeze(1).expand(4, 64).contiguous()
    out = torch.full((1, 64), math.nan, device=DEVICE)
    routes = torch.arange(4, dtype=torch.int32, device=DEVICE)
    if sorted_rows:
        reduce_sorted_rows(out, rows, routes, None)
    else:
        reduce_routes(out, rows, routes)
    assert (out == 0).all()


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU memory is there when it is allocated: this would take 8 GiB")
def test_rows_may_lie_2_to_the_31_elements_apart() -> None:
    out = far_apart(3, 64)
    config = GroupedGemmConfig(block_m=16, block_n=64, block_k=64, group_m=1, num_warps=4, num_stages=2)
    plan = make_plan(torch.zeros(3, 1, dtype=torch.int32), None, 1, 1, 16)
    hidden_states, w13 = random(3, 64, dtype=BF16), random(1, 64, 64, dtype=BF16)
    expected = torch.full((3, 64), math.nan, dtype=BF16)
    for each in (expected, out):
        gate_up_gemm(each, hidden_states, w13, plan, config, GateUpEpilogue(ActivationConstant("relu2")), top_k=1)
    assert torch.equal(out[2], expected[2])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("expert_map", [None, [-1, 2, -1, 0, 1, -1]], ids=["all", "map"])
def test_routes_become_local(expert_map: list[int] | None) -> None:
    # Token 1 has no local expert, token 2 one that is no id and one of another rank, token 3 the smallest id beyond.
    ids = torch.tensor([[1, 3, 4], [0, 2, 5], [-1, 4, 0], [6, 3, -7]], dtype=torch.int32, device=DEVICE)
    mapping = None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32, device=DEVICE)
    weights = random(4, 3, dtype=FP32)
    # The weight of a route without expert may be anything.
    weights[3, 0] = math.nan
    found, scaled = torch.empty_like(ids), torch.empty_like(weights)
    local_routes(found, scaled, ids, weights, mapping, 3 if expert_map is None else 6, 3)
    expected = local_expert_ids(ids, 3, mapping)
    assert torch.equal(found.long(), expected)
    assert torch.equal(scaled, torch.where(expected < 0, 0.0, weights))

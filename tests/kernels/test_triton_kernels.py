"""The Triton kernels against torch: interpreted on a CPU, compiled where there is a CUDA device.

Errors are `||out - ref|| / ||ref||` against fp32 on the same 16-bit inputs. Rounding to p bits has a relative error of
at most u = 2**-p and an rms of at most u / sqrt(3), so r independent roundings add up to u * sqrt(r / 3). The layer
rounds three times: the intermediate, a route's row, the output. Sums stay in fp32; their own error, the bound for fp32,
grows with the root of the reduced size and is about 1e-7 * sqrt(2880 / 256).
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereg.backends.triton_moe import TritonExperts
from moereg.experts import ExpertInputs
from moereg.facts import fact_reasons
from moereg.kernels.gemm.config import (
    CONFIG_RULES,
    GemmPair,
    GemvConfig,
    GemvPair,
    GroupedGemmConfig,
    select_config,
)
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.gemm.reference import down_reference, gate_up_reference
from moereg.kernels.rows import sort
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.plan import RoutePlan, SortConfig, max_num_blocks, route_workspace_numel, sort_routes_reference
from moereg.kernels.rows.reduce import ReduceConfig, reduce_routes, reduce_routes_reference, reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import SPREAD_HEAVY
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.testing.interpreter import patch_interpreter
from moereg.weights import ExpertWeights

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SM90 = Platform.from_name("cuda:sm90")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11}

ONE_LAUNCH = SortConfig()
# Small pieces, so that small inputs span several chunks and a chunk several programs.
THREE_LAUNCHES = SortConfig(single_launch_routes=0, chunk=32, routes_per_program=16, short_scan=0, num_warps=1)
TWO_LAUNCHES = dataclasses.replace(THREE_LAUNCHES, short_scan=4096, short_routes=8, short_compares=16)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE == "cpu":
        patch_interpreter()


def bound(dtype: torch.dtype, roundings: int) -> float:
    """The derivation above, with a quarter added."""
    return 2e-6 if dtype == FP32 else 1.25 * ROUNDOFF[dtype] * math.sqrt(roundings / 3)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN where either holds one."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


class Guarded:
    """A NaN-filled tensor with NaN around it that has to stay."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        self._flat = torch.full((math.prod(shape) + 512,), math.nan, dtype=dtype, device=DEVICE)
        self.tensor = self._flat[256:-256].view(shape)

    def check(self) -> None:
        assert self._flat[:256].isnan().all(), "a kernel wrote in front of its tensor"
        assert self._flat[-256:].isnan().all(), "a kernel wrote behind its tensor"


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator, device=DEVICE).mul_(scale).to(dtype)


def rows_with_gaps(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with NaN behind each."""
    padded = torch.full((num_rows, size + 24), math.nan, dtype=dtype, device=DEVICE)
    padded[:, :size] = random(num_rows, size, dtype=dtype)
    return padded[:, :size]


def route(kind: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """topk_ids of a kind of routing."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + top_k)
    if kind == "one_expert":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    elif kind == "nothing":
        ids = torch.full((num_tokens, top_k), -1)
    else:
        ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    if kind == "out_of_range":
        bad = torch.tensor([-(2**31), -1, num_experts, 2**31 - 1])
        where = torch.rand(ids.shape, generator=generator) < 0.4
        ids = torch.where(where, bad[torch.randint(4, ids.shape, generator=generator)], ids)
    return ids.int().to(DEVICE)


def make_map(num_experts: int, num_local: int) -> torch.Tensor | None:
    """A shuffled placement of some experts; the identity, given as None, where all are local."""
    if num_local == num_experts:
        return None
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(num_experts))
    mapping = torch.full((num_experts,), -1)
    mapping[order[:num_local]] = torch.arange(num_local)
    return mapping.int().to(DEVICE)


def make_plan(
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local: int,
    block_m: int,
    config: SortConfig = ONE_LAUNCH,
    tall: int = 0,
    heavy_first: int = False,
) -> RoutePlan:
    """`sort_routes` in a workspace of garbage, with a guard behind it."""
    needed = route_workspace_numel(*ids.shape, num_local, block_m, config)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    plan = sort_routes(
        ids,
        expert_map,
        num_experts,
        num_local,
        block_m,
        workspace[:needed],
        config,
        tall=tall,
        heavy_first=heavy_first,
    )
    assert (workspace[needed:] == -(2**30)).all(), "sort_routes wrote behind its workspace"
    return plan


def assert_plans_equal(plan: RoutePlan, reference: RoutePlan) -> None:
    for field in dataclasses.fields(RoutePlan):
        expected = getattr(reference, field.name)
        if isinstance(expected, torch.Tensor):
            found = getattr(plan, field.name)
            assert found.numel() >= expected.numel(), field.name
            assert torch.equal(found[: expected.numel()], expected), field.name


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


@pytest.mark.parametrize(
    "config", [ONE_LAUNCH, THREE_LAUNCHES, TWO_LAUNCHES], ids=["one_launch", "three_launches", "two_launches"]
)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_local", "block_m", "kind"),
    [
        (1, 1, 4, 4, 16, "random"),
        (1, 8, 160, 160, 16, "random"),
        (2, 3, 8, 8, 16, "out_of_range"),
        (17, 2, 4, 4, 16, "one_expert"),
        (17, 1, 4, 4, 16, "one_expert"),  # A tile more, of one row.
        (17, 4, 60, 15, 32, "random"),
        (63, 8, 160, 60, 16, "out_of_range"),
        (17, 8, 60, 60, 16, "random"),
        (63, 1, 8, 3, 64, "nothing"),
    ],
)
def test_sort_routes(
    num_tokens: int, top_k: int, num_experts: int, num_local: int, block_m: int, kind: str, config: SortConfig
) -> None:
    ids = route(kind, num_tokens, top_k, num_experts)
    expert_map = make_map(num_experts, num_local)
    plan = make_plan(ids, expert_map, num_experts, num_local, block_m, config)
    assert_plans_equal(plan, sort_routes_reference(ids, expert_map, num_experts, num_local, block_m))


def test_more_chunks_than_a_scan_adds_up_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as 32768 routes have; here of 32 routes each, 4 at a time."""
    monkeypatch.setattr(sort, "_SCAN_CHUNKS", 4)
    ids = route("random", 63, 5, 8)
    plan = make_plan(ids, None, 8, 8, 16, THREE_LAUNCHES)
    assert_plans_equal(plan, sort_routes_reference(ids, None, 8, 8, 16))


def test_sort_routes_refuses_map_entries_out_of_range() -> None:
    ids = torch.tensor([[0, 1, 2, 3]], dtype=torch.int32, device=DEVICE)
    expert_map = torch.tensor([1, 2, -7, 0], dtype=torch.int32, device=DEVICE)
    plan = make_plan(ids, expert_map, 4, 2, 16)
    assert plan.route_expert.tolist() == [1, -1, -1, 0]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_sort_routes_is_a_stable_partition_of_valid_routes(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40), "experts")
    num_local = data.draw(st.integers(1, num_experts), "local experts")
    top_k = data.draw(st.integers(1, 4), "top_k")
    block_m = data.draw(st.sampled_from([8, 16, 32]), "block_m")
    tall = data.draw(st.sampled_from([0, 64]), "tall")
    ids = data.draw(
        st.lists(st.lists(st.integers(-2, num_experts + 1), min_size=top_k, max_size=top_k), min_size=1, max_size=24),
        "ids",
    )
    locals_ = data.draw(
        st.none() | st.lists(st.integers(-1, num_local), min_size=num_experts, max_size=num_experts), "map"
    )
    config = data.draw(st.sampled_from([ONE_LAUNCH, THREE_LAUNCHES, TWO_LAUNCHES]), "config")
    expert_map = None if locals_ is None else torch.tensor(locals_, dtype=torch.int32, device=DEVICE)
    if expert_map is None:
        num_local = num_experts
    heavy_first = tall == 0 and data.draw(st.sampled_from([False, True, SPREAD_HEAVY]), "heavy_first")
    choices = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    plan = make_plan(choices, expert_map, num_experts, num_local, block_m, config, tall, heavy_first)
    assert_plans_equal(
        plan, sort_routes_reference(choices, expert_map, num_experts, num_local, block_m, 0, tall, heavy_first)
    )

    experts = plan.route_expert.tolist()
    offsets = plan.expert_offsets.tolist()
    order = plan.sorted_routes[: offsets[-1]].tolist()
    assert sorted(order) == [r for r, expert in enumerate(experts) if expert >= 0]
    assert order == sorted(order, key=lambda r: (experts[r], r))
    assert offsets[:-1] == [sum(0 <= other < expert for other in experts) for expert in range(num_local)]
    num_blocks = int(plan.num_blocks)
    assert plan.tile_counters.tolist() == [0, 0]
    assert num_blocks <= plan.max_blocks == max_num_blocks(len(experts), num_local, block_m)
    covered = []
    num_tall = int(plan.num_tall) if tall else 0
    blocks = zip(plan.block_expert.tolist(), plan.block_row.tolist(), plan.block_end.tolist(), strict=True)
    for number, (expert, row, end) in enumerate(list(blocks)[:num_blocks]):
        assert end == offsets[expert + 1]
        assert (number < num_tall) == bool(tall and end - offsets[expert] > block_m)
        covered += [(expert, r) for r in range(row, min(row + (tall if number < num_tall else block_m), end))]

    # Tall tiles, then the others, each by expert; or experts with several tiles, with one, with half of one.
    def kind(expert: int) -> int:
        several, more_than_half = experts.count(expert) > block_m, experts.count(expert) * 2 > block_m
        return 2 - several - more_than_half if heavy_first else int(not tall or not several)

    if heavy_first == SPREAD_HEAVY:
        for is_heavy in (False, True):
            own = [row for row in covered if (experts.count(row[0]) > block_m) == is_heavy]
            assert own == sorted(own)
    else:
        assert covered == sorted(covered, key=lambda row: (kind(row[0]), row))
    assert sorted(covered) == [(experts[r], place) for place, r in enumerate(order)]


# Rows of each expert: none at all, one has all, tiles that are just full, one row more and one less, and all at once.
COUNTS = {
    "no_rows": [0, 0, 0],
    "one_has_all": [0, 0, 150, 0],
    "just_full": [16, 64, 128, 16],
    "one_more": [17, 65, 1, 129],
    "one_less": [15, 63, 127],
    "all_low": [3, 16, 0, 9],
    "all_tall": [17, 40, 200],
    "mixed": [1, 100, 0, 16, 17, 64, 65, 2, 0, 33],
}


@pytest.mark.parametrize(
    "config", [ONE_LAUNCH, THREE_LAUNCHES, TWO_LAUNCHES], ids=["one_launch", "three_launches", "two_launches"]
)
@pytest.mark.parametrize("kind", COUNTS)
def test_tall_tiles_come_first(kind: str, config: SortConfig) -> None:
    """With routes of other ranks between, and local experts in another order than their ids."""
    counts = COUNTS[kind]
    num_local = len(counts)
    mapping = [*range(num_local - 1, -1, -1), -1]
    ids = [num_local] * 5 + [num_local - 1 - e for e, count in enumerate(counts) for _ in range(count)]
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    expert_map = torch.tensor(mapping, dtype=torch.int32, device=DEVICE)
    topk_ids = torch.tensor(ids, dtype=torch.int32)[order].unsqueeze(1).to(DEVICE)
    plan = make_plan(topk_ids, expert_map, num_local + 1, num_local, 16, config, tall=64)
    assert_plans_equal(plan, sort_routes_reference(topk_ids, expert_map, num_local + 1, num_local, 16, tall=64))
    starts = [sum(counts[:e]) for e in range(num_local)]
    tall = [(e, starts[e] + i) for e, count in enumerate(counts) if count > 16 for i in range(0, count, 64)]
    low = [(e, starts[e]) for e, count in enumerate(counts) if 0 < count <= 16]
    used = int(plan.num_blocks)
    assert int(plan.num_tall) == len(tall)
    assert list(zip(plan.block_expert[:used].tolist(), plan.block_row[:used].tolist(), strict=True)) == tall + low


@pytest.mark.parametrize(
    ("heavy", "light", "expected"),
    [
        (0, 3, "LLL"),
        (3, 0, "HHH"),
        (2, 2, "LHLH"),
        (2, 4, "LHLLHL"),
        (4, 2, "HLHHLH"),
        (3, 7, "LHLLLHLLHL"),
        (7, 1, "HHHLHHHH"),
    ],
)
def test_heavy_tiles_are_spread_evenly(heavy: int, light: int, expected: str) -> None:
    counts = [heavy * 16 if heavy > 1 else 0] + [16] * light
    ids = torch.tensor([e for e, count in enumerate(counts) for _ in range(count)], dtype=torch.int32, device=DEVICE)
    plan = make_plan(ids.unsqueeze(1), None, len(counts), len(counts), 16, heavy_first=SPREAD_HEAVY)
    experts, rows = (tensor[: int(plan.num_blocks)].tolist() for tensor in (plan.block_expert, plan.block_row))
    assert "".join("L" if expert else "H" for expert in experts) == expected
    assert [row for expert, row in zip(experts, rows, strict=True) if not expert] == list(range(0, 16 * heavy, 16))


@pytest.mark.parametrize(
    ("num_routes", "num_experts", "num_launches"),
    [(4096, 128, 1), (4097, 128, 2), (8192, 128, 2), (8193, 8, 3), (8192, 129, 3)],
)
def test_few_routes_are_sorted_in_few_launches(
    num_routes: int, num_experts: int, num_launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[object] = []
    monkeypatch.setattr(sort, "launch", lambda kernel, *_, **__: launched.append(kernel))
    ids = torch.zeros(num_routes, 1, dtype=torch.int32)
    workspace = torch.empty(route_workspace_numel(num_routes, 1, num_experts, 64), dtype=torch.int32)
    sort_routes(ids, None, num_experts, num_experts, 64, workspace)
    assert len(launched) == num_launches


def test_route_workspace_grows_with_tokens() -> None:
    sizes = [route_workspace_numel(num_tokens, 8, 60, 16) for num_tokens in range(1, 2000)]
    assert sizes == sorted(sizes)
    # Across a change of the configuration with the number of tokens, the smallest tile bounds all others.
    assert route_workspace_numel(100, 8, 60, 128) <= route_workspace_numel(100, 8, 60, 16)


WIDE = GroupedGemmConfig(block_m=16, block_n=128, block_k=64, group_m=1, num_warps=4, num_stages=2)
# Steps of half of what weights are padded to, as 32-bit operands have them.
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

STAGE_CASES = [
    StageCase(1, 1, 4, 64, 64, BF16),
    StageCase(2, 2, 8, 72, 40, FP16, "gelu", bias=FP16),
    StageCase(17, 2, 4, 130, 88, BF16, "gelu_tanh", bias=FP32, weights=True, kind="out_of_range", config=SQUARE),
    StageCase(17, 4, 8, 256, 129, BF16, "swigluoai", bias=BF16, scalars=OAI),
    StageCase(63, 2, 4, 255, 64, FP32, "silu", kind="one_expert", config=SQUARE, scalars={"limit": 0.5}),
    StageCase(17, 2, 8, 72, 129, FP32, "relu2", bias=FP32, weights=True, config=SQUARE),
    # Rows end within the padding of the weights, and at the end of a step of the loop.
    StageCase(17, 2, 4, 96, 40, FP32, config=SHORT),
    StageCase(5, 1, 60, 128, 40, FP16, "relu2", kind="out_of_range"),
    StageCase(17, 1, 4, 64, 64, BF16, kind="nothing"),
]


@pytest.mark.parametrize("case", STAGE_CASES, ids=str)
def test_gate_up_gemm(case: StageCase) -> None:
    gated = case.activation != "relu2"
    halves = 2 if gated else 1
    columns, depth = -(-case.intermediate_size // 64) * 64, -(-case.hidden_size // 64) * 64
    hidden_states = rows_with_gaps(case.num_tokens, case.hidden_size, case.dtype)
    w13 = torch.zeros(case.num_experts, halves * columns, depth, dtype=case.dtype, device=DEVICE)
    used = halves * case.intermediate_size
    scale = case.hidden_size**-0.5
    w13[:, :used, : case.hidden_size] = random(case.num_experts, used, case.hidden_size, dtype=case.dtype, scale=scale)
    if gated:
        w13[:, 0::2] *= 2
    bias = None
    if case.bias is not None:
        bias = torch.zeros(case.num_experts, halves * columns, dtype=case.bias, device=DEVICE)
        bias[:, :used] = random(case.num_experts, used, dtype=case.bias)
    topk_weights = random(case.num_tokens, case.top_k, dtype=FP32).abs() if case.weights else None
    ids = route(case.kind, case.num_tokens, case.top_k, case.num_experts)
    plan = make_plan(ids, None, case.num_experts, case.num_experts, case.config.block_m)
    epilogue = GateUpEpilogue(case.activation, gated, **case.scalars, bias=bias)
    keywords: dict[str, Any] = {
        "top_k": case.top_k,
        "topk_weights": topk_weights,
        "apply_router_weight_on_input": case.weights,
    }
    out = Guarded(ids.numel(), columns, dtype=case.dtype)
    gate_up_gemm(out.tensor, hidden_states, w13, plan, case.config, epilogue, **keywords)
    out.check()
    reference = gate_up_reference(hidden_states, w13, plan, epilogue, **keywords)
    valid = reference.shape[0]
    assert out.tensor[valid:].isnan().all()
    assert (out.tensor[:valid, case.intermediate_size :] == 0).all()
    if valid:
        assert relative_error(out.tensor[:valid], reference) < bound(case.dtype, 1)


@pytest.mark.parametrize("case", STAGE_CASES, ids=str)
def test_down_gemm(case: StageCase) -> None:
    columns = -(-case.intermediate_size // 64) * 64
    ids = route(case.kind, case.num_tokens, case.top_k, case.num_experts)
    plan = make_plan(ids, None, case.num_experts, case.num_experts, case.config.block_m)
    valid = int(plan.expert_offsets[-1])
    intermediate = torch.full((ids.numel(), columns), math.nan, dtype=case.dtype, device=DEVICE)
    intermediate[:valid] = 0
    intermediate[:valid, : case.intermediate_size] = random(valid, case.intermediate_size, dtype=case.dtype)
    w2 = torch.zeros(case.num_experts, case.hidden_size, columns, dtype=case.dtype, device=DEVICE)
    w2[:, :, : case.intermediate_size] = random(
        case.num_experts, case.hidden_size, case.intermediate_size, dtype=case.dtype, scale=0.1
    )
    bias = random(case.num_experts, case.hidden_size, dtype=case.bias) if case.bias is not None else None
    topk_weights = None if case.weights else random(case.num_tokens, case.top_k, dtype=FP32).abs()
    out = Guarded(ids.numel(), case.hidden_size, dtype=case.dtype)
    down_gemm(out.tensor, intermediate, w2, plan, case.config, bias=bias, topk_weights=topk_weights)
    out.check()
    reference = down_reference(intermediate, w2, plan, bias=bias, topk_weights=topk_weights)
    written = plan.route_expert >= 0
    assert out.tensor[~written].isnan().all()
    if valid:
        assert relative_error(out.tensor[written], reference[written]) < bound(case.dtype, 1)


def test_down_gemm_writes_another_dtype() -> None:
    """The buffer's dtype is the caller's choice: fp32 rows of bf16 products are not rounded."""
    ids = route("random", 5, 2, 4)
    plan = make_plan(ids, None, 4, 4, 16)
    intermediate, w2 = random(10, 64, dtype=BF16), random(4, 64, 64, dtype=BF16)
    out = Guarded(10, 64, dtype=FP32)
    down_gemm(out.tensor, intermediate, w2, plan, WIDE)
    assert relative_error(out.tensor, down_reference(intermediate, w2, plan)) < bound(FP32, 0)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "hidden_size", "dtype"),
    [(1, 1, 64, BF16), (5, 8, 130, FP32), (63, 2, 255, BF16), (2, 3, 72, FP16)],
)
def test_reduce_routes(num_tokens: int, top_k: int, hidden_size: int, dtype: torch.dtype) -> None:
    route_expert = route("out_of_range", num_tokens, top_k, 8).flatten()
    route_expert[0] = -1
    rows = random(num_tokens * top_k, hidden_size, dtype=dtype)
    rows[route_expert < 0] = math.nan
    out = Guarded(num_tokens, hidden_size, dtype=dtype)
    reduce_routes(out.tensor, rows, route_expert, ReduceConfig(block=256 if num_tokens > 5 else 64))
    out.check()
    reference = reduce_routes_reference(rows, route_expert, num_tokens)
    if reference.norm() == 0:
        assert (out.tensor == 0).all()
    else:
        assert relative_error(out.tensor, reference) < bound(dtype, 1)


def test_a_sorted_route_that_adds_nothing_may_have_any_weight() -> None:
    """No row of it exists, and routers leave any number beside an id that names no expert."""
    route_row = torch.tensor([2, -1, 0, 1, -1, -1], dtype=torch.int32, device=DEVICE)
    weights = torch.tensor([[0.5, math.nan], [2.0, 1.0], [math.inf, math.nan]], device=DEVICE)
    rows = random(6, 72, dtype=BF16)
    rows[3:] = math.nan
    out = Guarded(3, 72, dtype=BF16)
    reduce_sorted_rows(out.tensor, rows, route_row, weights)
    out.check()
    expected = torch.stack([0.5 * rows[2].float(), 2 * rows[0].float() + rows[1].float(), rows.new_zeros(72).float()])
    assert torch.equal(out.tensor, expected.to(BF16))


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
        gate_up_gemm(intermediate, hidden_states, w13, plan, WIDE, GateUpEpilogue("silu", True), top_k=2)
        down_gemm(rows, intermediate, w2, plan, WIDE)
        results.append(rows)
    assert torch.equal(*results)


# As many tokens as either way ships for, and one more of the vectors: interpreted, more take seconds each.
@pytest.mark.parametrize(
    ("way", "case"),
    [
        (way, dataclasses.replace(case, num_tokens=min(case.num_tokens, most)))
        for way, most in (("gemv", 2), ("direct", 16))
        for case in STAGE_CASES
    ],
    ids=str,
)
def test_unsorted_stages_agree_with_sorted_ones(case: StageCase, way: str) -> None:
    """A vector a route, and tiles whose rows are tokens, against the references of the sorted stages."""
    gated = case.activation != "relu2"
    columns, depth = -(-case.intermediate_size // 64) * 64, -(-case.hidden_size // 64) * 64
    rows, tokens, top_k, experts = (2 if gated else 1) * columns, case.num_tokens, case.top_k, case.num_experts
    hidden_states = rows_with_gaps(tokens, case.hidden_size, case.dtype)
    w13 = torch.zeros(experts, rows, depth, dtype=case.dtype, device=DEVICE)
    w13[:, :, : case.hidden_size] = random(
        experts, rows, case.hidden_size, dtype=case.dtype, scale=case.hidden_size**-0.5
    )
    w2 = random(experts, case.hidden_size, columns, dtype=case.dtype, scale=0.1)
    w13_bias = random(experts, rows, dtype=case.bias) if case.bias is not None else None
    w2_bias = random(experts, case.hidden_size, dtype=case.bias) if case.bias is not None else None
    topk_weights = random(tokens, top_k, dtype=FP32).abs()
    ids = route(case.kind, tokens, top_k, experts)
    plan = make_plan(ids, None, experts, experts, 16)
    epilogue = GateUpEpilogue(case.activation, gated, **case.scalars, bias=w13_bias)
    both: dict[str, Any] = {"topk_weights": topk_weights, "apply_router_weight_on_input": case.weights}
    intermediate = Guarded(ids.numel(), columns, dtype=case.dtype)
    valid = plan.route_expert >= 0
    order = plan.sorted_routes[: int(valid.sum())].long()
    direct = DirectRoutes(ids, None, experts, max(16, 1 << (tokens - 1).bit_length()))
    if way == "gemv":
        gate_up_gemv(intermediate.tensor, hidden_states, w13, direct, GATE_UP_GEMV, epilogue, **both)
    else:
        config = GroupedGemmConfig(
            block_m=direct.block_m, block_n=32, block_k=128, group_m=1, num_warps=4, num_stages=2, mask_rows=True
        )
        gate_up_gemm(intermediate.tensor, hidden_states, w13, direct, config, epilogue, top_k=top_k, **both)
    intermediate.check()
    assert intermediate.tensor[~valid].isnan().all()
    reference = gate_up_reference(hidden_states, w13, plan, epilogue, top_k=top_k, **both)
    if len(order):
        assert relative_error(intermediate.tensor[order], reference) < bound(case.dtype, 1)

    by_route = down_reference(intermediate.tensor[order], w2, plan, bias=w2_bias, **both)
    if way == "gemv":
        out = Guarded(tokens, case.hidden_size, dtype=case.dtype)
        down_gemv(out.tensor, intermediate.tensor, w2, direct, DOWN_GEMV, bias=w2_bias, **both)
        out.check()
        expected = reduce_routes_reference(by_route, plan.route_expert, tokens)
        if not len(order):
            assert (out.tensor == 0).all()
            return
        assert relative_error(out.tensor, expected) < bound(case.dtype, 1)
    else:
        out = Guarded(ids.numel(), case.hidden_size, dtype=case.dtype)
        down_gemm(out.tensor, intermediate.tensor, w2, direct, config, bias=w2_bias, **both)
        out.check()
        assert out.tensor[~valid].isnan().all()
        if len(order):
            assert relative_error(out.tensor[valid], by_route[valid]) < bound(case.dtype, 1)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_config_rules_cover_every_number_of_rows(element_bytes: int) -> None:
    for tokens, rows in ((1, 0.01), (1, 2.0), (2, 0.01), (16, 16), (17, 17), (100, 64), (10**6, 1e9)):
        configs = select_config(tokens, rows, element_bytes)
        if isinstance(configs, GemvPair):
            assert tokens == 1
            continue
        assert configs.gate_up.block_m == configs.down.block_m
        assert configs.sort_routes or tokens <= configs.gate_up.block_m


@pytest.mark.parametrize("shared_bytes", [64 * 1024, 99 * 1024, 163 * 1024, 227 * 1024])
def test_config_pipelines_fit_shared_memory(shared_bytes: int) -> None:
    for rule in CONFIG_RULES:
        tokens = int(min(rule.max_tokens, 10**6))
        configs = select_config(tokens, rule.max_rows_per_expert, rule.element_bytes, shared_bytes)
        if not isinstance(configs, GemmPair):
            continue
        for config in (configs.gate_up, configs.down):
            stage = (config.block_m + config.block_n) * config.block_k * rule.element_bytes
            assert config.num_stages * stage <= shared_bytes


@dataclasses.dataclass
class Layer:
    """A layer with its inputs; gate and up differ in scale, so that a swap shows."""

    problem: MoEProblem
    num_tokens: int
    kind: str = "random"

    def __post_init__(self) -> None:
        problem = self.problem
        experts, hidden, inner = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
        halves, dtype = problem.activation.num_halves, problem.torch_dtype
        w13 = random(experts, halves * inner, hidden, dtype=dtype, scale=hidden**-0.5)
        w13[:, :inner] *= 3
        self.weights = ExpertWeights(
            w13=w13,
            w2=random(experts, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=1),
            w13_bias=random(experts, halves * inner, dtype=dtype, seed=2) if problem.has_bias else None,
            w2_bias=random(experts, hidden, dtype=dtype, seed=3) if problem.has_bias else None,
        )
        self.hidden_states = rows_with_gaps(self.num_tokens, hidden, dtype)
        self.topk_ids = route(self.kind, self.num_tokens, problem.top_k, problem.num_experts)
        self.topk_weights = random(self.num_tokens, problem.top_k, dtype=FP32, seed=4).abs() + 0.1
        self.expert_map = make_map(problem.num_experts, experts)

    @property
    def inputs(self) -> ExpertInputs:
        return ExpertInputs(self.hidden_states, self.topk_weights, self.topk_ids, expert_map=self.expert_map)

    def run(self, weights: ExpertWeights | None = None) -> torch.Tensor:
        """Runs the backend on poisoned buffers; checks that nothing around them is written and no input changes."""
        experts = TritonExperts(self.problem, SM90)
        assert fact_reasons(experts.facts, self.problem) == []
        assert experts.unsupported_reasons(self.problem, SM90) == []
        permuted = experts.permute_weights(weights or self.weights, self.problem)
        shapes = experts.workspace_shapes(self.problem, self.num_tokens)
        dtype = self.problem.torch_dtype
        out = Guarded(self.num_tokens, self.problem.hidden_size, dtype=dtype)
        workspaces = [Guarded(*shape, dtype=dtype) for shape in shapes]
        before = self.hidden_states.clone(), self.topk_ids.clone(), self.topk_weights.clone()
        experts.apply(out.tensor, self.inputs, permuted, *(workspace.tensor for workspace in workspaces))
        for guarded in (out, *workspaces):
            guarded.check()
        after = self.hidden_states, self.topk_ids, self.topk_weights
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return out.tensor

    def reference(self) -> torch.Tensor:
        """The layer in fp32 from canonical weights, expert by expert."""
        problem, weights = self.problem, self.weights
        out = torch.zeros(self.num_tokens, problem.hidden_size, device=DEVICE)
        for expert in range(problem.num_experts):
            local = expert if self.expert_map is None else int(self.expert_map[expert])
            tokens, choices = torch.where(self.topk_ids == expert)
            if local < 0 or not tokens.numel():
                continue
            x, scale = self.hidden_states[tokens].float(), self.topk_weights[tokens, choices, None]
            if problem.apply_router_weight_on_input:
                x = x * scale
            x = x @ weights.w13[local].float().T
            if weights.w13_bias is not None:
                x += weights.w13_bias[local].float()
            y = problem.activation(x) @ weights.w2[local].float().T
            if weights.w2_bias is not None:
                y += weights.w2_bias[local].float()
            out.index_add_(0, tokens, y if problem.apply_router_weight_on_input else y * scale)
        return out

    def check(self) -> None:
        """Output against reference."""
        error = relative_error(self.run(), self.reference())
        assert error < bound(self.problem.torch_dtype, 3), error


def make_problem(
    num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, **keywords: Any
) -> MoEProblem:
    return MoEProblem(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        graph_capture=True,
        deterministic=True,
        **keywords,
    )


LAYERS = {
    "one_token": Layer(make_problem(4, 2, 64, 64, BF16), 1),
    "odd_sizes": Layer(make_problem(4, 2, 255, 129, BF16), 2),
    "fp32": Layer(make_problem(8, 3, 130, 88, FP32, has_bias=True, activation="gelu"), 9),
    "fp16": Layer(make_problem(8, 3, 72, 40, FP16, activation="gelu_tanh", has_bias=True), 17),
    "swigluoai": Layer(make_problem(4, 2, 130, 88, BF16, activation="swigluoai", has_bias=True), 17),
    "relu2": Layer(make_problem(8, 2, 72, 40, BF16, activation="relu2", has_bias=True), 17),
    "silu_limit": Layer(make_problem(4, 2, 64, 64, FP16, activation="silu(limit=0.5)"), 17),
    "expert_map": Layer(make_problem(60, 8, 64, 40, BF16, num_local_experts=15, placement="map"), 9),
    "out_of_range": Layer(make_problem(160, 8, 64, 40, BF16), 2, "out_of_range"),
    "one_expert": Layer(make_problem(8, 1, 72, 64, FP16), 63, "one_expert"),
    "many_rows": Layer(make_problem(4, 2, 64, 64, BF16), 63),
    "weight_on_input": Layer(make_problem(4, 1, 130, 64, BF16, apply_router_weight_on_input=True, has_bias=True), 17),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    LAYERS[name].check()


def test_layer_without_valid_routes_is_zero() -> None:
    assert (Layer(make_problem(4, 2, 72, 40, BF16, has_bias=True), 3, "nothing").run() == 0).all()


def test_layer_repeats_its_bits() -> None:
    layer = LAYERS["silu_limit"]
    assert torch.equal(layer.run(), layer.run())


@pytest.mark.parametrize("fault", ["gate_up_swapped", "bias_dropped", "expert_shifted", "row_shifted"])
def test_planted_faults_show(fault: str) -> None:
    layer = Layer(make_problem(4, 2, 64, 64, BF16, has_bias=True), 9)
    weights = layer.weights
    inner = layer.problem.intermediate_size
    assert weights.w13_bias is not None
    broken = {
        "gate_up_swapped": {"w13": weights.w13.roll(inner, 1)},
        "bias_dropped": {"w13_bias": torch.zeros_like(weights.w13_bias)},
        "expert_shifted": {"w2": weights.w2.roll(1, 0)},
        "row_shifted": {"w13": weights.w13.roll(1, 1)},
    }[fault]
    error = relative_error(layer.run(dataclasses.replace(weights, **broken)), layer.reference())
    assert error > 20 * bound(BF16, 3)


def test_permute_keeps_views_where_nothing_changes_and_inputs_as_they_are() -> None:
    layer = Layer(make_problem(4, 2, 64, 128, BF16, activation="relu2", has_bias=True), 1)
    permuted = TritonExperts(layer.problem, SM90).permute_weights(layer.weights, layer.problem)
    assert permuted["w13"].data_ptr() == layer.weights.w13.data_ptr()
    assert permuted["w2"].data_ptr() == layer.weights.w2.data_ptr()

    layer = Layer(make_problem(4, 2, 72, 40, BF16, has_bias=True), 1)
    before = {name: tensor.clone() for name, tensor in layer.weights.tensors().items()}
    permuted = TritonExperts(layer.problem, SM90).permute_weights(layer.weights, layer.problem)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.weights.tensors().items())
    assert permuted["w13"].shape == (4, 128, 128)
    assert permuted["w2"].shape == (4, 72, 64)
    assert torch.equal(permuted["w13"][:, 0:80:2, :72], layer.weights.w13[:, :40])
    assert torch.equal(permuted["w13"][:, 1:80:2, :72], layer.weights.w13[:, 40:])
    assert (permuted["w13"][:, 80:] == 0).all()
    assert (permuted["w13"][:, :, 72:] == 0).all()
    assert layer.weights.w13_bias is not None
    assert torch.equal(permuted["w13_bias"][:, 1:80:2], layer.weights.w13_bias[:, 40:])


def test_workspaces_grow_with_tokens() -> None:
    problem = make_problem(64, 8, 64, 40, BF16)
    experts = TritonExperts(problem, SM90)
    sizes = [experts.workspace_shapes(problem, num_tokens) for num_tokens in range(1, 3000, 7)]
    for index in (0, 1):
        numels = [math.prod(shapes[index]) for shapes in sizes]
        assert numels == sorted(numels)


def test_backend_refuses_what_overflows_its_offsets() -> None:
    problem = make_problem(4, 2, 32768, 40000, BF16)
    (reason,) = TritonExperts.unsupported_reasons(problem, SM90)
    assert reason.startswith("requires fewer than 2**31")


def test_device_types_follow_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert TritonExperts.device_types(SM90) == ("cuda",)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonExperts.device_types(SM90) == ("cuda", "cpu")


on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size", "dtype", "keywords"),
    [
        (1, 128, 8, 2048, 768, BF16, {}),
        (16, 128, 8, 2048, 768, BF16, {}),
        (4096, 128, 8, 2048, 768, BF16, {}),
        (4096, 32, 4, 2880, 2880, BF16, {"activation": "swigluoai", "has_bias": True}),
        (63, 64, 8, 2880, 704, FP16, {}),
        (700, 60, 4, 2048, 1408, BF16, {"activation": "gelu_tanh"}),
        (4096, 64, 6, 2688, 1856, BF16, {"activation": "relu2"}),
        (4096, 16, 2, 511, 511, BF16, {"has_bias": True, "activation": "gelu"}),
        (333, 16, 2, 511, 704, FP32, {"has_bias": True}),
        (4096, 16, 2, 1024, 704, FP32, {}),
        (63, 8, 8, 255, 129, BF16, {}),
        (4096, 512, 10, 2048, 512, BF16, {}),
        (4096, 512, 8, 1024, 511, BF16, {"num_local_experts": 64, "placement": "map"}),
        (512, 16, 1, 5120, 1408, BF16, {"apply_router_weight_on_input": True}),
    ],
)
def test_layer_large(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> None:
    problem = make_problem(num_experts, top_k, hidden_size, intermediate_size, dtype, **keywords)
    layer = Layer(problem, num_tokens, "random" if num_tokens != 700 else "out_of_range")
    layer.check()
    assert torch.equal(layer.run(), layer.run())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("num_tokens", "kind"), [(512, "random"), (513, "random"), (16384, "one_expert")])
def test_sort_routes_large(num_tokens: int, kind: str) -> None:
    ids = route(kind, num_tokens, 8, 512)
    plan = make_plan(ids, None, 512, 512, 16)
    assert_plans_equal(plan, sort_routes_reference(ids, None, 512, 512, 16))


@pytest.mark.gpu
@on_gpu
def test_layer_replays_in_a_graph_without_synchronizing() -> None:
    problem = make_problem(16, 4, 256, 128, BF16)
    layer = Layer(problem, 24)
    experts = TritonExperts(problem, SM90)
    permuted = experts.permute_weights(layer.weights, problem)
    out = torch.empty(24, 256, dtype=BF16, device=DEVICE)
    workspaces = [torch.empty(shape, dtype=BF16, device=DEVICE) for shape in experts.workspace_shapes(problem, 24)]
    inputs = layer.inputs
    experts.apply(out, inputs, permuted, *workspaces)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts.apply(out, inputs, permuted, *workspaces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for seed in (5, 6):
        # Same storage, other contents: the graph must follow the routing, which only the device knows.
        layer.hidden_states.copy_(random(24, 256, dtype=BF16, seed=seed))
        layer.topk_ids.copy_(route("random", 24, 4, 16).flip(0).roll(seed, 0))
        out.fill_(math.nan)
        graph.replay()
        assert relative_error(out, layer.reference()) < bound(BF16, 3)

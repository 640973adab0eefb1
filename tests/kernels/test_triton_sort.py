"""Routes sorted by expert, and the tiles that are laid over them, against the plan that torch makes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moereg.kernels.rows import sort
from moereg.kernels.rows.block_map import BlockMap, batch_workspace_numel
from moereg.kernels.rows.plan import SortConfig, max_num_blocks, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import SPREAD_HEAVY
from tests.kernels.references import block_map_reference, sort_routes_reference
from tests.kernels.triton_cases import (
    DEVICE,
    ONE_LAUNCH,
    THREE_LAUNCHES,
    TWO_LAUNCHES,
    assert_plans_equal,
    make_batched_plan,
    make_map,
    make_plan,
    on_gpu,
    route,
)

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


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
        (24, 4, 8, 8, 16, "random"),  # Three whole chunks, of which a power of two is read.
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
        st.none() | st.lists(st.integers(-7, num_local), min_size=num_experts, max_size=num_experts), "map"
    )
    config = data.draw(st.sampled_from([ONE_LAUNCH, THREE_LAUNCHES, TWO_LAUNCHES]), "config")
    expert_map = None if locals_ is None else torch.tensor(locals_, dtype=torch.int32, device=DEVICE)
    if expert_map is None:
        num_local = num_experts
    heavy_first = tall == 0 and data.draw(st.sampled_from([False, True, SPREAD_HEAVY]), "heavy_first")
    choices = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    plan = make_plan(choices, expert_map, num_experts, num_local, block_m, config, tall=tall, heavy_first=heavy_first)
    assert_plans_equal(
        plan, sort_routes_reference(choices, expert_map, num_experts, num_local, block_m, 0, tall, heavy_first)
    )

    experts = plan.route_expert.tolist()
    offsets = plan.expert_offsets.tolist()
    order = plan.sorted_routes[: offsets[-1]].tolist()
    assert sorted(order) == [r for r, expert in enumerate(experts) if expert >= 0]
    assert order == sorted(order, key=lambda r: (experts[r], r))
    assert offsets[:-1] == [sum(0 <= other < expert for other in experts) for expert in range(num_local)]
    # The property below says what the reference's tiles are.
    assert plan.tile_counters.tolist() == [0, 0]
    assert plan.max_blocks == max_num_blocks(len(experts), num_local, block_m) >= int(plan.num_blocks)


def tiles(plan: BlockMap) -> list[tuple[int, int, int]]:
    """(expert, first row, end of the expert's rows) of the tiles in use."""
    used = int(plan.num_blocks)
    assert plan.tile_counters.tolist() == [0, 0]
    columns = (plan.block_expert[:used], plan.block_row[:used], plan.block_end[:used])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_batched_plan_covers_every_valid_row_once(data: st.DataObject) -> None:
    max_tokens = data.draw(st.integers(1, 200), "max_tokens")
    block_m = data.draw(st.sampled_from([16, 32, 64]), "block_m")
    slack, tall = data.draw(st.sampled_from([(0, 0), (8, 0), (32, 0), (0, 64), (0, 128)]), "slack and tall")
    assume(tall == 0 or tall > block_m)
    # Counts beyond the room for an expert are wrong, and must not lead out of its rows.
    count = st.integers(-3, max_tokens + 3) | st.sampled_from([0, max_tokens, -(2**31), 2**31 - 1])
    counts = data.draw(st.lists(count, min_size=1, max_size=40), "counts")
    heavy_first = tall == 0 and data.draw(st.sampled_from([False, True, SPREAD_HEAVY]), "heavy_first")
    plan = make_batched_plan(counts, max_tokens, block_m, slack, tall, heavy_first)
    found = tiles(plan)
    assert len(found) <= plan.max_blocks
    rows = []
    held = [min(max(count, 0), max_tokens) for count in counts]
    num_tall = int(plan.num_tall) if tall else 0
    for place, (expert, row, end) in enumerate(found):
        last = expert not in {other for other, _, _ in found[place + 1 :]}
        height = tall if place < num_tall else block_m
        assert (place < num_tall) == (tall > 0 and held[expert] > block_m)
        assert end - row <= height + slack or not last
        rows += [(expert, r) for r in range(row, end if last else row + height)]
    order = list(range(len(held)))
    if heavy_first == SPREAD_HEAVY:
        rows.sort()
    elif heavy_first:
        # More than one tile, then one, then half of one at most.
        order.sort(key=lambda e: 0 if held[e] > block_m + slack else 1 if held[e] > block_m / 2 else 2)
    assert (rows if tall == 0 else sorted(rows)) == [(e, e * max_tokens + i) for e in order for i in range(held[e])]
    offsets = torch.arange(len(counts)) * max_tokens
    assert found == tiles(block_map_reference(torch.tensor(held), offsets, block_m, slack, tall, heavy_first))


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


def test_batch_workspace_grows_with_tokens() -> None:
    sizes = [batch_workspace_numel(60, max_tokens, 16) for max_tokens in range(1, 2000)]
    assert sizes == sorted(sizes)
    assert batch_workspace_numel(60, 100, 128) <= batch_workspace_numel(60, 100, 16)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("num_tokens", "kind"), [(512, "random"), (513, "random"), (16384, "one_expert")])
def test_sort_routes_large(num_tokens: int, kind: str) -> None:
    ids = route(kind, num_tokens, 8, 512)
    plan = make_plan(ids, None, 512, 512, 16)
    assert_plans_equal(plan, sort_routes_reference(ids, None, 512, 512, 16))

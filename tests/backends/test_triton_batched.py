"""The batched format of the Triton backend against torch: interpreted on a CPU, compiled where there is a CUDA device.

Tolerances as in `triton_cases`; two roundings, of the intermediate and of the output.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from moereg.kernels.rows.block_map import BlockMap, batch_workspace_numel, plan_batches
from moereg.kernels.sizes import SPREAD_HEAVY
from tests.kernels.references import block_map_reference
from tests.kernels.triton_cases import DEVICE


def make_plan(
    counts: list[int], max_tokens: int, block_m: int, slack: int = 0, tall: int = 0, heavy_first: int = False
) -> BlockMap:
    """`plan_batches` in a workspace of garbage, with a guard behind it."""
    needed = batch_workspace_numel(len(counts), max_tokens, block_m)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    expert_num_tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    plan = plan_batches(
        expert_num_tokens, max_tokens, block_m, workspace[:needed], slack, tall=tall, heavy_first=heavy_first
    )
    assert (workspace[needed:] == -(2**30)).all(), "plan_batches wrote behind its workspace"
    assert expert_num_tokens.tolist() == counts
    return plan


def tiles(plan: BlockMap) -> list[tuple[int, int, int]]:
    """(expert, first row, end of the expert's rows) of the tiles in use."""
    used = int(plan.num_blocks)
    assert plan.tile_counters.tolist() == [0, 0]
    columns = (plan.block_expert[:used], plan.block_row[:used], plan.block_end[:used])
    return list(zip(*(column.tolist() for column in columns), strict=True))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_plan_covers_every_valid_row_once(data: st.DataObject) -> None:
    max_tokens = data.draw(st.integers(1, 200), "max_tokens")
    block_m = data.draw(st.sampled_from([16, 32, 64]), "block_m")
    slack, tall = data.draw(st.sampled_from([(0, 0), (8, 0), (32, 0), (0, 64), (0, 128)]), "slack and tall")
    assume(tall == 0 or tall > block_m)
    # Counts beyond the room for an expert are wrong, and must not lead out of its rows.
    count = st.integers(-3, max_tokens + 3) | st.sampled_from([0, max_tokens, -(2**31), 2**31 - 1])
    counts = data.draw(st.lists(count, min_size=1, max_size=40), "counts")
    heavy_first = tall == 0 and data.draw(st.sampled_from([False, True, SPREAD_HEAVY]), "heavy_first")
    plan = make_plan(counts, max_tokens, block_m, slack, tall, heavy_first)
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


def test_plan_workspace_grows_with_tokens() -> None:
    sizes = [batch_workspace_numel(60, max_tokens, 16) for max_tokens in range(1, 2000)]
    assert sizes == sorted(sizes)
    assert batch_workspace_numel(60, 100, 128) <= batch_workspace_numel(60, 100, 16)

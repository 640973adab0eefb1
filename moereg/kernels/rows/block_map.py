"""Maps tiles of rows to experts, on the device, in Triton: how a grouped GEMM finds its rows.

It also makes the map of the batched format, whose rows are already ordered by expert: [E, max_T, H], with a count per
expert. Routes must be sorted first; see `rows.sort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from moereg.kernels.launch.overlap import release_next
from moereg.kernels.launch.replay import launch
from moereg.kernels.sizes import FLAG_WORDS, SPREAD_HEAVY

# Every piece of a workspace starts at a multiple of this many int32, so that pointer alignment, and with it the
# compiled variant of a kernel, does not depend on the number of tokens.
_ALIGN = 32

# Tile counters, which follow the number of tiles.
_NUM_COUNTERS = tl.constexpr(2)

NUM_COUNTS = 2 + _NUM_COUNTERS.value
"""int32 words of the piece that holds the number of tiles, the tile counters and the number of tall tiles."""

_SPREAD_HEAVY = tl.constexpr(SPREAD_HEAVY)
_FLAG_WORDS = tl.constexpr(FLAG_WORDS)


class Tiles(NamedTuple):
    """Tensors of a `BlockMap` as one kernel argument; `num_blocks` points to its `counts`."""

    block_expert: Any
    block_row: Any
    block_end: Any
    num_blocks: Any
    flags: Any


class TilesShape(NamedTuple):
    """Compile-time constant: the shape of a `BlockMap`'s tiles."""

    block_m: int
    slack: int
    tall: int
    heavy_first: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BlockMap:
    """Rows that each tile covers; all int32 on one device. B is an upper bound on the number of tiles."""

    # [B], expert of a tile; this and the next two are written for the first `num_blocks` entries only
    block_expert: torch.Tensor
    block_row: torch.Tensor  # [B], first row of a tile
    block_end: torch.Tensor  # [B], end of the rows of the tile's expert (the tile itself covers at most `block_m`)
    num_blocks: torch.Tensor  # [1], tiles in use
    # [2], one per GEMM, zeroed by planning: a GEMM that schedules tiles dynamically counts those taken in its own, so
    # that a plan serves one call
    tile_counters: torch.Tensor
    num_tall: torch.Tensor  # [1], tall tiles in use, which come first; written only with `tall`
    counts: torch.Tensor  # [4], the three above in one tensor, which kernels take
    block_m: int  # rows per tile
    # rows by which the last tile of an expert may be longer, so that a few rows more than a multiple of `block_m` make
    # no tile of their own
    slack: int = 0
    # rows per tile for experts with more than `block_m` rows, whose tiles come first because they take longest; 0: such
    # experts have several tiles of `block_m` rows, and all tiles are in order
    tall: int = 0
    # whether experts are ordered by the length of their tiles: first those with more than one tile, last those that
    # fill half of one or less, so that dynamically scheduled programs end together; in order within each kind. Or
    # `SPREAD_HEAVY`. Not together with `tall`
    heavy_first: int = False
    # [B, FLAG_WORDS], the first word of each tile in use zeroed by planning: where both GEMMs share a launch, the tiles
    # of the first count there, so that a plan serves one call. None: they do not share one
    flags: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.tall == 0 or (self.tall > self.block_m and self.slack == 0), "tall tiles are higher, without slack"
        assert not (self.tall and self.heavy_first), "tall tiles come first as they are"

    @property
    def max_blocks(self) -> int:
        """B: tiles to launch, since only the device knows the number in use."""
        return self.block_expert.numel()

    @property
    def tiles(self) -> Tiles:
        """The map as one kernel argument."""
        return Tiles(self.block_expert, self.block_row, self.block_end, self.counts, self.flags)

    @property
    def shape(self) -> TilesShape:
        """Compile-time constant of the kernels that write the map."""
        return TilesShape(self.block_m, self.slack, self.tall, self.heavy_first)


@triton.jit
def load_num_tall(num_blocks):
    """`num_tall` of a `BlockMap`, from its `counts`."""
    return tl.load(num_blocks + 1 + _NUM_COUNTERS)


@triton.jit
def _number(blocks, chosen):
    """Number of each expert's first tile among those of the chosen experts, and how many tiles these have."""
    blocks = tl.where(chosen, blocks, 0)  # [EXPERTS]
    return tl.cumsum(blocks, 0) - blocks, tl.sum(blocks, 0)


@triton.jit
def _spread(number, own, others, after):
    """Position of a tile when both kinds are spread evenly; `own` tiles are of its kind.

    Tile i of n is placed at (2 * i + 1) / (2 * n); of two at the same place, the one that is `after` comes second.
    """
    scaled = (2 * number.to(tl.int64) + 1) * others
    before = (scaled + tl.where(after, own, own - 1)) // tl.maximum(2 * own, 1)
    return number + before.to(tl.int32)


@triton.jit
def store_block_map(counts, offsets, tiles, SHAPE: tl.constexpr, EXPERTS: tl.constexpr):
    """Writes `Tiles` in a `TilesShape` from each expert's number of rows and first row, [EXPERTS] int32."""
    BLOCK_M: tl.constexpr = SHAPE.block_m
    SLACK: tl.constexpr = SHAPE.slack
    TALL: tl.constexpr = SHAPE.tall
    HEAVY_FIRST: tl.constexpr = SHAPE.heavy_first
    num_blocks = tiles.num_blocks
    experts = tl.arange(0, EXPERTS)  # [EXPERTS]
    height = BLOCK_M
    if TALL > 0:
        height = tl.where(counts > BLOCK_M, TALL, BLOCK_M)  # [EXPERTS]
    blocks = tl.maximum((counts - SLACK + height - 1) // height, (counts > 0).to(tl.int32))  # [EXPERTS]
    first_block = tl.cumsum(blocks, 0) - blocks  # [EXPERTS]
    if TALL > 0:
        tall_blocks = tl.where(counts > BLOCK_M, blocks, 0)  # [EXPERTS]
        first_tall = tl.cumsum(tall_blocks, 0) - tall_blocks  # [EXPERTS]
        num_tall = tl.sum(tall_blocks, 0)
        first_block = tl.where(counts > BLOCK_M, first_tall, num_tall + first_block - first_tall)
        tl.store(num_blocks + 1 + _NUM_COUNTERS, num_tall)
    elif HEAVY_FIRST == _SPREAD_HEAVY:
        heavy = counts > BLOCK_M + SLACK  # [EXPERTS]
        first_heavy, num_heavy = _number(blocks, heavy)
        first_other, num_other = _number(blocks, heavy == 0)
        first_block = tl.where(heavy, first_heavy, first_other)  # [EXPERTS]
        own, others = tl.where(heavy, num_heavy, num_other), tl.where(heavy, num_other, num_heavy)  # [EXPERTS]
    elif HEAVY_FIRST:
        heavy, light = counts > BLOCK_M + SLACK, counts * 2 <= BLOCK_M  # [EXPERTS]
        first_heavy, num_heavy = _number(blocks, heavy)
        first_middle, num_middle = _number(blocks, (heavy | light) == 0)
        first_light, _ = _number(blocks, light)
        first_middle = tl.where(heavy, first_heavy, num_heavy + first_middle)
        first_block = tl.where(light, num_heavy + num_middle + first_light, first_middle)  # [EXPERTS]
    tl.store(num_blocks, tl.sum(blocks, 0))
    tl.store(num_blocks + 1 + tl.arange(0, _NUM_COUNTERS), tl.zeros([_NUM_COUNTERS], tl.int32))
    for i in range(tl.max(blocks, 0)):
        slot = first_block + i  # [EXPERTS]
        if HEAVY_FIRST == _SPREAD_HEAVY:
            slot = _spread(slot, own, others, heavy)
        tl.store(tiles.block_expert + slot, experts, mask=i < blocks)
        tl.store(tiles.block_row + slot, offsets + i * height, mask=i < blocks)
        tl.store(tiles.block_end + slot, offsets + counts, mask=i < blocks)
        if tiles.flags is not None:
            tl.store(tiles.flags + slot * _FLAG_WORDS, tl.zeros([EXPERTS], tl.int32), mask=i < blocks)


@triton.jit(do_not_specialize=["max_tokens"])
def _plan_batches_kernel(
    expert_num_tokens, tiles, max_tokens, num_experts, SHAPE: tl.constexpr, EXPERTS: tl.constexpr, OVERLAP: tl.constexpr
):
    release_next(OVERLAP)
    experts = tl.arange(0, EXPERTS)  # [EXPERTS]
    counts = tl.load(expert_num_tokens + experts, mask=experts < num_experts, other=0)  # [EXPERTS]
    # A wrong count must not lead to another expert's rows, or out of the tensor.
    counts = tl.minimum(tl.maximum(counts, 0), max_tokens)
    offsets = experts * max_tokens  # [EXPERTS]
    store_block_map(counts, offsets, tiles, SHAPE, EXPERTS)


def batch_workspace_numel(num_experts: int, max_tokens: int, block_m: int) -> int:
    """Returns how many int32 `plan_batches` needs; grows with experts and tokens, shrinks with `block_m`."""
    return sum(map(aligned, _batch_sizes(num_experts, max_tokens, block_m).values()))


def plan_batches(
    expert_num_tokens: torch.Tensor,
    max_tokens: int,
    block_m: int,
    workspace: torch.Tensor,
    slack: int = 0,
    overlap: bool = False,
    tall: int = 0,
    heavy_first: int = False,
) -> BlockMap:
    """Lays tiles over the valid rows of [E * max_T] in one launch; no allocation and no host synchronization.

    Args:
        expert_num_tokens: [E] int32, contiguous: valid rows of each expert; counts outside [0, max_T] are clamped.
        max_tokens: max_T, at least 1; E * max_T is below 2**31.
        block_m: rows per tile.
        workspace: [>= batch_workspace_numel(...)] int32, contiguous, 16-byte aligned; overwritten, and aliased by the
            map.
        slack: rows by which the last tile of an expert may be longer.
        overlap: whether the next kernel is launched to start early.
        tall: as in `BlockMap`, which then has no `slack`.
        heavy_first: as in `BlockMap`.

    Returns:
        The map, made of views of `workspace`: row e * max_T + i is row i of expert e.
    """
    num_experts = expert_num_tokens.numel()
    assert expert_num_tokens.dtype == workspace.dtype == torch.int32 and expert_num_tokens.is_contiguous()
    assert 0 < num_experts * max_tokens < 2**31, "rows are counted in 32 bits, and the caller handles max_T = 0"
    pieces = cut_workspace(workspace, _batch_sizes(num_experts, max_tokens, block_m))
    block_map = BlockMap(**pieces, block_m=block_m, slack=slack, tall=tall, heavy_first=heavy_first)
    launch(
        _plan_batches_kernel,
        (1,),
        expert_num_tokens,
        block_map.tiles,
        max_tokens,
        num_experts,
        SHAPE=block_map.shape,
        EXPERTS=max(32, triton.next_power_of_2(num_experts)),
        OVERLAP=overlap,
        num_warps=4,
    )
    return block_map


def aligned(size: int) -> int:
    """Elements that a piece of `size` int32 takes in a workspace."""
    return -(-size // _ALIGN) * _ALIGN


def cut_workspace(workspace: torch.Tensor, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Cuts consecutive aligned views of `sizes` int32; also returns the three parts of the piece `counts`."""
    pieces = {}
    start = 0
    for name, size in sizes.items():
        pieces[name] = workspace[start : start + size]
        start += aligned(size)
    parts = pieces["counts"].split([1, _NUM_COUNTERS.value, 1])
    pieces["num_blocks"], pieces["tile_counters"], pieces["num_tall"] = parts
    assert start <= workspace.numel(), f"workspace holds {workspace.numel()} int32, needs {start}"
    return pieces


def _batch_sizes(num_experts: int, max_tokens: int, block_m: int) -> dict[str, int]:
    # Every expert may be full: only the device knows the counts.
    blocks = num_experts * -(-max_tokens // block_m)
    return {"block_expert": blocks, "block_row": blocks, "block_end": blocks, "counts": NUM_COUNTS}

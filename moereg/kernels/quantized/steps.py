"""Tiles and steps of a product of codes along the reduced dimension: the kernels' constants."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.launch.overlap import overlapping
from moereg.kernels.launch.replay import launch
from moereg.kernels.quantized.operands import CodeStrides, QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.tiles import plan_arguments
from moereg.kernels.sizes import CODE_PAD

# Names of the codes in `tl.dot_scaled`.
_DOT_FORMATS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
# Columns that share a scale which hardware applies, by the dtype of the scale.
_SCALED_GROUPS: Final = {torch.uint8: 32, torch.float8_e4m3fn: 16}


class CodeTile(NamedTuple):
    """The kernels' constant for what a tile of a product covers.

    Attributes:
        block_m: of `GroupedGemmConfig`.
        block_n: columns, counting gate and up once.
        block_k: reduced columns per step; see `steps`, also for the next.
        unroll: steps to a turn of the loop.
        group_m: tiles of rows that share columns.
        mask_rows: whether rows that do not count are left out.
        mask_n: whether tiles reach past the last column.
    """

    block_m: int
    block_n: int
    block_k: int
    unroll: int
    group_m: int
    mask_rows: bool
    mask_n: bool


class CodePair(NamedTuple):
    """The kernels' constant for the codes of both sides of a product and their scales.

    Attributes:
        a_group: columns of activations that share a scale; 0: all.
        b_group: the same of weights.
        dot_format: the name of the activations' codes in `tl.dot_scaled`; None where it does not take them.
        uniform: whether all rows of weights in a tile share a scale.
    """

    a_group: int
    b_group: int
    dot_format: str | None
    uniform: bool


def launch_codes(
    kernel: Any,
    rows: QuantizedRows,
    weights: QuantizedMatrices,
    plan: BlockMap | DirectRoutes,
    config: GroupedGemmConfig,
    num_columns: int,
    num_tiles_n: int,
    *,
    outputs: tuple[torch.Tensor | None, ...],
    others: tuple[torch.Tensor | None, ...],
    strides: tuple[int, ...],
    top_k: int,
    mask_n: bool,
    overlap: bool,
    **constants: Any,
) -> None:
    """Launches a product of codes by `num_tiles_n` tiles of columns, which count gate and up once.

    Args:
        outputs: the kernel's own arguments in front of both sides; `others` follow those, `strides` the common ones.
        top_k: K; read where rows are not sorted.
        mask_n: whether tiles reach past the last column.
    """
    assert config.block_m == plan.block_m
    check_steps(rows, weights, config)
    launch(
        kernel,
        (plan.max_blocks * num_tiles_n,),
        *outputs,
        rows.tensors,
        weights.tensors,
        *others,
        *plan_arguments(plan, weights.q.shape[0]),
        weights.depth,
        num_columns,
        num_tiles_n,
        weights.group_rows,
        CodeStrides(rows.q.stride(0), rows.scale.stride(0), *weights.q.stride()[:2], *weights.scale.stride()[:2]),
        *strides,
        SORTED=isinstance(plan, BlockMap),
        TOP_K=top_k,
        BLOCK_TOP_K=triton.next_power_of_2(top_k),
        CODES=code_pair(rows, weights, num_columns, config.block_n),
        TILE=code_tile(config, weights.depth, mask_n=mask_n),
        RELEASE_LATE=releases_late(plan),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **constants,
        **overlapping(overlap),
    )


def code_tile(config: GroupedGemmConfig, depth: int, *, mask_n: bool) -> CodeTile:
    """The constant of a launch, over `depth` reduced columns."""
    block_k, unroll = steps(config, depth)
    return CodeTile(
        block_m=config.block_m,
        block_n=config.block_n,
        block_k=block_k,
        unroll=unroll,
        group_m=config.group_m,
        mask_rows=config.mask_rows,
        mask_n=mask_n,
    )


def code_pair(rows: QuantizedRows, matrices: QuantizedMatrices, num_columns: int, block_n: int) -> CodePair:
    """The constant of a launch by tiles of `block_n` of `num_columns` columns."""
    return CodePair(
        a_group=rows.group,
        b_group=matrices.group_columns,
        dot_format=_DOT_FORMATS.get(rows.q.dtype),
        uniform=matrices.group_rows % block_n == 0 and num_columns % block_n == 0,
    )


def steps(config: GroupedGemmConfig, depth: int) -> tuple[int, int]:
    """How many columns are reduced at a time, and how many times to a turn of the loop.

    A step lies within one group of 128. Two of them to a turn read runs of 256 bytes of a row, which DRAM hands out 4 %
    faster (measured on an H200); rows of fewer than four turns are over before that pays.
    """
    step = min(config.block_k, CODE_PAD)
    several = depth % config.block_k == 0 and depth >= 4 * config.block_k
    return step, config.block_k // step if several else 1


def releases_late(plan: BlockMap | DirectRoutes) -> bool:
    """Whether the next kernel may start only when the products are done.

    Its many small programs would crowd onto the multiprocessors that are free first, and run there one after the other
    while the rest waits: 3 % of qwen3-30b-a3b at 64 and 256 tokens on an H200. Programs of one token all end at a time.
    """
    return isinstance(plan, BlockMap) or plan.topk_ids.shape[0] > 1


def check_steps(rows: QuantizedRows, matrices: QuantizedMatrices, config: GroupedGemmConfig) -> None:
    """Asserts that a step of the main loop lies within one group of each operand, or hardware scales within it."""
    step = min(config.block_k, CODE_PAD)
    assert rows.depth == matrices.depth
    assert config.block_k % step == rows.depth % step == 0 and matrices.q.stride(2) == rows.q.stride(1) == 1
    assert (matrices.global_scale is None) == (rows.global_scale is None) == (rows.scale.dtype != torch.float8_e4m3fn)
    # Codes of 4 bits are multiplied by codes of 8 where powers of two scale both.
    assert matrices.q.dtype == rows.q.dtype or (matrices.q.dtype == rows.scale.dtype == torch.uint8)
    assert matrices.scale.dtype == rows.scale.dtype
    assert matrices.scale.stride(2) == 1 and rows.scale.stride(1) == 1
    for group in (rows.group, matrices.group_columns):
        if rows.scale.dtype in _SCALED_GROUPS:
            assert group == _SCALED_GROUPS[rows.scale.dtype], "hardware fixes how many columns share a scale"
        else:
            assert group % step == 0, f"a step of {step} columns crosses groups of {group}"

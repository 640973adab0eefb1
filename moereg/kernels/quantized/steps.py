"""How a product of codes goes along the reduced dimension, and when it lets the next kernel start."""

from __future__ import annotations

from typing import Final

import torch

from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.block_map import BlockMap
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.sizes import CODE_PAD

# Names of the codes in `tl.dot_scaled`.
_DOT_FORMATS: Final = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.uint8: "e2m1"}
# Columns that share a scale which hardware applies, by the dtype of the scale.
_SCALED_GROUPS: Final = {torch.uint8: 32, torch.float8_e4m3fn: 16}


def dot_format(rows: QuantizedRows) -> str | None:
    """The name of the codes in `tl.dot_scaled`; None where it does not take them."""
    return _DOT_FORMATS.get(rows.q.dtype)


def steps(config: GroupedGemmConfig, depth: int) -> dict[str, int]:
    """How many columns are reduced at a time, and how many times to a turn of the loop.

    A step lies within one group of 128. Two of them to a turn read runs of 256 bytes of a row, which DRAM hands out 4 %
    faster (measured on an H200); rows of fewer than four turns are over before that pays.
    """
    step = min(config.block_k, CODE_PAD)
    several = depth % config.block_k == 0 and depth >= 4 * config.block_k
    return {"BLOCK_K": step, "UNROLL": config.block_k // step if several else 1}


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

"""The two grouped GEMMs of a Mixture-of-Experts layer with packed weights for many rows an expert, on Hopper.

As `gemm.py`, by the same kernel: weights stay packed in the ring of shared memory, and each consumer dequantizes its
own into registers.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.arguments import clipped_map, tensor_map
from moereg.kernels.hopper.config import select_group_m
from moereg.kernels.hopper.kernel import launch_product
from moereg.kernels.hopper.packed_config import STAGED_ELEMENTS, HopperPackedConfig
from moereg.kernels.hopper.packed_restore import PackedFormat
from moereg.kernels.packed.weights import BLOCK, PackedMatrix
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS

MIN_DEPTH: Final = 3 * BLOCK
"""Smallest padded depth of a weight: the consumers' loop takes two steps per iteration and runs at least once."""


def packed_format(element: str, group: int, scale_dtype: str) -> PackedFormat | None:
    """How the kernels dequantize weights without zero points, or None. Arguments as in `PackedMatrix`."""
    if element == "float4_e2m1fn":
        # One word of scales for a step of 64 elements, or for two.
        known = {("float8_e8m0fnu", 32): ("e8m0", 2), ("float8_e4m3fn", 16): ("e4m3", 1)}.get((scale_dtype, group))
        return None if known is None else PackedFormat(element, *known)
    if element not in ("uint4", "int8") or scale_dtype != "float32":
        return None
    if group == 0:
        return PackedFormat(element, None, 1)
    return PackedFormat(element, "float32", group // BLOCK) if group % BLOCK == 0 else None


def gate_up_packed(
    out: torch.Tensor,
    rows: torch.Tensor,
    w13: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    epilogue: GateUpEpilogue,
    *,
    top_k: int | None,
    overlap: bool = False,
) -> None:
    """Writes `act(row @ w13[expert].T + bias)` for every sorted row; arguments as `gate_up_gemm` of `hopper/gemm.py`.

    Args:
        w13: packed, of a format that `packed_format` knows, without zero points.
    """
    assert rows.shape[1] % 8 == rows.stride(0) % 8 == 0
    assert out.shape[-1] == w13.num_rows // (2 if epilogue.gated else 1)
    _launch(out, rows, w13, plan, config, bias=epilogue.bias, epilogue=epilogue, top_k=top_k, overlap=overlap)


def down_packed(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: None = None,
    overlap: bool = False,
) -> None:
    """Writes `intermediate[row] @ w2[expert].T + bias`, unweighted; arguments as `down_gemm` of `hopper/gemm.py`."""
    assert intermediate.shape[-1] == w2.depth and out.shape[-1] == w2.num_rows
    _launch(out, intermediate[GUARD_ROWS:], w2, plan, config, bias=bias, overlap=overlap)


def _launch(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: PackedMatrix,
    plan: RoutePlan,
    config: HopperPackedConfig,
    *,
    bias: torch.Tensor | None,
    epilogue: GateUpEpilogue | None = None,
    top_k: int | None = None,
    overlap: bool,
) -> None:
    fmt = packed_format(weight.element, weight.group, weight.scale_dtype)
    assert fmt is not None and weight.zero_point is None and out.dtype == torch.bfloat16
    assert weight.depth >= MIN_DEPTH and weight.num_rows % 8 == 0
    assert out.is_contiguous() and config.columns in (64, 128) and (config.num_consumers == 2 or top_k is None)
    num_columns, steps = weight.num_rows, weight.depth // BLOCK
    words = weight.words.shape[3]
    out_columns = 64 // (2 if epilogue is not None and epilogue.gated else 1)
    # A box must not reach rows that the next box stores.
    box = (1, min(STAGED_ELEMENTS // out_columns, config.block_m), out_columns)
    # Lines of 128 bytes, so that reading a row's words causes no bank conflicts.
    lines = weight.words.view(-1, 32)
    scales = None
    if weight.group_scale is not None:
        scale_lines = weight.group_scale.view(torch.int32).view(-1, 8)
        scales = tensor_map(scale_lines, scale_lines.shape, scale_lines.stride(), (config.columns // 8, 8))
    options: dict[str, Any] = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    launch_product(
        rows,
        tensor_map(lines, lines.shape, lines.stride(), (config.columns * words // 32, 32)),
        plan,
        config,
        num_columns=num_columns,
        group_m=select_group_m(num_columns * weight.depth * words // 16),
        top_k=top_k,
        activation=None if epilogue is None else epilogue.activation,
        bias=bias,
        overlap=overlap,
        tile={
            "bodies": 0,
            "stages": config.num_stages(4 * words),
            "consumers": config.num_consumers,
            "packed": fmt,
            "odd": steps % 2 == 1,
        },
        programs=config.programs,
        out=clipped_map(out, box),
        scales=scales,
        row_scale=weight.row_scale,
        num_steps=steps,
        bias_columns=0 if bias is None else bias.shape[1],
        scale_words=0 if weight.group_scale is None else weight.group_scale.shape[1],
        CONSUMER_REGISTERS=config.consumer_registers,
        PRODUCER_REGISTERS=config.producer_registers,
        **options,
    )

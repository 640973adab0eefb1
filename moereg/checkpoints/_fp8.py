"""`quant_method: fp8` as DeepSeek-V3 and Qwen3 publish it: e4m3 in blocks of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moereg.checkpoints._formats import (
    FormatOf,
    Matrix,
    StorageFormat,
    StoredTensor,
    as_is,
)
from moereg.checkpoints._patterns import Patterns
from moereg.config_entries import is_one_of, read_names
from moereg.errors import CheckpointError, shown
from moereg.quant import get_scheme

__all__ = ["block_tensors", "fp8_formats"]

_BLOCK: Final = 128


def fp8_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `weight` [N,K] e4m3 and `weight_scale_inv` [ceil(N/128), ceil(K/128)]: a weight is its code times the scale of its
    block, whatever "inv" suggests. Scales are fp32 (DeepSeek), bf16 (Qwen) or e8m0. Activations are quantized in groups
    of 128 when the layer runs.
    Source: README_WEIGHTS.md and inference/kernel.py of deepseek-ai/DeepSeek-V3; transformers' finegrained_fp8.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: It says something else.
    """
    expected: dict[str, Sequence[Any]] = {
        "fmt": ("e4m3", None),
        "activation_scheme": ("dynamic",),
        "weight_block_size": ([_BLOCK, _BLOCK],),
    }
    for key, values in expected.items():
        if not is_one_of(config.get(key), values):
            raise CheckpointError(
                f"{key} of quant method fp8 must be {values[0]!r}, got {shown(config.get(key))}; use a release with "
                "blocks of 128 x 128 and dynamic activations, such as those of DeepSeek-V3 and Qwen3"
            )
    ignored = [name for key in ("modules_to_not_convert", "ignored_layers") for name in read_names(config, key)]
    is_ignored = Patterns("modules_to_not_convert").components(ignored)
    block = StorageFormat("fp8 in blocks of 128 x 128", get_scheme("fp8_block128"), _tensors)
    return lambda module: None if is_ignored(module) else block


def _tensors(matrix: Matrix) -> Sequence[StoredTensor]:
    return block_tensors(matrix, "weight_scale_inv")


def block_tensors(matrix: Matrix, scale_name: str) -> Sequence[StoredTensor]:
    """Codes and the scales of their blocks.

    Args:
        matrix: What they are of.
        scale_name: What the scales are called.

    Raises:
        CheckpointError: Gate and up would share a block in w13.
    """
    if matrix.is_half and matrix.rows % _BLOCK:
        raise CheckpointError(
            f"the rows of {matrix.module} must be a multiple of {_BLOCK}, or one block of w13 would hold gate and up "
            f"rows under one scale, got {matrix.rows}; shard the layer by experts instead, or use the bfloat16 release"
        )
    shape = (matrix.rows, matrix.columns)
    blocks = (-(-matrix.rows // _BLOCK), -(-matrix.columns // _BLOCK))
    return (
        StoredTensor(".weight", (shape,), ("F8_E4M3",), "w{}", as_is),
        StoredTensor(f".{scale_name}", (blocks,), ("F32", "BF16", "F16", "F8_E8M0"), "w{}_scale", as_is),
    )

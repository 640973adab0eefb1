"""`quant_method: fp8` as DeepSeek-V3 and Qwen3 publish it: e4m3 in blocks of 128 x 128."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from moereg.checkpoints._formats import (
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    as_is,
)
from moereg.checkpoints._patterns import Patterns
from moereg.errors import CheckpointError, shown
from moereg.routing.config_entries import is_one_of, read_names
from moereg.spec.quant_schemes import get_scheme

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
        CheckpointError: A setting is not one of these.
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
    storage = StorageFormat("fp8 in blocks of 128 x 128", get_scheme("fp8_block128"), _tensors)
    return lambda module: None if is_ignored(module) else storage


def _tensors(projection: Projection) -> Sequence[StoredTensor]:
    return block_tensors(projection, "weight_scale_inv")


def block_tensors(projection: Projection, scale_name: str) -> Sequence[StoredTensor]:
    """The codes of a projection and the scales of their blocks.

    Args:
        projection: The matrix that they are of.
        scale_name: Name of the scales' tensor, after the module's.

    Raises:
        CheckpointError: Gate and up would share a block in w13.
    """
    if projection.is_half and projection.rows % _BLOCK:
        raise CheckpointError(
            f"the rows of {projection.module} must be a multiple of {_BLOCK}, or one block of w13 would hold gate and "
            f"up rows under one scale, got {projection.rows}; shard the layer by experts instead, or use the bfloat16 "
            "release"
        )
    shape = (projection.rows, projection.columns)
    blocks = (-(-projection.rows // _BLOCK), -(-projection.columns // _BLOCK))
    return (
        StoredTensor(".weight", (shape,), ("F8_E4M3",), "weight", as_is),
        StoredTensor(f".{scale_name}", (blocks,), ("F32", "BF16", "F16", "F8_E8M0"), "scale", as_is),
    )

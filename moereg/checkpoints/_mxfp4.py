"""`quant_method: mxfp4` as gpt-oss is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from moereg.checkpoints._formats import (
    FormatOf,
    Matrix,
    StorageFormat,
    StoredTensor,
    check_divides,
)
from moereg.checkpoints._patterns import Patterns
from moereg.config_entries import read_names
from moereg.quant import get_scheme

__all__ = ["mxfp4_formats"]

_GROUP: Final = 32


def mxfp4_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    All experts are in one tensor: `gate_up_proj_blocks` and `down_proj_blocks` [E, N, K/32, 16] uint8, two e2m1 codes
    to a byte, low nibble the even column; `*_scales` [E, N, K/32] uint8, exponents with bias 127, which are the codes
    of e8m0. Rows are not transposed as those of the unquantized parameter are; gate and up rows alternate as there.
    Source: gpt_oss/torch/weights.py of openai/gpt-oss; `convert_moe_packed_tensors` of transformers.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: It lists modules in another way.
    """
    key = "modules_to_not_convert"
    is_ignored = Patterns(key).components(read_names(config, key))
    blocks = StorageFormat("mxfp4", get_scheme("mxfp4_w4a16"), _tensors, is_fused=True)
    return lambda module: None if is_ignored(module) else blocks


def _tensors(matrix: Matrix) -> Sequence[StoredTensor]:
    check_divides(matrix, _GROUP)
    scales = (matrix.rows, matrix.columns // _GROUP)
    return (
        StoredTensor("_blocks", ((*scales, _GROUP // 2),), ("U8",), "w{}", _rows),
        StoredTensor("_scales", (scales,), ("U8", "F8_E8M0"), "w{}_scale", _exponents),
    )


def _rows(stored: torch.Tensor) -> torch.Tensor:
    return stored.flatten(-2)


def _exponents(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float8_e8m0fnu)

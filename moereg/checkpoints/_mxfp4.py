"""`quant_method: mxfp4` as gpt-oss is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from moereg.checkpoints._formats import (
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    check_divides,
)
from moereg.checkpoints._patterns import Patterns
from moereg.routing.config_entries import read_names
from moereg.spec.quant_schemes import get_scheme

__all__ = ["mxfp4_formats"]

_GROUP: Final = 32


def mxfp4_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    All experts are in one tensor: `gate_up_proj_blocks` and `down_proj_blocks` [E, N, K/32, 16] uint8, two e2m1 codes
    to a byte, low nibble the even column; `*_scales` [E, N, K/32] uint8, exponents with bias 127, the codes of
    e8m0. Unlike the unquantized parameter it is not transposed; like there, gate and up rows alternate.
    Source: gpt_oss/torch/weights.py of openai/gpt-oss; `convert_moe_packed_tensors` of transformers.

    Args:
        config: `quantization_config`.

    Raises:
        CheckpointError: Its list of modules is not a list of names.
    """
    key = "modules_to_not_convert"
    is_ignored = Patterns(key).components(read_names(config, key))
    storage = StorageFormat("mxfp4", get_scheme("mxfp4_w4a16"), _tensors, is_fused=True)
    return lambda module: None if is_ignored(module) else storage


def _tensors(projection: Projection) -> Sequence[StoredTensor]:
    check_divides(projection, _GROUP)
    groups = (projection.rows, projection.columns // _GROUP)
    return (
        StoredTensor("_blocks", ((*groups, _GROUP // 2),), ("U8",), "weight", _codes),
        StoredTensor("_scales", (groups,), ("U8", "F8_E8M0"), "scale", _scales),
    )


def _codes(stored: torch.Tensor) -> torch.Tensor:
    return stored.flatten(-2)


def _scales(stored: torch.Tensor) -> torch.Tensor:
    return stored.view(torch.float8_e8m0fnu)

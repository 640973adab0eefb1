"""`quant_method: modelopt`, what NVIDIA's ModelOpt exports: nvfp4, and fp8 with one scale for each matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from moereg.checkpoints._formats import (
    FormatOf,
    Projection,
    StorageFormat,
    StoredTensor,
    as_is,
    check_divides,
    one_number,
)
from moereg.checkpoints._patterns import Patterns
from moereg.errors import CheckpointError, shown, unknown_name_message
from moereg.routing.config_entries import is_one_of, read_names
from moereg.spec.quant_schemes import get_scheme

__all__ = ["modelopt_formats"]

_GROUP: Final = 16
_NUMBER: Final = ((), (1,))


def modelopt_formats(config: Mapping[str, Any]) -> FormatOf:
    """The formats of a checkpoint of this method.

    `quant_algo` names one format for all modules except those in `exclude_modules` (hf_quant_config.json) or `ignore`
    (config.json), which list names, or beginnings of names with a star.
    Source: export/quant_utils.py and export/convert_hf_config.py of nvidia-modelopt 0.47.0.

    Args:
        config: `quantization_config`, or `quantization` of hf_quant_config.json.

    Raises:
        CheckpointError: A setting is not known.
    """
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"{unknown_name_message('quant_algo', algorithm, _ALGORITHMS)}; use another release of the model"
        )
    scheme, tensors = _ALGORITHMS[algorithm]
    if "NVFP4" in algorithm and not is_one_of(config.get("group_size", _GROUP), (_GROUP,)):
        raise CheckpointError(
            f"group_size of quant_algo {algorithm} must be {_GROUP}, got {shown(config['group_size'])}; use another "
            "release of the model"
        )
    patterns = [name for key in ("exclude_modules", "ignore") for name in read_names(config, key)]
    is_excluded = Patterns("exclude_modules").wildcards(patterns)
    storage = StorageFormat(f"modelopt {algorithm}", get_scheme(scheme), tensors)
    return lambda module: None if is_excluded(module) else storage


def _nvfp4(projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K/2] uint8, low nibble the even column, `weight_scale` [N,K/16] e4m3, `weight_scale_2` [] fp32.

    A weight is code * weight_scale * weight_scale_2.
    Source: quantization/qtensor/nvfp4_tensor.py of nvidia-modelopt 0.47.0.
    """
    check_divides(projection, _GROUP)
    return (
        StoredTensor(".weight", ((projection.rows, projection.columns // 2),), ("U8",), "weight", as_is),
        StoredTensor(".weight_scale", ((projection.rows, projection.columns // _GROUP),), ("F8_E4M3",), "scale", as_is),
        StoredTensor(".weight_scale_2", _NUMBER, ("F32",), "scale_2", one_number),
    )


def _nvfp4_with_activations(projection: Projection) -> Sequence[StoredTensor]:
    """As `_nvfp4`, and `input_scale` [] fp32, the global scale of activations: amax / (6 * 448)."""
    return (*_nvfp4(projection), _INPUT_SCALE)


def _fp8(projection: Projection) -> Sequence[StoredTensor]:
    """`weight` [N,K] e4m3, `weight_scale` and `input_scale` [] fp32, which both multiply."""
    return (
        StoredTensor(".weight", ((projection.rows, projection.columns),), ("F8_E4M3",), "weight", as_is),
        StoredTensor(".weight_scale", _NUMBER, ("F32",), "scale", one_number),
        _INPUT_SCALE,
    )


_INPUT_SCALE: Final = StoredTensor(".input_scale", _NUMBER, ("F32",), "activation_scale", one_number)
_ALGORITHMS: Final[Mapping[str, tuple[str, Callable[[Projection], Sequence[StoredTensor]]]]] = MappingProxyType(
    {
        "FP8": ("fp8_tensor_static", _fp8),
        "NVFP4": ("nvfp4", _nvfp4_with_activations),
        "W4A16_NVFP4": ("nvfp4_w4a16", _nvfp4),
    }
)

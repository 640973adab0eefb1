"""The format that the experts of a layer are stored in, as config.json or hf_quant_config.json says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from moereg.checkpoints._awq import awq_formats
from moereg.checkpoints._compressed_tensors import compressed_tensors_formats
from moereg.checkpoints._files import CheckpointFiles
from moereg.checkpoints._formats import FormatOf, StorageFormat
from moereg.checkpoints._fp8 import fp8_formats
from moereg.checkpoints._gptq import gptq_formats
from moereg.checkpoints._modelopt import modelopt_formats
from moereg.checkpoints._mxfp4 import mxfp4_formats
from moereg.errors import CheckpointError, shown, unknown_name_message

__all__ = ["METHODS", "quantized_format"]

METHODS: Final[Mapping[str, Callable[[Mapping[str, Any]], FormatOf]]] = MappingProxyType(
    {
        "awq": awq_formats,
        "compressed-tensors": compressed_tensors_formats,
        "fp8": fp8_formats,
        "gptq": gptq_formats,
        "modelopt": modelopt_formats,
        "mxfp4": mxfp4_formats,
    }
)
"""By `quant_method`: makes the formats of modules from the config."""


def quantized_format(files: CheckpointFiles, modules: Sequence[str]) -> StorageFormat | None:
    """The common format of the modules; None if they are not quantized.

    Args:
        files: Checkpoint.
        modules: The experts' projections, by their names in the checkpoint.

    Raises:
        CheckpointError: The method or one of its settings is not known, or the modules' formats differ.
    """
    if files.quantization is None:
        return None
    config, file = files.quantization
    try:
        method = config.get("quant_method")
        if not isinstance(method, str):
            raise CheckpointError(
                f"a quantized checkpoint must name its quant_method, got {shown(method)}; take the file from the "
                f"model's publisher (known: {', '.join(METHODS)})"
            )
        if method not in METHODS:
            raise CheckpointError(
                f"{unknown_name_message('quant method', method, METHODS)}; use the model's bfloat16 release, or "
                "dequantize it with transformers and save_pretrained"
            )
        format_of = METHODS[method](config)
        formats = {module: format_of(module) for module in modules}
    except CheckpointError as error:
        raise CheckpointError(f"{files.path / file}: {error}") from error
    first_module, first = next(iter(formats.items()))
    for module, found in formats.items():
        if found != first:
            raise CheckpointError(
                f"{files.path / file}: the experts of a layer must all be stored in one format, got {_name(first)} for "
                f"{first_module} and {_name(found)} for {module}; quantize all experts of a layer alike"
            )
    return first


def _name(found: StorageFormat | None) -> str:
    return "unquantized" if found is None else found.name

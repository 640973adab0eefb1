"""Builds a config.json's model on meta: modules and shapes without memory or weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from moereg.errors import ArgumentError, described, shown

_AUTO: Final = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
"""The first class that knows a config makes its model."""


def model_on_meta(path: str | os.PathLike[str], num_layers: int | None = None) -> torch.nn.Module:
    """Builds a directory's model, or its first layers alone. Code of the repository is not run."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ArgumentError(f"{str(path)!r} must be a directory with config.json; give the model's own folder")
    try:
        import transformers
    except ImportError as error:
        raise ArgumentError(
            f"the model's layers are found by transformers, which cannot be imported ({described(error)}); "
            "pip install 'moereg[transformers]'"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = auto_class(config)
        if kind is None:
            raise ArgumentError(f"transformers {transformers.__version__} has no model for {type(config).__name__}")
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            del config.quantization_config  # Its own loaders would require a GPU.
        if num_layers is not None:
            _keep_layers(config.get_text_config(decoder=True), num_layers)
        with torch.device("meta"):
            model: torch.nn.Module = kind.from_config(config, trust_remote_code=False)
    except ArgumentError:
        raise
    except Exception as error:  # An untrusted config may make transformers raise anything.
        raise ArgumentError(
            f"transformers {transformers.__version__} makes no model of {str(folder / 'config.json')!r}: "
            f"{described(error)}"
        ) from error
    model._moereg_quantization = quantization  # type: ignore[assignment]
    return model


def auto_class(config: Any) -> Any | None:
    """The class of transformers that makes a config's model."""
    import transformers

    return next((auto for name in _AUTO if type(config) in (auto := getattr(transformers, name))._model_mapping), None)


def _keep_layers(config: Any, num_layers: int) -> None:
    """Shortens a model, and each list with an entry per layer."""
    before = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == before:
            setattr(config, name, value[:num_layers])
    config.num_hidden_layers = min(before, num_layers)


def scheme_of(model: torch.nn.Module) -> Callable[[str], str | None]:
    """A function of an experts module's name: its scheme once loaded, None for the model's own dtype."""
    config: Any = getattr(model, "_moereg_quantization", None)
    values: dict[str, Any] = {} if config is None else config if isinstance(config, dict) else config.to_dict()
    scheme = _scheme(values)
    if scheme is None:
        return lambda name: None
    from transformers.quantizers.quantizers_utils import should_convert_module

    keep = _not_converted(model, values)
    return lambda name: scheme if should_convert_module(name, keep) else None


def _scheme(values: Mapping[str, Any]) -> str | None:
    """Scheme of the converted experts; None if they are not quantized."""
    if not values or values.get("dequantize"):
        return None
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if method == "mxfp4":
        return "mxfp4_w4a16"
    if method == "fp8":
        block = values.get("weight_block_size")
        if block is None:
            return "fp8_tensor_static" if values.get("activation_scheme") == "static" else "fp8_tensor_dynamic"
        if list(block) == [128, 128]:
            return "fp8_block128"
        raise ArgumentError(f"weight_block_size must be [128, 128] or absent, got {shown(block)}")
    raise ArgumentError(
        f"quant_method must be fp8 or mxfp4, which transformers keeps quantized in experts, got {shown(method)}; "
        "load_experts reads others"
    )


def _not_converted(model: torch.nn.Module, values: Mapping[str, Any]) -> list[str]:
    """Patterns of unconverted modules, in the model's names instead of its checkpoint's."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    found = [*(values.get("modules_to_not_convert") or ()), *(getattr(model, "_keep_in_fp32_modules", None) or ())]
    renamings = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    names = []
    for name in found:
        renamed = f"{name}."  # Renamings are written for weights' names.
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        names.append(renamed.removesuffix("."))
    return names

"""transformers' own hook for quantization on load, with which it quantizes experts while it loads a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moereg.errors import ArgumentError
from moereg.integrations._experts.blocks import find_experts, switch
from moereg.integrations._experts.packed import Form, pack, packed_in
from moereg.integrations._experts.quantized import forms_of, layer_index, put
from moereg.spec.quant_schemes import QuantScheme, get_scheme

_LOGGER: Final = logging.getLogger("moereg")
_METHOD: Final = "moereg"
_OF_QUANTIZED: Final = re.compile(r"(_scale_inv|weight_scale(_2)?|weight_packed|qweight|absmax|_blocks|_scales)$")
"""Names of tensors that only quantized weights have."""


@register_quantization_config(_METHOD)
class ExpertsConfig(QuantizationConfigMixin):
    """The result of `quantize_on_load`."""

    def __init__(self, scheme: QuantScheme | str | None, read: Callable[..., Any] | None = None, **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.scheme, self.read = None if scheme is None else get_scheme(scheme), read

    def to_dict(self) -> dict[str, Any]:
        """Strings only, because configs are saved as JSON."""
        return {"quant_method": _METHOD, "scheme": None if self.scheme is None else self.scheme.name}


@register_quantizer(_METHOD)
class ExpertsQuantizer(HfQuantizer):
    """Quantizes 16-bit experts one parameter at a time, or reads quantized ones once everything else is loaded."""

    quantization_config: ExpertsConfig

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> Any:
        self.found, self.forms = find_experts(model), {}
        if not self.found:
            raise ArgumentError(f"{type(model).__name__} has no routed experts that moereg knows; load it as it is")
        files, scheme = checkpoint_files or [], self.quantization_config.scheme
        self.pre_quantized = _has_quantized_experts(files)
        if self.pre_quantized is not (scheme is None):
            has, wants = ("quantized", "read=moereg.load_experts") if self.pre_quantized else ("16-bit", "a scheme")
            raise ArgumentError(f"quantize_on_load needs {wants} for a checkpoint with {has} experts; give it instead")
        if self.pre_quantized:
            self.folder = Path(files[0]).parent
            ignored = set(model._keys_to_ignore_on_load_unexpected or ())
            model._keys_to_ignore_on_load_unexpected = ignored | {r"\.experts\."}
        for each in self.found:
            each.module._is_hf_initialized = self.pre_quantized  # type: ignore[assignment]
            for name, form in forms_of(each, scheme or get_scheme("unquantized")).items():
                if self.pre_quantized:
                    each.module._parameters[name] = None  # Nothing is missing, and nothing is made to fill it.
                else:
                    self.forms[f"{each.name}.{name}"] = form
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        return param_name in self.forms

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self.forms)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of a code, scales come on top: transformers allocates the model's size at once before it loads."""
        if not self.param_needs_quantization(model, param_name):
            return param.element_size()
        scheme = self.quantization_config.scheme
        assert scheme is not None
        assert scheme.weight is not None
        return scheme.weight.bits / 8

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        for each in self.found:
            if self.pre_quantized:
                block = model.get_submodule(each.name.rpartition(".")[0])
                device = next(block.parameters()).device  # Of its router, which is loaded.
                read = self.quantization_config.read
                assert read is not None, "a scheme is for 16-bit experts"
                put(model, each, read(self.folder, layer_index(each), device=device).weights, model.dtype)
            each.module.requires_grad_(False)
        switch(model, self.found)
        _LOGGER.info("%s", packed_in(model))
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return True


class _Quantize(ConversionOps):
    """Runs once a parameter's checkpoint tensors are joined; whatever it returns is set."""

    def __init__(self, forms: dict[str, Form]) -> None:
        self._forms = forms

    def convert(self, input_dict: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        found = {name: value[0] if isinstance(value, list) else value for name, value in input_dict.items()}
        packed = {name: pack(found[name], form) for name, form in self._forms.items() if name in found}
        return found | {name: torch.nn.Parameter(each, requires_grad=False) for name, each in packed.items()}


def _has_quantized_experts(files: Sequence[str]) -> bool:
    """Whether safetensors files have quantized experts, by tensor names.

    Raises an ArgumentError if other weights are quantized too, since nothing would dequantize those.
    """
    found = []
    for file in files:
        if file.endswith(".safetensors"):
            with safe_open(file, "pt") as tensors:
                found += [name for name in tensors.keys() if _OF_QUANTIZED.search(name)]  # noqa: SIM118
    others = [name for name in found if ".experts." not in name]
    if others:
        raise ArgumentError(
            f"quantize_on_load reads checkpoints whose experts alone are quantized, got {others[0]!r}; load the model "
            "without it, and call quantize_experts(model, weights=...)"
        )
    return bool(found)


def _merged(quantization_config: Any, from_arguments: Any) -> Any:
    """Transformers refuses another kind of config than the checkpoint's own; ours reads what the checkpoint has."""
    if isinstance(from_arguments, ExpertsConfig):
        return from_arguments
    return _MERGE(quantization_config, from_arguments)


_MERGE: Final = AutoHfQuantizer.merge_quantization_configs
AutoHfQuantizer.merge_quantization_configs = _merged  # type: ignore[method-assign, assignment]

"""Stores the experts of a live model's layer quantized."""

from __future__ import annotations

from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts.blocks import FoundExperts
from moereg.integrations._experts.layouts import LiveExperts
from moereg.integrations._experts.packed import Form, PackedExperts, pack
from moereg.integrations._experts.serving import has_interface
from moereg.spec.quant_schemes import QuantScheme, get_scheme
from moereg.weights.permuted import ExpertWeights

_OF_FP8: Final = ("{}_scale_inv", "{}_activation_scale")
"""Parameters of transformers beside quantized ones, which become part of packed ones."""


def check_scheme(scheme: QuantScheme | str) -> QuantScheme:
    """A scheme that 16-bit weights can be quantized to without calibration."""
    found = get_scheme(scheme)
    if found.weight is None or (found.activation is not None and found.activation.static):
        raise ArgumentError(
            "scheme must have quantized weights and no static activation scales, which need calibration, got "
            f"{found.name}; name another one, such as int4_w4a16_g128"
        )
    return found


def packable(found: FoundExperts) -> LiveExperts:
    """The meaning of a layer's parameters, or an error if it cannot be quantized."""
    if found.live is None or not has_interface(found.module):
        reason = found.refusal or "its class does not use transformers' experts interface"
        raise ArgumentError(
            f"moereg does not quantize {found.class_name} ({found.name}): {reason}; leave such experts as they are, or "
            "load those in MXFP4 with quantize_on_load(read=moereg.load_experts)"
        )
    return found.live


def forms_of(found: FoundExperts, scheme: QuantScheme) -> dict[str, Form]:
    """How the two matrices of a layer are stored in a scheme, by the parameters' names."""
    module, live = found.module, packable(found)
    halves, hidden, width = live.activation.num_halves, live.hidden_size, live.intermediate_size
    is_transposed = bool(getattr(module, "is_transposed", False))
    is_alternating = halves == 2 and not getattr(module, "is_concatenated", True)
    up = Form("w13", scheme, halves * width, hidden, halves, is_transposed, is_alternating)
    return {live.parameters[0]: up, "down_proj": Form("w2", scheme, hidden, width, is_transposed=is_transposed)}


def quantize_layer(model: torch.nn.Module, found: FoundExperts, scheme: QuantScheme | None, dtype: torch.dtype) -> None:
    """Quantizes a layer's parameters, one after the other; quantized ones of transformers stay as they are."""
    module, live = found.module, packable(found)
    if live.dtype is None:  # Of `FP8Experts`.
        put(model, found, live.canonical(module), dtype)
        return
    if scheme is None:
        raise ArgumentError(f"scheme is required for experts in 16 or 32 bits ({found.name}), got None; name one")
    for name, form in forms_of(found, scheme).items():
        replace(model, module, name, pack(getattr(module, name), form))


def put(model: torch.nn.Module, found: FoundExperts, weights: ExpertWeights, dtype: torch.dtype) -> None:
    """Makes quantized weights a layer's parameters, which share their memory."""
    _check_fits(found, weights)
    module, tensors = found.module, weights.tensors("weight", "scale", "scale_2", "zero_point", "activation_scale")
    for name, form in forms_of(found, weights.scheme).items():
        prefixes = form.matrix, f"a{form.matrix[1:]}_"
        stored = {field: tensor for field, tensor in tensors.items() if field.startswith(prefixes)}
        replace(model, module, name, PackedExperts(stored, form, dtype))
        for pattern in _OF_FP8:
            if getattr(module, beside := pattern.format(name), None) is not None:
                delattr(module, beside)
                # The class's own code takes each expert's, and ignores it for weights that are not in fp8.
                setattr(module, beside, (None,) * weights.num_experts)


def _check_fits(found: FoundExperts, weights: ExpertWeights) -> None:
    live = packable(found)
    device = next((each.device for each in found.module.parameters()), weights.w13.device)
    wanted = live.num_experts, live.hidden_size, live.intermediate_size, str(device)
    got = weights.num_experts, weights.hidden_size, weights.intermediate_size, str(weights.w13.device)
    if weights.scheme.weight is None or got != wanted:
        sizes = "{} experts with hidden size {} and intermediate size {} on {}"
        raise ArgumentError(
            f"weights of {found.name} must be quantized, {sizes.format(*wanted)}, got {weights.scheme.name}, "
            f"{sizes.format(*got)}; pass those of this layer, such as moereg.load_experts(path, "
            f"{layer_index(found)}, device={str(device)!r}).weights"
        )


def replace(model: torch.nn.Module, module: torch.nn.Module, name: str, value: torch.Tensor) -> None:
    """Makes a value a frozen parameter, of all modules of a model that share the old one."""
    old, new = module._parameters[name], torch.nn.Parameter(value, requires_grad=False)
    module._parameters[name] = new
    for other in model.modules():
        for key, parameter in other._parameters.items():
            if old is not None and parameter is old:
                other._parameters[key] = new


def dequantize_layer(model: torch.nn.Module, module: torch.nn.Module) -> None:
    """Makes a layer's packed parameters plain ones."""
    held: dict[str, Any] = dict(module._parameters)
    for name, value in held.items():
        if isinstance(value, PackedExperts):
            replace(model, module, name, value.restored())


def layer_index(found: FoundExperts) -> int:
    """Index of a layer in the model: the first number in its name."""
    number = next((part for part in found.name.split(".") if part.isdigit()), None)
    if number is None:
        raise ArgumentError(f"the name of experts must have their layer's index, got {found.name!r}")
    return int(number)

"""Quantizes the experts of live models, layer by layer, or while transformers loads them."""

from __future__ import annotations

from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts.blocks import FoundExperts
from moereg.integrations._experts.layouts import LiveExperts
from moereg.integrations._experts.packed import Form, PackedExperts, is_packed, pack
from moereg.integrations._experts.serving import detach, has_interface
from moereg.spec.quant_schemes import QuantScheme, TensorRole, get_scheme, tensor_name
from moereg.weights.permuted import ExpertWeights

_ROLES: Final[tuple[TensorRole, ...]] = ("weight", "scale", "scale_2", "zero_point", "activation_scale")
_OF_FP8: Final = ("{}_scale_inv", "{}_activation_scale")
"""Parameters beside quantized ones of transformers, which are part of the packed ones afterwards."""


def check_scheme(scheme: QuantScheme | str) -> QuantScheme:
    """A scheme that 16-bit weights can be quantized to without calibration."""
    found = get_scheme(scheme)
    if found.weight is None:
        raise ArgumentError(f"scheme must have quantized weights, got {found.name}; leave 16-bit experts as they are")
    if found.activation is not None and found.activation.static:
        raise ArgumentError(
            f"scheme must have no static activation scales, which need calibration, got {found.name}; name one "
            "without them, such as int4_w4a16_g128"
        )
    return found


def packable(found: FoundExperts) -> LiveExperts:
    """The meaning of a layer's parameters, or an error if it cannot be quantized."""
    live = found.live
    if live is not None and not has_interface(found.module):
        reason: str | None = "its class does not use transformers' experts interface"
    else:
        reason = found.refusal
    if live is None or reason is not None:
        raise ArgumentError(f"moereg does not quantize {found.class_name} ({found.name}): {reason}")
    return live


def forms_of(module: torch.nn.Module, live: LiveExperts, scheme: QuantScheme) -> dict[str, Form]:
    """How the two matrices of a layer are stored in a scheme, by the parameters' names."""
    is_gated = live.activation.num_halves == 2
    is_transposed = bool(getattr(module, "is_transposed", False))
    is_alternating = is_gated and not getattr(module, "is_concatenated", True)
    halves, hidden, width = live.activation.num_halves, live.hidden_size, live.intermediate_size
    up = Form("w13", scheme, halves * width, hidden, halves, is_transposed, is_alternating)
    down = Form("w2", scheme, hidden, width, is_transposed=is_transposed)
    return {"gate_up_proj" if is_gated else "up_proj": up, "down_proj": down}


def quantize_layer(found: FoundExperts, scheme: QuantScheme | None, dtype: torch.dtype) -> None:
    """Quantizes a layer's parameters, one after the other; quantized ones of transformers stay as they are."""
    module, live = found.module, packable(found)
    if is_packed(module):
        raise ArgumentError(f"{found.name} is quantized already; call dequantize_experts(model) before another scheme")
    if live.dtype is None:  # Of `FP8Experts`.
        put(found, live.canonical(module), dtype)
        return
    if scheme is None:
        raise ArgumentError(f"scheme is required for experts in 16 or 32 bits ({found.name}), got None; name one")
    for name, form in forms_of(module, live, scheme).items():
        set_packed(module, name, pack(getattr(module, name), form))
    _freeze(module)


def put(found: FoundExperts, weights: ExpertWeights, dtype: torch.dtype) -> None:
    """Makes quantized weights a layer's parameters, which share their memory."""
    module, tensors = found.module, weights.tensors()
    for name, form in forms_of(module, packable(found), weights.scheme).items():
        names = (tensor_name(form.matrix, role) for role in _ROLES)
        set_packed(module, name, PackedExperts({each: tensors[each] for each in names if each in tensors}, form, dtype))
        for pattern in _OF_FP8:
            if getattr(module, beside := pattern.format(name), None) is not None:
                setattr(module, beside, None)
    _freeze(module)


def set_packed(module: torch.nn.Module, name: str, value: PackedExperts) -> None:
    """Replaces a parameter."""
    module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)


def _freeze(module: torch.nn.Module) -> None:
    module.requires_grad_(False)
    detach(module)


def dequantize_layer(module: torch.nn.Module) -> None:
    """Makes a layer's packed parameters plain ones."""
    held: dict[str, Any] = dict(module._parameters)
    for name, value in held.items():
        if isinstance(value, PackedExperts):
            module._parameters[name] = torch.nn.Parameter(value.restored(), requires_grad=False)
    detach(module)


def scheme_of(module: torch.nn.Module) -> QuantScheme:
    """The scheme of a layer's packed parameters."""
    return next(each.form.scheme for each in module.parameters() if isinstance(each, PackedExperts))


def layer_index(found: FoundExperts) -> int:
    """Index of a layer in the model, out of its name."""
    number = next((part for part in found.name.split(".") if part.isdigit()), None)
    if number is None:
        raise ArgumentError(f"the name of experts must have their layer's index, got {found.name!r}")
    return int(number)

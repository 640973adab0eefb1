"""Model types with routed experts that are refused, each with its reason, and what to do about these and others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moereg.errors import shown

BY_HAND: Final = (
    "give moereg.make_kernel your own moereg.ExpertWeights, and its kernel the model's routing "
    "(docs/checkpoints.md shows how)"
)

_REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "its router reads the residual with a norm of its own, and its experts read another norm of it": (
        *("diffusion_gemma", "diffusion_gemma_text", "gemma4", "gemma4_text"),
    ),
    "its experts are single rows that a product of keys retrieves, not matrices": ("doge",),
    "each layer has two sets of experts, for text and for images, and the kind of a token decides": (
        *("ernie4_5_vl_moe", "ernie4_5_vl_moe_text"),
    ),
    "its routing weights are normalized together with those of its shared experts": (
        *("inkling_mm_model", "inkling_text"),
    ),
    "its activation caps gate and up with tanh, which no Activation does": ("inkling2", "inkling2_text"),
    "a bias is added to the sum of its experts, and its attention has experts too": ("jetmoe",),
    "its router also chooses experts without weights, which return their input": ("longcat_flash",),
    "its experts are between two projections, and each ends with a norm": ("muse_spark", "muse_spark_text"),
    "its experts take a limited number of tokens and drop the rest": ("nllb-moe", "switch_transformers"),
    "its router is an MLP that also reads the router's state of the layer before": ("zaya",),
}

REFUSED_MODEL_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {model_type: reason for reason, model_types in _REFUSED.items() for model_type in model_types}
)
"""Reasons, by model type."""


def unknown_model_message(model_type: object) -> str:
    """Builds the error message for a model type that is not read.

    No other model type is suggested: two that store their experts alike may route or compute otherwise, and reading
    one as the other gives wrong numbers without an error.

    Args:
        model_type: As in config.json.

    Returns:
        One line.
    """
    if isinstance(model_type, str) and model_type in REFUSED_MODEL_TYPES:
        return f"model type {model_type!r} is not read: {REFUSED_MODEL_TYPES[model_type]}; {BY_HAND}"
    return (
        f"unknown model type {shown(model_type)}; do not put another type's name into config.json, since it would be "
        f"read with that type's routing and activation: {BY_HAND}"
    )

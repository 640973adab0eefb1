"""Model types with routed experts that are refused, each with its reason, and the way out for these and others."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from moereg.errors import shown

__all__ = ["BY_HAND", "REFUSED_MODEL_TYPES", "unknown_model_message"]

BY_HAND: Final = (
    "give moereg.make_kernel your own moereg.ExpertWeights, and its kernel the model's routing "
    "(docs/checkpoints.md shows how)"
)

_GEMMA4: Final = "its router reads the residual with a norm of its own, and its experts read another norm of it"
_INKLING: Final = "its routing weights are normalized together with those of its shared experts"
_INKLING2: Final = "its activation caps gate and up with tanh, which no Activation does"
_MUSE: Final = "its experts are between two projections, and each ends with a norm"
_ERNIE_VL: Final = "each layer has two sets of experts, for text and for images, and the kind of a token decides"
_CAPACITY: Final = "its experts take a limited number of tokens and drop the rest"

REFUSED_MODEL_TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "diffusion_gemma": _GEMMA4,
        "diffusion_gemma_text": _GEMMA4,
        "doge": "its experts are single rows that a product of keys retrieves, not matrices",
        "ernie4_5_vl_moe": _ERNIE_VL,
        "ernie4_5_vl_moe_text": _ERNIE_VL,
        "gemma4": _GEMMA4,
        "gemma4_text": _GEMMA4,
        "inkling_mm_model": _INKLING,
        "inkling_text": _INKLING,
        "inkling2": _INKLING2,
        "inkling2_text": _INKLING2,
        "jetmoe": "a bias is added to the sum of its experts, and its attention has experts too",
        "longcat_flash": "its router also chooses experts without weights, which return their input",
        "muse_spark": _MUSE,
        "muse_spark_text": _MUSE,
        "nllb-moe": _CAPACITY,
        "switch_transformers": _CAPACITY,
        "zaya": "its router is an MLP that also reads the router's state of the layer before",
    }
)
"""Reasons, by model type."""


def unknown_model_message(model_type: object) -> str:
    """Words the error about a model type that is not read.

    No other model type is suggested: two that store their experts alike may route or compute otherwise, and reading
    one as the other gives wrong numbers without an error.

    Args:
        model_type: As config.json says it.

    Returns:
        One line.
    """
    if isinstance(model_type, str) and model_type in REFUSED_MODEL_TYPES:
        return f"model type {model_type!r} is not read: {REFUSED_MODEL_TYPES[model_type]}; {BY_HAND}"
    return (
        f"unknown model type {shown(model_type)}; do not put another type's name into config.json, since it would be "
        f"read with that type's routing and activation: {BY_HAND}"
    )

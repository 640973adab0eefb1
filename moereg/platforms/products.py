"""Product names of machines, and their platforms."""

from __future__ import annotations

import re
from typing import Final

_BY_PLATFORM: Final = {
    "cuda:sm70": ("v100",),
    "cuda:sm75": ("t4", "rtx2080", "rtx2080ti"),
    "cuda:sm80": ("a100", "a800", "a30"),
    "cuda:sm86": ("a10", "a10g", "a16", "a40", "rtxa6000", "rtx3080", "rtx3090", "rtx3090ti"),
    "cuda:sm87": ("orin",),
    "cuda:sm89": ("l4", "l20", "l40", "l40s", "rtx4080", "rtx4090", "rtx6000ada"),
    "cuda:sm90": ("h100", "h200", "h800", "h20", "gh200"),
    "cuda:sm100": ("b100", "b200", "gb200"),
    "cuda:sm103": ("b300", "gb300"),
    "cuda:sm120": ("rtx5080", "rtx5090", "rtxpro6000"),
    "cuda:sm121": ("gb10", "dgxspark"),
    "rocm:gfx90a": ("mi210", "mi250", "mi250x"),
    "rocm:gfx942": ("mi300a", "mi300x", "mi325x"),
    "rocm:gfx950": ("mi350x", "mi355x"),
}
"""Compute capabilities from NVIDIA's table of CUDA GPUs, and targets from AMD's tables for ROCm."""

PRODUCTS: Final = {product: platform for platform, products in _BY_PLATFORM.items() for product in products}
"""Platforms by product, in lower case without spaces and hyphens."""

# The driver's suffix of a product's name: its connection and memory.
_VARIANT: Final = re.compile(r"sxm\d?|pcie|nvl|hbm\d?e?|\d+gb")
_MAKERS: Final = re.compile(r"^(nvidia|geforce|amd|instinct|radeon)+")


def platform_of_product(name: str) -> str | None:
    """The platform of a product, such as `cuda:sm90` for `h100` or `NVIDIA H100 80GB HBM3`; None if unknown."""
    words = re.split(r"[-_ ]+", name.lower())
    while len(words) > 1 and _VARIANT.fullmatch(words[-1]):
        words.pop()
    plain = "".join(words)
    return PRODUCTS.get(plain) or PRODUCTS.get(_MAKERS.sub("", plain))

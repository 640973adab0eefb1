"""Product names of machines, and their platforms."""

from __future__ import annotations

import re
from typing import Final

_BY_PLATFORM: Final = {
    "cuda:sm70": "v100",
    "cuda:sm75": "t4 rtx2080 rtx2080ti",
    "cuda:sm80": "a100 a800 a30",
    "cuda:sm86": "a2 a10 a10g a16 a40 rtxa2000 rtxa3000 rtxa4000 rtxa4500 rtxa5000 rtxa6000 rtx3050 rtx3050ti rtx3060 "
    "rtx3060ti rtx3070 rtx3070ti rtx3080 rtx3080ti rtx3090 rtx3090ti",
    "cuda:sm87": "orin orinnx orinnano",
    "cuda:sm89": "l4 l20 l40 l40s rtx2000ada rtx4000ada rtx4000sffada rtx4500ada rtx5000ada rtx6000ada rtx4050 rtx4060 "
    "rtx4060ti rtx4070 rtx4070super rtx4070ti rtx4070tisuper rtx4080 rtx4080super rtx4090 rtx4090d",
    "cuda:sm90": "h100 h200 h800 h20 gh200",
    "cuda:sm100": "b100 b200 gb200",
    "cuda:sm103": "b300 gb300",
    "cuda:sm110": "thor t4000 t5000",
    "cuda:sm120": "rtxpro2000 rtxpro4000 rtxpro4500 rtxpro5000 rtxpro6000 rtx5050 rtx5060 "
    "rtx5060ti rtx5070 rtx5070ti rtx5080 rtx5090 rtx5090d",
    "cuda:sm121": "gb10 spark",
    "rocm:gfx90a": "mi210 mi250 mi250x",
    "rocm:gfx942": "mi300 mi300a mi300x mi308 mi308x mi325 mi325x",
    "rocm:gfx950": "mi350 mi350x mi355 mi355x",
}
"""Compute capabilities from https://developer.nvidia.com/cuda-gpus, and targets from
https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html. Variants that they leave out (Super, D for China, H20,
A10G, RTX A4500, MI308X) have the chip of the product that they vary."""

PRODUCTS: Final = {product: platform for platform, products in _BY_PLATFORM.items() for product in products.split()}
"""Platforms by product, in lower case without spaces and hyphens."""

# What follows a product's name: its connection, cooling, memory, rack or edition.
_VARIANTS: Final = re.compile(
    r"([-_ ]+(sxm\d?|pcie|oam|ac|sff|nvl\d*|hbm\d?e?|3e|\d+[-_ ]*gb|blackwell|generation|edition|server|workstation|max"
    r"|q|gpu|laptop|developer|kit))+$"
)
_MAKERS: Final = re.compile(r"^(nvidia|geforce|quadro|tesla|jetson|agx|dgx|hgx|amd|instinct|radeon)+")


def platform_of_product(name: str) -> str | None:
    """The platform of a product, such as `cuda:sm90` for `h100` or `NVIDIA H100 80GB HBM3`; None if unknown.

    GeForce and RTX cards may go without their series: `4090`, `a6000`.
    """
    plain = re.sub(r"[-_ ]+", "", _VARIANTS.sub("", name.lower()))
    bare = _MAKERS.sub("", plain)
    return PRODUCTS.get(plain) or PRODUCTS.get(bare) or PRODUCTS.get(f"rtx{bare}")

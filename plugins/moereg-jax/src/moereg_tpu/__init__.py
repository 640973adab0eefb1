"""`tpu`: recognizes a machine with TPUs whose tensors torch-xla holds. Imports neither jax nor torch-xla.

A package of its own, since platforms load before backends and `moereg_jax` registers one.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from typing import Final

from moereg.author import Platform, PlatformKind

__all__ = ["KIND"]

moereg_api = "1"

# Where the driver of a TPU shows its chips: as accelerators up to v4, through vfio from v5 on.
_DEVICE_FILES: Final = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# Without these a layer has no tensors to run on.
_MODULES: Final = ("libtpu", "torch_xla")


def probe() -> Platform | None:
    """This machine if it has a TPU that torch can use, else None.

    The generation comes from TPU_ACCELERATOR_TYPE, which TPU VMs set: `v5litepod-8` is `v5e`, `v6e-1` is `v6e`.
    """
    if not any(glob.glob(pattern) for pattern in _DEVICE_FILES):
        return None
    if not all(importlib.util.find_spec(module) for module in _MODULES):
        return None
    # Other devices use vfio as well, so a machine that does not say that it has a TPU has none.
    accelerator = os.environ.get("TPU_ACCELERATOR_TYPE", "").replace("litepod", "e")
    found = re.match(r"v\d+[a-z]*", accelerator)
    return Platform("tpu", found.group(), device_name=f"TPU {found.group()}") if found else None


# Without an order: `tpu` alone stays the name of a platform.
KIND: Final = PlatformKind("tpu", "xla", r"v\d+[a-z]*", example="v5e", probe=probe)

"""The cells that the tables choose among: built-in ones, those of the wheels in plugins/, and two vendors' fakes."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from moereg.registry import BUILTIN, REGISTRY, BackendCell, BackendRegistry, register_moe_backend, registering_origin
from moereg.selection.loader import load_backends
from tests.support.fakes import FakeExperts

OWN: Final = ("torch", "triton")
"""Backends whose kernels are moereg's or torch's. Others are foreign."""

PACKAGES: Final = {
    "triton": "3.8.0",
    "flashinfer-python": "0.7.2.post1",
    "quack-kernels": "0.6.5",
    "nvidia-cutlass-dsl": "4.8.1",
    "vllm": "0.26.0",
    "humming-kernels": "0.1.19",
    "amd-aiter": "0.1.20",
    "jax": "0.10.2",
}
"""A machine with every package, in a version that its backends accept; SonicMoE asks for another nvidia-cutlass-dsl."""

_WHEELS: Final = {
    "moereg-aiter": ("moereg_aiter.backend",),
    "moereg-humming": ("moereg_humming.backend",),
    "moereg-jax": ("moereg_jax",),
    "moereg-sonic": ("moereg_sonic.backend",),
    "moereg-vllm": tuple(
        f"moereg_vllm.{name}" for name in ("deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton")
    ),
}
_PLUGINS: Final = Path(__file__).parents[2] / "plugins"


def builtin_cells() -> tuple[BackendCell, ...]:
    """Those of moereg itself."""
    return tuple(cell for cell in load_backends().cells if cell.origin == BUILTIN)


def parity_cells() -> tuple[BackendCell, ...]:
    """All of them. Leaves the registry and loaded modules as they were."""
    return (*builtin_cells(), *_wheels(), *_vendors())


def _wheels() -> Iterator[BackendCell]:
    """Cells of the wheels, out of their sources: claims import no kernel library."""
    before, path, loaded = REGISTRY.cells, list(sys.path), dict(sys.modules)
    REGISTRY.restore(())
    try:
        for wheel, modules in _WHEELS.items():
            sys.path.insert(0, str(_PLUGINS / wheel / "src"))
            with registering_origin(wheel, "1.0"):
                for module in modules:
                    sys.modules.pop(module, None)
                    importlib.import_module(module)
        # As built-in ones, whose predicates are asked also where they are denied.
        yield from (dataclasses.replace(cell, origin=BUILTIN) for cell in REGISTRY.cells)
    finally:
        REGISTRY.restore(before)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("moereg_")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in loaded.items() if name.startswith("moereg_")})


def _vendors() -> tuple[BackendCell, ...]:
    """What wheels of other vendors would bring, for platforms that moereg has no kernels for."""
    registry = BackendRegistry()
    claims = (
        ("npu_kernels", "npu", ("unquantized",)),
        ("xpu_kernels", "xpu", ("unquantized", "fp8_block128", "mxfp8", "mxfp4_w4a16", "int4_w4a16_g128")),
    )
    for name, platform, schemes in claims:
        with registering_origin(f"moereg-{platform}", "1.0"):
            register_moe_backend(name, 100, schemes, (platform,), registry=registry)(FakeExperts)
    return registry.cells

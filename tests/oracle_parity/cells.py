"""The cells that the tables choose among: the built-in ones, those of the wheels in plugins/, and stand-ins.

A stand-in claims what a backend will claim that is not written yet, or is another vendor's wheel. It goes, scheme by
scheme, once a built-in backend of its name computes the scheme.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from moereg.discovery import load_backends
from moereg.facts import Facts
from moereg.registry import BUILTIN, REGISTRY, BackendCell, BackendRegistry, register_moe_backend, registering_origin
from tests.support.fakes import EVERYTHING, FakeExperts

__all__ = ["OWN", "PACKAGES", "builtin_cells", "parity_cells"]

OWN: Final = ("torch", "triton")
"""Backends whose kernels are moereg's or torch's. Others are foreign."""

PACKAGES: Final = {
    "triton": "3.8.0",
    "flashinfer-python": "0.7.2.post1",
    "quack-kernels": "0.6.5",
    "nvidia-cutlass-dsl": "4.8.1",
    "cuda-tile": "1.7.0",
    "vllm": "0.26.0",
    "humming-kernels": "0.1.19",
    "amd-aiter": "0.1.20",
    "jax": "0.10.2",
}
"""A machine with every package, in a version that its backends accept; SonicMoE asks for another nvidia-cutlass-dsl."""

_WHEELS: Final = {
    "moereg-humming": ("moereg_humming.backend",),
    "moereg-jax": ("moereg_jax",),
    "moereg-sonic": ("moereg_sonic.backend",),
    "moereg-vllm": tuple(
        f"moereg_vllm.{name}" for name in ("deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton")
    ),
}
_PLUGINS: Final = Path(__file__).parents[2] / "plugins"

# What FlashInfer's kernels have in common: ranks hold contiguous experts.
_FLASHINFER: Final = dataclasses.replace(
    EVERYTHING,
    activations=frozenset({"silu", "gelu_tanh", "relu2", "swigluoai"}),
    dtypes=frozenset({"bfloat16", "float16"}),
    placements=frozenset({"contiguous"}),
    router_weight_on_input=False,
    requires_multiple={"hidden_size": 8, "intermediate_size": 8},
)


def builtin_cells() -> tuple[BackendCell, ...]:
    """Those of moereg itself."""
    return tuple(cell for cell in load_backends().cells if cell.origin == BUILTIN)


def parity_cells() -> tuple[BackendCell, ...]:
    """All of them. Leaves the registry and loaded modules as they were."""
    own = builtin_cells()
    computed = {(cell.name, scheme.name) for cell in own for scheme in cell.schemes}
    stand_ins = []
    for cell in _stand_ins():
        left = tuple(scheme for scheme in cell.schemes if (cell.name, scheme.name) not in computed)
        if left:
            stand_ins.append(dataclasses.replace(cell, schemes=left))
    return (*own, *_wheels(), *stand_ins)


def _wheels() -> Iterator[BackendCell]:
    """Cells of the wheels, out of their sources: claims import no kernel library."""
    before, path, loaded = REGISTRY.snapshot(), list(sys.path), dict(sys.modules)
    REGISTRY.restore(())
    try:
        for wheel, modules in _WHEELS.items():
            sys.path.insert(0, str(_PLUGINS / wheel / "src"))
            with registering_origin(wheel, "1.0"):
                for module in modules:
                    sys.modules.pop(module, None)
                    importlib.import_module(module)
        # As built-in ones, whose predicates are asked without a thread.
        yield from (dataclasses.replace(cell, origin=BUILTIN) for cell in REGISTRY.cells)
    finally:
        REGISTRY.restore(before)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("moereg_")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in loaded.items() if name.startswith("moereg_")})


def _stand_ins() -> tuple[BackendCell, ...]:
    registry = BackendRegistry()

    def add(
        name: str,
        priority: int,
        schemes: str,
        platforms: str,
        facts: Facts = _FLASHINFER,
        base: type[FakeExperts] = FakeExperts,
        **keywords: Any,
    ) -> None:
        cls = type("StandInExperts", (base,), {"facts": facts})
        register_moe_backend(name, priority, schemes.split(), platforms.split(), registry=registry, **keywords)(cls)

    # Wheels of other vendors, for platforms that moereg has no kernels for.
    with registering_origin("moereg-npu", "1.0"):
        add("npu_kernels", 100, "unquantized", "npu", EVERYTHING)
    with registering_origin("moereg-xpu", "1.0"):
        add("xpu_kernels", 100, "unquantized fp8_block128 mxfp8 mxfp4_w4a16 int4_w4a16_g128", "xpu", EVERYTHING)
    flashinfer = {"requires": ("flashinfer-python>=0.7.2,<0.8",)}
    with registering_origin(BUILTIN):
        add(
            "flashinfer_cutlass",
            48,
            "unquantized fp8_tensor_static fp8_block128 mxfp4_w4a16",
            "cuda:sm90",
            **flashinfer,
        )
        add("flashinfer_cutlass", 55, "unquantized fp8_tensor_static nvfp4", "cuda:sm100f cuda:sm120f", **flashinfer)
        add("flashinfer_cutlass", 55, "mxfp4_mxfp8", "cuda:sm100f cuda:sm120f", **flashinfer)
        no_clamp = dataclasses.replace(_FLASHINFER, swiglu_limit=False, bias=False)
        add("cutlass", 45, "unquantized", "cuda:sm90 cuda:sm100", no_clamp, requires=("quack-kernels>=0.6,<0.7",))
    return registry.cells

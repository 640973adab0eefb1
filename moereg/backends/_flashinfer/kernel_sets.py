"""The CUTLASS kernels of FlashInfer in sets that can be built apart: which of its source files each one takes.

A source file is recognized by what it instantiates, since the numbers in FlashInfer's file names change with every tile
that it adds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

__all__ = ["AMPERE", "KERNEL_SETS", "KernelSet", "cpu_seconds", "modules", "select_sources", "set_name", "sets_of"]

_Operands = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """Kernels that are built together.

    Attributes:
        dispatch: The source file that chooses among its tiles, without its suffix.
        operands: Element types of activations and weights that its tiles instantiate, as the generator spells them.
        folder: Folder of its generated sources where it is one of tiles for another architecture.
    """

    dispatch: str
    operands: _Operands
    folder: str = ""


_BF16: Final = "__nv_bfloat16"
_E4M3: Final = "__nv_fp8_e4m3"
_FP4: Final = "SafeFP4"

AMPERE: Final = "bfloat16_ampere"
"""Tiles of Ampere for bfloat16, which a module for Hopper can have beside its own."""

# Other names of the same types, in files for the tiles of Ampere.
_SPELLINGS: Final = {"cutlass::bfloat16_t": _BF16, "cutlass::half_t": "half"}

KERNEL_SETS: Final[Mapping[str, KernelSet]] = {
    "bfloat16": KernelSet("moe_gemm_kernels_bf16_bf16", (_BF16, _BF16)),
    "float16": KernelSet("moe_gemm_kernels_fp16_fp16", ("half", "half")),
    # The products of blocks are compiled at run time, by the part of FlashInfer that every set has.
    "fp8_block128": KernelSet("moe_gemm_kernels_bf16_fp8", (_BF16, _E4M3)),
    "fp8": KernelSet("moe_gemm_kernels_fp8_fp8", (_E4M3, _E4M3)),
    "mxfp4_w4a16": KernelSet("moe_gemm_kernels_bf16_fp4", (_BF16, _FP4)),
    "mxfp4_mxfp8": KernelSet("moe_gemm_kernels_fp8_fp4", (_E4M3, _FP4)),
    "nvfp4": KernelSet("moe_gemm_kernels_fp4_fp4", (_FP4, _FP4)),
    # Takes as long as bfloat16, for tactics that Hopper can run too: built for it where somebody asks.
    AMPERE: KernelSet("moe_gemm_kernels_bf16_bf16", (_BF16, _BF16), folder="80"),
}
"""By name, as manifests have it."""

# Sets by the module of an architecture. The rest of its sources has no kernels that a layer could reach: FlashInfer's
# interface makes no layer in float32, although its tiles are generated.
_PLAIN: Final = ("bfloat16", "float16")
_MODULES: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "sm90": ("fused_moe_90", "9.0a", (*_PLAIN, "fp8_block128", "fp8", "mxfp4_w4a16", AMPERE)),
    "sm100": ("fused_moe_100", "10.0a", (*_PLAIN, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm103": ("fused_moe_103", "10.3a", (*_PLAIN, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm120": ("fused_moe_120", "12.0f", (AMPERE, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm121": ("fused_moe_120", "12.1a", (AMPERE, "fp8", "mxfp4_mxfp8", "nvfp4")),
}

_INSTANTIATION: Final = re.compile(
    r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(\s*Sm\d+\s*,([^,]+),([^,]+),"
    r"|template void sm\d+_generic_\w*moe\w*Launcher<([^,>]+),([^,>]+),"
)


def modules(arch: str) -> tuple[str, str, tuple[str, ...]]:
    """FlashInfer's module for an architecture, its compute capability as FlashInfer's variable spells it, its sets.

    Args:
        arch: Such as `sm90`.

    Raises:
        KeyError: FlashInfer has no such kernels for it.
    """
    return _MODULES[arch]


def set_name(scheme: str, dtype: str, known: Sequence[str]) -> str:
    """The set that computes a scheme; a name that is not known where there is none.

    Args:
        scheme: Name of a quant scheme of moereg.
        dtype: Of hidden states.
        known: Sets of the architecture.
    """
    if scheme == "unquantized":
        return AMPERE if dtype == "bfloat16" and dtype not in known else dtype
    return {"fp8_tensor_static": "fp8", "mxfp8": "fp8"}.get(scheme, scheme)


def sets_of(text: str) -> frozenset[_Operands]:
    """The pairs of element types that a generated source instantiates kernels of a layer for."""
    found = (match.groups() for match in _INSTANTIATION.finditer(text))
    pairs = ((a, b) if a is not None else (c, d) for a, b, c, d in found)
    spelled = ((one.strip(), other.strip()) for one, other in pairs)
    return frozenset((_SPELLINGS.get(one, one), _SPELLINGS.get(other, other)) for one, other in spelled)


def select_sources(sources: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """The sources of a module that some sets need, in FlashInfer's order.

    Args:
        sources: All of the module's; generated ones are read.
        names: Of sets.

    Returns:
        What every set needs, each set's dispatch, and the tiles of each.
    """
    kept = [KERNEL_SETS[name] for name in names]
    dispatches = {one.dispatch for one in kept}
    chosen = []
    for path in sources:
        if path.name.endswith(".generated.cu"):
            folder = path.parent.name if path.parent.name == "80" else ""
            wanted = {one.operands for one in kept if one.folder == folder}
            is_chosen = bool(wanted and sets_of(path.read_text(encoding="utf-8")) & wanted)
        elif path.stem.startswith("moe_gemm_kernels_"):
            is_chosen = path.stem in dispatches
        else:
            is_chosen = True
        if is_chosen:
            chosen.append(path)
    return chosen


# CPU-seconds of one file, nvcc 13.0 on a server's core; each was timed, but for the tiles, of which some were.
_SECONDS: Final[Mapping[str, float]] = {
    "moe_gemm_kernels_fp8_fp8": 332,
    "cutlass_fused_moe_instantiation": 144,
    "moe_gemm_kernels_bf16_bf16": 134,
    "moe_gemm_kernels_fp16_fp16": 134,
    "moe_gemm_kernels_bf16_fp4": 134,
    "fp8_blockscale_gemm": 92,
    "moe_gemm_kernels_fp8_fp4": 73,
    "flashinfer_cutlass_fused_moe_binding": 52,
    "moe_gemm_kernels_fp4_fp4": 47,
    "moe_gemm_kernels_bf16_fp8": 39,
    "moe_gemm_tma_warp_specialized_input": 35,
}
_TILE_SECONDS: Final = {"80": 160.0, "90": 115.0}
_OTHER_SECONDS: Final = 10.0


def cpu_seconds(sources: Iterable[Path]) -> float:
    """How long one core would take to compile some sources, as far as it was measured."""
    return sum(
        _TILE_SECONDS.get(path.parent.name, 125.0)
        if path.name.endswith(".generated.cu")
        else _SECONDS.get(path.stem, _OTHER_SECONDS)
        for path in sources
    )

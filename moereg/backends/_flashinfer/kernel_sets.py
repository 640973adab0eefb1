"""Sets of FlashInfer's CUTLASS kernels that can be built separately, and the source files of each.

A source file is recognized by what it instantiates, since FlashInfer renumbers its files whenever it adds a tile.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

_Operands = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class KernelSet:
    """Kernels that are built together.

    Attributes:
        dispatch: Stem of the source file that chooses among the tiles.
        operands: Element types of activations and weights that its tiles instantiate, in the generator's spelling, and
            of the output if there are tiles for others too.
        folder: Folder of the generated sources, if the tiles are another architecture's.
    """

    dispatch: str
    operands: _Operands
    folder: str = ""


_BF16: Final = "__nv_bfloat16"
_E4M3: Final = "__nv_fp8_e4m3"
_FP4: Final = "SafeFP4"

AMPERE: Final = "bfloat16_ampere"
"""Ampere's bfloat16 tiles, which a module for Hopper can contain besides its own."""

INT4_DISPATCH: Final = "moe_gemm_kernels_fp8_uint4"

# Aliases of the same types in the files of Ampere's tiles.
_SPELLINGS: Final = {"cutlass::bfloat16_t": _BF16, "cutlass::half_t": "half"}

KERNEL_SETS: Final[Mapping[str, KernelSet]] = {
    "bfloat16": KernelSet("moe_gemm_kernels_bf16_bf16", (_BF16, _BF16)),
    "float16": KernelSet("moe_gemm_kernels_fp16_fp16", ("half", "half")),
    # Block GEMMs are compiled at run time by a part of FlashInfer that every set contains.
    "fp8_block128": KernelSet("moe_gemm_kernels_bf16_fp8", (_BF16, _E4M3)),
    "fp8": KernelSet("moe_gemm_kernels_fp8_fp8", (_E4M3, _E4M3)),
    "mxfp4_w4a16": KernelSet("moe_gemm_kernels_bf16_fp4", (_BF16, _FP4)),
    "mxfp4_mxfp8": KernelSet("moe_gemm_kernels_fp8_fp4", (_E4M3, _FP4)),
    "nvfp4": KernelSet("moe_gemm_kernels_fp4_fp4", (_FP4, _FP4)),
    # Takes as long to build as bfloat16, for tactics that Hopper can run too: built only on request.
    AMPERE: KernelSet("moe_gemm_kernels_bf16_bf16", (_BF16, _BF16), folder="80"),
    # No cell calls the generator's tiles that write float16.
    "int4_w4a8_g128": KernelSet(INT4_DISPATCH, (_E4M3, "cutlass::uint4b_t", _BF16)),
}
"""Sets by their names in manifests."""

# Sets of each architecture's module. No layer can reach the kernels of its other sources: FlashInfer generates float32
# tiles, but its interface makes no float32 layer.
_PLAIN: Final = ("bfloat16", "float16")
_MODULES: Final[Mapping[str, tuple[str, str, tuple[str, ...]]]] = {
    "sm90": ("fused_moe_90", "9.0a", (*_PLAIN, "fp8_block128", "fp8", "mxfp4_w4a16", AMPERE, "int4_w4a8_g128")),
    "sm100": ("fused_moe_100", "10.0a", (*_PLAIN, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm103": ("fused_moe_103", "10.3a", (*_PLAIN, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm120": ("fused_moe_120", "12.0f", (AMPERE, "fp8", "mxfp4_mxfp8", "nvfp4")),
    "sm121": ("fused_moe_120", "12.1a", (AMPERE, "fp8", "mxfp4_mxfp8", "nvfp4")),
}

_INSTANTIATION: Final = re.compile(
    r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(\s*Sm\d+\s*,([^,]+),([^,]+),"
    r"|template void sm\d+_generic_\w*moe\w*Launcher<([^,>]+),([^,>]+),([^,>]*)"
)


def modules(arch: str) -> tuple[str, str, tuple[str, ...]]:
    """FlashInfer's module for an architecture, its compute capability in FlashInfer's spelling, and its sets.

    Args:
        arch: Such as `sm90`.

    Raises:
        KeyError: FlashInfer has no such kernels for the architecture.
    """
    return _MODULES[arch]


def set_name(scheme: str, dtype: str, known: Sequence[str]) -> str:
    """The set that computes a scheme; a name not in `known` if there is none.

    Args:
        scheme: Name of a quant scheme of moereg.
        dtype: Dtype of hidden states.
        known: The architecture's sets.
    """
    if scheme == "unquantized":
        return AMPERE if dtype == "bfloat16" and dtype not in known else dtype
    return {"fp8_tensor_static": "fp8", "mxfp8": "fp8"}.get(scheme, scheme)


def sets_of(text: str) -> frozenset[_Operands]:
    """Operand types of the layer kernels that a generated source instantiates, without and with the third."""
    found = ([one.strip() for one in match.groups() if one is not None] for match in _INSTANTIATION.finditer(text))
    spelled = [tuple(_SPELLINGS.get(one, one) for one in types) for types in found]
    return frozenset({*spelled, *(types[:2] for types in spelled)})


def select_sources(sources: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """The module's sources that some sets need, in FlashInfer's order.

    Args:
        sources: All sources of the module; generated ones are read.
        names: Names of sets.

    Returns:
        Sources common to all sets, and each set's dispatch and tiles.
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


# CPU-seconds per file with nvcc 13.0 on a server core; all were timed, except that only some tiles were.
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
    """Estimated time for one core to compile some sources, from measurements."""
    return sum(
        _TILE_SECONDS.get(path.parent.name, 125.0)
        if path.name.endswith(".generated.cu")
        else _SECONDS.get(path.stem, _OTHER_SECONDS)
        for path in sources
    )

"""Kernel sets beside those of `kernel_sets`, and the sources of both.

Who loads kernels compares the names of sets with a manifest and reads no table. So the builder alone imports this
module, and a set that is added here leaves the evidence of other cells as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from moereg.backends._flashinfer import kernel_sets

__all__ = ["cpu_seconds", "modules", "select_sources", "with_own", "write_own"]

INT4: Final = "int4_w4a8_g128"

_ADDED: Final[Mapping[str, tuple[str, ...]]] = {"sm90": (INT4,)}
_DISPATCH: Final = "moe_gemm_kernels_fp8_uint4"
# As the generator spells the tiles that write bfloat16. It writes as many files of float16, which no cell calls.
_TILES: Final = "_mixed_moe_gemm_kernelLauncher<__nv_fp8_e4m3, cutlass::uint4b_t, __nv_bfloat16,"
# FlashInfer's file that chooses among tiles does so for both outputs, takes 540 s of one core, and is the last to end.
# For bfloat16 alone it takes 310.
_OWN_DISPATCH: Final = "moereg_fp8_uint4_bfloat16"
_OWN_TEXT: Final = """#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"

namespace tensorrt_llm::kernels::cutlass_kernels {
template class MoeGemmRunner<__nv_fp8_e4m3, cutlass::uint4b_t, __nv_bfloat16>;
}
"""
_OWN_SECONDS: Final = 310.0
"""Seconds on one core with nvcc 13.0."""


def modules(arch: str) -> tuple[str, str, tuple[str, ...]]:
    """As `kernel_sets.modules`, with the sets of this module.

    Raises:
        KeyError: FlashInfer has no such kernels for the architecture.
    """
    module, capability, sets = kernel_sets.modules(arch)
    return module, capability, (*sets, *_ADDED.get(arch, ()))


def select_sources(sources: Iterable[Path], names: Sequence[str]) -> list[Path]:
    """As `kernel_sets.select_sources`, with the sets of this module."""
    given = list(sources)
    chosen = set(kernel_sets.select_sources(given, [name for name in names if name != INT4]))
    return [path for path in given if path in chosen or (INT4 in names and _is_int4(path))]


def _is_int4(path: Path) -> bool:
    return path.stem == _DISPATCH or (
        path.name.endswith(".generated.cu") and _TILES in " ".join(path.read_text(encoding="utf-8").split())
    )


def with_own(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Sources with moereg's own file, in a folder, in the place of FlashInfer's that does twice as much."""
    own = folder / f"{_OWN_DISPATCH}.cu"
    return [own if path.stem == _DISPATCH else path for path in sources]


def write_own(sources: Iterable[Path]) -> None:
    """Writes moereg's own file if it is among the sources; one that is there stays, and so does what was made of it."""
    for path in sources:
        if path.stem == _OWN_DISPATCH and not (path.exists() and path.read_text(encoding="utf-8") == _OWN_TEXT):
            path.write_text(_OWN_TEXT, encoding="utf-8")


def cpu_seconds(sources: Iterable[Path]) -> float:
    """How long one core would take to compile some sources, as far as it was measured."""
    given = list(sources)
    others = [path for path in given if path.stem != _OWN_DISPATCH]
    return kernel_sets.cpu_seconds(others) + _OWN_SECONDS * (len(given) - len(others))

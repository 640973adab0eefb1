"""Asks this CPU what its matmuls can do: the one place that does, so that a test can answer as another CPU would."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch

__all__ = ["CpuFeatures", "features", "mixes_rows"]

_AMX_COLUMNS: Final = 32


@dataclasses.dataclass(frozen=True)
class CpuFeatures:
    """Features that torch and oneDNN use. ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA may leave them less than it has.

    Attributes:
        onednn: oneDNN has kernels with AVX, and an order of weights for them; false on other CPUs than x86-64.
        bf16: It multiplies bfloat16, at least with AVX-512's conversions.
        fp16: It multiplies float16 with AVX-512 FP16.
        int8: It multiplies int8 with AVX-512 VNNI, where torch alone has a plain loop: that took 64 ms for
            32 x 2048 x 1536 on an AMD EPYC without VNNI, the same in fp32 3 ms.
        amx: It may multiply bfloat16 in AMX tiles.
    """

    onednn: bool
    bf16: bool
    fp16: bool
    int8: bool
    amx: bool


@functools.cache
def features() -> CpuFeatures:
    """Features of this CPU, asked once. Call it as `cpu.features()`: the tests' fixture `cpu_features` replaces it."""
    capability = torch.backends.cpu.get_cpu_capability()
    onednn = torch.backends.mkldnn.is_available() and capability.startswith("AVX")
    # oneDNN's answer is about AVX-512 as it may use it; torch's own answers are about the CPU.
    avx512 = onednn and capability == "AVX512" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return CpuFeatures(
        onednn=onednn,
        bf16=avx512,
        fp16=avx512 and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        int8=avx512 and torch.cpu._is_vnni_supported(),
        amx=avx512 and torch.cpu._is_amx_tile_supported(),
    )


def mixes_rows(dtype: torch.dtype, *columns: int) -> bool:
    """Whether a row of a product on this CPU may depend on the next row of its first factor, where that is not finite.

    oneDNN reads rows of bfloat16 into AMX tiles 32 columns at a time. What it reads past the end of a row belongs to
    the next one, and is multiplied by zeros, which leaves nothing of a finite number and NaN of any other.

    Args:
        dtype: Of the product's factors.
        *columns: Of the first factor; of each one where several products follow each other.
    """
    return dtype == torch.bfloat16 and features().amx and any(count % _AMX_COLUMNS for count in columns)

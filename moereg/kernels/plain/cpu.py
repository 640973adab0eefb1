"""Queries the matmul features of this CPU: the only place that does, so that tests can stand in for another CPU."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch

_AMX_COLUMNS: Final = 32


@dataclasses.dataclass(frozen=True)
class CpuFeatures:
    """Features that torch and oneDNN use. ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA may hide some of the CPU's."""

    onednn: bool  # oneDNN has AVX kernels and a weight order for them; false on CPUs other than x86-64
    bf16: bool  # It multiplies bfloat16, at least with AVX-512's conversions
    fp16: bool  # It multiplies float16 with AVX-512 FP16
    # It multiplies int8 with AVX-512 VNNI. torch alone has a plain loop, which took 64 ms for 32 x 2048 x 1536 on an
    # AMD EPYC without VNNI, against 3 ms in fp32
    int8: bool
    amx: bool  # It may multiply bfloat16 in AMX tiles


@functools.cache
def features() -> CpuFeatures:
    """Features of this CPU, queried once. Call `cpu.features()`: the tests' `cpu_features` fixture replaces it."""
    capability = torch.backends.cpu.get_cpu_capability()
    onednn = torch.backends.mkldnn.is_available() and capability.startswith("AVX")
    # oneDNN answers for AVX-512 as it may use it; torch's own functions answer for the CPU.
    avx512 = onednn and capability == "AVX512" and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return CpuFeatures(
        onednn=onednn,
        bf16=avx512,
        fp16=avx512 and torch.ops.mkldnn._is_mkldnn_fp16_supported(),
        int8=avx512 and torch.cpu._is_vnni_supported(),
        amx=avx512 and torch.cpu._is_amx_tile_supported(),
    )


def mixes_rows(dtype: torch.dtype, *columns: int) -> bool:
    """Whether a row of a product on this CPU may depend on values in the next row that are not finite.

    oneDNN reads rows of bfloat16 into AMX tiles 32 columns at a time. Values past the end of a row are those of the
    next one and are multiplied by zeros, which gives 0 for finite numbers and NaN for any other.

    Args:
        dtype: The factors' dtype.
        *columns: Columns of the first factor, or of each one where several products follow each other.
    """
    return dtype == torch.bfloat16 and features().amx and any(count % _AMX_COLUMNS for count in columns)

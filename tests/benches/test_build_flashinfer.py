"""Which of FlashInfer's sources are compiled for the board, and what becomes of the others."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from benches.h200.build_flashinfer import missing_symbols, select_sources, stub_source

_DENSE = "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, {0}, {0}, {0},\n        void, EpilogueOpDefault, NONE,"
_MIXED = "template void sm90_generic_mixed_moe_gemm_kernelLauncher<{}, {},\n {}, A>"
_SOURCES = {
    "moe_gemm_kernels_bf16_bf16.cu": "",
    "moe_gemm_kernels_bf16_fp8.cu": "",
    "moe_gemm_kernels_bf16_fp4.cu": "",
    "moe_gemm_kernels_fp8_uint4.cu": "",
    "moe_gemm_tma_warp_specialized_input.cu": "",
    "logger.cpp": "",
    "bf16.generated.cu": _DENSE.format("__nv_bfloat16"),
    "float.generated.cu": _DENSE.format("float"),
    "fp4.generated.cu": _MIXED.format("__nv_bfloat16", "SafeFP4", "__nv_bfloat16"),
    "int4.generated.cu": _MIXED.format("__nv_fp8_e4m3", "cutlass::uint4b_t", "__nv_bfloat16"),
    "int4_half.generated.cu": _MIXED.format("__nv_fp8_e4m3", "cutlass::uint4b_t", "half"),
    "ampere.generated.cu": "template void sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::bfloat16_t, "
    "cutlass::bfloat16_t, 16,",
}


@pytest.mark.parametrize(
    ("schemes", "expected"),
    [
        (["unquantized"], ["moe_gemm_kernels_bf16_bf16.cu", "bf16.generated.cu"]),
        (["fp8_block128"], ["moe_gemm_kernels_bf16_fp8.cu"]),
        (
            ["int4_w4a8_g128", "mxfp4_w4a16"],
            ["moe_gemm_kernels_fp8_uint4.cu", "moe_gemm_kernels_bf16_fp4.cu", "int4.generated.cu", "fp4.generated.cu"],
        ),
    ],
    ids=["bf16", "blocks", "two"],
)
def test_a_scheme_takes_its_own_sources_and_what_all_need(
    schemes: list[str], expected: list[str], tmp_path: Path
) -> None:
    for name, text in _SOURCES.items():
        (tmp_path / name).write_text(text)
    chosen = {path.name for path in select_sources([tmp_path / name for name in _SOURCES], schemes)}
    assert chosen == {"moe_gemm_tma_warp_specialized_input.cu", "logger.cpp", *expected}
    with pytest.raises(SystemExit, match="no tiles of fp8_fp8 that"):
        select_sources([tmp_path / name for name in _SOURCES], ["fp8_tensor_static"])


_SOURCE = """
#include <exception>
namespace tensorrt_llm { struct Gemm { Gemm(int); int run() const; }; int built() { return 7; } }
extern "C" int works() { return tensorrt_llm::built(); }
extern "C" bool throws() {
  try { tensorrt_llm::Gemm gemm(3); return gemm.run() < 0; } catch (const std::exception& error) { return true; }
}
"""


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("nm")), reason="needs a C++ compiler and binutils")
def test_a_kernel_that_was_not_built_throws_instead_of_ending_the_process(tmp_path: Path) -> None:
    source, stubs, library = (tmp_path / name for name in ("one.cpp", "stubs.cpp", "one.so"))
    source.write_text(_SOURCE)
    command = ["c++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    missing = missing_symbols(library)
    assert sorted(missing) == ["_ZN12tensorrt_llm4GemmC1Ei", "_ZNK12tensorrt_llm4Gemm3runEv"]
    stubs.write_text(stub_source(missing, ["unquantized"]))
    subprocess.run([*command, str(stubs)], check=True)
    assert not missing_symbols(library)
    loaded = ctypes.CDLL(str(library))
    assert loaded.works() == 7
    assert loaded.throws()

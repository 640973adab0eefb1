"""Builds the CUTLASS kernels of FlashInfer that the board measures on Hopper: a part, since all of them take hours.

    CUDA_HOME=/usr/local/cuda python -m benches.h200.build_flashinfer SCHEME... [--out FILE] [--jobs N]

The kernels are for layers in bfloat16. FlashInfer's generator writes the sources and the flags, and the result goes
where FlashInfer looks for modules that were built ahead of time, unless `--out` names a file. It needs nvcc, ninja, a
C++ compiler and binutils, but neither a GPU nor a network. The same command goes on with an interrupted build; with
other schemes it replaces the result and compiles only what is new.

Everything else in the module becomes a stub that throws: a symbol that is missing would end the process at the first
call. FlashInfer prefers this file to its wheel of prebuilt kernels, so remove it after measuring.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from moereg.runtime.memory import free_memory_bytes
from moereg.runtime.python_process import num_cores

__all__ = ["SCHEMES", "missing_symbols", "select_sources", "stub_source"]

SCHEMES: Final = {
    "unquantized": ("bf16_bf16", ("__nv_bfloat16", "__nv_bfloat16")),
    "fp8_tensor_static": ("fp8_fp8", ("__nv_fp8_e4m3", "__nv_fp8_e4m3")),
    # Its products are compiled at run time by a part that every scheme's build contains.
    "fp8_block128": ("bf16_fp8", ()),
    "mxfp4_w4a16": ("bf16_fp4", ("__nv_bfloat16", "SafeFP4")),
    # The generator has tiles that write float16 too.
    "int4_w4a8_g128": ("fp8_uint4", ("__nv_fp8_e4m3", "cutlass::uint4b_t", "__nv_bfloat16")),
}
"""For each scheme, the end of the name of the source that chooses among its tiles, and what the tiles instantiate:
element types of activations, weights and, if there are tiles for others, outputs."""

_DISPATCH: Final = "moe_gemm_kernels_"
_INSTANTIATION: Final = re.compile(
    r"INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM\(\s*Sm90\s*,([^,]+),([^,]+),([^,]+),"
    r"|template void sm90_generic_\w*moe\w*Launcher<([^,>]+),([^,>]+),([^,>]*)"
)
_COMPILER_BYTES: Final = int(8.1 * 2**30)
"""The most memory that nvcc 13.0 took for one file."""


def select_sources(sources: Iterable[Path], schemes: Iterable[str]) -> list[Path]:
    """The module's sources that some schemes need.

    A generated source is recognized by what it instantiates, since FlashInfer renumbers its files whenever it adds a
    tile.

    Raises:
        SystemExit: A scheme has no tiles, so FlashInfer's generator writes them differently.
    """
    wanted = dict(SCHEMES[scheme] for scheme in schemes)
    found: set[str] = set()
    chosen = []
    for path in sources:
        if path.name.endswith(".generated.cu"):
            tiles = _tiles(path.read_text(encoding="utf-8"))
            users = {
                name for name, types in wanted.items() if types and any(one[: len(types)] == types for one in tiles)
            }
            found |= users
            is_chosen = bool(users)
        else:
            is_chosen = not path.stem.startswith(_DISPATCH) or path.stem.removeprefix(_DISPATCH) in wanted
        if is_chosen:
            chosen.append(path)
    if lacking := sorted(name for name, types in wanted.items() if types and name not in found):
        raise SystemExit(f"FlashInfer's generator writes no tiles of {', '.join(lacking)} that this program recognizes")
    return chosen


def _tiles(text: str) -> set[tuple[str, ...]]:
    """Element types of the tiles that a generated source instantiates."""
    return {tuple(one.strip() for one in match.groups() if one is not None) for match in _INSTANTIATION.finditer(text)}


def missing_symbols(library: Path) -> list[str]:
    """Functions of FlashInfer that a shared object calls and does not hold."""
    command = ["nm", "--dynamic", "--undefined-only", "--format=posix", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name, *_ in map(str.split, lines) if name.startswith(("_ZN12tensorrt_llm", "_ZNK12tensorrt_llm"))]


def stub_source(symbols: Iterable[str], schemes: Sequence[str]) -> str:
    """C++ source that defines each symbol as a function that throws."""
    message = f"this fused_moe_90.so was built for {', '.join(schemes)} alone, by benches/h200/build_flashinfer.py"
    aliases = "\n".join(f'asm(".globl {name}\\n.set {name}, board_has_no_kernel");' for name in symbols)
    return (
        "#include <stdexcept>\n"
        'extern "C" __attribute__((visibility("default"))) void board_has_no_kernel() {\n'
        f"  throw std::runtime_error({json.dumps(message)});\n"
        "}\n"
        f"{aliases}\n"
    )


def _specification(schemes: Sequence[str]) -> Any:
    """FlashInfer's build specification of the module, with fewer sources and a folder of its own."""
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"  # Read when FlashInfer is imported.
    from flashinfer.jit.cpp_ext import get_cuda_path
    from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

    home = Path(get_cuda_path())
    if not (home / "include" / "cuda_runtime.h").is_file():
        raise SystemExit(f"found no CUDA toolkit in {home}; name it in CUDA_HOME")
    # Headers of cuBLAS, cuRAND and NVRTC that a small toolkit lacks, searched after its own.
    nvidia = importlib.util.find_spec("nvidia")
    packages = () if nvidia is None else nvidia.submodule_search_locations or ()
    folders = [
        os.environ.get("CPLUS_INCLUDE_PATH", ""),
        *(str(one) for place in packages for one in Path(place).glob("*/include")),
    ]
    os.environ["CPLUS_INCLUDE_PATH"] = os.pathsep.join(filter(None, folders))
    whole = gen_cutlass_fused_moe_sm90_module()
    spec = dataclasses.replace(whole, name=f"board_{whole.name}", sources=select_sources(whole.sources, schemes))
    # Stand-ins for libraries that only a driver or a whole toolkit has. The result must name the driver's.
    stand_ins = spec.build_dir / "stand_ins"
    stand_ins.mkdir(parents=True, exist_ok=True)
    for name, soname in (("cuda", "libcuda.so.1"), ("nvrtc", "libnvrtc.so")):
        command = [os.environ.get("CXX", "c++"), "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}"]
        subprocess.run([*command, "-o", str(stand_ins / f"lib{name}.so")], check=True)
    driver = ("-Wl,--no-as-needed", "-lcuda", "-Wl,--as-needed")
    return dataclasses.replace(spec, extra_ldflags=[f"-L{stand_ins}", *(spec.extra_ldflags or ()), *driver])


def _link(spec: Any, jobs: int) -> Path:
    spec.write_ninja()
    command = ["ninja", "-C", str(spec.build_dir), "-f", spec.ninja_path.name, "-j", str(jobs)]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("the build failed; the same command goes on, with fewer --jobs if the compiler was killed")
    library: Path = spec.jit_library_path
    return library


def build(schemes: Sequence[str], out: Path | None, jobs: int) -> Path:
    """Builds the module for some schemes, and returns the path of the shared object."""
    spec = _specification(schemes)
    from flashinfer.jit import env

    library = _link(spec, jobs)
    stubs = spec.build_dir / "stubs.cpp"
    stubs.write_text(stub_source(missing_symbols(library), schemes), encoding="utf-8")
    library = _link(dataclasses.replace(spec, sources=[*spec.sources, stubs]), jobs)
    target = env.FLASHINFER_AOT_DIR / "fused_moe_90" / "fused_moe_90.so" if out is None else out
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    shutil.copyfile(library, temporary)
    temporary.replace(target)
    target.with_suffix(".schemes").write_text("\n".join(schemes), encoding="utf-8")
    return target


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benches.h200.build_flashinfer", description=__doc__)
    parser.add_argument("schemes", nargs="+", choices=SCHEMES, metavar="SCHEME", help=", ".join(SCHEMES))
    parser.add_argument("--out", type=Path, help="the file to write; where FlashInfer looks if left out")
    free = free_memory_bytes(torch.device("cpu"))
    jobs = num_cores() if free is None else max(1, min(num_cores(), free // _COMPILER_BYTES))
    parser.add_argument("--jobs", type=int, default=jobs, help=f"compilers at once; {jobs} here, for the free memory")
    options = parser.parse_args(argv)
    print(build(options.schemes, options.out, options.jobs))


if __name__ == "__main__":
    main()

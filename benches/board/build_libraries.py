"""Builds the fused layers of libraries that come as source, for the board's rows beside them, on Hopper.

    python -m benches.board.build_libraries LIBRARY SOURCE OUT [--jobs N] [--version TEXT] [--as-is]

SOURCE is a checkout of HPC-Ops (`hpc_ops`) or Alpha-MoE (`alpha_moe`); OUT gets LIBRARY.so, which registers the
library's own operators with torch, and `versions.json`. `python -m benches.board --libraries OUT` measures them.

HPC-Ops writes TMA descriptors on the device, and its kernels read them after an acquiring fence only where a call has
few rows per expert. Elsewhere they may read an earlier call's, so the fence is added there; `--as-is` adds none.
Alpha-MoE compiles all 160 of its tiles from one file; here each height has a compiler of its own.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

__all__ = ["fenced", "of_one_height", "versions_of"]

_FLAGS: Final = (
    *("-gencode", "arch=compute_90a,code=sm_90a", "-O3", "-std=c++17", "-Xcompiler=-fPIC", "-w"),
    *("--expt-relaxed-constexpr", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DNDEBUG", "--split-compile=4"),
)

# Stand-ins for two headers of torch, so that headers of cuBLAS, cuSPARSE and Python are not needed.
_HEADERS: Final = {
    "ATen/cuda/CUDAContext.h": "#pragma once\n#include <c10/cuda/CUDAStream.h>\n"
    "namespace at::cuda { using namespace c10::cuda; }\n",
    "torch/extension.h": "#pragma once\n#define PYBIND11_MODULE(name, module) void name##_module(int module)\n",
}

# The longest first.
_HPC_OPS: Final = (
    *("group_gemm/group_gemm_blockwise_fp8.cu", "group_gemm/group_gemm_pertensor_fp8.cu"),
    *("fuse_moe/count_and_gather_for_blockwise.cu", "fuse_moe/count_and_gather.cu"),
    *("group_gemm/cp_async/group_gemm_fp8_scatter.cu", "group_gemm/cp_async/group_gemm_fp8.cu"),
    *("group_gemm/cp_async/build_task_map.cu", "fuse_moe/cp_async/count.cu", "fuse_moe/cp_async/fuse_moe.cu"),
    *("fuse_moe/fuse_moe.cu", "fuse_moe/reduce.cu", "fuse_moe/entry.cc"),
    *("activation/activation.cu", "activation/entry.cc", "utils/utils.cc"),
)
_KERNEL: Final = "fused_moe_w8a8_wgmma_up_down_acc"
_HEIGHTS: Final = range(8, 129, 8)
_VERSIONS: Final = "versions.json"


class _Unit(NamedTuple):
    """A file to compile with flags of its own."""

    path: pathlib.Path
    flags: tuple[str, ...] = ()


def _changed(pattern: str, replacement: str, text: str, times: int) -> str:
    """Text with a pattern replaced as often as it is in the source that this program knows.

    Raises:
        SystemExit: It is there more or less often, so the source is another one.
    """
    found, count = re.subn(pattern, replacement, text)
    if count != times:
        raise SystemExit(f"{pattern} is in this source {count} times, expected {times}; take commit 6e2eced")
    return found


def fenced(text: str, times: int = 4) -> str:
    """Code of HPC-Ops' grouped GEMMs with a fence wherever a descriptor is about to be used without one."""
    pattern = r"(auto \*(td_[xy]) = td_xy \+ igroup \* 2[^;]*;)"
    fence = r"\1 if constexpr (kTaskLoopPolicy != 0) tma_descriptor_fence_acquire(\2);"
    return _changed(pattern, fence, text, times)


def of_one_height(text: str, height: int) -> str:
    """Code of Alpha-MoE's kernels that has the tiles of one height alone."""

    def kept(found: re.Match[str]) -> str:
        return found[0] if int(found[1]) == height else ""

    return re.sub(r"^ *case (\d+): *dispatch_bn_wn<\1>.*\n", kept, text, flags=re.MULTILINE)


def _hpc_ops(source: pathlib.Path, build: pathlib.Path, as_is: bool) -> tuple[list[_Unit], list[pathlib.Path]]:
    shutil.copytree(source / "src", build / "src")
    for name in _HPC_OPS[:2]:
        path = build / "src" / name
        # The fused layers launch every kernel to overlap with the one before: the other half takes minutes to compile.
        text = path.read_text(encoding="utf-8")
        path.write_text(_changed("bool kUsePDL = false;", "bool kUsePDL = true;", text, 2), encoding="utf-8")
    kernels = build / "src/group_gemm/kernels.cuh"
    if not as_is:
        kernels.write_text(fenced(kernels.read_text(encoding="utf-8")), encoding="utf-8")
    return [_Unit(build / "src" / name) for name in _HPC_OPS], [source / "3rd/cutlass/include"]


def _alpha_moe(source: pathlib.Path, build: pathlib.Path, as_is: bool) -> tuple[list[_Unit], list[pathlib.Path]]:
    text = (source / "csrc/kernels/fused_moe_w8a8/fused_moe_w8a8_up_down_acc.cu").read_text(encoding="utf-8")
    units = []
    for height in reversed(_HEIGHTS):
        path = build / f"height_{height}.cu"
        path.write_text(of_one_height(text, height), encoding="utf-8")
        units.append(_Unit(path, (f"-D{_KERNEL}=height_{height}",)))
    chosen = build / "chosen.cu"
    chosen.write_text(_chosen_height(), encoding="utf-8")
    return [*units, _Unit(chosen), _Unit(source / "csrc/torch_interface.cpp")], []


def _chosen_height() -> str:
    """The function that the library's torch code calls: it calls that of a height, its 18th argument."""
    codes, numbers, ids = "__nv_fp8_e4m3*", "const float*", "const int*"
    types = [f"const {codes}", numbers, codes, numbers, codes, numbers, "__nv_bfloat16*"]
    types += [ids, ids, ids, numbers, *["int"] * 10, "float", "cudaStream_t"]
    parameters = ", ".join(f"{kind} a{number}" for number, kind in enumerate(types))
    arguments = ", ".join(f"a{number}" for number in range(len(types)))
    lines = ["#include <cuda_bf16.h>", "#include <cuda_fp8.h>"]
    lines += [f"void height_{height}({parameters});" for height in _HEIGHTS]
    calls = " ".join(f"if (a17 == {height}) height_{height}({arguments});" for height in _HEIGHTS)
    return "\n".join([*lines, f"void {_KERNEL}({parameters}) {{ {calls} }}", ""])


_LIBRARIES: Final[dict[str, Callable[[pathlib.Path, pathlib.Path, bool], tuple[list[_Unit], list[pathlib.Path]]]]] = {
    "hpc_ops": _hpc_ops,
    "alpha_moe": _alpha_moe,
}


def versions_of(folder: pathlib.Path | None) -> dict[str, str]:
    """Versions of the libraries that were built into a folder, by distribution; none without a folder.

    Raises:
        OSError: Nothing was built there.
    """
    return {} if folder is None else json.loads((folder / _VERSIONS).read_text(encoding="utf-8"))


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise SystemExit("no nvcc: put it on PATH or set CUDA_HOME")
    return found


def _run(command: Sequence[str], name: str) -> None:
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"{name}: {time.monotonic() - begin:.0f} s, exit code {done.returncode}", flush=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-6000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Builds one library; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benches.board.build_libraries")
    parser.add_argument("library", choices=_LIBRARIES)
    parser.add_argument("source", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--version", default="unknown", help="of the source, for the stored rows")
    parser.add_argument("--as-is", action="store_true", help="without the fences that HPC-Ops lacks")
    options = parser.parse_args(arguments)
    from torch.utils.cpp_extension import include_paths, library_paths

    build = options.out / f"build_{options.library}"
    shutil.rmtree(build, ignore_errors=True)
    for name, text in _HEADERS.items():
        path = build / "headers" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    units, folders = _LIBRARIES[options.library](options.source, build, options.as_is)
    includes = [f"-I{folder}" for folder in (build / "headers", build, *folders, *include_paths())]
    objects = [str(build / f"{number}.o") for number in range(len(units))]
    nvcc = _nvcc()
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        commands = [
            [nvcc, *_FLAGS, *includes, *unit.flags, "-c", str(unit.path), "-o", target]
            for unit, target in zip(units, objects, strict=True)
        ]
        for _ in pool.map(_run, commands, [unit.path.name for unit in units]):
            pass
    # Each height has the same helpers beside its own kernels.
    libraries = ["-Xlinker=-z,muldefs", *(f"-L{folder}" for folder in library_paths())]
    libraries += ["-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch"]
    target = options.out / f"{options.library}.so"
    _run([nvcc, "-shared", *objects, *libraries, "-o", str(target)], target.name)
    version = options.version + (" as is" if options.as_is or options.library != "hpc_ops" else " with fences")
    known = versions_of(options.out) if (options.out / _VERSIONS).exists() else {}
    versions = {**known, options.library.replace("_", "-"): version}
    (options.out / _VERSIONS).write_text(json.dumps(versions), encoding="utf-8")
    shutil.rmtree(build)
    return 0


if __name__ == "__main__":
    sys.exit(main())

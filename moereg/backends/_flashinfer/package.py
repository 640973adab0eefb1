"""Facts about an installed FlashInfer, found without importing it: its folder, built modules and missing tools.

Importing it takes a second, initializes the GPU (after which a process cannot fork), and creates folders. So probes
read files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform as python_platform
import shutil
import tempfile
from pathlib import Path
from typing import Final

from moereg.platforms import Platform

__all__ = [
    "DISTRIBUTION",
    "JIT_DISABLED",
    "REQUIRES",
    "built_module",
    "cache_folder",
    "can_be_imported",
    "can_compile_at_run_time",
    "cuda_home",
    "deepgemm_folder",
    "foreign_machine",
    "has_compiler",
    "installed_version",
    "lacking_compiler",
    "nvcc_path",
    "package_folder",
]

DISTRIBUTION: Final = "flashinfer-python"
REQUIRES: Final = "flashinfer-python>=0.7.2,<0.8"
"""The calls are written against 0.7.2. 0.8 announces other return values."""

JIT_DISABLED: Final = "FLASHINFER_DISABLE_JIT"
"""Environment variable that makes FlashInfer raise instead of compiling."""

# Imports of `import flashinfer`, besides torch and torch's own requirements.
_IMPORTED: Final = ("tvm_ffi", "filelock", "jinja2", "numpy", "packaging", "pynvml", "requests", "tqdm")
# Files that every entry point needs; an incomplete installation lacks some.
_FILES: Final = ("__init__.py", "fused_moe/__init__.py", "fused_moe/core.py", "jit/core.py", "jit/env.py")

# `e_machine` of ELF files.
_ELF_MACHINES: Final = {0x3E: "x86_64", 0xB7: "aarch64"}


@functools.cache
def package_folder() -> Path | None:
    """The folder that `import flashinfer` would load, or None."""
    try:
        spec = importlib.util.find_spec("flashinfer")
    except (ImportError, ValueError):  # The module is half imported or no package.
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def installed_version() -> str | None:
    """Version of the installed distribution, or None."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """FlashInfer's folder of compiled and downloaded files, by its own rule: `~/.cache/flashinfer` by default."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home())) / ".cache" / "flashinfer"


def built_module(module: str, target: str) -> Path | None:
    """A module's shared object that loads without compiling: built ahead of time, from a wheel, or cached.

    Args:
        module: Such as `fused_moe_90`.
        target: Compute capability in FlashInfer's spelling, such as `90a`.
    """
    folder = package_folder()
    ahead = None if folder is None else folder / "data" / "aot" / module / f"{module}.so"
    if ahead is not None and ahead.is_file():
        return ahead
    for package in ("flashinfer_jit_cache", f"flashinfer_jit_cache_sm{target}"):
        if found := _in_wheel(package, module):
            return found
    cached = cache_folder() / (installed_version() or "") / target / "cached_ops" / module / f"{module}.so"
    return cached if cached.is_file() else None


def _in_wheel(package: str, module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / "jit_cache" / module / f"{module}.so"
        if path.is_file():
            return path
    return None


def can_be_imported(platform: Platform) -> str | None:
    """Probe: why `import flashinfer` would fail here, or None."""
    folder = package_folder()
    if folder is None:
        return f"requires the package flashinfer, found its distribution alone; reinstall {DISTRIBUTION}"
    missing = [file for file in _FILES if not (folder / file).is_file()]
    if missing:
        return f"requires a whole flashinfer package, found no {missing[0]} in {folder}; reinstall {DISTRIBUTION}"
    lacking = [name for name in _IMPORTED if not _is_importable(name)]
    if lacking:
        return f"requires the packages that flashinfer imports, found no {', '.join(lacking)}; install them"
    # It has folders per FlashInfer version and device target, with a log. Another user may have made them.
    used = cache_folder() / (installed_version() or "")
    made = [folder for folder in (used, *sorted(used.glob("*"))) if folder.is_dir()]
    for folder in (cache_folder(), *made):
        if reason := _unwritable(folder, "FLASHINFER_WORKSPACE_BASE"):
            return reason
    for log in (folder / "flashinfer_jit.log" for folder in made):
        if log.exists() and not os.access(log, os.W_OK):
            return (
                f"requires that FlashInfer can write its log, got {log} (permission denied); remove it, or set "
                "FLASHINFER_WORKSPACE_BASE to another folder"
            )
    return None


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _unwritable(folder: Path, variable: str) -> str | None:
    """Why FlashInfer cannot create or write a folder, with the variable that names another; or None."""
    existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    try:
        # Permission bits mean little to root or on a read-only or full file system, so try an unnamed file.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0")
            file.flush()
            return None
    except OSError as error:
        why = error.strerror or type(error).__name__
        return (
            f"requires a cache folder that can be written, got {folder} ({why.lower()}); "
            f"set {variable} to a folder that can"
        )


def cuda_home() -> Path | None:
    """The CUDA toolkit that FlashInfer would compile with, or None.

    FlashInfer takes the folder above the `nvcc` on the path. If that is a wrapper script, the folder has no headers,
    and CUDA_HOME has to name the toolkit.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if named := os.environ.get(variable):
            return Path(named)
    found = shutil.which("nvcc")
    default = Path("/usr/local/cuda")
    if found is not None:
        return Path(found).parent.parent
    return default if default.exists() else None


def nvcc_path() -> Path | None:
    """The `nvcc` that FlashInfer would run, or None."""
    named = os.environ.get("FLASHINFER_NVCC")
    if named is not None:
        found = shutil.which(named)
        return None if found is None else Path(found)
    home = cuda_home()
    nvcc = None if home is None else home / "bin" / "nvcc"
    return nvcc if nvcc is not None and os.access(nvcc, os.X_OK) else None


def lacking_compiler() -> list[str]:
    """Missing tools that FlashInfer needs to compile; empty if it can."""
    tools = [] if nvcc_path() is not None else ["nvcc"]
    return tools + [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]


def has_compiler(platform: Platform) -> str | None:
    """Probe: why FlashInfer cannot compile kernels at first use here, or None."""
    if os.environ.get(JIT_DISABLED):
        return f"requires that FlashInfer may compile kernels, got {JIT_DISABLED}={os.environ[JIT_DISABLED]}; unset it"
    if lacking := lacking_compiler():
        return (
            f"requires nvcc, ninja and a C++ compiler, since FlashInfer compiles these kernels at first use, found no "
            f"{' and no '.join(lacking)}; install the CUDA toolkit, and name it in CUDA_HOME"
        )
    return None


_DEEPGEMM: Final = Path("data", "csrc", "nv_internal", "tensorrt_llm", "deep_gemm")
"""The package's headers that the run-time compiler compiles."""


def deepgemm_folder() -> Path:
    """The folder of kernels and sources of FlashInfer's run-time compiler (nvcc)."""
    if named := os.environ.get("TRTLLM_DG_CACHE_DIR"):
        return Path(named)
    home = os.environ.get("HOME")
    return Path(home) / ".tensorrt_llm" if home is not None else Path(tempfile.gettempdir()) / "tensorrt_llm"


def can_compile_at_run_time(platform: Platform) -> str | None:
    """Probe: why the part of FlashInfer that always compiles with nvcc cannot, or None."""
    named = os.environ.get("TRTLLM_DG_NVCC_COMPILER")
    home = os.environ.get("CUDA_HOME")
    found = named or (Path(home) / "bin" / "nvcc" if home else "nvcc")
    if shutil.which(found) is None:
        return (
            f"requires nvcc, which compiles these kernels at first use, found no {found}; install the CUDA toolkit, "
            "and name it in CUDA_HOME"
        )
    folder = package_folder()
    if folder is not None and not (folder / _DEEPGEMM).is_dir():
        return (
            f"requires the headers of these kernels, which are compiled at first use, found no {folder / _DEEPGEMM}; "
            f"reinstall {DISTRIBUTION}"
        )
    return _unwritable(deepgemm_folder(), "TRTLLM_DG_CACHE_DIR")


def foreign_machine(path: Path) -> str | None:
    """Why the process cannot load a shared object: truncated, not one, or for another processor.

    Args:
        path: An ELF file.
    """
    try:
        with path.open("rb") as file:
            header = file.read(20)
    except OSError as error:
        return f"cannot be read ({(error.strerror or type(error).__name__).lower()})"
    if len(header) < 20 or header[:4] != b"\x7fELF":
        return "is no shared object"
    machine = _ELF_MACHINES.get(int.from_bytes(header[18:20], "little"), "another processor")
    here = python_platform.machine()
    return None if machine == here else f"was built for {machine}, and this machine is {here}"

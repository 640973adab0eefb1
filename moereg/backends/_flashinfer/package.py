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
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from moereg.platforms import Platform

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


def find_folder(name: str) -> Path | None:
    """The folder that a package would be imported from, or None."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # The module is half imported or no package.
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def is_importable(name: str) -> bool:
    """Whether a module is imported or would be found."""
    try:
        return sys.modules.get(name) is not None or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


@functools.cache
def package_folder() -> Path | None:
    """FlashInfer's folder, or None."""
    return find_folder("flashinfer")


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

    `module` and `target` are such as `fused_moe_90` and `90a`, the compute capability in FlashInfer's spelling.
    """
    wheels = ("flashinfer_jit_cache", f"flashinfer_jit_cache_sm{target}")
    below = [(package_folder(), "data/aot"), *((find_folder(wheel), "jit_cache") for wheel in wheels)]
    cached = cache_folder() / (installed_version() or "") / target
    folders = [folder / part for folder, part in below if folder is not None] + [cached / "cached_ops"]
    paths = (folder / module / f"{module}.so" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def built_schemes(path: Path) -> list[str] | None:
    """The schemes that alone have kernels in a shared object, by a note beside it; None without one.

    A note that is older than the file is another file's.
    """
    note = path.with_suffix(".schemes")
    try:
        return note.read_text().split() if note.stat().st_mtime >= path.stat().st_mtime else None
    except OSError:
        return None


def can_be_imported(platform: Platform) -> str | None:
    """Probe: why `import flashinfer` would fail here, or None."""
    folder = package_folder()
    if folder is None:
        return f"requires the package flashinfer, found its distribution alone; reinstall {DISTRIBUTION}"
    missing = [file for file in _FILES if not (folder / file).is_file()]
    if missing:
        return f"requires a whole flashinfer package, found no {missing[0]} in {folder}; reinstall {DISTRIBUTION}"
    lacking = [name for name in _IMPORTED if not is_importable(name)]
    if lacking:
        return f"requires the packages that flashinfer imports, found no {', '.join(lacking)}; install them"
    # It has folders per FlashInfer version and device target, with a log. Another user may have made them.
    used = cache_folder() / (installed_version() or "")
    made = [folder for folder in (used, *sorted(used.glob("*"))) if folder.is_dir()]
    for folder in (cache_folder(), *made):
        if reason := unwritable(folder, "set FLASHINFER_WORKSPACE_BASE to a folder that can"):
            return reason
    for log in (folder / "flashinfer_jit.log" for folder in made):
        if log.exists() and not os.access(log, os.W_OK):
            return (
                f"requires that FlashInfer can write its log, got {log} (permission denied); remove it, or set "
                "FLASHINFER_WORKSPACE_BASE to another folder"
            )
    return None


def unwritable(folder: Path, cure: str) -> str | None:
    """Why a library cannot create or write its cache folder, or None."""
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.exists() or path.is_symlink())
    try:
        # Permission bits mean little to root or on a read-only or full file system, so try an unnamed file.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"0")
            file.flush()
            return None
    except OSError as error:
        why = error.strerror or type(error).__name__
        return f"requires a cache folder that can be written, got {folder} ({why.lower()}); {cure}"


def _nvcc() -> Path | None:
    """The `nvcc` that FlashInfer would run, or None.

    FlashInfer takes the toolkit above the `nvcc` on the path. If that is a wrapper script, the folder has no headers,
    and CUDA_HOME has to name the toolkit.
    """
    if (named := os.environ.get("FLASHINFER_NVCC")) is not None:
        found = shutil.which(named)
        return None if found is None else Path(found)
    home: str | Path | None = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None
    if home is None and (found := shutil.which("nvcc")) is not None:
        home = Path(found).parent.parent
    nvcc = Path(home or "/usr/local/cuda") / "bin" / "nvcc"
    return nvcc if os.access(nvcc, os.X_OK) else None


def has_compiler(platform: Platform) -> str | None:
    """Probe: why FlashInfer cannot compile kernels at first use here, or None."""
    if os.environ.get(JIT_DISABLED):
        return f"requires that FlashInfer may compile kernels, got {JIT_DISABLED}={os.environ[JIT_DISABLED]}; unset it"
    lacking = [] if _nvcc() is not None else ["nvcc"]
    lacking += [tool for tool in ("ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    if lacking:
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
    return unwritable(deepgemm_folder(), "set TRTLLM_DG_CACHE_DIR to a folder that can")


def foreign_machine(path: Path) -> str | None:
    """Why the process cannot load an ELF file: truncated, no shared object, or for another processor."""
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


# Downloads at first use: TensorRT-LLM's generated kernels, and headers that other modules include. Without a network
# the first call fails after a minute of retries.

_CUBINS: Final = "flashinfer_cubin"
_PIN: Final = re.compile(r'TRTLLM_GEN_BMM\s*:\s*str\s*=\s*\(?\s*"([^"]+)"')
_DOWNLOAD: Final = "run flashinfer download-cubin where there is a network, or name a folder that has them in "
_CUBIN_DIR: Final = "FLASHINFER_CUBIN_DIR"


def download_folder() -> Path:
    """The folder of FlashInfer's downloads: a named one, a wheel of the same version, or its cache."""
    if named := os.environ.get(_CUBIN_DIR):
        return Path(named)
    return _wheel_of_downloads() or cache_folder() / "cubins"


def _wheel_of_downloads() -> Path | None:
    try:
        version = importlib.metadata.version(_CUBINS.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        return None
    if version != installed_version() and not os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    folder = find_folder(_CUBINS)
    return None if folder is None else folder / "cubins"


def generated_folder() -> str | None:
    """This release's folder of generated GEMMs below `download_folder()`; None if the release does not name it."""
    folder = package_folder()
    try:
        found = None if folder is None else _PIN.search((folder / "artifacts.py").read_text())
    except OSError:
        return None
    return None if found is None else found.group(1).strip("/")


def has_generated_headers() -> str | None:
    """Why FlashInfer would have to download headers of the generated GEMMs, or None."""
    return _lacking("headers of TensorRT-LLM's kernels", "include/trtllmGen_bmm_export/*.h")


def has_generated_kernels() -> str | None:
    """Why FlashInfer would have to download the generated GEMMs themselves, or None."""
    return _lacking("TensorRT-LLM's kernels", "*.cubin")


def _lacking(what: str, pattern: str) -> str | None:
    generated = generated_folder()
    if generated is None:
        return None
    folder = download_folder() / generated
    if any(folder.glob(pattern)):
        return None
    return f"requires {what}, which FlashInfer downloads, found none in {folder}; {_DOWNLOAD}{_CUBIN_DIR}"

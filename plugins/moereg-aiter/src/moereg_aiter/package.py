"""Facts about an installed AITER, found without importing it. Its import asks the GPU and may start a compiler."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Final

from moereg.author import Platform

__all__ = ["REQUIRES", "can_be_imported", "can_load_kernels", "has_built_kernels", "jit_folder", "package_folder"]

_SOURCE: Final = "git+https://github.com/ROCm/aiter@v0.1.20"

REQUIRES: Final = (f"amd-aiter @ {_SOURCE}", "amd-aiter>=0.1.16,<0.1.21")
"""Its source, since it is on no package index, and the releases whose source was read.

Before 0.1.16, tuned configurations are looked up with the masked slot and none is found. Its releases count the last
number and change what this backend relies on: which kernels read a mask.
"""

_INSTALL: Final = f"pip install '{REQUIRES[0]}'"
_MODULES: Final = "module_moe*.so"
# How clang names the targets inside a module.
_TARGETS: Final = re.compile(rb"amdhsa--(gfx[0-9a-z]+)")


def package_folder() -> Path | None:
    """The folder that `import aiter` would load, or None."""
    try:
        spec = importlib.util.find_spec("aiter")
    except (ImportError, ValueError):  # A module of that name that is half imported or no package.
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def jit_folder() -> Path | None:
    """AITER's folder for modules that it compiles, by its own rule; None without the package."""
    if named := os.environ.get("AITER_JIT_DIR"):
        return Path(named)
    folder = package_folder()
    if folder is None:
        return None
    return folder / "jit" if _can_write(folder / "jit") else Path.home() / ".aiter" / "jit"


def has_built_kernels() -> bool:
    """Whether modules with MoE kernels are there, out of the wheel or compiled before."""
    return bool(_built())


def can_be_imported(platform: Platform) -> str | None:
    """Probe: why `import aiter` would fail or load something else, or None."""
    folder = package_folder()
    if folder is None:
        return f"requires the package aiter, found none; {_INSTALL}"
    if not (folder / "fused_moe.py").is_file():
        return f"requires AMD's aiter, found another package of that name in {folder}; {_INSTALL}"
    jit = jit_folder()
    if jit is not None and not _can_write(jit):
        return f"requires a folder for compiled kernels, cannot write to {jit}; set AITER_JIT_DIR to one"
    return None


def can_load_kernels(platform: Platform) -> str | None:
    """Probe: why AITER would have no kernels for this GPU, or None."""
    if shutil.which("hipcc") or (Path(os.environ.get("ROCM_PATH", "/opt/rocm")) / "bin" / "hipcc").is_file():
        return None
    built = _built()
    if not built:
        return (
            "requires hipcc to compile kernels at their first call, or a wheel that holds them, found neither; install "
            "ROCm's compiler, or build the wheel with PREBUILD_KERNELS=1"
        )
    targets = {target for path in built for target in _targets(path)}
    if targets and platform.arch not in targets:
        return (
            f"requires kernels for {platform.arch}, found modules for {', '.join(sorted(targets))} and no hipcc; "
            f"build the wheel with GPU_ARCHS={platform.arch}"
        )
    return None


def _built() -> list[Path]:
    folder = package_folder()
    folders = {jit_folder(), None if folder is None else folder / "jit"} - {None}
    return sorted(path for folder in folders if folder is not None for path in folder.glob(_MODULES))


def _targets(path: Path) -> set[str]:
    """GPUs that a shared object has code for."""
    try:
        return {match.decode() for match in _TARGETS.findall(path.read_bytes())}
    except OSError:
        return set()


def _can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, or in the first of its parents that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return False
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False

"""Facts about the compiler of cuTile kernels, found without importing cuda.tile, which takes a second."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from moereg.platforms import Platform

__all__ = ["CUDA_TILE", "can_compile_tiles", "find_tileiras"]

CUDA_TILE: Final = "cuda-tile>=1.4,<2"
"""FlashInfer needs its tuning module, which 1.4 added."""

# cuda.tile uses these packages' compiler if all three have the same release, otherwise it searches the path.
_PACKAGES: Final = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
_CURE: Final = "install cuda-tile[tileiras] with nvidia-cuda-tileiras>=13.4, or CUDA 13.4"


def find_tileiras() -> Path | None:
    """The tileiras that cuda.tile would run: from Python packages, the path or a CUDA toolkit; or None."""
    if (packaged := _packaged()) is not None:
        return packaged
    if (found := shutil.which("tileiras")) is not None:
        return Path(found)
    homes = [os.environ.get("CUDA_HOME"), *sorted(map(str, Path("/usr/local").glob("cuda*")), reverse=True)]
    for home in filter(None, homes):
        if (found := shutil.which("tileiras", path=str(Path(home) / "bin"))) is not None:
            return Path(found)
    return None


def _packaged() -> Path | None:
    releases = set()
    for name in _PACKAGES:
        try:
            releases.add(tuple(importlib.metadata.version(name).split(".")[:2]))
        except importlib.metadata.PackageNotFoundError:
            return None
    if len(releases) > 1:
        return None
    for file in importlib.metadata.files(_PACKAGES[0]) or ():
        if file.name == "tileiras":
            path = Path(str(file.locate()))
            return path if path.is_file() else None
    return None


@functools.cache
def _help(path: Path) -> str:
    """The output of `tileiras --help`; empty if it does not run."""
    try:
        result = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout + result.stderr


def can_compile_tiles(platform: Platform) -> str | None:
    """Probe: why cuTile kernels cannot be compiled for this machine, or None.

    Releases before 13.4 lack sm90, so this reads the compiler's own list.
    """
    path = find_tileiras()
    if path is None:
        return f"requires the compiler tileiras, since cuTile kernels are compiled at first use, found none; {_CURE}"
    text = _help(path)
    arch = platform.arch.replace("sm", "sm_", 1)
    if not text:
        return f"requires a tileiras that runs, got {path}, which does not; {_CURE}"
    if f"={arch} " not in text:
        return f"requires a tileiras that compiles for {arch}, got {path}, which does not; {_CURE}"
    return None

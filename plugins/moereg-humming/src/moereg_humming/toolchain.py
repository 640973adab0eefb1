"""Looks for the compiler that Humming's kernels need at run time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from moereg.author import Platform


def no_compiler(platform: Platform) -> str | None:
    """The reason that kernels cannot be compiled here, or None. Reads the file system, imports nothing."""
    if any((root / "include" / "nvrtc.h").is_file() for root in _cuda_roots()):
        return None
    return (
        "requires CUDA's headers and NVRTC to compile kernels at run time, found no nvrtc.h; install "
        "humming-kernels[cu13] (or [cu12]), or a CUDA toolkit and set CUDA_HOME"
    )


def _cuda_roots() -> list[Path]:
    """Folders that may hold a CUDA toolkit, in Humming's order: the system's, the environment's, those of wheels."""
    roots = sorted(Path("/usr/local").glob("cuda*"))
    roots += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for entry in sys.path:
        packages = Path(entry or ".") / "nvidia"
        roots += [packages / "cu13", packages / "cuda_nvrtc"]
    return roots

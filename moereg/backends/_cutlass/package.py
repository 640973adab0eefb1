"""Facts about an installed QuACK, found without the seconds that importing it takes."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path
from typing import Final

from moereg.backends._flashinfer.package import find_folder, foreign_machine, is_importable, unwritable
from moereg.platforms import Platform

REQUIRES: Final = ("quack-kernels>=0.6.5,<0.7", "nvidia-cutlass-dsl>=4.8,<5", "triton>=3.6")
"""The calls are written against QuACK 0.6.5: 0.6.0 and 0.6.1 have no epilogues, and 0.6.2 lacks functions for
them. It imports triton without requiring it."""

_DSL: Final = "nvidia_cutlass_dsl"
# Imports of QuACK and CuTe DSL, besides torch and each other.
_IMPORTED: Final = ("cuda", "einops", "torch_c_dlpack_ext", "tvm_ffi")
# Private functions of `quack/activation.py`; any release may rename them.
_PRIVATE: Final = ("_maxnumf", "_minnumf")
_RUNTIMES: Final = ("cu12/lib/libcute_dsl_runtime.so", "cu13/lib/libcute_dsl_runtime.so")


def can_be_imported(platform: Platform) -> str | None:
    """Probe: why `import quack` would fail here, or None."""
    quack = find_folder("quack")
    if quack is None:
        return "requires the package quack, found its distribution alone; reinstall quack-kernels"
    if lacks := _lacks(quack):
        return f"requires QuACK's epilogues, found no {lacks} in {quack}; install quack-kernels==0.6.5"
    dsl = find_folder(_DSL)
    if dsl is None:
        return "requires CuTe DSL, found its distribution alone; reinstall nvidia-cutlass-dsl"
    language = find_folder("cutlass")
    if language is None or not language.is_relative_to(dsl):
        return (
            f"requires that `import cutlass` means CuTe DSL, found {language or 'nothing'}; install into a folder "
            f"whose .pth files Python reads, or add {dsl / 'dsl_packages'} to PYTHONPATH"
        )
    if not (_is_installed(language) or _is_installed(Path(__file__))):
        # QuACK follows a kernel's dependencies into functions outside site-packages: ours in a checkout, and from
        # there CuTe DSL's, which hold values that it refuses.
        return (
            f"requires CuTe DSL in a folder site-packages, as QuACK does, found {language}; install both into an "
            "environment, or --target DIR/site-packages"
        )
    lacking = [name for name in _IMPORTED if not is_importable(name)]
    if lacking:
        return f"requires the packages that QuACK imports, found no {', '.join(lacking)}; install them"
    runtimes = [dsl / name for name in _RUNTIMES if (dsl / name).is_file()]
    if not runtimes:
        return (
            f"requires CuTe DSL's runtime library, found none in {dsl}; install nvidia-cutlass-dsl-libs-cu12 or, for "
            "CUDA 13, nvidia-cutlass-dsl[cu13]"
        )
    # CuTe DSL loads the first one.
    why = foreign_machine(runtimes[0])
    return None if why is None else f"requires CuTe DSL's runtime library, but {runtimes[0]} {why}; reinstall it"


def cache_can_be_written(platform: Platform) -> str | None:
    """Probe: why QuACK cannot cache compiled kernels, which makes its first call raise; or None."""
    if os.environ.get("QUACK_CACHE_ENABLED", "1") != "1":
        return None
    named = os.environ.get("QUACK_CACHE_DIR")
    cure = "set QUACK_CACHE_DIR to a folder that can, or QUACK_CACHE_ENABLED=0"
    try:
        folder = Path(named) if named is not None else Path(tempfile.gettempdir()) / getpass.getuser() / "quack_cache"
    except (OSError, KeyError):  # In a container the user may have no name.
        return f"requires a cache folder, which QuACK names after the user, found no name of this one; {cure}"
    return unwritable(folder, cure)


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _lacks(quack: Path) -> str | None:
    """The first name the epilogues use that this QuACK lacks, or None; reads its source, imports nothing."""
    if not (quack / "epilogue" / "__init__.py").is_file():
        return "quack.epilogue"
    try:
        text = (quack / "activation.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "quack.activation"
    return next((f"quack.activation.{name}" for name in _PRIVATE if f"def {name}(" not in text), None)

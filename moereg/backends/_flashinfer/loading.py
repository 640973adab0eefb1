"""Loads FlashInfer's CUTLASS kernels without ever starting their build, which takes hours.

FlashInfer builds a module that it does not find or cannot load. So this looks for it first, and loads it with
FlashInfer's compiling switched off.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from moereg.backends._flashinfer import package
from moereg.platforms import Platform
from moereg.runtime.progress import long_wait

_MODULES: Final = {
    "sm90": ("fused_moe_90", "90a"),
    "sm100": ("fused_moe_100", "100a"),
    "sm103": ("fused_moe_103", "103a"),
    "sm120": ("fused_moe_120", "120f"),
    "sm121": ("fused_moe_120", "121a"),
}
"""FlashInfer's module for an architecture, and the architecture in FlashInfer's spelling."""

_INSTALL_COMMAND: Final = "flashinfer install-jit-cache-wheel"

_LOAD_SECONDS: Final = 6.0
"""Seconds on one core: 1.5 to import FlashInfer, the rest to write its sources."""

_LOCK: Final = threading.Lock()


class Library(NamedTuple):
    """FlashInfer's functions, activations and class of runners for one architecture; `path` is their file."""

    fused_moe: Any
    workspace_bytes: Any
    activation_type: Any
    runner: Any
    path: Path


@dataclasses.dataclass(frozen=True)
class BuiltKernels:
    """The probe of a scheme's CUTLASS kernels: why they cannot be loaded here, with the command that installs them.

    A class, since selections are pickled with their cells.
    """

    scheme: str
    __name__ = "has_built_kernels"

    def __call__(self, platform: Platform) -> str | None:
        if platform.arch not in _MODULES:
            return f"requires an architecture that FlashInfer builds these kernels for, got {platform.arch}"
        module, target = _MODULES[platform.arch]
        path = package.built_module(module, target)
        if path is None:
            return (
                f"requires the kernels {module} of FlashInfer, which are not built and take hours to compile; "
                f"run {_INSTALL_COMMAND}"
            )
        if fault := package.foreign_machine(path):
            return (
                f"requires the kernels {module} of FlashInfer, but {path} {fault}; remove it and run {_INSTALL_COMMAND}"
            )
        schemes = package.built_schemes(path)
        if schemes is not None and self.scheme not in schemes:
            return (
                f"requires FlashInfer's kernels of {self.scheme}, but {path} was built for {', '.join(schemes)} alone; "
                f"remove it and run {_INSTALL_COMMAND}"
            )
        return None


@functools.cache
def load(arch: str) -> Library:
    """FlashInfer with the kernels of an architecture such as `sm90`, imported; a RuntimeError if they do not load."""
    module, target = _MODULES[arch]
    path = package.built_module(module, target)
    if path is None:
        raise RuntimeError(f"FlashInfer's kernels {module} are not built; run {_INSTALL_COMMAND}")
    # FlashInfer rewrites a module's sources every time, even if it is built.
    wait = long_wait(f"loading FlashInfer's kernels {module}", _LOAD_SECONDS, "once a process")
    with _LOCK, wait:
        fused_moe, core = map(importlib.import_module, ("flashinfer.fused_moe", "flashinfer.fused_moe.core"))
        is_cached = package.cache_folder() in path.parents
        if is_cached:
            _check_fresh(module, path)
        try:
            # FlashInfer would start a build if it could not load the file.
            with contextlib.nullcontext() if is_cached else _no_compiling():
                namespace = core.get_cutlass_fused_moe_module(arch.removeprefix("sm"))
        except Exception as error:
            raise RuntimeError(
                f"{path} cannot be loaded ({_why_not_loaded(path, error)}); mend that, or remove the file and run "
                f"{_INSTALL_COMMAND}"
            ) from error
    return Library(
        fused_moe=fused_moe.cutlass_fused_moe,
        workspace_bytes=fused_moe.cutlass_fused_moe_workspace_size,
        activation_type=fused_moe.ActivationType,
        runner=namespace.MoERunner,
        path=path,
    )


def _why_not_loaded(path: Path, error: Exception) -> str:
    """The system loader's message about a shared object in one line, or FlashInfer's error if there is none."""
    why = f"{type(error).__name__}: {error}"
    try:
        ctypes.CDLL(str(path))
    except OSError as reason:  # FlashInfer only logs it, and raises because compiling is off.
        why = str(reason)
    return " ".join(why.removeprefix(f"{path}: ").split())


@contextlib.contextmanager
def _no_compiling() -> Iterator[None]:
    before = os.environ.get(package.JIT_DISABLED)
    os.environ[package.JIT_DISABLED] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[package.JIT_DISABLED]
        else:
            os.environ[package.JIT_DISABLED] = before


def _check_fresh(module: str, path: Path) -> None:
    """Checks that FlashInfer would not rebuild its cached module, as it does when its flags change."""
    fused_moe = importlib.import_module("flashinfer.jit.fused_moe")
    generators = {
        "fused_moe_90": fused_moe.gen_cutlass_fused_moe_sm90_module,
        "fused_moe_100": fused_moe.gen_cutlass_fused_moe_sm100_module,
        "fused_moe_103": fused_moe.gen_cutlass_fused_moe_sm103_module,
        "fused_moe_120": fused_moe.gen_cutlass_fused_moe_sm120_module,
    }
    spec = generators[module]()
    spec.write_ninja()
    command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", spec.ninja_path.name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if spec.jit_library_path != path or found.returncode or "no work to do" not in found.stdout:
        raise RuntimeError(
            f"FlashInfer would build {path} again, for hours; let it do so beforehand, or run {_INSTALL_COMMAND}"
        )

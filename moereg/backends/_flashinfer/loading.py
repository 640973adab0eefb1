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

from moereg.backends._flashinfer import kernel_sets, package
from moereg.backends._flashinfer.manifest import ManifestError, read_manifest
from moereg.platforms import Platform
from moereg.runtime.progress import long_wait

__all__ = ["BUILD_COMMAND", "KernelsProbe", "Library", "load", "reason_not_built", "specification"]

BUILD_COMMAND: Final = "moereg build-kernels flashinfer_cutlass"

_WHOLE_BUILD_HOURS: Final = 8.7
"""31,500 CPU-seconds for Hopper, from the files that were timed."""

_LOAD_SECONDS: Final = 6.0
"""Seconds on one core: 1.5 to import FlashInfer, the rest to write its sources."""

_LOCK: Final = threading.Lock()


class Library(NamedTuple):
    """FlashInfer's functions for the layers of one architecture.

    Attributes:
        fused_moe: `flashinfer.fused_moe.cutlass_fused_moe`.
        workspace_bytes: `flashinfer.fused_moe.cutlass_fused_moe_workspace_size`.
        activation_type: The enumeration of activations.
        runner: The class that lists the tactics for a pair of dtypes.
        path: The shared object.
    """

    fused_moe: Any
    workspace_bytes: Any
    activation_type: Any
    runner: Any
    path: Path


def reason_not_built(arch: str, name: str, asked: str) -> str | None:
    """Why a set of kernels cannot be loaded here, with the command that builds it; None if it can.

    Args:
        arch: Such as `sm90`.
        name: The set's name.
        asked: The command's options for this set, such as `--quant fp8_block128`.
    """
    try:
        module, capability, _ = kernel_sets.modules(arch)
    except KeyError:
        return f"requires an architecture that FlashInfer builds these kernels for, got {arch}"
    command = f"{BUILD_COMMAND} {asked}"
    path = package.built_module(module, capability.replace(".", ""))
    if path is None:
        return (
            f"requires FlashInfer's kernels {module}, which are not built (all of them take about "
            f"{_WHOLE_BUILD_HOURS} hours of one core, these a part of it); run {command}"
        )
    if fault := package.foreign_machine(path):
        return f"requires FlashInfer's kernels {module}, but {path} {fault}; remove it and run {command}"
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return f"requires to know what {path} holds, but its manifest {error}; run {command}"
    if manifest is None:
        is_handmade = path == package.aot_path(module)
        # FlashInfer ships none there, and a missing kernel would end the process.
        return f"requires to know what {path} holds, which has no manifest; run {command}" if is_handmade else None
    if manifest.flashinfer != package.installed_version():
        return (
            f"requires kernels of FlashInfer {package.installed_version()}, got {path} of {manifest.flashinfer}; "
            f"run {command}"
        )
    if name not in manifest.sets:
        return f"requires the kernels {name}, got {path} with {', '.join(manifest.sets)}; run {command}"
    return None


@dataclasses.dataclass(frozen=True)
class KernelsProbe:
    """Probe: why a set of kernels cannot be loaded here. A value, so that a selection can be pickled.

    Attributes:
        kernels: Name of the set.
        option: The option of `moereg build-kernels` that builds it.
    """

    kernels: str
    option: str

    @property
    def __name__(self) -> str:
        return f"flashinfer_has_{self.kernels}_kernels"

    def __call__(self, platform: Platform) -> str | None:
        """See `Probe`."""
        return reason_not_built(platform.arch, self.kernels, self.option)


@functools.cache
def load(arch: str) -> Library:
    """FlashInfer with the kernels of an architecture; imports FlashInfer.

    Args:
        arch: Such as `sm90`.

    Raises:
        RuntimeError: The kernels are not built or cannot be loaded.
    """
    module, capability, _ = kernel_sets.modules(arch)
    path = package.built_module(module, capability.replace(".", ""))
    if path is None:
        raise RuntimeError(f"FlashInfer's kernels {module} are not built; run {BUILD_COMMAND}")
    # FlashInfer rewrites a module's sources every time, even if it is built.
    wait = long_wait(f"loading FlashInfer's kernels {module}", _LOAD_SECONDS, "once a process")
    with _LOCK, wait:
        fused_moe, core = map(importlib.import_module, ("flashinfer.fused_moe", "flashinfer.fused_moe.core"))
        is_cached = package.cache_folder() in path.parents
        if is_cached:
            _check_fresh(specification(module), path)
        try:
            # FlashInfer would start a build if it could not load the file.
            with contextlib.nullcontext() if is_cached else _no_compiling():
                namespace = core.get_cutlass_fused_moe_module(arch.removeprefix("sm"))
        except Exception as error:
            raise RuntimeError(
                f"{path} cannot be loaded ({_why_not_loaded(path, error)}); mend that, or remove the file and run "
                f"{BUILD_COMMAND} on this machine"
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


def specification(module: str) -> Any:
    """FlashInfer's build specification of a module. Takes seconds and writes sources into FlashInfer's cache.

    Args:
        module: Such as `fused_moe_90`.
    """
    fused_moe = importlib.import_module("flashinfer.jit.fused_moe")
    generators = {
        "fused_moe_90": fused_moe.gen_cutlass_fused_moe_sm90_module,
        "fused_moe_100": fused_moe.gen_cutlass_fused_moe_sm100_module,
        "fused_moe_103": fused_moe.gen_cutlass_fused_moe_sm103_module,
        "fused_moe_120": fused_moe.gen_cutlass_fused_moe_sm120_module,
    }
    return generators[module]()


def _check_fresh(spec: Any, path: Path) -> None:
    """Checks that FlashInfer would not rebuild its cached module, as it does when its flags change."""
    spec.write_ninja()
    command = ["ninja", "-n", "-C", str(spec.build_dir), "-f", spec.ninja_path.name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if spec.jit_library_path != path or found.returncode or "no work to do" not in found.stdout:
        raise RuntimeError(
            f"FlashInfer would build {path} again, for hours; run {BUILD_COMMAND}, or let FlashInfer do it beforehand"
        )

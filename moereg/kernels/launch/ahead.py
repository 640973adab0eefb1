"""Compiles kernels ahead of their first launch, for a device that need not be present, as launches there need them.

Launch code runs on tensors without memory (torch's device `meta`). From dtypes, divisibility by 16, constants and
options, Triton works out which variant of a kernel each launch needs; instead of compiling it, we keep the request. Any
process forked afterwards can compile it, and the result goes to Triton's cache on disk.

`become` turns a process into one for an absent device, permanently: call it in a process of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import subprocess
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import Autotuner, driver
from triton.runtime.jit import JITFunction

_KIB: Final = 1024

# Most shared memory of a program: "Technical specifications per compute capability" of the CUDA programming guide, and
# the LDS of AMD's architecture manuals.
_SHARED_BYTES: Final = {
    ("cuda", "sm80"): 163 * _KIB,
    ("cuda", "sm86"): 99 * _KIB,
    ("cuda", "sm87"): 163 * _KIB,
    ("cuda", "sm89"): 99 * _KIB,
    ("cuda", "sm90"): 227 * _KIB,
    ("cuda", "sm100"): 227 * _KIB,
    ("cuda", "sm103"): 227 * _KIB,
    ("cuda", "sm120"): 99 * _KIB,
    ("cuda", "sm121"): 99 * _KIB,
    ("rocm", "gfx942"): 64 * _KIB,
    ("rocm", "gfx950"): 160 * _KIB,
}

# Only grids depend on it, and nothing is compiled for a grid.
_NUM_MULTIPROCESSORS: Final = 132


@dataclass(frozen=True, slots=True)
class Target:
    """Facts of a device that compilation or a choice of configurations depends on.

    Attributes:
        gpu: as Triton names it.
        shared_bytes: most shared memory of one program.
    """

    gpu: GPUTarget
    shared_bytes: int

    @classmethod
    def of(cls, kind: str, arch: str, shared_bytes: int | None = None) -> Target | None:
        """The target of a platform, or None where it is not known.

        Args:
            kind: `cuda` or `rocm`.
            arch: such as `sm90` or `gfx942`.
            shared_bytes: as a present device reports it; from a table where None.
        """
        known = shared_bytes or _SHARED_BYTES.get((kind, arch))
        if known is None or kind not in ("cuda", "rocm"):
            return None
        gpu = GPUTarget("cuda", int(arch[2:]), 32) if kind == "cuda" else GPUTarget("hip", arch, 64)
        return cls(gpu, known)

    @staticmethod
    def known() -> tuple[str, ...]:
        """Names of the platforms in the table."""
        return tuple(f"{kind}:{arch}" for kind, arch in _SHARED_BYTES)


class _AbsentDriver(DriverBase):  # type: ignore[misc]
    """Driver of an absent device."""

    def __init__(self, target: Target) -> None:
        self._target = target
        facts = {"max_shared_mem": target.shared_bytes, "multiprocessor_count": _NUM_MULTIPROCESSORS}
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: facts)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        def launch_once(launch: Callable[[], object], quantiles: Sequence[float]) -> list[float]:
            launch()  # Any configuration of an autotuner may win on the device, so all are recorded.
            return [1.0 for _ in quantiles]

        return launch_once


_COMPILE: Final = JITFunction._do_compile


class Variant:
    """A kernel as a launch asked for it, not compiled yet.

    Attributes:
        name: the kernel's module and name.
        digest: equal for equal variants of this process and those forked from it.
        effort: rough compile time, to order variants by.
    """

    def __init__(self, kernel: Any, key: str, arguments: tuple[Any, ...]) -> None:
        self.name = f"{kernel.__module__}:{kernel.__name__}"
        self.digest = hashlib.sha256(f"{self.name} {key}".encode()).hexdigest()[:24]
        # Gluon code takes longest to compile for its length.
        self.effort = len(kernel.src) * (4 if kernel.is_gluon() else 1)
        self._ask: Callable[[], Any] = lambda: _COMPILE(kernel, key, *arguments)

    def compile(self) -> tuple[Any, bool, float]:
        """Compiles it, or finds it in the cache; returns the kernel, whether it was there, and seconds."""
        start = time.monotonic()
        with counted_compilations() as count:
            compiled = self._ask()
        return compiled, not count.compiled, time.monotonic() - start


@dataclass(slots=True)
class CompilationCount:
    """Kernels that Triton has compiled, and those that it read from its cache on disk."""

    compiled: int = 0
    read: int = 0


@contextlib.contextmanager
def counted_compilations() -> Iterator[CompilationCount]:
    """Counts Triton's compilations during the block, in any thread of this process."""
    count = CompilationCount()
    previous = knobs.compilation.listener

    def listen(*arguments: Any, cache_hit: bool, **values: Any) -> None:
        if cache_hit:
            count.read += 1
        else:
            count.compiled += 1
        if previous is not None:
            previous(*arguments, cache_hit=cache_hit, **values)

    knobs.compilation.listener = listen
    try:
        yield count
    finally:
        knobs.compilation.listener = previous


def become(target: Target) -> Callable[[], list[Variant]]:
    """Makes this process one for an absent device, permanently and for all threads: launches are only recorded.

    Raises ValueError if this Triton cannot compile for the device.

    Returns:
        A function that returns the variants launched since its last call, in order.
    """
    try:
        triton.compiler.make_backend(target.gpu)
    except RuntimeError as error:
        raise ValueError(f"Triton {triton.__version__} has no compiler for {target.gpu.backend}") from error
    driver.set_active(_AbsentDriver(target))
    # The kernels ask torch for a device's facts; the only device here is `meta`.
    facts: Any = types.SimpleNamespace(multi_processor_count=_NUM_MULTIPROCESSORS)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: facts
    launched: list[Variant] = []
    run = JITFunction.run

    def ask(self: Any, key: str, *arguments: Any) -> Variant:
        variants = self.device_caches[driver.active.get_current_device()][0]
        variant = variants[key] = Variant(self, key, arguments)
        return variant

    def note(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        variant = run(self, *arguments, grid=grid, warmup=True, **options)
        launched.append(variant)
        return variant

    tune = Autotuner.run

    def tune_again(self: Any, *arguments: Any, **options: Any) -> Any:
        # Nothing is timed, so no choice may be kept: not on disk, nor for later calls, which would launch it alone.
        self.cache_results = False
        self.cache.clear()
        return tune(self, *arguments, **options)

    JITFunction._do_compile = ask
    JITFunction.run = note
    Autotuner.run = tune_again

    def take() -> list[Variant]:
        taken = launched[:]
        launched.clear()
        return taken

    return take


_NO_COMPILER: Final = "no C compiler works here, so the first launch of each kernel there needs one"


class HostBuilder:
    """Builds the host code for which Triton needs a C compiler: its binding of CUDA's driver, and launchers.

    Triton 3.6 and 3.7 build a launcher per argument list, at its first launch; later versions have one for all.

    Attributes:
        lack: why something could not be built here, or None.
    """

    def __init__(self, target: Target) -> None:
        self.lack: str | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._driver: Any = None
        if target.gpu.backend != "cuda":
            return
        self._driver = importlib.import_module("triton.backends.nvidia.driver")
        try:
            self._driver.library_dirs()
        except (AssertionError, OSError, subprocess.CalledProcessError):
            # The machine that loads the builds has CUDA's driver; the linker is content with an empty library.
            self._folder = tempfile.TemporaryDirectory(prefix="moereg-libcuda-")
            folder = self._folder.name
            self._driver.library_dirs = lambda: [folder]
            try:
                _link_empty(Path(folder) / "libcuda.so.1")
            except (OSError, subprocess.CalledProcessError):
                self.lack = _NO_COMPILER

    def build_binding(self) -> None:
        """Builds the binding of CUDA's driver, if it is not in the cache."""
        if self._driver is not None:
            self._build(self._driver.CudaUtils)

    def build_launcher(self, compiled: Any) -> None:
        """Builds the function that launches a kernel, if it is not in the cache."""
        if self._driver is not None and "make_launcher" in vars(self._driver):
            self._build(lambda: self._driver.CudaLauncher(compiled.src, compiled.metadata))

    def _build(self, build: Callable[[], Any]) -> None:
        if self.lack is not None:
            return
        try:
            build()
        except ImportError:
            pass  # It is in the cache, and loads where CUDA's driver is.
        except (OSError, RuntimeError, subprocess.CalledProcessError):
            self.lack = _NO_COMPILER

    def close(self) -> None:
        """Removes the temporary folder of the build."""
        if self._folder is not None:
            self._folder.cleanup()


def _link_empty(library: Path) -> None:
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-shared", "-o", str(library), "-x", "c", os.devnull], check=True, stderr=subprocess.DEVNULL
    )

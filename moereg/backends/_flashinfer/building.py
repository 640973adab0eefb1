"""Builds selected sets of FlashInfer's CUTLASS kernels ahead of time.

FlashInfer's generator writes the sources and flags, and the result goes where FlashInfer looks for modules built ahead
of time. Only the selected sources are compiled. Symbols of the others become stubs that throw; otherwise a call with
another dtype would end the process with a "symbol lookup error".
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from moereg.backends._flashinfer import kernel_sets, loading, package
from moereg.backends._flashinfer.manifest import Manifest, ManifestError, read_manifest
from moereg.errors import ArgumentError, BuildError, unknown_name_message
from moereg.experts import BuildPlan, KernelBuilder
from moereg.platforms import Platform
from moereg.spec.quant_schemes import QuantScheme

_BYTES_PER_JOB: Final = 8 * 2**30
"""The most memory that nvcc took for one file (measured: 8.1 GiB)."""

# Headers that the sources include besides FlashInfer's own; packages of torch's CUDA build have them.
_HEADERS: Final = ("cuda_runtime.h", "cublasLt.h", "cublas_v2.h", "curand_kernel.h", "nvrtc.h")
_LAST_LINES: Final = 12
_STUBS: Final = "moereg_missing.cpp"
# FlashInfer's dispatch file has both output dtypes, takes 540 s on one core and ends last; bfloat16 alone takes 310.
_OWN_DISPATCH: Final = "moereg_fp8_uint4_bfloat16"
_OWN_TEXT: Final = """#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"

namespace tensorrt_llm::kernels::cutlass_kernels {
template class MoeGemmRunner<__nv_fp8_e4m3, cutlass::uint4b_t, __nv_bfloat16>;
}
"""
_OWN_SECONDS: Final = 310.0
"""Seconds on one core with nvcc 13.0."""


@dataclasses.dataclass(frozen=True)
class _Token:
    """State needed to carry out a build plan: FlashInfer's build specification and the manifest."""

    spec: Any
    capability: str
    manifest: Manifest


class CutlassBuilder(KernelBuilder):
    """Builds a `fused_moe_*` module."""

    def plan(
        self,
        platform: Platform,
        schemes: Sequence[QuantScheme],
        dtypes: Sequence[str],
        parts: Sequence[str],
        folder: Path | None,
    ) -> BuildPlan:
        try:
            module, capability, known = kernel_sets.modules(platform.arch)
        except KeyError:
            raise ArgumentError(
                f"FlashInfer has CUTLASS kernels for sm90, sm100, sm103, sm120 and sm121, got {platform}; "
                "name one, as in --platform cuda:sm90"
            ) from None
        names = _names(schemes, dtypes, known, platform)
        for part in parts:
            if part not in known:
                raise ArgumentError(unknown_name_message(f"set of CUTLASS kernels for {platform}", part, known))
            names.append(part)
        self._check_tools()
        with _target(capability):
            spec = loading.specification(module)
        target = package.aot_path(module) if folder is None else folder / f"{module}.so"
        assert target is not None, "the package was looked for"
        built = _built(target)
        every = sorted({*names, *built}, key=known.index)
        build_folder = _build_folder(spec, capability)
        sources = with_own(kernel_sets.select_sources(spec.sources, every), build_folder)
        todo = [path for path in sources if not _object(build_folder, path).exists()]
        return BuildPlan(
            parts=tuple(name for name in every if name not in built),
            built=tuple(name for name in every if name in built),
            num_steps=len(todo) + 2,
            cpu_seconds=cpu_seconds(todo),
            bytes_per_job=_BYTES_PER_JOB,
            target=target,
            token=_Token(
                _trimmed(spec, sources, build_folder),
                capability,
                Manifest(module, package.installed_version() or "", _suffix(capability), tuple(every), 0, _release()),
            ),
        )

    def build(self, plan: BuildPlan, jobs: int, advance: Callable[[int, int], None]) -> None:
        token = plan.token
        assert isinstance(token, _Token)
        spec, folder = token.spec, token.spec.build_dir
        with _target(token.capability):
            write_own(spec.sources)
            spec.write_ninja()
            objects = [str(_object(folder, path)) for path in spec.sources]
            _run_ninja(folder, objects, jobs, lambda done, total: advance(done, total + 2))
            stubs = folder / _STUBS
            stubs.write_text(stub_source(missing_symbols(objects), plan.target), encoding="utf-8")
            linked = dataclasses.replace(spec, sources=[*spec.sources, stubs])
            linked.write_ninja()
            _run_ninja(folder, (), 1, lambda done, total: advance(plan.num_steps - total + done, plan.num_steps))
            _put_in_place(linked.jit_library_path, plan.target, token.manifest)

    @staticmethod
    def _check_tools() -> None:
        if package.package_folder() is None:
            raise ArgumentError(f"building needs {package.REQUIRES}, which is not installed; install it")
        if lacking := package.lacking_compiler():
            raise ArgumentError(
                f"building needs nvcc, ninja and a C++ compiler, found no {' and no '.join(lacking)}; "
                "install the CUDA toolkit, and name it in CUDA_HOME"
            )
        if lacking := [header for header in _HEADERS if not any((path / header).is_file() for path in _includes())]:
            raise ArgumentError(
                f"building needs headers of the CUDA toolkit, found no {', '.join(lacking)}; install the whole "
                "toolkit and name it in CUDA_HOME, or the packages nvidia-cublas, nvidia-curand and nvidia-cuda-nvrtc"
            )


def _names(
    schemes: Sequence[QuantScheme], dtypes: Sequence[str], known: Sequence[str], platform: Platform
) -> list[str]:
    """The sets that schemes and dtypes need, in the module's order."""
    if not schemes:
        left_out = {"float16"} | ({kernel_sets.AMPERE} if "bfloat16" in known else set())
        return [name for name in known if name not in left_out]
    names: set[str] = set()
    for scheme in schemes:
        for dtype in dtypes or ("bfloat16",):
            name = kernel_sets.set_name(scheme.name, dtype, known)
            if name not in known:
                raise ArgumentError(
                    f"FlashInfer has no CUTLASS kernels of scheme {scheme.name} in {dtype} for {platform}; "
                    f"its sets there are {', '.join(known)}"
                )
            names.add(name)
    return sorted(names, key=known.index)


def _built(target: Path) -> tuple[str, ...]:
    """Sets already built by the same version."""
    try:
        found = read_manifest(target)
    except (ManifestError, OSError):
        return ()
    return found.sets if found is not None and found.flashinfer == package.installed_version() else ()


def _suffix(capability: str) -> str:
    return capability.replace(".", "")


def _toolkit() -> Path | None:
    """The CUDA toolkit to compile with: FlashInfer's, or the usual one if FlashInfer mistakes a script for nvcc."""
    found, usual = package.cuda_home(), Path("/usr/local/cuda")
    has_headers = found is not None and (found / "include" / "cuda_runtime.h").is_file()
    return found if has_headers or not (usual / "include" / "cuda_runtime.h").is_file() else usual


def _includes() -> list[Path]:
    """Folders with headers: the toolkit's, those of packages that torch's CUDA build installs, and the compiler's."""
    home = _toolkit()
    named = [Path(folder) for folder in os.environ.get("CPATH", "").split(os.pathsep) if folder]
    return [*([home / "include"] if home is not None else []), *_pip_folders("include"), *named]


def _missing_includes() -> list[Path]:
    """Folders of packages with a header that the toolkit lacks; more could shadow headers that it has."""
    home = _toolkit()
    lacking = [header for header in _HEADERS if home is None or not (home / "include" / header).is_file()]
    return [folder for folder in _pip_folders("include") if any((folder / header).is_file() for header in lacking)]


def _pip_folders(name: str) -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    return [path for root in roots for path in sorted(root.glob(f"*/{name}")) if path.is_dir()]


def _release() -> str:
    nvcc = package.nvcc_path()
    try:
        text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    except OSError:
        return ""
    found = re.search(r"release (\d+\.\d+)", text)
    return found[1] if found else ""


_TARGETS: Final = "FLASHINFER_CUDA_ARCH_LIST"


@contextlib.contextmanager
def _target(capability: str) -> Iterator[None]:
    """Makes FlashInfer compile for a target, not necessarily this machine's, with the toolkit found here.

    Args:
        capability: In FlashInfer's spelling, such as `9.0a`.
    """
    before = {name: os.environ.get(name) for name in (_TARGETS, "CUDA_HOME")}
    os.environ[_TARGETS] = capability
    if before["CUDA_HOME"] is None and (home := _toolkit()) is not None:
        os.environ["CUDA_HOME"] = str(home)
    # FlashInfer reads the variable at import, which may have happened for another target.
    was_imported = "flashinfer.jit.core" in sys.modules
    core = importlib.import_module("flashinfer.jit.core")
    targets = core.current_compilation_context.TARGET_CUDA_ARCHS
    # If empty, FlashInfer asks the machine's devices when it needs them.
    own = set(targets) if was_imported else set()
    core.refresh_current_compilation_context()
    try:
        yield
    finally:
        targets.clear()
        targets.update(own)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _trimmed(spec: Any, sources: list[Path], folder: Path) -> Any:
    """A specification with a subset of the sources and its own build folder."""
    folder.mkdir(parents=True, exist_ok=True)
    stubs = _link_stubs(folder)
    return dataclasses.replace(
        spec,
        name=folder.name,
        sources=sources,
        extra_include_dirs=[*(spec.extra_include_dirs or ()), *_missing_includes()],
        # The object must name the driver's library, which nothing else may have loaded.
        extra_ldflags=[f"-L{stubs}", *(spec.extra_ldflags or ()), "-Wl,--no-as-needed", "-lcuda", "-Wl,--as-needed"],
    )


def _build_folder(spec: Any, capability: str) -> Path:
    # FlashInfer would build everything else too in its own folder of the module.
    folder: Path = spec.build_dir
    target = _suffix(capability)
    # FlashInfer's folder names carry the target that it was imported for.
    other = "" if target in folder.parts else f"_{target}"
    return folder.with_name(f"moereg_{folder.name}{other}")


def _object(folder: Path, source: Path) -> Path:
    suffix = ".cuda.o" if source.suffix == ".cu" else ".o"
    return folder / f"{source.parent.name}_{source.stem}{suffix}"


def _link_stubs(folder: Path) -> Path:
    """A folder of empty stand-ins for libraries that only come with a driver or a whole toolkit."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, soname in (("cuda", "libcuda.so.1"), ("nvrtc", "libnvrtc.so")):
        library = stubs / f"lib{name}.so"
        if not library.exists():
            command = [os.environ.get("CXX", "c++"), "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}"]
            subprocess.run([*command, "-o", str(library)], check=True, capture_output=True)
    return stubs


def _run_ninja(folder: Path, targets: Iterable[str], jobs: int, advance: Callable[[int, int], None]) -> None:
    """Runs ninja, reports each finished step, and keeps the last lines for an error."""
    command = ["ninja", "-C", str(folder), "-f", "build.ninja", "-j", str(jobs), *targets]
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "NINJA_STATUS": "[%f/%t] "},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                last.append(line.rstrip())
                if found := re.match(r"\[(\d+)/(\d+)\]", line):
                    advance(int(found[1]), int(found[2]))
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        raise BuildError(
            f"ninja failed in {folder} with exit {process.returncode}; run it again to go on where it stopped, with "
            f"fewer --jobs if the compiler was killed; its last words: {' | '.join(last)}"
        )


def missing_symbols(objects: Iterable[str]) -> list[str]:
    """FlashInfer functions that the objects call and none defines, sorted."""
    defined: set[str] = set()
    used: set[str] = set()
    text = subprocess.run(
        ["nm", "--format=posix", "--extern-only", *objects], capture_output=True, text=True, check=True
    ).stdout
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if not name.startswith(("_ZN12tensorrt_llm", "_ZNK12tensorrt_llm")):
            continue
        (used if rest[:1] == "U" else defined).add(name)
    return sorted(used - defined)


def stub_source(names: Iterable[str], target: Path) -> str:
    """C++ source that defines each symbol as a function that throws.

    Args:
        names: Symbols.
        target: The shared object, for the message.
    """
    message = (
        f"{target.name} was built without these kernels; build them with moereg build-kernels flashinfer_cutlass, "
        "or remove the file"
    )
    aliases = "\n".join(f'asm(".globl {name}\\n.set {name}, moereg_kernels_are_missing");' for name in names)
    return (
        "#include <stdexcept>\n"
        'extern "C" __attribute__((visibility("default"))) void moereg_kernels_are_missing() {\n'
        f"  throw std::runtime_error({json.dumps(message, ensure_ascii=False)});\n"
        "}\n"
        f"{aliases}\n"
    )


def _put_in_place(library: Path, target: Path, manifest: Manifest) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(library.read_bytes())
        temporary.chmod(0o755)
        temporary.replace(target)
        dataclasses.replace(manifest, num_bytes=target.stat().st_size).write(target)
    except OSError as error:
        raise BuildError(
            f"{target} could not be written ({(error.strerror or 'no reason given').lower()}); the kernels are built "
            f"in {library.parent}: run the command again as a user who may write there, or with --out"
        ) from None


def with_own(sources: Iterable[Path], folder: Path) -> list[Path]:
    """Sources with FlashInfer's dispatch file replaced by moereg's, in a folder, which does half the work."""
    own = folder / f"{_OWN_DISPATCH}.cu"
    return [own if path.stem == kernel_sets.INT4_DISPATCH else path for path in sources]


def write_own(sources: Iterable[Path]) -> None:
    """Writes moereg's own file if it is among the sources; an up-to-date one stays, so its object stays valid."""
    for path in sources:
        if path.stem == _OWN_DISPATCH and not (path.exists() and path.read_text(encoding="utf-8") == _OWN_TEXT):
            path.write_text(_OWN_TEXT, encoding="utf-8")


def cpu_seconds(sources: Iterable[Path]) -> float:
    """Estimated time for one core to compile some sources, from measurements."""
    given = list(sources)
    others = [path for path in given if path.stem != _OWN_DISPATCH]
    return kernel_sets.cpu_seconds(others) + _OWN_SECONDS * (len(given) - len(others))

"""Packages that are there and broken, as files on the path: what a user is told, and what runs instead."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moereg.backends._cutlass import package as quack_package
from moereg.backends._flashinfer import package as flashinfer_package
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import UnsupportedProblemError
from moereg.platforms import Platform
from moereg.platforms.probe import installed_versions
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem

PROBLEM = MoEProblem(num_experts=4, hidden_size=256, intermediate_size=128, top_k=2)
NAMES = ("cutlass", "flashinfer", "nvidia_cutlass_dsl", "quack")
NEVER = "raise AssertionError('deciding imported a library')\n"
X86, ARM = 0x3E, 0xB7
_MACHINES = itertools.count()
_MACHINES_OF = {"flashinfer_trtllm": ("cuda", "sm100")}


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little")


class Site:
    """A folder of packages before all others, tools and a home of its own; as pip and a careless user leave it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.home, self.patch = folder / "site-packages", folder / "home", monkeypatch
        for made in (self.folder, self.home, folder / "bin"):
            made.mkdir()
        monkeypatch.syspath_prepend(str(self.folder))
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        for name in NAMES:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for variable, value in {
            "PATH": folder / "bin", "HOME": self.home, "FLASHINFER_WORKSPACE_BASE": self.home,
            "QUACK_CACHE_DIR": self.home / "quack",
        }.items():  # fmt: skip
            monkeypatch.setenv(variable, str(value))
        for variable in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC", "TRTLLM_DG_NVCC_COMPILER"):
            monkeypatch.delenv(variable, raising=False)

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def metadata(self, distribution: str, version: str) -> None:
        name = f"{distribution.replace('-', '_')}-{version}.dist-info/METADATA"
        self.write(name, f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    def install_flashinfer(self, version: str = "0.7.2.post1") -> None:
        for file in flashinfer_package._FILES:
            self.write(f"flashinfer/{file}", NEVER)
        for name in flashinfer_package._IMPORTED:
            if importlib.util.find_spec(name) is None:
                self.write(f"{name}/__init__.py", NEVER)
        self.metadata("flashinfer-python", version)

    def install_quack(self, version: str = "0.6.5", runtime: bytes | None = None) -> None:
        for name in ("__init__", "epilogue/__init__"):
            self.write(f"quack/{name}.py", NEVER)
        self.write("quack/activation.py", "def _maxnumf(x, c): ...\ndef _minnumf(x, c): ...\n" + NEVER)
        self.write("nvidia_cutlass_dsl/dsl_packages/cutlass/__init__.py", NEVER)
        here = elf(ARM if platform.machine() == "aarch64" else X86)
        self.write("nvidia_cutlass_dsl/cu12/lib/libcute_dsl_runtime.so", here if runtime is None else runtime)
        self.patch.syspath_prepend(str(self.folder / "nvidia_cutlass_dsl" / "dsl_packages"))
        for name in quack_package._IMPORTED:
            if importlib.util.find_spec(name) is None:
                self.write(f"{name}/__init__.py", NEVER)
        self.metadata("quack-kernels", version)
        self.metadata("nvidia-cutlass-dsl", "4.8.1")

    def file(self, name: str, content: bytes = b"") -> Path:
        """A file outside the packages."""
        path = self.home / name
        path.write_bytes(content)
        return path

    def explain(self, kind: str, arch: str, problem: MoEProblem = PROBLEM, **request: Any) -> Selection:
        """What is chosen on a machine with these packages and this GPU; each machine is asked anew."""
        importlib.invalidate_caches()
        flashinfer_package.package_folder.cache_clear()
        return explain_backends(problem, platform=self.machine(kind, arch), **request)

    def machine(self, kind: str, arch: str) -> Platform:
        return Platform(kind, arch, f"GPU {next(_MACHINES)}", 2**37, installed_versions(), probed=True)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    yield Site(tmp_path, monkeypatch)
    flashinfer_package.package_folder.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def _unwritable(variable: str) -> Callable[[Site], None]:
    """A cache folder below a file: no user can make it, not even root."""
    return lambda site: site.patch.setenv(variable, str(site.file("occupied") / "cache"))


def _built(content: bytes) -> Callable[[Site], None]:
    """FlashInfer with a shared object of its kernels, where FlashInfer looks for one."""

    def install(site: Site) -> None:
        site.install_flashinfer()
        site.write("flashinfer/data/aot/fused_moe_90/fused_moe_90.so", content)

    return install


def _cut_short(name: str) -> Callable[[Site], None]:
    return lambda site: (site.folder / name).unlink()


# What is installed, what breaks it, and words of the reason.
CASES: dict[str, tuple[Callable[[Site], None], Callable[[Site], None] | None, str]] = {
    "flashinfer_cutlass half": (Site.install_flashinfer, _cut_short("flashinfer/jit/env.py"), "no jit/env.py in"),
    "flashinfer_cutlass cache": (
        Site.install_flashinfer,
        _unwritable("FLASHINFER_WORKSPACE_BASE"),
        "cache folder that can be written, .*; set FLASHINFER_WORKSPACE_BASE to a folder that can",
    ),
    "flashinfer_cutlass unbuilt": (Site.install_flashinfer, None, "fused_moe_90 of FlashInfer, which are not built"),
    "flashinfer_cutlass foreign": (_built(elf(0xF3)), None, "built for another processor, .*; remove it"),
    "flashinfer_cutlass cut": (_built(b"\x7fELF"), None, " is no shared object; remove it and run"),
    "flashinfer_trtllm nvcc": (Site.install_flashinfer, None, "requires nvcc, ninja .*; install the CUDA toolkit"),
    "cutlass half": (Site.install_quack, _cut_short("quack/epilogue/__init__.py"), r"quack-kernels==0\.6\.5"),
    "cutlass foreign": (
        lambda site: site.install_quack(runtime=elf(0xF3)),
        None,
        "runtime library, but .* was built for another processor, .*; reinstall it",
    ),
    "cutlass cache": (Site.install_quack, _unwritable("QUACK_CACHE_DIR"), "got .*; set QUACK_CACHE_DIR to a folder"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_broken_is_a_reason_and_something_else_runs(case: str, site: Site) -> None:
    name = case.split()[0]
    install, damage, expected = CASES[case]
    install(site)
    if damage is not None:
        damage(site)
    site.metadata("triton", "3.8.0")
    # torch's part of `cutlass` has no float16.
    problem = dataclasses.replace(PROBLEM, dtype="float16") if name == "cutlass" else PROBLEM
    said = site.explain(*_MACHINES_OF.get(name, ("cuda", "sm90")), problem)
    assert said.backend == "triton"
    own = [one for one in said.decisions if one.backend == name]
    reasons = [reason.text for one in own for reason in one.reasons if reason.code == "probe"]
    assert any(re.search(expected, reason) for reason in reasons), reasons
    # Asked for by name, it is an error that says the same and names what would do.
    with pytest.raises(UnsupportedProblemError) as raised:
        select_backend(problem, platform=said.platform, require=name)
    first, *rest = str(raised.value).splitlines()
    assert "; without the request, triton" in first
    assert any(re.search(expected, line) for line in rest), rest

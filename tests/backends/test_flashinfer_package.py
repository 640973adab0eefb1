"""Probes of an installed FlashInfer and of its CUTLASS kernels, against folders that look like one.

`test_broken_packages` has more.
"""

import os
import sys
import tempfile
import types
from pathlib import Path

import pytest

from moereg.backends._flashinfer import loading, package
from moereg.platforms import Platform

_HOPPER = Platform("cuda", "sm90", probed=True)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A folder with the files of a FlashInfer, found before any other; its dependencies are this interpreter's."""
    folder = tmp_path / "site" / "flashinfer"
    for name in package._FILES:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise AssertionError('a probe imported flashinfer')\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(package, "_IMPORTED", ("json",))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path / "home"))
    monkeypatch.delenv(package.JIT_DISABLED, raising=False)
    package.package_folder.cache_clear()
    yield folder
    package.package_folder.cache_clear()


def test_packages_that_are_missing(installed, tmp_path, monkeypatch):
    assert package.can_be_imported(_HOPPER) is None
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(package, "_IMPORTED", ("json", "no_such_module"))
    text = package.can_be_imported(_HOPPER)
    assert text == "requires the packages that flashinfer imports, found no no_such_module; install them"
    with monkeypatch.context() as patched:
        patched.setattr(package, "package_folder", lambda: None)
        text = package.can_be_imported(_HOPPER)
    assert text == "requires the package flashinfer, found its distribution alone; reinstall flashinfer-python"


def test_folders_of_another_user_below_the_cache_folder(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    folder = tmp_path / "home" / ".cache" / "flashinfer" / "0.7.2" / "90a"
    folder.mkdir(parents=True)
    log = folder / "flashinfer_jit.log"
    log.write_text("")
    assert package.can_be_imported(_HOPPER) is None
    monkeypatch.setattr(package.os, "access", lambda path, mode: path != log)
    assert package.can_be_imported(_HOPPER) == (
        f"requires that FlashInfer can write its log, got {log} (permission denied); remove it, or set "
        "FLASHINFER_WORKSPACE_BASE to another folder"
    )


def test_a_cache_folder_that_leads_nowhere(installed, tmp_path):
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "flashinfer").symlink_to(tmp_path / "gone")
    folder = tmp_path / "home" / ".cache" / "flashinfer"
    assert package.can_be_imported(_HOPPER) == (
        f"requires a cache folder that can be written, got {folder} (no such file or directory); "
        "set FLASHINFER_WORKSPACE_BASE to a folder that can"
    )


def test_kernels_that_are_compiled_at_run_time(installed, tmp_path, monkeypatch):
    (installed / package._DEEPGEMM).mkdir(parents=True)
    monkeypatch.setattr(package.shutil, "which", lambda name: str(name))
    for name in ("TRTLLM_DG_CACHE_DIR", "TRTLLM_DG_NVCC_COMPILER", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert package.deepgemm_folder() == tmp_path / ".tensorrt_llm"
    assert package.can_compile_at_run_time(_HOPPER) is None
    (tmp_path / ".tensorrt_llm").write_text("")
    assert package.can_compile_at_run_time(_HOPPER) == (
        f"requires a cache folder that can be written, got {tmp_path}/.tensorrt_llm (not a directory); "
        "set TRTLLM_DG_CACHE_DIR to a folder that can"
    )
    monkeypatch.delenv("HOME")
    assert package.deepgemm_folder() == Path(tempfile.gettempdir()) / "tensorrt_llm"
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert package.deepgemm_folder() == tmp_path / "elsewhere"
    assert package.can_compile_at_run_time(_HOPPER) is None
    (installed / package._DEEPGEMM).rmdir()
    assert package.can_compile_at_run_time(_HOPPER) == (
        f"requires the headers of these kernels, which are compiled at first use, found no "
        f"{installed / package._DEEPGEMM}; reinstall flashinfer-python"
    )
    monkeypatch.setattr(package.shutil, "which", lambda name: None)
    assert package.can_compile_at_run_time(_HOPPER) == (
        "requires nvcc, which compiles these kernels at first use, found no nvcc; install the CUDA toolkit, and name "
        "it in CUDA_HOME"
    )


def test_built_modules_are_found_in_the_order_in_which_flashinfer_looks(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    assert package.built_module("fused_moe_90", "90a") is None
    cached = tmp_path / "home" / ".cache" / "flashinfer" / "0.7.2" / "90a" / "cached_ops" / "fused_moe_90"
    wheel = tmp_path / "site" / "flashinfer_jit_cache" / "jit_cache" / "fused_moe_90"
    ahead = installed / "data" / "aot" / "fused_moe_90"
    for folder in (cached, wheel, ahead):
        folder.mkdir(parents=True)
        (tmp_path / "site" / "flashinfer_jit_cache").mkdir(exist_ok=True, parents=True)
        (tmp_path / "site" / "flashinfer_jit_cache" / "__init__.py").write_text("")
        (folder / "fused_moe_90.so").write_bytes(b"")
        assert package.built_module("fused_moe_90", "90a") == folder / "fused_moe_90.so"


def test_compiler_is_looked_for_where_flashinfer_looks(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    monkeypatch.setattr(package.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert package.has_compiler(_HOPPER) == (
        "requires nvcc, ninja and a C++ compiler, since FlashInfer compiles these kernels at first use, found no nvcc; "
        "install the CUDA toolkit, and name it in CUDA_HOME"
    )
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert package.has_compiler(_HOPPER) is None
    monkeypatch.setenv(package.JIT_DISABLED, "1")
    assert package.has_compiler(_HOPPER) == (
        "requires that FlashInfer may compile kernels, got FLASHINFER_DISABLE_JIT=1; unset it"
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is no shared object"),
        (b"MZ" + bytes(40), "is no shared object"),
        (b"\x7fELF" + bytes(14) + (0xB7).to_bytes(2, "little"), "was built for aarch64, and this machine is x86_64"),
        (b"\x7fELF" + bytes(14) + (0x3E).to_bytes(2, "little"), None),
    ],
    ids=["empty", "windows", "aarch64", "x86_64"],
)
def test_shared_object_for_another_processor(content, text, tmp_path, monkeypatch):
    monkeypatch.setattr(package.python_platform, "machine", lambda: "x86_64")
    path = tmp_path / "fused_moe_90.so"
    path.write_bytes(content)
    assert package.foreign_machine(path) == text


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A shared object where FlashInfer looks."""
    path = tmp_path / "aot" / "fused_moe_90.so"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF" + bytes(14) + (0x3E).to_bytes(2, "little") + bytes(80))
    monkeypatch.setattr(package.python_platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(package, "built_module", lambda module, target: path if path.exists() else None)
    return path


def _reason(platform=_HOPPER, scheme="unquantized"):
    return loading.BuiltKernels(scheme)(platform)


def test_kernels_that_are_there_or_not(built):
    assert _reason() is None
    assert _reason(Platform.from_name("cuda:sm107")).endswith("builds these kernels for, got sm107")
    built.write_bytes(b"half a file")
    assert _reason() == (
        f"requires the kernels fused_moe_90 of FlashInfer, but {built} is no shared object; remove it and run "
        "flashinfer install-jit-cache-wheel"
    )
    built.unlink()
    assert _reason() == (
        "requires the kernels fused_moe_90 of FlashInfer, which are not built and take hours to compile; "
        "run flashinfer install-jit-cache-wheel"
    )


def test_kernels_that_were_built_for_other_schemes(built):
    note = built.with_suffix(".schemes")
    note.write_text("fp8_block128\nunquantized")
    assert [_reason(scheme=scheme) for scheme in ("fp8_block128", "unquantized")] == [None, None]
    assert _reason(scheme="mxfp4_w4a16") == (
        f"requires FlashInfer's kernels of mxfp4_w4a16, but {built} was built for fp8_block128, unquantized alone; "
        "remove it and run flashinfer install-jit-cache-wheel"
    )
    # The file was replaced, such as by a whole build, which knows nothing of the note.
    os.utime(note, ns=(0, built.stat().st_mtime_ns - 1_000_000))
    assert _reason(scheme="mxfp4_w4a16") is None


def test_a_file_that_the_loader_refuses_says_why(built, monkeypatch, caplog):
    """FlashInfer logs the reason, and raises that it may not compile."""

    class MissingJITCacheError(RuntimeError):
        pass

    may_compile = []

    def refuse(capability):
        may_compile.append(package.JIT_DISABLED not in os.environ)
        raise MissingJITCacheError("JIT compilation is disabled via FLASHINFER_DISABLE_JIT")

    for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(get_cutlass_fused_moe_module=refuse))
    with pytest.raises(RuntimeError, match=r"^[^\n]*$") as raised:
        loading.load("sm90")
    assert may_compile == [False]
    assert str(raised.value).startswith(f"{built} cannot be loaded (")
    assert "DISABLE_JIT" not in str(raised.value)
    assert str(raised.value).endswith("; mend that, or remove the file and run flashinfer install-jit-cache-wheel")
    assert package.JIT_DISABLED not in os.environ

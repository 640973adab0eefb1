"""Whether FlashInfer's CUTLASS kernels are there, and why some cannot be loaded."""

import os
import sys
import types

import pytest

from moereg.backends._flashinfer import loading, package
from moereg.platforms import Platform

_HOPPER = Platform.from_name("cuda:sm90")


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

"""Probes of an installed QuACK, against folders that look like one; `test_broken_packages` has more."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from moereg.backends._cutlass import package
from moereg.platforms import Platform

HOPPER = Platform("cuda", "sm90", probed=True)
X86, ARM = 0x3E, 0xB7


def elf(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + machine.to_bytes(2, "little")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with QuACK and CuTe DSL, found before any other; what they import is this interpreter's."""
    return made_in(tmp_path / "site-packages", monkeypatch)


def made_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(package, "_IMPORTED", ("json",))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    for name in ("quack", "cutlass"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    quack, dsl = folder / "quack", folder / "nvidia_cutlass_dsl"
    for package_folder in (quack, dsl / "dsl_packages" / "cutlass"):
        package_folder.mkdir(parents=True)
        (package_folder / "__init__.py").write_text("raise AssertionError('a probe imported a library')\n")
    (quack / "epilogue").mkdir()
    (quack / "epilogue" / "__init__.py").write_text("")
    (quack / "activation.py").write_text("def _maxnumf(x, c): ...\ndef _minnumf(x, c): ...\n")
    runtime = dsl / "cu12" / "lib" / "libcute_dsl_runtime.so"
    runtime.parent.mkdir(parents=True)
    runtime.write_bytes(elf(X86))
    for path in (folder, dsl / "dsl_packages"):
        monkeypatch.syspath_prepend(str(path))
    importlib.invalidate_caches()
    return folder


def test_a_folder_by_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_in(tmp_path / "libraries", monkeypatch)
    monkeypatch.setattr(package, "__file__", str(tmp_path / "checkout" / "moereg" / "package.py"))
    assert package.can_be_imported(HOPPER) == (
        "requires CuTe DSL in a folder site-packages, as QuACK does, found "
        f"{made / 'nvidia_cutlass_dsl' / 'dsl_packages' / 'cutlass'}; install both into an environment, or --target "
        "DIR/site-packages"
    )
    # QuACK looks into no function of a moereg that is installed.
    monkeypatch.setattr(package, "__file__", str(tmp_path / "site-packages" / "moereg" / "package.py"))
    assert package.can_be_imported(HOPPER) is None


def test_parts_that_are_missing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quack, runtime = site / "quack", site / "nvidia_cutlass_dsl" / "cu12" / "lib" / "libcute_dsl_runtime.so"
    assert package.can_be_imported(HOPPER) is None
    runtime.write_bytes(elf(ARM))
    assert f"but {runtime} was built for aarch64" in str(package.can_be_imported(HOPPER))
    runtime.unlink()
    assert str(package.can_be_imported(HOPPER)).startswith("requires CuTe DSL's runtime library, found none in")
    monkeypatch.setattr(package, "_IMPORTED", ("json", "no_such_module"))
    text = package.can_be_imported(HOPPER)
    assert text == "requires the packages that QuACK imports, found no no_such_module; install them"
    (quack / "activation.py").write_text("def _maxnumf(x, c): ...\n")
    assert package.can_be_imported(HOPPER) == (
        f"requires QuACK's epilogues, found no quack.activation._minnumf in {quack}; install quack-kernels==0.6.5"
    )
    (quack / "activation.py").unlink()
    assert "found no quack.activation in" in str(package.can_be_imported(HOPPER))
    (quack / "epilogue" / "__init__.py").unlink()
    assert "found no quack.epilogue in" in str(package.can_be_imported(HOPPER))


def test_a_folder_whose_pth_files_nobody_reads(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site / "elsewhere"))
    (site / "elsewhere" / "cutlass").mkdir(parents=True)
    (site / "elsewhere" / "cutlass" / "__init__.py").write_text("")
    importlib.invalidate_caches()
    assert package.can_be_imported(HOPPER) == (
        f"requires that `import cutlass` means CuTe DSL, found {site / 'elsewhere' / 'cutlass'}; install into a folder "
        f"whose .pth files Python reads, or add {site / 'nvidia_cutlass_dsl' / 'dsl_packages'} to PYTHONPATH"
    )


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.delenv("QUACK_CACHE_DIR", raising=False)
    monkeypatch.delenv("QUACK_CACHE_ENABLED", raising=False)
    monkeypatch.setattr("getpass.getuser", nameless)
    text = package.cache_can_be_written(HOPPER)
    assert "found no name of this one; set QUACK_CACHE_DIR" in text
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    assert package.cache_can_be_written(HOPPER) is None

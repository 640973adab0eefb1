"""No process of moereg imports from the current folder, whatever started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moereg.runtime.python_process import python_command
from tests.cli.command import SIZES, run_module

IMPORTED = ("numpy", "safetensors", "tempfile", "torch", "triton", "typing_extensions")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("verify torch --platform cpu --check permute/TorchDense", id="checks"),
        pytest.param(f"compile {SIZES} --platform cuda:sm90 --tokens 1 --jobs 1 --require torch", id="compilers"),
    ],
)
def test_nothing_of_the_current_folder_is_imported(tmp_path: Path, line: str) -> None:
    for name in IMPORTED:
        text = "import pathlib, sys\npathlib.Path(__file__).with_name('ran').write_text(str(sys.orig_argv))\n"
        (tmp_path / f"{name}.py").write_text(f"{text}raise ImportError('hostile')\n")
    done = run_module(line, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    ran = tmp_path / "ran"
    assert not ran.exists(), ran.read_text()
    assert done.returncode in (0, 3), done.stderr


def test_a_process_of_ours_imports_from_where_this_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys; print(sys.argv[1:], sys.path)")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    command = python_command("mine", "a b")
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd="/").stdout
    assert found.strip() == f"{['a b']} {[entry for entry in sys.path if entry]}"

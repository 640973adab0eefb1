"""`moereg new-backend`: the wheel that it writes is complete, registers itself, and keeps the contract of a backend."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moereg
from moereg.cli import main
from moereg.cli._new_backend import _FILES, _TEMPLATES
from moereg.registry import BackendCell, BackendRegistry, registering_origin
from moereg.testing import cases, checks, problems
from tests.cli.command import Call, CallJson
from tests.support.toml import tomllib

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cell(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry
) -> Iterator[BackendCell]:
    """The cell of a wheel that was just written, registered as if it were installed."""
    assert call(f"new-backend written_here --directory {tmp_path / 'wheel'}")[0] == 0
    monkeypatch.syspath_prepend(str(tmp_path / "wheel" / "src"))
    with registering_origin("moereg-written-here"):
        importlib.import_module("moereg_written_here.backend")
    (found,) = (cell for cell in isolated_registry.cells if cell.name == "written_here")
    yield found
    for module in ("moereg_written_here.backend", "moereg_written_here"):
        del sys.modules[module]


def test_it_writes_a_whole_wheel(call_json: CallJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, found = call_json("new-backend my_kernel2")
    folder = tmp_path / "moereg-my-kernel2"
    assert code == 0
    assert list(found) == ["schema", "name", "distribution", "package", "directory", "files"]
    assert (found["distribution"], found["package"]) == ("moereg-my-kernel2", "moereg_my_kernel2")
    assert sorted(found["files"]) == sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    )
    for path in found["files"]:
        text = (folder / path).read_text()
        assert "@my" not in text
        assert "_name@" not in text
        if path.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == {"moereg.backends": {"my_kernel2": "moereg_my_kernel2.backend"}}
    assert project["dependencies"] == [f"moereg>={moereg.__version__}"]
    assert "class MyKernel2Experts(Experts):" in (folder / "src/moereg_my_kernel2/backend.py").read_text()
    assert "- run: pytest" in (folder / ".github/workflows/test.yml").read_text()


def test_it_writes_over_nothing(call: Call, tmp_path: Path) -> None:
    line = f"new-backend mine --directory {tmp_path / 'new' / 'wheel'}"
    code, out, _ = call(line)
    assert code == 0
    assert "moereg verify mine" in out
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = call(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--directory must be new or empty" in err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


BAD_NAMES = ["Mine", "1st", "a__b", "_a", "a-b", "a.b", "a" * 41, "größe", "a\n", "../a", "auto", "builtin", "moereg"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_no_wheel_can_have_or_the_registry_refuses(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["new-backend", name, "--directory", str(tmp_path / "wheel")]) == 2
    rule = "is no name of a backend" if name in BAD_NAMES[-3:] else "a backend's name is at most 40 lower-case letters"
    assert rule in capsys.readouterr().err
    assert not (tmp_path / "wheel").exists()


def test_every_template_is_a_file_of_the_wheel() -> None:
    assert sorted(f"{name}.template" for name in _FILES) == sorted(file.name for file in _TEMPLATES.iterdir())


def test_the_backend_keeps_the_contract(cell: BackendCell) -> None:
    assert (cell.origin, cell.class_name) == ("moereg-written-here", "WrittenHereExperts")
    of_cell = [
        cases.Case(cell, cases.runnable_platform(cell) or pytest.fail("it must run on every CPU"), problem)
        for problem in problems.claimed_problems(cell)
    ]
    for case in of_cell:
        checks.check_numbers(case, is_first=case == of_cell[0])
    checks.check_rejections(cell)
    checks.check_permute(cell)
    checks.check_reload(cell)
    checks.check_workspaces_grow(cell)
    checks.check_equal_bits(cell)


def test_the_kit_sees_what_its_author_may_break(cell: BackendCell) -> None:
    for scheme in cell.schemes:
        checks.check_faults_are_caught(cell, scheme)

"""`moereg new-backend`: the wheel that it writes is complete, registers itself, and keeps the contract of a backend."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moereg
from moereg.cli import main
from moereg.cli._new_backend import _FILES, _TEMPLATES
from moereg.registry import BackendCell, BackendRegistry, registering_origin
from moereg.testing import cases, checks
from tests.cli.command import ROOT, Call, CallJson, run_python
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
    assert "  moereg verify mine\n" in out
    assert "  moereg explain --model qwen3-30b-a3b --prefer mine\n" in out
    assert "src/moereg_mine/backend.py\n" in out
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, out, err = call(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--directory must be new or empty" in err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


PREDICATE = """    @classmethod
    def unsupported_reasons(cls, problem, platform):
        sizes = problem.hidden_size, problem.intermediate_size
        return [] if all(size % 64 == 0 for size in sizes) else [f"requires sizes % 64 == 0, got {sizes}"]

"""
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
        for problem in cases.claimed_problems(cell)
    ]
    for case in of_cell:
        checks.check_numbers(case, is_first=case == of_cell[0])
    checks.check_rejections(cell)
    checks.check_permute(cell)
    checks.check_reload(cell)
    checks.check_workspaces_grow(cell)
    checks.check_equal_bits(cell)
    for scheme in cell.schemes:
        checks.check_faults_are_caught(cell, scheme)


@pytest.mark.slow
def test_its_tests_pass_with_another_kernel(call: Call, tmp_path: Path) -> None:
    """Another layout, fewer facts, and a predicate that refuses most sizes."""
    assert call(f"new-backend written_there --directory {tmp_path}")[0] == 0
    source = tmp_path / "src" / "moereg_written_there"
    text = (source / "backend.py").read_text()
    for old, new in {
        "written_there_transposed": "written_there_canonical",
        '["w13"][expert]': '["up"][expert].T',
        '["w2"][expert]': '["down"][expert].T',
        '"w13": weights.w13.transpose(1, 2).contiguous()': '"up": weights.w13',
        '"w2": weights.w2.transpose(1, 2).contiguous()': '"down": weights.w2',
        'dtypes=frozenset({"bfloat16", "float32"})': 'dtypes=frozenset({"float32"})',
        "    def permute_weights": PREDICATE + "    def permute_weights",
    }.items():
        assert old in text, old
        text = text.replace(old, new)
    (source / "backend.py").write_text(text)
    # As an editable install has it.
    info = source.with_name("moereg_written_there-0.1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moereg-written-there\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[moereg.backends]\nwritten_there = moereg_written_there.backend\n")
    paths = os.pathsep.join((str(source.parent), str(ROOT)))
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path / "tests"))
    done = run_python(*arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout

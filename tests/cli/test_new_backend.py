"""`moereg new-backend`: the wheel that it writes is complete, registers itself, and keeps the contract of a backend."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import moereg
from moereg.cli import main
from moereg.cli._new_backend import _FILES, _KERNELS, _TEMPLATES
from moereg.cli._plugin_modules import plugin_modules
from moereg.registry import BackendCell, BackendRegistry, registering_origin
from moereg.testing import cases, checks
from tests.cli.command import ROOT, Call, CallJson, run_python
from tests.support.console_blocks import Command, Environment
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


TRITON_FILE = '''"""Adds up in Triton."""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from moereg.author import Experts, Facts, PermutedWeights, local_expert_ids, register_moe_backend

_BLOCK = tl.constexpr(128)  # Columns.


_LAYOUT = "canonical"


class _Tile(NamedTuple):
    columns: tl.constexpr


@triton.jit
def _add_kernel(total, rows, weights, columns, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(0) * columns + column
    weight = tl.load(weights + tl.program_id(0))
    rows = tl.where(weight == 0, 0, tl.load(rows + at, column < columns).to(tl.float32))
    tl.store(total + at, tl.load(total + at, column < columns) + weight * rows, column < columns)


def _add(total, rows, weights):
    """Adds rows times weights."""
    columns = _columns(rows)
    if len(rows):
        _add_kernel[(len(rows), triton.cdiv(columns, 128))](total, rows, weights, columns, BLOCK=_BLOCK)


def _columns(rows):
    return rows.shape[1]


# One for each way to lay out weights.
@register_moe_backend(
    name="from_file", priority=1, quant_schemes=("unquantized",), platforms=("cuda:sm80+",), requires=("triton>=3.4",)
)
class FromFileExperts(Experts):
    facts = Facts(
        activations=frozenset({"silu"}),
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        placements=frozenset({"contiguous"}),
        graph_capture=True,
    )
    layouts = (_LAYOUT,)

    def permute_weights(self, weights, problem):
        return PermutedWeights(_LAYOUT, per_expert=weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        """Scratch."""
        return (num_tokens, 2 * problem.intermediate_size), (num_tokens, problem.hidden_size)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        # Every expert sees every token.
        local = local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map)
        total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
        for expert in range(self.problem.num_local_experts):
            scale = torch.where(local == expert, inputs.topk_weights, 0.0).sum(1)
            gate_up = torch.mm(inputs.hidden_states, weights["w13"][expert].mT, out=workspace13)
            intermediate = self.problem.activation(gate_up.float()).to(gate_up.dtype)
            rows = torch.mm(intermediate, weights["w2"][expert].mT, out=workspace2)
            _add(total, rows, scale)
        out.copy_(total)
'''

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
    names = [*_FILES, *_KERNELS, "backend.py"]
    assert sorted(f"{name}.template" for name in names) == sorted(file.name for file in _TEMPLATES.iterdir())


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
        'weights["w13"]': 'weights["up"].mT',
        'weights["w2"]': 'weights["down"].mT',
        'per_expert={"w13": w13, "w2": w2}': 'per_expert={"up": weights.w13, "down": weights.w2}',
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
    # The page for authors compiles a plugin's layer, for which Dynamo is imported.
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile", str(tmp_path / "tests"))
    done = run_python(*arguments, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_a_file_without_a_kernel_library_becomes_the_module_as_it_is() -> None:
    file = TRITON_FILE.replace("triton", "numpy")
    assert plugin_modules(file, "from_file", "p").keys() == {"backend.py"}
    (text,) = plugin_modules(file, "from_file", "p").values()
    added = '\nmoereg_api = "1"\n"""The major version of `moereg.author` that this is written for."""\n'
    assert text.replace(added, "") == file
    assert text.index("register_moe_backend\n") < text.index(added) < text.index("_BLOCK = ")
    assert plugin_modules(text, "from_file", "p") == {"backend.py": text}


def test_what_needs_a_kernel_library_moves_to_a_module_of_its_own() -> None:
    backend, kernels = plugin_modules(TRITON_FILE, "from_file", "p").values()
    before, _, _ = TRITON_FILE.partition("import triton\n")
    assert backend.startswith(before + "from moereg.author import ")
    assert "import triton" not in backend
    assert "\n\n\n# One for each way to lay out weights.\n@register_moe_backend(\n" in backend
    assert "        from p.kernels import _add\n\n        # Every expert sees every token.\n" in backend
    assert backend.count("p.kernels") == 1
    assert backend.count("def device_types(cls, platform):") == 1
    names = [node.name for node in ast.parse(kernels).body if isinstance(node, ast.FunctionDef)]
    assert names == ["_add_kernel", "_add"]
    assert "def _columns(rows):" in backend
    assert '_LAYOUT = "canonical"' in backend
    assert "class _Tile" in kernels
    assert "class _Tile" not in backend
    assert (
        "from typing import NamedTuple\nfrom p.backend import _columns\n\nimport triton\nimport triton.language as tl\n"
        in kernels
    )
    assert "TRITON_INTERPRET" in backend
    assert "TRITON_INTERPRET" not in "".join(
        plugin_modules(TRITON_FILE.replace("triton", "quack"), "from_file", "p").values()
    )
    assert "_BLOCK = tl.constexpr(128)  # Columns.\n" in kernels
    assert "moereg.author import" not in kernels


SHORT = '''from triton import jit
from moereg.author import register_moe_backend
@jit
def weights(): ...
@jit
def launch(): ...
@register_moe_backend("short", 1, ("unquantized",), ("cuda:sm80+",))
class Short:
  def apply(self, out, weights):
    launch[(1,)](out, weights)
  def last(self):
    """Nothing."""'''


def test_other_styles_of_a_file_are_split_too() -> None:
    """Two columns of indentation, a decorator alone imported, a parameter with a kernel's name, nothing but a text."""
    backend, kernels = plugin_modules(SHORT, "short", "p").values()
    assert "    from p.kernels import launch\n\n    launch[" in backend
    (node,) = (node for node in ast.parse(backend).body if isinstance(node, ast.ClassDef))
    assert [each.name for each in node.body] == ["apply", "last", "device_types"]
    assert "def launch" in kernels
    with pytest.raises(ValueError, match=r"lines of its own, got Short\.apply"):
        plugin_modules(SHORT.replace("weights):\n    launch", "weights): launch"), "short", "p")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"from_file"', '"other"', "must register 'from_file' alone, got 'other'; name the plugin like the backend"),
        ("@register_moe_backend", "@other", "must register 'from_file' alone, got none"),
        ("import torch\n", "import torch(\n", "can become a plugin, got '.*file.py': .*, line [24]"),
        ("    layouts =", "    tile = _BLOCK\n    layouts =", "methods alone, got _BLOCK elsewhere in FromFileExperts"),
        ("workspace13, workspace2):", "workspace13, workspace2, n=_BLOCK):", "methods alone, got _BLOCK elsewhere"),
        ("priority=1", "priority=_BLOCK", "methods alone, got _BLOCK elsewhere in FromFileExperts; move it"),
    ],
)
def test_a_file_that_makes_no_plugin_is_refused(old: str, new: str, message: str, call: Call, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(TRITON_FILE.replace(old, new))
    code, out, err = call(f"new-backend from_file --from {tmp_path / 'file.py'} --directory {tmp_path / 'plugin'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(message, err), err
    assert not (tmp_path / "plugin").exists()


def test_a_file_brings_its_own_kernel(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "plugin"
    code, out, err = call(f"new-backend mine --triton --from {tmp_path / 'mine.py'}")
    assert (code, out) == (2, "")
    assert "leave one of them out" in err
    code, out, err = call(f"new-backend mine --from {tmp_path / 'mine.py'} --directory {folder}")
    assert (code, out) == (2, "")
    assert "--from must name a file that can become a plugin, got" in err
    assert not folder.exists()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A fresh one, in which this checkout's wheel is installed."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.run(Command("pip install moereg", 0, ()), tmp_path_factory.mktemp("anywhere"))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--triton", "--from given.py"])
def test_the_printed_commands_work_as_they_are(options: str, environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "given.py").write_text(TRITON_FILE)
    name = "from_file" if "from" in options else "written_triton"
    printed = environment.run(Command(f"moereg new-backend {name} {options}", 0, ()), tmp_path).splitlines()
    lines = [line.partition("  #")[0] for line in printed if line.startswith(("  pip ", "  moereg "))]
    # The page for authors runs all checks of such a file; what a plugin changes is where its kernels are imported.
    lines[-1] += " --check deciding --check E6-H128"
    installed, explained, verified = (environment.run(Command(line, 0, ()), tmp_path) for line in lines)
    assert "Successfully installed" in installed
    assert re.search(rf"^\W*chosen +{name} \(\w+\) of moereg-", explained, re.MULTILINE), explained
    assert re.search(rf"^{name}: \d+ checks passed in", verified, re.MULTILINE), verified

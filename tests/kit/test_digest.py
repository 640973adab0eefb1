"""Digests of code change with the program and with nothing else."""

from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys
import types

import grimp
import pytest

from moereg.evidence import code_digest as digest
from moereg.evidence.code_digest import LEDGER_NAME, UNKNOWN, class_digest, module_file, root_package
from moereg.evidence.on_machine import QuarantineRecord
from moereg.evidence.store import records_text
from moereg.registry import BUILTIN
from moereg.selection.loader import load_backends
from tests.evidence.packs import HERE, PROBLEM, make_cells, pack_of, rows_of

SOURCE = '''
"""A module."""

import os

LIMIT = 3
"""What follows an attribute is no code either."""


class Thing:
    """A class."""

    def size(self, x: int) -> str:
        """A method."""
        return f"{x + 1:>{LIMIT}} {os.sep!r} {{}}"
'''
PLAIN = """import os
LIMIT = 3
class Thing:
   def size(self, x: int) -> str:   # Says how large.

      return f"{x + 1:>{LIMIT}} {os.sep!r} {{}}"
"""

# Python 3.12 reads formatted strings by another parser than versions before.
TRICKY = b'''# -*- coding: latin-1 -*-
def f(\xe9t\xe9, *, b=0x1F):
    "doc \xe9"; "more"; c = "\xe9\xe9"; return (
        rf"""{\xe9t\xe9!r:>{b}} {{\xe9}}
  {f'{b:{b}}' + "x"}""" 'y' f"\xe9{c}\xe9" f"" if (n := b) else [*\xe9t\xe9, ""]
    )


async def g():
\tasync with h as k: await k; "\xe9"; lambda: ...
'''


def of(source: str | bytes) -> str:
    """The digest of a module's text."""
    parts: list[str] = []
    digest._add(parts, ast.parse(source))
    return "\n".join(parts)


def test_comments_docstrings_and_layout_do_not_count() -> None:
    assert of(SOURCE) == of(PLAIN)
    assert of(SOURCE) == of(SOURCE.replace("\n", "\r\n"))
    assert of('def f():\n    ("""doc""")\n    return 1') == of("def f():\n    return 1\n")
    assert of("def f(): 'doc'; return 1") == of("def f(): return 1")
    utf8 = TRICKY.decode("latin-1").replace("latin-1", "utf-8").encode()
    assert of(TRICKY) == of(utf8)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x - 1"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", 'LIMIT = "3"'),
        ("LIMIT = 3", "LIMIT = None"),
        ("{os.sep!r}", "{os.sep!s}"),
        ("{{}}", "{{}} "),
        (":>{", ":<{"),
        ("return f", "return not f"),
        ("import os", "import sys as os"),
        ("x: int", "x: int, /"),
    ],
)
def test_each_change_of_code_counts(old: str, new: str) -> None:
    assert of(PLAIN.replace(old, new)) != of(PLAIN)
    # Blocks, and strings that are used.
    assert of("if a:\n  b()\n  c()") != of("if a:\n  b()\nc()")
    assert of("asm('nop')") != of("asm('add')")
    assert of("f([], [1])") != of("f([1], [])")


@pytest.mark.slow
def test_the_installed_versions_of_python_agree(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tricky.py").write_bytes(TRICKY)
    code = (
        "import importlib.util, pathlib, sys; spec = importlib.util.spec_from_file_location('d', sys.argv[1]); "
        "d = importlib.util.module_from_spec(spec); sys.modules['d'] = d; spec.loader.exec_module(d); "
        "print(d._file_digest(pathlib.Path(sys.argv[2])))"
    )
    for name in ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14"):
        python = shutil.which(name)
        if python is None:
            continue
        command = [python, "-I", "-c", code, digest.__file__, str(tmp_path / "tricky.py")]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        if done.returncode == 127:  # A version manager's name for a file that does not exist.
            continue
        assert done.stdout.decode().strip() == digest._file_digest(tmp_path / "tricky.py"), done.stderr.decode()


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A wheel's package, of which nothing is imported."""
    files = {
        "__init__.py": "raise AssertionError('not to be imported')",
        "backend.py": "class First: ...",
        "kernels/gemm.py": "x = 1",
        "kernels/gemm.cu": "// sm90",
        "other.py": "x = 1",
        "configs.json": '{"block": 64, "warps": 4}',
    }
    root = tmp_path / "wheel_x"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def wheel_digest(module: str = "wheel_x.backend") -> str:
    """As of a new process, since each reads files once."""
    digest._module_digest.cache_clear()
    return class_digest(type("First", (), {"__module__": module}))


def test_a_plugins_code_is_its_package_unless_it_declares_less(
    package: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changes(name: str) -> bool:
        before, text = wheel_digest(), (package / name).read_text()
        (package / name).write_text(f"{text}\ny = 1")
        after = wheel_digest()
        (package / name).write_text(text)
        assert wheel_digest() == before
        return after != before

    names = ("backend.py", "kernels/gemm.py", "kernels/gemm.cu", "other.py")
    assert [changes(name) for name in names] == [True] * 4
    declaring = types.ModuleType("wheel_x.backend")
    monkeypatch.setitem(sys.modules, "wheel_x.backend", declaring)
    monkeypatch.setattr(declaring, "CODE", ("backend", "kernels/"), raising=False)
    assert [changes(name) for name in names] == [True, True, True, False]
    (package / "kernels" / "gemm.py").rename(package / "kernels" / "moved.py")
    monkeypatch.setattr(declaring, "CODE", ("backend", "kernels/gemm.py"))
    assert wheel_digest() == UNKNOWN, "a prefix without files"
    assert "wheel_x" not in sys.modules


def test_launch_configurations_count_by_value(package: pathlib.Path) -> None:
    before = wheel_digest()
    (package / "configs.json").write_text('{"warps": 4,\n "block": 64}')
    (package / LEDGER_NAME).write_text("[]")
    assert wheel_digest() == before
    (package / "configs.json").write_text('{"warps": 8, "block": 64}')
    assert wheel_digest() != before
    (package / "configs.json").write_text("no JSON")
    assert wheel_digest() != before


@pytest.mark.parametrize("name", ["pack", "records"])
def test_what_is_written_about_code_is_no_part_of_it(package: pathlib.Path, name: str) -> None:
    """Else times of a kernel in a file were stale once their pack lay beside it."""
    cells = make_cells()
    texts = {
        "pack": pack_of(cells, rows_of({1: -0.2})).text(),
        "records": records_text(1, [QuarantineRecord.failed(cells[0], PROBLEM.quant, HERE, "off by 0.5")]),
    }
    before = wheel_digest()
    (package / "mine.json").write_text(texts[name])
    assert wheel_digest() == before


@pytest.mark.parametrize("content", [b"def f(:", b"x = 'caf\xe9'", b"a\0b", b"(" * 300 + b")" * 300])
def test_what_does_not_parse_counts_by_its_bytes(package: pathlib.Path, content: bytes) -> None:
    before = wheel_digest()
    (package / "other.py").write_bytes(content)
    broken = wheel_digest()
    (package / "other.py").write_bytes(content + b" ")
    assert len({before, broken, wheel_digest(), UNKNOWN}) == 4
    assert wheel_digest("no_such_package.backend") == UNKNOWN


def test_neither_a_namespace_nor_a_module_alone_is_a_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "acme_ns" / name).mkdir(parents=True)
        (tmp_path / name / "acme_ns" / name / "__init__.py").write_text("")
        (tmp_path / name / "acme_ns" / name / "impl.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    (tmp_path / "alone_x.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert root_package("acme_ns.one.impl") == "acme_ns.one"
    assert root_package("acme_ns.two.impl") == "acme_ns.two"
    assert root_package("alone_x") == "alone_x"
    assert root_package("moereg.evidence.code_digest") == "moereg"
    assert module_file("acme_ns.two.impl") == tmp_path / "two" / "acme_ns" / "two" / "impl.py"
    assert module_file("acme_ns") is None
    assert module_file("alone_x") == tmp_path / "alone_x.py"
    # A module in no package is its own code.
    before = wheel_digest("alone_x")
    (tmp_path / "neighbor_x.py").write_text("x = 1")
    assert wheel_digest("alone_x") == before != UNKNOWN
    (tmp_path / "alone_x.py").write_text("x = 2")
    assert wheel_digest("alone_x") != before


FOLLOWED = ("moereg.backends.", "moereg.kernels.", "moereg.weights.layouts.")


def declared() -> dict[str, tuple[str, ...]]:
    """The prefixes of moereg's own backends by their modules."""
    modules = {cell.experts.__module__ for cell in load_backends().cells if cell.origin == BUILTIN}
    return {module: sys.modules[module].CODE for module in modules}


def test_declared_prefixes_cover_what_a_module_imports_and_nothing_else() -> None:
    graph = grimp.build_graph("moereg", cache_dir=None)
    cells = load_backends().cells
    for module, prefixes in declared().items():
        reached: set[str] = set()
        # Classes name their implementations in texts, which no graph of imports has.
        named = [getattr(cell.experts, "implemented_by", "") for cell in cells if cell.experts.__module__ == module]
        pending = {module, *(text.partition(":")[0] for text in named if text)}
        while pending:
            reached.add(name := pending.pop())
            imported = graph.find_modules_directly_imported_by(name) - reached
            pending |= {each for each in imported if f"{each}.".startswith(FOLLOWED)}
        files = {name.removeprefix("moereg.").replace(".", "/") + ".py" for name in reached}
        missed = {file for file in files if not file.startswith(prefixes)}
        assert not missed, f"CODE of {module} misses {missed}"
        idle = [prefix for prefix in prefixes if not any(file.startswith(prefix) for file in files)]
        assert not idle, f"CODE of {module} names what it does not import: {idle}"


def test_kernels_of_a_cpu_and_of_triton_void_none_of_each_others_records() -> None:
    found = declared()
    for module, others in (
        ("moereg.backends.triton_moe", ("kernels/plain/mlp.py", "backends/_torch/plain.py", "backends/torch_moe.py")),
        ("moereg.backends.torch_moe", ("kernels/gemm/grouped.py", "backends/_triton/plain.py", "kernels/sizes.py")),
    ):
        assert not [other for other in others if other.startswith(found[module])]

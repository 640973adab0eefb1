"""Digests of code change with the program and with nothing else."""

from __future__ import annotations

import ast
import pathlib
import shutil
import subprocess
import sys

import pytest

from moereg.evidence import code_digest as digest
from moereg.evidence.code_digest import LEDGER_NAME, UNKNOWN, code_digest, module_file, root_package
from moereg.evidence.quarantine import QuarantineRecord
from moereg.evidence.store import records_text
from tests.measured.packs import HERE, PROBLEM, make_cells, pack_of, rows_of

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

# Formatted strings are cut into tokens by Python 3.12 and are one before; columns are counted in bytes or characters.
TRICKY = b'''# -*- coding: latin-1 -*-
def f(\xe9t\xe9, *, b=0x1F):
    "doc \xe9"; "more"; c = "\xe9\xe9"; return (
        rf"""{\xe9t\xe9!r:>{b}} {{\xe9}}
  {f'{b:02d}' + "x"}""" 'y' f"\xe9{c}\xe9" if (n := b) else [*\xe9t\xe9]
    )


async def g():
\tasync with h as k: await k; "\xe9"; lambda: ...
'''


def source_digest(source: bytes) -> str:
    return digest._digest(digest._chunks(digest._text(source)))


def of(text: str) -> str:
    return source_digest(text.encode())


def test_comments_docstrings_and_layout_do_not_count() -> None:
    assert of(SOURCE) == of(PLAIN)
    assert of(SOURCE) == of(SOURCE.replace("\n", "\r\n"))
    assert of(SOURCE) == source_digest(b"\xef\xbb\xbf" + SOURCE.encode())
    assert of('def f():\n    ("""doc""")\n    return 1') == of("def f():\n    return 1\n")
    assert of("def f(): 'doc'; return 1") == of("def f(): return 1")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x - 1"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("LIMIT = 3", 'LIMIT = "3"'),
        ("{os.sep!r}", "{os.sep!s}"),
        ("{{}}", "{{}} "),
        (":>{", ":<{"),
        ("return f", "return not f"),
    ],
)
def test_each_change_of_code_counts(old: str, new: str) -> None:
    assert of(PLAIN.replace(old, new)) != of(PLAIN)


def test_blocks_and_strings_that_are_used_count() -> None:
    assert of("if a:\n  b()\n  c()") != of("if a:\n  b()\nc()")
    assert of("asm('nop')") != of("asm('add')")
    assert of("x = 'one'") != of("x = 'two'")


def test_encodings_say_the_same() -> None:
    utf8 = TRICKY.decode("latin-1").replace("latin-1", "utf-8").encode()
    assert source_digest(TRICKY) == source_digest(utf8)
    assert source_digest(TRICKY) != source_digest(TRICKY.replace(b'c = "\xe9', b'c = "\xe8'))


def test_a_digest_is_the_same_whatever_version_of_python_runs_this() -> None:
    assert source_digest(TRICKY)[:16] == "ebeb96999a12c6f0"


@pytest.mark.slow
def test_the_installed_versions_of_python_agree() -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('d', sys.argv[1]); "
        "d = importlib.util.module_from_spec(spec); sys.modules['d'] = d; spec.loader.exec_module(d); "
        "print(d._digest(d._chunks(d._text(sys.stdin.buffer.read()))))"
    )
    for name in ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14"):
        python = shutil.which(name)
        if python is None:
            continue
        done = subprocess.run(
            [python, "-I", "-c", code, digest.__file__], input=TRICKY, capture_output=True, check=False, timeout=60
        )
        if done.returncode == 127:  # A version manager's name for a file that does not exist.
            continue
        assert done.stdout.decode().strip() == source_digest(TRICKY), (name, done.stderr.decode())


@pytest.mark.parametrize(
    "source", [b"def f(:", b"x = '", b"\xff", b"# coding: nonsense\n", b"a\0b", b"(" * 300 + b")" * 300]
)
def test_what_is_no_module_has_no_digest(source: bytes) -> None:
    with pytest.raises((SyntaxError, ValueError, MemoryError)):
        source_digest(source)


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A wheel's package, spread over modules that import each other in every way; none of it is imported."""
    files = {
        "__init__.py": "raise AssertionError('not to be imported')",
        "backend.py": "def late():\n    from . import first\n    from .inner import second\n    import wheel_x.third",
        "first.py": "from .inner.deep import *",
        "third.py": "import json\nfrom moereg.author import Experts\nfrom .missing import what",
        "unused.py": "x = 1",
        "inner/__init__.py": "",
        "inner/second.py": "from .. import fourth, unknown",
        "inner/deep.py": "from ..fifth import value",
        "fourth.py": "x = 4",
        "fifth.py": "value = 5",
        "configs.json": '{"block": 64, "warps": 4}',
    }
    root = tmp_path / "wheel_x"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return root


def wheel_digest() -> str:
    return code_digest("wheel_x.backend", "wheel_x.")


def test_a_digest_follows_all_kinds_of_imports(package: pathlib.Path) -> None:
    assert "wheel_x" not in sys.modules
    before = wheel_digest()
    assert before != UNKNOWN
    for name in ("backend", "first", "third", "inner/second", "inner/deep", "fourth", "fifth"):
        path = package / f"{name}.py"
        text = path.read_text()
        path.write_text(f"{text}\n# a comment")
        assert wheel_digest() == before, name
        path.write_text(text.replace("5", "6") if name == "fifth" else f"{text}\ny = 1")
        assert wheel_digest() != before, name
        path.write_text(text)
        assert wheel_digest() == before, name
    (package / "unused.py").write_text("x = 2")
    (package / "fifth.py").write_text("value = 5\nother = 6\nimport os")
    assert wheel_digest() == before
    assert "wheel_x" not in sys.modules


def test_code_that_moves_keeps_its_digest(package: pathlib.Path) -> None:
    before = wheel_digest()
    (package / "fifth.py").rename(package / "inner" / "moved.py")
    deep = package / "inner" / "deep.py"
    deep.write_text("from .moved import value")
    assert wheel_digest() == before
    deep.write_text("from .moved import value as other")
    assert wheel_digest() != before
    deep.write_text("from .moved import value")
    third = package / "third.py"
    text = third.read_text()
    third.write_text(text.replace("from moereg.author import", "from moereg.another.room import"))
    assert wheel_digest() == before
    third.write_text(text.replace("import Experts", "import MoEProblem as Experts"))
    assert wheel_digest() != before
    third.write_text(text.replace("import json", "from json import loads as json"))
    assert wheel_digest() != before


def test_names_that_modules_share_are_told_apart(package: pathlib.Path) -> None:
    deep = package / "inner" / "deep.py"
    (package / "sixth.py").write_text("value = 6")
    deep.write_text("from ..fifth import value as rows\nfrom ..sixth import value as columns")
    before = wheel_digest()
    deep.write_text("from ..sixth import value as rows\nfrom ..fifth import value as columns")
    assert wheel_digest() != before


PAGE = '''"""Two classes: `Second` beside `First`."""
from moereg.author import Experts
__all__ = ["First", "Second"]
LIMIT = 64
OTHER_LIMIT: int = 32
note('read')

def helper():
    return LIMIT

def other_helper():
    from . import unused

def by_name():
    return 7

@cache
def tables():
    return 9

class Base(Experts):
    def load(self):
        return helper() + globals()["by_name"]()

@register("first")
class First(Base):
    """As `Second`."""
    def load(self):
        from .inner import second

@register(
    "second"
)
class Second(Base):
    def load(self):
        from . import third
        return other_helper(OTHER_LIMIT)
'''


@pytest.mark.parametrize(
    ("change", "changes_first"),
    [
        (("LIMIT = 64", "LIMIT = 128"), True),
        (("OTHER_LIMIT: int = 32", "OTHER_LIMIT: int = 16"), False),
        (("note('read')", "note('read twice')"), True),
        (("return LIMIT", "return -LIMIT"), True),
        (("class Base(Experts)", "class Base(object)"), True),
        # Whoever decorates a function may call it, and a string may be the name of one.
        (("return 9", "return 10"), True),
        (("return 7", "return 8"), True),
        (('@register("first")', '@register("1st")'), True),
        (("from .inner import second", "from .inner import deep"), True),
        (('"second"\n)', '"2nd"\n)'), False),
        (("from . import unused", "from . import fourth"), False),
        (("from . import third", "from . import first"), False),
        (("As `Second`", "Unlike `Second`"), False),
        (('["First", "Second"]', '["First"]'), False),
        # A name of the other class counts, even in a string.
        (('"""As `Second`."""', 'second = "Second"'), True),
    ],
    ids=str,
)
def test_a_class_counts_with_what_it_names(package: pathlib.Path, change: tuple[str, str], changes_first: bool) -> None:
    def digest_of(name: str) -> str:
        return code_digest("wheel_x.backend", "wheel_x.", of=name)

    page = package / "backend.py"
    page.write_text(PAGE)
    first, second = digest_of("First"), digest_of("Second")
    assert len({first, second, UNKNOWN}) == 3
    page.write_text(PAGE.replace(*change))
    assert PAGE.replace(*change) != PAGE
    assert (digest_of("First") != first) == changes_first
    page.write_text(PAGE)
    (package / "third.py").write_text("x = 3")
    assert digest_of("First") == first
    assert digest_of("Second") != second
    # A module that the class imports may use anything of the page.
    (package / "inner" / "second.py").write_text("from ..backend import Second")
    whole = digest_of("First")
    (package / "unused.py").write_text("x = 2")
    assert digest_of("First") != whole


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


def test_an_encoding_of_its_own_is_read(package: pathlib.Path) -> None:
    before = wheel_digest()
    (package / "fourth.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = 4  # caf\xe9\n")
    assert wheel_digest() == before


@pytest.mark.parametrize("content", [b"def f(:", b"x = 'caf\xe9'"])
def test_code_that_cannot_be_read_is_unknown(package: pathlib.Path, content: bytes) -> None:
    (package / "fifth.py").write_bytes(content)
    assert wheel_digest() == UNKNOWN
    assert code_digest("no_such_package.backend", "") == UNKNOWN


def test_a_namespace_is_no_package_of_one_distribution(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_needs_nothing_but_the_standard_library() -> None:
    tree = ast.parse(pathlib.Path(digest.__file__).read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {(name or "").partition(".")[0] for name in found} <= {*sys.stdlib_module_names, "__future__"}

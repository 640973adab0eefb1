"""Digests of code: the tokens of a module and of its imports, without comments and docstrings.

It reads modules without importing them, and itself imports only the standard library.
"""

from __future__ import annotations

import ast
import contextlib
import contextvars
import functools
import hashlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import re
import token
import tokenize
import warnings
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

LEDGER_NAME: Final = "moereg_ledger.json"
"""A package's own evidence, which is not part of its code."""

_PACKAGE: Final = __name__.partition(".")[0]
# The code of moereg's own backends. The rest has tests of its own.
_OWN_CODE: Final = (f"{_PACKAGE}.backends.", f"{_PACKAGE}.kernels.", f"{_PACKAGE}.weights.layouts.")

UNKNOWN: Final = "unknown"
"""The digest of code that cannot be read."""

_IGNORED: Final = frozenset({tokenize.ENCODING, tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER})
# Their text is only layout, and differs between Python versions.
_LAYOUT: Final = frozenset({tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})
_STRING_STARTS: Final = ("FSTRING_START", "TSTRING_START")
_STRING_ENDS: Final = ("FSTRING_END", "TSTRING_END")

_FOUND: contextvars.ContextVar[dict[str, pathlib.Path | None] | None] = contextvars.ContextVar("found", default=None)
"""Files of modules that were looked up within `files_stay`."""

_Position = tuple[int, int]
"""Line (from 1) and column (from 0), in characters."""


@contextlib.contextmanager
def files_stay() -> Iterator[None]:
    """Caches modules' files within the outermost context, for lists of many cells with mostly the same modules."""
    known = _FOUND.get()
    token = _FOUND.set({} if known is None else known)
    try:
        yield
    finally:
        _FOUND.reset(token)


def class_digest(experts: type) -> str:
    """A digest of the code that an experts class runs: the class, and what it names and imports.

    Follows only backends, kernels and layouts for moereg's own classes, and its package for a plugin's class.

    Returns:
        Hexadecimal, or `UNKNOWN` if some of it cannot be read.
    """
    module = experts.__module__
    root = root_package(module)
    return code_digest(module, _OWN_CODE if root == _PACKAGE else f"{root}.", of=experts.__qualname__)


@files_stay()
def code_digest(module: str, followed: str | tuple[str, ...], of: str | None = None) -> str:
    """A digest of a module and of everything that it imports, directly or not.

    If a module imports names from another, only those names and what they need count. Module names within the same
    package and moereg do not, so that code can move. JSON files next to the modules count too, since they hold launch
    configurations; those that say how the code did, such as ledgers and packs, do not.

    Args:
        module: Its full name.
        followed: Prefixes of names of modules to follow, each ending in a dot.
        of: A class of the module. Other classes, functions, constants and imports of the module count only if it names
            them, directly or not.

    Returns:
        Hexadecimal, or `UNKNOWN` if one of the modules cannot be read.
    """

    def counts(name: str) -> bool:
        return f"{name}.".startswith(followed)

    pending: list[tuple[str, str | None]] = [(module, of)]
    digests: dict[tuple[str, str | None], str] = {}
    folders = set()
    lines: set[str] = set()
    taken: set[tuple[_Import, tuple[str, str | None]]] = set()
    own = {_PACKAGE, module.partition(".")[0]}
    while pending:
        part = pending.pop()
        if part in digests:
            continue
        name, only = part
        file = module_file(name)
        source = None if file is None else _read(file, only)
        if file is None or source is None:
            return UNKNOWN
        digests[part] = source.digest
        folders.add(file.parent)
        package = name if file.stem == "__init__" else name.rpartition(".")[0]
        for imported in source.imports:
            target = _followed(imported, package, counts)
            # Without the names of its own and moereg's modules, since moved code is the same code.
            if imported.level or imported.module.partition(".")[0] in own:
                imported = imported._replace(level=0, module="")
            if target is None:
                lines.add(repr(tuple(imported)))
            else:
                pending.append(target)
                taken.add((imported, target))
    # The meaning of names, since two modules may have different functions of one name.
    lines.update(f"{tuple(imported)} {digests[target]}" for imported, target in taken)
    found = sorted([*lines, *digests.values()])
    data = ((file.name, _data_digest(file)) for folder in folders for file in folder.glob("*.json"))
    found += sorted(f"{name} {digest}" for name, digest in data if digest is not None)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


class _Chunk:
    """Statements at the top of a module that share lines, nearly always one. It is read once for all classes."""

    def __init__(self, lines: list[str], statements: list[ast.stmt]) -> None:
        """Takes the lines of the module and the statements, and keeps no nodes, which are many times as large."""
        first, last = _span(statements)
        self._lines = lines[first - 1 : last]
        inner = [node for statement in statements for node in _statements(statement)]
        self._left_out = [
            (
                _position(self._lines, node.lineno - first + 1, node.col_offset),
                _position(self._lines, (node.end_lineno or 0) - first + 1, node.end_col_offset),
            )
            for node in inner
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            )
            or isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        self.imports = frozenset(imported for node in inner for imported in _imports(node))
        defined = [_defined(statement) for statement in statements]
        self.defined = [name for names in defined for name in names] if all(defined) else []
        """The names that it defines; empty if it does anything else."""
        self.names = frozenset(name for statement in statements for name in _names(statement))

    @functools.cached_property
    def tokens(self) -> str:
        """Its tokens as items of JSON, equal for every Python version that can read it.

        Omits imports, comments, blank lines, line breaks and indentation as such, and strings that are statements,
        such as docstrings.
        """
        return json.dumps(list(_tokens(self._lines, self._left_out)))[1:-1]


def _chunks(text: str) -> list[_Chunk]:
    groups: list[list[ast.stmt]] = []
    for statement in _parsed(text).body:
        if groups and _span([statement])[0] <= _span(groups[-1])[1]:
            groups[-1].append(statement)
        else:
            groups.append([statement])
    lines = text.split("\n")
    return [_Chunk(lines, group) for group in groups]


def _span(statements: list[ast.stmt]) -> tuple[int, int]:
    """The first and the last line of statements that follow each other."""
    first, last = statements[0], statements[-1].end_lineno
    assert last is not None
    return min([first.lineno, *(node.lineno for node in getattr(first, "decorator_list", []))]), last


def _digest(chunks: list[_Chunk]) -> str:
    items = ", ".join(filter(None, (chunk.tokens for chunk in chunks)))
    return hashlib.sha256(f"[{items}]".encode()).hexdigest()


def _statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Yields a statement and those in it. Skips expressions, ten times as many, which contain none."""
    pending: list[ast.AST] = [statement]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.stmt):
            yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):  # The body of a conditional expression or a lambda is not a list.
                pending += inner


def _tokens(lines: list[str], left_out: list[tuple[_Position, _Position]]) -> Iterator[tuple[str, str]]:
    ends = dict(left_out)
    skipped_to: _Position = (0, 0)
    is_behind_left_out = False
    depth = 0
    string_start: _Position = (0, 0)
    for kind, string, start, end, _ in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        name = token.tok_name[kind]
        if start < skipped_to or kind in _IGNORED:
            continue
        if start in ends and kind not in _LAYOUT:
            skipped_to, is_behind_left_out = ends[start], True
            continue
        if is_behind_left_out and (kind == tokenize.NEWLINE or string == ";"):
            is_behind_left_out = False
            continue
        is_behind_left_out = False
        # Up to Python 3.11 an f-string is one token; later versions split it.
        if name in _STRING_STARTS:
            string_start = start if depth == 0 else string_start
            depth += 1
        elif name in _STRING_ENDS:
            depth -= 1
            if depth == 0:
                yield "STRING", _between(lines, string_start, end)
        elif depth == 0:
            yield name, "" if kind in _LAYOUT else string


def _between(lines: list[str], start: _Position, end: _Position) -> str:
    picked = lines[start[0] - 1 : end[0]]
    picked[-1] = picked[-1][: end[1]]
    picked[0] = picked[0][start[1] :]
    return "\n".join(picked)


def _position(lines: list[str], line: int | None, num_bytes: int | None) -> _Position:
    """Converts a node's position, whose column is in bytes of UTF-8."""
    assert line is not None and num_bytes is not None
    return line, len(lines[line - 1].encode()[:num_bytes].decode())


def _text(source: bytes) -> str:
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return io.TextIOWrapper(io.BytesIO(source), encoding).read()  # Normalizes line breaks, like Python's own reader.


def _parsed(text: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A digest need not warn of invalid escapes.
        return ast.parse(text)


class _Import(NamedTuple):
    """A name that an import statement defines; `name` is None for the module itself."""

    level: int
    module: str
    name: str | None
    alias: str | None


class _Source(NamedTuple):
    """The part of a file that counts: a digest of its tokens, and its imports."""

    digest: str
    imports: frozenset[_Import]


def _read(file: pathlib.Path, only: str | None = None) -> _Source | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return _read_once(file, only, status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1024)
def _read_once(file: pathlib.Path, only: str | None, changed_ns: int, num_bytes: int) -> _Source | None:
    try:
        if file.suffix != ".py":
            return _Source(hashlib.sha256(file.read_bytes()).hexdigest(), frozenset())
        chunks = _chunks_of_file(file, changed_ns, num_bytes)
        if only is not None:
            chunks = _needed(only, chunks)
        return _Source(_digest(chunks), frozenset().union(*(chunk.imports for chunk in chunks)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None  # It is broken, or needs a later Python.


@functools.lru_cache(maxsize=256)
def _chunks_of_file(file: pathlib.Path, _changed_ns: int, _num_bytes: int) -> list[_Chunk]:
    return _chunks(_text(file.read_bytes()))


def _needed(name: str, chunks: list[_Chunk]) -> list[_Chunk]:
    """A module without the definitions and imports that one of its names does not need.

    Keeps the class or function, statements that do more than define names, and everything that these name.
    """
    definitions: dict[str, list[_Chunk]] = {}
    reached: list[_Chunk] = []
    for chunk in chunks:
        for each in chunk.defined:
            definitions.setdefault(each, []).append(chunk)
        if not chunk.defined:
            reached.append(chunk)
    if name not in definitions:
        return chunks
    reached += definitions.pop(name)
    kept = set()
    while reached:
        chunk = reached.pop()
        kept.add(chunk)
        for named in definitions.keys() & chunk.names:
            reached += definitions.pop(named)
    return [chunk for chunk in chunks if chunk in kept]


def _defined(statement: ast.stmt) -> list[str]:
    """The class, plain function, constants or imports that a statement defines; none if it does anything else."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ClassDef) or (isinstance(statement, ast.FunctionDef) and not statement.decorator_list):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else []


def _imports(statement: ast.stmt) -> Iterator[_Import]:
    if isinstance(statement, ast.Import):
        yield from (_Import(0, alias.name, None, alias.asname) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        level, module = statement.level, statement.module or ""
        yield from (_Import(level, module, alias.name, alias.asname) for alias in statement.names)


def _names(tree: ast.AST) -> Iterator[str]:
    """The names in code, including words in strings, without docstrings."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)
        pending += ast.iter_child_nodes(node)


def _followed(imported: _Import, package: str, counts: Callable[[str], bool]) -> tuple[str, str | None] | None:
    """The followed module that an import names, and the name that it takes; None as the name means all.

    For `from a import b` this is all of `a.b` if that is a module. None if the import is not followed.
    """
    base = imported.module
    if imported.level:
        parts = package.split(".")
        base = ".".join([*parts[: len(parts) - imported.level + 1], *filter(None, [base])])
    inner = f"{base}.{imported.name}"
    if imported.name is not None and counts(inner) and module_file(inner) is not None:
        return inner, None
    return (base, imported.name) if counts(base) and module_file(base) is not None else None


def module_file(module: str) -> pathlib.Path | None:
    """The file of a module, or None. Imports nothing, since kernels would need their libraries."""
    known = _FOUND.get()
    if known is None:
        return _look_up(module)
    if module not in known:
        known[module] = _look_up(module)
    return known[module]


def _look_up(module: str) -> pathlib.Path | None:
    top, *parts = module.split(".")
    if not all(part.isidentifier() for part in (top, *parts)):
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module run as a script has no spec.
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations is None:
        return pathlib.Path(spec.origin) if spec.origin and spec.has_location and not parts else None
    for location in spec.submodule_search_locations:
        path = pathlib.Path(location).joinpath(*parts)
        candidates = [path / "__init__.py", *(path.with_name(path.name + suffix) for suffix in _SUFFIXES)]
        for file in candidates if parts else candidates[:1]:
            if file.is_file():
                return file
    return None


_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)


def root_package(module: str) -> str:
    """The outermost package of a module that is not a namespace package: `a.b` for `a.b.c` if `a` has no file."""
    parts = module.split(".")
    for number in range(1, len(parts)):
        if module_file(".".join(parts[:number])) is not None:
            return ".".join(parts[:number])
    return module


_ABOUT_CODE: Final = ({"schema", "records"}, {"schema", "machine", "cells", "columns", "layers"})
"""Keys of records of cells and of packs: they hold digests, which would change if these files were part of them."""


def _data_digest(file: pathlib.Path) -> str | None:
    """A digest of a JSON file's value, or of its text if it is not JSON; None if moereg wrote it about code."""
    if file.name == LEDGER_NAME:
        return None
    try:
        content = file.read_bytes()
    except OSError:
        return UNKNOWN
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(content)
        if isinstance(value, dict) and any(keys <= value.keys() for keys in _ABOUT_CODE):
            return None
        content = json.dumps(value, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()

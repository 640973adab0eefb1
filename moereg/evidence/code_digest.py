"""Digests of code: of whole files, without comments and docstrings. Imports nothing that it reads.

A module that registers cells may declare which files they run, once for all of its classes: `CODE` is a tuple of
prefixes of paths in its distribution's package, such as `("backends/_triton", "kernels/gemm")`. Without one it is the
whole package, or the module's file if it is in none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import pathlib
import sys
import warnings
from typing import Any, Final

LEDGER_NAME: Final = "moereg_ledger.json"
"""A package's own evidence, which is not part of its code."""

UNKNOWN: Final = "unknown"
"""The digest of code that cannot be read."""

_SUFFIXES: Final = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
_ABOUT_CODE: Final = ({"schema", "records"}, {"schema", "machine", "cells", "columns", "layers"})
"""Keys of ledgers and packs: they hold digests, which would change if these files were part of them."""
_NO_MEANING: Final = frozenset({"ctx", "kind", "type_comment"})


@functools.lru_cache(maxsize=256)
def class_digest(experts: type) -> str:
    """A digest of the files that a class runs, read once a process.

    Code counts by meaning, so that no comment, layout or version of Python matters; JSON files, such as launch
    configurations, count by value, and other files by their bytes. Ledgers and packs do not count.

    Returns:
        Hexadecimal, or `UNKNOWN` if files of a prefix are missing or cannot be read.
    """
    return _module_digest(experts.__module__)


@functools.lru_cache(maxsize=256)
def _module_digest(module: str) -> str:
    top = module_file(root_package(module))
    if top is None:
        return UNKNOWN
    folder, prefixes = top.parent, tuple(getattr(sys.modules.get(module), "CODE", ("",)))
    if top.stem != "__init__":
        prefixes = (top.name,)
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}
    found = [name for name in sorted(files) if name.startswith(prefixes) and "__pycache__" not in name]
    if not all(any(name.startswith(prefix) for name in found) for prefix in prefixes):
        return UNKNOWN
    try:
        lines = [f"{name} {digest}" for name in found if (digest := _file_digest(files[name])) is not None]
    except OSError:
        return UNKNOWN
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _file_digest(file: pathlib.Path) -> str | None:
    """The digest of a file; None for a ledger or a pack. What does not parse counts by its bytes."""
    content, parts = file.read_bytes(), list[str]()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        if file.suffix == ".json":
            value = json.loads(content)
            if file.name == LEDGER_NAME or (isinstance(value, dict) and any(keys <= {*value} for keys in _ABOUT_CODE)):
                return None
            content = json.dumps(value, sort_keys=True).encode()
        elif file.suffix == ".py":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # A digest need not warn of invalid escapes.
                _add(parts, ast.parse(content))
            content = "\n".join(parts).encode()
    return hashlib.sha256(content).hexdigest()


def _add(parts: list[str], value: Any) -> None:
    """Adds what a syntax tree says, without texts that are statements; `ast.dump` differs between Python versions."""
    if isinstance(value, ast.AST):
        parts.append(type(value).__name__)
        for field in value._fields:
            inner = getattr(value, field, None)
            if isinstance(value, ast.JoinedStr):  # Python 3.12 has empty parts.
                inner = [part for part in value.values if not isinstance(part, ast.Constant) or part.value]
            if inner is not None and inner != [] and field not in _NO_MEANING:
                parts.append(field)
                _add(parts, inner)
    elif isinstance(value, list):
        for item in value:
            is_constant = isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)
            if not (is_constant and isinstance(item.value.value, str)):
                _add(parts, item)
        parts.append("]")
    else:
        parts.append(ascii(value))


def module_file(module: str) -> pathlib.Path | None:
    """The file of a module, or None. Imports nothing, since kernels would need their libraries."""
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


def root_package(module: str) -> str:
    """The outermost package of a module that is not a namespace package: `a.b` for `a.b.c` if `a` has no file."""
    parts = module.split(".")
    for number in range(1, len(parts)):
        if module_file(".".join(parts[:number])) is not None:
            return ".".join(parts[:number])
    return module

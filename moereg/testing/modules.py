"""Imports backends that no entry point names: modules by name, or files by path."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterable, Sequence

from moereg.errors import ArgumentError, described, stops_the_process
from moereg.registry import BUILTIN, REGISTRY


def is_file_name(name: str) -> bool:
    """Whether a module's name is the path of a Python file."""
    return name.endswith(".py")


def import_modules(names: Iterable[str]) -> None:
    """Imports each module, which registers its backends; imported ones stay.

    Args:
        names: Names of modules, or paths of files, whose folder joins the import path as for a script.

    Raises:
        ArgumentError: A module cannot be imported.
    """
    for name in names:
        try:
            _import_file(pathlib.Path(name)) if is_file_name(name) else importlib.import_module(name)
        except BaseException as error:  # Another author's module may raise anything.
            if stops_the_process(error):
                raise
            raise ArgumentError(
                f"module {name!r} must import and register a backend, got {described(error)}; repair it"
            ) from error


def _import_file(path: pathlib.Path) -> None:
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return
        raise ImportError(f"the name {path.stem} is taken by {getattr(known, '__file__', 'a built-in module')}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise


def resolved_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """The names, with absolute paths of files."""
    return tuple(str(pathlib.Path(name).resolve()) if is_file_name(name) else name for name in modules)


def own_modules(name: str, is_needed: bool) -> tuple[str, ...]:
    """The modules of a backend that is registered in this process but not part of a distribution.

    Raises:
        ArgumentError: A class has no module that another process could import, but needs one.
    """
    found: dict[str, None] = {}
    for cell in REGISTRY.by_name(name):
        module = cell.experts.__module__
        if cell.origin in (BUILTIN, "") or cell.origin != module:
            continue
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" or file is None:
            if not is_needed:
                continue
            raise ArgumentError(
                f"a worker process must be able to import {cell.class_name} of {module}, which has no module; put it "
                "into a file (moereg verify ./my_backend.py), or pass isolate=False"
            )
        found.setdefault(str(file) if "." not in module and is_file_name(str(file)) else module)
    return tuple(found)

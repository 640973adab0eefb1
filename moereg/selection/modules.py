"""Backends that no entry point names: a module by its name, or a file by its path, imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterable, Sequence

from moereg.errors import ArgumentError, described, stops_the_process
from moereg.prepare_finalize.cells import DISPATCHERS
from moereg.registry import BUILTIN, REGISTRY, Cell, registering_origin
from moereg.selection.loader import load_backends


def is_file_name(name: str) -> bool:
    """Whether the name of a module is the path of a Python file."""
    return name.endswith(".py")


def import_modules(names: Iterable[str]) -> None:
    """Imports modules by name and files by path, after all that is installed; what is imported already stays.

    A file is imported alone: its folder does not become a place to import from. Its backends' origin is its name. An
    ArgumentError if one cannot be imported.
    """
    for name in names:
        load_backends()  # What is installed keeps its names, and its origin where a file imports it.
        try:
            _import_file(pathlib.Path(name)) if is_file_name(name) else importlib.import_module(name)
        except BaseException as error:  # A stranger's module may raise anything.
            if stops_the_process(error):
                raise
            raise ArgumentError(
                f"module {name!r} must import and register a backend, got "
                f"{described(error, pathlib.Path(name).stem)}; repair it"
            ) from error


def _import_file(path: pathlib.Path) -> None:
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and os.path.realpath(getattr(known, "__file__", None) or "") == str(path):
        return
    if not path.stem.isidentifier():
        raise ImportError(f"a file's name must be letters, digits and underscores, got {path.name}; rename the file")
    # Also of what is not imported yet: a file such as triton.py must not become the library.
    taken = importlib.util.find_spec(path.stem) if known is None else known
    if taken is not None and os.path.realpath(getattr(taken, "origin", None) or "") != str(path):
        where = getattr(known, "__file__", None) or getattr(taken, "origin", None) or "a built-in module"
        raise ImportError(f"the name {path.stem} is taken by {where}; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    backends, dispatchers = REGISTRY.cells, DISPATCHERS.cells
    try:
        with registering_origin(path.name):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        REGISTRY.restore(backends)
        DISPATCHERS.restore(dispatchers)
        if isinstance(error, ModuleNotFoundError) and (path.parent / f"{error.name}.py").exists():
            raise ImportError(f"{error}: a file is imported alone; make both a package and install it") from error
        raise


def resolved_modules(modules: Sequence[str]) -> tuple[str, ...]:
    """The names, files among them with their whole paths."""
    return tuple(str(pathlib.Path(name).resolve()) if is_file_name(name) else name for name in modules)


def registers(module: str, cell: Cell) -> bool:
    """Whether a cell's class is one of a module, of its package's modules, or of a file."""
    name = pathlib.Path(module).stem if is_file_name(module) else module
    return f"{cell.implementation.__module__}.".startswith(f"{name}.")


def is_of_file(cell: Cell) -> bool:
    """Whether a cell was registered by a file that was named, not by a module or a plugin."""
    return cell.origin == f"{cell.implementation.__module__}.py"


def own_modules(name: str = "", is_needed: bool = False) -> tuple[str, ...]:
    """The modules in which this process registered a backend that no distribution brings, as another can import them.

    An empty name stands for all, token dispatchers too. A class that no other process could import is left out, and an
    ArgumentError if it `is_needed`.
    """
    found: dict[str, None] = {}
    for cell in (*REGISTRY.cells, *DISPATCHERS.cells) if not name else REGISTRY.by_name(name):
        module = cell.implementation.__module__
        if cell.origin in (BUILTIN, "") or cell.origin not in (module, f"{module}.py"):
            continue  # A distribution brings it.
        file = getattr(sys.modules.get(module), "__file__", None)
        if module == "__main__" or file is None:
            if not is_needed:
                continue
            raise ArgumentError(
                f"a worker process must be able to import {cell.class_name} of {module}, which has no module; put it "
                "into a file (moereg verify ./my_backend.py), or pass isolate=False"
            )
        found.setdefault(str(file) if pathlib.Path(file).name == f"{module}.py" else module)
    return tuple(found)

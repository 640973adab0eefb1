"""Imports of backends that no entry point names: a module by its name, or a file by its path."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterable

from moereg.errors import ArgumentError, described, stops_the_process

__all__ = ["import_modules", "is_file_name"]


def is_file_name(name: str) -> bool:
    """Whether the name of a module is the path of a Python file."""
    return name.endswith(".py")


def import_modules(names: Iterable[str]) -> None:
    """Imports each, which registers its backends; what is imported already stays.

    Args:
        names: Names of modules, or paths of files, whose folder becomes a place to import from as it does for a script.

    Raises:
        ArgumentError: One cannot be imported.
    """
    for name in names:
        try:
            _import_file(pathlib.Path(name)) if is_file_name(name) else importlib.import_module(name)
        except BaseException as error:  # A stranger's module may raise anything.
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

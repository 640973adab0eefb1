"""Loads torch at first use, since most commands do not need it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

_LOCK = threading.RLock()


@contextlib.contextmanager
def ctrl_c_ends_imports() -> Iterator[None]:
    """Within this context Ctrl-C ends the process: Python's import system and some libraries swallow its exception."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _LaterTorch(types.ModuleType):
    """A stand-in for torch that becomes torch when an attribute is read.

    It has no `__path__` before, so that importing a submodule loads torch too.
    """

    def __getattr__(self, name: str) -> Any:
        with _LOCK:
            is_first = type(self) is _LaterTorch and "__path__" not in vars(self)
            if is_first:
                _load(self)
        # torch's own code reads names while it loads; other threads wait for the lock.
        if not is_first and type(self) is _LaterTorch:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


def _load(module: types.ModuleType) -> None:
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    module.__path__ = spec.submodule_search_locations or []
    with ctrl_c_ends_imports():
        spec.loader.exec_module(module)
    module.__class__ = types.ModuleType


class _AlreadyImported(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Returns a submodule that torch already imported, when importing that submodule triggered loading torch.

    Python has already searched for the submodule and would run it a second time.
    """

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torch.") or fullname not in sys.modules:
            return None
        self._specs[fullname] = sys.modules[fullname].__spec__
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._specs.pop(module.__name__)


def load_torch_at_first_use() -> None:
    """Makes `import torch` free until an attribute is read; loading takes a second or two.

    For moereg's own processes, before anything else is imported. Does nothing if torch is already loaded, not
    installed, or not found on the path like an ordinary package.
    """
    found = importlib.machinery.PathFinder.find_spec("torch")
    if "torch" in sys.modules or found is None or found.loader is None or found.origin is None:
        return
    module = _LaterTorch("torch")
    module.__spec__, module.__loader__, module.__file__ = found, found.loader, found.origin
    module.__package__ = "torch"
    sys.modules["torch"] = module
    sys.meta_path.insert(0, _AlreadyImported())

"""Wheels as a stranger installs them, for tests in this process: dist-info on the path, and a loader that is fresh."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moereg.prepare_finalize import DISPATCHERS
from moereg.registry import BackendCell, BackendRegistry
from moereg.selection.loader import _Loader
from moereg.selection.plugin_status import PluginStatus

CELL = """
@register_moe_backend(name={name!r}, priority=1, quant_schemes=("unquantized",), platforms=({rule!r},))
class {kind}({base}):
    pass
"""
HEAD = """
from moereg.author import register_moe_backend
from tests.support.fakes import FakeExperts
moereg_api = "1"
"""


def cell(name: str, rule: str = "*", kind: str = "Mine", base: str = "FakeExperts") -> str:
    return CELL.format(name=name, rule=rule, kind=kind, base=base)


def backend(name: str, **changes: str) -> str:
    return HEAD + cell(name, **changes)


def install(
    folder: Path,
    distribution: str,
    backends: dict[str, str],
    files: dict[str, str],
    version: str = "1.2",
    group: str = "backends",
) -> None:
    """Puts a distribution into a folder: its files, and entry points by name."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in files))
    points = "".join(f"{name} = {value}\n" for name, value in backends.items())
    (info / "entry_points.txt").write_text(f"[moereg.{group}]\n{points}")


class Wheels:
    """A folder of distributions on this process's path, and loaders that see them for the first time."""

    def __init__(self, folder: Path, registry: BackendRegistry) -> None:
        self.folder = folder
        self.registry = registry

    def install(self, *what: Any, **keywords: Any) -> None:
        """As the function of that name."""
        install(self.folder, *what, **keywords)

    def load(self) -> dict[str, str]:
        """`loaded` or the error of every entry point."""
        return summary(_Loader(self.registry).load())

    def cells(self, *names: str) -> list[BackendCell]:
        return [cell for cell in self.registry.cells if cell.name in names]

    def origins(self, *names: str) -> dict[str, str]:
        return {cell.name: f"{cell.origin} {cell.origin_version}" for cell in self.cells(*names)}


def summary(statuses: tuple[PluginStatus, ...]) -> dict[str, str]:
    assert len({(status.group, status.name, status.value) for status in statuses}) == len(statuses), "one loads twice"
    return {status.name: status.error or status.status for status in statuses}


def fresh_wheels(folder: Path, monkeypatch: pytest.MonkeyPatch, registry: BackendRegistry) -> Iterator[Wheels]:
    """For a fixture: wheels in a folder that is on the path during a test; their modules are gone after it."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, dispatchers = set(sys.modules), DISPATCHERS.cells
    owners = registry.owner_of, DISPATCHERS.owner_of
    yield Wheels(folder, registry)
    registry.owner_of, DISPATCHERS.owner_of = owners
    DISPATCHERS.restore(dispatchers)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or folder).startswith(str(folder)):
            del sys.modules[name]

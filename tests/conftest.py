"""Fixtures that every test file uses. The environment is set before anything imports triton."""

from __future__ import annotations

import dataclasses
import getpass
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

if not torch.cuda.is_available():
    # Decides at decoration whether kernels are interpreted, so it has to stand before their import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if limit := os.environ.get("ATEN_CPU_CAPABILITY"):
    # Inductor's cache does not tell apart what it compiled for a CPU and for what torch was told to leave of it.
    folder = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}_{limit}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)

# What failed or passed here some day must not steer the tests.
os.environ["MOEREG_QUARANTINE"] = ""
# Nor must what was measured here.
os.environ["MOEREG_TUNING"] = ""
os.environ["MOEREG_ADMISSION"] = "off"

from moereg.registry import REGISTRY, BackendRegistry


@pytest.fixture(autouse=True)
def _poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` gives NaN, and bytes that read as NaN in any float type, so that memory nothing wrote shows."""
    real = torch.empty
    # `with torch.device(...)` lists the functions that it knows once, and would list ours instead of the real one.
    _device_constructors()

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        tensor: torch.Tensor = real(*args, **kwargs)  # type: ignore[call-overload]
        if tensor.device.type != "meta" and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8):
            tensor.fill_(255 if tensor.dtype == torch.uint8 else float("nan"))
        return tensor

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in the caller's environment, and the width of its terminal, must not steer the tests."""
    for variable in ("MOEREG_REQUIRE", "MOEREG_PREFER", "MOEREG_DENY", "MOEREG_PLUGINS", "MOEREG_DEBUG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("COLUMNS", "400")  # Nothing is folded where a test sets no other width.


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tiny sizes: on a busy machine torch's threads wait for each other for milliseconds."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def cpu_features(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Call it with fields of `CpuFeatures` to answer as another CPU would; nothing that was answered so is kept."""
    from moereg.kernels.plain import cpu
    from moereg.selection import decide

    monkeypatch.setattr(decide, "_ANSWERS", {})
    here = cpu.features()

    def answer(**fields: bool) -> None:
        decide._ANSWERS.clear()
        monkeypatch.setattr(cpu, "features", lambda: dataclasses.replace(here, **fields))

    return answer


@pytest.fixture
def isolated_registry() -> Iterator[BackendRegistry]:
    """The global registry with all backends loaded; a test's additions are gone afterwards."""
    from moereg.prepare_finalize import DISPATCHERS
    from moereg.selection.loader import load_backends

    load_backends()
    before, dispatchers = REGISTRY.cells, DISPATCHERS.cells
    yield REGISTRY
    REGISTRY.restore(before)
    DISPATCHERS.restore(dispatchers)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry) -> Iterator[Any]:
    """Wheels in a folder that is on the path during a test."""
    from tests.support.wheels import fresh_wheels

    yield from fresh_wheels(tmp_path, monkeypatch, isolated_registry)


@pytest.fixture(autouse=True)
def _registry_keeps_its_backends() -> Iterator[None]:
    """Backends are loaded once in a process: who puts back an older registry takes them from every later test."""
    yield
    loader = getattr(sys.modules.get("moereg.selection.loader"), "_LOADER", None)
    if loader is not None and loader._registry is REGISTRY and loader._statuses is not None:
        assert REGISTRY.by_name("torch"), "the test left the registry without the backends that it had loaded"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vnni", action="store_true", help="run as on a CPU with int8 instructions")


def pytest_configure(config: pytest.Config) -> None:
    """`--vnni`: the probe says yes in every test. A variable of torch or oneDNN makes it say no (see the Makefile)."""
    if config.getoption("--vnni"):
        from moereg.kernels.plain import cpu

        found = dataclasses.replace(cpu.features(), int8=True)
        cpu.features = lambda: found


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow, of each test with the mark `few`, the cases whose every value an earlier case has."""
    seen: dict[str, set[tuple[str, str]]] = {}
    kept: dict[str, int] = {}
    for item in items:
        mark, case = item.get_closest_marker("few"), getattr(item, "callspec", None)
        if mark is None or case is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        values = {(name, repr(value)) for name, value in case.params.items()} - seen.setdefault(test, set())
        if values and kept.get(test, 0) < mark.kwargs.get("most", len(items)):
            seen[test] |= values
            kept[test] = kept.get(test, 0) + 1
        else:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what the run took of the processor, all its processes together: unlike time, no neighbor changes it much."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    terminalreporter.write_line(f"{seconds:.0f} CPU-seconds")

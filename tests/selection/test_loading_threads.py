"""Registration by several threads: nothing is lost, nothing half-done is seen, and nobody waits for ever."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from moereg.dispatch import select_backend
from moereg.errors import MoeregWarning
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.selection import loader as discovery
from moereg.selection.loader import _Loader
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts
from tests.support.wheels import Wheels, backend

PROBLEM = MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)


def test_threads_that_select_at_once_see_the_same(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install(
        "late", {"late": "late_wheel"}, {"late_wheel.py": "import time\ntime.sleep(0.3)\n" + backend("late")}
    )
    monkeypatch.setattr(discovery, "_LOADER", _Loader(wheels.registry))
    barrier, seen = threading.Barrier(12), []

    def select() -> None:
        barrier.wait()
        seen.append({decision.backend for decision in select_backend(PROBLEM, require="late").decisions})

    threads = [threading.Thread(target=select) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 12
    assert all(names == seen[0] and "late" in names for names in seen)
    assert len(wheels.cells("late")) == 1


def test_what_is_registered_while_a_plugin_loads_stays(wheels: Wheels) -> None:
    wait = "import threading\nentered, go = threading.Event(), threading.Event()\n"
    slow = wait + backend("slow") + "entered.set()\nassert go.wait(60)\nraise ValueError('late')\n"
    wheels.install("slow", {"slow": "slow_wheel"}, {"slow_wheel.py": slow})
    found: list[Any] = []

    def load() -> None:
        with pytest.warns(MoeregWarning, match="late"):
            found.append(wheels.load())

    thread = threading.Thread(target=load)
    thread.start()
    while not hasattr(module := sys.modules.get("slow_wheel"), "go") and thread.is_alive():
        pass
    assert module is not None
    assert module.entered.wait(60)
    # Nothing of the plugin shows, and a notebook's class shows at once.
    assert wheels.origins("slow") == {}
    register_moe_backend("at_once", 1, ("unquantized",), ("*",))(FakeExperts)
    assert wheels.origins("at_once") == {"at_once": "tests.support.fakes "}
    module.go.set()
    thread.join(60)
    assert found == [{"slow": "ValueError: late"}]
    assert wheels.origins("slow", "at_once") == {"at_once": "tests.support.fakes "}


def test_threads_that_register_at_once_lose_nothing() -> None:
    registry = BackendRegistry()
    barrier = threading.Barrier(8)

    def register(number: int) -> None:
        barrier.wait()
        for step in range(25):
            kind = type(f"Experts{number}", (FakeExperts,), {})
            register_moe_backend(f"own_{number}", step, ("unquantized",), ("*",), registry=registry)(kind)

    threads = [threading.Thread(target=register, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.cells) == 200

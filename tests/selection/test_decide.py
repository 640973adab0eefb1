"""Deciding is pure: cells, names and platform are arguments, and each is looked up once a selection."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moereg import dispatch
from moereg.dispatch import select_backend
from moereg.errors import ArgumentError, UnknownBackendError, UnknownSchemeError
from moereg.layer.factory import make_kernel
from moereg.platforms import Platform
from moereg.registry import BackendCell, BackendRegistry, register_moe_backend, registering_origin
from moereg.selection import loader as discovery
from moereg.selection import request, result
from moereg.selection.decide import decide, evaluate
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts

CPU = Platform("cpu", "x86_64", probed=True)
SM90 = Platform.from_name("cuda:sm90")
PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
HALF = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, quant="nvfp4")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> BackendRegistry:
    """A registry of a test's own, while nobody may ask for the one that is installed."""
    registry = BackendRegistry()
    keywords: dict[str, Any] = {"registry": registry, "quant_schemes": ("unquantized",)}
    register_moe_backend("fast", 20, platforms=("cuda:sm80+",), **keywords)(type("Fast", (FakeExperts,), {}))
    register_moe_backend("slow", 10, platforms=("cuda:sm80+", "cpu"), **keywords)(type("Slow", (FakeExperts,), {}))
    keywords["quant_schemes"] = ("nvfp4_w4a16",)
    register_moe_backend("half", 5, platforms=("*",), **keywords)(type("Half", (FakeExperts,), {}))

    def lookup(*arguments: object) -> None:
        raise AssertionError("the installed backends were asked for")

    for owner, name in ((discovery, "load_backends"), (dispatch, "load_backends"), (result, "load_backends")):
        monkeypatch.setattr(owner, name, lookup)
    return registry


def test_cells_of_any_registry_are_chosen_among(own: BackendRegistry) -> None:
    found = decide(PROBLEM, SM90, Request(), own.cells)
    assert [decision.backend for decision in found.decisions] == ["fast", "slow", "half"]
    assert (found.backend, found.source) == ("fast", "priority")
    asked = Request.resolve("unquantized", prefer="slow", environ={}, cells=own.cells)
    assert decide(PROBLEM, SM90, asked, own.cells).source == "preferred"
    assert decide(PROBLEM, CPU, Request(), own.cells).backend == "slow"
    assert decide(PROBLEM, SM90, Request(), ()).winner is None
    alone = evaluate(own.cells[1], PROBLEM, SM90, Request())
    assert alone == found.decisions[1]


def test_a_request_knows_the_names_that_it_is_given(own: BackendRegistry) -> None:
    assert Request.resolve("unquantized", "fast", environ={}, cells=own.cells) == Request(require=("fast",))
    with pytest.raises(UnknownBackendError, match=r"unknown backend 'triton' \(known: fast, half, slow\)"):
        Request.resolve("unquantized", "triton", environ={}, cells=own.cells)
    # The scheme of the problem is known, even where no cell has it.
    assert Request.resolve("mine", "mine=fast", environ={}, cells=own.cells) == Request(require=("fast",))
    with pytest.raises(UnknownSchemeError, match="unknown quant scheme 'yours'"):
        Request.resolve("mine", "yours=fast", environ={}, cells=own.cells)


def test_a_selection_is_read_back_with_the_cells_that_it_is_given(own: BackendRegistry) -> None:
    found = decide(HALF, SM90, Request(), own.cells)
    again = Selection.from_json(found.to_json(), own.cells)
    assert again == found
    assert [(one.cell, one.scheme) for one in again.decisions] == [(one.cell, one.scheme) for one in found.decisions]
    assert again.winner is not None
    assert again.winner.scheme is not None
    assert (again.winner.cell, again.winner.scheme.name) == (own.cells[2], "nvfp4_w4a16")
    assert [decision.cell for decision in Selection.from_dict(found.to_dict(), ()).decisions] == [None] * 3


def test_a_winner_computes_the_weights_of_the_problem(own: BackendRegistry) -> None:
    values = decide(HALF, SM90, Request(), own.cells).to_dict()
    values["problem"]["quant"] = "mxfp8"
    with pytest.raises(ArgumentError, match=r"decisions\[0\].computes must be a scheme that serves mxfp8, got 'nvfp4"):
        Selection.from_dict(values, own.cells)


@pytest.mark.parametrize("platform", [None, "cpu"])
def test_what_is_installed_is_looked_up_once(monkeypatch: pytest.MonkeyPatch, platform: str | None) -> None:
    select_backend(PROBLEM, platform)
    calls: dict[str, int] = {}

    def counted(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def count(*arguments: Any, **keywords: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return function(*arguments, **keywords)

        monkeypatch.setattr(owner, name, count)

    counted(dispatch, "load_backends")
    counted(result, "load_backends")
    for method in ("scheme_for", "rule_for"):
        counted(BackendCell, method)
    found = select_backend(PROBLEM, platform, prefer="torch", deny=("triton",))
    cells = discovery.load_backends().cells
    assert calls == {"load_backends": 1, "scheme_for": len(cells), "rule_for": calls["rule_for"]}
    assert len(found.decisions) <= calls["rule_for"] <= len(cells)


def test_a_layer_reads_what_was_decided(monkeypatch: pytest.MonkeyPatch, own: BackendRegistry) -> None:
    from moereg.testing.inputs import make_weights

    found = decide(PROBLEM, CPU, Request(), own.cells)

    def resolved(*arguments: object) -> None:
        raise AssertionError("a candidate was resolved again")

    for method in ("scheme_for", "rule_for"):
        monkeypatch.setattr(BackendCell, method, resolved)
    assert make_kernel(PROBLEM, make_weights(PROBLEM, "cpu"), found).selection is found


def _adding(registry: BackendRegistry, name: str, ask: Callable[..., Any], origin: str = "wheel", **words: Any) -> None:
    """Registers a class whose predicate is `ask(problem, platform)`."""
    predicate = classmethod(lambda cls, problem, platform: ask(problem, platform))
    experts = type(name.title(), (FakeExperts,), {"unsupported_reasons": predicate})
    with registering_origin(origin, "1.0"):
        register_moe_backend(name, 10, ("unquantized",), ("*",), registry=registry, **words)(experts)


def _texts(found: Selection, backend: str) -> list[tuple[str, str]]:
    (decision,) = (one for one in found.decisions if one.backend == backend)
    return [(reason.code, reason.text) for reason in decision.reasons]


def test_predicates_and_probes_are_asked_once_and_those_of_a_denied_wheel_never() -> None:
    registry, asked = BackendRegistry(), list[str]()

    def asking(name: str) -> Callable[..., Any]:
        return lambda *arguments: asked.append(name)

    for name, origin in (("unwanted", "wheel"), ("own", "builtin")):
        _adding(registry, name, asking(name), origin, probes=(asking(f"{name}'s probe"),))
    found = decide(PROBLEM, CPU, Request(deny=("unwanted", "own")), registry.cells)
    assert [code for code, _ in _texts(found, "unwanted")] == ["denied"]
    assert [code for code, _ in _texts(found, "own")] == ["denied", "predicate_error"]
    assert asked == ["own's probe", "own"]
    decide(PROBLEM, CPU, Request(), registry.cells)
    assert asked[2:] == ["unwanted's probe", "unwanted", "own"]


def test_threads_wait_for_one_probe_which_may_select(own: BackendRegistry) -> None:
    registry, calls, barrier = BackendRegistry(), list[Platform](), threading.Barrier(4)

    def selecting(platform: Platform) -> str | None:
        calls.append(platform)
        return decide(PROBLEM, platform, Request(), own.cells).backend

    def select(_: int) -> list[tuple[str, str]]:
        barrier.wait(60)
        return _texts(decide(PROBLEM, CPU, Request(), registry.cells), "one")

    _adding(registry, "one", lambda *_: [], probes=(selecting,))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(select, range(4))) == [[("probe", "slow")]] * 4
    assert calls == [CPU]


def test_a_request_is_read_once_a_name(monkeypatch: pytest.MonkeyPatch, own: BackendRegistry) -> None:
    read: list[str] = []
    place = request._place
    monkeypatch.setattr(request, "_place", lambda name, wished: read.append(name) or place(name, wished))
    decide(PROBLEM, SM90, Request(prefer=("slow",)), own.cells)
    assert sorted(read) == [name for name in ("fast", "half", "slow") for _ in ("require", "prefer", "deny")]


def test_a_selection_is_sent_to_another_process() -> None:
    selection = select_backend(MoEProblem(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2))
    assert pickle.loads(pickle.dumps(selection)) == selection
    facts = [decision.cell.facts for decision in selection.decisions if decision.cell]
    assert [pickle.loads(pickle.dumps(one)).binding for one in facts] == [one.binding for one in facts]

"""Predicates and probes of other distributions are asked where they can be given up, and named in the log."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moereg import asking
from moereg.asking import PREDICATE_SECONDS, SECONDS_VARIABLE, patience
from moereg.decide import decide, evaluate
from moereg.dispatch import explain_backends, machine_reasons, select_backend
from moereg.errors import ArgumentError
from moereg.machine import PROBES, Probes
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES
from moereg.registry import BackendRegistry, register_moe_backend, registering_origin
from moereg.request import Request
from moereg.selection import Decision, Selection
from tests.support.fakes import FakeExperts

HERE = Platform("cpu", "x86_64", probed=True)
PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
SHORT = 0.5
"""A limit for what never returns. The one that waits counts it in ten steps, which healthy code runs in between."""
"""For what never returns; healthy code in the same selection has LONG where a thread may be busy."""
Predicate = Callable[[MoEProblem, Platform], Any]


@pytest.fixture(autouse=True)
def helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that other tests gave up is remembered."""
    monkeypatch.setattr(asking, "_HELPERS", asking._Helpers())
    monkeypatch.setattr(PROBES, "_answers", {})


@pytest.fixture
def registry() -> BackendRegistry:
    return BackendRegistry()


@pytest.fixture
def gate() -> Any:
    """An event that calls may wait for; set in the end, so that their threads end."""
    event = threading.Event()
    yield event
    event.set()


def add(
    registry: BackendRegistry, name: str, predicate: Predicate | None = None, origin: str = "wheel", **keywords: Any
) -> None:
    members = {}
    if predicate is not None:
        members["unsupported_reasons"] = classmethod(lambda cls, problem, platform: predicate(problem, platform))
    experts = type(name.title(), (FakeExperts,), members)
    with registering_origin(origin, "1.0"):
        register_moe_backend(name, 10, ("unquantized",), ("*",), registry=registry, **keywords)(experts)


def choose(registry: BackendRegistry, seconds: float = SHORT, **keywords: Any) -> Selection:
    return decide(PROBLEM, HERE, Request(), registry.cells, seconds=seconds, **keywords)


def texts(selection: Selection, backend: str) -> list[tuple[str, str]]:
    (decision,) = (one for one in selection.decisions if one.backend == backend)
    return [(reason.code, reason.text) for reason in decision.reasons]


def test_a_predicate_that_does_not_return_is_given_up_once(
    registry: BackendRegistry, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def hang(problem: MoEProblem, platform: Platform) -> list[str]:
        calls.append(threading.current_thread().name)
        gate.wait()
        return []

    def fine(problem: MoEProblem, platform: Platform) -> list[str]:
        return ["requires more"] if problem.top_k == 3 else []

    for name, predicate in (("first", fine), ("hanging", hang), ("last", fine)):
        add(registry, name, predicate)
    for _ in range(3):
        selection = choose(registry)
        assert [decision.backend for decision in selection.decisions] == ["first", "last", "hanging"]
        assert texts(selection, "hanging") == [
            (
                "predicate_error",
                "its predicate did not return within 0.5 s, nor will it be asked again (backend 'hanging' of wheel "
                f"1.0); report it to its authors or allow more seconds in {SECONDS_VARIABLE}",
            )
        ]
    assert calls == ["moereg-predicates"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "the predicate of backend 'hanging' of wheel 1.0 did not return within 0.5 s and is given up for this process; "
        f"report it to its authors, do without it (--deny hanging), or allow more seconds in {SECONDS_VARIABLE}"
    )
    # What it says in the end is too late.
    gate.set()
    assert len(texts(choose(registry), "hanging")) == 1
    assert evaluate(registry.cells[1], PROBLEM, HERE, Request()).reasons


def test_a_loop_that_is_given_up_ends(registry: BackendRegistry) -> None:
    ended = threading.Event()

    def spin(problem: MoEProblem, platform: Platform) -> list[str]:
        try:
            while True:
                pass
        finally:
            ended.set()

    add(registry, "spinning", spin)
    assert choose(registry, 0.05).winner is None
    assert ended.wait(30)


def test_a_probe_that_does_not_return_is_given_up(registry: BackendRegistry, gate: threading.Event) -> None:
    def stuck(platform: Platform) -> str | None:
        gate.wait()
        return None

    probes = Probes()
    add(registry, "one", probes=(stuck,))
    add(registry, "two", lambda problem, platform: [], probes=(stuck,))
    add(registry, "three")
    for _ in range(2):
        selection = choose(registry, probes=probes)
        assert selection.backend == "three"
        for backend in ("one", "two"):
            ((code, text),) = texts(selection, backend)
            assert code == "predicate_error"
            assert text.startswith("its probe stuck did not return within 0.5 s, nor will it be asked again (backend")
    # Nobody waits for it any more, not even whoever asks right here, and what it says in the end is too late.
    assert probes.reason(stuck, HERE) is not None
    probes.keep(stuck, HERE, None)
    assert probes.reason(stuck, HERE) is not None


def test_code_of_what_is_denied_is_not_asked(registry: BackendRegistry) -> None:
    def refuse(*arguments: object) -> Any:
        raise AssertionError("it was asked")

    add(registry, "unwanted", refuse, probes=(refuse,))
    add(registry, "own", lambda problem, platform: ["requires more"], "builtin")
    denying = Request(deny=("unwanted", "own"))
    selection = decide(PROBLEM, HERE, denying, registry.cells, Probes())
    assert [code for code, _ in texts(selection, "unwanted")] == ["denied"]
    assert [code for code, _ in texts(selection, "own")] == ["denied", "backend"]


def test_info_does_not_wait_for_a_probe(
    registry: BackendRegistry, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(platform: Platform) -> str | None:
        gate.wait()
        return None

    monkeypatch.setenv(SECONDS_VARIABLE, str(SHORT))
    add(registry, "one", probes=(stuck,))
    (reason,) = machine_reasons(registry.cells[0], HERE)
    assert reason.text.startswith("its probe stuck did not return within 0.5 s, nor will it be asked again (backend")
    named = Platform.from_name("cpu:x86_64")
    assert machine_reasons(registry.cells[0], named) == []


def test_threads_wait_for_one_probe(registry: BackendRegistry) -> None:
    calls: list[Platform] = []

    def slow(platform: Platform) -> str | None:
        calls.append(platform)
        time.sleep(0.05)
        return "requires nvcc"

    probes, found = Probes(), []
    add(registry, "one", probes=(slow,))

    def select() -> None:
        found.append(texts(choose(registry, 60, probes=probes), "one"))

    threads = [threading.Thread(target=select) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[("probe", "requires nvcc")]] * 4
    assert calls == [HERE]


def test_a_probe_may_select(registry: BackendRegistry) -> None:
    add(registry, "inner", lambda problem, platform: [])

    def selecting(platform: Platform) -> str | None:
        return choose(registry, 60).backend

    outer = BackendRegistry()
    add(outer, "outer", probes=(selecting,))
    assert texts(choose(outer, 60, probes=Probes()), "outer") == [("probe", "inner")]


def test_a_predicate_that_selects_does_not_wait_again(registry: BackendRegistry, gate: threading.Event) -> None:
    add(registry, "hanging", lambda problem, platform: gate.wait() or [])
    assert choose(registry).winner is None
    outer = BackendRegistry()
    add(outer, "outer", lambda problem, platform: [str(choose(registry, 60).winner)])
    assert texts(choose(outer, 60), "outer") == [("backend", "None")]


def test_threads_that_wait_together_log_once(
    registry: BackendRegistry, gate: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    add(registry, "hanging", lambda problem, platform: gate.wait() or [])
    threads = [threading.Thread(target=choose, args=(registry,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("origin", "is_here"), [("wheel", False), ("builtin", True)])
def test_code_of_other_distributions_runs_in_a_helper(registry: BackendRegistry, origin: str, is_here: bool) -> None:
    threads: list[threading.Thread] = []

    def note(*arguments: object) -> list[str]:
        threads.append(threading.current_thread())
        return []

    add(registry, "one", note, origin, probes=(lambda platform: note() or None,))
    add(registry, "two", note, origin)
    assert choose(registry, 60, probes=Probes()).backend == "one"
    assert len(set(threads)) == 1
    assert len(threads) == 3
    assert (threads[0] is threading.current_thread()) is is_here
    assert threads[0].daemon is not is_here


def test_a_class_without_a_predicate_costs_no_thread(
    registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    add(registry, "one")
    assert choose(registry).backend == "one"


def test_an_interrupt_that_nobody_sent_is_an_error_of_the_wheel(registry: BackendRegistry) -> None:
    def interrupt(*arguments: object) -> Any:
        raise KeyboardInterrupt

    add(registry, "one", interrupt, probes=(interrupt,))
    add(registry, "two")
    try:
        selection = choose(registry, 60, probes=Probes())
    except KeyboardInterrupt:  # Which would end the tests.
        pytest.fail("it is taken for Ctrl-C")
    assert selection.backend == "two"
    assert texts(selection, "one") == [
        ("predicate_error", "its probe interrupt raised KeyboardInterrupt: no message"),
        ("predicate_error", "its predicate raised KeyboardInterrupt: no message"),
    ]


def test_what_a_stranger_changes_in_its_arguments_nobody_else_sees(registry: BackendRegistry) -> None:
    platform = dataclasses.replace(HERE, versions={"torch": "2.11"})
    before = copy.deepcopy((PROBLEM, platform, platform.versions, QUANT_SCHEMES["unquantized"]))

    def change(*arguments: Any) -> Any:
        machine = arguments[-1]
        machine.versions.clear()
        object.__setattr__(machine, "kind", "cuda")
        for problem in arguments[:-1]:
            object.__setattr__(problem, "top_k", 3)
            object.__setattr__(problem.quant, "name", "mine")
        return [] if arguments[:-1] else None

    add(registry, "one", change, probes=(change,))
    add(registry, "two", lambda problem, platform: [] if (problem, platform.kind) == (PROBLEM, "cpu") else ["changed"])
    selection = decide(PROBLEM, platform, Request(), registry.cells, Probes(), seconds=60)
    assert [decision.accepted for decision in selection.decisions] == [True, True]
    assert (PROBLEM, platform, platform.versions, QUANT_SCHEMES["unquantized"]) == before


def test_time_in_which_nobody_can_answer_is_not_counted(
    registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while another thread holds Python's lock: the one that waits wakes up late, and the answer is on its way."""
    held = threading.Event()
    wait = threading.Event.wait

    def wait_late(event: threading.Event, timeout: float | None = None) -> bool:
        done = wait(event, timeout)
        if timeout is not None and not held.is_set():
            time.sleep(0.3)  # Longer than the limit.
            held.set()
        return done

    add(registry, "one", lambda problem, platform: [str(wait(held))][1:])
    monkeypatch.setattr(threading.Event, "wait", wait_late)
    assert choose(registry, 0.25).backend == "one"


@pytest.mark.parametrize("answer", ["", " "])
def test_a_probe_that_says_nothing_is_an_error(registry: BackendRegistry, answer: str) -> None:
    add(registry, "one", probes=(lambda platform: answer,))
    assert texts(choose(registry, 60, probes=Probes()), "one") == [
        ("predicate_error", f"its probe <lambda> has to return a text or None, got {answer!r}")
    ]


def test_a_slow_predicate_is_logged_once(
    registry: BackendRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "_SLOW_SECONDS", 0.01)

    def slow(*arguments: object) -> list[str]:
        time.sleep(0.02)
        return []

    add(registry, "one", slow, probes=(lambda platform: slow() or None,))
    with caplog.at_level(logging.INFO, logger="moereg"):
        for _ in range(2):
            assert choose(registry, 60, probes=Probes()).backend == "one"
    assert len(caplog.records) == 2
    levels = {record.getMessage().partition(" took ")[0]: record.levelname for record in caplog.records}
    assert levels == {
        "the probe <lambda> of backend 'one' of wheel 1.0": "INFO",
        "the predicate of backend 'one' of wheel 1.0": "WARNING",
    }
    assert caplog.records[-1].getMessage().endswith(" s; report it to its authors if it is in your way")


def test_a_predicate_that_imports_a_library_is_named(
    registry: BackendRegistry,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    package = tmp_path / "some_kernel_library"
    package.mkdir()
    (package / "__init__.py").write_text("from some_kernel_library import inner\n")
    (package / "inner.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    def importing(problem: MoEProblem, platform: Platform) -> list[str]:
        import some_kernel_library  # type: ignore[import-not-found]  # noqa: F401

        return []

    add(registry, "one", importing)
    try:
        for _ in range(2):
            assert choose(registry, 60).backend == "one"
    finally:
        for name in [name for name in sys.modules if name.startswith("some_kernel_library")]:
            del sys.modules[name]
    (record,) = caplog.records
    assert record.getMessage() == (
        "the predicate of backend 'one' of wheel 1.0 imported some_kernel_library; choosing has to import no library: "
        "read versions from platform.versions, and import in permute_weights or apply"
    )


@pytest.mark.parametrize(("text", "seconds"), [("", PREDICATE_SECONDS), (" 2.5 ", 2.5), ("1e3", 1000.0)])
def test_the_limit_is_set_by_the_environment(text: str, seconds: float) -> None:
    assert patience({SECONDS_VARIABLE: text}) == seconds
    assert patience({}) == PREDICATE_SECONDS


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
def test_a_limit_that_is_no_positive_number_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SECONDS_VARIABLE, text)
    with pytest.raises(ArgumentError, match=rf"^{SECONDS_VARIABLE} must be a number of seconds above 0, got '{text}'"):
        explain_backends(PROBLEM, "cpu")


def test_the_limit_of_the_environment_counts(
    isolated_registry: BackendRegistry, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(isolated_registry, "hanging", lambda problem, platform: gate.wait() or [])
    monkeypatch.setenv(SECONDS_VARIABLE, str(SHORT))
    selection = select_backend(PROBLEM, "cpu", deny="")
    found: list[Decision] = [decision for decision in selection.decisions if decision.backend == "hanging"]
    assert [reason.code for reason in found[0].reasons] == ["predicate_error"]

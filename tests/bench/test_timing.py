"""Timing: what runs, in which order, and how often; on a CPU, and on a stand-in for a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from typing import Any, ClassVar

import pytest
import torch

from moereg.bench import timing
from moereg.bench.inputs import Call, random_call, random_weights
from moereg.bench.timing import Timing, time_kernels, time_runs
from moereg.dispatch import select_backend
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.runtime.gc_pause import collecting_later
from moereg.spec.problem import MoEProblem

CPU = torch.device("cpu")
PROBLEM = MoEProblem(num_experts=4, hidden_size=16, intermediate_size=16, top_k=2)


def kernel_and_calls(num_calls: int = 3, num_tokens: int = 2) -> tuple[MoEKernel, list[Call]]:
    generator = torch.Generator().manual_seed(0)
    kernel = make_kernel(PROBLEM, random_weights(PROBLEM, generator, CPU), select_backend(PROBLEM, "cpu"))
    return kernel, [random_call(PROBLEM, num_tokens, "uniform", generator) for _ in range(num_calls)]


def test_what_a_timing_says() -> None:
    found = Timing(tuple(float(value) for value in (50, 10, 20, 30, 40, 60, 70, 80, 90, 100, 110)))
    assert (found.median_us, found.min_us, found.p10_us, found.p90_us) == (60, 10, 20, 100)
    one = Timing((7.0,))
    assert (one.median_us, one.min_us, one.p10_us, one.p90_us) == (7, 7, 7, 7)


def test_rounds_are_interleaved_and_inputs_rotate() -> None:
    done: list[str] = []
    runs = {name: [functools.partial(done.append, f"{name}{number}") for number in range(3)] for name in "ab"}
    found = time_runs(runs, CPU, rounds=4)
    assert done[:6] == ["a0", "a1", "a2", "b0", "b1", "b2"]  # Warming up: each input once.
    assert done[6:] == ["a0", "b0", "b1", "a1", "a2", "b2", "b0", "a0"]
    assert {name: len(timing.samples_us) for name, timing in found.items()} == {"a": 4, "b": 4}


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def run(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("moereg.bench.timing.time", made)
    return made


def test_time_is_in_microseconds(clock: Clock) -> None:
    found = time_runs({"": [lambda: clock.run(0.01)]}, CPU, rounds=5)[""]
    assert found.samples_us == (pytest.approx(10_000),) * 5


def test_what_comes_before_a_sample_is_not_timed(clock: Clock) -> None:
    done: list[str] = []

    def before() -> None:
        done.append("before")
        clock.run(5.0)

    found = time_runs({"": [lambda: (done.append("run"), clock.run(0.01))]}, CPU, rounds=3, before=before)[""]
    assert done == ["run", *["before", "run"] * 3]
    assert found.samples_us == (pytest.approx(10_000),) * 3


def test_what_is_slow_is_timed_less_often(clock: Clock) -> None:
    counts = {"slow": 0, "quick": 0}

    def run(name: str, seconds: float) -> None:
        counts[name] += 1
        clock.run(seconds)

    runs = {"slow": [functools.partial(run, "slow", 0.03)] * 8, "quick": [functools.partial(run, "quick", 1e-4)] * 8}
    found = time_runs(runs, CPU, rounds=20, seconds=0.05)
    assert len(found["slow"].samples_us) == 3
    assert counts["slow"] == 2 + 3  # Warming up ends where the time does.
    assert len(found["quick"].samples_us) == 20


def test_what_becomes_slow_stops_too(clock: Clock) -> None:
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        clock.run(1e-4 if calls == 1 else 0.03)

    assert len(time_runs({"": [run]}, CPU, rounds=40, seconds=0.05)[""].samples_us) == 3


def test_fewer_rounds_than_the_least_are_kept(clock: Clock) -> None:
    assert len(time_runs({"": [lambda: clock.run(0.02)]}, CPU, rounds=1, seconds=0.01)[""].samples_us) == 1


def test_kernels_are_called_on_each_input() -> None:
    kernel, calls = kernel_and_calls()
    found = time_kernels({"one": kernel, "other": kernel}, calls, rounds=6)
    assert list(found) == ["one", "other"]
    assert all(len(timing.samples_us) == 6 and timing.min_us > 0 for timing in found.values())


def test_no_tokens_can_be_timed() -> None:
    kernel, calls = kernel_and_calls(1, num_tokens=0)
    assert time_kernels({"": kernel}, calls, rounds=2)[""].min_us >= 0


class Event:
    """Stands for an event: its time is the number of replays before it."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(Graph.replayed)

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


class Graph:
    """Stands for a CUDA graph: knows the captured calls and their memory pool."""

    captured: ClassVar[list[Any]] = []
    replayed: ClassVar[list[Graph]] = []
    held: ClassVar[list[int]] = []

    def pool(self) -> str:
        return "the pool"

    def replay(self) -> None:
        Graph.replayed.append(self)


class Capture:
    """Stands for `torch.cuda.graph`."""

    def __init__(self, graph: Graph, pool: str | None, capture_error_mode: str) -> None:
        assert capture_error_mode == "global"
        Graph.captured.append(pool)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Calls that ask for the device are told `cuda`; returns the synchronizations."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: Graph.held.append(len(Graph.replayed)))
    monkeypatch.setattr(timing, "wait_for", waited.append)
    monkeypatch.setattr(Graph, "held", [])
    monkeypatch.setattr(Graph, "captured", [])
    monkeypatch.setattr(Graph, "replayed", [])
    return waited


def test_on_a_gpu_each_call_is_a_graph_whose_replays_are_timed(
    gpu: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, calls = kernel_and_calls()
    monkeypatch.setattr(timing, "can_be_captured", lambda kernel: True)
    eager = [functools.partial(kernel, *call) for call in calls]
    replays = timing.capture(eager)
    assert Graph.captured == [None, "the pool", "the pool"]
    found = time_runs({"": replays}, torch.device("cuda"), rounds=4)[""]
    assert found.samples_us == (1000.0,) * 4  # One replay between a sample's events, in milliseconds.
    graphs = Graph.replayed
    assert len(graphs) == 3 + 4
    assert graphs[3:6] == graphs[:3]
    assert len(set(map(id, graphs))) == 3
    # Once for each input while warming up and once at the end, never between samples.
    assert len(gpu) == 3 + 1


def test_beside_a_plain_call_each_sample_waits_for_an_idle_gpu(gpu: list[torch.device]) -> None:
    # Behind a long run the host would get ahead, and the time that it takes vanish.
    (replay,) = timing.capture([lambda: None])
    del gpu[:]
    time_runs({"replay": [replay], "call": [lambda: None]}, torch.device("cuda"), rounds=4)
    assert len(gpu) == 2 + 2 * 4 + 1


@pytest.mark.usefixtures("gpu")
def test_each_graph_captures_the_run_on_its_own_inputs() -> None:
    captured: list[int] = []
    runs = [functools.partial(captured.append, number) for number in range(3)]
    replays = timing.capture(runs)
    assert captured == [0, 1, 2]
    for replay in replays:
        replay()
    assert len(set(map(id, Graph.replayed))) == 3
    assert captured == [0, 1, 2]


class _Cycle:
    """Kept by itself alone; says when it is destroyed."""

    def __init__(self, destroyed: list[str]) -> None:
        self.itself = self
        self._destroyed = destroyed

    def __del__(self) -> None:
        self._destroyed.append("a graph of before")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fails", [False, True])
def test_an_older_graph_is_not_destroyed_during_a_capture(fails: bool) -> None:
    # CUDA lets a thread that captures destroy no graph. It would end the capture.
    destroyed: list[str] = []
    seen: list[list[str]] = []

    def run() -> None:
        assert len([[] for _ in range(100_000)]) == 100_000  # Enough allocations for Python to collect.
        seen.append(list(destroyed))
        if fails:
            raise ValueError("the call failed")

    gc.collect()  # So that nothing before the capture makes Python collect.
    _Cycle(destroyed)
    with pytest.raises(ValueError, match="the call failed") if fails else contextlib.nullcontext():
        timing.capture([run])
    assert seen == [[]]
    assert gc.isenabled()
    gc.collect()
    assert destroyed == ["a graph of before"]


def test_captures_of_two_threads_end_before_python_collects() -> None:
    # Tuning may capture in one thread while another one captures a model.
    entered, may_end = threading.Event(), threading.Event()

    def capture() -> None:
        with collecting_later():
            entered.set()
            assert may_end.wait(60)

    other = threading.Thread(target=capture)
    with collecting_later():
        other.start()
        assert entered.wait(60)
    assert not gc.isenabled()
    may_end.set()
    other.join()
    assert gc.isenabled()
    gc.disable()
    try:
        with collecting_later():
            pass
        assert not gc.isenabled(), "whoever had switched it off"
    finally:
        gc.enable()


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_held_while_the_host_asks_for_a_batch_of_short_replays() -> None:
    replays = timing.capture([lambda: None])
    time_runs({"": replays}, torch.device("cuda"), rounds=150)
    # After the replay that warms up.
    assert Graph.held == [1, 49, 97, 145]


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_not_held_where_the_host_is_part_of_the_time() -> None:
    calls = [lambda: None]
    time_runs({"replays": timing.capture(calls), "eager": calls}, torch.device("cuda"), rounds=4)
    assert Graph.held == []


def test_only_a_kernel_that_says_so_is_captured() -> None:
    kernel, _ = kernel_and_calls(1)
    winner = kernel.selection.winner
    assert winner is not None
    assert winner.cell is not None
    assert timing.can_be_captured(kernel) is winner.cell.facts.graph_capture

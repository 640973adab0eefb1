"""Tasks of a CPU layer side by side: each runs once, in the caller's modes, and errors reach the caller."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moereg.backends._torch import plain
from moereg.bench.inputs import random_calls
from moereg.kernels.plain import threads
from moereg.kernels.plain.threads import are_even, run_tasks
from moereg.layer.factory import make_kernel
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from tests.cli.command import printed

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# Wheels for Linux carry GNU's runtime, so there these tests must not be skipped.
needs_region = pytest.mark.skipif(
    threads._openmp() is None and not (sys.platform == "linux" and "OpenMP" in torch.__config__.parallel_info()),
    reason="requires a torch with an OpenMP runtime that exports GOMP_parallel",
)


@needs_region
def test_two_threads_take_tasks_at_the_same_time_in_the_region_that_torch_asks_for(two_threads: None) -> None:
    """torch divides no operation where OpenMP says that it is called from a parallel region."""
    is_in_region = ctypes.CDLL(torch._C.__file__).omp_in_parallel
    meeting, names, found = threading.Barrier(2, timeout=60), set[int](), list[int]()

    def task() -> None:
        # Passes where two threads are in it.
        meeting.wait()
        names.add(threading.get_ident())
        found.append(is_in_region())

    run_tasks([task, task], [64, 64])
    assert len(names) == 2
    assert found == [1, 1]
    assert is_in_region() == 0


@given(rows=st.lists(st.integers(1, 300), max_size=40), num_threads=st.integers(1, 10))
def test_every_task_runs_once(rows: list[int], num_threads: int) -> None:
    before, counts = torch.get_num_threads(), collections.Counter[int]()
    torch.set_num_threads(num_threads)
    try:
        run_tasks([lambda place=place: counts.update([place]) for place in range(len(rows))], rows)  # type: ignore[misc]
    finally:
        torch.set_num_threads(before)
    assert counts == collections.Counter(range(len(rows)))


@pytest.mark.parametrize(
    ("rows", "num_threads", "expected"),
    [
        ([], 2, False),
        ([1], 2, False),
        ([1, 1], 2, True),
        ([1, 16, 3], 2, False),  # Two threads for three equal tasks: one would wait for a third of the time.
        ([1] * 4, 2, True),
        ([1] * 7, 2, True),
        ([1] * 8, 8, True),
        ([1] * 8, 16, False),
        ([100, 50, 50], 2, True),
        ([512, 16, 16, 16], 2, False),
        ([64] * 60 + [256], 4, True),
    ],
)
def test_tasks_are_even(rows: list[int], num_threads: int, expected: bool) -> None:
    assert are_even(rows, num_threads) is expected


@needs_region
@pytest.mark.parametrize("error", [ValueError("task 3"), KeyboardInterrupt()])
def test_what_a_task_raises_reaches_the_caller_when_others_have_ended(two_threads: None, error: BaseException) -> None:
    begun, ended = [], []

    def task(place: int) -> None:
        begun.append(place)
        if place == 3:
            raise error
        ended.append(place)

    def tasks() -> list[Callable[[], None]]:
        return [lambda place=place: task(place) for place in range(40)]  # type: ignore[misc]

    with pytest.raises(type(error)) as caught:
        run_tasks(tasks(), [64] * 40)
    assert caught.value is error
    assert sorted(begun) == sorted([*ended, 3])
    begun.clear()
    ran: list[int] = []
    run_tasks([lambda: ran.append(1)] * 8, [64] * 8)
    assert sum(ran) == 8


@needs_region
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tasks_have_the_callers_modes(two_threads: None, mode: Callable[[], torch.no_grad]) -> None:
    with mode():
        x = torch.zeros(8, 4)
        expected = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        meeting, found = threading.Barrier(2, timeout=60), []

        def task(place: int) -> None:
            if place < 2:
                meeting.wait()
            found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            x[place].add_(1)  # An inference tensor may be written in that mode alone.

        run_tasks([lambda place=place: task(place) for place in range(8)], [64] * 8)  # type: ignore[misc]
    assert found == [expected] * 8
    assert x.sum() == 32


@needs_region
def test_threads_of_the_caller_run_layers_at_once(two_threads: None) -> None:
    results = [torch.zeros(64) for _ in range(4)]

    def caller(result: torch.Tensor) -> None:
        torch.set_num_threads(2)
        for _ in range(20):
            run_tasks([lambda place=place: result[place].add_(1) for place in range(64)], [64] * 64)  # type: ignore[misc]

    callers = [threading.Thread(target=caller, args=(result,)) for result in results]
    for one in callers:
        one.start()
    for one in callers:
        one.join()
    assert all((result == 20).all() for result in results)


def test_a_mode_of_torch_keeps_tasks_in_its_thread(two_threads: None) -> None:
    here, found = threading.get_ident(), set()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            return func(*args, **(kwargs or {}))

    with Mode():
        run_tasks([lambda: found.add(threading.get_ident())] * 16, [64] * 16)
    assert found == {here}


@pytest.mark.parametrize("has_region", [False, True])
@pytest.mark.parametrize("raising", [None, 4])
def test_the_order_of_tasks(
    two_threads: None, monkeypatch: pytest.MonkeyPatch, has_region: bool, raising: int | None
) -> None:
    """The largest first, where threads share them; those behind one that raised are not begun."""
    runtime = types.SimpleNamespace(GOMP_parallel=lambda *arguments: None)
    monkeypatch.setattr(threads, "_openmp", lambda: runtime if has_region else None)
    begun: list[int] = []

    def task(place: int) -> None:
        begun.append(place)
        if place == raising:
            raise ValueError("a task")

    tasks = [functools.partial(task, place) for place in range(5)]
    with contextlib.nullcontext() if raising is None else pytest.raises(ValueError, match="a task"):
        run_tasks(tasks, [20, 64, 17, 70, 64])
    order = [3, 1, 4, 0, 2] if has_region else [0, 1, 2, 3, 4]
    assert begun == (order if raising is None else order[: order.index(raising) + 1])


@needs_region
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("quant", ["unquantized", "int4_w4a16_g128", "int8_w8a8"])
def test_layers_have_the_bits_of_one_thread(two_threads: None, quant: str, activation_format: str) -> None:
    """Operations inside a region have one thread, so that the number of threads changes nothing."""
    problem = MoEProblem(
        num_experts=8,
        hidden_size=512,
        intermediate_size=512,
        top_k=4,
        quant=quant,
        activation_format=activation_format,
        max_num_tokens=16,
    )
    kernel = make_kernel(problem, make_weights(problem, CPU))
    for call in random_calls(problem, 16, "uniform", 0, CPU)[:3]:
        torch.set_num_threads(1)
        expected = kernel(*call)
        torch.set_num_threads(2)
        assert torch.equal(kernel(*call), expected)


@pytest.mark.parametrize(
    ("rows", "num_threads", "expected"),
    [
        ([1] * 4, 2, "side by side"),
        ([17, 17], 2, "side by side"),
        ([1] * 3, 2, "in turn"),
        ([1] * 4, 4, "in turn"),  # Nobody measured what four threads would gain.
        ([1] * 4, 1, "in turn"),
        ([], 2, "in turn"),
    ],
)
def test_who_takes_tasks(monkeypatch: pytest.MonkeyPatch, rows: list[int], num_threads: int, expected: str) -> None:
    """A stand-in for OpenMP, whose regions are of the calling thread alone."""

    class Runtime:
        regions = 0

        def GOMP_parallel(self, function: object, data: None, num_threads: int, flags: int) -> None:
            self.regions += 1

    runtime, before = Runtime(), torch.get_num_threads()
    monkeypatch.setattr(threads, "_openmp", lambda: runtime)
    seen: list[int] = []
    torch.set_num_threads(num_threads)
    try:
        run_tasks([lambda: seen.append(1)] * len(rows), rows)
    finally:
        torch.set_num_threads(before)
    assert ("side by side" if runtime.regions else "in turn") == expected
    assert len(seen) == len(rows)


@needs_region
@pytest.mark.parametrize(
    ("quant", "activation_format", "thread_elements", "expected"),
    [
        # Experts of few rows share calls where weights are canonical.
        ("unquantized", "standard", 4 * 98_304, 0),
        ("unquantized", "batched", 4 * 98_304, 1),
        # All experts of this call are too little work for a second thread.
        ("unquantized", "batched", 4 * 98_304 + 1, 0),
        ("int4_w4a16_g128", "standard", 0, 1),
        ("int4_w4a16_g128", "batched", 0, 1),
        # Steps that are too short for threads that share an interpreter.
        ("int8_w8a8", "standard", 0, 0),
        ("int8_w8a8", "batched", 0, 0),
    ],
)
def test_regions_of_a_layer(
    two_threads: None,
    monkeypatch: pytest.MonkeyPatch,
    cpu_features: Callable[..., None],
    quant: str,
    activation_format: str,
    thread_elements: int,
    expected: int,
) -> None:
    cpu_features(onednn=True, bf16=False, amx=False, int8=True)
    monkeypatch.setattr(plain, "_THREAD_ELEMENTS", thread_elements)
    facts = {"num_experts": 8, "hidden_size": 256, "intermediate_size": 128, "top_k": 4}
    problem = MoEProblem(**facts, quant=quant, activation_format=activation_format, max_num_tokens=4)
    kernel = make_kernel(problem, make_weights(problem, CPU))
    real, regions = threads._openmp(), []
    assert real is not None

    class Counting:
        def GOMP_parallel(self, *arguments: Any) -> None:
            regions.append(arguments)
            real.GOMP_parallel(*arguments)

    monkeypatch.setattr(threads, "_openmp", Counting)
    (call, *_) = random_calls(problem, 1, "uniform", 0, CPU)
    kernel(*call)
    assert len(regions) == expected


@needs_region
def test_an_error_keeps_no_task_alive(two_threads: None) -> None:
    class Held:
        pass

    def raising(held: object) -> None:
        raise ValueError("a task")

    held = Held()
    alive = weakref.ref(held)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="a task"):
            run_tasks([functools.partial(raising, held)] * 4, [64] * 4)
        del held
        # pytest keeps the error, whose frames hold what was passed to them, until the block has ended.
        assert alive() is None
    finally:
        gc.enable()


# A layer in a destructor while Python ends: threads of OpenMP get the interpreter no more, and the layer would
# wait for them forever.
ENDS = """
run_tasks([lambda: torch.ones(4).sum()] * 8, [64] * 8)
class Late:
    run, ones = staticmethod(run_tasks), staticmethod(torch.ones)
    def __del__(self):
        ran = []
        self.run([lambda: ran.append(self.ones(4).sum())] * 8, [64] * 8)
        print(len(ran), flush=True)
import builtins
builtins.late = Late()
"""
# With one thread in the parent before, since OpenMP's own threads do not survive a fork.
FORKS = """
import os
pid = os.fork()
ran = []
if pid == 0:
    run_tasks([lambda: ran.append(1)] * 8, [64] * 8)
    os._exit(len(ran))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
run_tasks([lambda: ran.append(1)] * 8, [64] * 8)
print(len(ran))
"""


@pytest.mark.parametrize("code", [ENDS, FORKS], ids=["ends", "forks"])
def test_processes_that_end_and_that_fork_run_every_task(code: str) -> None:
    head = "import torch\nfrom moereg.kernels.plain.threads import run_tasks\ntorch.set_num_threads(2)\n"
    assert printed("-c", head + code, timeout=120) == "8\n"

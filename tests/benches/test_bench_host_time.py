from __future__ import annotations

import math

import pytest

from benches import bench_host_time
from benches.bench_host_time import make_layer, make_problem, measure, time_batches, worst_us
from moereg.numerics.tolerances import tolerance


class FakeDevice:
    """Calls return after 3 us and keep the device busy for 10; time passes only here."""

    def __init__(self) -> None:
        self.now = self.busy_until = 0
        self.events: list[str] = []

    def call(self, number: int) -> None:
        self.events.append(str(number))
        self.now += 3_000
        self.busy_until = max(self.busy_until, self.now) + 10_000

    def synchronize(self) -> None:
        self.events.append("wait")
        self.now = max(self.now, self.busy_until)

    def clock_ns(self) -> int:
        return self.now


def test_host_time_ends_at_the_return_and_end_to_end_at_the_device() -> None:
    device = FakeDevice()
    host, end_to_end = time_batches(
        device.call, device.synchronize, seconds=0, calls_per_batch=4, min_batches=3, clock_ns=device.clock_ns
    )
    assert host == 3.0
    assert end_to_end == (3.0 + 4 * 10.0) / 4
    batch = ["wait", "0", "1", "2", "3", "wait"]
    assert device.events == batch * 3, "nothing inside a batch may wait"


@pytest.mark.parametrize(
    ("share", "is_wrong"), [(0.0, False), (1.0, False), (1.001, True), (math.inf, True), (math.nan, True)]
)
def test_numbers_that_are_wrong_get_no_times(share: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("tiny")
    bound = tolerance(problem.quant.name, problem.dtype, 2 * problem.hidden_size)
    monkeypatch.setattr(bench_host_time, "output_error", lambda *_: share * bound)
    monkeypatch.setattr(bench_host_time, "time_batches", lambda *_, **__: (1.0, 2.0))
    row = measure(*make_layer(problem, "torch", "cpu"), 2, "cpu", 0.0)
    assert row["wrong"] is is_wrong
    assert ("host_us" in row) is not is_wrong
    assert (worst_us([row]) == 1.0) is not is_wrong

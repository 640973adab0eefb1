from __future__ import annotations

from benches.bench_host_time import time_batches


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

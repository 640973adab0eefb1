from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator

import pytest
import torch

from benches import bench_host_time
from benches.bench_host_time import main, time_batches


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(bench_host_time, "CALLS_PER_BATCH", 2)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures on the GPU where there is one")
@pytest.mark.usefixtures("one_thread")
def test_it_runs_on_a_cpu(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    arguments = ["--models", "tiny", "--tokens", "1", "5", "--backend", "torch", "--seconds", "0", "--json", str(path)]
    assert main(arguments) == 0
    record = json.loads(path.read_text())
    assert record["schema"] == 1
    assert record["backend"] == "torch"
    assert record["bound_us"] is None
    assert [row["tokens"] for row in record["rows"]] == [1, 5]
    for row in record["rows"]:
        assert not row["wrong"]
        assert 0 < row["host_us"] <= row["eager_us"]
        assert 0 < row["inference_host_us"] <= row["inference_eager_us"]
    assert "2 rows, 0 wrong" in capsys.readouterr().out
    assert main([*arguments, "--bound-us", "0.001"]) == 1
    assert main([*arguments, "--budget-s", "0"]) == 0
    assert len(json.loads(path.read_text())["left_out"]) == 2

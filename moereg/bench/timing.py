"""Times kernels over rotated inputs and routings, interleaved, so that compared kernels run in the same minute.

If a GPU kernel can be captured, each call is a CUDA graph and its replays are timed with events; otherwise calls are
timed eagerly, with events on a GPU and by the wall clock on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import torch

from moereg.bench.inputs import Call
from moereg.layer.factory import MoEKernel
from moereg.runtime.gc_pause import collecting_later

ROUNDS: Final = 48
"""Samples of each kernel, if they take no longer than `SECONDS`."""
SECONDS: Final = 1.0
_MIN_ROUNDS: Final = 3

# A graph shorter than this, including the wait for it, may outrun the host, which takes 10 to 20 us per launch.
_OUTRUN_SECONDS: Final = 2e-4
_BATCH: Final = 48
# 1.5 ms or more on GPUs of up to 2 GHz, in which the host queues a batch.
HELD_CYCLES: Final = 3_000_000

Run = Callable[[], object]
"""One call on its own inputs. On a GPU it may return before the work is done."""

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call, samples in the order taken."""

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The median sample, which is the time unless stated otherwise."""
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        """The fastest sample."""
        return min(self.samples_us)

    @property
    def p10_us(self) -> float:
        """The 10th percentile."""
        return float(np.percentile(self.samples_us, 10))

    @property
    def p90_us(self) -> float:
        """The 90th percentile."""
        return float(np.percentile(self.samples_us, 90))


def time_kernels(
    kernels: Mapping[Key, MoEKernel], calls: Sequence[Call], rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[Key, Timing]:
    """Times kernels of one problem on the same calls, all with as many tokens, like `time_runs`."""
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    runs = {key: kernel_runs(kernel, calls, outs) for key, kernel in kernels.items()}
    return time_runs(runs, calls[0].hidden_states.device, rounds, seconds)


def kernel_runs(kernel: MoEKernel, calls: Sequence[Call], outs: Sequence[torch.Tensor]) -> list[Run]:
    """One run per call, which overwrites its [T,H] of `outs`: a graph's replay where the facts allow it.

    The kernel is called once first, so that nothing is left to compile.
    """
    runs: list[Run] = [functools.partial(kernel, *call, out=out) for call, out in zip(calls, outs, strict=True)]
    for run in runs[:1]:
        run()
    device = outs[0].device
    wait_for(device)
    return capture(runs) if device.type == "cuda" and can_be_captured(kernel) and outs[0].numel() else runs


def can_be_captured(kernel: MoEKernel) -> bool:
    """Whether the facts of its backends, and of its token dispatcher if any, allow capture."""
    cells, facts = [one.cell for _, one in kernel.selection.plan], getattr(kernel.prepare_finalize, "facts", None)
    has_backends = bool(cells) and all(cell is not None and cell.facts.graph_capture for cell in cells)
    return has_backends and (facts is None or facts.graph_capture)


def capture(eager: Sequence[Run], *, error_mode: str = "global") -> list[Run]:
    """Captures a CUDA graph of each run, to replay one after the other; the first must have been called before.

    torch's `capture_error_mode` is `thread_local` if other threads keep running.
    """
    replays: list[Run] = []
    pool = None
    for run in eager:
        graph = torch.cuda.CUDAGraph()
        # One pool, since the graphs run one after the other and only `out` is read afterwards.
        with collecting_later(), torch.cuda.graph(graph, pool=pool, capture_error_mode=error_mode):
            run()
        pool = graph.pool()
        # Only the run keeps memory alive that the graph reads.
        replays.append(functools.partial(_replay, graph, run))
    return replays


def _replay(graph: torch.cuda.CUDAGraph, _captured: Run) -> None:
    graph.replay()


def is_replay(run: Run) -> bool:
    """Whether a run is that of a captured graph."""
    return isinstance(run, functools.partial) and run.func is _replay


def time_runs(
    runs: Mapping[Key, Sequence[Run]],
    device: torch.device,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    before: Run | None = None,
) -> dict[Key, Timing]:
    """Times runs in turns: each round runs every key once on its next inputs, starting with another key.

    On a GPU replays are queued, short ones in batches, so that the device is timed and not the host. If any run is no
    replay, each waits until the device is idle: the host's time then counts for all.

    Args:
        runs: Runs by key, one per set of inputs.
        device: The runs' device.
        rounds: Samples per key, at least 1.
        seconds: Time after which a key with three samples takes no more; also bounds warming up.
        before: Called untimed before each sample on a CPU, such as to empty caches.
    """
    num_samples = {}
    shortest = math.inf
    for key, variants in runs.items():
        one_seconds = _warm_up(variants, device, seconds)
        shortest = min(shortest, one_seconds)
        affordable = int(seconds / one_seconds) if one_seconds * rounds > seconds else rounds
        num_samples[key] = min(rounds, max(_MIN_ROUNDS, affordable))
    if device.type == "cuda":
        queues = all(is_replay(run) for own in runs.values() for run in own)
        samples = _event_samples(runs, num_samples, device, queues, shortest < _OUTRUN_SECONDS)
    else:
        samples = _wall_clock_samples(runs, num_samples, device, seconds, before)
    return {key: Timing(tuple(samples[key])) for key in runs}


def _warm_up(variants: Sequence[Run], device: torch.device, seconds: float) -> float:
    """Runs each once while there is time; returns the seconds of the fastest."""
    times: list[float] = []
    for run in variants:
        start = time.perf_counter()
        run()
        wait_for(device)
        times.append(time.perf_counter() - start)
        if sum(times) > seconds:
            break
    return min(times)


def _turns(num_samples: Mapping[Key, int]) -> Iterator[tuple[Key, int]]:
    keys = list(num_samples)
    for number in range(max(num_samples.values(), default=0)):
        turn = number % len(keys)
        for key in keys[turn:] + keys[:turn]:
            if number < num_samples[key]:
                yield key, number


def _event_samples(
    runs: Mapping[Key, Sequence[Run]], num_samples: Mapping[Key, int], device: torch.device, queues: bool, outrun: bool
) -> dict[Key, list[float]]:
    # Replays do not wait, so that the device always has the next one queued. If they end before the host launches the
    # next, they are queued in batches while the device is held. Other runs wait: behind a long one the host would get
    # ahead, and its time vanish.
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in runs}
    for turn, (key, number) in enumerate(_turns(num_samples)):
        if not queues:
            wait_for(device)
        elif outrun and turn % _BATCH == 0:
            torch.cuda._sleep(HELD_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run = runs[key][number % len(runs[key])]
        start.record()
        run()
        end.record()
        events[key].append((start, end))
    wait_for(device)
    return {key: [start.elapsed_time(end) * 1e3 for start, end in pairs] for key, pairs in events.items()}


def _wall_clock_samples(
    runs: Mapping[Key, Sequence[Run]],
    num_samples: Mapping[Key, int],
    device: torch.device,
    seconds: float,
    before: Run | None,
) -> dict[Key, list[float]]:
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    for key, number in _turns(num_samples):
        # A busy machine can be far slower now than during warm-up.
        if number >= _MIN_ROUNDS and sum(samples[key]) > seconds * 1e6:
            continue
        run = runs[key][number % len(runs[key])]
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        wait_for(device)
        samples[key].append((time.perf_counter() - start) * 1e6)
    return samples


def wait_for(device: torch.device) -> None:
    """Waits until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

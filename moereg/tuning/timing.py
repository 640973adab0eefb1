"""Times kernels over rotated inputs and routings, interleaved: what is compared runs in the same minute.

Where a GPU's kernel can be captured, each call is a CUDA graph and its replays are timed with events; otherwise calls
are timed eagerly, with events on a GPU and by the wall clock on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import torch

from moereg.layer import MoEKernel
from moereg.tuning.inputs import Call

__all__ = ["ROUNDS", "SECONDS", "Run", "Timing", "capture", "kernel_runs", "time_kernels", "time_runs", "wait_for"]

ROUNDS: Final = 48
"""Samples of each kernel, where they take no longer than `SECONDS`."""
SECONDS: Final = 1.0
_MIN_ROUNDS: Final = 3

# A graph that ends sooner, waiting for it included, may outrun the host, which takes 10 to 20 us to ask for the next.
_OUTRUN_SECONDS: Final = 2e-4
_BATCH: Final = 48
# 1.5 ms or more on GPUs that do up to 2 GHz: the host asks for a batch meanwhile.
_HELD_CYCLES: Final = 3_000_000

Run = Callable[[], object]
"""One call on inputs of its own. On a GPU it may return before the work is done."""

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Timing:
    """Times of one call.

    Attributes:
        samples_us: In the order in which they were taken.
    """

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """What a time without further words means."""
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        """The fastest sample."""
        return min(self.samples_us)

    @property
    def p10_us(self) -> float:
        """A tenth of the samples were faster."""
        return self._decile(0)

    @property
    def p90_us(self) -> float:
        """A tenth of the samples were slower."""
        return self._decile(8)

    def _decile(self, place: int) -> float:
        if len(self.samples_us) == 1:
            return self.samples_us[0]
        return statistics.quantiles(self.samples_us, n=10, method="inclusive")[place]


def time_kernels(
    kernels: Mapping[Key, MoEKernel], calls: Sequence[Call], rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[Key, Timing]:
    """Times kernels of one problem on the same calls.

    Args:
        kernels: By what the result is to be called.
        calls: Of as many tokens each, on the kernels' device.
        rounds: Samples of each kernel, at least 1.
        seconds: After which a kernel takes no further sample, once it has three.

    Returns:
        By key, with `rounds` samples or fewer.
    """
    outs = [torch.empty_like(call.hidden_states) for call in calls]
    runs = {key: kernel_runs(kernel, calls, outs) for key, kernel in kernels.items()}
    return time_runs(runs, calls[0].hidden_states.device, rounds, seconds)


def kernel_runs(kernel: MoEKernel, calls: Sequence[Call], outs: Sequence[torch.Tensor]) -> list[Run]:
    """One run a call: the replay of a graph where the kernel's facts allow it, else the call.

    Args:
        kernel: Is called once, so that nothing is left to compile.
        calls: Kept alive by the runs, like `outs`.
        outs: [T,H], one a call; overwritten by each run.
    """
    eager = [functools.partial(kernel, *call, out=out) for call, out in zip(calls, outs, strict=True)]
    eager[0]()
    device = outs[0].device
    wait_for(device)
    if device.type != "cuda" or not _can_be_captured(kernel) or not outs[0].numel():
        return list(eager)
    return capture(eager)


def _can_be_captured(kernel: MoEKernel) -> bool:
    winner = kernel.selection.winner
    return winner is not None and winner.cell is not None and winner.cell.facts.graph_capture


def capture(eager: Sequence[Run]) -> list[Run]:
    """A CUDA graph of each run, to be replayed one after the other; the first run was called before."""
    replays: list[Run] = []
    pool = None
    for run in eager:
        graph = torch.cuda.CUDAGraph()
        # One pool, since the graphs run one after the other and only `out` is read afterwards.
        with torch.cuda.graph(graph, pool=pool):
            run()
        pool = graph.pool()
        # The graph reads memory that only the run keeps alive.
        replays.append(functools.partial(_replay, graph, run))
    return replays


def _replay(graph: torch.cuda.CUDAGraph, _captured: Run) -> None:
    graph.replay()


def _is_replay(run: Run) -> bool:
    return isinstance(run, functools.partial) and run.func is _replay


def time_runs(
    runs: Mapping[Key, Sequence[Run]], device: torch.device, rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[Key, Timing]:
    """Times things in turns: a round runs each once, on the inputs that are next for it, and starts with another one.

    On a GPU short replays are queued in batches, so that it is the device that is timed. Where any thing is not a
    replay nothing is: then the host's time counts for all.

    Args:
        runs: By what the result is to be called; one for each set of inputs.
        device: Where they run.
        rounds: Samples of each, at least 1.
        seconds: After which a thing takes no further sample, once it has three; it also bounds warming up.

    Returns:
        By key.
    """
    num_samples = {}
    shortest = math.inf
    for key, variants in runs.items():
        one_seconds = _warm_up(variants, device, seconds)
        shortest = min(shortest, one_seconds)
        affordable = int(seconds / one_seconds) if one_seconds * rounds > seconds else rounds
        num_samples[key] = min(rounds, max(_MIN_ROUNDS, affordable))
    if device.type == "cuda":
        # What is not a replay takes its time on the host, which is part of it.
        outrun = shortest < _OUTRUN_SECONDS and all(_is_replay(run) for own in runs.values() for run in own)
        samples = _event_samples(runs, num_samples, device, outrun)
    else:
        samples = _wall_clock_samples(runs, num_samples, device, seconds)
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
    runs: Mapping[Key, Sequence[Run]], num_samples: Mapping[Key, int], device: torch.device, outrun: bool
) -> dict[Key, list[float]]:
    # Nothing waits in between, so that the device has the next run at hand when one ends. Of runs that end sooner than
    # the host asks for the next, it gets a batch at hand while it is held.
    events: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in runs}
    for turn, (key, number) in enumerate(_turns(num_samples)):
        if outrun and turn % _BATCH == 0:
            torch.cuda._sleep(_HELD_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        run = runs[key][number % len(runs[key])]
        start.record()
        run()
        end.record()
        events[key].append((start, end))
    wait_for(device)
    return {key: [start.elapsed_time(end) * 1e3 for start, end in pairs] for key, pairs in events.items()}


def _wall_clock_samples(
    runs: Mapping[Key, Sequence[Run]], num_samples: Mapping[Key, int], device: torch.device, seconds: float
) -> dict[Key, list[float]]:
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    for key, number in _turns(num_samples):
        # A busy machine can be far slower now than when it warmed up.
        if number >= _MIN_ROUNDS and sum(samples[key]) > seconds * 1e6:
            continue
        run = runs[key][number % len(runs[key])]
        start = time.perf_counter()
        run()
        wait_for(device)
        samples[key].append((time.perf_counter() - start) * 1e6)
    return samples


def wait_for(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

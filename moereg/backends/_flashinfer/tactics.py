"""Tunes FlashInfer's tiles by timing them, once per layer shape and bucket of tokens.

Unless given two tactics, one per GEMM, FlashInfer takes the first tile of its list. On an H200 its own tuner rejected
every tactic of the second GEMM, and the first was 3 to 5 times slower than the best pair. So pairs are timed here on
random data of the call's shapes and cached in memory; thoroughly searched ones also in a file of the user's cache
folder.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import filelock
import platformdirs
import torch

from moereg.backends._flashinfer import package
from moereg.platforms import Platform, probe_platform
from moereg.runtime.gc_pause import collecting_later
from moereg.runtime.progress import long_wait
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

logger: Final = logging.getLogger("moereg")

Pair = tuple[int, int]
"""Tactics of the first and second GEMM."""

UNTUNED: Final[Pair] = (-1, -1)
"""FlashInfer's own choice: the first tile of each list."""

SWITCH: Final = "MOEREG_FLASHINFER_TACTICS"
"""Environment variable; `first` keeps FlashInfer's own choice and times nothing."""

SECONDS: Final = 1.0
"""Seconds of timing per bucket. All 126 tactics of bfloat16 on Hopper took about that."""

_ROUNDS: Final = 3
# A tile slower than the best by this factor is not timed again.
_HOPELESS: Final = 1.3
# For runs of this many microseconds a first run's overhead does not matter.
_LONG: Final = 1000.0
# Far above the effect of another summation order, far below that of a wrong tile.
_SAME: Final = 0.05
# The best of this many tactics of a GEMM is good enough to be saved for other processes.
_ENOUGH: Final = 8
_SCHEMA: Final = 1


def bucket_of(num_tokens: int) -> int:
    """The bucket of a number of tokens: the largest power of two that is not above it."""
    return 1 << (num_tokens.bit_length() - 1)


class TacticStore:
    """Tuned pairs, in memory and mostly also in a file.

    Keys hold everything that a time depends on, so a file copied from another machine does no harm. A process never
    replaces a pair, since its layers' results would change bits.

    Attributes:
        path: The file's path.
        warned: Warnings given so far, so that a model with many equal layers is warned once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warned: set[tuple[str, str]] = set()
        self._kept: dict[str, Pair] | None = None
        self._pinned: dict[str, Pair] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> Pair | None:
        """The pair for a key; None if none was found yet."""
        with self._lock:
            return self._get(key)

    def _get(self, key: str) -> Pair | None:
        if self._kept is None:
            self._kept = self._read()
        return self._pinned.get(key) or self._kept.get(key)

    def pin(self, key: str, pair: Pair) -> Pair:
        """Keeps a pair for this process alone; returns the one in force, another thread's if that was faster."""
        with self._lock:
            return self._get(key) or self._pinned.setdefault(key, pair)

    def put(self, key: str, pair: Pair) -> Pair:
        """Keeps a pair, also for other processes if the folder can be written; returns the one in force, as `pin`."""
        with self._lock:
            if (known := self._get(key)) is not None:
                return known
            assert self._kept is not None
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(f"{self.path}.lock", timeout=10):
                    self._kept = {**self._read(), **self._kept}
                    pair = self._kept.setdefault(key, pair)
                    temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                    pairs = {name: list(found) for name, found in sorted(self._kept.items())}
                    temporary.write_text(
                        json.dumps({"schema": _SCHEMA, "pairs": pairs}, indent=1) + "\n", encoding="utf-8"
                    )
                    temporary.replace(self.path)
            except (OSError, filelock.Timeout) as error:
                self._kept.setdefault(key, pair)
                logger.warning("%s could not be written (%s); other processes tune again", self.path, error)
            return self._kept[key]

    def _read(self) -> dict[str, Pair]:
        try:
            values: Any = json.loads(self.path.read_text(encoding="utf-8"))
            if values["schema"] != _SCHEMA:
                return {}
            return {str(key): (int(first), int(second)) for key, (first, second) in values["pairs"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            logger.warning("%s cannot be read (%s); tactics are timed anew", self.path, type(error).__name__)
            return {}


@dataclasses.dataclass
class _Best:
    """Microseconds by pair, in the order of timing; how many pairs were tried; and the last error that one raised."""

    times: dict[Pair, float] = dataclasses.field(default_factory=dict)
    tried: int = 0
    error: RuntimeError | None = None

    @property
    def pair(self) -> Pair:
        return min(self.times, key=lambda pair: (self.times[pair], pair)) if self.times else UNTUNED

    @property
    def time(self) -> float:
        return self.times.get(self.pair, float("inf"))

    def has_enough(self, candidates: Sequence[Sequence[int]]) -> bool:
        """Whether each GEMM's best tactic was chosen among enough others."""
        return all(
            len({pair[product] for pair in self.times}) >= min(_ENOUGH, len(candidates[product])) for product in (0, 1)
        )


class Tuner:
    """Finds one layer's pairs. Thread-safe: a thread that asks while another tunes waits for it."""

    def __init__(self, layer: str, store: TacticStore | None = None, clock: Callable[[], float] = time.monotonic):
        """A tuner of the layer with this key; `clock` returns seconds."""
        self.layer = layer
        self._store = store if store is not None else _default_store()
        self._clock = clock
        self._found: dict[int, Pair] = {}
        self._lock = threading.Lock()

    def pair(
        self,
        num_tokens: int,
        candidates: Callable[[], tuple[Sequence[int], Sequence[int]]],
        timer: Callable[[], CallTimer],
        is_capturing: Callable[[], bool],
    ) -> Pair:
        """The pair for a call; times tactics if its bucket has none. It stays the same in this process.

        Args:
            num_tokens: T.
            candidates, timer: Give the tactics of both GEMMs, and the call's timer.
            is_capturing: Whether a CUDA graph is being captured, during which nothing can be timed.
        """
        bucket = bucket_of(num_tokens)
        found = self._found.get(bucket)
        if found is not None:
            return found
        with self._lock:
            key = f"{self.layer}|T{bucket}"
            found = self._found.get(bucket) or self._store.get(key)
            if found is None:
                if os.environ.get(SWITCH) == "first":
                    return self._untuned(f"{SWITCH}=first")
                if is_capturing():
                    found = self._store.pin(key, self._nearest(bucket))
                else:
                    found, is_kept = self._tune(bucket, candidates(), timer())
                    found = (self._store.put if is_kept else self._store.pin)(key, found)
            self._found[bucket] = found
            return found

    def _warn(self, why: str, text: str, *values: object) -> None:
        if (self.layer, why) not in self._store.warned:
            self._store.warned.add((self.layer, why))
            logger.warning(text, *values)

    def _untuned(self, why: str) -> Pair:
        text = "flashinfer_cutlass runs with FlashInfer's first tactics, which can be 3 to 5 times slower (%s)"
        self._warn(why, text, why)
        return UNTUNED

    def _nearest(self, bucket: int) -> Pair:
        # Pinned, since a pair that a later call outside the capture found could change bits.
        why = (
            f"a CUDA graph is captured before a call of {bucket} to {2 * bucket - 1} tokens was made outside one, and "
            "the process stays with it"
        )
        timed = [known for known, pair in self._found.items() if pair != UNTUNED]
        if not timed:
            return self._untuned(f"{why}; make one first")
        nearest = min(timed, key=lambda known: (abs(known.bit_length() - bucket.bit_length()), known))
        self._warn(why, "flashinfer_cutlass takes the tactics that it found for %d tokens (%s)", nearest, why)
        return self._found[nearest]

    def _tune(
        self, bucket: int, candidates: tuple[Sequence[int], Sequence[int]], timer: CallTimer
    ) -> tuple[Pair, bool]:
        """The best pair, and whether the search was thorough enough to save it for other processes."""
        first, second = ([*_spread(ids)] or [-1] for ids in candidates)
        total = len(first) + len(second)
        best = _Best()
        with long_wait(
            f"timing {total} tactics of flashinfer_cutlass for {bucket} to {2 * bucket - 1} tokens",
            SECONDS,
            f"once for each layer shape, kept in {self._store.path}",
        ) as advance:

            def progress() -> None:
                advance(min(best.tried, total), total)

            # Half of the time for each GEMM; the second also gets what the first leaves over.
            start = self._clock()
            for other in second:
                pairs = [(tactic, other) for tactic in first]
                is_whole = self._try(pairs, timer, best, start + SECONDS / 2, progress)
                if best.times or self._clock() > start + SECONDS:
                    break  # Otherwise this tile of the second GEMM may be the one that fails.
            if best.times:
                pairs = [(best.pair[0], tactic) for tactic in second]
                pairs = [pair for pair in pairs if pair not in best.times]
                is_whole = self._try(pairs, timer, best, start + SECONDS, progress) and is_whole
        if not best.times:
            return self._untuned(f"none could be timed: {best.error}"), False
        pair, is_checked = self._verified(best, timer)
        logger.info(
            "flashinfer_cutlass takes tactics %s for %d tokens: %.1f us, the fastest of %d pairs (%d tried) in %.2f s",
            pair, bucket, best.times[pair], len(best.times), best.tried, self._clock() - start,
        )  # fmt: skip
        # If nearly all tactics raise, the fault is the machine's or ours and may be temporary.
        is_long_enough = best.has_enough((first, second)) or (is_whole and 2 * len(best.times) >= best.tried)
        if not is_long_enough:
            error = f"; {best.tried - len(best.times)} raised, the last: {str(best.error)[:200]}" if best.error else ""
            why = (
                f"of {total} tactics {best.tried} were tried and {len(best.times)} ran for {bucket} to "
                f"{2 * bucket - 1} tokens{error}"
            )
            text = "flashinfer_cutlass may run with slow tactics, and the next process tunes again (%s in %.0f s)"
            self._warn(why, text, why, SECONDS)
        return pair, is_checked and is_long_enough

    def _try(
        self, pairs: Iterable[Pair], timer: CallTimer, best: _Best, until: float, progress: Callable[[], None]
    ) -> bool:
        """Times pairs until time is up and one has run; returns whether all were tried."""
        known = len(best.times)
        for pair in pairs:
            if len(best.times) > known and self._clock() > until:
                return False
            best.tried += 1
            progress()
            try:
                times = [timer.microseconds(pair)]
                if times[0] < _LONG:  # A first run includes start-up overhead.
                    times = [timer.microseconds(pair)]
                if times[0] <= _HOPELESS * best.time:
                    times += [timer.microseconds(pair) for _ in range(_ROUNDS - 1)]
            except RuntimeError as error:  # The device refuses the tile, or its kernels are not built.
                best.error = error
            else:
                best.times[pair] = min(times)
        return True

    def _verified(self, best: _Best, timer: CallTimer) -> tuple[Pair, bool]:
        """The fastest pair that agrees up to rounding with the first one, and whether any numbers were finite."""
        reference = next(iter(best.times))
        for pair in sorted(best.times, key=lambda pair: (best.times[pair], pair)):
            if pair == reference:
                break
            try:
                difference = timer.difference(pair, reference)
            except RuntimeError:
                continue
            if difference is None:
                why = "the layer makes no finite number of drawn tokens, so other tactics cannot be checked"
                text = "flashinfer_cutlass takes the first tactics that ran, which can be slow (%s)"
                self._warn(why, text, why)
                return reference, False
            if difference <= _SAME:
                return pair, True
            logger.warning("flashinfer_cutlass drops tactics %s, whose numbers are wrong", pair)
        return reference, True


def _spread(ids: Sequence[int]) -> list[int]:
    """Reorders ids so that neighbors are far apart: a short search still samples all kinds."""
    return [tactic for start in (0, 4, 2, 6, 1, 5, 3, 7) for tactic in ids[start::8]]


_STORES: Final[dict[Path, TacticStore]] = {}


def _default_store() -> TacticStore:
    path = Path(platformdirs.user_cache_dir("moereg", appauthor=False)) / "flashinfer_cutlass_tactics.json"
    return _STORES.setdefault(path, TacticStore(path))


class CallTimer:
    """Times one call on the current stream of the current device, which must be the call's.

    Only device time counts, however long Python takes.
    """

    def __init__(self, call: Callable[[Pair], None], out: torch.Tensor) -> None:
        """Takes a call that runs with a pair of tactics and overwrites `out`."""
        self._call = call
        self._out = out
        self._graphs: dict[Pair, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()  # Shared by successive graphs.
        self._expected: torch.Tensor | None = None

    def microseconds(self, pair: Pair) -> float:
        """Time of one run; a pair's first run loads its kernels and captures them for later runs."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if pair not in self._graphs:
            self._call(pair)
            torch.cuda.synchronize()
            # One graph is needed at a time, but the old one is dropped only after the next exists: torch refuses to
            # capture into a pool whose graphs are all gone.
            self._graphs = {pair: self._captured(pair)}
        start.record()
        self._graphs[pair].replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _captured(self, pair: Pair) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), collecting_later():
            # Other threads may keep allocating.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._call(pair)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(side)
        return graph

    def difference(self, pair: Pair, reference: Pair) -> float | None:
        """Relative difference between two pairs' outputs, in rows where the reference is finite.

        None if no row is. A row where only `pair` is not finite makes it 1.
        """
        if self._expected is None:
            self._call(reference)
            self._expected = self._out.to(torch.float32, copy=True)
        rows = self._expected.isfinite().all(1)
        expected = self._expected[rows]
        if not expected.numel():
            return None
        self._call(pair)
        norm = float((self._out.float()[rows] - expected).norm() / expected.norm().clamp(min=1e-30))
        return norm if norm == norm else 1.0


def layer_key(problem: MoEProblem, computes: QuantScheme, platform: Platform, library: Path, choices: int) -> str:
    """Everything that a layer's times depend on except the number of tokens; `choices` is routes per row."""
    # Under expert parallelism a token chooses few of a rank's experts.
    experts = f"E{problem.num_local_experts}/{problem.num_experts}"
    sizes = f"{experts} H{problem.hidden_size} I{problem.intermediate_size} k{choices}/{problem.top_k}"
    parts = (
        platform.device_name or probe_platform().device_name,
        f"flashinfer {package.installed_version()}",
        f"cuda {torch.version.cuda}",
        digest_of(library),
        f"{sizes} {problem.dtype} {computes.name} {problem.activation} bias={problem.has_bias}",
    )
    return "|".join(parts)


@functools.cache
def digest_of(path: Path) -> str:
    """Digest of a shared object; another build has other times."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

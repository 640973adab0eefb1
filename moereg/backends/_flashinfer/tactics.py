"""Which of FlashInfer's tiles a call takes: found by timing them, once for each layer shape and bucket of tokens.

FlashInfer takes the first tile of its list unless it is told two tactics, one a product. Its own tuner refused every
tactic of the second product on an H200, and the first was 3 to 5 times slower than the best pair. So the pairs are
timed here, on the call's own data, and kept in memory and in a file of the user's cache folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import filelock
import platformdirs

from moereg.waiting import long_wait

__all__ = ["UNTUNED", "Pair", "TacticStore", "Timer", "Tuner", "bucket_of"]

logger: Final = logging.getLogger("moereg")

Pair = tuple[int, int]
"""Tactics of the first and of the second product."""

UNTUNED: Final[Pair] = (-1, -1)
"""FlashInfer's own choice: the first tile of each list."""

SWITCH: Final = "MOEREG_FLASHINFER_TACTICS"
"""Environment variable; `first` takes FlashInfer's own choice and times nothing."""

SECONDS: Final = 1.0
"""Of timing for each bucket. All 126 tactics of bfloat16 on Hopper took about that."""

_ROUNDS: Final = 3
# A tile that takes so much longer than the best one is not timed again.
_HOPELESS: Final = 1.3
# Far above what another order of sums changes, far below what a wrong tile does.
_SAME: Final = 0.05
_SCHEMA: Final = 1


class Timer(Protocol):
    """Runs a call with a pair of tactics."""

    def microseconds(self, pair: Pair) -> float:
        """Time of one run of the call; waits for the device."""

    def difference(self, pair: Pair) -> float:
        """Relative difference between the call's outputs with this pair and with FlashInfer's own choice."""


def bucket_of(num_tokens: int) -> int:
    """The power of two that a number of tokens is tuned as: the largest one that is not above it."""
    return 1 << (num_tokens.bit_length() - 1)


class TacticStore:
    """Pairs that were found, in a file.

    Keys hold everything that a time depends on, so a file that was copied from another machine does no harm.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pairs: dict[str, Pair] | None = None
        self._lock = threading.Lock()

    def get(self, key: str) -> Pair | None:
        """The pair for a key; None if none was found yet."""
        with self._lock:
            if self._pairs is None:
                self._pairs = self._read()
            return self._pairs.get(key)

    def put(self, key: str, pair: Pair) -> None:
        """Keeps a pair, also for other processes where the folder can be written."""
        with self._lock:
            known = self._pairs = self._pairs or {}
            known[key] = pair
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(f"{self.path}.lock", timeout=10):
                    known.update({**self._read(), key: pair})
                    temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
                    values = {"schema": _SCHEMA, "pairs": {name: list(found) for name, found in sorted(known.items())}}
                    temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
                    temporary.replace(self.path)
            except (OSError, filelock.Timeout) as error:
                logger.warning("%s could not be written (%s); other processes tune again", self.path, error)

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
    """The fastest pairs so far, and how many were tried."""

    times: dict[Pair, float] = dataclasses.field(default_factory=dict)
    tried: int = 0

    @property
    def pair(self) -> Pair:
        return min(self.times, key=lambda pair: (self.times[pair], pair)) if self.times else UNTUNED

    @property
    def time(self) -> float:
        return self.times.get(self.pair, float("inf"))


class Tuner:
    """Finds pairs of one layer. Thread-safe: who asks while somebody tunes waits."""

    def __init__(self, layer: str, store: TacticStore | None = None, clock: Callable[[], float] = time.monotonic):
        """A tuner of one layer.

        Args:
            layer: Everything that times depend on but the tokens: device, versions, digest of the kernels, sizes.
            store: Where pairs are kept.
            clock: Seconds.
        """
        self.layer = layer
        self._store = store if store is not None else _default_store()
        self._clock = clock
        self._found: dict[int, Pair] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def pair(
        self,
        num_tokens: int,
        candidates: Callable[[], tuple[Sequence[int], Sequence[int]]],
        timer: Callable[[], Timer],
        is_capturing: Callable[[], bool],
    ) -> Pair:
        """The pair for a call; times tactics if nobody has for its bucket.

        Args:
            num_tokens: T.
            candidates: The tactics of the first and of the second product.
            timer: Makes what runs the call.
            is_capturing: Whether a CUDA graph is being captured, in which nothing can be timed.
        """
        bucket = bucket_of(num_tokens)
        found = self._found.get(bucket)
        if found is not None:
            return found
        with self._lock:
            found = self._found.get(bucket) or self._store.get(self._key(bucket))
            if found is None:
                if os.environ.get(SWITCH) == "first":
                    return self._untuned(f"{SWITCH}=first")
                if is_capturing():
                    return self._nearest(bucket)
                found = self._tune(bucket, candidates, timer())
                self._store.put(self._key(bucket), found)
            self._found[bucket] = found
            return found

    def _key(self, bucket: int) -> str:
        return f"{self.layer}|T{bucket}"

    def _untuned(self, why: str) -> Pair:
        if why not in self._warned:
            self._warned.add(why)
            logger.warning(
                "flashinfer_cutlass runs with FlashInfer's first tactics, which can be 3 to 5 times slower (%s)", why
            )
        return UNTUNED

    def _nearest(self, bucket: int) -> Pair:
        why = f"a CUDA graph is captured before a call of {bucket} to {2 * bucket - 1} tokens was made outside one"
        if not self._found:
            return self._untuned(f"{why}; make one first")
        nearest = min(self._found, key=lambda known: (abs(known.bit_length() - bucket.bit_length()), known))
        if why not in self._warned:
            self._warned.add(why)
            logger.warning("flashinfer_cutlass takes the tactics that it found for %d tokens (%s)", nearest, why)
        return self._found[nearest]

    def _tune(self, bucket: int, candidates: Callable[[], tuple[Sequence[int], Sequence[int]]], timer: Timer) -> Pair:
        first, second = candidates()
        total = len(first) + len(second)
        best = _Best()
        with long_wait(
            f"timing {total} tactics of flashinfer_cutlass for {bucket} to {2 * bucket - 1} tokens",
            SECONDS,
            f"once for each layer shape, kept in {self._store.path}",
        ) as advance:
            # Half of the time for each product; what the first leaves over, the second has too.
            start = self._clock()
            self._try(((tactic, -1) for tactic in first), timer, best, start + SECONDS / 2, advance, total)
            chosen = best.pair[0]
            self._try(((chosen, tactic) for tactic in second), timer, best, start + SECONDS, advance, total)
        pair = self._verified(best, timer)
        logger.info(
            "flashinfer_cutlass takes tactics %s for %d tokens: %.1f us, of %d of %d that were timed in %.2f s",
            pair, bucket, best.times.get(pair, float("nan")), best.tried, total, self._clock() - start,
        )  # fmt: skip
        if best.tried < total:
            logger.info("the time for tuning was over before %d tactics were tried", total - best.tried)
        return pair

    def _try(
        self,
        pairs: Iterable[Pair],
        timer: Timer,
        best: _Best,
        until: float,
        advance: Callable[[int, int], None],
        total: int,
    ) -> None:
        for pair in pairs:
            if best.times and self._clock() > until:
                return
            best.tried += 1
            advance(best.tried, total)
            # A tile that the device refuses raises; so does one whose kernels are not built.
            with contextlib.suppress(RuntimeError):
                timer.microseconds(pair)  # Loads the kernel.
                times = [timer.microseconds(pair)]
                if times[0] <= _HOPELESS * best.time:
                    times += [timer.microseconds(pair) for _ in range(_ROUNDS - 1)]
                best.times[pair] = min(times)

    def _verified(self, best: _Best, timer: Timer) -> Pair:
        """The fastest pair whose numbers are those of FlashInfer's own choice, as far as rounding goes."""
        for pair in sorted(best.times, key=lambda pair: (best.times[pair], pair)):
            with contextlib.suppress(RuntimeError):
                if timer.difference(pair) <= _SAME:
                    return pair
                logger.warning("flashinfer_cutlass drops tactics %s, whose numbers are wrong", pair)
        return self._untuned("no pair of tactics ran")


_STORES: Final[dict[Path, TacticStore]] = {}


def _default_store() -> TacticStore:
    path = Path(platformdirs.user_cache_dir("moereg", appauthor=False)) / "flashinfer_cutlass_tactics.json"
    return _STORES.setdefault(path, TacticStore(path))

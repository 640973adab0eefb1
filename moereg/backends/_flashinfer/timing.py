"""Times one call with different tactics by replaying CUDA graphs, and builds the key that times depend on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from moereg.backends._flashinfer import package
from moereg.backends._flashinfer.tactics import Pair
from moereg.platforms import Platform, probe_platform
from moereg.runtime.gc_pause import collecting_later
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

__all__ = ["CallTimer", "layer_key"]


class CallTimer:
    """Times one call on the current stream of the current device, which must be the call's.

    Only device time counts, however long Python takes.
    """

    def __init__(self, call: Callable[[Pair], None], out: torch.Tensor) -> None:
        """Takes a call.

        Args:
            call: Runs it with a pair of tactics; overwrites `out`.
            out: Its output.
        """
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
    """Everything that a layer's times depend on except the number of tokens, as one line.

    Args:
        problem, computes, platform: The layer's.
        library: The shared object.
        choices: Routes per row: `top_k`, or 1 if every route is a row.
    """
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

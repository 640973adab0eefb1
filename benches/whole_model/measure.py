"""Measures for the page of whole models what `moereg compare` leaves out: mxfp4, compiled steps, host time."""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import functools
import pathlib
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from benches.whole_model.models import CONTEXT, EAGER, Case, Model, make_model
from moereg.bench.timing import wait_for
from moereg.cli._whole_model import OURS, Decoding, WholeModel, difference, forget, hooked
from moereg.dispatch import select_backend
from moereg.integrations._experts import serving
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.layouts import read_experts
from moereg.integrations.transformers import PreparedModel
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.spec.quant_schemes import get_scheme
from moereg.weights.permuted import ExpertWeights
from moereg.weights.quantize_weights import dequantize_weights, quantize_weights

__all__ = ["OURS", "QUANTIZED", "Decoding", "PublishedModel", "difference", "forget"]

QUANTIZED: Final = "moereg_mxfp4"
_COMPILED: Final = (OURS, "grouped_mm", "batched_mm")


class PublishedModel(WholeModel):
    """A model of published sizes, whose `moereg` is prepared.

    Attributes:
        deadline: Of `time.monotonic`; nothing starts later.
    """

    def __init__(self, spec: Model, device: torch.device, record: dict[str, Any], deadline: float) -> None:
        self.spec, self.deadline = spec, deadline
        model = make_model(spec, device)
        self._codes: list[ExpertWeights] = []
        self._kernels: list[MoEKernel] = []
        if spec.quant:
            self._codes = [self._round(each.module) for each in find_experts(model)]
        super().__init__(model, device, record, min(256, *(tokens for _, tokens in spec.prefill)))
        self.names = [EAGER, "batched_mm", "grouped_mm", OURS, *([QUANTIZED] if spec.quant else [])]

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.deadline

    def _round(self, module: Any) -> ExpertWeights:
        """Rounds a module's weights to the quantized scheme's numbers, which bf16 has too, and returns the codes."""
        live = read_experts(module)
        canonical = live.canonical(module)
        codes = quantize_weights(canonical, self.spec.quant or "")
        w13, w2 = dequantize_weights(codes)
        assert live.stored is not None
        for name, value in live.stored(dataclasses.replace(canonical, w13=w13, w2=w2)).items():
            getattr(module, name).copy_(value)
        return codes

    def prepare(self, *, free: bool = False, name: str = OURS) -> PreparedModel:
        """Also compiles what the kernels will launch."""
        prepared = super().prepare(free=free, name=name)
        found = self.record["prepare_free" if free else "prepare"]
        served = serving.served(self.experts[0])
        assert served is not None
        kernel = next(iter(served.kernels.values()))
        # Layers of one kind share what the first compiles.
        counts = {batch * tokens for batch, tokens in self.spec.prefill} | {*self.spec.decode, self._prompt.numel()}
        start = time.perf_counter()
        for each in [kernel, *self._quantized(kernel)[:1]]:
            each.warm_up(counts)
        found["warm_up_seconds"] = time.perf_counter() - start
        self.record.setdefault("first_prepare", found)  # Later ones find kernels compiled.
        return prepared

    def _quantized(self, kernel: MoEKernel) -> list[MoEKernel]:
        """Kernels of the quantized weights, behind an experts implementation of their own."""
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        if self._codes:
            problem = dataclasses.replace(kernel.problem, quant=get_scheme(self.spec.quant or ""))
            selection = select_backend(problem, probe_platform())
            while self._codes:
                self._kernels.append(make_kernel(problem, self._codes.pop(0), selection))
            by_module = dict(zip(map(id, self.experts), self._kernels, strict=True))

            def call(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
                return by_module[id(module)](hidden, weights.float(), ids)

            type(ALL_EXPERTS_FUNCTIONS).register(QUANTIZED, call)
            num_bytes = sum(kernel.weights.num_bytes for kernel in self._kernels)
            self.record["quantized"] = {"scheme": problem.quant.name, "bytes": num_bytes, "backend": selection.backend}
        return self._kernels

    def call_of(self, case: Case, decoding: Decoding | None) -> Callable[[], Any]:
        """As `generate` compiles it, where the case is compiled."""
        if decoding is None or case.mode != "compiled":
            return super().call_of(case, decoding)
        forward = torch.compile(self.model.forward, mode="reduce-overhead")

        def step() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return decoding.step(forward)

        return step

    def measure(self, case: Case, seconds: float, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Measures implementations that have no row of the case yet, unless it is late."""
        shown = dataclasses.asdict(case)
        known = {row["implementation"] for row in self.record["rows"] if {**row, **shown} == row}
        names = [name for name in self.names if name not in known]
        turns = [names]
        if case.mode == "compiled":
            # Each alone: torch's graphs belong to the order of calls in which they were recorded.
            turns = [[name] for name in _COMPILED if name in names]
        made: list[dict[str, Any]] = []
        for together in filter(None, turns):
            if self.is_late:
                late = [{"implementation": name, **shown, "why": "out of time"} for name in together]
                self.record["left_out"] += late
                continue
            rows = super().measure(case, seconds, together)
            for row in rows:
                what = f"{row['ms']:.2f} ms" if "ms" in row else row["outcome"]
                place = f"{case.phase} {case.mode} {case.batch} x {case.tokens}"
                print(f"{place} {row['implementation']}: {what}", flush=True)
            made += rows
        return made

    def count_experts(self) -> None:
        """How many experts have tokens in a layer, in the mean over layers."""
        found: list[int] = []
        for batch in self.spec.decode:
            decoding = self.decoding(Case("decode", "eager", batch, CONTEXT))
            self.use(EAGER)
            del found[:]
            with hooked(self.experts, forward_pre_hook=lambda module, inputs: found.append(inputs[1].unique().numel())):
                decoding.step()
                self.record.setdefault("active_experts", {})[str(batch)] = statistics.mean(found)

    def profile(self, case: Case, steps: int = 5) -> None:
        """Host time of plain decode steps: until a step returns, inside of experts, and by function for moereg.

        Args:
            case: Whose implementations have been measured.
            steps: That are timed.
        """
        decoding = self.decoding(case)
        rows = self.record.setdefault("host", [])
        known = {row["implementation"] for row in rows if row["batch"] == case.batch}
        shown = dataclasses.asdict(case)
        ran = [row["implementation"] for row in self.record["rows"] if "ms" in row and {**row, **shown} == row]
        for name in [name for name in ran if name in self.names and name not in (EAGER, *known)]:
            self.use(name)
            whole, inside = [], [0.0]
            decoding.step()
            with _timed(self.experts, inside):
                for _ in range(steps):
                    wait_for(self.device)
                    start = time.perf_counter()
                    decoding.step()
                    whole.append(time.perf_counter() - start)
            calls = steps * len(self.experts)
            row = {"implementation": name, "batch": case.batch, "step_ms": statistics.median(whole) * 1e3}
            rows.append({**row, "experts_us": inside[0] / calls * 1e6})
            print(rows[-1], flush=True)
            if name == OURS:
                profiler = cProfile.Profile()
                with _profiled(self.experts, profiler):
                    for _ in range(steps):
                        decoding.step()
                rows[-1]["functions"] = _top(profiler, calls)


@contextlib.contextmanager
def _wrapped(modules: Sequence[Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    for module in modules:
        module.forward = wrap(module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _timed(modules: Sequence[Any], total: list[float]) -> contextlib.AbstractContextManager[None]:
    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            start = time.perf_counter()
            out = forward(*inputs)
            total[0] += time.perf_counter() - start
            return out

        return call

    return _wrapped(modules, wrap)


def _profiled(modules: Sequence[Any], profiler: cProfile.Profile) -> contextlib.AbstractContextManager[None]:
    return _wrapped(modules, lambda forward: functools.partial(profiler.runcall, forward))


def _top(profiler: cProfile.Profile, calls: int, most: int = 30) -> list[list[Any]]:
    """Functions by their own time: name, calls and us a layer, as the profiler slows them."""
    found = []
    for (file, line, name), (_, count, own, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        place = f"{'/'.join(pathlib.Path(file).parts[-2:])}:{line} {name}" if line else name
        found.append([place, count / calls, own / calls * 1e6, total / calls * 1e6])
    return sorted(found, key=lambda row: -row[2])[:most]

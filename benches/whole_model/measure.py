"""Compares the logits of a model's experts implementations, then times them in turns."""

from __future__ import annotations

import contextlib
import cProfile
import dataclasses
import functools
import gc
import pathlib
import pstats
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from benches.whole_model.models import CONTEXT, EAGER, Case, Model, make_model
from moereg.bench.timing import capture, time_runs, wait_for
from moereg.dispatch import select_backend
from moereg.errors import is_lack_of_memory, one_line
from moereg.integrations._experts import serving
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.layouts import read_experts
from moereg.integrations.transformers import prepare
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.spec.quant_schemes import get_scheme
from moereg.weights.permuted import ExpertWeights
from moereg.weights.quantize_weights import dequantize_weights, quantize_weights

__all__ = ["OURS", "QUANTIZED", "Decoding", "WholeModel", "difference", "forget"]

OURS: Final = "moereg"
QUANTIZED: Final = "moereg_mxfp4"
_COMPILED: Final = (OURS, "grouped_mm", "batched_mm")

_FACTOR: Final = 2.0
_LEAST: Final = 0.01
"""Bound of models whose eager is next to exact, such as those in fp32."""
_PROMPT: Final = 256
_ROOM: Final = 128
"""Free slots of the static cache behind the context."""


@contextlib.contextmanager
def hooked(modules: Sequence[torch.nn.Module], **hooks: Callable[..., Any]) -> Iterator[None]:
    """Registers hooks on every module while its body runs."""
    handles = [getattr(module, f"register_{name}")(hook) for module in modules for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def difference(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """How far logits are apart.

    Returns:
        `norm` of the difference over that of the logits, its `max` over the largest logit, and `same_token`, the share
        of positions whose largest logit is the same token's.
    """
    agree = (found.argmax(-1) == expected.argmax(-1)).float().mean().item()
    expected = expected.float()
    delta = found.float() - expected
    norm = (delta.norm() / expected.norm()).item()
    return {"norm": norm, "max": (delta.abs().max() / expected.abs().max()).item(), "same_token": agree}


class Decoding:
    """One token for each sequence of a batch. Every step finds the cache as the first did."""

    def __init__(self, model: Any, case: Case, device: torch.device) -> None:
        from transformers.cache_utils import Cache, StaticLayer
        from transformers.masking_utils import create_masks_for_generate

        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # All layers keep all of the context, those with a sliding window too: a full window's layer of transformers
        # makes a tensor of a Python list at each step, which no graph can hold.
        layers = [StaticLayer(max_cache_len=case.tokens + _ROOM) for _ in range(config.num_hidden_layers)]
        cache = Cache(layers=layers)
        cache.early_initialization(case.batch, config.num_key_value_heads, head_dim, model.dtype, device)
        generator = torch.Generator(device).manual_seed(case.batch)
        context = torch.randint(config.vocab_size, (case.batch, case.tokens), device=device, generator=generator)
        # A prompt's own keys and values: after random ones a layer's rounding decides which experts the next one takes.
        model(input_ids=context, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = torch.randint(config.vocab_size, (case.batch, 1), device=device, generator=generator)
        positions = torch.full((1, 1), case.tokens, device=device)
        # As `generate` does, since masks are not made inside of a graph.
        mask = create_masks_for_generate(
            config=config,
            inputs_embeds=model.get_input_embeddings()(ids),
            attention_mask=None,
            past_key_values=cache,
            position_ids=positions,
        )
        self._forward = model.forward
        self.num_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        self._lengths = [layer.cumulative_length for layer in layers]
        self._inputs = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "use_cache": True,
        }

    def step(self, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        """Logits [B,1,V], by the model's forward or what was compiled of it."""
        logits: torch.Tensor = (forward or self._forward)(**self._inputs).logits
        torch._foreach_sub_(self._lengths, 1)
        return logits


class WholeModel:
    """A model and the record of what was measured of it.

    Attributes:
        record: What is stored.
        names: Implementations that are measured, in turns.
        deadline: Of `time.monotonic`; nothing starts later.
    """

    def __init__(self, spec: Model, device: torch.device, record: dict[str, Any], deadline: float) -> None:
        self.spec, self.device, self.record, self.deadline = spec, device, record, deadline
        self.model = make_model(spec, device)
        self.experts = [each.module for each in find_experts(self.model)]
        self.names = [EAGER, "batched_mm", "grouped_mm", OURS]
        record["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        record["weights_bytes"] = sum(parameter.nbytes for parameter in self.model.parameters())
        record["layers"] = len(self.experts)
        self._codes: list[ExpertWeights] = []
        self._kernels: list[MoEKernel] = []
        self._first: dict[Case, torch.Tensor] = {}
        # Inputs of each layer's experts, and what they give, in fp32.
        self._layers: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor]] = []
        if spec.quant:
            self._codes = [self._round(module) for module in self.experts]
            self.names.append(QUANTIZED)
        self._prompt = self.prompt(1, min(_PROMPT, *(tokens for _, tokens in spec.prefill)))
        self._expected = self._reference()
        self.use(EAGER)
        self._eager = self._logits()
        # The experts' outputs must matter, or comparing logits says nothing about them.
        with hooked(self.experts, forward_hook=lambda module, inputs, out: torch.zeros_like(out)):
            control = difference(self._logits(), self._expected)
        bound = max(_FACTOR * difference(self._eager, self._expected)["norm"], _LEAST)
        layer_bound = max(_FACTOR * self._layer_error(), _LEAST)
        record |= {"bound": bound, "layer_bound": layer_bound, "control": control, "checks": {}}

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

    def _logits(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=self._prompt, use_cache=False).logits
        return logits

    def _reference(self) -> torch.Tensor:
        """Logits of the same weights in fp32; one layer at a time has them, and gets its own bits back.

        Keeps what goes into each layer's experts and comes out of them.
        """
        inner = self.model.get_decoder()

        def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self._layers.append((module, inputs, out))

        def widen(module: torch.nn.Module, _: Any) -> None:
            module.float()

        def narrow(module: torch.nn.Module, *_: Any) -> None:
            module.bfloat16()

        self.use(EAGER)
        parts = [inner.embed_tokens, *inner.layers, inner.norm, self.model.lm_head]
        with hooked(self.experts, forward_hook=keep), hooked(parts, forward_pre_hook=widen, forward_hook=narrow):
            return self._logits()

    def _layer_error(self) -> float:
        """The largest distance from fp32 of any layer's experts, each on the inputs that it had in fp32.

        Rounding grows from layer to layer, in some models until logits say nothing; here it cannot.
        """

        def error(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], expected: torch.Tensor) -> float:
            found = module(*(each.to(self.model.dtype) if each.is_floating_point() else each for each in inputs))
            return difference(found, expected)["norm"]

        return max(error(*layer) for layer in self._layers)

    def use(self, name: str) -> None:
        """Switches all layers, at the price of an attribute, so that plain calls can be timed in turns."""
        self.model.config._experts_implementation = name

    def prompt(self, batch: int, tokens: int) -> torch.Tensor:
        """Random tokens [B,T]."""
        generator = torch.Generator(self.device).manual_seed(batch * tokens)
        return torch.randint(self.model.config.vocab_size, (batch, tokens), device=self.device, generator=generator)

    def prepare(self, *, free: bool = False) -> None:
        """Makes moereg's kernels and compiles what they will launch."""
        start = time.perf_counter()
        prepared = prepare(self.model, free=free, progress=False)
        wait_for(self.device)
        found = {
            "seconds": time.perf_counter() - start,
            "bytes_before": prepared.bytes_before,
            "bytes_after": prepared.bytes_after,
            "backend": prepared.layers[0].backend,
        }
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
        self.record["prepare_free" if free else "prepare"] = found

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

    def check(self) -> None:
        """Compares each implementation's experts and logits with those in fp32, and drops what is wrong."""
        checks = self.record["checks"]
        for name in self.names:
            try:
                self.use(name)
                logits, layers = self._logits(), self._layer_error()
            except Exception as error:
                checks[name] = {"passed": False, "outcome": _outcome(error)}
                forget(error)
                continue
            found = difference(logits, self._expected)
            passed = found["norm"] <= self.record["bound"] and layers <= self.record["layer_bound"]
            checks[name] = {**found, "layers": layers, "passed": passed, "to_eager": difference(logits, self._eager)}
            print(f"{name}: {checks[name]}", flush=True)
        self.names = [name for name in self.names if "outcome" in checks[name] or checks[name]["passed"]]

    def measure(self, case: Case, seconds: float) -> None:
        """Measures a case with every implementation that has no row of it yet.

        Args:
            case: Which.
            seconds: Of one median.
        """
        shown = dataclasses.asdict(case)
        known = {row["implementation"] for row in self.record["rows"] if {**row, **shown} == row}
        names = [name for name in self.names if name not in known]
        turns = [names]
        if case.mode == "compiled":
            # Each alone: torch's graphs belong to the order of calls in which they were recorded.
            turns = [[name] for name in _COMPILED if name in names]
        for together in filter(None, turns):
            rows = self._measure_in_turns(case, together, seconds)
            for row in rows:
                what = f"{row['ms']:.2f} ms" if "ms" in row else row["outcome"]
                place = f"{case.phase} {case.mode} {case.batch} x {case.tokens}"
                print(f"{place} {row['implementation']}: {what}", flush=True)
            self.record["rows"] += rows
            torch._dynamo.reset()
            forget()

    def _measure_in_turns(self, case: Case, names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = []
        runs: dict[str, Callable[[], object]] = {}
        decoding = None
        for name in names:
            row: dict[str, Any] = {"implementation": name, **dataclasses.asdict(case)}
            if self.is_late:
                self.record["left_out"].append({**row, "why": "out of time"})
                continue
            made.append(row)
            if case.mode == "graph" and name == EAGER:
                row["outcome"] = "no graph: it reads on the host which experts have tokens"
                continue
            try:
                if case.phase == "decode" and decoding is None:
                    decoding = self._decoding(case)
                runs[name], logits = self._ready(case, name, decoding, row)
            except Exception as error:
                row["outcome"] = _outcome(error)
                forget(error)
                continue
            row["difference"] = difference(logits, self._first.setdefault(case, logits))
            if not row["difference"]["norm"] <= _FACTOR * self.record["bound"]:
                row["outcome"] = "wrong logits"
                del runs[name]
        times = {}
        try:
            if runs:
                times = time_runs({name: [run] for name, run in runs.items()}, self.device, 20, seconds)
        except torch.OutOfMemoryError as error:
            forget(error)
        for row in made:
            if row["implementation"] in runs:
                timing = times.get(row["implementation"])
                if timing is None:
                    row["outcome"] = "out of memory"
                    continue
                tokens = case.batch * (case.tokens if case.phase == "prefill" else 1)
                row |= {
                    "ms": timing.median_us / 1e3,
                    "p10_ms": timing.p10_us / 1e3,
                    "p90_ms": timing.p90_us / 1e3,
                    "samples": len(timing.samples_us),
                    "tokens_per_s": tokens / timing.median_us * 1e6,
                }
        return made

    def _decoding(self, case: Case) -> Decoding:
        # Its prompt is up to 32,768 tokens, which batched_mm has no memory for.
        self.use(next((name for name in ("grouped_mm", EAGER) if name in self.names), OURS))
        return Decoding(self.model, case, self.device)

    def _ready(
        self, case: Case, name: str, decoding: Decoding | None, row: dict[str, Any]
    ) -> tuple[Callable[[], object], torch.Tensor]:
        """A run that has been called, and the logits that it computed."""
        on_gpu = self.device.type == "cuda"
        if decoding is None:
            call = functools.partial(self.model, input_ids=self.prompt(case.batch, case.tokens), logits_to_keep=1)
        elif case.mode == "compiled":
            # As `generate` compiles it.
            call = functools.partial(decoding.step, torch.compile(self.model.forward, mode="reduce-overhead"))
        else:
            call = decoding.step

        def run() -> Any:
            self.use(name)
            if case.mode == "compiled":
                torch.compiler.cudagraph_mark_step_begin()
            return call()

        before = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        run()
        wait_for(self.device)
        row["first_seconds"] = time.perf_counter() - start
        for _ in range(3 if case.mode == "compiled" else 1):
            out = run()
        again: Callable[[], object] = run
        if case.mode == "graph":
            kept: list[torch.Tensor] = []
            (again,) = capture([lambda: kept.append(run())])
            again()
            out = kept[0]
        wait_for(self.device)
        if on_gpu:
            row["extra_bytes"] = torch.cuda.max_memory_allocated() - before
        row["cache_bytes"] = decoding.num_bytes if decoding else 0
        logits = out if decoding else out.logits
        return again, logits.clone()

    def count_experts(self) -> None:
        """How many experts have tokens in a layer, in the mean over layers."""
        found: list[int] = []
        for batch in self.spec.decode:
            decoding = self._decoding(Case("decode", "eager", batch, CONTEXT))
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
        decoding = self._decoding(case)
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


def _outcome(error: Exception) -> str:
    return "out of memory" if is_lack_of_memory(error) else one_line(str(error))[:200]


def forget(error: BaseException | None = None) -> None:
    """Gives back what a case took; the frames of an error, and of those that led to it, hold its tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

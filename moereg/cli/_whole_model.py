"""Compares the logits of a model's experts implementations, then times them in turns.

Logits of a prompt are compared with those of the same weights in fp32, layer by layer so that they fit. An
implementation may be twice as far from them as eager, in every layer's experts and in the logits; before each case,
experts are compared once more on its own number of tokens. Wrong ones get no time. All get the same routes while they
are compared: near a tie rounding alone decides which experts a token has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from moereg.bench.compare import Phase
from moereg.bench.timing import capture, time_runs, wait_for
from moereg.errors import ArgumentError, is_lack_of_memory, one_line
from moereg.integrations._experts import memory, serving
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.calls import own_functions
from moereg.integrations.transformers import PreparedModel, prepare, register

EAGER: Final = "eager"
OURS: Final = "moereg"
"""As `register` gives it."""
PREPARED: Final = "moereg_prepared"

FACTOR: Final = 2.0
_LEAST: Final = 0.01
"""Bound of models whose eager is next to exact, such as those in fp32."""
_ROOM: Final = 128
"""Free slots of the static cache behind the context."""
_WITH_STATIC_CACHE: Final = {"full_attention", "sliding_attention", "chunked_attention"}
_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class Case:
    """A measurement that is made with each implementation.

    Attributes:
        phase: `prefill`, or `decode` for a step.
        mode: `eager` for plain calls, `graph` for a CUDA graph, or `compiled`.
        batch: Sequences.
        tokens: Of each prompt; in the cache of each sequence where the phase is `decode`.
    """

    phase: str
    mode: str
    batch: int
    tokens: int


@contextlib.contextmanager
def hooked(modules: Sequence[torch.nn.Module], **hooks: Callable[..., Any]) -> Iterator[None]:
    """Registers hooks on every module while its body runs."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, hook in hooks.items():
                stack.callback(getattr(module, f"register_{name}")(hook).remove)
        yield


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


def implementations(experts: Sequence[torch.nn.Module]) -> list[str]:
    """Names of what can run a model's experts: transformers' own, kernels of the Hub last, then moereg's."""
    # Classes that moereg patches have one implementation of their own, and are seen as a whole.
    seen = [module for module in experts if serving.has_interface(module)]
    if not seen:
        return [EAGER, PREPARED]
    order = ("batched_mm", "grouped_mm")
    theirs = [name for name in own_functions(seen[0]) if name not in (*serving.NAMES, *order)]
    return [EAGER, *order, *theirs, OURS, PREPARED]


class Decoding:
    """One token for each sequence of a batch.

    Attributes:
        grows: Whether the cache does, as layers with a state need it; otherwise every step finds it as the first did.
    """

    def __init__(self, model: Any, case: Case, device: torch.device) -> None:
        from transformers.cache_utils import Cache, DynamicCache, StaticLayer
        from transformers.masking_utils import create_masks_for_generate

        config = model.config.get_text_config(decoder=True)
        self.grows = not {*(getattr(config, "layer_types", None) or ())} <= _WITH_STATIC_CACHE
        # All layers keep all of the context, those with a sliding window too: a full window's layer of transformers
        # makes a tensor of a Python list at each step, which no graph can hold.
        static: list[Any] = [StaticLayer(max_cache_len=case.tokens + _ROOM) for _ in range(config.num_hidden_layers)]
        cache: Any = DynamicCache(config=config) if self.grows else Cache(layers=static)
        generator = torch.Generator(device).manual_seed(case.batch)
        context = torch.randint(config.vocab_size, (case.batch, case.tokens), device=device, generator=generator)
        # A prompt's own keys and values: after random ones a layer's rounding decides which experts the next one takes.
        model(input_ids=context, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = torch.randint(config.vocab_size, (case.batch, 1), device=device, generator=generator)
        self._forward = model.forward
        self._lengths = [layer.cumulative_length for layer in static if layer.is_initialized]
        self._inputs: dict[str, Any] = {"input_ids": ids, "past_key_values": cache, "use_cache": True}
        if not self.grows:
            # As `generate` does, since masks are not made inside of a graph.
            positions = torch.full((1, 1), case.tokens, device=device)
            self._inputs["position_ids"] = positions
            self._inputs["attention_mask"] = create_masks_for_generate(
                config=config,
                inputs_embeds=model.get_input_embeddings()(ids),
                attention_mask=None,
                past_key_values=cache,
                position_ids=positions,
            )

    def step(self, forward: Callable[..., Any] | None = None) -> torch.Tensor:
        """Logits [B,1,V], by the model's forward or what was compiled of it."""
        logits: torch.Tensor = (forward or self._forward)(**self._inputs).logits
        if self._lengths:
            torch._foreach_sub_(self._lengths, 1)
        return logits


class WholeModel:
    """A model and the record of what was measured of it.

    Attributes:
        experts: The modules with experts, in model order.
        names: Implementations that are measured, in turns.
        record: What is stored.
    """

    def __init__(self, model: Any, device: torch.device, record: dict[str, Any], prompt: int = 256) -> None:
        """Computes the bounds on so many tokens, of a model in eval mode."""
        self.model, self.device, self.record = model, device, record
        register()
        self.experts = [each.module for each in find_experts(model)]
        self._seen = [module for module in self.experts if serving.has_interface(module)]
        self.names = implementations(self.experts)
        self._served = {OURS: [serving.ServedExperts(module) for module in self.experts]} if self._seen else {}
        record["parameters"] = sum(parameter.numel() for parameter in model.parameters())
        record["weights_bytes"], record["layers"] = memory.held_bytes(model), len(self.experts)
        # Ids and weights [T,K] by layer's experts.
        self._routes: dict[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}
        # What each layer's experts get and give in the reference.
        self._layers: list[tuple[torch.nn.Module, tuple[torch.Tensor, ...], torch.Tensor]] = []
        self._prompt = self.prompt(1, prompt)
        self.use(EAGER)
        expected = self._reference()
        self._eager = self._logits()
        self._expected, record["reference"] = (self._eager, EAGER) if expected is None else (expected, "fp32")
        # The experts' outputs must matter, or comparing logits says nothing about them.
        with hooked(self.experts, forward_hook=_zeros):
            control = difference(self._logits(), self._expected)
        # Without fp32, transformers' two ways say what rounding does.
        self._yardstick = "grouped_mm" if expected is None and "grouped_mm" in self.names else EAGER
        self._bounds: dict[int, float] = {}
        self.use(self._yardstick)
        bound = max(FACTOR * difference(self._logits(), self._expected)["norm"], _LEAST)
        layer_bound = max(FACTOR * self._layer_error(), _LEAST)
        if not math.isfinite(bound + layer_bound):
            raise ArgumentError(
                f"compare needs finite logits of {self._yardstick} experts in {model.dtype}, got NaN or infinity; pass "
                "another --dtype"
            )
        record |= {"bound": bound, "layer_bound": layer_bound, "control": control, "checks": {}, "held_bytes": {}}

    def _logits(self) -> torch.Tensor:
        """Logits of the prompt, whose routes are those of the first call."""

        def replace(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            ids, weights = self._routes.setdefault(module, (inputs[1], inputs[2]))
            return inputs[0], ids, weights.to(inputs[2].dtype)

        with hooked(self._seen, forward_pre_hook=replace):
            return _logits_of(self.model(input_ids=self._prompt, use_cache=False))

    def _reference(self) -> torch.Tensor | None:
        """Logits of the same weights in fp32, where one part at a time is wide; None if there are none.

        Keeps what goes into each layer's experts and comes out of them.
        """
        narrow: dict[torch.Tensor, torch.Tensor] = {}

        def keep(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            self._layers.append((module, inputs, out))

        def widen(module: torch.nn.Module, _: Any) -> None:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_floating_point() and tensor.dtype != torch.float32:
                    narrow[tensor] = tensor.data
                    tensor.data = tensor.data.float()

        def give_back(*_: Any) -> None:
            while narrow:
                tensor, data = narrow.popitem()
                tensor.data = data

        parts: list[torch.nn.Module] = []
        if all(parameter.dtype in _FLOATS for parameter in self.model.parameters()):
            for part in filter(None, (*self.model.get_decoder().children(), self.model.get_output_embeddings())):
                parts += [*part] if isinstance(part, torch.nn.ModuleList) else [part]
        try:
            with hooked(self._seen, forward_hook=keep), hooked(parts, forward_pre_hook=widen, forward_hook=give_back):
                logits = self._logits()
            return logits if parts else None
        except Exception as error:  # Some models mix dtypes where no part begins, or lack the memory.
            give_back()
            forget(error)
        self._layers.clear()
        self._routes.clear()
        with hooked(self._seen, forward_hook=keep):
            self._logits()
        return None

    def _layer_error(self, rows: int | None = None) -> float:
        """The largest distance from the reference of any layer's experts, on so many of the inputs that each had there.

        Rounding grows from layer to layer, in some models until logits say nothing; here it cannot.

        Args:
            rows: Number of inputs, which begin again where there are fewer; None for each once.
        """

        def error(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], expected: torch.Tensor) -> float:
            chosen = torch.arange(rows or len(expected), device=self.device) % len(expected)
            given = [each[chosen] for each in inputs]
            given = [each.to(self.model.dtype) if each.is_floating_point() else each for each in given]
            return difference(module(*given), expected[chosen])["norm"]

        errors = [error(*layer) for layer in self._layers]
        return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)

    def use(self, name: str) -> None:
        """Switches all layers, at the price of two attributes each, so that plain calls can be timed in turns."""
        kernels = self._served.get(name)
        for number, module in enumerate(self.experts):
            if kernels is not None:
                serving.attach(module, kernels[number])
            elif not getattr(serving.served(module), "released", None):  # Else they hold the only weights.
                vars(module).pop(serving.ATTRIBUTE, None)
            config: Any = getattr(module, "config", self.model.config)
            config._experts_implementation = name if kernels is None else OURS

    def prompt(self, batch: int, tokens: int) -> torch.Tensor:
        """Random tokens [B,T]."""
        generator = torch.Generator(self.device).manual_seed(batch * tokens)
        most = self.model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(most, (batch, tokens), device=self.device, generator=generator)

    def prepare(self, *, free: bool = False, name: str = PREPARED) -> PreparedModel:
        """Makes moereg's kernels, as the implementation of that name."""
        self._served.pop(name, None)
        self.use(EAGER)  # `prepare` would change kernels of another name.
        start = time.perf_counter()
        prepared = prepare(self.model, free=free, progress=False)
        wait_for(self.device)
        self._served[name] = [kernels for module in self.experts if (kernels := serving.served(module))]
        self.record["prepare_free" if free else "prepare"] = {
            "seconds": time.perf_counter() - start,
            "bytes_before": prepared.bytes_before,
            "bytes_after": prepared.bytes_after,
            "backend": prepared.layers[0].backend,
        }
        return prepared

    def check(self, phase: Phase = lambda what: contextlib.nullcontext(lambda done, total: None)) -> None:
        """Compares each implementation's experts and logits with the reference's, and drops what is wrong."""
        checks = self.record["checks"]
        for name in [name for name in self.names if name not in checks]:
            try:
                with phase(f"checking {name}"):
                    self.use(name)
                    logits, layers = self._logits(), self._layer_error()
                    self.record["held_bytes"][name] = memory.held_bytes(self.model)
            except Exception as error:
                checks[name] = {"passed": False, "outcome": _outcome(error)}
                forget(error)
                continue
            found = difference(logits, self._expected)
            passed = found["norm"] <= self.record["bound"] and layers <= self.record["layer_bound"]
            checks[name] = {**found, "layers": layers, "passed": passed, "to_eager": difference(logits, self._eager)}
        # What lacks memory for this prompt may decode.
        kept = [name for name in self.names if checks[name]["passed"] or checks[name].get("outcome") == _NO_MEMORY]
        self.names = kept

    def generate(self, prompt: int, new: int) -> list[int] | None:
        """Greedy tokens after a random prompt by the implementation in use, None if it fails."""
        ids = self.prompt(1, prompt)
        length = {"max_new_tokens": new, "min_new_tokens": new}
        try:
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        except Exception as error:  # Its times will say what fails.
            forget(error)
            return None
        found: list[int] = out[0, prompt:].tolist()
        return found

    def measure(self, case: Case, seconds: float, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Measures a case in turns; returns the new rows.

        Args:
            case: Which.
            seconds: Of one median.
            names: Implementations; None for all.
        """
        made: list[dict[str, Any]] = []
        runs: dict[str, Callable[[], object]] = {}
        decoding = None
        for name in self.names if names is None else names:
            row: dict[str, Any] = {"implementation": name, **dataclasses.asdict(case)}
            made.append(row)
            if case.mode == "graph" and name == EAGER:
                row["outcome"] = "no graph: it reads on the host which experts have tokens"
                continue
            try:
                if case.phase == "decode" and decoding is None:
                    decoding = self.decoding(case)
                runs[name] = self._ready(case, name, decoding, row)
            except Exception as error:
                row["outcome"] = _outcome(error)
                forget(error)
        times = {}
        try:
            if runs:
                times = time_runs({name: [run] for name, run in runs.items()}, self.device, 20, seconds)
        except torch.OutOfMemoryError as error:
            forget(error)
        for row in made:
            timing = times.get(row["implementation"])
            if timing is not None:
                tokens = case.batch * (case.tokens if case.phase == "prefill" else 1)
                row |= {
                    "ms": timing.median_us / 1e3,
                    "p10_ms": timing.p10_us / 1e3,
                    "p90_ms": timing.p90_us / 1e3,
                    "samples": len(timing.samples_us),
                    "tokens_per_s": tokens / timing.median_us * 1e6,
                }
            else:
                row.setdefault("outcome", _NO_MEMORY)
        self.record["rows"] += made
        torch._dynamo.reset()
        forget()
        return made

    def decoding(self, case: Case) -> Decoding:
        """Steps of a case, on a cache that the first implementation at hand filled."""
        # Its prompt is up to 32,768 tokens, which batched_mm has no memory for.
        self.use(next((name for name in ("grouped_mm", EAGER) if name in self.names), self.names[0]))
        return Decoding(self.model, case, self.device)

    def call_of(self, case: Case, decoding: Decoding | None) -> Callable[[], Any]:
        """The call that a case times."""
        if decoding is not None:
            return decoding.step
        return functools.partial(self.model, input_ids=self.prompt(case.batch, case.tokens), logits_to_keep=1)

    def _ready(self, case: Case, name: str, decoding: Decoding | None, row: dict[str, Any]) -> Callable[[], object]:
        """A run that was called and whose logits are right."""
        on_gpu, grows = self.device.type == "cuda", decoding is not None and decoding.grows
        if grows and case.mode != "eager":
            raise ArgumentError("no graph: its cache grows")
        call = self.call_of(case, decoding)

        def run() -> Any:
            self.use(name)
            return call()

        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        first = _logits_of(run()).clone()
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
        # Routes are its own here, where a near tie may go the other way; where a cache grows, no two steps are alike.
        loose = max(FACTOR * self.record["bound"], self.record["control"]["norm"] / 2)
        apart = 0.0 if grows else difference(_logits_of(out), first)["norm"]
        if not apart <= loose:
            raise ArgumentError(f"wrong logits in a second call: {apart:.2g}, bound {loose:.2g}")
        # Kernels differ by their number of tokens, and one in many layers may vanish in logits.
        rows = case.batch * (case.tokens if case.phase == "prefill" else 1)
        if rows not in self._bounds:
            self.use(self._yardstick)
            self._bounds[rows] = max(FACTOR * self._layer_error(rows), _LEAST)
        self.use(name)
        if not (layers := self._layer_error(rows)) <= self._bounds[rows]:
            raise ArgumentError(f"wrong experts at T={rows}: {layers:.2g}, bound {self._bounds[rows]:.2g}")
        return again


def _logits_of(out: Any) -> torch.Tensor:
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return logits


def _zeros(module: torch.nn.Module, inputs: Any, out: Any) -> Any:
    return torch.zeros_like(out) if isinstance(out, torch.Tensor) else (torch.zeros_like(out[0]), *out[1:])


_NO_MEMORY: Final = "out of memory"


def _outcome(error: Exception) -> str:
    return _NO_MEMORY if is_lack_of_memory(error) else one_line(str(error))[:200]


def forget(error: BaseException | None = None) -> None:
    """Gives back what a case took; the frames of an error, and of those that led to it, hold its tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

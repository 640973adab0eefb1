"""A whole model's LoRA step with moereg beside transformers' grouped_mm, both under PEFT.

    python -m benches.h200.whole_training --json benches/results/whole_training_h200.json
    python -m benches.h200.whole_training --layers 20 --json FILE        # for a GPU of 80 GB
    python -m benches.h200.whole_training --model tiny --length 32 --rank 2 --lr 1e-3 --json FILE   # on any CPU

Qwen3-30B-A3B has its published sizes and random weights in bf16, drawn on the device. All experts and the attention's
projections have adapters of rank 16, by PEFT, in fp32 as PEFT makes them. A step takes 4 x 4,096 tokens: forward,
backward, and fused AdamW of the adapters. The output head and the loss are computed for 1,024 tokens at a time and
recomputed backward, in all sides alike: logits of a whole step would take more memory than the model's layers. What
else takes memory is said by term, and what no term has is the rest.

Each side runs in a process of its own, from the same weights, adapters and tokens:

- `grouped_mm`: transformers' experts, with adapters multiplied out by PEFT.
- `moereg`: the same model and adapters on moereg.
- `moereg_4bit`: the same, above experts that `quantize_experts` quantized.

`-checkpoint` recomputes each decoder layer in the backward pass. `-selective` does so too, but keeps the results of the
experts' matrix products, for moereg those of its operator. Where memory runs out, that is the outcome. Peak memory is
that of the steps after the first.

The first side of the list is the reference. Of the first step, the loss of each token and a sample of the gradients of
every factor are compared with the reference's: `losses` is the norm of the losses' difference over that of the
difference that experts returning zeros make, `gradients` the norm of the difference over that of the gradients. A side
with the same weights that is beyond a quarter fails the bench. The 4-bit side has other weights; `--rounded` gives all
sides the numbers that it restores, for a check of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benches.training_page import whole_training_table
from benches.whole_model.models import MODELS, make_model
from moereg.errors import is_lack_of_memory, one_line
from moereg.evidence.provenance import clocks, provenance
from moereg.integrations._experts.packed import stored_in
from moereg.integrations._experts.serving import served
from moereg.integrations.transformers import quantize_experts, register
from moereg.platforms import probe_platform
from moereg.quantize import dequantize_into, quantize_weights
from moereg.weights.permuted import ExpertWeights

ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS: Final = ("gate_up_proj", "down_proj")
BOUND: Final = 0.25
"""For `losses` and `gradients`. Two right implementations in bf16 are a few hundredths apart, a wrong one about 1."""

_CHUNK: Final = 1024
_SAMPLES: Final = 256
"""Entries of each factor's gradient."""


@dataclasses.dataclass(frozen=True)
class Side:
    """An implementation to train with.

    Attributes:
        implementation: Of transformers' experts.
        quantizes: Whether the experts' weights are quantized.
        recomputes: `checkpoint` for each decoder layer in the backward pass, `selective` for all but the experts'
            matrix products, or nothing.
    """

    implementation: str
    quantizes: bool = False
    recomputes: str = "checkpoint"


SIDES: Final[Mapping[str, Side]] = {
    "grouped_mm-checkpoint": Side("grouped_mm"),
    "moereg-checkpoint": Side("moereg"),
    "moereg-selective": Side("moereg", recomputes="selective"),
    "moereg_4bit-checkpoint": Side("moereg", quantizes=True),
    "grouped_mm-selective": Side("grouped_mm", recomputes="selective"),
    "moereg_4bit-selective": Side("moereg", quantizes=True, recomputes="selective"),
    "moereg": Side("moereg", recomputes=""),
    "grouped_mm": Side("grouped_mm", recomputes=""),
}


class Factors(NamedTuple):
    """An adapter in PEFT's layout.

    Attributes:
        a: [E*R,N], or [R,N] of a linear layer.
        b: [M,R*E], experts innermost, or [M,R].
    """

    a: torch.Tensor
    b: torch.Tensor


def _weights_of(experts: Any) -> ExpertWeights:
    return ExpertWeights(w13=experts.gate_up_proj.detach(), w2=experts.down_proj.detach())


def build(side: Side, device: torch.device, options: argparse.Namespace) -> Any:
    """The model with PEFT's adapters."""
    import peft

    spec = MODELS[options.model]
    if options.layers:
        spec = dataclasses.replace(spec, config={**spec.config, "num_hidden_layers": options.layers})
    model = make_model(spec, device)
    if side.implementation == "moereg":
        register()
    if side.quantizes:
        print(quantize_experts(model, options.scheme), flush=True)
    else:
        model.set_experts_implementation(side.implementation)
    if options.rounded and not side.quantizes:
        for layer in model.model.layers:
            weights = _weights_of(layer.mlp.experts)
            dequantize_into(quantize_weights(weights, options.scheme), weights.w13, weights.w2)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(ATTENTION),
        target_parameters=list(EXPERTS),
    )
    with torch.device(device):  # Where PEFT draws its first factors, which are then overwritten.
        adapted = peft.get_peft_model(model, config)
    if side.recomputes:
        how: dict[str, Any] = {"use_reentrant": False}
        if side.recomputes == "selective":
            kept = [torch.ops.moereg.moe_train.default, torch.ops.aten._grouped_mm.default]
            how["context_fn"] = functools.partial(create_selective_checkpoint_contexts, kept)
        adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return adapted.train()


def factors_of(model: Any, *, gradients: bool = False) -> dict[str, Factors]:
    """The adapters by layer and target, in an order that all sides have, or their gradients.

    Args:
        model: The result of `build`.
        gradients: Whether to return gradients in the place of parameters.
    """
    found: dict[str, Factors] = {}

    def held(parameter: torch.Tensor) -> torch.Tensor:
        if not gradients:
            return parameter.detach()
        assert parameter.grad is not None
        return parameter.grad

    for name, module in model.named_modules():
        match = re.search(r"layers\.(\d+)\.", name)
        if "default" in getattr(module, "lora_A", {}):
            target = getattr(module, "parameter_name", name.rpartition(".")[2])
            a, b = (held(getattr(module, f"lora_{factor}")["default"].weight) for factor in "AB")
            found[f"{int(match[1]):03} {target}"] = Factors(a, b)
    return dict(sorted(found.items()))


@torch.no_grad()
def draw_adapters(model: Any, device: torch.device) -> None:
    """Overwrites all factors with the same numbers in each side: `a` as PEFT draws it, `b` small but not zero.

    With `b` at zero, PEFT's start, `a` would have no gradient.
    """
    generator = torch.Generator(device).manual_seed(1)
    for a, b in factors_of(model).values():
        bound = 1 / math.sqrt(a.shape[1])
        a.copy_(torch.empty(a.shape, device=device).uniform_(-bound, bound, generator=generator))
        b.copy_(torch.empty(b.shape, device=device).normal_(std=0.01, generator=generator))


def token_losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """[B*(S-1)] fp32: the loss of each token but the first of each sequence [B,S]."""
    causal = model.get_base_model()
    hidden_states = causal.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

    def part(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(causal.lm_head(rows).float(), targets, reduction="none")

    parts = zip(hidden_states.split(_CHUNK), tokens[:, 1:].flatten().split(_CHUNK), strict=True)
    return torch.cat([checkpoint(part, *each, use_reentrant=False) for each in parts])


def training_backend(experts: Any) -> str:
    """The backend that has trained experts.

    Raises:
        RuntimeError: moereg left them to transformers.
    """
    while hasattr(experts, "base_layer"):  # Of PEFT, one for each parameter.
        experts = experts.base_layer
    found = served(experts)
    (trainer,) = found.trainers.values() if found else ("nothing was called",)
    if isinstance(trainer, str):
        raise RuntimeError(f"moereg does not train the experts: {trainer}")
    name = trainer.training_kernel().selection.backend
    assert name is not None
    return name


@contextlib.contextmanager
def experts_return_zeros(model: Any) -> Iterator[None]:
    """The control: a model whose experts compute nothing."""
    handles = [
        layer.mlp.experts.register_forward_hook(lambda module, inputs, out: torch.zeros_like(out))
        for layer in model.get_base_model().model.layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sample_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Some entries of each factor's gradient, the same in each side, by target and factor."""
    found: dict[str, list[torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(2)
    for name, factors in factors_of(model, gradients=True).items():
        for factor, gradient in zip("AB", factors, strict=True):
            places = torch.randint(gradient.numel(), (_SAMPLES,), generator=generator).to(gradient.device)
            entries = gradient.reshape(-1)[places].float().cpu()
            found.setdefault(f"{name.split()[1]} {factor}", []).append(entries)
    return {name: torch.cat(entries) for name, entries in found.items()}


def memory_by_term(model: Any, num_tokens: int) -> dict[str, int]:
    """Bytes that a step needs, by what needs them, but for what a layer computes with."""
    experts = frozen = trained = 0
    for each in model.parameters():
        num_bytes = sum(part.nbytes for part in stored_in(each))
        if each.requires_grad:
            trained += 4 * num_bytes  # itself, its gradient and AdamW's two moments
        elif each.dim() == 3:
            experts += num_bytes
        else:
            frozen += num_bytes
    config = model.config
    inputs = config.num_hidden_layers * num_tokens * config.hidden_size * 2
    return {"experts": experts, "other weights": frozen, "adapters' training": trained, "layers' inputs": inputs}


class Clock:
    """Times of steps in a row, without waiting for the device between them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """A step begins, or the last one has ended."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """The time of each step between two marks."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(last) for first, last in zip(self._marks, self._marks[1:], strict=False)]
        return [1e3 * (last - first) for first, last in zip(self._marks, self._marks[1:], strict=False)]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Trains one side.

    Returns:
        `row`, and tensors of the first step: `token_losses`, `gradients`, and `control`, the losses of a model whose
        experts return zeros, which the reference alone computes.
    """
    side, device = SIDES[name], torch.device(options.device)
    row: dict[str, Any] = {"side": name, **dataclasses.asdict(side)}
    found: dict[str, Any] = {"row": row}
    try:
        _train(side, device, options, row, found)
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        row["outcome"] = "out of memory"
        row["error"] = one_line(str(error))[:300]
    return found


def _train(
    side: Side, device: torch.device, options: argparse.Namespace, row: dict[str, Any], found: dict[str, Any]
) -> None:
    on_gpu = device.type == "cuda"
    start = time.monotonic()
    model = build(side, device, options)
    draw_adapters(model, device)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=True)
    generator = torch.Generator(device).manual_seed(3)
    shape = (options.sequences, options.length)
    tokens = torch.randint(model.config.vocab_size, shape, device=device, generator=generator)
    row["trained"] = sum(each.numel() for each in trained)
    row["memory"] = memory_by_term(model, tokens.numel())
    if row["side"] == options.sides[0]:
        with experts_return_zeros(model), torch.no_grad():
            found["control"] = token_losses(model, tokens).cpu()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    row["build_seconds"] = time.monotonic() - start
    print(f"{row['side']}: built after {row['build_seconds']:.0f} s", flush=True)
    losses: list[torch.Tensor] = []
    clock = Clock(device)
    for step in range(options.steps):
        if on_gpu and step == 1:
            # The first step also makes kernels, and what checks them.
            row["first_peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        clock.mark()
        per_token = token_losses(model, tokens)
        loss = per_token.mean()
        loss.backward()
        losses.append(loss.detach())
        if not step:
            # Of the warm-up: this waits for the device.
            found |= {"token_losses": per_token.detach().cpu(), "gradients": sample_gradients(model)}
            if side.implementation == "moereg":
                row["backend"] = training_backend(model.get_base_model().model.layers[-1].mlp.experts)
            row["first_step_seconds"] = time.monotonic() - start - row["build_seconds"]
        optimizer.step()
        optimizer.zero_grad()
    clock.mark()
    times = clock.milliseconds()
    if on_gpu:
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["reserved_bytes"] = torch.cuda.max_memory_reserved()
    timed = times[options.warmup :]
    row |= {
        "losses": [loss.item() for loss in losses],
        "steps_ms": times,
        "ms": statistics.median(timed),
        "tokens_per_s": 1e3 * tokens.numel() / statistics.median(timed),
        "seconds": time.monotonic() - start,
    }


def compare(found: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[str]:
    """Adds distances from the reference, the first side, to the rows, and names what is wrong."""
    reference, wrong = found[0], []
    for each in found:
        row = each["row"]
        if "ms" not in row or "ms" not in reference["row"]:
            continue
        span = (reference["control"] - reference["token_losses"]).norm()
        gradients = {
            name: float((each["gradients"][name] - expected).norm() / expected.norm())
            for name, expected in reference["gradients"].items()
        }
        row["difference"] = {
            "losses": float((each["token_losses"] - reference["token_losses"]).norm() / span),
            "gradients": gradients,
        }
        distances = (row["difference"]["losses"], *gradients.values())
        beyond = [distance for distance in distances if not distance <= BOUND]  # NaN is beyond.
        has_same_weights = options.rounded or row["quantizes"] == reference["row"]["quantizes"]
        if has_same_weights and beyond:
            wrong.append(f"{row['side']} differs by {max(beyond):.2f} from {reference['row']['side']}")
    return wrong


def _in_process(name: str, options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Measures a side in a process of its own, so that it finds all memory free."""
    file = folder / f"{name}.pt"
    command = [sys.executable, "-m", "benches.h200.whole_training", *options.given, "--child", name, str(file)]
    try:
        code = subprocess.run(command, timeout=options.seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return {"row": {"side": name, "outcome": f"not done after {options.seconds:.0f} s"}}
    if code or not file.exists():
        return {"row": {"side": name, "outcome": f"ended with {code}"}}
    loaded: dict[str, Any] = torch.load(file)
    return loaded


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3-30b-a3b", "tiny"), default="qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=0, help="of the model; all without it")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES), help="the first is reference")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--scheme", default="int4_w4a16_g128", help="of the 4-bit side")
    parser.add_argument("--rounded", action="store_true", help="give all sides the weights of the 4-bit side")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4, help="steps that have no time")
    parser.add_argument("--seconds", type=float, default=180, help="that a side may take")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FILE"), help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures the sides one after the other, writes the file after each, prints the table last."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    options.given = given
    if options.child:
        side, file = options.child
        torch.save(measure(side, options), file)
        return 0
    import peft
    import transformers

    platform = probe_platform()
    record: dict[str, Any] = {
        "schema": 1,
        **provenance(platform, ("moereg", "torch", "triton")),
        "model": options.model,
        "layers": options.layers or MODELS[options.model].config["num_hidden_layers"],
        **{key: getattr(options, key) for key in ("sequences", "length", "rank", "alpha", "scheme", "rounded", "lr")},
        "warmup": options.warmup,
        "chunk": _CHUNK,
        "bound": BOUND,
    }
    record["versions"] |= {"transformers": transformers.__version__, "peft": peft.__version__}
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sides:
            found.append(_in_process(name, options, pathlib.Path(folder)))
            row = found[-1]["row"]
            wrong = compare(found, options)
            shown = f"{row['ms']:.0f} ms, {row['seconds']:.0f} s in all" if "ms" in row else row["outcome"]
            print(f"{name}: {shown}", flush=True)
            record |= {"rows": [each["row"] for each in found], "wrong": wrong, **clocks(platform)}
            if "control" in found[0]:
                record["control"] = float(found[0]["control"].mean())
            if options.json:
                new = options.json.with_suffix(".new")
                new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
                os.replace(new, options.json)
    print(whole_training_table(record))
    for row in record["rows"]:
        if "peak_bytes" in row:
            terms = {**row["memory"], "rest": row["peak_bytes"] - sum(row["memory"].values())}
            print(f"{row['side']}: " + ", ".join(f"{name} {value / 1e9:.2f} GB" for name, value in terms.items()))
    failed = [
        f"{row['side']}: {row['outcome']}"
        for row in record["rows"]
        if row.get("outcome", "out of memory") != "out of memory"
    ]
    for line in [*wrong, *failed]:
        print(line, file=sys.stderr)
    return int(bool(wrong or failed))


if __name__ == "__main__":
    sys.exit(main())

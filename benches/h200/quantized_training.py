"""Frozen quantized experts beside the same weights in bf16: the time to restore a layer, and a step through layers.

    python -m benches.h200.quantized_training [--schemes S ...] [--tokens 4096 16384] [--layers 6] [--json FILE]

First each scheme restores all experts of a layer, w13 and w2, into memory that is there; its bytes, those read and
those written, a second stand beside a copy's in the same process. What it restores is compared with torch's operations.

Then a step goes through some layers in a row, as in a model, so that a layer is not the one that was restored last:
forward alone, forward and backward for the gradient of the first layer's input, the same with trained adapters of every
expert, and that with each layer recomputed. The layers of a scheme and of bf16 have the same values, so both must have
the same gradients, bit for bit; they take turns.

On a CPU, `--sizes 4,2,64,48` are experts, top-k, hidden and intermediate size.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from benches.h200.training import layer_sizes, random_adapters, timed
from moereg.bench.inputs import Call, random_call, random_weights
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.quantize import dequantize_into, dequantize_weights, quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import ExpertWeights

SCHEMES: Final = (
    *("nf4", "nf4_dq", "int4_w4a16_g128", "int4_w4a16_g32", "int4_w4a16_g128_zp", "mxfp4_w4a16", "nvfp4_w4a16"),
    *("int8_w8a16", "fp8_block128", "fp8_channel_token"),
)
STEPS: Final = ("forward", "frozen", "adapters", "adapters, recomputed")
ROUNDS: Final = 5
SCALE: Final = 0.1
"""Factor of a layer's output, so that numbers keep their size through all of them."""

Gradients = dict[str, torch.Tensor]


class Layers:
    """Some layers in a row with adapters of their own, and the inputs of a step."""

    def __init__(self, kernels: Sequence[MoEKernel], adapters: Sequence[ExpertAdapters], call: Call) -> None:
        self.kernels, self.adapters, self.call = kernels, adapters, call
        self.hidden_states = call.hidden_states.clone().requires_grad_()
        self.grad_out = torch.randn(call.hidden_states.shape, generator=torch.Generator().manual_seed(1))
        self.grad_out = self.grad_out.to(call.hidden_states)

    def step(self, what: str) -> Gradients:
        """One of `STEPS`, with its gradients by name."""
        x, leaves = self.hidden_states, {"hidden_states": self.hidden_states}
        for index, (kernel, adapters) in enumerate(zip(self.kernels, self.adapters, strict=True)):
            given = adapters if what.startswith("adapters") else None
            if given is not None:
                leaves |= {f"{index} {name}": tensor.requires_grad_() for name, tensor in given.tensors().items()}
            inputs = x, self.call.topk_weights, self.call.topk_ids
            if what.endswith("recomputed"):
                out = checkpoint(kernel, *inputs, adapters=given, use_reentrant=False)
            else:
                out = kernel(*inputs, adapters=given)
            x = torch.add(x, out, alpha=SCALE)
        if what == "forward":
            return {}
        found = torch.autograd.grad(x, list(leaves.values()), self.grad_out)
        return dict(zip(leaves, found, strict=True))


def gigabytes(weights: ExpertWeights, restored: Sequence[torch.Tensor]) -> float:
    """Bytes that restoring reads and writes, in 10^9."""
    return sum(tensor.nbytes for tensor in (*weights.tensors().values(), *restored)) / 1e9


def copy_rate(device: torch.device) -> float:
    """GB/s of a copy, reading and writing."""
    source = torch.zeros(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e-6 * source.numel() / min(timed(lambda: target.copy_(source)) for _ in range(ROUNDS))  # type: ignore[arg-type]


def restoring(weights: ExpertWeights, restored: Sequence[torch.Tensor]) -> float:
    """Milliseconds to restore a layer, after a comparison of an expert with torch's operations.

    Raises:
        AssertionError: They differ by a bit.
    """
    for tensor in restored:
        tensor.fill_(float("nan"))
    dequantize_into(weights, restored[0], restored[1])
    last = weights.num_experts - 1
    expected = dequantized_on_cpu(weights, last)
    for got, wanted in zip(restored, expected, strict=True):
        assert torch.equal(got[last].cpu(), wanted), f"{weights.scheme.name} is restored otherwise than by torch"
        assert bool(torch.isfinite(got).all()), f"{weights.scheme.name} left numbers out"
    return min(timed(lambda: dequantize_into(weights, restored[0], restored[1])) for _ in range(ROUNDS))


def dequantized_on_cpu(weights: ExpertWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's matrices [R, K] bf16 by torch's operations."""
    tensors = {name: tensor[expert : expert + 1].cpu() for name, tensor in weights.tensors().items()}
    one = ExpertWeights(**tensors, quant=weights.scheme)
    w13, w2 = dequantize_weights(one)
    return w13[0], w2[0]


def turns(sides: dict[str, Layers], what: str) -> dict[str, float]:
    """The median time of a step by side, in ms; the sides take turns."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, layers in sides.items():
            taken = timed(functools.partial(layers.step, what))  # type: ignore[arg-type]
            found[name] += [taken] if number else []  # The first compiles.
    return {name: statistics.median(times) for name, times in found.items()}


def check_equal(sides: dict[str, Layers], what: str) -> None:
    """Compares the gradients of all sides with the first one's.

    Raises:
        AssertionError: Some bits differ.
    """
    first, *others = [layers.step(what) for layers in sides.values()]
    for other in others:
        for name, expected in first.items():
            assert torch.equal(other[name], expected), f"gradient of {name} is another one than with bf16 weights"
            assert bool(expected.any()), f"gradient of {name} is zero"


def main() -> int:
    """Measures the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--stepped", nargs="*", default=["nf4", "int4_w4a16_g128"], help="schemes of steps")
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--sizes", help="experts,top_k,hidden,intermediate")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    platform = probe_platform()
    device = torch.device("cuda" if platform.kind == "cuda" else "cpu")
    sizes = layer_sizes(options.sizes, platform)
    facts = {**provenance(platform, ("moereg", "torch", "triton")), **clocks(platform)}
    record: dict[str, Any] = {"schema": 1, **facts, "sizes": sizes, "layers": options.layers, "rank": options.rank}
    record |= {"copy_gbps": copy_rate(device), "restored": [], "steps": []}

    def store() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    plain = MoEProblem(**sizes, gradients={"hidden_states", "topk_weights", "adapters"}, adapter_rank=options.rank)
    weights = random_weights(plain, torch.Generator().manual_seed(0), device)
    print(f"a copy: {record['copy_gbps']:,.0f} GB/s\n| scheme | ms | GB/s | of a copy |\n|---|---|---|---|", flush=True)
    restored = torch.empty_like(weights.w13), torch.empty_like(weights.w2)
    for scheme in options.schemes:
        packed = quantize_weights(weights, scheme)
        ms = restoring(packed, restored)
        row = {"scheme": scheme, "ms": ms, "gbps": 1e3 * gigabytes(packed, restored) / ms}
        record["restored"].append(row)
        print(f"| {scheme} | {ms:.3f} | {row['gbps']:,.0f} | {row['gbps'] / record['copy_gbps']:.0%} |", flush=True)
        store()
    del restored
    generator = torch.Generator(device).manual_seed(0)
    print(f"| scheme | T | {' | '.join(STEPS)} |\n{'|---' * (2 + len(STEPS))}|", flush=True)
    for scheme in options.stepped:
        problem = dataclasses.replace(plain, quant=scheme)
        kernels: dict[str, list[MoEKernel]] = {"bf16": [], scheme: []}
        for index in range(options.layers):
            drawn = random_weights(plain, torch.Generator().manual_seed(index), device)
            packed = quantize_weights(drawn, scheme)
            dequantize_into(packed, drawn.w13, drawn.w2)
            kernels["bf16"].append(make_kernel(plain, drawn, select_backend(plain)))
            kernels[scheme].append(make_kernel(problem, packed, select_backend(problem)))
        for num_tokens in options.tokens:
            call = random_call(plain, num_tokens, "uniform", generator)
            sides = {
                name: Layers(own, [random_adapters(plain, device) for _ in own], call) for name, own in kernels.items()
            }
            found = {}
            for what in STEPS:
                if what != "forward":
                    check_equal(sides, what)
                found[what] = turns(sides, what)
            record["steps"].append({"scheme": scheme, "tokens": num_tokens, "ms": found})
            cells = [f"{ms[scheme]:.2f} / {ms['bf16']:.2f} = {ms[scheme] / ms['bf16']:.3f}" for ms in found.values()]
            print(f"| {scheme} | {num_tokens} | {' | '.join(cells)} |", flush=True)
            store()
    return 0


if __name__ == "__main__":
    sys.exit(main())

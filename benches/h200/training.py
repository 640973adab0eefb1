"""A layer's training step beside transformers' grouped_mm and eager formulations under autograd, in one process.

    python -m benches.h200.training [--tokens 4096 16384] [--routings uniform zipf] [--peers grouped_mm] [--json FILE]

Every gradient of all is compared with fp64 autograd of the reference before anything is timed, one expert after the
other; a gradient beyond its bound ends the program. Then five steps of each are timed, interleaved: a forward pass that
saves, forward and backward with frozen weights (gradients of tokens and routing weights), with all weights, and with
frozen weights and trained adapters of every expert, the last also with the layer under torch's checkpointing. The peers
multiply adapters out into the weights, as PEFT does for `target_parameters`, and their backward pass goes through the
gradient of those weights. Saved bytes are those of the tensors that autograd holds between the passes, other than
inputs and parameters.

On a CPU it runs whatever is selected there, for a rehearsal: `--sizes 4,2,64,48` are experts, top-k, hidden and
intermediate size.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from moereg.bench.inputs import Call, random_call, random_weights
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.layer.factory import make_kernel
from moereg.numerics.gradients import ReferenceGradients, reference_gradients
from moereg.platforms import Platform, probe_platform
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.weights.adapters import ExpertAdapters, adapter_shapes
from moereg.weights.permuted import ExpertWeights

MODEL: Final = "qwen3-30b-a3b"
RECOMPUTED: Final = "adapters, recomputed"
SAVING: Final = ("frozen", "all weights", "adapters")
STEPS: Final = ("forward", *SAVING, RECOMPUTED)
ROUNDS: Final = 7
REPEATS: Final = 10
"""Steps between two events, so that the host runs ahead of the GPU as it does in training."""

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExpertAdapters | None], torch.Tensor]


def grouped_mm_layer(weights: ExpertWeights) -> Layer:
    """The experts as transformers' `grouped_mm` computes them: sort, gather, multiply, activate, multiply, add up."""
    num_experts = len(weights.w13)
    grouped_mm = torch.nn.functional.grouped_mm

    def run(
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        w13, w2 = _multiplied_out(weights, adapters)
        top_k = topk_ids.shape[1]
        order = topk_ids.flatten().argsort()  # [N]
        counts = torch.histc(topk_ids.flatten().float(), bins=num_experts, min=0, max=num_experts - 1)
        offsets = counts.cumsum(0).int()
        rows = hidden_states[order // top_k]  # [N, H]
        gate, up = grouped_mm(rows, w13.transpose(1, 2), offs=offsets).chunk(2, dim=1)  # [N, I] each
        rows = grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=offsets)  # [N, H]
        rows = rows * topk_weights.flatten()[order, None].to(rows.dtype)
        return rows[order.argsort()].view(-1, top_k, rows.shape[1]).sum(1)

    return run


def eager_layer(weights: ExpertWeights) -> Layer:
    """The experts as transformers' `eager` computes them: those that have tokens, one after the other."""

    def run(
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        adapters: ExpertAdapters | None,
    ) -> torch.Tensor:
        w13, w2 = _multiplied_out(weights, adapters)
        out = torch.zeros_like(hidden_states)
        for expert in topk_ids.unique().tolist():
            token, slot = torch.nonzero(topk_ids == expert, as_tuple=True)
            gate, up = torch.nn.functional.linear(hidden_states[token], w13[expert]).chunk(2, dim=1)
            rows = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
            rows = rows * topk_weights[token, slot, None].to(rows.dtype)
            out = out.index_add(0, token, rows)
        return out

    return run


def _multiplied_out(weights: ExpertWeights, adapters: ExpertAdapters | None) -> tuple[torch.Tensor, torch.Tensor]:
    if adapters is None:
        return weights.w13, weights.w2
    w13 = torch.baddbmm(weights.w13, adapters.w13_b, adapters.w13_a, alpha=adapters.w13_scaling)
    return w13, torch.baddbmm(weights.w2, adapters.w2_b, adapters.w2_a, alpha=adapters.w2_scaling)


class Training:
    """Leaves of one call, and the layers that compute with them.

    Attributes:
        tensors: By name as in `Gradients`.
        layers: By name.
    """

    def __init__(
        self,
        problem: MoEProblem,
        weights: ExpertWeights,
        adapters: ExpertAdapters,
        layers: dict[str, Layer],
        call: Call,
    ) -> None:
        self.problem, self.weights, self.adapters, self.layers = problem, weights, adapters, layers
        self.tensors = {
            "hidden_states": call.hidden_states.requires_grad_(),
            "topk_weights": call.topk_weights.requires_grad_(),
            **weights.tensors(),
            **adapters.tensors(),
        }
        self.topk_ids = call.topk_ids
        self.grad_out = torch.randn_like(call.hidden_states.detach())

    def forward(self, name: str, what: str) -> torch.Tensor:
        """The output of a layer, with the graph of a step of `STEPS`."""
        with_adapters = what.startswith("adapters")
        for trained, tensors in (
            (what == "all weights", self.weights.tensors()),
            (with_adapters, self.adapters.tensors()),
        ):
            for tensor in tensors.values():
                tensor.requires_grad_(trained)
        given = self.tensors["hidden_states"], self.tensors["topk_weights"], self.topk_ids
        inputs = *given, self.adapters if with_adapters else None
        if what == RECOMPUTED:
            return checkpoint(self.layers[name], *inputs, use_reentrant=False)
        return self.layers[name](*inputs)

    def step(self, name: str, what: str) -> None:
        """One step of `STEPS`; gradients are made anew."""
        for tensor in self.tensors.values():
            tensor.grad = None
        out = self.forward(name, what)
        if what != "forward":
            out.backward(self.grad_out)

    def reference(self, what: str) -> ReferenceGradients:
        """All gradients of a step in fp64."""
        inputs = self.tensors["hidden_states"].detach(), self.tensors["topk_weights"].detach(), self.topk_ids
        adapters = self.adapters if what == "adapters" else None
        return reference_gradients(self.problem, self.weights, *inputs, self.grad_out, None, adapters)

    def errors(self, name: str, what: str, truth: ReferenceGradients) -> dict[str, tuple[float, float]]:
        """The largest error of each gradient of a step, as a share of its bound, and that error."""
        self.step(name, what)
        found: dict[str, tuple[float, float]] = {}
        grads = {key: tensor.grad for key, tensor in self.tensors.items() if tensor.grad is not None}
        trained = (self.adapters if what == "adapters" else self.weights).tensors().keys()
        assert grads.keys() == {"hidden_states", "topk_weights", *trained}, f"{name} has gradients of {sorted(grads)}"
        for one in truth.compare(grads):
            key, share = one.name.split()[0], one.error / one.bound if one.bound else one.error
            # NaN is larger than any number.
            if key not in found or not share <= found[key][0]:
                found[key] = share, one.error
        return found

    def saved_bytes(self, name: str, what: str) -> int:
        """Bytes that autograd keeps for the backward pass, other than inputs and parameters."""
        known = {tensor.untyped_storage().data_ptr() for tensor in (*self.tensors.values(), self.topk_ids)}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.forward(name, what)
        del out
        return sum(kept.values())

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Medians by layer and step; layers take turns."""
        found: dict[str, dict[str, list[float]]] = {name: {what: [] for what in STEPS} for name in self.layers}
        for what in STEPS:
            for number in range(ROUNDS + 1):
                for name in self.layers:
                    taken = timed(lambda name=name, what=what: self.step(name, what))
                    # The first compiles.
                    found[name][what] += [taken] if number else []
        return {name: {what: statistics.median(times) for what, times in row.items()} for name, row in found.items()}


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of one step out of `REPEATS`."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(REPEATS):
        step()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / REPEATS


PEERS: Final = {"grouped_mm": grouped_mm_layer, "eager": eager_layer}
"""On a CPU the first one's backward pass raises in float32; on a GPU the second waits for the device at each expert."""


def random_adapters(problem: MoEProblem, device: torch.device) -> ExpertAdapters:
    """Adapters a tenth as large as weights of unit rows, alpha twice the rank."""
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, shape in adapter_shapes(problem, problem.adapter_rank).items():
        tensor = torch.randn(shape, generator=generator, device=device) * (0.05 if name.endswith("b") else 1.0)
        tensors[name] = (tensor / shape[2] ** 0.5).to(problem.torch_dtype)
    return ExpertAdapters(**tensors, w13_scaling=2.0, w2_scaling=2.0)


def measure(
    problem: MoEProblem, tokens: list[int], routings: list[str], peers: Sequence[str] = tuple(PEERS)
) -> Iterator[dict[str, Any]]:
    """One row for each number of tokens and routing.

    Raises:
        AssertionError: A gradient is beyond its bound.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = random_weights(problem, torch.Generator().manual_seed(0), device)
    kernel = make_kernel(problem, weights, select_backend(problem, require="triton" if device.type == "cuda" else None))
    adapters = random_adapters(problem, device)

    def moereg(*inputs: torch.Tensor) -> torch.Tensor:
        *call, given = inputs
        return kernel(*call, adapters=given)

    peers = [peer for peer in peers if peer != "grouped_mm" or device.type == "cuda" or problem.dtype == "bfloat16"]
    layers: dict[str, Layer] = {"moereg": moereg, **{peer: PEERS[peer](weights) for peer in peers}}
    generator = torch.Generator(device).manual_seed(0)
    for num_tokens in tokens:
        for routing in routings:
            call = random_call(problem, num_tokens, routing, generator)
            training = Training(problem, weights, adapters, layers, call)
            errors: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in layers}
            for what in ("all weights", "adapters"):
                truth = training.reference(what)
                for name in layers:
                    found = training.errors(name, what, truth)
                    errors[name] |= {f"{key}, {what}": one for key, one in found.items()}
                # At full size it has as many bytes as all that is timed.
                del truth
            for key, (share, error) in errors["moereg"].items():
                assert share <= 1, f"T {num_tokens} {routing}: gradient of {key} has error {error:.2e}, {share} bounds"
            saved = {name: {what: training.saved_bytes(name, what) / num_tokens for what in SAVING} for name in layers}
            times = training.milliseconds()
            yield {"tokens": num_tokens, "routing": routing, "errors": errors, "saved": saved, "ms": times}


def _line(row: dict[str, Any]) -> str:
    ours, *peers = row["ms"].values()
    cells = [str(row["tokens"]), row["routing"]]
    for what in STEPS:
        theirs = min(peer[what] for peer in peers)
        cells.append(f"{ours[what]:.2f} / {theirs:.2f} = {theirs / ours[what]:.2f}x")
    for what in SAVING:
        cells.append(" / ".join(f"{row['saved'][name][what] / 1e3:.1f}" for name in row["saved"]))
    cells.append(" / ".join(f"{max(share for share, _ in errors.values()):.2f}" for errors in row["errors"].values()))
    return f"| {' | '.join(cells)} |"


def layer_sizes(given: str | None, platform: Platform) -> dict[str, Any]:
    """The sizes that `--sizes` gives, or the model's.

    Raises:
        SystemExit: With 3, if none are given on a machine without an NVIDIA GPU.
    """
    if given:
        names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
        return dict(zip(names, map(int, given.split(",")), strict=True))
    if platform.kind != "cuda":
        print(f"this bench needs an NVIDIA GPU or --sizes, got {platform}", file=sys.stderr)
        raise SystemExit(3)
    return get_shape(MODEL).problem_keywords()


def main() -> int:
    """Measures the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--routings", nargs="*", default=["uniform", "zipf"])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sizes", help="experts,top_k,hidden,intermediate")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    platform = probe_platform()
    sizes = layer_sizes(arguments.sizes, platform)
    problem = MoEProblem(**sizes, dtype=arguments.dtype, gradients=GRADIENTS, adapter_rank=arguments.rank)
    print(f"{problem} on {platform.device_name or platform}, ms: moereg / fastest peer = ratio; KB a token: each")
    columns = ["T", "routing", *STEPS, *(f"saved {what}" for what in SAVING), "error in bounds"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    rows = []
    for row in measure(problem, arguments.tokens, arguments.routings, arguments.peers):
        rows.append(row)
        print(_line(row), flush=True)
        if arguments.json is not None:
            facts = {**provenance(platform, ("moereg", "torch", "triton")), **clocks(platform)}
            found = {"schema": 1, **facts, "problem": problem.to_dict(), "rows": rows}
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

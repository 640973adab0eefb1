"""Training over two GPUs with FSDP2 beside one GPU on the same batches, with moereg and with transformers' grouped_mm.

    python -m benches.h200.fsdp2 --json benches/results/fsdp2_h200.json
    python -m benches.h200.fsdp2 --model tiny --length 32 --steps 3 --warmup 1 --limit 120    # on any CPU, by gloo

Layers of Qwen3-30B-A3B with its published sizes and random weights; `all` trains all weights, kept in fp32, `lora` has
adapters of rank 16 on all experts and the attention's projections, in fp32 above frozen weights in bf16. Everything is
computed in bf16 (`MixedPrecisionPolicy`), gradients are summed in fp32, and decoder layers are recomputed in the
backward pass. A rank has 8,192 tokens a step; one rank has those of all, one part after the other, and accumulates
gradients. The adapters are no library's: with moereg the experts are a `MoELayer`, with grouped_mm they are multiplied
out into the weights, as PEFT does.

Of each kind and implementation, `together` runs on all ranks and `alone` on the first. `difference` is the largest
relative difference of a step's loss from that of one rank. Peak memory is the first rank's, after the first step.
The script starts its ranks itself, prints each result as it comes, and ends at `--limit` with those that it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import moereg
from benches.h200.whole_training import ATTENTION, training_backend
from benches.markdown import table
from benches.whole_model.models import MODELS, make_model
from moereg.errors import is_lack_of_memory, one_line
from moereg.evidence.provenance import provenance
from moereg.integrations.transformers import register
from moereg.platforms import probe_platform

IMPLEMENTATIONS: Final = ("moereg", "grouped_mm")
KINDS: Final = ("all", "lora")
PLACES: Final = ("together", "alone")
_CHUNK: Final = 1024
"""Tokens for which the output head is computed at once."""
_SCALING: Final = 2.0
_POLICY: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class AdaptedLinear(torch.nn.Module):
    """A frozen linear layer and an adapter."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.randn(base.out_features, rank) * 0.01)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Both together."""
        return self.base(rows) + _SCALING * (rows @ self.a.T) @ self.b.T


class AdaptedExperts(torch.nn.Module):
    """Frozen experts of transformers with adapters: their factors in a `MoELayer`, or multiplied out by torch."""

    def __init__(self, experts: Any, top_k: int, rank: int, by_factors: bool) -> None:
        super().__init__()
        num_experts, columns, hidden_size = experts.gate_up_proj.shape
        width = experts.down_proj.shape[2]
        sizes = {"w13": (columns, hidden_size), "w2": (hidden_size, width)}
        drawn = {}
        for matrix, (out, into) in sizes.items():
            drawn[f"{matrix}_a"] = torch.randn(num_experts, rank, into) / into**0.5
            drawn[f"{matrix}_b"] = torch.randn(num_experts, out, rank) * 0.01
        self.experts = self.layer = None
        if by_factors:
            problem = moereg.MoEProblem(
                num_experts=num_experts,
                hidden_size=hidden_size,
                intermediate_size=width,
                top_k=top_k,
                gradients={"hidden_states", "topk_weights", "adapters"},
                adapter_rank=rank,
            )
            weights = moereg.ExpertWeights(w13=experts.gate_up_proj.detach(), w2=experts.down_proj.detach())
            adapters = moereg.ExpertAdapters(**drawn, w13_scaling=_SCALING, w2_scaling=_SCALING)
            self.layer = moereg.MoELayer(problem, weights, adapters=adapters)
        else:
            self.experts = experts
            for name, tensor in drawn.items():
                self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, rows: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """As transformers calls its experts."""
        if self.layer is not None:
            return self.layer(rows, topk_weights, topk_ids)
        held = {}
        for name, matrix in (("gate_up_proj", "w13"), ("down_proj", "w2")):
            b, a = self.get_parameter(f"{matrix}_b"), self.get_parameter(f"{matrix}_a")
            held[name] = self.experts.get_parameter(name) + _SCALING * b @ a
        return torch.func.functional_call(self.experts, held, (rows, topk_ids, topk_weights))


class Loss(torch.nn.Module):
    """A model whose output is its loss, without all logits at once; FSDP's outermost module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of all tokens [B,S] but the first of each sequence."""
        found = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()

        def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.model.lm_head(rows).float(), wanted, reduction="sum")

        parts = zip(found.split(_CHUNK), targets.split(_CHUNK), strict=True)
        return sum(checkpoint(part, *each, use_reentrant=False) for each in parts) / len(targets)


def build(kind: str, implementation: str, device: torch.device, mesh: Any, options: argparse.Namespace) -> Any:
    """The sharded model; its numbers are the same on every rank."""
    spec = MODELS[options.model]
    layers = options.layers or spec.config["num_hidden_layers"]
    model = make_model(dataclasses.replace(spec, config={**spec.config, "num_hidden_layers": layers}), device)
    model.set_experts_implementation(implementation)
    if kind == "all":
        model.float()
    else:
        model.requires_grad_(False)
        with torch.device(device):
            for layer in model.model.layers:
                for name in ATTENTION:
                    setattr(layer.self_attn, name, AdaptedLinear(getattr(layer.self_attn, name), options.rank))
                top_k, is_ours = model.config.num_experts_per_tok, implementation == "moereg"
                layer.mlp.experts = AdaptedExperts(layer.mlp.experts, top_k, options.rank, is_ours)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    whole = Loss(model.train())
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=_POLICY)
    return fully_shard(whole, mesh=mesh, mp_policy=_POLICY)


def train(whole: Any, batches: Sequence[torch.Tensor], options: argparse.Namespace, say: Any) -> dict[str, Any]:
    """Trains on these batches in each step; losses are this rank's means."""
    device = batches[0].device
    on_gpu = device.type == "cuda"
    trained = [each for each in whole.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr, fused=on_gpu)
    losses, times = [], []
    for step in range(options.steps):
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = whole(batch) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))  # Waits for the device.
        times.append(time.perf_counter() - start)
        if on_gpu and not step:
            torch.cuda.reset_peak_memory_stats()
        if step in (0, options.steps - 1) or step % 5 == 4:
            say(f"step {step + 1}: loss {losses[-1]:.4f}, {1e3 * times[-1]:.0f} ms")
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    return {"losses": losses, "seconds": statistics.median(times[options.warmup :]), "peak_bytes": peak}


def run_rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    """All cases on one rank; the first one appends a line of JSON to a file for each."""
    on_gpu, start = options.device == "cuda", time.monotonic()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks
    )
    grid = init_device_mesh(options.device, (options.ranks, 1), mesh_dim_names=PLACES)
    generator = torch.Generator().manual_seed(0)
    shape = options.ranks, options.sequences, options.length
    vocab = MODELS[options.model].config["vocab_size"]
    batches = list(torch.randint(vocab, shape, generator=generator).to(device))
    register()
    for kind in options.kinds:
        for implementation in options.implementations:
            for place in PLACES:
                torch.distributed.barrier()
                if place == "alone" and rank:
                    continue
                name = f"{kind} {implementation} {place}"

                def say(text: str, name: str = name) -> None:
                    if not rank:
                        print(f"{time.monotonic() - start:6.1f} s  {name}: {text}", flush=True)

                say("builds the model")
                row: dict[str, Any] = {"kind": kind, "experts": implementation, "place": place}
                try:
                    whole = build(kind, implementation, device, grid[place], options)
                    row |= train(whole, batches if place == "alone" else [batches[rank]], options, say)
                    if (kind, implementation) == ("all", "moereg"):
                        row["backend"] = training_backend(whole.model.model.layers[0].mlp.experts)
                except Exception as error:
                    # The other ranks wait for one that lacks memory until the limit.
                    if place == "together" or not is_lack_of_memory(error):
                        raise
                    row["error"] = one_line(str(error))[:300]
                if place == "together":
                    losses = torch.tensor(row["losses"], device=device)
                    torch.distributed.all_reduce(losses)
                    row["losses"] = (losses / options.ranks).tolist()
                if not rank:
                    with pathlib.Path(folder, "rows").open("a") as file:
                        file.write(json.dumps(row) + "\n")
                whole = None
                gc.collect()
                if on_gpu:
                    torch.cuda.empty_cache()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


HEADER: Final = ("trained", "experts", "ranks", "tokens a second", "peak memory", "losses", "difference")


def finish(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Adds tokens a second and differences to the rows, and gives the table."""
    tokens = options.ranks * options.sequences * options.length
    alone = {(row["kind"], row["experts"]): row for row in rows if row["place"] == "alone"}
    cells = []
    for row in rows:
        ranks = options.ranks if row["place"] == "together" else 1
        first = [row["kind"], row["experts"], str(ranks)]
        if "losses" not in row:
            cells.append([*first, row["error"], "", "", ""])
            continue
        row["tokens_per_second"] = tokens / row["seconds"]
        one = alone.get((row["kind"], row["experts"]), {}).get("losses")
        if ranks > 1 and one:
            pairs = zip(row["losses"], one, strict=True)
            row["difference"] = max(abs(mine - other) / abs(other) for mine, other in pairs)
        steps = sorted({0, options.steps // 2, options.steps - 1})
        losses = " ".join(f"{row['losses'][step]:.4f}" for step in steps)
        difference = f"{row['difference']:.1e}" if "difference" in row else ""
        peak = f"{row['peak_bytes'] / 1e9:.1f} GB"
        cells.append([*first, f"{row['tokens_per_second']:,.0f}", peak, losses, difference])
    return table(HEADER, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Starts the ranks, waits for them or for the limit, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("qwen3-30b-a3b", "tiny"), default="qwen3-30b-a3b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=0, help="of the model; 8 of a large one without it")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=list(IMPLEMENTATIONS))
    parser.add_argument("--sequences", type=int, default=2, help="of a rank in each step")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=16, help="of adapters")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4, help="steps that have no time")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which the ranks are ended")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if not options.layers and options.model != "tiny":
        options.layers = 8
    if not 0 <= options.warmup < options.steps:
        parser.error(f"--warmup must leave steps to measure, got {options.warmup} of {options.steps}")
    end = time.monotonic() + options.limit
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.spawn(run_rank, (options, folder), nprocs=options.ranks, join=False)
        outcome = ""
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > end:
                    outcome = f"ended after {options.limit:.0f} s"
                    break
        except Exception as error:
            outcome = str(error).strip()
        finally:
            for process in ranks.processes:
                process.kill()
        file = pathlib.Path(folder, "rows")
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    print(finish(rows, options))
    if outcome:
        print(outcome, file=sys.stderr)
    if options.json:
        kept = ("model", "layers", "ranks", "sequences", "length", "rank", "lr", "steps", "warmup")
        record = {
            "schema": 1,
            **provenance(probe_platform(), ("moereg", "torch", "triton", "transformers")),
            **{name: getattr(options, name) for name in kept},
            "outcome": outcome or "done",
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if outcome else 0


if __name__ == "__main__":
    raise SystemExit(main())

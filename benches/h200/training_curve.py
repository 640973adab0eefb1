"""A loss curve: a small MoE language model, trained with moereg and with transformers' own experts.

    python -m benches.h200.training_curve --json benches/results/training_curve_h200.json
    python -m benches.h200.training_curve --model tiny --steps 20 --json FILE       # on any CPU

A Qwen3-MoE of 8 layers, 32 experts, top-4, hidden size 512, over bytes, trains all its weights in bf16 with fused AdamW
on text that the bench writes: sentences of a small grammar, sums and sequences. Each step takes text that no step took
before, so its loss is a loss on new text. Four runs start from the same weights and take the same batches, each in a
process of its own: `eager`, `grouped_mm`, `moereg`, and `moereg` once more. Rounding grows from step to step, so the
end of one run says little: `grouped_mm`, the fastest of transformers', and `moereg` train on further texts (`--texts`)
too. The gap between `grouped_mm` and `eager` shows the effect of rounding alone.

The second run of moereg must have the losses and the final parameters of the first, bit for bit. In each of the first
ten steps, moereg's loss must be within 1 % of eager's, or of grouped_mm's on further texts. The mean of the last
quarter must be within 5 % of grouped_mm's on average over all texts, and within 10 % on each. Otherwise the bench
fails. Everything around the experts is told to be deterministic: attention is transformers' eager one, torch's
deterministic algorithms are on, and cuBLAS has a workspace of a fixed size. What torch still calls nondeterministic is
stored.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from benches.h200.whole_training import training_backend
from benches.training_page import curve_table
from benches.whole_model.models import Model, make_model
from moereg.errors import one_line
from moereg.evidence.provenance import clocks, provenance
from moereg.integrations.transformers import register
from moereg.platforms import probe_platform

RUNS: Final = {"eager": "eager", "grouped_mm": "grouped_mm", "moereg": "moereg", "moereg again": "moereg"}
"""Implementations by name of run."""

AGAIN: Final = ("grouped_mm", "moereg")
"""Runs on further texts."""

EARLY: Final = 10
"""Steps whose losses are compared one by one."""

BOUNDS: Final = {"early": 0.01, "last": 0.05, "each": 0.1}
"""Relative distances: of each early step's loss; of the last quarter's mean, averaged over texts and of each text."""

_SMALL: Final = {
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_TINY: Final = {
    **_SMALL,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS: Final[Mapping[str, Model]] = {"small": Model(_SMALL), "tiny": Model(_TINY)}

_DETERMINISTIC: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

_ADJECTIVES: Final = ("small", "old", "green", "quiet", "heavy", "bright", "round", "cold")
_NOUNS: Final = ("dog", "stone", "boat", "teacher", "garden", "lamp", "river", "girl", "wagon", "cloud")
_VERBS: Final = ("sees", "finds", "carries", "follows", "paints", "forgets")
_PLACES: Final = ("near the gate", "in the valley", "under the bridge", "by the sea", "behind the mill")


def sentences(seed: int) -> Iterator[str]:
    """Endless lines, the same for equal seeds."""
    draw = random.Random(seed)

    def thing() -> str:
        return f"the {draw.choice(_ADJECTIVES)} {draw.choice(_NOUNS)}"

    while True:
        kind = draw.randrange(4)
        first, second = draw.randrange(100), draw.randrange(100)
        if kind == 0:
            yield f"{thing().capitalize()} {draw.choice(_VERBS)} {thing()} {draw.choice(_PLACES)}.\n"
        elif kind == 1:
            yield f"{first} + {second} = {first + second}.\n"
        elif kind == 2:
            step = draw.randrange(1, 6)
            yield f"Counting by {step}: {', '.join(str(first + step * place) for place in range(5))}.\n"
        else:
            noun = draw.choice(_NOUNS)
            order = "more" if first > second else "fewer" if first < second else "as many"
            link = "as" if order == "as many" else "than"
            yield f"Here are {first} {noun}s and there are {second}: here are {order} {link} there.\n"


def text(num_bytes: int, seed: int = 0) -> bytes:
    """The first bytes of the lines of a seed."""
    parts: list[bytes] = []
    lines, length = sentences(seed), 0
    while length < num_bytes:
        parts.append(next(lines).encode("ascii"))
        length += len(parts[-1])
    return b"".join(parts)[:num_bytes]


def train(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run on the text of a seed: losses, a digest of final parameters, what torch named as not deterministic."""
    device, implementation = torch.device(options.device), RUNS[name]
    start = time.monotonic()
    model = make_model(MODELS[options.model], device).train()
    if implementation == "moereg":
        register()
    model.set_experts_implementation(implementation)
    model.set_attn_implementation("eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    warming = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / options.warmup))
    shape = (options.steps, options.sequences, options.length)
    tokens = torch.tensor(list(text(torch.Size(shape).numel(), seed))).view(shape).to(device)
    losses = []
    with warnings.catch_warnings(record=True) as said:
        # `once` names the same algorithm once in each run, wherever it is used.
        warnings.simplefilter("once")
        for batch in tokens:
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warming.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    backend = training_backend(model.model.layers[-1].mlp.experts) if implementation == "moereg" else None
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().view(torch.uint8).numpy().tobytes())
    named = {str(one.message).partition(" does not have")[0] for one in said if "deterministic" in str(one.message)}
    return {
        "name": name,
        "text": seed,
        "implementation": implementation,
        "backend": backend,
        "losses": [loss.item() for loss in losses],
        "digest": digest.hexdigest(),
        "warnings": sorted(one_line(each)[:60] for each in named),
        "seconds": time.monotonic() - start,
    }


def conclude(runs: Sequence[Mapping[str, Any]]) -> tuple[dict[str, bool], list[float], list[str]]:
    """Compares the runs.

    Returns:
        Whether the two runs of moereg have equal bits, by what has them; each text's relative distance of the last
        quarter's mean loss from grouped_mm's; and all that is wrong.
    """
    by_name = {(run["name"], run["text"]): run for run in runs}
    first, second = by_name["moereg", 0], by_name["moereg again", 0]
    equal = {"losses": first["losses"] == second["losses"], "parameters": first["digest"] == second["digest"]}
    wrong = [f"the second run's {what} differ in bits" for what, is_equal in equal.items() if not is_equal]
    ends = []
    for (name, seed), run in by_name.items():
        if name != "moereg":
            continue
        grouped_mm = by_name["grouped_mm", seed]["losses"]
        reference = by_name["grouped_mm" if seed else "eager", seed]
        distances = [abs(a / b - 1) for a, b in zip(run["losses"][:EARLY], reference["losses"], strict=False)]
        beyond = [distance for distance in distances if not distance <= BOUNDS["early"]]  # NaN is beyond.
        if beyond:
            wrong.append(f"moereg's first losses are up to {max(beyond):.1%} from {reference['name']}'s on text {seed}")
        start = -max(1, len(grouped_mm) // 4)
        ends.append(statistics.mean(run["losses"][start:]) / statistics.mean(grouped_mm[start:]) - 1)
    if not abs(statistics.mean(ends)) <= BOUNDS["last"]:
        wrong.append(f"moereg ends {statistics.mean(ends):+.1%} from grouped_mm on average")
    for seed, end in enumerate(ends):
        if not abs(end) <= BOUNDS["each"]:
            wrong.append(f"moereg ends {end:+.1%} from grouped_mm on text {seed}")
    return equal, ends, wrong


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="bytes of a sequence")
    parser.add_argument("--texts", type=int, default=4, help="texts, each with runs of its own")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20, help="steps until the learning rate is reached")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--child", nargs=4, metavar=("RUN", "TEXT", "FILE", "TURN"), help=argparse.SUPPRESS)
    return parser


def runs_of(num_texts: int) -> list[tuple[str, int]]:
    """Names of runs with their texts' seeds."""
    return [(name, seed) for seed in range(num_texts) for name in (AGAIN if seed else RUNS)]


def _in_processes(given: Sequence[str], num_texts: int) -> list[dict[str, Any]]:
    """All runs, each in a process of its own. They start at once, but train in turns."""
    with tempfile.TemporaryDirectory() as folder:
        turn = pathlib.Path(folder) / "turn"
        turn.touch()
        files = {run: pathlib.Path(folder) / f"{number}.json" for number, run in enumerate(runs_of(num_texts))}
        command = [sys.executable, "-m", "benches.h200.training_curve", *given, "--child"]
        processes = [
            subprocess.Popen([*command, name, str(seed), str(file), str(turn)], env=os.environ | _DETERMINISTIC)
            for (name, seed), file in files.items()
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(
                f"runs {', '.join(f'{name} {seed}' for name, seed in files)} ended with {codes}; their errors are above"
            )
        return [json.loads(file.read_text(encoding="utf-8")) for file in files.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains all, writes the file, prints the table last."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.child:
        name, seed, file, turn = options.child
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pathlib.Path(turn).open() as held:
            # Eager waits for the GPU at each expert, and would wait for others' work too.
            fcntl.flock(held, fcntl.LOCK_EX)
            found = train(name, int(seed), options)
        print(f"{name}, text {seed}: {found['seconds']:.0f} s", file=sys.stderr)
        pathlib.Path(file).write_text(json.dumps(found), encoding="utf-8")
        return 0
    import transformers

    platform = probe_platform()
    runs = _in_processes(given, options.texts)
    equal, ends, wrong = conclude(runs)
    record: dict[str, Any] = {
        "schema": 1,
        **provenance(platform, ("moereg", "torch", "triton")),
        "model": dict(MODELS[options.model].config),
        "steps": options.steps,
        "tokens": options.sequences * options.length,
        "lr": options.lr,
        "equal_bits": equal,
        "ends": ends,
        "wrong": wrong,
        "runs": runs,
        **clocks(platform),
    }
    record["versions"]["transformers"] = transformers.__version__
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(curve_table(record))
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

"""Qwen3-30B-A3B in transformers after `register()` alone, beside grouped_mm and what another commit prepared.

    python -m benches.h200.paired make REVISION FOLDER
    python -m benches.h200.registered FOLDER OUT.json [--model NAME] [--seconds S] [--phases prefill decode]

Random weights, made on the device. First the peak of memory over the same calls, of grouped_mm and then of moereg, its
first call included; then the other commit prepares the model, and all three take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benches.h200.paired import OLD
from benches.whole_model.measure import Decoding, difference
from benches.whole_model.models import CONTEXT, MODELS, Case, make_model
from moereg.bench.timing import capture, time_runs
from moereg.integrations.transformers import register

CASES = (
    Case("prefill", "eager", 1, 512),
    Case("prefill", "eager", 1, 4096),
    *(Case("decode", mode, batch, CONTEXT) for mode in ("eager", "graph") for batch in (1, 16)),
)


class Model:
    """The model, whose implementation of experts is switched by an attribute."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.model, self.device = make_model(MODELS[name], device), device
        self.decoding: dict[int, Decoding] = {}

    def use(self, name: str) -> None:
        """Switches all layers."""
        self.model.config._experts_implementation = name

    def run(self, case: Case) -> torch.Tensor:
        """Logits of a case."""
        if case.phase == "decode":
            return self.decoding[case.batch].step()
        generator = torch.Generator(self.device).manual_seed(case.tokens)
        ids = torch.randint(self.model.config.vocab_size, (case.batch, case.tokens), generator=generator,
                            device=self.device)  # fmt: skip
        logits: torch.Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
        return logits

    def peak(self, name: str) -> dict[str, float]:
        """Gibibytes before the first call of an implementation, and at most during calls of all cases."""
        self.use(name)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for case in CASES:
            self.run(case)
        return {"before": before / 2**30, "peak": torch.cuda.max_memory_allocated() / 2**30}


def in_turns(model: Model, case: Case, names: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Times of one case, all implementations in turns."""
    runs: dict[str, list[Callable[[], Any]]] = {}
    first: torch.Tensor | None = None
    row: dict[str, Any] = {"phase": case.phase, "mode": case.mode, "batch": case.batch, "tokens": case.tokens}
    for name in names:

        def run(name: str = name) -> torch.Tensor:
            model.use(name)
            return model.run(case)

        logits = run().clone()
        first = logits if first is None else first
        row[f"{name}_difference"] = difference(logits, first)["norm"]
        runs[name] = capture([run]) if case.mode == "graph" else [run]
    times = time_runs(runs, model.device, rounds=100, seconds=seconds)
    return row | {f"{name}_ms": timing.median_us / 1e3 for name, timing in times.items()}


@torch.no_grad()
def main() -> None:
    """Measures and prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="qwen3-30b-a3b")
    parser.add_argument("--seconds", type=float, default=3.0, help="of one median")
    parser.add_argument("--phases", nargs="+", default=["prefill", "decode"])
    options = parser.parse_args()
    sys.path.insert(0, str(options.folder))
    register()
    device = torch.device("cuda", torch.cuda.current_device())
    model = Model(options.model, device)
    model.use("grouped_mm")
    model.decoding = {case.batch: Decoding(model.model, case, device) for case in CASES if case.phase == "decode"}
    found: dict[str, Any] = {"memory": {name: model.peak(name) for name in ("grouped_mm", "moereg")}, "rows": []}
    print(json.dumps(found["memory"]), flush=True)
    importlib.import_module(f"{OLD}.integrations.transformers").prepare(model.model, progress=False)
    for case in (one for one in CASES if one.phase in options.phases):
        row = in_turns(model, case, ("grouped_mm", "moereg", OLD), options.seconds)
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

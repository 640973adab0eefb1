"""Whole models of transformers, by experts implementation: logits are compared, then tokens a second are measured.

    python -m benches.whole_model --model qwen3-30b-a3b --json benches/results/whole_model_qwen3-30b-a3b.json
    python -m benches.whole_model --model tiny --device cpu --json FILE

Models have their published sizes and random weights, drawn on the device. transformers' own implementations (eager,
batched_mm, grouped_mm) and moereg run the same weights in one process, in turns; each time is a median over rounds.

`moereg compare` measures a model of yours; this one measures by the same code what the page of whole models shows. As
a control, the distance of a model whose experts return zeros is stored.

A decode step computes one token for each sequence of a batch, on a static cache that holds 512 tokens of each: in a
CUDA graph, as plain calls, and compiled as `generate` does. Where memory runs out, that is the outcome. The file is
written after each case, and `--resume` measures what it lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from benches.whole_model.measure import OURS, QUANTIZED, PublishedModel, forget
from benches.whole_model.models import CONTEXT, MODELS, Case, Model, cases_of
from benches.whole_model.page import summary
from moereg.errors import is_lack_of_memory, one_line
from moereg.evidence.provenance import clocks, provenance
from moereg.integrations.transformers import restore
from moereg.platforms import probe_platform

MISSING: Final = {
    "sonicmoe": "downloads its kernel from the Hub at its first call",
    "deepgemm": "downloads its kernel from the Hub at its first call",
    "MegaBlocksMoeMLP": "a kernel of the Hub that takes the place of whole blocks; downloaded at the first call",
    "MXFP4 of transformers": "downloads its kernels from the Hub at its first call",
}
"""Further kernels for transformers, and why they are not here."""


@torch.no_grad()
def run(spec: Model, device: torch.device, record: dict[str, Any], save: Callable[[], None], options: Any) -> None:
    """Measures a model until the time is up, and saves after each case."""
    start = time.monotonic()
    whole = PublishedModel(spec, device, record, start + options.seconds)
    print(f"made and computed in fp32 after {time.monotonic() - start:.0f} s", flush=True)
    names = whole.names
    theirs = [name for name in names if name not in (OURS, QUANTIZED)]
    groups = [names]
    whole.prepare(free=True)
    restore(whole.model)
    try:
        whole.prepare()
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        # Copies of all weights do not fit beside them: moereg comes last, and frees what it has read.
        forget(error)
        restore(whole.model)
        forget()
        groups = [theirs, [name for name in names if name not in theirs]]
    record["in_turns"] = len(groups) == 1
    whole.count_experts()
    cases = cases_of(spec, device, options.compile)
    for number, group in enumerate(groups, 1):
        whole.names, whole.deadline = list(group), start + options.seconds * number / len(groups)
        if OURS in group and not record["in_turns"]:
            whole.prepare(free=True)
        whole.check()
        save()
        for case in [case for case in cases if case.mode != "compiled"]:
            whole.measure(case, options.case_seconds)
            save()
            print(f"after {time.monotonic() - start:.0f} s", flush=True)
            if case.phase == "decode" and case.mode == "eager" and not whole.is_late:
                whole.profile(case)
    if record["in_turns"]:
        _retry(whole, theirs, options.case_seconds)
        save()
        for case in [case for case in cases if case.mode == "compiled"]:
            whole.measure(case, options.case_seconds)
            save()


def _retry(whole: PublishedModel, theirs: Sequence[str], seconds: float) -> None:
    """Measures again, without moereg's kernels, what others had no memory for: the kernels may have taken it."""
    rows = whole.record["rows"]
    lacking = [row for row in rows if row["implementation"] in theirs and row.get("outcome") == "out of memory"]
    if not lacking or whole.is_late:
        return
    whole.record["rows"] = [row for row in rows if row not in lacking]
    restore(whole.model)
    names, whole.names = whole.names, list(dict.fromkeys(row["implementation"] for row in lacking))
    for case in dict.fromkeys(Case(*(row[name] for name in Case.__annotations__)) for row in lacking):
        whole.measure(case, seconds)
    whole.names = names
    whole.prepare()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures one model, writes the file, prints the table last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=500.0, help="no case starts later")
    parser.add_argument("--case-seconds", type=float, default=1.5, help="of one median")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file that were measured")
    options = parser.parse_args(arguments)
    import transformers

    device = torch.device(options.device)
    platform = probe_platform()
    record: dict[str, Any] = {
        "schema": 1,
        **provenance(platform, ("torch", "triton")),
        "model": options.model,
        "context": CONTEXT,
        "missing": MISSING,
        "left_out": [],
        "rows": [],
    }
    record["versions"]["transformers"] = transformers.__version__
    if options.resume and options.json.exists():
        earlier = json.loads(options.json.read_text(encoding="utf-8"))
        record["rows"] = [row for row in earlier["rows"] if "ms" in row or row["outcome"] == "out of memory"]
        record["host"] = earlier.get("host", [])

    def save() -> None:
        record.update(clocks(platform))
        new = options.json.with_suffix(".new")
        new.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(new, options.json)

    failed = ""
    try:
        run(MODELS[options.model], device, record, save, options)
    except Exception as error:
        traceback.print_exc()
        failed = record["failed"] = one_line(str(error))[:300]
        save()
    print(summary([record]))
    wrong = [name for name, row in record.get("checks", {}).items() if not row["passed"] and "outcome" not in row]
    return int(bool(failed or wrong))


if __name__ == "__main__":
    sys.exit(main())

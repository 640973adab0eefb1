"""Cost of a layer's kernels from an empty cache on an H200: in the process that serves, and shipped to it.

`python -m benches.h200.cold_start OUT.json FOLDER` takes Qwen3-30B-A3B in bf16 and fp8_block128, calls of 1 to 16,384
tokens. `warm_up` starts from an empty cache in FOLDER, and so does `moereg compile` for fp8_block128, whose folder is
moved before another process reads it. Afterwards calls of many sizes are made; what they compile is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

MODEL: Final = "qwen3-30b-a3b"
SHIPPED: Final = {"unquantized": False, "fp8_block128": True}
CALLED: Final = (1, 2, 3, 7, 16, 31, 64, 100, 200, 256, 500, 1000, 1024, 3000, 4096, 9999, 16384)


def serve(quant: str) -> dict[str, Any]:
    """Makes the layer, warms it up and calls it, in this process."""
    import torch

    from moereg.kernels.launch.ahead import counted_compilations
    from moereg.layer.factory import make_kernel
    from moereg.routing import softmax_topk
    from moereg.spec.model_shapes import get_shape
    from moereg.spec.problem import MoEProblem
    from moereg.testing.inputs import make_weights

    problem = MoEProblem(**get_shape(MODEL).problem_keywords(), quant=quant, max_num_tokens=max(CALLED))
    kernel = make_kernel(problem, make_weights(problem, torch.device("cuda")))
    torch.cuda.synchronize()
    with counted_compilations() as count:
        found = kernel.warm_up()
        warmed = count.compiled
        for tokens in CALLED:
            hidden_states = torch.randn(tokens, problem.hidden_size, device="cuda").bfloat16()
            logits = torch.randn(tokens, problem.num_experts, device="cuda")
            kernel(hidden_states, *softmax_topk(logits, top_k=problem.top_k, renormalize=True))
        torch.cuda.synchronize()
    return {
        "kernels": len(found.kernels),
        "compiled": found.num_compiled,
        "seconds": found.seconds,
        "calls": len(CALLED),
        "compiled_by_calls": count.compiled - warmed,
    }


def _process(environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def _served(quant: str, environment: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_process(environment, "-m", "benches.h200.cold_start", "--serve", quant))
    return found


def main() -> int:
    if sys.argv[1:2] == ["--serve"]:
        print(json.dumps(serve(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    from moereg.evidence.provenance import provenance
    from moereg.platforms import current_platform

    platform = current_platform()
    rows = []
    folder = options.folder
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"FOLDER has to be empty, so that nothing is compiled already, got {folder}")
    for quant, is_shipped in SHIPPED.items():
        rows.append({"quant": quant, "how": "warm_up", **_served(quant, {"TRITON_CACHE_DIR": str(folder / quant)})})
        print(rows[-1], flush=True)
        if not is_shipped:
            continue
        made, moved = folder / "made", folder / "moved"
        start = time.monotonic()
        wanted = ["--quant", quant, "--platform", str(platform), "--cache", str(made)]
        unused = {"TRITON_CACHE_DIR": str(folder / "unused")}
        _process(unused, "-m", "moereg", "compile", "--model", MODEL, *wanted)
        row = {"quant": quant, "how": "moereg compile, moved", "compile_seconds": time.monotonic() - start}
        made.rename(moved)
        rows.append({**row, **_served(quant, {**unused, "MOEREG_KERNEL_CACHE": str(moved)})})
        print(rows[-1], flush=True)
    document = {
        "schema": 1,
        **provenance(platform, ("torch", "triton")),
        "cores": os.cpu_count(),
        "note": f"{MODEL}, 1 to {max(CALLED):,} tokens; nothing is timed on the GPU, so that clocks do not matter.",
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(row["compiled_by_calls"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

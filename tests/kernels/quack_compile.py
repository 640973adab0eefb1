"""Compiles QuACK's kernels with our epilogues for a GPU that is not there, exactly as a layer's calls would.

Run as a script, since QuACK reads the architecture once. Prints one JSON object: `kernels`, a list with one object a
kernel, and `announced`, what a layer says before it compiles.

    python tests/kernels/quack_compile.py sm_90a
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["CUTE_DSL_ARCH"] = sys.argv[1]
os.environ["QUACK_ARCH"] = sys.argv[1].removesuffix("a")
os.environ["CUTE_DSL_KEEP"] = "ptx,cubin"
os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp()
os.environ["QUACK_CACHE_ENABLED"] = "0"

import quack.epilogue.frontend as frontend
import quack.gemm_runtime.host as host
import torch
import triton

from moereg.backends.cutlass_moe import QuackExperts
from moereg.kernels.quack.epilogues import GateUp, down_epilogue, gate_up_epilogue
from moereg.kernels.quack.products import grouped_product, select_config
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem

ARCH, DUMP = sys.argv[1], Path(os.environ["CUTE_DSL_DUMP_DIR"])
CODES, HALF = torch.float8_e4m3fn, torch.bfloat16
GATED = GateUp("silu", gated=True, alpha=1.0, beta=0.0, limit=None)
GELU = GateUp("gelu", gated=True, alpha=1.0, beta=0.0, limit=None)
GELU_TANH = GateUp("gelu_tanh", gated=True, alpha=1.0, beta=0.0, limit=None)
RELU2 = GateUp("relu2", gated=False, alpha=1.0, beta=0.0, limit=None)
CLAMPED = GateUp("swigluoai", gated=True, alpha=1.702, beta=1.0, limit=7.0)

NUM_TOKENS, NUM_ROUTES, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 32, 128, 8, 256, 128


def product(epilogue: Any, dtype: torch.dtype, *, gathers: bool, rows_per_expert: float, bias: bool) -> None:
    """One call as the backend makes it, on tensors of a CPU."""
    gated = bool(epilogue.outputs)
    columns = (2 if gated else 1) * INTERMEDIATE if gathers else HIDDEN
    depth = HIDDEN if gathers else INTERMEDIATE
    operands = {"bias": torch.empty(NUM_EXPERTS, columns)} if bias else {}
    if dtype == CODES:
        operands |= {"row_scale": torch.empty(NUM_ROUTES), "column_scale": torch.empty(NUM_EXPERTS, columns)}
    if not gathers:
        operands["weight"] = torch.empty(NUM_ROUTES)
    grouped_product(
        epilogue,
        select_config(int(ARCH[3:-2]), rows_per_expert, dtype == CODES),
        torch.empty(NUM_ROUTES, columns // 2 if gated else columns, dtype=HALF),
        torch.empty(NUM_TOKENS if gathers else NUM_ROUTES, depth, dtype=dtype),
        torch.empty(NUM_EXPERTS, columns, depth, dtype=dtype),
        torch.empty(NUM_EXPERTS + 1, dtype=torch.int32),
        torch.empty(NUM_ROUTES, dtype=torch.int32) if gathers else None,
        **operands,
    )


CASES = {
    "gate_up": lambda: product(
        gate_up_epilogue(GATED, False, False), HALF, gathers=True, rows_per_expert=512, bias=False
    ),
    "gate_up few clamp bias": lambda: product(
        gate_up_epilogue(CLAMPED, True, False), HALF, gathers=True, rows_per_expert=2, bias=True
    ),
    "gate_up codes": lambda: product(
        gate_up_epilogue(GATED, False, True), CODES, gathers=True, rows_per_expert=512, bias=False
    ),
    "gate_up gelu": lambda: product(
        gate_up_epilogue(GELU, False, False), HALF, gathers=True, rows_per_expert=512, bias=False
    ),
    "gate_up few gelu_tanh": lambda: product(
        gate_up_epilogue(GELU_TANH, False, False), HALF, gathers=True, rows_per_expert=2, bias=False
    ),
    "gate_up relu2": lambda: product(
        gate_up_epilogue(RELU2, False, False), HALF, gathers=True, rows_per_expert=512, bias=False
    ),
    "down codes": lambda: product(down_epilogue(False, True), CODES, gathers=False, rows_per_expert=512, bias=False),
    "down bias": lambda: product(down_epilogue(True, False), HALF, gathers=False, rows_per_expert=512, bias=True),
}


def resources(cubin: Path) -> dict[str, int]:
    """Registers and stack of the kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout
    (registers,), (stack,) = re.findall(r"REG:(\d+)", text), re.findall(r"STACK:(\d+)", text)
    return {"registers": int(registers), "stack": int(stack)}


def announced() -> list[str]:
    """What a layer says before its first call, for which it reads attributes of QuACK's objects."""
    said: list[str] = []
    logger = logging.getLogger("moereg")
    logger.addHandler(handler := logging.Handler(logging.INFO))
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.setLevel(logging.INFO)
    problem = MoEProblem(num_experts=NUM_EXPERTS, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, top_k=2)
    layer: Any = QuackExperts(problem, Platform.from_name(f"cuda:sm{ARCH[3:-1]}")).implementation
    for _ in range(2):
        with layer._announced(select_config(int(ARCH[3:-2]), 2, False), HALF):
            pass
    return said


def main() -> None:
    """Compiles every case."""
    launched: list[Any] = []
    # What the driver would be asked for, and what it would be told.
    host.get_max_active_clusters = lambda *_: 66
    for module in (host, frontend):
        module.run_gemm_epi_plan = lambda *args, **kwargs: launched.append((args, kwargs))
    found = []
    for name, case in CASES.items():
        before = {path: path.stat().st_mtime_ns for path in DUMP.glob("*.cubin")}
        started = time.process_time()
        case()
        seconds = time.process_time() - started
        # Equal epilogues give equal names, whatever the tiles.
        (cubin,) = (path for path in DUMP.glob("*.cubin") if path.stat().st_mtime_ns != before.get(path))
        ptx = cubin.with_suffix(".ptx").read_text()
        found.append(
            {
                "name": name,
                "wgmma": ptx.count("wgmma.mma_async"),
                "tcgen05": ptx.count("tcgen05.mma"),
                "seconds": round(seconds, 1),
                **resources(cubin),
            }
        )
    assert len(launched) == len(CASES)
    print(json.dumps({"kernels": found, "announced": announced()}))


if __name__ == "__main__":
    main()

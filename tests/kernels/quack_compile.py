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
from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.quack import down_epilogue, gate_up_epilogue, grouped_product, select_config
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem

ARCH, DUMP = sys.argv[1], Path(os.environ["CUTE_DSL_DUMP_DIR"])
CODES, HALF = torch.float8_e4m3fn, torch.bfloat16
GATED = ActivationConstant("silu", gated=True)
GELU = ActivationConstant("gelu", gated=True)
GELU_TANH = ActivationConstant("gelu_tanh", gated=True)
RELU2 = ActivationConstant("relu2")
CLAMPED = ActivationConstant("swigluoai", gated=True, alpha=1.702, beta=1.0, limit=7.0)

NUM_TOKENS, NUM_ROUTES, NUM_EXPERTS, HIDDEN, INTERMEDIATE = 32, 128, 8, 256, 128


# What a name says: which product, few rows an expert, biases, codes. Beside it the function of the first product.
CASES = {
    "gate_up": GATED,
    "gate_up few clamp bias": CLAMPED,
    "gate_up codes": GATED,
    "gate_up gelu": GELU,
    "gate_up few gelu_tanh": GELU_TANH,
    "gate_up relu2": RELU2,
    "down codes": None,
    "down bias": None,
}


def product(name: str) -> None:
    """One call as the backend makes it, on tensors of a CPU."""
    function, has_bias, has_codes = CASES[name], "bias" in name, "codes" in name
    gathers = function is not None
    epilogue: Any = gate_up_epilogue(function, has_bias, has_codes) if gathers else down_epilogue(has_bias, has_codes)
    gated = bool(epilogue.outputs)
    columns = (2 if gated else 1) * INTERMEDIATE if gathers else HIDDEN
    depth, dtype = HIDDEN if gathers else INTERMEDIATE, CODES if has_codes else HALF
    operands = {"bias": torch.empty(NUM_EXPERTS, columns)} if has_bias else {}
    if has_codes:
        operands |= {"row_scale": torch.empty(NUM_ROUTES), "column_scale": torch.empty(NUM_EXPERTS, columns)}
    if not gathers:
        operands["weight"] = torch.empty(NUM_ROUTES)
    grouped_product(
        epilogue,
        select_config(int(ARCH[3:-2]), 2 if "few" in name else 512, has_codes),
        torch.empty(NUM_ROUTES, columns // 2 if gated else columns, dtype=HALF),
        torch.empty(NUM_TOKENS if gathers else NUM_ROUTES, depth, dtype=dtype),
        torch.empty(NUM_EXPERTS, columns, depth, dtype=dtype),
        torch.empty(NUM_EXPERTS + 1, dtype=torch.int32),
        torch.empty(NUM_ROUTES, dtype=torch.int32) if gathers else None,
        **operands,
    )


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
    for name in CASES:
        before = {path: path.stat().st_mtime_ns for path in DUMP.glob("*.cubin")}
        product(name)
        # Equal epilogues give equal names, whatever the tiles.
        (cubin,) = (path for path in DUMP.glob("*.cubin") if path.stat().st_mtime_ns != before.get(path))
        ptx = cubin.with_suffix(".ptx").read_text()
        found.append(
            {
                "name": name,
                "wgmma": ptx.count("wgmma.mma_async"),
                "tcgen05": ptx.count("tcgen05.mma"),
                **resources(cubin),
            }
        )
    assert len(launched) == len(CASES)
    print(json.dumps({"kernels": found, "announced": announced()}))


if __name__ == "__main__":
    main()

"""Compiles the Gluon kernels of every shipped rule for sm_90a, without a device; prints one JSON row each.

Run as a separate program, since a process that interprets Triton cannot compile it. Of packed weights it compiles two
kernels, and with `--packed` those of every rule and kind of weight, and nothing else (three minutes).
"""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from moereg.kernels.hopper.config import (
    CONFIG_RULES,
    QUANTIZED_RULES,
    HopperGemmConfig,
    HopperQuantizedConfig,
    select_config,
)
from moereg.kernels.hopper.gemm import _grouped_kernel
from moereg.kernels.hopper.packed_config import PACKED_RULES, STAGED_ELEMENTS, HopperPackedRule
from moereg.kernels.hopper.packed_gemm import _packed_grouped_kernel, packed_format
from moereg.kernels.hopper.quantized_gemm import _quantized_grouped_kernel

CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _box(block: list[int], dtype: str = "bf16") -> str:
    layout = gl.NVMMASharedLayout(min(128, 2 * block[-1]), 16, len(block))
    return f"tensordesc<{dtype}{block},{layout!r}>"


def compile_one(
    name: str,
    config: HopperGemmConfig,
    is_gate_up: bool,
    by_token: bool,
    batched: bool = False,
    dtype: str = "bf16",
) -> dict[str, Any]:
    """The resources and instructions of one kernel; gated silu in the first GEMM, no bias.

    In fp16 the second GEMM weights its rows.
    """
    weighted = dtype == "fp16" and not is_gate_up
    columns = config.block_n // (4 if is_gate_up else 2)
    weights = [config.block_n // 16, 2, 8, 64] if is_gate_up else [1, config.block_n, 64]
    signature = {
        "out": _box([1, config.rows_of_store(columns), columns], dtype),
        "weights": _box(weights, dtype),
        "rows": f"*{dtype}" if by_token else _box([config.block_m // 2, 64], dtype),
        "slack_rows": "constexpr" if by_token else _box([config.slack, 64], dtype),
        "bias": "constexpr",
        "topk_weights": "*fp32" if weighted else "constexpr",
        **dict.fromkeys(("sorted_routes", "block_expert", "block_row", "block_end"), "*i32"),
        **dict.fromkeys(("num_blocks", "tile_counter"), "*i32"),
        **dict.fromkeys(("num_tiles_n", "group_m", "num_steps", "num_columns"), "i32"),
        **dict.fromkeys(("hidden_chunks", "stride_chunks"), "i32"),
        "max_tokens": "i32",
    }
    constants: dict[str, Any] = {
        "BY_TOKEN": by_token,
        "TOP_K": 8 if by_token else None,
        "MASK_K": False,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "SLACK": config.slack,
        "BODIES": config.bodies,
        "STAGES": config.num_stages,
        "ACTIVATION": "silu" if is_gate_up else None,
        "GATED": is_gate_up,
        "ALPHA": 1.0,
        "BETA": 0.0,
        "LIMIT": None,
        "OVERLAP": True,
        "bias": None,
        **({} if weighted else {"topk_weights": None}),
        **({"slack_rows": None} if by_token else {}),
        **({"sorted_routes": None} if batched else {"max_tokens": None}),
    }
    return _compile(name, _grouped_kernel, signature, constants)


def compile_quantized(
    name: str,
    config: HopperQuantizedConfig,
    dtype: str,
    is_gate_up: bool,
    grouped: bool,
    static: bool = False,
    stored_dtype: str = "bf16",
) -> dict[str, Any]:
    """The resources of a kernel of 8-bit codes, `fp8e4nv` or `i8`.

    With grouped or given scales the first GEMM writes codes; given ones are of whole tensors. The second one stores
    rows in bf16, or in fp16 and weighted.
    """
    weighted = stored_dtype == "fp16" and not is_gate_up
    writes_codes = is_gate_up and (grouped or static)
    operand = repr(gl.NVMMASharedLayout(128, 8, 2))
    stored = gl.NVMMASharedLayout(128, 8 if writes_codes else 16, 3)
    out = [1, 64, 128] if writes_codes else [1, 64, 64]
    signature = {
        "out": f"tensordesc<{dtype if writes_codes else stored_dtype}{out},{stored!r}>",
        "out_scale": "*fp32" if writes_codes else "constexpr",
        "static_scale": "*fp32" if writes_codes and static else "constexpr",
        "rows": f"tensordesc<{dtype}[64, 128],{operand}>",
        "row_scale": "*fp32",
        "weights": f"tensordesc<{dtype}[1, 128, 128],{gl.NVMMASharedLayout(128, 8, 3)!r}>",
        "column_scale": "*fp32",
        "topk_weights": "*fp32" if weighted else "constexpr",
        "sorted_routes": "*i32" if weighted else "constexpr",
        **dict.fromkeys(("block_expert", "block_row", "block_end", "num_blocks", "tile_counter"), "*i32"),
        **dict.fromkeys(("num_tiles_n", "group_m", "num_steps", "num_columns", "group_rows"), "i32"),
        **dict.fromkeys(("stride_row_scale", "stride_expert_scale", "stride_column_scale", "stride_out_scale"), "i32"),
        "stride_static": "i32",
    }
    constants: dict[str, Any] = {
        "bias": None,
        "GROUPED": grouped,
        "BY_COLUMN": not grouped and not static,
        "ROUNDED": gl.bfloat16 if writes_codes else None,
        "STAGES": config.num_stages,
        "BUFFERS": 1 if writes_codes else config.num_buffers,
        "ACTIVATION": "silu" if is_gate_up else None,
        "GATED": is_gate_up,
        "ALPHA": 1.0,
        "BETA": 0.0,
        "LIMIT": None,
        "MASK_N": False,
        "LEADS": config.leads and grouped,
        "EARLY": config.early,
        "OVERLAP": True,
        **{name: None for name in signature if signature[name] == "constexpr"},
    }
    return _compile(name, _quantized_grouped_kernel, signature, constants)


# As `packed_format` takes them: each way of restoring.
PACKED_WEIGHTS = {
    "mxfp4": ("float4_e2m1fn", 32, "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn", 16, "float8_e4m3fn"),
    "int4": ("uint4", 128, "float32"),
    "int8": ("int8", 0, "float32"),
}


def compile_packed(weights: str, rule: HopperPackedRule, is_gate_up: bool) -> dict[str, Any]:
    """The resources of a kernel of packed weights; gated silu in the first GEMM, a bias, an even number of steps."""
    config = rule.gate_up if is_gate_up else rule.down
    by_token = is_gate_up and not rule.copies_rows
    fmt = packed_format(*PACKED_WEIGHTS[weights])
    assert fmt is not None
    words = 16 if fmt.element == "int8" else 8
    columns = 64 // (2 if is_gate_up else 1)

    def words_box(block: list[int]) -> str:
        return f"tensordesc<i32{block},{gl.NVMMASharedLayout(min(128, 4 * block[-1]), 32, 2)!r}>"

    signature = {
        "out": _box([1, STAGED_ELEMENTS // columns, columns]),
        "weights": words_box([config.columns * words // 32, 32]),
        "scales": words_box([config.columns // 8, 8]) if fmt.scales else "constexpr",
        "row_scale": "constexpr" if fmt.scales == "float32" else "*fp32",
        "rows": "*bf16" if by_token else _box([config.block_m // 2, 64]),
        "slack_rows": "constexpr" if by_token or not config.slack else _box([config.slack, 64]),
        "bias": "*bf16",
        **dict.fromkeys(("sorted_routes", "block_expert", "block_row", "block_end"), "*i32"),
        **dict.fromkeys(("num_blocks", "tile_counter"), "*i32"),
        **dict.fromkeys(("num_tiles_n", "group_m", "num_steps", "num_columns"), "i32"),
        **dict.fromkeys(("scale_words", "hidden_chunks", "stride_chunks"), "i32"),
    }
    constants: dict[str, Any] = {
        "BY_TOKEN": by_token,
        "TOP_K": 8 if by_token else None,
        "MASK_K": False,
        "BLOCK_N": config.block_n,
        "BLOCK_M": config.block_m,
        "SLACK": config.slack,
        "STAGES": config.num_stages(4 * words),
        "CONSUMERS": config.num_consumers,
        "ODD": False,
        "FORMAT": fmt,
        "ACTIVATION": "silu" if is_gate_up else None,
        "GATED": is_gate_up,
        "ALPHA": 1.0,
        "BETA": 0.0,
        "LIMIT": None,
        "CONSUMER_REGISTERS": config.consumer_registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "OVERLAP": True,
        **{name: None for name in ("scales", "row_scale", "slack_rows") if signature[name] == "constexpr"},
    }
    name = f"{'gate_up' if is_gate_up else 'down'} {weights} {config.block_m}x{config.block_n}"
    options = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    return _compile(name, _packed_grouped_kernel, signature, constants, **options)


def _compile(
    name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], **options: int
) -> dict[str, Any]:
    names = kernel.arg_names
    kinds = {**signature, **dict.fromkeys(constants, "constexpr")}
    aligned = [
        place for place, argument in enumerate(names) if kinds[argument].startswith("*") and argument != "tile_counter"
    ]
    source = GluonASTSource(
        fn=kernel,
        signature={argument: kinds[argument] for argument in names},
        constexprs={(names.index(argument),): value for argument, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in (*aligned, names.index("num_columns"))},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "launch_pdl": True, **options}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        stack_bytes = int(re.findall(r"STACK:(\d+)", usage)[-1])
        # What spills writes to the stack; to list a kernel's instructions takes half a second.
        sass = _cuobjdump("-sass", cubin.name) if stack_bytes else ""
    return {
        "name": name,
        "registers": int(re.findall(r"REG:(\d+)", usage)[-1]),
        "stack_bytes": stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": len(re.findall("wgmma.mma_async", compiled.asm["ptx"])),
        "bulk_tensor": len(re.findall(r"cp\.async\.bulk\.tensor", compiled.asm["ptx"])),
        "saturating": compiled.asm["ptx"].count("cvt.rn.satfinite.e4m3x2.f32"),
        "spills": len(re.findall(r"\bSTL\b", sass)),
    }


def _cuobjdump(option: str, path: str) -> str:
    return subprocess.run([CUOBJDUMP, option, path], capture_output=True, text=True, check=True).stdout


def compile_16_bits() -> Iterator[dict[str, Any]]:
    done = set()
    # In the batched format rows lie in order, so its rules are those for infinitely many columns.
    batched_rules = [select_config(rule.max_rows_per_expert, math.inf, 1) for rule in CONFIG_RULES]
    for config in dict.fromkeys(rule.down for rule in CONFIG_RULES):
        yield compile_one(f"down fp16 {config.block_m}x{config.block_n}", config, False, False, dtype="fp16")
    for rule, batched in [*((rule, False) for rule in CONFIG_RULES), *((rule, True) for rule in batched_rules)]:
        for name, config, is_gate_up in (("gate_up", rule.gate_up, True), ("down", rule.down, False)):
            by_token = is_gate_up and not rule.copies_rows and not batched
            if (config, is_gate_up, by_token, batched) not in done:
                done.add((config, is_gate_up, by_token, batched))
                source = " by token" if by_token else " batched" if batched else ""
                label = f"{name} {config.block_m}x{config.block_n}{source}"
                yield compile_one(label, config, is_gate_up, by_token, batched)


def compile_8_bits() -> Iterator[dict[str, Any]]:
    for rule in QUANTIZED_RULES:
        most = rule.max_rows_per_expert
        if rule.grouped:
            yield compile_quantized(f"gate_up fp8e4nv grouped {most}", rule.gate_up, "fp8e4nv", True, True)
            for stored in ("bf16", "fp16"):
                name = f"down fp8e4nv grouped {stored} {most}"
                yield compile_quantized(name, rule.down, "fp8e4nv", False, True, stored_dtype=stored)
        else:
            # Either dtype's products and either GEMM's epilogue.
            yield compile_quantized(f"gate_up fp8e4nv {most}", rule.gate_up, "fp8e4nv", True, False)
            for stored in ("bf16", "fp16"):
                yield compile_quantized(f"down i8 {stored} {most}", rule.down, "i8", False, False, stored_dtype=stored)
            yield compile_quantized(f"gate_up fp8e4nv given {most}", rule.gate_up, "fp8e4nv", True, False, True)
            yield compile_quantized(f"down fp8e4nv given {most}", rule.down, "fp8e4nv", False, False, True)


if __name__ == "__main__":
    kernels: Iterable[dict[str, Any]]
    if sys.argv[1:] == ["--packed"]:
        every = itertools.product(PACKED_WEIGHTS, PACKED_RULES, (True, False))
        kernels = itertools.starmap(compile_packed, every)
    else:
        # Tokens by their routes and two halves a consumer; boxes and three consumers.
        some = (("mxfp4", PACKED_RULES[1], True), ("int4", PACKED_RULES[2], False))
        kernels = itertools.chain(compile_16_bits(), compile_8_bits(), itertools.starmap(compile_packed, some))
    for row in kernels:
        print(json.dumps(row), flush=True)

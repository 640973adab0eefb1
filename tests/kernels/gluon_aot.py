"""Compiles the Gluon kernels of every shipped rule for sm_90a, without a device; prints one JSON row each.

Run as a separate program, since its process becomes one for a device that is not there. Of packed weights it compiles
two kernels, and with `--packed` those of every rule and kind of weight, and nothing else (three minutes).
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch

from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.config import (
    CONFIG_RULES,
    QUANTIZED_BLOCK_M,
    QUANTIZED_RULES,
    HopperGemmConfig,
    HopperQuantizedConfig,
    select_config,
)
from moereg.kernels.hopper.gemm import down_gemm, gate_up_gemm
from moereg.kernels.hopper.packed_config import PACKED_RULES, HopperPackedRule
from moereg.kernels.hopper.packed_gemm import down_packed, gate_up_packed
from moereg.kernels.hopper.quantized_gemm import quantized_down_gemm, quantized_gate_up_gemm
from moereg.kernels.launch.ahead import Launches, Target, become
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.block_map import batch_workspace_numel, plan_batches
from moereg.kernels.rows.plan import RoutePlan, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import GUARD_ROWS
from tests.kernels.aot_compile import cubin_usage

TOKENS, TOP_K, EXPERTS, HIDDEN, INTER = 1024, 8, 64, 2048, 768
ROUTES = TOKENS * TOP_K

SILU = GateUpEpilogue("silu", gated=True)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan_of(block_m: int, slack: int = 0) -> RoutePlan:
    workspace = empty(route_workspace_numel(TOKENS, TOP_K, EXPERTS, 16), dtype=torch.int32)
    return sort_routes(empty(TOKENS, TOP_K, dtype=torch.int32), None, EXPERTS, EXPERTS, block_m, workspace, slack=slack)


def launch_16_bits(
    config: HopperGemmConfig,
    is_gate_up: bool,
    by_token: bool,
    batched: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Gated silu in the first GEMM, no bias. In fp16 the second GEMM weights its rows."""
    sizes = (EXPERTS, TOKENS) if batched else (GUARD_ROWS + ROUTES,)
    intermediate = empty(*sizes, INTER, dtype=dtype)
    plan: Any = plan_of(config.block_m, config.slack)
    if batched:
        workspace = empty(batch_workspace_numel(EXPERTS, TOKENS, 16), dtype=torch.int32)
        counts = empty(EXPERTS, dtype=torch.int32)
        plan = plan_batches(counts, TOKENS, config.block_m, workspace, slack=config.slack)
    if is_gate_up:
        rows = empty(TOKENS if by_token else math.prod(sizes), HIDDEN, dtype=dtype)
        w13, top_k = empty(EXPERTS, 2 * INTER, HIDDEN, dtype=dtype), TOP_K if by_token else None
        gate_up_gemm(intermediate, rows, w13, plan, config, SILU, top_k=top_k, overlap=True)
    else:
        out, w2 = empty(*sizes, HIDDEN, dtype=dtype), empty(EXPERTS, HIDDEN, INTER, dtype=dtype)
        weights = empty(TOKENS, TOP_K, dtype=torch.float32) if dtype == torch.float16 else None
        down_gemm(out, intermediate, w2, plan, config, topk_weights=weights, overlap=True)


def launch_8_bits(
    config: HopperQuantizedConfig,
    dtype: torch.dtype,
    is_gate_up: bool,
    grouped: bool,
    static: bool = False,
    stored: torch.dtype = torch.bfloat16,
) -> None:
    """With grouped or given scales the first GEMM writes codes; given ones are of whole tensors.

    The second one stores rows in bf16, or in fp16 and weighted.
    """
    columns, depth = (2 * INTER, HIDDEN) if is_gate_up else (HIDDEN, INTER)
    group = 128 if grouped else 0

    def rows_of(size: int, guard: int = 0) -> QuantizedRows:
        scale = empty(size // 128 if grouped else 1, ROUTES, dtype=torch.float32).T
        return QuantizedRows(empty(guard + ROUTES, size, dtype=dtype), scale, group)

    group_rows = 128 if grouped else INTER if static and is_gate_up else HIDDEN if static else 1
    scale = empty(EXPERTS, columns // group_rows, depth // 128 if grouped else 1, dtype=torch.float32)
    matrices = QuantizedMatrices(empty(EXPERTS, columns, depth, dtype=dtype), scale, group_rows, group)
    plan = plan_of(QUANTIZED_BLOCK_M)
    if is_gate_up:
        coded: dict[str, Any] = {}
        out: torch.Tensor | QuantizedRows = empty(GUARD_ROWS + ROUTES, INTER, dtype=stored)
        if grouped or static:
            out = rows_of(INTER, GUARD_ROWS)
            coded = {"rounded": stored, "static_scale": empty(1, dtype=torch.float32) if static else None}
        quantized_gate_up_gemm(out, rows_of(HIDDEN), matrices, plan, SILU, config, **coded, overlap=True)
    else:
        weights = empty(TOKENS, TOP_K, dtype=torch.float32) if stored == torch.float16 else None
        rows = empty(GUARD_ROWS + ROUTES, HIDDEN, dtype=stored)
        quantized_down_gemm(rows, rows_of(INTER), matrices, plan, config, topk_weights=weights, overlap=True)


# As `packed_format` takes them: each way of restoring.
PACKED_WEIGHTS = {
    "mxfp4": ("float4_e2m1fn", 32, "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn", 16, "float8_e4m3fn"),
    "int4": ("uint4", 128, "float32"),
    "int8": ("int8", 0, "float32"),
}


def launch_packed(weights: str, rule: HopperPackedRule, is_gate_up: bool) -> None:
    """Gated silu in the first GEMM, a bias, an even number of steps."""
    element, group, scale_dtype = PACKED_WEIGHTS[weights]
    columns, depth = (2 * INTER, HIDDEN) if is_gate_up else (HIDDEN, INTER)
    words = empty(EXPERTS, depth // 64, columns, 16 if element == "int8" else 8, dtype=torch.int32)
    group_scale = None
    if group:
        kind, per_word = (torch.float32, 1) if scale_dtype == "float32" else (torch.int32, 64 * 2 // group)
        per_word = min(4, max(1, per_word))
        group_scale = empty(EXPERTS, depth // (group * per_word), columns, dtype=kind)
    row_scale = None if scale_dtype == "float32" and group else empty(EXPERTS, columns, dtype=torch.float32)
    matrix = PackedMatrix(words, element, group, scale_dtype, group_scale, None, row_scale)
    config, bias = rule.gate_up if is_gate_up else rule.down, empty(EXPERTS, columns)
    plan, intermediate = plan_of(config.block_m, config.slack), empty(GUARD_ROWS + ROUTES, INTER)
    if is_gate_up:
        rows, top_k = (empty(ROUTES, HIDDEN), None) if rule.copies_rows else (empty(TOKENS, HIDDEN), TOP_K)
        epilogue = GateUpEpilogue("silu", gated=True, bias=bias)
        gate_up_packed(intermediate, rows, matrix, plan, config, epilogue, top_k=top_k, overlap=True)
    else:
        down_packed(empty(GUARD_ROWS + ROUTES, HIDDEN), intermediate, matrix, plan, config, bias=bias, overlap=True)


def launch_all_16_bits() -> Iterator[str]:
    done = set()
    # In the batched format rows lie in order, so its rules are those for infinitely many columns.
    batched_rules = [select_config(rule.max_rows_per_expert, math.inf, 1) for rule in CONFIG_RULES]
    for config in dict.fromkeys(rule.down for rule in CONFIG_RULES):
        launch_16_bits(config, False, False, dtype=torch.float16)
        yield f"down fp16 {config.block_m}x{config.block_n}"
    for rule, batched in [*((rule, False) for rule in CONFIG_RULES), *((rule, True) for rule in batched_rules)]:
        for name, config, is_gate_up in (("gate_up", rule.gate_up, True), ("down", rule.down, False)):
            by_token = is_gate_up and not rule.copies_rows and not batched
            if (config, is_gate_up, by_token, batched) not in done:
                done.add((config, is_gate_up, by_token, batched))
                source = " by token" if by_token else " batched" if batched else ""
                launch_16_bits(config, is_gate_up, by_token, batched)
                yield f"{name} {config.block_m}x{config.block_n}{source}"


def launch_all_8_bits() -> Iterator[str]:
    codes = torch.float8_e4m3fn
    for rule in QUANTIZED_RULES:
        most = rule.max_rows_per_expert
        for kind, dtype in (("fp8e4nv", codes), ("i8", torch.int8)):
            # Either dtype's products and either GEMM's epilogue.
            label = f"{kind}{' grouped' if rule.grouped else ''}"
            if dtype == codes:
                launch_8_bits(rule.gate_up, dtype, True, rule.grouped)
                yield f"gate_up {label} {most}"
            if (dtype == codes) == rule.grouped:
                for stored in (torch.bfloat16, torch.float16):
                    launch_8_bits(rule.down, dtype, False, rule.grouped, stored=stored)
                    yield f"down {label} {stored} {most}"
        if not rule.grouped:
            launch_8_bits(rule.gate_up, codes, True, False, True)
            yield f"gate_up fp8e4nv given {most}"
            launch_8_bits(rule.down, codes, False, False, True)
            yield f"down fp8e4nv given {most}"


def launch_all_packed(every: bool) -> Iterator[str]:
    # Tokens by their routes and two halves a consumer; boxes and three consumers.
    some = (("mxfp4", PACKED_RULES[1], True), ("int4", PACKED_RULES[2], False))
    for weights, rule, is_gate_up in itertools.product(PACKED_WEIGHTS, PACKED_RULES, (True, False)) if every else some:
        launch_packed(weights, rule, is_gate_up)
        yield f"{'gate_up' if is_gate_up else 'down'} {weights} {rule.down.block_m}x{rule.down.block_n}"


def compile_last(name: str, launches: Launches) -> dict[str, Any]:
    """The resources and instructions of the kernel that was launched last."""
    compiled, _, _ = launches.take()[-1].compile()
    registers, stack_bytes = cubin_usage(compiled.asm["cubin"])
    return {
        "name": name,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": compiled.asm["ptx"].count("wgmma.mma_async"),
        "bulk_tensor": compiled.asm["ptx"].count("cp.async.bulk.tensor"),
        "saturating": compiled.asm["ptx"].count("cvt.rn.satfinite.e4m3x2.f32"),
    }


if __name__ == "__main__":
    target = Target.of("cuda", "sm90")
    assert target is not None
    launches = become(target)
    only_packed = sys.argv[1:] == ["--packed"]
    names = launch_all_packed(only_packed)
    if not only_packed:
        names = itertools.chain(launch_all_16_bits(), launch_all_8_bits(), names)
    for name in names:
        print(json.dumps(compile_last(name, launches)), flush=True)

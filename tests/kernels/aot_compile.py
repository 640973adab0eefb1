"""Compiles the Triton kernels for devices that are not there, exactly as their launchers would launch them.

Run as a script, in a separate process: a process whose Triton interprets kernels cannot compile them. Prints one JSON
object: of each target a list with one object a compiled kernel. Without cases it compiles all.

    python tests/kernels/aot_compile.py sm_90=prefill,tall sm_80
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from moereg.kernels.gemm.config import GemmPair, GemvPair, SinglePair
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.gemm.fit import CallShape, fit_pair
from moereg.kernels.gemm.flagged import both_gemms
from moereg.kernels.gemm.gemv import down_gemv, gate_up_gemv
from moereg.kernels.gemm.grouped import down_gemm, gate_up_gemm
from moereg.kernels.gemm.rules import select_config, shares_launch
from moereg.kernels.gemm.single import down_single
from moereg.kernels.launch import device as device_limits
from moereg.kernels.launch.device import can_overlap
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.quantized.operands import RowFormat
from moereg.kernels.quantized.rows_moved import quantize_tokens, restore_tokens
from moereg.kernels.read import READ_CONFIGS, num_read_programs, read_words
from moereg.kernels.rows import arrived, exchanged
from moereg.kernels.rows.batches import lay_out_batches, sum_batches
from moereg.kernels.rows.block_map import BlockMap, batch_workspace_numel, plan_batches
from moereg.kernels.rows.copy import copy_rows
from moereg.kernels.rows.direct import DirectRoutes
from moereg.kernels.rows.gathered import keep_own_routes, pad_tokens, sum_of_ranks
from moereg.kernels.rows.holders import Holders
from moereg.kernels.rows.plan import RoutePlan, SortConfig, max_num_blocks, route_workspace_numel
from moereg.kernels.rows.reduce import ReduceConfig, reduce_routes, reduce_sorted_rows
from moereg.kernels.rows.rooms import FilledRooms, empty_rooms, fill_rooms, place_routes, spread_tokens
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import FLAG_WORDS
from moereg.prepare_finalize.exchange import RowLayout
from moereg.spec.quant_schemes import WHOLE, QuantFormat, get_scheme

TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_89": (GPUTarget("cuda", 89, 32), 99 * 1024),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": (GPUTarget("cuda", 100, 32), 227 * 1024),
    "sm_120": (GPUTarget("cuda", 120, 32), 99 * 1024),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024),
}

# Assembly that proves a product on matrix units; a tile too low for wgmma or tcgen05 uses mma.sync.
MATRIX_INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "tcgen05.mma", "v_mfma")

# tokens, experts, top_k, hidden, intermediate, dtype, activation, bias; in the batched format tokens are max_T
CASES: dict[str, tuple[int, int, int, int, int, torch.dtype, str, bool]] = {
    "one_token": (1, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "decode": (16, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "prefill": (4096, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "gpt_oss_prefill": (4096, 32, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "middle": (512, 64, 8, 2048, 1408, torch.bfloat16, "silu", False),
    "small": (128, 64, 8, 2048, 704, torch.float16, "gelu_tanh", False),
    "tall": (256, 128, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "odd": (4096, 8, 2, 511, 129, torch.bfloat16, "gelu", True),
    "not_gated": (4096, 64, 4, 2688, 1856, torch.bfloat16, "relu2", False),
    "fp32_decode": (16, 128, 8, 2048, 768, torch.float32, "silu", False),
    "fp32_prefill": (4096, 128, 8, 2048, 768, torch.float32, "silu", False),
    "batched_decode": (64, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "batched_prefill": (4096, 32, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "int4_one_token": (1, 8, 2, 4096, 14336, torch.bfloat16, "silu", False),
    "mxfp4_one_token": (1, 128, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "int4_decode": (16, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "int4_g32_zp_decode": (16, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "mxfp4_decode": (16, 128, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "mxfp4_tall": (64, 128, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "nvfp4_decode": (16, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "int8_decode": (16, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "nvfp4_fp16_middle": (512, 64, 8, 2048, 1408, torch.float16, "silu", False),
    "int4_prefill": (4096, 8, 2, 4096, 14336, torch.bfloat16, "silu", False),
    "int4_gall_zp_prefill": (4096, 8, 2, 4096, 14336, torch.bfloat16, "silu", False),
    "mxfp4_prefill": (4096, 128, 4, 2880, 2880, torch.bfloat16, "swigluoai", True),
    "nvfp4_prefill": (4096, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
    "int8_prefill": (4096, 128, 8, 2048, 768, torch.bfloat16, "silu", False),
}
# Cases with packed weights: scheme.
PACKED = {
    "int4_one_token": "int4_w4a16_g128",
    "mxfp4_one_token": "mxfp4_w4a16",
    "int4_decode": "int4_w4a16_g128",
    "int4_g32_zp_decode": "int4_w4a16_g32_zp",
    "mxfp4_decode": "mxfp4_w4a16",
    "mxfp4_tall": "mxfp4_w4a16",
    "nvfp4_decode": "nvfp4_w4a16",
    "int8_decode": "int8_w8a16",
    "nvfp4_fp16_middle": "nvfp4_w4a16",
    "int4_prefill": "int4_w4a16_g128",
    "int4_gall_zp_prefill": "int4_w4a16_gall_zp",
    "mxfp4_prefill": "mxfp4_w4a16",
    "nvfp4_prefill": "nvfp4_w4a16",
    "int8_prefill": "int8_w8a16",
}


# Of kernels that are compiled for each case anew: others plan, and the case "routing" has their ways.
IN_EVERY_CASE = ("both", "gate_up", "down", "quantize", "amax", "coded")


class OfflineDriver(DriverBase):
    """Answers for a target without a device. Triton keeps compiled kernels by device, so each target is another one."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self._target = target
        self._device = device

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> Any:
        raise NotImplementedError

    def clear_cache(self, cache: Any) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def compiling_only(done: set[str] | None = None) -> Iterator[list[tuple[str, Any]]]:
    """Turns launches into compilations; yields the list of (kernel name, compiled kernel) that they fill.

    Args:
        done: names of kernels whose launches are left out; those that are compiled here, but for products and for what
            rounds, are added, so that others than a case is about are compiled once.
    """
    compiled: list[tuple[str, Any]] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if done is not None:
            if self.__name__ in done:
                return None
            if not any(word in self.__name__ for word in IN_EVERY_CASE):
                done.add(self.__name__)
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self.__name__, kernel))
        return kernel

    JITFunction.run = warm_up
    try:
        yield compiled
    finally:
        JITFunction.run = run


def launch_routing(shared_bytes: int) -> None:
    """Sorting in one launch, sorting in three, both reductions, the copy, and what the batched format lays out."""
    overlap = can_overlap(torch.device("meta"))
    for tokens, experts in ((16, 128), (4096, 512)):
        ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
        expert_map = torch.empty(experts, dtype=torch.int32, device="meta")
        numel = route_workspace_numel(tokens, 8, experts, 16)
        workspace = ids.new_empty(numel)
        plan = sort_routes(ids, expert_map, experts, experts, 16, workspace, SortConfig(), overlap=overlap, tall=64)
    rows = torch.empty(4096 * 8, 2048, dtype=torch.bfloat16, device="meta")
    tokens_out = rows.new_empty(4096, 2048)
    reduce_routes(tokens_out, rows, plan.route_expert, overlap=overlap)
    reduce_sorted_rows(tokens_out, rows, plan.route_row, rows.new_empty(4096, 8, dtype=torch.float32), overlap=overlap)
    copy_rows(rows, tokens_out, plan.route_row, overlap=overlap)
    counts = torch.empty(1024, dtype=torch.int32, device="meta")
    workspace = counts.new_empty(batch_workspace_numel(1024, 4096, 16))
    plan_batches(counts, 4096, 16, workspace, overlap=overlap, tall=64)
    batches = lay_out_batches(tokens_out, plan.route_row.view(4096, 8), expert_map, 64)
    sum_batches(tokens_out, batches.rows, batches.row_of_route, rows.new_empty(4096, 8, dtype=torch.float32))


def launch_short_routing(shared_bytes: int) -> None:
    """Sorting in two launches, and the reduction that reads places early."""
    overlap = can_overlap(torch.device("meta"))
    ids = torch.empty(1024, 8, dtype=torch.int32, device="meta")
    workspace = ids.new_empty(route_workspace_numel(1024, 8, 128, 16))
    plan = sort_routes(ids, None, 128, 128, 16, workspace, overlap=overlap, tall=64)
    rows = torch.empty(1024 * 8, 2048, dtype=torch.bfloat16, device="meta")
    weights = rows.new_empty(1024, 8, dtype=torch.float32)
    config = ReduceConfig(early=True)
    reduce_sorted_rows(rows.new_empty(1024, 2048), rows, plan.route_row, weights, config, overlap=overlap)


def launch_moving(shared_bytes: int) -> None:
    """What ways between ranks do with tokens: codes with scales of groups, with powers of two, and of whole rows."""
    int8 = triton.runtime.driver.active.get_current_target().arch == 80
    tokens, experts, hidden, ranks, room = 64, 128, 7168, 2, 64

    def empty(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    ids, weights = empty(tokens, 8), empty(tokens, 8, of=torch.float32)
    x, rows = empty(tokens, hidden, of=torch.bfloat16), experts // ranks * room
    holders = Holders(empty(experts), empty(experts, ranks), empty(ranks, experts), 1)
    counts, home = empty(ranks, experts // ranks), torch.empty_like(ids)
    place_routes(counts, home, ids, holders, room)
    spread_tokens(x.new_empty(ranks, rows, hidden), x, home, empty(ranks, rows, of=torch.float32), weights)
    arrived, own_counts = x.new_empty(experts // ranks, ranks * room, hidden), torch.empty_like(counts)
    num_rows = empty(experts // ranks)
    filled = FilledRooms(x.new_empty(ranks, rows, hidden), counts, None, 0, None, room)
    empty_rooms(arrived, num_rows, own_counts, filled)
    code, limits = (torch.int8, (-127.0, 127.0)) if int8 else (torch.float8_e4m3fn, (-448.0, 448.0))
    for group, e8m0 in ((128, False), (32, True), (0, False)):
        fmt = RowFormat(code, *limits, group=group, e8m0=e8m0)
        q = empty(ranks, rows, hidden, of=code)
        scales = empty(ranks, rows, hidden // group if group else 1, of=fmt.scale_dtype)
        quantize_tokens(q, scales, x, fmt, home)
        quantize_tokens(q[:1], scales[:1], empty(4096, hidden, of=torch.bfloat16), fmt)
        empty_rooms(arrived, num_rows, own_counts, FilledRooms(q, counts, scales, group, None, room))
        restore_tokens(q[0], scales[0], group, torch.bfloat16)
    fill_rooms(x.new_empty(ranks, rows, hidden), arrived, own_counts)
    pad_tokens(x, weights, ids, 2 * tokens)
    keep_own_routes(ids, holders.num_holders, holders.holders, 1)
    sum_of_ranks(x, x.new_empty(ranks, tokens, hidden))


def launch_exchange(shared_bytes: int) -> None:
    """Tokens that go to the ranks of their experts: one and many, in 16 bits, as codes with scales, with weights."""
    for tokens, ranks, widths, has_weights in (
        (1, 1, (4096,), True),
        (8192, 2, (4096,), False),
        (64, 64, (7168, 224), True),
    ):
        layout = RowLayout(8, has_weights, widths)
        ids = torch.empty(tokens, 8, dtype=torch.int32, device="meta")
        counts = ids.new_empty((ranks, 2), dtype=torch.int64)
        holders, stamp = ids.new_empty((128, ranks)), counts.new_empty(1)
        placed = exchanged.place_routes(ids, ids.new_empty(128), holders, 0, counts, stamp)
        columns = tuple(ids.new_empty((tokens, width), dtype=torch.uint8) for width in widths)
        weights = ids.new_empty(ids.shape, dtype=torch.float32) if has_weights else None
        sent, _ = exchanged.pack_tokens(placed, ids, weights, columns, layout.words)
        arrived.unpack_tokens(sent, counts, 8 * len(sent), 8, has_weights, layout.words)
        if has_weights:
            arrived.split_rows(sent, counts, 8, layout.words)


def launch_reads(shared_bytes: int) -> None:
    """Every way to measure the read bandwidth, on 4 GB."""
    words = torch.empty(2**30, dtype=torch.int32, device="meta")
    for config in READ_CONFIGS:
        read_words(words.new_empty(num_read_programs(words.numel(), config, 132)), words, config)


def empty_packed(fmt: QuantFormat, experts: int, rows: int, depth: int) -> PackedMatrix:
    """Packed weights as `TritonPackedExperts` makes them."""

    def empty(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(experts, *shape, dtype=of, device="meta")

    by_row = fmt.group[1] == WHOLE
    groups = 1 if by_row else math.ceil(depth / fmt.group[1])
    words = math.ceil(groups / min(4, max(1, 128 // fmt.group[1]))) if groups > 1 else 1
    folded = fmt.scale_dtype != "float32"
    group_scale = empty(words, rows) if folded else empty(groups, rows, of=torch.float32)
    return PackedMatrix(
        empty(depth // 64, rows, 2 * fmt.bits),
        fmt.dtype,
        0 if by_row else fmt.group[1],
        fmt.scale_dtype,
        None if by_row else group_scale,
        None if fmt.symmetric else empty(words, rows),
        empty(rows, of=torch.float32) if by_row or folded else None,
    )


def launch_gemms(case: str, shared_bytes: int) -> None:
    """A case's plan, which `rows_of` leaves out, and both of its GEMMs."""
    batched = case.startswith("batched")
    tokens, experts, top_k, hidden, intermediate, dtype, activation, has_bias = CASES[case]
    gated = activation != "relu2"
    columns = (intermediate + 63) // 64 * 64
    depth = (hidden + 63) // 64 * 64
    routes = tokens * top_k
    rows_of_out = experts * tokens if batched else routes

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    scheme = get_scheme(PACKED[case]) if case in PACKED else None
    bits = None if scheme is None or scheme.weight is None else scheme.weight.bits
    target = triton.runtime.driver.active.get_current_target()
    least = 16 if target.backend == "hip" else 1
    configs = select_config(
        math.inf if batched else tokens, routes / experts, dtype.itemsize, shared_bytes, bits, least
    )
    if isinstance(configs, GemmPair):
        shape = CallShape(
            most_rows=tokens,
            rows_per_expert=routes / experts,
            top_k=top_k,
            gate_up_columns=(2 if gated else 1) * columns,
            down_columns=hidden,
            down_depth=columns,
            element_bytes=dtype.itemsize,
            is_packed=scheme is not None,
            shared_bytes=shared_bytes,
        )
        configs = fit_pair(configs, shape)
    ids = empty(tokens, top_k, of=torch.int32)
    intermediate_rows = empty(rows_of_out, columns)
    rows = (2 if gated else 1) * columns
    if scheme is None:
        w13, w2 = empty(experts, rows, depth), empty(experts, hidden, columns)
    else:
        assert scheme.weight is not None
        w13 = empty_packed(scheme.weight, experts, rows, depth)
        w2 = empty_packed(scheme.weight, experts, hidden, columns)
    overlap = can_overlap(ids.device)
    scalars = {"alpha": 1.702, "beta": 1.0, "limit": 7.0} if activation == "swigluoai" else {}
    epilogue = GateUpEpilogue(activation, gated, **scalars, bias=empty(experts, rows) if has_bias else None)
    second: dict[str, Any] = {
        "bias": empty(experts, hidden) if has_bias else None,
        "topk_weights": None if batched else empty(tokens, top_k, of=torch.float32),
        "overlap": overlap,
    }
    hidden_states = empty(experts * tokens if batched else tokens, hidden)
    if isinstance(configs, GemvPair):
        assert isinstance(w13, torch.Tensor)
        assert isinstance(w2, torch.Tensor)
        direct = DirectRoutes(ids, None, experts, tokens)
        gate_up_gemv(
            intermediate_rows, hidden_states, w13, direct, configs.gate_up, epilogue, top_k=top_k, overlap=overlap
        )
        down_gemv(hidden_states, intermediate_rows, w2, direct, configs.down, **second)
        return
    plan: BlockMap | DirectRoutes
    if isinstance(configs, SinglePair):
        assert isinstance(w2, PackedMatrix)
        direct = DirectRoutes(ids, None, experts, configs.gate_up.block_m)
        gate_up_gemm(
            intermediate_rows, hidden_states, w13, direct, configs.gate_up, epilogue, top_k=top_k, overlap=overlap
        )
        down_single(hidden_states, intermediate_rows, w2, direct, configs.down, **second)
        return
    if batched:
        numel = batch_workspace_numel(experts, tokens, configs.gate_up.block_m)
        counts, workspace = empty(experts, of=torch.int32), ids.new_empty(numel)
        plan = plan_batches(counts, tokens, configs.gate_up.block_m, workspace, tall=configs.tall)
    elif configs.sort_routes:
        numel = route_workspace_numel(tokens, top_k, experts, configs.gate_up.block_m)
        workspace = ids.new_empty(numel)
        flags = None
        if target.arch == 90 and bits is not None and shares_launch(tokens, routes / experts, bits):
            flags = ids.new_empty(max_num_blocks(routes, experts, configs.gate_up.block_m), FLAG_WORDS)
        plan = sort_routes(
            ids, None, experts, experts, configs.gate_up.block_m, workspace, tall=configs.tall, flags=flags
        )
    else:
        plan = DirectRoutes(ids, None, experts, configs.gate_up.block_m)
    gate_up_gemm(
        intermediate_rows,
        hidden_states,
        w13,
        plan,
        configs.gate_up,
        epilogue,
        top_k=1 if batched else top_k,
        overlap=overlap,
    )
    down_gemm(empty(rows_of_out, hidden), intermediate_rows, w2, plan, configs.down, **second)
    if isinstance(plan, RoutePlan) and plan.flags is not None:
        assert isinstance(w13, PackedMatrix)
        assert isinstance(w2, PackedMatrix)
        out = empty(rows_of_out, hidden)
        both_gemms(out, intermediate_rows, hidden_states, w13, w2, plan, configs, epilogue, top_k=top_k, **second)


# Without products.
PLAIN_CASES = {
    "routing": launch_routing,
    "exchange": launch_exchange,
    "short_routing": launch_short_routing,
    "moving": launch_moving,
    "read": launch_reads,
}


def describe(target: str, case: str, name: str, kernel: Any) -> dict[str, Any]:
    """Registers, spills and matrix instructions of a compiled kernel."""
    assembly = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    row = {
        "target": target,
        "case": case,
        "kernel": name.strip("_").removesuffix("_kernel"),
        "shared_bytes": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "matrix": {word: assembly.count(word) for word in MATRIX_INSTRUCTIONS if word in assembly},
    }
    if target.startswith("gfx"):
        row["registers"] = max(int(n) for n in re.findall(r"\.vgpr_count:\s+(\d+)", assembly))
        row["spill_bytes"] = 4 * sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly))
    else:
        row["registers"], row["spill_bytes"] = _cubin_usage(kernel.asm["cubin"])
    return row


def _cubin_usage(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers = [int(n) for n in re.findall(r"REG:(\d+)", text)]
    stack = [int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", text)]
    assert registers, text
    return max(registers), sum(stack)


def compile_targets(rows_of: Callable[[str, str, int, set[str]], Iterable[dict[str, Any]]], every: list[str]) -> None:
    """Prints the rows of the targets and cases that the command names.

    Args:
        rows_of: from a target, a case, the target's bytes of shared memory, and the names of kernels that no further
            case of the target compiles, as `compiling_only` takes them.
        every: names of all cases.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for number, argument in enumerate(sys.argv[1:]):
        target, _, names = argument.partition("=")
        gpu, shared_bytes = TARGETS[target]
        triton.runtime.driver.set_active(OfflineDriver(gpu, number))
        # There is no device to ask.
        device_limits.max_shared_bytes = lambda device, most=shared_bytes: most
        done: set[str] = set()
        cases = names.split(",") if names else every
        found[target] = [row for case in cases for row in rows_of(target, case, shared_bytes, done)]
    print(json.dumps(found))


def rows_of(target: str, case: str, shared_bytes: int, done: set[str]) -> list[dict[str, Any]]:
    """A case's GEMMs, or all that a plain case launches."""
    is_plain = case in PLAIN_CASES
    with compiling_only(None if is_plain else done) as compiled:
        PLAIN_CASES[case](shared_bytes) if is_plain else launch_gemms(case, shared_bytes)
    # Products stand behind the launches of their plan.
    products = 3 if compiled[-1][0] == "_both_kernel" else 2
    return [describe(target, case, *one) for one in (compiled if is_plain else compiled[-products:])]


if __name__ == "__main__":
    compile_targets(rows_of, [*PLAIN_CASES, *CASES])

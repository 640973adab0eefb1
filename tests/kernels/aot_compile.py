"""Compiles the Triton kernels for devices that are not there, exactly as layers would launch them.

Run as a script, in a separate process: a process whose Triton interprets kernels cannot compile them. Prints one JSON
object: of each target a list with one object a compiled kernel. Without cases it compiles all.

    python tests/kernels/aot_compile.py sm_90=prefill,tall sm_80
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moereg.backends import triton_moe
from moereg.experts import ExpertInputs, Gradients
from moereg.kernels.launch import device as device_limits
from moereg.kernels.launch.ahead import Target, _AbsentDriver
from moereg.kernels.launch.device import can_overlap
from moereg.kernels.quantized.operands import RowFormat
from moereg.kernels.quantized.rows_moved import quantize_tokens, restore_tokens
from moereg.kernels.read import READ_CONFIGS, num_read_programs, read_words
from moereg.kernels.rows import all_to_all
from moereg.kernels.rows.all_gather import keep_own_routes, pad_tokens, sum_of_ranks
from moereg.kernels.rows.batches import lay_out_batches, sum_batches
from moereg.kernels.rows.block_map import batch_workspace_numel, plan_batches
from moereg.kernels.rows.plan import SortConfig, route_workspace_numel
from moereg.kernels.rows.reduce import copy_rows, reduce_routes, reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights
from moereg.platforms import Platform
from moereg.prepare_finalize.exchange import RowLayout
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme
from moereg.weights.adapters import ExpertAdapters, adapter_shapes
from moereg.weights.quantize_weights import restore_in_triton, stored_matrices

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

# tokens, scheme, experts, top_k, hidden, intermediate, and what else the problem says; in the batched format tokens are
# max_T. Layers of cases that are `rounded` round activations in 16 bits, where others multiply codes.
CASES: dict[str, tuple[int, str, int, int, int, int, dict[str, Any]]] = {
    "one_token": (1, "unquantized", 128, 8, 2048, 768, {}),
    "decode": (16, "unquantized", 128, 8, 2048, 768, {}),
    "prefill": (4096, "unquantized", 128, 8, 2048, 768, {}),
    "gpt_oss_prefill": (4096, "unquantized", 32, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "situ_prefill": (4096, "unquantized", 128, 8, 2048, 768, {"activation": "situ"}),
    "middle": (512, "unquantized", 64, 8, 2048, 1408, {}),
    "small": (128, "unquantized", 64, 8, 2048, 704, {"dtype": "float16", "activation": "gelu_tanh"}),
    "tall": (256, "unquantized", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "odd": (4096, "unquantized", 8, 2, 511, 129, {"activation": "gelu", "has_bias": True}),
    # Rows of a multiple of 16 bytes, but not of 32, as shards have.
    "shard_one_token": (1, "unquantized", 32, 4, 1288, 360, {}),
    "shard_decode": (16, "unquantized", 32, 4, 1288, 360, {}),
    "shard_tall": (64, "unquantized", 32, 4, 1288, 360, {}),
    "shard_prefill": (4096, "unquantized", 32, 4, 1288, 744, {}),
    "not_gated": (4096, "unquantized", 64, 4, 2688, 1856, {"activation": "relu2"}),
    "fp32_decode": (16, "unquantized", 128, 8, 2048, 768, {"dtype": "float32"}),
    "fp32_prefill": (4096, "unquantized", 128, 8, 2048, 768, {"dtype": "float32"}),
    "batched_decode": (64, "unquantized", 128, 8, 2048, 768, {"activation_format": "batched"}),
    "batched_prefill": (
        *(4096, "unquantized", 32, 4, 2880, 2880),
        {"activation": "swigluoai", "has_bias": True, "activation_format": "batched"},
    ),
    "int4_one_token": (1, "int4_w4a16_g128", 8, 2, 4096, 14336, {}),
    "mxfp4_one_token": (1, "mxfp4_w4a16", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "int4_g32_zp_decode": (16, "int4_w4a16_g32_zp", 128, 8, 2048, 768, {}),
    "nvfp4_decode": (16, "nvfp4_w4a16", 128, 8, 2048, 768, {}),
    "int8_weights_decode": (16, "int8_w8a16", 128, 8, 2048, 768, {}),
    "mxfp4_tall": (64, "mxfp4_w4a16", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "mxfp4_prefill": (4096, "mxfp4_w4a16", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "block_one_token": (1, "fp8_block128", 128, 8, 2048, 768, {}),
    "block_decode": (16, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_to_11_rows": (64, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_to_100_rows": (1024, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_prefill": (4096, "fp8_block128", 128, 8, 2048, 768, {}),
    "block_coded": (64, "fp8_block128", 8, 2, 1288, 512, {"arrives_coded": True}),
    "block_odd": (4096, "fp8_block128", 8, 2, 511, 129, {"has_bias": True}),
    "channel_decode": (16, "fp8_channel_token", 128, 8, 2048, 768, {}),
    "channel_prefill": (4096, "fp8_channel_token", 128, 8, 2048, 768, {}),
    "static_prefill": (4096, "fp8_tensor_static", 8, 2, 4096, 14336, {}),
    "dynamic_prefill": (4096, "fp8_tensor_dynamic", 8, 2, 4096, 14336, {}),
    "mx_decode": (16, "mxfp8", 128, 8, 2048, 768, {}),
    "mx_prefill": (4096, "mxfp8", 128, 8, 2048, 768, {}),
    "mx4_decode": (16, "mxfp4_mxfp8", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "mx4_prefill": (4096, "mxfp4_mxfp8", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "nv4_decode": (16, "nvfp4", 128, 8, 2048, 768, {}),
    "nv4_prefill": (4096, "nvfp4", 128, 8, 2048, 768, {}),
    "int8_decode": (16, "int8_w8a8", 128, 8, 2048, 768, {}),
    "int8_prefill": (4096, "int8_w8a8", 128, 8, 2048, 768, {"activation": "relu2"}),
    "block_batched_decode": (16, "fp8_block128", 128, 8, 2048, 768, {"activation_format": "batched"}),
    "nv4_batched_prefill": (4096, "nvfp4", 128, 8, 2048, 768, {"activation_format": "batched"}),
    "dynamic_batched_prefill": (4096, "fp8_tensor_dynamic", 8, 2, 4096, 14336, {"activation_format": "batched"}),
    "rounded_nvfp4_decode": (16, "nvfp4", 8, 2, 2048, 768, {}),
    "rounded_nvfp4_static_prefill": (4096, "nvfp4", 8, 2, 4096, 14336, {"has_static": True, "dtype": "float16"}),
    "rounded_nvfp4_odd": (4096, "nvfp4", 8, 2, 511, 129, {"has_bias": True}),
    "rounded_nvfp4_batched": (256, "nvfp4", 8, 2, 2048, 768, {"has_static": True, "activation_format": "batched"}),
    "rounded_mx_decode": (16, "mxfp4_mxfp8", 8, 2, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "rounded_mx_prefill": (4096, "mxfp4_mxfp8", 8, 2, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
}

# A scheme for each element type, and for each kind of scales.
RESTORED = ("int4_w4a16_g128_zp", "nvfp4_w4a16", "mxfp4_w4a16", "nf4", "nf4_dq", "int8_w8a16", "fp8_block128", "mxfp8")

# What tells products of codes apart: types, scales that an instruction applies itself, and those of 16 columns of e2m1.
KINDS = ("e4m3", ".s8", ".f16.f16", ".bf16", ".block_scale", "mxf4nvf4")

# Of kernels that are compiled for each case anew: others plan, and the case "routing" has their ways.
IN_EVERY_CASE = ("both", "gate_up", "down", "quantize", "amax", "coded")

# Loads of 16 bytes from global memory, and of single elements of 16 bits, by which nothing streams weights.
WIDE_LOADS = re.compile(r"cp\.async\.cg\.\S+ .*, 0x10\b|ld\.global\S*\.v4\.b32|(?:global|buffer)_load_dwordx4")
NARROW_LOADS = re.compile(r"ld\.global\S*\.b16|(?:global|buffer)_load_(?:d16_|u?short)")


class OfflineDriver(_AbsentDriver):
    """Answers for a target without a device. Triton keeps compiled kernels by device, so each target is another one."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        super().__init__(Target(target, 0))
        self._device = device

    def get_current_device(self) -> int:
        return self._device


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
    reduce_sorted_rows(rows.new_empty(1024, 2048), rows, plan.route_row, weights, early=True, overlap=overlap)


def launch_moving(shared_bytes: int) -> None:
    """What ways between ranks do with tokens: codes with scales of groups, with powers of two, and of whole rows."""
    int8 = triton.runtime.driver.active.get_current_target().arch == 80
    tokens, experts, hidden, ranks = 64, 128, 7168, 2

    def empty(*shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    ids, weights = empty(tokens, 8), empty(tokens, 8, of=torch.float32)
    x = empty(tokens, hidden, of=torch.bfloat16)
    code, limits = (torch.int8, (-127.0, 127.0)) if int8 else (torch.float8_e4m3fn, (-448.0, 448.0))
    for group, e8m0 in ((128, False), (32, True), (0, False)):
        fmt = RowFormat(code, *limits, group=group, e8m0=e8m0)
        for count in (tokens, 4096):
            q = empty(count, hidden, of=code)
            scales = empty(count, hidden // group if group else 1, of=fmt.scale_dtype)
            quantize_tokens(q, scales, empty(count, hidden, of=torch.bfloat16), fmt)
        restore_tokens(q, scales, group, torch.bfloat16)
    pad_tokens(x, weights, ids, 2 * tokens)
    keep_own_routes(ids, empty(experts), empty(experts, ranks), 1)
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
        placed = all_to_all.place_routes(ids, ids.new_empty(128), holders, 0, counts, stamp)
        columns = tuple(ids.new_empty((tokens, width), dtype=torch.uint8) for width in widths)
        weights = ids.new_empty(ids.shape, dtype=torch.float32) if has_weights else None
        sent, _ = all_to_all.pack_tokens(placed, ids, weights, columns, layout.words)
        all_to_all.unpack_tokens(sent, counts, 8 * len(sent), 8, has_weights, layout.words)
        if has_weights:
            all_to_all.split_rows(sent, counts, 8, layout.words)


def launch_restoring(shared_bytes: int) -> None:
    """Every decoder, on w13 of a layer, in the order of `RESTORED`."""
    for scheme in map(get_scheme, RESTORED):
        rows = scheme.tensor_rows(128, 2048, 768, num_halves=2, has_bias=False)
        tensors = {row.name: torch.empty(row.shapes[0], dtype=row.dtype, device="meta") for row in rows}
        out = torch.empty(128, 2 * 768, 2048, dtype=torch.bfloat16, device="meta")
        assert scheme.weight is not None
        assert restore_in_triton(stored_matrices(tensors, "w13", 2), scheme.weight, out)


def launch_reads(shared_bytes: int) -> None:
    """Every way to measure the read bandwidth, on 4 GB."""
    words = torch.empty(2**30, dtype=torch.int32, device="meta")
    for config in READ_CONFIGS:
        read_words(words.new_empty(num_read_programs(words.numel(), config, 132)), words, config)


def launch_layer(target: str, case: str) -> None:
    """Everything that a call of a case's layer launches but for Hopper's kernels, which `gluon_aot` compiles."""
    tokens, scheme, experts, top_k, hidden, intermediate, keywords = CASES[case]
    keywords = dict(keywords)
    arrives_coded, has_static = keywords.pop("arrives_coded", False), keywords.pop("has_static", False)
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": top_k}
    problem = MoEProblem(**sizes, quant=scheme, **keywords)
    kind = (
        "Emulated" if case.startswith("rounded") else "Quantized" if problem.quant.activation is not None else "Packed"
    )
    kind = kind if problem.quant.weight is not None else ""
    form = "Batched" if problem.activation_format == "batched" else ""
    platform = Platform.from_name("rocm:gfx942" if target.startswith("gfx") else f"cuda:{target.replace('_', '')}")
    layer = getattr(triton_moe, f"Triton{kind}{form}Experts")(problem, platform)
    layer.implementation.has_hopper = layer.implementation.has_packed_hopper = False
    # The first have all that a checkpoint may have, the last the least.
    weights = list(empty_weights(layer))[0 if has_static or kind == "Quantized" else -1]
    dummy = DummyLayer(layer, weights)
    if not arrives_coded:
        dummy.call(tokens)
        return

    def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((tokens, columns), dtype=dtype, device="meta")

    scale = empty(-(-hidden // 128), torch.float32)
    rows = empty(hidden, torch.float8_e4m3fn), empty(top_k, torch.float32), empty(top_k, torch.int32)
    dummy._multiply(ExpertInputs(*rows, hidden_scale=scale), tokens)


# tokens, experts, top_k, hidden, intermediate, and what else the problem says.
TRAINED: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "trained": (4096, 128, 8, 2048, 768, {}),
    "trained_few_rows": (1024, 128, 8, 2048, 768, {"dtype": "float16", "activation": "gelu_tanh"}),
    "trained_gpt_oss": (4096, 32, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "trained_not_gated": (4096, 64, 4, 2688, 1856, {"activation": "relu2"}),
    "trained_situ": (4096, 128, 8, 2048, 768, {"activation": "situ"}),
    "trained_fp32": (4096, 128, 8, 2048, 768, {"dtype": "float32"}),
    "trained_adapters": (4096, 128, 8, 2048, 768, {"adapter_rank": 16}),
    "trained_wide_adapters": (1024, 128, 8, 2048, 768, {"adapter_rank": 128}),
}


def launch_trained(case: str, shared_bytes: int, platform: str = "cuda:sm80") -> None:
    """A forward pass that saves, and all gradients, once overwritten and once added to.

    On a platform that is not Hopper's, so that the portable kernels are launched, whichever the target is.
    """
    tokens, experts, top_k, hidden, intermediate, keywords = TRAINED[case]
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": top_k}
    names = ("hidden_states", "topk_weights", "adapters" if "adapter_rank" in keywords else "weights")
    problem = MoEProblem(**sizes, gradients=names, **keywords)
    layer = triton_moe.TritonExperts(problem, Platform.from_name(platform))
    weights = list(empty_weights(layer))[-1]

    def empty(*shape: int, of: torch.dtype = problem.torch_dtype) -> torch.Tensor:
        return torch.empty(*shape, dtype=of, device="meta")

    shapes = adapter_shapes(problem, problem.adapter_rank) if problem.adapter_rank else {}
    factors: dict[str, Any] = {name: empty(*shape) for name, shape in shapes.items()}
    rows = empty(tokens, hidden), empty(tokens, top_k, of=torch.float32), empty(tokens, top_k, of=torch.int32)
    inputs = ExpertInputs(
        *rows, adapters=ExpertAdapters(**factors, w13_scaling=2.0, w2_scaling=2.0) if factors else None
    )
    saved = {
        name: empty(*shape, of=dtype)
        for name, (shape, dtype) in layer.saved_shapes(problem=problem, num_tokens=tokens).items()
    }
    out = empty(tokens, hidden)
    rooms = [empty(*shape) for shape in layer.workspace_shapes(problem=problem, num_tokens=tokens)]
    layer.apply_saving(out, saved, inputs, weights, *rooms)
    rooms = [empty(*shape) for shape in layer.backward_workspace_shapes(problem=problem, num_tokens=tokens)]
    trained = factors or {name: weights[name] for name in weights.per_expert}
    tensors = {name: torch.empty_like(tensor) for name, tensor in trained.items()}
    for accumulate in (False, True):
        grads = Gradients(
            torch.empty_like(out), torch.empty_like(inputs.topk_weights), **tensors, accumulate=accumulate
        )
        layer.apply_backward(grads, out, saved, inputs, weights, *rooms)


# Without products that layers of inference launch.
PLAIN_CASES = {
    **{case: functools.partial(launch_trained, case) for case in TRAINED},
    "routing": launch_routing,
    "exchange": launch_exchange,
    "short_routing": launch_short_routing,
    "moving": launch_moving,
    "restoring": launch_restoring,
    "read": launch_reads,
}


def describe(target: str, case: str, name: str, kernel: Any) -> dict[str, Any]:
    """Registers, spills and matrix instructions of a compiled kernel."""
    assembly = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    row = {
        "case": case,
        "kernel": name.strip("_").removesuffix("_kernel"),
        "matrix": {word: assembly.count(word) for word in MATRIX_INSTRUCTIONS if word in assembly},
    }
    row["wide_loads"], row["narrow_loads"] = (len(kind.findall(assembly)) for kind in (WIDE_LOADS, NARROW_LOADS))
    products = [line for line in kernel.asm.get("ptx", "").splitlines() if "mma" in line]
    row["products"] = {word: sum(word in line for line in products) for word in KINDS}
    if target.startswith("gfx"):
        row["registers"] = max(int(n) for n in re.findall(r"\.vgpr_count:\s+(\d+)", assembly))
        row["spill_bytes"] = 4 * sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", assembly))
    else:
        row["registers"], row["spill_bytes"] = cubin_usage(kernel.asm["cubin"])
    return row


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
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


def rows_of(target: str, case: str, shared_bytes: int, done: set[str]) -> list[dict[str, Any]]:
    """A layer's products and what rounds for them, or all that a plain case launches."""
    is_plain = case in PLAIN_CASES
    with compiling_only(None if is_plain else done) as compiled:
        PLAIN_CASES[case](shared_bytes) if is_plain else launch_layer(target, case)
    wanted = [one for one in compiled if is_plain or any(word in one[0] for word in IN_EVERY_CASE)]
    return [describe(target, case, *one) for one in wanted]


def main() -> None:
    """Prints the rows of the targets and cases that the command names."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, argument in enumerate(sys.argv[1:]):
        target, _, names = argument.partition("=")
        gpu, shared_bytes = TARGETS[target]
        triton.runtime.driver.set_active(OfflineDriver(gpu, number))
        least_block_m = 16 if gpu.backend == "hip" else 1
        # There is no device to ask.
        device_limits.max_shared_bytes = lambda device, most=shared_bytes: most
        device_limits.least_block_m = lambda device, least=least_block_m: least
        done: set[str] = set()
        cases = names.split(",") if names else [*PLAIN_CASES, *CASES]
        found[target] = [row for case in cases for row in rows_of(target, case, shared_bytes, done)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Choices of a launch that keep a row's bits, and what `batch_invariant=True` costs, on an H200.

    python -m benches.h200.batch_invariance FOLDER [--models M ...] [--schemes S ...] [--budget-s 500] [--only probe]
    python -m benches.h200.batch_invariance FOLDER --final [--models M ...] [--budget-s 80]
    python -m benches.h200.batch_invariance --page benches/results/batch_invariance_h200.json

First one product of a tile at a time: which instructions, by shape and by which operand is on the left, give the same
bits. Then each layer, by the default and with the flag, and by each candidate schedule: in calls of 1 to 4,096 tokens,
the share of rows with the bits of the candidate's call of 4,096, and with those of Hopper's kernel there; and times of
CUDA graphs, in turns with the default's. FOLDER gets a log and a JSON file; a short table comes last.

`--final` times the default, the flag, and vLLM's Triton kernel with the fixed tiles of VLLM_BATCH_INVARIANT, where vllm
and plugins/moereg-vllm can be imported; `--page` prints the page of such a file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import triton
import triton.language as tl

from benches.h200.candidates import grouped, rotated
from benches.h200.precompile import compiling_only
from benches.h200.table import make_call, make_weights
from moereg.backends._loaded import Call as LoadedCall
from moereg.backends._triton import packed, quantized_schedules, schedules
from moereg.bench.timing import kernel_runs, time_runs
from moereg.dispatch import select_backend
from moereg.evidence.provenance import clocks, provenance
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.hopper import config as hopper
from moereg.kernels.hopper.packed_config import select_packed_config
from moereg.kernels.launch.remembered import forget_recordings
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.platforms import probe_platform
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import round_up

MODELS: Final = ("qwen3-30b-a3b", "gpt-oss-120b", "mixtral-8x7b")
SCHEMES: Final = (
    *("unquantized", "float16", "float32", "fp8_block128", "fp8_channel_token", "int4_w4a16_g128", "mxfp4_w4a16"),
)
TOKENS: Final = (1, 2, 3, 5, 8, 16, 17, 64, 255, 1024, 4096)
TIMED: Final = (1, 4, 16, 64, 256, 1024, 4096)
MOST: Final = TOKENS[-1]
# A token alone is 16 calls.
ALONE: Final = 16

Select = Callable[[LoadedCall], Any]


@triton.jit
def _probe_kernel(
    out,
    x,
    w,
    depth,
    NUM_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """One tile: out [BLOCK_M, BLOCK_N] = x @ w.T; SWAP: as (w @ x.T).T; PARTIAL: each step is a sum of its own."""
    rows = tl.program_id(0) // NUM_N * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % NUM_N * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if SWAP:
            left = tl.load(w + columns[:, None] * depth + start + step[None, :])
            right = tl.load(x + rows[None, :] * depth + start + step[:, None])
        else:
            left = tl.load(x + rows[:, None] * depth + start + step[None, :])
            right = tl.load(w + columns[None, :] * depth + start + step[:, None])
        if PARTIAL:
            total += tl.dot(left, right, input_precision="ieee")
        else:
            total = tl.dot(left, right, total, input_precision="ieee")
    if SWAP:
        total = tl.trans(total)
    tl.store(out + rows[:, None] * (NUM_N * BLOCK_N) + columns[None, :], total)


TILES: Final = (
    *((16, 64, 64, 4, 0), (16, 64, 128, 4, 0), (16, 32, 32, 4, 0), (32, 128, 64, 4, 0), (16, 128, 64, 8, 0)),
    *((64, 64, 64, 4, 0), (64, 16, 64, 4, 0), (64, 128, 128, 4, 0), (64, 256, 64, 4, 0), (128, 128, 64, 8, 0)),
    *((8, 64, 64, 4, 1), (8, 128, 128, 4, 1), (16, 64, 64, 4, 1), (16, 128, 64, 4, 1), (64, 128, 64, 4, 1)),
)
"""Rows, columns, step, warps, and whether weights are the left operand."""


def probe_tile(dtype: torch.dtype, tile: tuple[int, ...], partial: bool) -> tuple[torch.Tensor, str]:
    """A product of [128, 2048] and [256, 2048], and the PTX that computed it."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, 2048, generator=generator, device="cuda").to(dtype) for n in (128, 256))
    m, n, k, warps, swap = tile
    out = torch.empty(128, 256, device="cuda")
    constants = {"NUM_N": 256 // n, "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "SWAP": bool(swap), "PARTIAL": partial}
    kernel = _probe_kernel[(128 // m * (256 // n),)](out, x, w, 2048, **constants, num_warps=warps)
    return out, getattr(kernel, "asm", {}).get("ptx", "")


def probe(log: Callable[[str], None]) -> list[dict[str, Any]]:
    """Bits of each tile's product by dtype, in one sum or in one per step; equal ones have one letter."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    points = [(dtype, partial, tile) for dtype in dtypes for partial in (False, True) for tile in TILES]
    points = [point for point in points if point[0] != torch.float32 or point[2][1] * point[2][2] <= 64 * 64]
    with compiling_only():
        for dtype, partial, tile in points:
            with contextlib.suppress(Exception):
                probe_tile(dtype, tile, partial)
    found: list[dict[str, Any]] = []
    classes: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
    for dtype, partial, tile in points:
        m, n, k, warps, swap = tile
        name = f"{m}x{n}x{k} {warps}w{' swapped' if swap else ''}"
        try:
            out, text = probe_tile(dtype, tile, partial)
        except Exception as error:  # Another tile may still compile.
            log(f"probe {dtype} {name}: {type(error).__name__} {str(error)[:100]}")
            continue
        own = classes.setdefault((dtype, partial), [])
        known = [bool(torch.equal(out, one)) for one in own]
        letter = known.index(True) if any(known) else len(own)
        if letter == len(own):
            own.append(out)
        instructions = ("wgmma.mma_async", "mma.sync", "fma.rn")
        starts = next((one for one in instructions if one in text), "?")
        row = {"dtype": str(dtype).removeprefix("torch."), "partial": partial, "tile": name}
        row["instruction"] = next((word for word in text.split() if word.startswith(starts)), "none")
        found.append(row | {"class": chr(ord("A") + letter), "share_of_a": float((out == own[0]).float().mean())})
        log("probe " + json.dumps(found[-1]))
    return found


def problem_of(model: str, scheme: str, **keywords: Any) -> MoEProblem:
    """A model's layer; `float16` and `float32` are unquantized ones of that dtype."""
    shape = get_shape(model).problem_keywords()
    dtypes = {"float16": "float16", "float32": "float32"}
    quant = "unquantized" if scheme in dtypes else scheme
    return MoEProblem(**{**shape, "quant": quant, "dtype": dtypes.get(scheme, "bfloat16"), **keywords})


def tiled(kind: Any, gate_up: str, down: str, beyond_one: str = "", **changes: Any) -> Select:
    """Tiles of given sizes at any number of tokens, unsorted up to 16; others beyond one token, if given."""

    def select(call: LoadedCall) -> Any:
        num_tokens = len(call.inputs.hidden_states)
        texts = 2 * (beyond_one,) if beyond_one and num_tokens > 1 else (gate_up, down)
        first, second = (dataclasses.replace(grouped(text), **changes) for text in texts)
        is_direct = num_tokens <= min(16, first.block_m)
        return (kind.Direct if is_direct else kind.Sorted)(GemmPair(first, second, sort_routes=not is_direct))

    return select


def rows_of(problem: MoEProblem, call: LoadedCall) -> float:
    """Average rows of an expert."""
    return call.inputs.topk_ids.numel() / problem.num_experts


def candidates_of(problem: MoEProblem, implementation: Any) -> dict[str, Select]:
    """Schedules by name; Hopper's first, if it serves the layer."""
    found: dict[str, Select] = {}
    if problem.quant.activation is not None:
        kind = quantized_schedules
        if implementation.has_hopper:
            grouped_scales = implementation.row_format.group > 0

            def codes(call: LoadedCall) -> Any:
                return kind.Hopper(hopper.select_quantized_rule(rows_of(problem, call), grouped_scales))

            found["hopper"] = codes
        found["16: 32x256, 128x256"] = tiled(kind, "16x32x256 4w3s", "16x128x256 4w3s")
        found["64: 32x128, 64x128"] = tiled(kind, "64x32x128 4w4s", "64x64x128 4w4s")
        found["64: 64x128, 128x128"] = tiled(kind, "64x64x128 4w4s", "64x128x128 4w4s")
        found["64: 32x256, 64x256"] = tiled(kind, "64x32x256 4w3s", "64x64x256 4w3s")
        found["128: 128x128 8w"] = tiled(kind, "128x128x128 8w4s", "128x128x128 8w4s")
        return found
    if problem.quant.weight is not None:
        if implementation.has_packed_hopper:
            found["hopper"] = lambda call: packed.HopperPacked(select_packed_config(rows_of(problem, call)))
        found["8: 128x256, 128x128 partial"] = tiled(schedules, "8x128x256 4w3s", "8x128x128 4w4s")
        tiles = "8x128x128 4w4s", "16x128x128 4w4s", "16x64x128 4w4s", "16x64x128 4w6s", "16x64x256 4w3s"
        for tile in (*tiles, "32x128x128 4w3s", "64x128x128 4w3s"):
            found[f"{tile} chained"] = tiled(schedules, tile, tile, chained=True)
        return found
    if problem.dtype == "float32":
        for tile in ("1x64x64 2w4s", "1x128x64 4w4s", "1x64x128 2w3s"):
            found[tile] = tiled(schedules, tile, tile, beyond_one="16x32x64 4w2s")
        found["16: 32x64"] = tiled(schedules, "16x32x64 4w2s", "16x32x64 4w2s")
        found["64: 64x32"] = tiled(schedules, "64x64x32 8w2s", "64x64x32 8w2s")
        return found
    if implementation.has_hopper:

        def plain(call: LoadedCall) -> Any:
            columns = problem.activation.num_halves * round_up(problem.intermediate_size, 64)
            fewest = hopper.count_fewest_tiles(call.inputs.topk_ids.numel(), problem.hidden_size)
            rule = hopper.select_config(rows_of(problem, call), columns, problem.num_local_experts, fewest)
            return schedules.Hopper(rule)

        found["hopper"] = plain
    found["16: 64x128, 128x128"] = tiled(schedules, "16x64x128 4w5s", "16x128x128 4w4s")
    found["32: 128x128"] = tiled(schedules, "32x128x128 4w3s", "32x128x128 4w3s")
    found["64: 32x128"] = tiled(schedules, "64x32x128 4w4s", "64x32x128 4w4s")
    found["64: 64x64"] = tiled(schedules, "64x64x64 4w5s", "64x64x64 4w5s")
    found["64: 64x128"] = tiled(schedules, "64x64x128 4w4s", "64x64x128 4w4s")
    found["64: 128x64"] = tiled(schedules, "64x128x64 4w4s", "64x128x64 4w4s")
    found["128: 256x64 8w"] = tiled(schedules, "128x256x64 8w4s", "128x256x64 8w4s")
    return found


@contextlib.contextmanager
def forced(kernel: MoEKernel, select: Select | None) -> Iterator[None]:
    """The layer runs the schedule, whatever its own rule says; None: its own."""
    implementation: Any = kernel.experts.implementation  # type: ignore[attr-defined]
    forget_recordings()
    if select is not None:
        implementation.select = select
    try:
        yield
    finally:
        if select is not None:
            del implementation.select
        forget_recordings()


@contextlib.contextmanager
def unrecorded(kernel: MoEKernel) -> Iterator[None]:
    """The layer's calls launch, and record nothing."""
    implementation: Any = kernel.experts.implementation  # type: ignore[attr-defined]
    implementation.run = implementation.launch
    try:
        yield
    finally:
        del implementation.run


def shares(kernel: MoEKernel, inputs: Any, reference: torch.Tensor | None) -> dict[str, Any]:
    """By number of tokens the share of rows with the bits of the call of all tokens, and of the reference."""
    whole = kernel(*inputs)
    own, same = {}, {}
    for num_tokens in TOKENS:
        first = max(0, min(100, MOST - num_tokens - ALONE))
        calls = [range(at, at + num_tokens) for at in range(first, first + (ALONE if num_tokens == 1 else 1))]
        equal = other = count = 0
        for rows in calls:
            part = [tensor[rows.start : rows.stop].clone() for tensor in inputs]
            # Another order of the same tokens.
            part = [tensor.flip(0) for tensor in part]
            out = kernel(*part).flip(0)
            equal += int((out == whole[rows.start : rows.stop]).all(1).sum())
            if reference is not None:
                other += int((out == reference[rows.start : rows.stop]).all(1).sum())
            count += len(rows)
        own[num_tokens] = equal / count
        same[num_tokens] = other / count
    return {"own": own, "same": same, "out": whole}


def warm(kernels: dict[str, tuple[MoEKernel, Select | None]], problem: MoEProblem) -> None:
    """Compiles everything that the layer's rows launch."""
    with compiling_only():
        for kernel, select in kernels.values():
            with forced(kernel, select), unrecorded(kernel):
                for num_tokens in dict.fromkeys((*TOKENS, *TIMED)):
                    with contextlib.suppress(Exception):
                        kernel(*make_call(problem, num_tokens))


def measure(model: str, scheme: str, log: Callable[[str], None], deadline: float) -> list[dict[str, Any]]:
    """Rows of one layer."""
    from triton.runtime.errors import OutOfResources

    problem = problem_of(model, scheme)
    flagged = dataclasses.replace(problem, batch_invariant=True)
    weights = make_weights(problem)
    kernels: dict[str, tuple[MoEKernel, Select | None]] = {}
    for name, asked in (("default", problem), ("flag", flagged)):
        kernels[name] = make_kernel(asked, weights, select_backend(asked, require="triton")), None
    kernel = kernels["flag"][0]
    implementation: Any = kernel.experts.implementation  # type: ignore[attr-defined]
    for name, select in candidates_of(flagged, implementation).items():
        kernels[name] = kernel, select
    start = time.monotonic()
    warm(kernels, problem)
    log(f"{model} {scheme}: compiled in {time.monotonic() - start:.0f} s")
    inputs = make_call(problem, MOST)
    reference = None
    rows: dict[str, dict[str, Any]] = {}
    hopper_name = next((name for name in kernels if name.startswith("hopper")), None)
    order = [*([hopper_name] if hopper_name else []), *(name for name in kernels if name != hopper_name)]
    for name in order:
        one, chosen = kernels[name]
        rows[name] = {"model": model, "scheme": scheme, "name": name}
        try:
            with forced(one, chosen):
                found = shares(one, inputs, reference)
        except (OutOfResources, AssertionError, RuntimeError) as error:
            rows[name]["error"] = f"{type(error).__name__}: {str(error)[:150]}"
            log(json.dumps(rows[name]))
            continue
        out = found.pop("out")
        if reference is None:
            reference = out
            found["same"] = found["own"]
        rows[name] |= found
        difference = float((out.float() - reference.float()).norm() / reference.float().norm())
        rows[name]["difference"] = difference
        log(json.dumps(rows[name]))
    for num_tokens in TIMED:
        if time.monotonic() > deadline:
            log(f"{model} {scheme}: out of time at T {num_tokens}")
            break
        calls = [make_call(problem, num_tokens) for _ in range(16 if num_tokens <= 64 else 2)]
        outs = [torch.empty_like(call.hidden_states) for call in calls]
        runs = {}
        for number, name in enumerate(kernels):
            low = num_tokens > 256 and name.startswith(("8", "16", "32"))
            if "error" in rows[name] or low:
                continue
            one, chosen = kernels[name]
            with forced(one, chosen):
                runs[name] = rotated(kernel_runs(one, calls, outs), number)
        timings = time_runs(runs, outs[0].device, 100, 0.04)
        for name, timing in timings.items():
            rows[name].setdefault("us", {})[num_tokens] = timing.median_us
        texts = [f"{name} {timing.median_us:.1f}" for name, timing in timings.items()]
        log(f"{model} {scheme} T {num_tokens}: {', '.join(texts)}")
        del runs
    return list(rows.values())


def low(shares_by_tokens: dict[int, float]) -> str:
    """The shares as text: all, none, or those that are not."""
    values = set(shares_by_tokens.values())
    if values == {1.0}:
        return "all"
    return " ".join(f"{tokens}:{share:.2f}" for tokens, share in shares_by_tokens.items() if share < 1)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The short table."""
    lines = ["model | scheme | candidate | own bits | bits of Hopper | us, ratio to the default by T"]
    for row in rows:
        start = f"{row['model']} | {row['scheme']} | {row['name']}"
        if "error" in row:
            lines.append(f"{start} | {row['error'][:80]}")
            continue
        default = next(
            (r for r in rows if (r["model"], r["scheme"], r["name"]) == (row["model"], row["scheme"], "default")), {}
        )
        base, texts = default.get("us", {}), []
        for tokens, us in row.get("us", {}).items():
            texts.append(f"{tokens}: {us:.0f}" + (f" ({us / base[tokens]:.2f})" if tokens in base else ""))
        lines.append(f"{start} | {low(row['own'])} | {low(row['same'])} | {'; '.join(texts)}")
    return lines


FINAL_SCHEMES: Final = ("unquantized", "fp8_block128", "int4_w4a16_g128", "mxfp4_w4a16")
FINAL_TOKENS: Final = (1, 16, 64, 256, 1024, 4096)
PEER: Final = "vllm_triton"
_FIXED: Final = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8, "SPLIT_K": 1}


def peer_kernel(problem: MoEProblem, weights: Any) -> MoEKernel | str:
    """The Triton kernel of vLLM with the tiles of its batch-invariant mode, or why it is missing."""
    try:
        library = importlib.import_module("moereg_vllm._library")
        importlib.import_module("moereg_vllm.vllm_triton")
        kernels = library.fused_moe("fused_moe")
        kernels.try_get_optimal_moe_config = lambda *_, **__: dict(_FIXED)
        return make_kernel(problem, weights, select_backend(problem, require=PEER))
    except Exception as error:  # Ours are timed without it.
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def measure_final(model: str, scheme: str, log: Callable[[str], None]) -> dict[str, Any]:
    """Bits and times of one layer: the default, the flag and, if it is there, the peer."""
    problem = problem_of(model, scheme)
    flagged = dataclasses.replace(problem, batch_invariant=True)
    weights = make_weights(problem)
    kernels = {
        name: make_kernel(asked, weights, select_backend(asked, require="triton"))
        for name, asked in (("default", problem), ("flag", flagged))
    }
    warm({name: (kernel, None) for name, kernel in kernels.items()}, problem)
    found: dict[str, Any] = {"model": model, "scheme": scheme, "us": {}}
    with forced(kernels["flag"], None):
        found["own"] = shares(kernels["flag"], make_call(problem, MOST), None)["own"]
    peer = peer_kernel(problem, weights)
    if isinstance(peer, str):
        found["peer_missing"] = peer
    else:
        kernels[PEER] = peer
    for num_tokens in FINAL_TOKENS:
        calls = [make_call(problem, num_tokens) for _ in range(16 if num_tokens <= 64 else 2)]
        outs = [torch.empty_like(call.hidden_states) for call in calls]
        runs = {
            name: rotated(kernel_runs(kernel, calls, outs), number)
            for number, (name, kernel) in enumerate(kernels.items())
        }
        timings = time_runs(runs, outs[0].device, 200, 0.05)
        found["us"][num_tokens] = {name: timing.median_us for name, timing in timings.items()}
    log(json.dumps(found))
    return found


def page(record: dict[str, Any]) -> list[str]:
    """The page of a final record, as Markdown."""
    lines = [
        "# batch_invariant on an H200",
        "",
        f"Times in us of CUDA graphs, in turns, and the ratio to the default; {record.get('device', '')}, "
        f"`python -m benches.h200.batch_invariance FOLDER --final`. With `batch_invariant=True` "
        "the share of rows with equal bits in calls of 1 to 4,096 tokens is in the last column.",
        "",
        "| layer | scheme | T | default | flag | ratio | vLLM, fixed tiles | its ratio to the flag | bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        bits = low({int(tokens): share for tokens, share in row["own"].items()})
        for tokens, us in row["us"].items():
            peer = us.get(PEER)
            texts = (f"{peer:.0f}", f"{peer / us['flag']:.2f}") if peer else ("-", "-")
            start = f"| {row['model']} | {row['scheme']} | {tokens} | {us['default']:.0f} | {us['flag']:.0f}"
            lines.append(f"{start} | {us['flag'] / us['default']:.2f} | {texts[0]} | {texts[1]} | {bits} |")
    missing = dict.fromkeys(row["peer_missing"] for row in record["rows"] if "peer_missing" in row)
    return [*lines, *(f"\nvLLM's kernel is missing: {text}" for text in missing)]


def main() -> int:
    """Measures, writes after each layer, and prints the short table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--final", action="store_true")
    parser.add_argument("--page", type=pathlib.Path)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--budget-s", type=float, default=500.0)
    parser.add_argument("--only", choices=("probe",))
    arguments = parser.parse_args()
    if arguments.page:
        print(*page(json.loads(arguments.page.read_text())), sep="\n")
        return 0
    if arguments.folder is None:
        parser.error("a folder is required")
    start = time.monotonic()
    platform = probe_platform()
    if platform.kind != "cuda":
        print(f"benches.h200.batch_invariance needs an NVIDIA GPU, got {platform}", file=sys.stderr)
        return 3
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with (arguments.folder / "batch_invariance.log").open("w") as file:

        def log(text: str) -> None:
            print(f"{time.monotonic() - start:6.1f} {text}", file=file, flush=True)

        record: dict[str, Any] = {"schema": 1, **provenance(platform, ("torch", "triton")), "rows": []}
        record["probe"] = [] if arguments.final else probe(log)
        left_out = []
        schemes = FINAL_SCHEMES if arguments.final else arguments.schemes
        layers = [(model, scheme) for model in arguments.models for scheme in schemes]
        for model, scheme in [] if arguments.only else layers:
            if time.monotonic() - start > arguments.budget_s:
                left_out.append(f"{model} {scheme}")
                continue
            try:
                if arguments.final:
                    record["rows"].append(measure_final(model, scheme, log))
                else:
                    record["rows"] += measure(model, scheme, log, start + arguments.budget_s)
            except Exception as error:  # The other layers still count.
                log(f"{model} {scheme}: {type(error).__name__}: {error}")
                left_out.append(f"{model} {scheme}: {type(error).__name__}: {str(error)[:200]}")
            WORKSPACES.release()
            torch.cuda.empty_cache()
            record |= {**clocks(platform), "left_out": left_out, "seconds": time.monotonic() - start}
            (arguments.folder / "batch_invariance.json").write_text(json.dumps(record, indent=1))
        (arguments.folder / "batch_invariance.json").write_text(json.dumps(record, indent=1))
    for dtype, partial in dict.fromkeys((row["dtype"], row["partial"]) for row in record["probe"]):
        own = [row for row in record["probe"] if (row["dtype"], row["partial"]) == (dtype, partial)]
        words = sorted({f"{row['class']} {row['instruction'].split('.row')[0]}" for row in own})
        print(f"probe {dtype} {'a sum a step' if partial else 'one sum'}: {', '.join(words)}")
    print(*(page(record) if arguments.final else table(record["rows"])), sep="\n")
    print(*(f"left out: {text}" for text in left_out), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

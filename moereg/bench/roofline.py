"""The roofline of a call: the best that this device can reach, with both ceilings measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Final

import torch
import torch.nn.functional as F

from moereg.bench.inputs import Call
from moereg.bench.timing import Run, time_runs
from moereg.runtime.memory import free_memory_bytes
from moereg.spec.problem import MoEProblem

# Far beyond any cache; on a GPU also long compared with a kernel launch.
_CPU_READ_BYTES: Final = 1 << 29
_GPU_READ_BYTES: Final = 1 << 32
_READ_FRACTION: Final = 0.3
"""Largest share of free memory."""
_READ_ROUNDS: Final = 12
_PIECE_NUMEL: Final = 1 << 20
_GPU_MATMUL_SIZE: Final = 8192
_CPU_MATMUL_SIZES: Final = (1024, 2048, 4096)
_LONG_MATMUL_US: Final = 20e3
"""A CPU that takes this long uses all of its threads; a larger product would only take longer."""
_MATMULS_AT_A_TIME: Final = 8
# A GPU's clock drops during the first second of full load; only the rate after that is sustained.
_SETTLING_SECONDS: Final = 1.5
_SETTLED_FRACTION: Final = 1 / 3


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The highest measured rates of a device: of one large product, sustained, and of reading a large buffer once."""

    matmul_tflops: float
    read_gbps: float
    read_by: str


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The work of a call, independent of the kernel: operations of both matmuls for routes to local experts.

    `num_bytes` are those of active experts' weights, hidden states and output, each moved once.
    """

    flops: float
    num_bytes: float


def expert_bytes(problem: MoEProblem) -> int:
    """Bytes of one expert's canonical weights, including scales and biases."""
    rows = problem.quant.tensor_rows(
        1, problem.hidden_size, problem.intermediate_size, problem.activation.num_halves, problem.has_bias
    )
    return sum(math.prod(row.shapes[0]) * (row.dtype or problem.torch_dtype).itemsize for row in rows)


def work_of(problem: MoEProblem, call: Call) -> Traffic:
    """Counts a call's work; reads its ids on the host."""
    # Without an expert map the first experts are local.
    local = call.topk_ids[(call.topk_ids >= 0) & (call.topk_ids < problem.num_local_experts)]
    matrices = (problem.activation.num_halves + 1) * problem.hidden_size * problem.intermediate_size
    return Traffic(
        flops=2.0 * local.numel() * matrices,
        num_bytes=float(local.unique().numel() * expert_bytes(problem) + 2 * call.hidden_states.nbytes),
    )


def roofline_us(works: Sequence[Traffic], ceilings: Ceilings) -> float:
    """Mean over calls of the larger of the memory time and the compute time."""
    return statistics.mean(
        max(work.num_bytes / ceilings.read_gbps / 1e3, work.flops / ceilings.matmul_tflops / 1e6) for work in works
    )


def measure_ceilings(dtype: torch.dtype, device: torch.device) -> Ceilings:
    """Measures both ceilings, in a second or two; on a CPU with torch's current number of threads.

    The product is in the given dtype; on a CPU fp32 counts too.
    """
    read_gbps, read_by = _measure_read(device)
    if device.type == "cpu":
        # On a CPU without 16-bit instructions, kernels that widen are faster.
        tflops = max(_cpu_matmul_tflops(candidate) for candidate in {dtype, torch.float32})
    else:
        run = _matmul(_GPU_MATMUL_SIZE, dtype, device)
        tflops = _matmul_tflops(_GPU_MATMUL_SIZE, settled_us(run, device))
    return Ceilings(tflops, read_gbps, read_by)


def settled_us(run: Run, device: torch.device) -> float:
    """Time of one run, after running back to back until the clock has settled."""
    times_us: list[float] = []
    start = time.perf_counter()
    while not times_us or time.perf_counter() - start < _SETTLING_SECONDS:
        times_us += time_runs({"": [run]}, device, _MATMULS_AT_A_TIME)[""].samples_us
    return statistics.median(times_us[-max(1, int(len(times_us) * _SETTLED_FRACTION)) :])


def _cpu_matmul_tflops(dtype: torch.dtype) -> float:
    best = 0.0
    for size in _CPU_MATMUL_SIZES:
        # Other processes may have interfered; the best time is closest to the machine's limit.
        device = torch.device("cpu")
        time_us = time_runs({"": [_matmul(size, dtype, device)]}, device, _MATMULS_AT_A_TIME)[""].min_us
        best = max(best, _matmul_tflops(size, time_us))
        if time_us > _LONG_MATMUL_US:
            break
    return best


def _matmul(size: int, dtype: torch.dtype, device: torch.device) -> Run:
    x, weight = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return functools.partial(F.linear, x, weight)


def _matmul_tflops(size: int, time_us: float) -> float:
    return 2 * size**3 / time_us / 1e6


def _measure_read(device: torch.device) -> tuple[float, str]:
    """GB/s of the fastest known way to read a buffer, and its name."""
    num_bytes = _CPU_READ_BYTES if device.type == "cpu" else _GPU_READ_BYTES
    if (free_bytes := free_memory_bytes(device)) is not None:
        num_bytes = min(num_bytes, int(free_bytes * _READ_FRACTION))
    # Normal numbers, since moving zeros takes less power. A whole number of blocks for every reader.
    piece = torch.randn(_PIECE_NUMEL, device=device, dtype=torch.bfloat16)
    buffer = piece.repeat(max(1, num_bytes // piece.nbytes))
    best = (0.0, "")
    for name, run in _readers(buffer):
        timing = time_runs({"": [run]}, device, _READ_ROUNDS)[""]
        time_us = timing.min_us if device.type == "cpu" else timing.median_us
        best = max(best, (buffer.nbytes / time_us / 1e3, name))
    return best


def _readers(buffer: torch.Tensor) -> Iterator[tuple[str, Run]]:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        yield f"torch sum of {str(dtype).removeprefix('torch.')}", buffer.view(dtype).sum
    if buffer.device.type != "cuda":
        return
    try:
        from moereg.kernels.launch.device import num_multiprocessors
        from moereg.kernels.read import word_readers
    except ImportError:  # Without triton, use torch's readers.
        return
    yield from word_readers(buffer.view(torch.int32), num_multiprocessors(buffer.device))

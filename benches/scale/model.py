"""The model: bytes that each dispatcher puts on the wire, and a layer's time out of measured kernels and collectives.

All ranks have T tokens of their own. A call takes as long as its slowest rank; nothing overlaps. Times are in
microseconds, rates in bytes or operations a microsecond.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, Final

from benches.scale.routes import Share, shares
from benches.stored import quant_rows
from moereg.bench.roofline import expert_bytes
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

__all__ = [
    "ASSUMED",
    "LAYERS",
    "MODELLED",
    "Cost",
    "Dispatcher",
    "Layer",
    "alone",
    "bare_us",
    "cost",
    "row_bytes",
    "wire_bytes",
]

RESULTS: Final = pathlib.Path(__file__).resolve().parent.parent / "results"


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer that the page is about.

    Attributes:
        model: As `--model` takes it.
        quant: Its scheme.
        measured: File and key of the kernel's times.
        skewed: Layer whose loss under Zipf routing was measured.
    """

    model: str
    quant: str
    measured: str
    skewed: str

    @functools.cached_property
    def problem(self) -> MoEProblem:
        """All of it."""
        return MoEProblem(**get_shape(self.model).problem_keywords(), quant=self.quant)

    @property
    def name(self) -> str:
        """Model and scheme."""
        return f"{self.model} {self.quant.replace('unquantized', 'bf16')}"


LAYERS: Final = (
    Layer("qwen3-30b-a3b", "unquantized", "h200_table_bf16.json", "qwen3-30b-a3b"),
    Layer("deepseek-v3", "fp8_block128", "h200_quant.json", "qwen3-30b-a3b"),
    Layer("gpt-oss-120b", "mxfp4_w4a16", "h200_quant.json", "gpt-oss-120b"),
)


@dataclasses.dataclass(frozen=True)
class Dispatcher:
    """A token dispatcher.

    Attributes:
        name: As moereg registers it, with the wire, the transport or the variant where that differs.
        captured: Whether a CUDA graph holds it, so that the host's time does not count.
        note: What it sends.
    """

    name: str
    captured: bool
    note: str

    @property
    def registered(self) -> str:
        """As moereg registers it."""
        return "all_to_all_sums" if self.name == "all_to_all, sums" else self.name.partition(",")[0]

    @property
    def coded(self) -> bool:
        """Whether tokens travel as 8-bit codes with scales."""
        return self.name.endswith(", fp8")


MODELLED: Final = (
    Dispatcher("all_to_all", False, "each token once to each rank with one of its experts; one row per route back"),
    Dispatcher("all_to_all, fp8", False, "the same with tokens in 8 bits, rows back in 16"),
    Dispatcher("all_to_all, sums", False, "`all_to_all_sums`: as the first, but one row per rank back, summed there"),
    Dispatcher("all_gather", True, "all tokens to all ranks; a reduce-scatter of sums back"),
    Dispatcher("all_gather, fp8", True, "the same with tokens in 8 bits; sums in 16"),
)


_SUMS: Final = next(dispatcher for dispatcher in MODELLED if dispatcher.name == "all_to_all, sums")


@dataclasses.dataclass(frozen=True)
class Assumed:
    """Numbers that nobody measured here. Each is replaced once it is.

    Attributes:
        host_us: Of a collective's measured time, what a captured one does not take.
        eager_us: Host time of a call that no graph holds, on top of what the device takes: the host waits for sizes in
            it, so it launches nothing ahead. What `all_to_all` took on two H200s beyond experts and collectives at 1
            and 64 tokens: the median of 20 rows from 240 to 990, since a host's time varies so.
        hop_us: Of each further rank in a ring.
        gather_us, sort_us: Kernels around the experts, all_gather's and the others'.
        pass_rate: Of copies and sums of rows, as a share of the measured reading rate.
        gpus_per_host: Ranks that NVLink joins.
        network_rate: Bytes a microsecond of one rank's 400 Gb/s adapter, of 50,000 on paper.
        network_us: More than NVLink takes before the first byte.
    """

    host_us: float = 23.0
    eager_us: float = 500.0
    hop_us: float = 1.0
    gather_us: float = 5.0
    sort_us: float = 20.0
    pass_rate: float = 0.7
    gpus_per_host: int = 8
    network_rate: float = 45_000.0
    network_us: float = 15.0


ASSUMED: Final = Assumed()


@dataclasses.dataclass(frozen=True)
class Cost:
    """The time of a call, in parts.

    Attributes:
        kernel_us: The slowest rank's experts.
        move_us: Collectives.
        rows_us: Copying and summing rows around them.
        eager_us: The host's, where no graph holds the call.
    """

    kernel_us: float
    move_us: float
    rows_us: float
    eager_us: float = 0.0

    @property
    def total_us(self) -> float:
        """All of it."""
        return self.kernel_us + self.move_us + self.rows_us + self.eager_us


@functools.cache
def _load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


@functools.cache
def _quant_rows() -> list[dict[str, Any]]:
    return quant_rows(RESULTS)


def row_bytes(problem: MoEProblem, coded: bool) -> int:
    """Bytes of a token on its way out, with its routes: an id and a weight each."""
    hidden = problem.hidden_size
    token = hidden + -(-hidden // 128) * 4 if coded else hidden * problem.torch_dtype.itemsize
    return token + problem.top_k * 8


def wire_bytes(layer: Layer, dispatcher: Dispatcher, num_tokens: int, ranks: Sequence[Share]) -> tuple[float, float]:
    """Bytes that the busiest rank sends or receives, whichever is more: on the way out, and on the way back."""
    problem, others = layer.problem, len(ranks) - 1
    out, back = row_bytes(problem, dispatcher.coded), problem.hidden_size * problem.torch_dtype.itemsize
    # A rank sends to all others, and the busiest one receives from all others.
    tokens = max(sum(share.reached for share in ranks) / len(ranks), max(share.reached for share in ranks)) * others
    routes = max(share.routes for share in ranks) * others
    rows_out, rows_back = {
        "all_to_all": (tokens, routes),
        "all_to_all, fp8": (tokens, routes),
        "all_to_all, sums": (tokens, tokens),
        "all_gather": (others, others),
        "all_gather, fp8": (others, others),
    }[dispatcher.name]
    return num_tokens * rows_out * out, num_tokens * rows_back * back


def cost(layer: Layer, dispatcher: Dispatcher, num_ranks: int, num_tokens: int, routing: str, balanced: bool) -> Cost:
    """The time of a call, on average over the orders in which experts may lie."""
    problem = layer.problem
    found = [
        _cost(layer, dispatcher, num_tokens, ranks, routing)
        for ranks in shares(problem.num_experts, num_ranks, problem.top_k, routing, balanced)
    ]
    parts = zip(*(dataclasses.astuple(one) for one in found), strict=True)
    return Cost(*(sum(part) / len(found) for part in parts))


def alone(layer: Layer, num_ranks: int, num_tokens: int, routing: str = "uniform", balanced: bool = False) -> float:
    """The slowest rank's experts, with its share of experts and routes and nothing to move."""
    return cost(layer, _SUMS, num_ranks, num_tokens, routing, balanced).kernel_us


def bare_us(layer: Layer, num_ranks: int, num_tokens: int, captured: bool = False) -> float:
    """Tokens with their routes out once a rank, and a row back from each, without padding, under uniform routing."""
    problem = layer.problem
    (ranks,) = shares(problem.num_experts, num_ranks, problem.top_k, "uniform", balanced=False)
    out, back = wire_bytes(layer, _SUMS, num_tokens, ranks)
    return sum(_collective("all_to_all_single", sent, num_ranks, captured) for sent in (out, back))


def _cost(layer: Layer, dispatcher: Dispatcher, num_tokens: int, ranks: Sequence[Share], routing: str) -> Cost:
    problem, size = layer.problem, len(ranks)
    out, back = wire_bytes(layer, dispatcher, num_tokens, ranks)
    kernel = max(_kernel_us(layer, share, num_tokens * size, routing, dispatcher) for share in ranks)
    rate = _load("h200_table_bf16.json")["ceilings"]["read_tbps"] * 1e6 * ASSUMED.pass_rate
    token = problem.hidden_size * problem.torch_dtype.itemsize
    if dispatcher.registered == "all_gather":
        move = _collective("all_gather_into_tensor", out, size, captured=True)
        move += _collective("reduce_scatter_tensor", back, size, captured=True)
        # Codes are restored for experts that round again.
        restored = 2 * num_tokens * size * token if dispatcher.coded else 0
        return Cost(kernel, move, ASSUMED.gather_us + restored / rate)
    # Rows are read and written before they leave, and read and summed when they are back.
    passed = 2 * out + back + num_tokens * token
    if dispatcher.registered == "all_to_all":
        # A row for each route that arrived, since weights are applied at home.
        passed += 2 * max(share.routes for share in ranks) * num_tokens * size * token
    rows = ASSUMED.sort_us + passed / rate
    move = sum(_collective("all_to_all_single", sent, size, captured=True) for sent in (out, back))
    sizes = _collective("all_to_all_single", 16.0 * size, size, captured=True)
    return Cost(kernel, move + sizes, rows, ASSUMED.eager_us)


def _collective(name: str, sent: float, size: int, captured: bool) -> float:
    """The time of a collective of which each rank sends so many bytes."""
    rows = _load("h200_links.json")["rows"]
    # Two ranks were measured: half of what all_to_all and reduce_scatter are given stays where it is.
    half = 1.0 if name == "all_gather_into_tensor" else 0.5
    points = [(row["bytes"] * half, row[f"{name}_us"]) for row in rows]
    time = 0.0 if size == 1 else _line(points, sent) - (ASSUMED.host_us if captured else 0.0)
    if name != "all_to_all_single":
        time += ASSUMED.hop_us * max(0, size - 2)
    hosts = math.ceil(size / ASSUMED.gpus_per_host)
    if hosts == 1:
        return time
    # A gathered token crosses to each other host once; one that is sent crosses for every rank there.
    apart = (hosts - 1) if name != "all_to_all_single" else size - ASSUMED.gpus_per_host
    inside = sent * (size - 1 - apart) / (size - 1) if name == "all_to_all_single" else sent
    near = _line(points, inside) - (ASSUMED.host_us if captured else 0.0)
    start = _line(points, 0.0) - (ASSUMED.host_us if captured else 0.0)
    hops = 0.0 if name == "all_to_all_single" else ASSUMED.hop_us * (size - 2)
    return max(near, start + sent * apart / (size - 1) / ASSUMED.network_rate) + ASSUMED.network_us + hops


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines through the points; level before the first, and the last one goes on."""
    if x <= points[0][0]:
        return points[0][1]
    place = min(bisect.bisect_left([point[0] for point in points], x), len(points) - 1)
    (x0, y0), (x1, y1) = points[place - 1], points[place]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _kernel_us(layer: Layer, share: Share, num_tokens: float, routing: str, dispatcher: Dispatcher) -> float:
    """A rank's experts: their roofline over the share of it that the layer reached with as many rows an expert."""
    problem = layer.problem
    routes = share.routes * num_tokens
    ceilings = _load(layer.measured)["ceilings"]
    rate = (
        ceilings.get("matmul_tflops")
        or ceilings["float8_e4m3fn_tflops" if problem.quant.activation is not None else "bfloat16_tflops"]
    )
    matrices = (problem.activation.num_halves + 1) * problem.hidden_size * problem.intermediate_size
    rows = num_tokens if dispatcher.registered == "all_gather" else num_tokens * share.reached
    token = problem.hidden_size * problem.torch_dtype.itemsize
    moved = share.active(num_tokens) * expert_bytes(problem) + 2 * rows * token
    roof = max(moved / ceilings["read_tbps"] / 1e6, 2 * routes * matrices / rate / 1e6)
    return roof / _reached(layer, routes / share.experts, routing)


def _reached(layer: Layer, rows_per_expert: float, routing: str) -> float:
    found = _level(_points(layer), rows_per_expert)
    return min(1.0, found * (_skew(layer.skewed, rows_per_expert) if routing == "zipf" else 1.0))


@functools.cache
def _points(layer: Layer) -> list[tuple[float, float]]:
    if layer.measured == "h200_quant.json":
        rows = [row for row in _quant_rows() if row["scheme"] == layer.quant]
    else:
        rows = _load(layer.measured)["rows"]
    return _by_rows([row for row in rows if row["model"] == layer.model and not row["wrong"]], layer.problem)


def _skew(model: str, rows_per_expert: float) -> float:
    """The share of the roofline under Zipf routing over that under uniform routing, of whole layers in bf16."""
    zipf, uniform = (_level(_routed_points(model, routing), rows_per_expert) for routing in ("zipf", "uniform"))
    return zipf / uniform


@functools.cache
def _routed_points(model: str, routing: str) -> list[tuple[float, float]]:
    problem = MoEProblem(**get_shape(model).problem_keywords())
    rows = _load("h200_shapes.json")["rows"]
    return _by_rows([row for row in rows if (row["layer"], row["routing"]) == (model, routing)], problem)


def _by_rows(rows: Sequence[dict[str, Any]], problem: MoEProblem) -> list[tuple[float, float]]:
    per_token = problem.top_k / problem.num_experts
    return sorted((math.log2(row["tokens"] * per_token), row["share"]) for row in rows)


def _level(points: Sequence[tuple[float, float]], rows_per_expert: float) -> float:
    """Straight lines over the logarithm, level beyond both ends."""
    x = math.log2(max(rows_per_expert, 1e-9))
    return points[-1][1] if x >= points[-1][0] else _line(points, x)

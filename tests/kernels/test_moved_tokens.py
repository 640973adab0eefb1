"""Triton's kernels of what ways between ranks do with tokens, against torch's way: the same function, bit for bit."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moereg.kernels.launch import remembered
from moereg.kernels.rows import all_gather, low_latency
from moereg.prepare_finalize import GroupFacts, LowLatency
from moereg.prepare_finalize.all_gather import _padded
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables
from moereg.prepare_finalize.wire import CodedWire, PlainWire, as_bytes
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACEMENT = ExpertPlacement(5, ((3, 0, 4), (1, 2, 3)))


class Ranks:
    """Stands for a group."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2


def problem_of(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 5, "num_local_experts": 3, "hidden_size": 40, "intermediate_size": 8, "top_k": 2}
    return MoEProblem(**{**facts, "placement": "map", "max_num_tokens": 3, **changes})


def ids_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def tokens_of(problem: MoEProblem, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, problem.hidden_size, generator=generator)
    return (tokens * torch.exp(3 * torch.randn(num_tokens, 1, generator=generator))).to(DEVICE, problem.torch_dtype)


CASES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16, weights on inputs": {"top_k": 1, "apply_router_weight_on_input": True},
    "fp8_block128, a short group": {"quant": "fp8_block128", "hidden_size": 136},
    "mxfp8": {"quant": "mxfp8", "hidden_size": 64},
    "int8_w8a8, an odd row": {"quant": "int8_w8a8", "hidden_size": 33},
}


@pytest.mark.parametrize("name", CASES)
def test_rooms_hold_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks; experts on both; ids that are none; tokens that name an expert twice, until its room is full."""
    monkeypatch.setattr(low_latency, "_COLUMNS", 32)
    problem = problem_of(**CASES[name])
    wire = PlainWire(problem) if problem.quant.activation is None else CodedWire(problem, problem.quant)
    seen = LowLatency.experts_problem_of(problem, GroupFacts(2, "gloo", "cpu"), "batched")
    routes = [ids_of([3, 0], [0, 3], [7, 3]), ids_of([3, 3], [-1, -(2**31)], [3, 3])]
    ranks = [
        LowLatency(problem, seen, Ranks(rank), PlacementTables(PLACEMENT, rank, DEVICE), wire)  # type: ignore[arg-type]
        for rank in range(2)
    ]
    arrived: list[list[torch.Tensor]] = []
    places = []
    for in_triton in (False, True):
        wire.in_triton, sent, home = in_triton, [], []
        for rank, moves in enumerate(ranks):
            ids = routes[rank][:, : problem.top_k]
            weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(rank)).to(DEVICE)
            buffer = torch.zeros(2, moves._layout()[1], dtype=torch.uint8, device=DEVICE)
            fill = moves._fill_in_triton if in_triton else moves._fill
            home.append(fill(moves._rooms(buffer), tokens_of(problem, 3, rank), weights, ids))
            sent.append(buffer)
        places.append(torch.stack([each.long() for each in home]))
        arrived.append([torch.stack([buffer[rank] for buffer in sent]) for rank in range(2)])
    assert torch.equal(*places)
    for rank, moves in enumerate(ranks):
        wire.in_triton = False
        expected, num_rows, counts = moves._empty(moves._rooms(arrived[0][rank]))
        wire.in_triton = True
        found, num_found, counts_found = moves._empty_in_triton(moves._rooms(arrived[1][rank]))
        assert torch.equal(num_rows, num_found)
        assert torch.equal(counts, counts_found)
        valid = torch.arange(expected.shape[1], device=DEVICE) < num_rows.unsqueeze(1)
        assert valid.any()
        assert torch.equal(as_bytes(expected[valid]), as_bytes(found[valid]))
        results = torch.zeros(2, 2, 9, problem.hidden_size, dtype=problem.torch_dtype, device=DEVICE)
        expected[~valid] = torch.nan
        moves._send_back(results[0], expected, counts)
        low_latency.fill_rooms(results[1], expected, counts)
        filled = torch.arange(3, device=DEVICE) < counts.unsqueeze(2)
        assert torch.equal(*(each.unflatten(1, (3, 3))[filled] for each in results))


@triton.jit
def _restored_kernel(out, codes, scales):
    lanes = tl.arange(0, 256)
    tl.store(out + lanes, low_latency.restored(tl.load(codes + lanes), tl.load(scales + lanes)))


def test_every_exponent_is_the_scale_that_torch_reads() -> None:
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    found = torch.zeros(256, device=DEVICE)
    _restored_kernel[(1,)](found, torch.ones_like(exponents, dtype=torch.int8), exponents)
    torch.testing.assert_close(found, exponents.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ids_at_once", [16, 2048])
def test_places_go_on_from_one_piece_to_the_next(ids_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_latency, "_IDS", ids_at_once)
    problem = problem_of(max_num_tokens=12)
    tables = PlacementTables(PLACEMENT, 1, DEVICE)
    wire = PlainWire(problem)
    seen = LowLatency.experts_problem_of(problem, GroupFacts(2, "gloo", "cpu"), "batched")
    moves = LowLatency(problem, seen, Ranks(1), tables, wire)  # type: ignore[arg-type]
    ids = torch.randint(-1, 6, (12, 2), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    weights, found = torch.rand(12, 2, device=DEVICE), []
    for fill in (moves._fill, moves._fill_in_triton):
        buffer = torch.zeros(2, moves._layout()[1], dtype=torch.uint8, device=DEVICE)
        home = fill(moves._rooms(buffer), tokens_of(problem, 12, 0), weights, ids)
        found.append((home.long(), moves._rooms(buffer).counts))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    # No tokens: rooms are said to be empty.
    moves._fill_in_triton(moves._rooms(buffer), tokens_of(problem, 0, 0), weights[:0], ids[:0])
    assert not moves._rooms(buffer).counts.any()


@pytest.mark.parametrize("quant", ["fp8_channel_token", "fp8_block128", "mxfp8", "int8_w8a8"])
def test_codes_are_those_of_quantize(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tokens a program; rows of zeros, with an infinity and with NaN."""
    monkeypatch.setattr("moereg.kernels.quantized.rows_moved._MANY_PROGRAMS", 2)
    problem = problem_of(quant=quant, hidden_size=200)
    wire = CodedWire(problem, get_scheme(quant))
    tokens = tokens_of(problem, 6, 0)
    tokens[1], tokens[2, 3], tokens[3, 5] = 0.0, torch.inf, torch.nan
    found = []
    for in_triton in (False, True):
        wire.in_triton = in_triton
        columns = wire.encode(tokens)
        found.append((*columns, wire.decode(columns).hidden_states))
    finite = torch.tensor([True, True, False, False, True, True], device=DEVICE)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one[finite], other[finite])
    assert torch.equal(*(numbers[-1].isnan() for numbers in found))
    # Columns of a tensor whose rows are further apart.
    wire.in_triton = True
    assert torch.equal(wire.encode(torch.cat([tokens, tokens], 1)[:, :200])[0][finite], found[0][0][finite])


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_tokens_are_filled_up(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "_COLUMNS", 16)
    problem = problem_of()
    ids = ids_of([0, 1, 2], [2, 3, -1])[:num_tokens]
    given = tokens_of(problem, num_tokens, 0), torch.rand(num_tokens, 3, device=DEVICE), ids
    for one, other in zip(_padded(*given, 5, False), _padded(*given, 5, True), strict=True):
        assert torch.equal(one, other)


def test_ranks_are_added_in_order_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_gather, "_COLUMNS", 16)
    parts = torch.randn(3, 4, 24, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.bfloat16)
    out = torch.full((6, 24), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    all_gather.sum_of_ranks(out[::2], parts)
    first, second, third = parts[:, :3].float()
    assert torch.equal(out[::2], (first + second + third).bfloat16())
    assert out[1::2].isnan().all()


class Recorded:
    """Stands for a recording; says what is replayed."""

    def __init__(self, said: list[object]) -> None:
        self.complete = True
        self.said = said

    def replay(self, pointers: list[int]) -> None:
        self.said.append(pointers)


class Somewhere:
    """A tensor of a GPU that is not there."""

    dtype, device, shape = torch.bfloat16, torch.device("cuda", 0), (4, 4)

    def __init__(self, address: int, step: int = 1) -> None:
        self.address, self.step = address, step

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return 16

    def stride(self) -> tuple[int, int]:
        return (4 * self.step, self.step)


def test_later_launches_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    monkeypatch.setattr(remembered, "_RECORDINGS", collections.OrderedDict())
    monkeypatch.setattr(remembered, "_MAX_RECORDINGS", 2)
    monkeypatch.setattr(remembered, "recording", lambda tensors: contextlib.nullcontext(Recorded(said)))

    def call(what: str, *tensors: Somewhere | None, numbers: object = ()) -> object:
        said.clear()
        remembered.launch_remembered(what, lambda: said.append("launched"), tensors, numbers)  # type: ignore[arg-type]
        (one,) = said
        return one

    assert call("a", Somewhere(16), None) == "launched"
    assert call("a", Somewhere(32), None) == [32, 0]
    # Other kernels, other numbers, and pointers that are not multiples of 16.
    assert call("b", Somewhere(32), None) == "launched"
    assert call("b", Somewhere(32), None, numbers=1) == "launched"
    assert call("b", Somewhere(24), None, numbers=1) == "launched"
    assert call("b", Somewhere(48), None, numbers=1) == [48, 0]
    # Another tensor beside the first, and other strides.
    assert call("b", Somewhere(48), Somewhere(32), numbers=1) == "launched"
    assert call("b", Somewhere(48, step=2), None, numbers=1) == "launched"
    assert call("b", Somewhere(32), None, numbers=1) == "launched"
    assert len(remembered._RECORDINGS) == 2
    assert call("a", Somewhere(16), None) == "launched"  # It was not used for longest.
    for recorded in remembered._RECORDINGS.values():
        recorded.complete = False
    assert call("a", Somewhere(16), None) == "launched"

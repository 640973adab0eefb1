"""Triton's kernels of what token dispatchers do with tokens, against torch's code: the same function, bit for bit."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from moereg.kernels.quantized.rows_moved import restore_tokens
from moereg.kernels.rows import all_gather, all_to_all
from moereg.prepare_finalize import exchange
from moereg.prepare_finalize.all_gather import _padded
from moereg.prepare_finalize.exchange import RowLayout, rounded_rows
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables
from moereg.prepare_finalize.wire import CodedWire
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import get_scheme

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def problem_of(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 5, "num_local_experts": 3, "hidden_size": 40, "intermediate_size": 8, "top_k": 2}
    return MoEProblem(**{**facts, "placement": "map", "max_num_tokens": 3, **changes})


def ids_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def tokens_of(problem: MoEProblem, num_tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(num_tokens, problem.hidden_size, generator=generator)
    return (tokens * torch.exp(3 * torch.randn(num_tokens, 1, generator=generator))).to(DEVICE, problem.torch_dtype)


def test_every_exponent_is_the_scale_that_torch_reads() -> None:
    exponents = torch.arange(256, dtype=torch.uint8, device=DEVICE).unsqueeze(1)
    found = restore_tokens(torch.ones_like(exponents, dtype=torch.int8), exponents, 0, torch.float32)
    torch.testing.assert_close(found, exponents.view(torch.float8_e8m0fnu).float(), rtol=0, atol=0, equal_nan=True)


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


@st.composite
def calls(draw: st.DrawFn) -> tuple[PlacementTables, torch.Tensor, RowLayout]:
    """Replicas, ids out of range, one id several times; columns of words of 1, 2 and 4 bytes."""
    num_ranks, num_experts = draw(st.integers(1, 5)), draw(st.integers(5, 9))
    held = [set(range(rank, num_experts, num_ranks)) for rank in range(num_ranks)]
    for rank, expert in draw(st.lists(st.tuples(st.integers(0, num_ranks - 1), st.integers(0, num_experts - 1)))):
        held[rank].add(expert)
    placement = ExpertPlacement(num_experts, tuple(tuple(sorted(each)) for each in held))
    num_tokens, top_k = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    one = st.integers(0, num_experts - 1) | st.sampled_from((-(2**31), -1, num_experts, 2**31 - 1))
    ids = draw(st.lists(one, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    widths = draw(st.sampled_from(((8,), (18,), (5,), (40, 12), (6, 3))))
    layout = RowLayout(top_k, draw(st.booleans()), widths)
    tables = PlacementTables(placement, draw(st.integers(0, num_ranks - 1)), DEVICE)
    return tables, torch.tensor(ids, dtype=torch.int32).view(num_tokens, top_k).to(DEVICE), layout


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(calls(), st.sampled_from((0, 1, 2)))
def test_rows_are_those_of_torch(call: tuple[PlacementTables, torch.Tensor, RowLayout], first_byte: int) -> None:
    """Also of columns that begin at any byte, as views may."""
    tables, ids, layout = call
    num_ranks, num_tokens = tables.placement.num_ranks, len(ids)
    generator = torch.Generator().manual_seed(num_tokens)
    columns = tuple(
        torch.randint(256, (first_byte + num_tokens * width,), generator=generator, dtype=torch.uint8)
        .to(DEVICE)[first_byte:]
        .view(num_tokens, width)
        for width in layout.widths
    )
    weights = torch.rand(ids.shape, generator=generator).to(DEVICE) if layout.has_weights else None
    counts = torch.full((num_ranks, 2), -7, dtype=torch.int64, device=DEVICE)
    stamp = torch.tensor([7 * exchange.STAMP], device=DEVICE)
    placed = all_to_all.place_routes(ids, tables.num_holders, tables.holders, tables.rank, counts, stamp)
    expected = exchange.place_routes(ids, tables)
    stamped = expected.counts.clone()
    stamped[:, 0] += stamp
    assert torch.equal(placed.counts, stamped)
    assert torch.equal(placed.parts, expected.parts)
    rows, home = all_to_all.pack_tokens(placed, ids, weights, columns, layout.words)
    expected_rows, expected_home = exchange.pack_tokens(expected, ids, weights, columns, layout)
    assert torch.equal(home, expected_home)
    assert len(expected_rows) <= len(rows)
    written = expected_rows.clone()
    # Nobody writes the bytes between the parts of a row.
    written[:] = rows[: len(expected_rows)]
    found = exchange.unpack_tokens(written, layout)
    for mine, others in zip(flat(found), flat(exchange.unpack_tokens(expected_rows, layout)), strict=True):
        assert torch.equal(mine, others)
    check_unpacking(expected_rows, placed.counts, layout)
    by_token = all_to_all.pack_tokens(placed, ids, weights, columns, layout.words, True)[1]
    assert torch.equal(by_token, exchange.pack_tokens(expected, ids, weights, columns, layout, True)[1])


def flat(parts: tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor | None]) -> list[torch.Tensor]:
    columns, ids, weights = parts
    return [*columns, ids, *([] if weights is None else [weights])]


def check_unpacking(rows: torch.Tensor, counts: torch.Tensor, layout: RowLayout) -> None:
    """What one rank sends to all arrives as if each had sent its part of it to one."""
    num_routes = int(counts[:, 1].sum())
    room = rounded_rows(num_routes, None) + 3
    padded = torch.cat([rows, rows.new_full((3, layout.row_bytes), 255)])
    found = all_to_all.unpack_tokens(padded, counts, room, layout.top_k, layout.has_weights, layout.words)
    assert found[1][num_routes:].flatten().tolist() == [-1] * (room - num_routes)
    for mine, others in zip(flat(found), flat(exchange.unpack_tokens(rows, layout)), strict=True):
        assert torch.equal(mine[:num_routes], others)
    if layout.has_weights:
        whole = all_to_all.split_rows(padded, counts, layout.top_k, layout.words)
        assert (whole[1][len(rows) :] == -1).all()
        for mine, others in zip(flat(whole), flat(exchange.split_rows(rows, layout)), strict=True):
            assert torch.equal(mine[: len(rows)], others)


def test_many_tokens_take_several_turns_of_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_to_all, "_FEW_IDS", 4)
    monkeypatch.setattr(all_to_all, "_MANY_IDS", 16)
    placement = ExpertPlacement(6, ((0, 1, 2), (3, 4), (5, 0)))
    tables = PlacementTables(placement, 1, DEVICE)
    ids = torch.randint(-1, 6, (21, 3), generator=torch.Generator().manual_seed(3), dtype=torch.int32).to(DEVICE)
    counts = torch.empty((3, 2), dtype=torch.int64, device=DEVICE)
    stamp = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    placed = all_to_all.place_routes(ids, tables.num_holders, tables.holders, 1, counts, stamp)
    for mine, others in zip(placed, exchange.place_routes(ids, tables), strict=True):
        assert torch.equal(mine, others)


def test_few_sizes_are_rounded_to() -> None:
    for count in (*range(200), 65_536, 65_537):
        assert count <= rounded_rows(count, None) <= count * 9 / 8
    assert len({rounded_rows(count, None) for count in range(1024, 2049)}) == 9
    assert rounded_rows(1025, 1030) == 1030
    assert rounded_rows(1040, 1030) == 1040


def test_a_row_says_where_its_parts_are() -> None:
    layout = RowLayout(8, True, (4096, 64))
    assert (layout.starts, layout.row_bytes) == ((80, 4176), 4240)
    assert layout.words == all_to_all.RowWords(4, 1060, 1060, (20, 1044), (1024, 16))
    assert RowLayout(2, False, (18,)).words == all_to_all.RowWords(2, 24, 12, (8,), (9,))

"""How a CPU runs few routes: without the calls of torch and numpy that many routes pay for, and to the same result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moereg.bench.inputs import random_calls
from moereg.dispatch import select_backend
from moereg.kernels.plain import cpu, host, mlp
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.spec.activations import ACTIVATIONS
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights

CPU = torch.device("cpu")
HIDDEN = 8


@given(
    ids=st.integers(1, 6).flatmap(
        lambda top_k: st.lists(st.lists(st.integers(-2, 7), min_size=top_k, max_size=top_k), min_size=1, max_size=10)
    ),
    num_experts=st.integers(1, 6),
    table=st.none() | st.lists(st.integers(-1, 6), min_size=1, max_size=7),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_few_routes_are_sorted_as_many_are(
    ids: list[list[int]], num_experts: int, table: list[int] | None, dtype: torch.dtype
) -> None:
    topk_ids = torch.tensor(ids, dtype=dtype)
    expert_map = None if table is None else torch.tensor(table, dtype=torch.int32)
    few = host._sort_few(topk_ids, num_experts, expert_map)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "FEW_ROUTES", 0)
        many = host.sort_on_host(topk_ids, num_experts, expert_map)
    assert (few.num_rows, few.segments) == (many.num_rows, many.segments)
    for own, other in ((few.order, many.order), (few.positions, many.positions)):
        assert own.dtype == other.dtype
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("ids", "weights", "changes", "expected"),
    [
        ([2, 0], [0.5, 2.0], {}, 3.5),
        ([-1, 3], [7.0, 0.25], {}, 1.0),
        ([4, 3], [7.0, 0.25], {}, 1.0),
        ([0, 1, 2], [1.0, 2.0, 4.0], {"expert_map": [-1, 3, 0]}, 12.0),
        ([0, 5], [1.0, 2.0], {"expert_map": [1, 0]}, 2.0),  # 5 is not in the map.
        ([-1, -1], [7.0, 8.0], {}, 0.0),
        # A weight of no local expert counts nowhere, not even as infinity times 0.
        ([-1, 1], [float("inf"), 1.0], {}, 2.0),
        ([0, 1, 2, 3], [1.0] * 4, {"num_local_experts": 2}, 3.0),
        ([3], [0.5], {"apply_router_weight_on_input": True}, 3.5),
    ],
)
def test_one_token(ids: list[int], weights: list[float], changes: dict[str, Any], expected: float) -> None:
    out, seen = torch.full((1, HIDDEN), torch.nan), []

    def add_number(x: torch.Tensor, expert: int) -> torch.Tensor:
        seen.append((expert, x.tolist()))
        return x + expert

    named = {"num_local_experts": 4, **changes}
    if "expert_map" in named:
        named["expert_map"] = torch.tensor(named["expert_map"], dtype=torch.int32)
    host.host_experts(
        out,
        torch.ones(1, HIDDEN),
        torch.tensor([weights]),
        torch.tensor([ids], dtype=torch.int32),
        add_number,
        w13_rows=2 * HIDDEN,
        workspace=torch.full((len(ids) + 1, HIDDEN), torch.nan),
        **named,
    )
    assert torch.equal(out, torch.full((1, HIDDEN), expected))
    given = weights[0] if "apply_router_weight_on_input" in named else 1.0
    assert all(expert < named["num_local_experts"] and x == [[given] * HIDDEN] for expert, x in seen)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_rows_are_rounded_however_many_tokens_there_are(num_tokens: int) -> None:
    """Experts may return fp32. 1 + 2**-9 is 1 in bfloat16; kept as it is, it would leave 2**-7 of this sum."""
    out = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
    host.host_experts(
        out,
        torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16),
        torch.full((num_tokens, 2), 4.0),
        torch.tensor([[1, 0]] * num_tokens, dtype=torch.int32),
        lambda x, expert: torch.full(x.shape, 1 + 2**-9 if expert else -1.0),
        num_local_experts=2,
        w13_rows=2 * HIDDEN,
        workspace=torch.empty(2 * num_tokens + 1, HIDDEN, dtype=torch.bfloat16),
    )
    assert torch.equal(out, torch.zeros_like(out))


def mixing(x: torch.Tensor, expert: int) -> torch.Tensor:
    """A product whose rows read a column of the next one, and multiply it by zero."""
    return x + expert + 0 * x.roll(-1, 0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_reaches_no_other(number: float) -> None:
    x = torch.arange(6.0).view(3, 2)
    assert mlp.IsolatingMlp(mixing)(x, 1).tolist() == (x + 1).tolist()
    x[1, 0] = number
    found = mlp.IsolatingMlp(mixing)(x, 1)
    assert found[[0, 2]].tolist() == [[1, 2], [5, 6]]
    assert not found[1].isfinite().all()


def test_which_products_mix_rows(cpu_features: Callable[..., None]) -> None:
    cpu_features(amx=True)
    assert [cpu.mixes_rows(torch.bfloat16, *columns) for columns in ((64, 96), (130, 96), (64, 88))] == [0, 1, 1]
    assert not cpu.mixes_rows(torch.float32, 130)
    cpu_features(amx=False)
    assert not cpu.mixes_rows(torch.bfloat16, 130)


@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(130, 96), (64, 88), (64, 64)])
@pytest.mark.parametrize("quant", ["unquantized", "int8_w8a16"])
def test_a_token_that_went_wrong_changes_no_other(hidden_size: int, intermediate_size: int, quant: str) -> None:
    """oneDNN's AMX kernels are where it would. The last sizes are multiplied as copies of the expert."""
    sizes = {"num_experts": 2, "hidden_size": hidden_size, "intermediate_size": intermediate_size, "top_k": 1}
    problem = MoEProblem(**sizes, quant=quant)
    kernel = make_kernel(problem, make_weights(problem, CPU), select_backend(problem, "cpu", require="torch"))
    (call, *_) = random_calls(problem, 32, "uniform", 0, CPU)
    call[2].fill_(1)
    expected = kernel(*call)
    call[0][16:18] = float("nan")
    found = kernel(*call)
    assert torch.equal(found[:16], expected[:16])
    assert torch.equal(found[18:], expected[18:])


# A result is rounded once more to bfloat16's 8 bits after each product.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 4, mlp.UPCAST_ROWS - 1, mlp.UPCAST_ROWS, 33])
def test_plain_experts(monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, has_bias: bool) -> None:
    """Products of every number of rows, whose weights are converted in blocks, the last one smaller."""
    monkeypatch.setattr(mlp, "_UPCAST_ELEMENTS", 5 * 48)
    plain = plain_mlp(dtype, has_bias)
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = plain(x, 1)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), in_fp32(plain, x, 1), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [[(1, 1)], [(0, 2), (3, 1)], [(0, 1), (1, 3), (2, 2), (4, 5)]])
def test_experts_of_few_rows(parts: list[tuple[int, int]], dtype: torch.dtype, has_bias: bool) -> None:
    """In one grouped product or in turn, each expert multiplies its own rows."""
    plain = plain_mlp(dtype, has_bias)
    check_parts(plain, plain.together, parts)
    # Rows that a grouped product cannot align.
    odd = dataclasses.replace(plain, w13=plain.w13[:, :, :47].contiguous(), w2=plain.w2[:, :47].contiguous())
    if not has_bias:
        check_parts(odd, odd.together, parts)


def check_parts(plain: mlp.PlainMlp, product: Callable[..., torch.Tensor], parts: list[tuple[int, int]]) -> None:
    """A product of several experts, each with a number of rows, against each by itself."""
    dtype, counts = plain.w13.dtype, [count for _, count in parts]
    x = torch.randn(sum(counts), plain.w13.shape[2], generator=torch.Generator().manual_seed(7)).to(dtype)
    found = product(x, [(expert, 0, count) for expert, count in parts])
    own = zip(x.split(counts), parts, strict=True)
    expected = torch.cat([in_fp32(plain, rows, expert) for rows, (expert, _) in own])
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_an_experts_other_rows_change_the_order_of_sums_alone(bias: torch.dtype | None) -> None:
    """Ranks of a group see other rows than one rank would. Rounding at other places would differ by 4e-3."""
    plain = dataclasses.replace(plain_mlp(torch.bfloat16, bias is not None, bias), few_rows=10)
    assert plain.shares([(1, 0, 10)], 40) == (bias != torch.float32)
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = torch.cat([plain(row, 1) for row in x.split(1)])
    assert relative_error(plain(x, 1), expected) < 1e-3
    if bias != torch.float32:
        assert relative_error(plain.together(x, [(1, 0, 40)]), expected) < 1e-3


@pytest.mark.parametrize(
    ("counts", "most_rows", "shares"),
    [
        ([3, 3], 6, True),
        ([1, 5], 6, True),
        ([4, 3], 7, False),
        ([3, 3], 5, False),
        # The mean is small, and a product in bfloat16 converts a weight again for each of the many rows of one expert.
        ([12, *[1] * 7], 99, True),
        ([13, *[1] * 7], 99, False),
    ],
)
def test_which_experts_share_products(counts: list[int], most_rows: int, shares: bool) -> None:
    plain = dataclasses.replace(plain_mlp(torch.bfloat16, False), few_rows=3)
    assert plain.shares([(expert, 0, count) for expert, count in enumerate(counts)], most_rows) == shares


@pytest.mark.parametrize(
    ("dtype", "is_emulated", "has_bias", "num_copied"),
    [
        (torch.bfloat16, False, False, 4),
        (torch.bfloat16, True, False, 0),
        (torch.bfloat16, False, True, 0),
        (torch.float32, False, False, 0),
    ],
)
@pytest.mark.parametrize("parts", [[(0, 1), (3, 3)], [(3, 1), (0, 2), (3, 1)]])
def test_rows_with_copies_of_their_experts(
    monkeypatch: pytest.MonkeyPatch,
    parts: list[tuple[int, int]],
    dtype: torch.dtype,
    is_emulated: bool,
    has_bias: bool,
    num_copied: int,
) -> None:
    """Without biases, in 16 bits that the CPU multiplies; a token may repeat an expert, in any order."""
    plain = dataclasses.replace(plain_mlp(dtype, has_bias), is_emulated=is_emulated)
    made, bmm = [0], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda matrices, x: made.append(len(matrices)) or bmm(matrices, x))
    check_parts(plain, plain.in_turn, parts)
    assert max(made) == num_copied


def plain_mlp(dtype: torch.dtype, has_bias: bool, bias: torch.dtype | None = None) -> mlp.PlainMlp:
    """5 experts of 48 x 40 as on a CPU that emulates 16-bit products."""
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(*sizes, generator=generator) * 0.2).to(dtype)

    biases = (draw(5, 80, dtype=bias or dtype), draw(5, 48, dtype=bias or dtype)) if has_bias else (None, None)
    return mlp.PlainMlp(draw(5, 80, 48), draw(5, 48, 40), ACTIVATIONS["silu"], *biases, dtype != torch.float32)


def in_fp32(plain: mlp.PlainMlp, x: torch.Tensor, expert: int) -> torch.Tensor:
    gemm1 = x.float() @ plain.w13[expert].float().t()
    if plain.w13_bias is not None:
        gemm1 += plain.w13_bias[expert].float()
    result = plain.activation(gemm1) @ plain.w2[expert].float().t()
    return result if plain.w2_bias is None else result + plain.w2_bias[expert].float()


@pytest.mark.parametrize("placement", ["contiguous", "map"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("num_tokens", "routing"), [(1, "uniform"), (3, "uniform"), (24, "uniform"), (24, "skewed")])
def test_layers_of_few_and_many_rows(
    cpu_features: Callable[..., None], num_tokens: int, routing: str, dtype: str, placement: str
) -> None:
    """On a CPU without bfloat16 products, where experts of few rows share calls and the others do not."""
    cpu_features(onednn=True, bf16=False, amx=False)
    is_map = placement == "map"
    problem = MoEProblem(
        num_experts=8,
        hidden_size=768,
        intermediate_size=256,
        top_k=2,
        dtype=dtype,
        placement=placement,
        num_local_experts=5 if is_map else 8,
    )
    expert_map = torch.tensor([0, -1, 1, 2, -1, 3, 4, -1], dtype=torch.int32) if is_map else None
    weights = make_weights(problem, CPU)
    kernel = make_kernel(problem, weights, select_backend(problem, "cpu", require="torch"), expert_map=expert_map)
    (call, *_) = random_calls(problem, num_tokens, "uniform", 0, CPU)
    if routing == "skewed":  # One expert of many rows beside those of few.
        call[2][:20, 0] = 2
        call[2][:20, 1] = torch.arange(20) % 2 * 3
    expected = reference_experts(problem, weights, *call, expert_map=expert_map)
    assert relative_error(kernel(*call), expected) < (1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("num_weights", [2, 4096])
def test_one_large_routing_weight_is_enough(num_weights: int) -> None:
    topk_weights = torch.ones(num_weights, 1)
    assert not mlp.has_large_weights(topk_weights)
    topk_weights[-1] = 1e6
    assert mlp.has_large_weights(topk_weights)

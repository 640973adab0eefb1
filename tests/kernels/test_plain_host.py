"""How a CPU runs a layer: one token or many, products of every number of rows, and rows that are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
    """oneDNN's AMX kernels are where it would."""
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


@pytest.mark.parametrize("bias", [None, torch.bfloat16, torch.float32])
def test_an_experts_other_rows_change_the_order_of_sums_alone(bias: torch.dtype | None) -> None:
    """Ranks of a group see other rows than one rank would. Rounding at other places would differ by 4e-3."""
    plain = plain_mlp(torch.bfloat16, bias is not None, bias)
    x = torch.randn(40, 48, generator=torch.Generator().manual_seed(5)).bfloat16()
    expected = torch.cat([plain(row, 1) for row in x.split(1)])
    assert relative_error(plain(x, 1), expected) < 1e-3


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
    """On a CPU without bfloat16 products, which converts the weights of experts with many rows."""
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


def test_one_large_routing_weight_is_enough() -> None:
    topk_weights = torch.ones(8, 1)
    assert not mlp.has_large_weights(topk_weights)
    topk_weights[-1] = 1e6
    assert mlp.has_large_weights(topk_weights)

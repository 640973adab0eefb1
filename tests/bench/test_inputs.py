"""Random weights and calls keep the promises of their docstrings: a wrong kernel cannot hide behind them."""

from __future__ import annotations

import pytest
import torch

from moereg.bench import inputs
from moereg.bench.inputs import ROUTINGS, num_calls, random_call, random_weights
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import relative_error
from moereg.quantize import dequantize_weights
from moereg.spec.problem import MoEProblem

CPU = torch.device("cpu")
PROBLEM = MoEProblem(num_experts=12, hidden_size=64, intermediate_size=32, top_k=3)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_random_experts_differ_and_are_scaled_like_real_ones() -> None:
    problem = MoEProblem(num_experts=6, hidden_size=256, intermediate_size=128, top_k=2)
    seen: list[tuple[int, int]] = []
    weights = random_weights(problem, generator(), CPU, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]
    w13, w2 = weights.w13.float(), weights.w2.float()
    assert torch.isfinite(w13).all()
    assert torch.isfinite(w2).all()
    rows = w13.reshape(-1, 256)
    normalized = rows / rows.norm(dim=1, keepdim=True)
    likeness = (normalized @ normalized.T).fill_diagonal_(0)
    assert likeness.abs().max() < 0.5
    gate, up = w13.chunk(2, dim=1)
    assert up.std() / gate.std() == pytest.approx(1.6, rel=0.1)
    out = make_kernel(problem, weights)(*random_call(problem, 64, "uniform", generator()))
    assert 0.1 < out.float().std() < 3


@pytest.mark.parametrize("activation", ["silu", "relu2"])
def test_weights_are_of_the_problem(activation: str) -> None:
    problem = MoEProblem(
        num_experts=8,
        hidden_size=24,
        intermediate_size=40,
        top_k=2,
        dtype="float16",
        activation=activation,
        has_bias=True,
        num_local_experts=3,
    )
    weights = random_weights(problem, generator(), CPU)
    weights.check_against(problem)
    assert torch.equal(weights.w13, random_weights(problem, generator(), CPU).w13)
    assert not torch.equal(weights.w13, random_weights(problem, generator(1), CPU).w13)


@pytest.mark.parametrize("scheme", ["fp8_block128", "int4_w4a16_g32_zp", "nvfp4", "fp8_tensor_static"])
def test_quantized_weights_are_those_of_the_same_layer(scheme: str) -> None:
    sizes = {"num_experts": 2, "hidden_size": 256, "intermediate_size": 128, "top_k": 1}
    device = torch.device("cpu")
    plain = random_weights(MoEProblem(**sizes), torch.Generator().manual_seed(0), device)
    quantized = random_weights(MoEProblem(**sizes, quant=scheme), torch.Generator().manual_seed(0), device)
    w13, w2 = dequantize_weights(quantized, torch.float32)
    for found, expected in ((w13, plain.w13), (w2, plain.w2)):
        assert 1e-3 < relative_error(found, expected.float()) < 0.15


def test_the_pool_goes_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_POOL_NUMEL", 7)
    target = torch.empty(4, 5)
    inputs._fill(target, torch.arange(7.0), 5, 2.0)
    assert target.flatten().tolist() == [2.0 * ((5 + place) % 7) for place in range(20)]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_calls_are_what_a_kernel_takes(routing: str, num_tokens: int) -> None:
    hidden_states, topk_weights, topk_ids = random_call(PROBLEM, num_tokens, routing, generator())
    assert (hidden_states.shape, hidden_states.dtype) == ((num_tokens, 64), torch.bfloat16)
    assert (topk_weights.shape, topk_weights.dtype) == ((num_tokens, 3), torch.float32)
    assert (topk_ids.shape, topk_ids.dtype) == ((num_tokens, 3), torch.int32)
    assert all(tensor.is_contiguous() for tensor in (hidden_states, topk_weights, topk_ids))
    assert ((topk_ids >= 0) & (topk_ids < 12)).all()
    assert all(len(set(ids)) == 3 for ids in topk_ids.tolist())
    assert (topk_weights > 0).all()
    torch.testing.assert_close(topk_weights.sum(1), torch.ones(num_tokens))


def test_routings_are_as_skewed_as_they_say() -> None:
    draws = generator()

    def counts(routing: str, top_k: int) -> list[int]:
        problem = MoEProblem(num_experts=12, hidden_size=8, intermediate_size=8, top_k=top_k)
        ids = random_call(problem, 20_000, routing, draws).topk_ids
        return sorted(torch.bincount(ids.flatten(), minlength=12).tolist(), reverse=True)

    assert counts("uniform", 3) == pytest.approx([5000] * 12, rel=0.05)
    harmonic = sum(1 / rank for rank in range(1, 13))
    assert counts("zipf", 1) == pytest.approx([20_000 / harmonic / rank for rank in range(1, 13)], rel=0.15)
    assert counts("one_set", 3) == [20_000] * 3 + [0] * 9
    first, second = (random_call(PROBLEM, 1, "one_set", draws).topk_ids for _ in range(2))
    assert set(first[0].tolist()) != set(second[0].tolist())


@pytest.mark.parametrize("routing", ROUTINGS)
def test_the_routing_weights_of_a_token_differ(routing: str) -> None:
    """If they were equal, weights of the wrong route would go unseen."""
    ordered = random_call(PROBLEM, 50, routing, generator()).topk_weights.sort(dim=1).values
    gaps = ordered[:, 1:] - ordered[:, :-1]
    assert (gaps > 0).all()
    assert gaps.mean() > 0.05


def test_a_single_routing_weight_is_not_one() -> None:
    problem = MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=1)
    weights = random_call(problem, 64, "uniform", generator()).topk_weights
    assert weights.min() >= 0.1
    assert weights.std() > 0.1


def test_an_unknown_routing_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'skewed' .*uniform, zipf, one_set"):
        random_call(PROBLEM, 1, "skewed", generator())


def test_short_calls_rotate_over_more_inputs() -> None:
    counts = [num_calls(num_tokens) for num_tokens in (1, 64, 65, 1024, 1025, 16384)]
    assert counts == [16, 16, 8, 8, 2, 2]

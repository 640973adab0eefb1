"""A whole layer on an imitation of Humming against moereg's reference, the Triton kernels in the interpreter."""

from __future__ import annotations

import imitation
import moereg_humming.backend as backend
import pytest
import torch

from moereg.author import (
    ExpertInputs,
    ExpertWeights,
    MoEProblem,
    Platform,
    layer_tolerance,
    local_expert_ids,
    quantize_weights,
    reference_experts,
    relative_error,
)

pytest.importorskip("triton", reason="the backend's own kernels are in Triton")

PLATFORM = Platform.from_name("cuda:sm90")
SIZES = {"num_experts": 5, "hidden_size": 40, "intermediate_size": 24, "top_k": 2}


@pytest.fixture(autouse=True)
def _imitation(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("imitates Humming on a CPU; on a GPU, `moereg verify humming` runs the library itself")
    imitation.install(monkeypatch)


def make_weights(problem: MoEProblem, separate_halves: bool = False) -> ExpertWeights:
    generator = torch.Generator().manual_seed(3)
    experts, rows = problem.num_local_experts, problem.activation.num_halves * problem.intermediate_size
    w13 = torch.randn(experts, rows, problem.hidden_size, generator=generator) * 0.3
    w13[:, : rows // 2] *= 2
    w2 = torch.randn(experts, problem.hidden_size, problem.intermediate_size, generator=generator) * 0.3
    biases = {}
    if problem.has_bias:
        biases["w13_bias"] = torch.randn(experts, rows, generator=generator).to(problem.torch_dtype)
        biases["w2_bias"] = torch.randn(experts, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    dtype = problem.torch_dtype
    plain = ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), **biases)
    return quantize_weights(plain, problem.quant, separate_halves=separate_halves)


def error_of(
    problem: MoEProblem,
    num_tokens: int = 7,
    expert_map: torch.Tensor | None = None,
    separate_halves: bool = False,
) -> float:
    """Relative error over its bound, workspaces and output full of NaN, some ids out of range."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    topk_weights, topk_ids = torch.rand(num_tokens, problem.num_experts, generator=generator).topk(problem.top_k)
    topk_ids = topk_ids.to(torch.int32)
    topk_ids[1::3, 0] = problem.num_experts + 3
    topk_ids[2::3, -1] = -1
    weights = make_weights(problem, separate_halves)
    experts = backend.HummingIndexedExperts(problem, PLATFORM)
    permuted = experts.permute_weights(weights, problem)
    shapes = experts.workspace_shapes(problem, num_tokens)
    workspaces = [torch.full(shape, float("nan"), dtype=problem.torch_dtype) for shape in shapes]
    out = torch.full_like(hidden_states, float("nan"))
    inputs = ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map)
    experts.apply(out, inputs, permuted, *workspaces)
    expected = reference_experts(
        problem, weights, hidden_states, topk_weights, topk_ids, expert_map=expert_map, computes=problem.quant
    )
    return relative_error(out, expected) / layer_tolerance(problem, num_tokens, problem.quant)


@pytest.mark.parametrize("scheme", ["int4_w4a16_g32_zp", "mxfp4_w4a16", backend.FP8_WEIGHTS[2]], ids=str)
def test_formats(scheme: str) -> None:
    assert error_of(MoEProblem(**SIZES, quant=scheme)) < 1


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swigluoai", "relu2", "silu(alpha=1.3, limit=0.5)"])
def test_activations_with_biases(activation: str) -> None:
    problem = MoEProblem(**SIZES, quant="int8_w8a16", activation=activation, has_bias=True, dtype="float16")
    assert error_of(problem) < 1


def test_gate_and_up_with_scales_of_their_own_and_biases() -> None:
    problem = MoEProblem(**SIZES, quant="nvfp4_w4a16", has_bias=True)
    assert error_of(problem, separate_halves=True) < 1


def test_expert_map() -> None:
    problem = MoEProblem(**SIZES, quant="int4_w4a16_gall", num_local_experts=2, placement="map")
    assert error_of(problem, expert_map=torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32)) < 1


def test_router_weight_on_input() -> None:
    problem = MoEProblem(**{**SIZES, "top_k": 1}, quant="int4_w4a16_g64", apply_router_weight_on_input=True)
    assert error_of(problem) < 1


def test_routes_of_more_than_one_block_are_sorted() -> None:
    import triton
    from moereg_humming import kernels

    num_experts, num_routes, num_padded = 3, 300, 768
    topk_ids = torch.randint(-1, num_experts + 1, (num_routes,), generator=torch.Generator().manual_seed(0)).int()
    places, experts = torch.full((2, num_padded), -7).int(), torch.full((2, num_padded // 8), -7).int()
    totals, locks = torch.full((2,), -7).int(), torch.ones(64).int()
    kernels.sort_routes_kernel[(num_experts, 2)](
        topk_ids, topk_ids, places, experts, totals, locks, num_routes, num_padded, num_experts, num_experts, 64,
        FIRST_ROWS=16, SECOND_ROWS=48, HAS_MAP=False, NUM_BINS=triton.next_power_of_2(num_experts + 1), BLOCK=128,
    )  # fmt: skip
    local = local_expert_ids(topk_ids, num_experts, None)
    for product, rows in enumerate((16, 48)):
        expected, tiles = [], []
        for expert in range(num_experts):
            own = torch.nonzero(local == expert).flatten().tolist()
            padding = -len(own) % rows
            expected += own + [num_routes] * padding
            tiles += [expert] * ((len(own) + padding) // rows)
        assert totals[product] == len(expected)
        assert places[product, : len(expected)].tolist() == expected
        assert experts[product, : len(tiles)].tolist() == tiles
        assert (places[product, len(expected) :] == -7).all()
    assert not locks.any()


def test_capture_of_a_size_that_never_ran_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(**SIZES, quant="int8_w8a16")
    experts = backend.HummingIndexedExperts(problem, PLATFORM)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run one call of as many tokens before"):
        experts._layer._tiles_for(torch.device("cpu"), {"w13": False, "w2": False}, 4)

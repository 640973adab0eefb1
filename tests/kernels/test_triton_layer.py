"""Layers of the Triton kernels against fp32: interpreted on a CPU, compiled where there is a CUDA device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moereg.backends.triton_moe import TritonExperts
from moereg.testing.interpreter import patch_interpreter
from tests.kernels.triton_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    SM90,
    Layer,
    bound,
    make_problem,
    on_gpu,
    random,
    relative_error,
    route,
)

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE == "cpu":
        patch_interpreter()


LAYERS = {
    "one_token": Layer(make_problem(4, 2, 64, 64, BF16), 1),
    "odd_sizes": Layer(make_problem(4, 2, 255, 129, BF16), 2),
    "fp32": Layer(make_problem(8, 3, 130, 88, FP32, has_bias=True, activation="gelu"), 9),
    "fp16": Layer(make_problem(8, 3, 72, 40, FP16, activation="gelu_tanh", has_bias=True), 17),
    "swigluoai": Layer(make_problem(4, 2, 130, 88, BF16, activation="swigluoai", has_bias=True), 17),
    "relu2": Layer(make_problem(8, 2, 72, 40, BF16, activation="relu2", has_bias=True), 17),
    "silu_limit": Layer(make_problem(4, 2, 64, 64, FP16, activation="silu(limit=0.5)"), 17),
    "expert_map": Layer(make_problem(60, 8, 64, 40, BF16, num_local_experts=15, placement="map"), 9),
    "out_of_range": Layer(make_problem(160, 8, 64, 40, BF16), 2, "out_of_range"),
    "one_expert": Layer(make_problem(8, 1, 72, 64, FP16), 63, "one_expert"),
    "many_rows": Layer(make_problem(4, 2, 64, 64, BF16), 63),
    "weight_on_input": Layer(make_problem(4, 1, 130, 64, BF16, apply_router_weight_on_input=True, has_bias=True), 17),
}


@pytest.mark.few(most=6)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str) -> None:
    LAYERS[name].check()


def test_layer_without_valid_routes_is_zero() -> None:
    assert (Layer(make_problem(4, 2, 72, 40, BF16, has_bias=True), 3, "nothing").run() == 0).all()


def test_layer_repeats_its_bits() -> None:
    layer = LAYERS["silu_limit"]
    assert torch.equal(layer.run(), layer.run())


@pytest.mark.parametrize("fault", ["gate_up_swapped", "bias_dropped", "expert_shifted", "row_shifted"])
def test_planted_faults_show(fault: str) -> None:
    layer = Layer(make_problem(4, 2, 64, 64, BF16, has_bias=True), 9)
    weights = layer.weights
    inner = layer.problem.intermediate_size
    assert weights.w13_bias is not None
    broken = {
        "gate_up_swapped": {"w13": weights.w13.roll(inner, 1)},
        "bias_dropped": {"w13_bias": torch.zeros_like(weights.w13_bias)},
        "expert_shifted": {"w2": weights.w2.roll(1, 0)},
        "row_shifted": {"w13": weights.w13.roll(1, 1)},
    }[fault]
    error = relative_error(layer.run(dataclasses.replace(weights, **broken)), layer.reference())
    assert error > 20 * bound(BF16, 3)


def test_permute_keeps_views_where_nothing_changes_and_inputs_as_they_are() -> None:
    layer = Layer(make_problem(4, 2, 64, 128, BF16, activation="relu2", has_bias=True), 1)
    permuted = TritonExperts(layer.problem, SM90).permute_weights(layer.weights, layer.problem)
    assert permuted["w13"].data_ptr() == layer.weights.w13.data_ptr()
    assert permuted["w2"].data_ptr() == layer.weights.w2.data_ptr()

    layer = Layer(make_problem(4, 2, 72, 40, BF16, has_bias=True), 1)
    before = {name: tensor.clone() for name, tensor in layer.weights.tensors().items()}
    permuted = TritonExperts(layer.problem, SM90).permute_weights(layer.weights, layer.problem)
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.weights.tensors().items())
    assert permuted["w13"].shape == (4, 128, 128)
    assert permuted["w2"].shape == (4, 72, 64)
    assert torch.equal(permuted["w13"][:, 0:80:2, :72], layer.weights.w13[:, :40])
    assert torch.equal(permuted["w13"][:, 1:80:2, :72], layer.weights.w13[:, 40:])
    assert (permuted["w13"][:, 80:] == 0).all()
    assert (permuted["w13"][:, :, 72:] == 0).all()
    assert layer.weights.w13_bias is not None
    assert torch.equal(permuted["w13_bias"][:, 1:80:2], layer.weights.w13_bias[:, 40:])


def test_workspaces_grow_with_tokens() -> None:
    problem = make_problem(64, 8, 64, 40, BF16)
    experts = TritonExperts(problem, SM90)
    sizes = [experts.workspace_shapes(problem, num_tokens) for num_tokens in range(1, 3000, 7)]
    for index in (0, 1):
        numels = [math.prod(shapes[index]) for shapes in sizes]
        assert numels == sorted(numels)


def test_backend_refuses_what_overflows_its_offsets() -> None:
    problem = make_problem(4, 2, 32768, 40000, BF16)
    (reason,) = TritonExperts.unsupported_reasons(problem, SM90)
    assert reason.startswith("requires fewer than 2**31")


def test_device_types_follow_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert TritonExperts.device_types(SM90) == ("cuda",)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonExperts.device_types(SM90) == ("cuda", "cpu")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size", "dtype", "keywords"),
    [
        (1, 128, 8, 2048, 768, BF16, {}),
        (16, 128, 8, 2048, 768, BF16, {}),
        (4096, 128, 8, 2048, 768, BF16, {}),
        (4096, 32, 4, 2880, 2880, BF16, {"activation": "swigluoai", "has_bias": True}),
        (63, 64, 8, 2880, 704, FP16, {}),
        (700, 60, 4, 2048, 1408, BF16, {"activation": "gelu_tanh"}),
        (4096, 64, 6, 2688, 1856, BF16, {"activation": "relu2"}),
        (4096, 16, 2, 511, 511, BF16, {"has_bias": True, "activation": "gelu"}),
        (333, 16, 2, 511, 704, FP32, {"has_bias": True}),
        (4096, 16, 2, 1024, 704, FP32, {}),
        (63, 8, 8, 255, 129, BF16, {}),
        (4096, 512, 10, 2048, 512, BF16, {}),
        (4096, 512, 8, 1024, 511, BF16, {"num_local_experts": 64, "placement": "map"}),
        (512, 16, 1, 5120, 1408, BF16, {"apply_router_weight_on_input": True}),
    ],
)
def test_layer_large(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> None:
    problem = make_problem(num_experts, top_k, hidden_size, intermediate_size, dtype, **keywords)
    layer = Layer(problem, num_tokens, "random" if num_tokens != 700 else "out_of_range")
    layer.check()
    assert torch.equal(layer.run(), layer.run())


@pytest.mark.gpu
@on_gpu
def test_layer_replays_in_a_graph_without_synchronizing() -> None:
    problem = make_problem(16, 4, 256, 128, BF16)
    layer = Layer(problem, 24)
    experts = TritonExperts(problem, SM90)
    permuted = experts.permute_weights(layer.weights, problem)
    out = torch.empty(24, 256, dtype=BF16, device=DEVICE)
    workspaces = [torch.empty(shape, dtype=BF16, device=DEVICE) for shape in experts.workspace_shapes(problem, 24)]
    inputs = layer.inputs
    experts.apply(out, inputs, permuted, *workspaces)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            experts.apply(out, inputs, permuted, *workspaces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for seed in (5, 6):
        # Same storage, other contents: the graph must follow the routing, which only the device knows.
        layer.hidden_states.copy_(random(24, 256, dtype=BF16, seed=seed))
        layer.topk_ids.copy_(route("random", 24, 4, 16).flip(0).roll(seed, 0))
        out.fill_(math.nan)
        graph.replay()
        assert relative_error(out, layer.reference()) < bound(BF16, 3)

"""Routes as vLLM's kernels take them, and what is added up after them, without a GPU and without vllm."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import sys

import pytest
import torch
from moereg_vllm import _routes

from moereg.author import (
    ExpertInputs,
    MoEProblem,
    local_expert_ids,
)


def call_of(ids: list[list[int]], expert_map: torch.Tensor | None) -> ExpertInputs:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return ExpertInputs(torch.ones(len(ids), 4), torch.full(topk_ids.shape, 0.5), topk_ids, expert_map=expert_map)


def test_routes_without_a_local_expert() -> None:
    problem = MoEProblem(num_experts=4, num_local_experts=2, hidden_size=4, intermediate_size=4, top_k=2)
    table = _routes.expert_table(problem, torch.device("cpu"))
    assert table.tolist() == [0, 1, -1, -1]
    inputs = call_of([[0, 3], [1, -1], [2, 9]], torch.tensor([-1, 1, -1, 0], dtype=torch.int32))
    mapped = _routes.mapped_routes(inputs, problem, table)
    assert mapped.topk_ids.tolist() == [[2, 0], [1, 2], [2, 2]]
    assert mapped.topk_weights.tolist() == [[0, 0.5], [0.5, 0], [0, 0]]
    assert mapped.expert_map is table
    assert mapped.num_experts == 4
    local = _routes.local_routes(inputs, problem)
    assert local.topk_ids.tolist() == local_expert_ids(inputs.topk_ids, 2, inputs.expert_map).tolist()
    everything = MoEProblem(num_experts=4, hidden_size=4, intermediate_size=4, top_k=2)
    unmapped = _routes.mapped_routes(call_of([[0, 3], [1, -1], [2, 9]], None), everything, table)
    assert unmapped.topk_ids.tolist() == [[0, 3], [1, 0], [2, 0]]
    assert unmapped.topk_weights.tolist() == [[0.5, 0.5], [0.5, 0], [0.5, 0]]
    assert unmapped.expert_map is None
    assert len(_routes.expert_table(everything, torch.device("cpu"))) == 5


@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, 1, -1, 0], dtype=torch.int32)])
def test_biases_that_are_added_last(expert_map: torch.Tensor | None) -> None:
    local = 4 if expert_map is None else 2
    problem = MoEProblem(num_experts=4, num_local_experts=local, hidden_size=4, intermediate_size=4, top_k=2)
    inputs = call_of([[0, 3], [1, -1], [2, 9]], expert_map)
    routes = _routes.mapped_routes(inputs, problem, _routes.expert_table(problem, torch.device("cpu")))
    bias = torch.arange(1.0, 1 + 4 * local).view(local, 4)
    out = torch.ones(3, 4)
    _routes.add_routed_bias(out, bias, routes)
    experts = local_expert_ids(inputs.topk_ids, local, expert_map).tolist()
    expected = [sum((0.5 * bias[expert] for expert in row if expert >= 0), torch.ones(4)) for row in experts]
    assert torch.equal(out, torch.stack(expected))


def test_routing_weights_on_the_input() -> None:
    problem = MoEProblem(num_experts=2, hidden_size=4, intermediate_size=4, top_k=1, apply_router_weight_on_input=True)
    routes = _routes.mapped_routes(
        call_of([[1], [5]], None), problem, _routes.expert_table(problem, torch.device("cpu"))
    )
    assert routes.hidden_states.tolist() == [[0.5] * 4, [0.0] * 4]
    assert routes.topk_weights.tolist() == [[1.0], [0.0]]
    assert routes.topk_ids.tolist() == [[1], [0]]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, 1, -1, 0], dtype=torch.int32)])
def test_sums_over_choices_round_once(
    expert_map: torch.Tensor | None, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = 4 if expert_map is None else 2
    problem = MoEProblem(num_experts=4, num_local_experts=local, hidden_size=4, intermediate_size=4, top_k=2)
    inputs = call_of([[0, 3], [1, -1], [2, 9]], expert_map)
    routes = _routes.mapped_routes(inputs, problem, _routes.expert_table(problem, torch.device("cpu")))
    routes = dataclasses.replace(routes, topk_weights=routes.topk_weights * torch.tensor([[1.0, 0.7]]))
    rows = torch.randn((3, 2, 1030), generator=torch.Generator().manual_seed(0)).half()
    expected = (rows.float() * routes.topk_weights.unsqueeze(-1)).sum(1).half()
    rows[routes.topk_ids >= local] = float("nan")
    out = torch.full((3, 1030), float("nan"), dtype=torch.float16)
    if on_device:
        pytest.importorskip("triton", reason="the kernel is Triton's")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delitem(sys.modules, "moereg_vllm._localize", raising=False)
        kernel = importlib.import_module("moereg_vllm._localize").weighted_sum
        monkeypatch.delitem(sys.modules, "moereg_vllm._localize")
        kernel[(3, 2)](rows, routes.topk_weights, routes.topk_ids, out, local, 1030, 2, BLOCK=1024)
    else:
        _routes.sum_routes(out, rows, routes, local)
    assert torch.equal(out, expected)

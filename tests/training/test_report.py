"""What a report says of a model after a backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moereg
from moereg.errors import ArgumentError
from moereg.training import report

SIZES: dict[str, Any] = {"num_experts": 6, "hidden_size": 16, "intermediate_size": 8, "top_k": 2, "dtype": "float32"}


def routed(num_tokens: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes to experts 0, 1, 2 and 4 alone."""
    ids = torch.tensor([[0, 1], [2, 4], [4, 0], [1, 2]], dtype=torch.int32)
    return torch.full((num_tokens, 2), 0.5), ids


def test_weights_of_a_layer() -> None:
    problem = moereg.MoEProblem(**SIZES, gradients={"hidden_states", "weights"})
    layer = moereg.MoELayer(problem)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.w2.requires_grad_(False)
    weights, ids = routed()
    layer(torch.randn(4, 16), topk_weights=weights, topk_ids=ids).sum().backward()
    found = report(layer)
    assert dict(found.parameters) == {"w13": "gradient", "w2": "frozen"}
    assert found.unreached == {"the model": (3, 5)}
    assert str(found).splitlines() == [
        "1 of 2 parameters require gradients: 1 got one, 0 got zeros, 0 got none",
        "no token reached experts 3, 5 of the model",
    ]
    with torch.no_grad():
        layer.w13.grad[3, 0, 0] = 1e-30
        layer.w13.grad[5] = float("nan")
    assert report(layer).unreached == {}


def test_adapters_of_a_layer() -> None:
    problem = moereg.MoEProblem(**SIZES, gradients={"hidden_states", "adapters"}, adapter_rank=2)
    weights = moereg.ExpertWeights(w13=torch.randn(6, 16, 16), w2=torch.randn(6, 16, 8))
    model = torch.nn.ModuleDict(
        {
            name: moereg.MoELayer(problem, weights, adapters=moereg.ExpertAdapters.initial(problem, alpha=4))
            for name in ("used", "idle")
        }
    )
    topk_weights, ids = routed()
    model["used"](torch.randn(4, 16), topk_weights=topk_weights, topk_ids=ids).sum().backward()
    found = report(model)
    # A factor of a fresh adapter is zero, and the other one's gradient with it.
    assert found.parameters["used.w13_a"] == "zeros"
    assert found.parameters["used.w13_b"] == "gradient"
    assert found.parameters["idle.w13_b"] == "none"
    assert found.inert == ("idle",)
    assert found.unreached == {"used": (3, 5)}  # What did not run says nothing of experts.
    assert "inert adapter: idle" in str(found).splitlines()


def test_no_module() -> None:
    with pytest.raises(ArgumentError, match="pass the module that you train"):
        report([])  # type: ignore[arg-type]

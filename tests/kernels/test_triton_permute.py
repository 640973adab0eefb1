"""What the Triton backends make of weights that lie in memory in unusual ways."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moereg.backends.triton_moe import TritonExperts
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.plugins.loader import load_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing.inputs import make_weights
from moereg.tuning.inputs import random_weights
from moereg.weights.layouts import ALIGNMENT
from moereg.weights.permuted import ExpertWeights, PermutedWeights

SM90 = Platform.from_name("cuda:sm90")

# A class that trains reads parameters wherever they are.
CLAIMS = dict.fromkeys(
    (cell.experts, scheme)
    for cell in load_backends().cells
    if cell.name == "triton" and not cell.facts.gradients
    for scheme in cell.schemes
)


def at_offset(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers so many elements behind the start of an allocation, with any stride where a dimension is 1."""
    storage = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
    storage[offset:] = tensor.reshape(-1)
    strides = [7 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return storage.as_strided(tensor.shape, strides, offset)


@pytest.mark.few
@pytest.mark.parametrize(("num_experts", "activation", "offset"), [(1, "relu2", 0), (3, "silu", 1)])
@pytest.mark.parametrize(
    ("experts", "scheme"), CLAIMS, ids=[f"{experts.__name__}-{scheme.name}" for experts, scheme in CLAIMS]
)
def test_permuted_weights_are_aligned(
    experts: type[Experts], scheme: QuantScheme, activation: str, num_experts: int, offset: int
) -> None:
    """Boxes are copied from multiples of 16 bytes, and launches are replayed with pointers that are such alone.

    Sizes that need no padding, so that permuted weights may be views.
    """
    problem = MoEProblem(
        num_experts=num_experts,
        hidden_size=128,
        intermediate_size=128,
        top_k=1,
        quant=scheme,
        activation=activation,
        has_bias=True,
        activation_format=min(experts.facts.activation_formats),
    )
    weights = random_weights(problem, torch.Generator().manual_seed(0), torch.device("cpu"))
    shifted = dataclasses.replace(weights, **{name: at_offset(t, offset) for name, t in weights.tensors().items()})
    backend = experts(problem, SM90)
    plain, permuted = backend.permute_weights(weights, problem), backend.permute_weights(shifted, problem)
    assert {*plain.per_expert, *plain.shared} == {*permuted.per_expert, *permuted.shared}
    for name in (*permuted.per_expert, *permuted.shared):
        tensor = permuted[name]
        assert tensor.data_ptr() % ALIGNMENT == 0, name
        assert tensor.stride() == torch.empty(tensor.shape, device="meta").stride(), name
        assert torch.equal(tensor.view(torch.uint8), plain[name].view(torch.uint8)), name


def permuted_layer(**keywords: Any) -> tuple[ExpertWeights, PermutedWeights]:
    """Weights with biases, before and after; that they stay as they are, the kit checks."""
    problem = MoEProblem(num_experts=4, top_k=2, has_bias=True, **keywords)
    weights = make_weights(problem, torch.device("cpu"))
    return weights, TritonExperts(problem, SM90).permute_weights(weights, problem)


def test_views_are_kept_where_nothing_changes() -> None:
    weights, permuted = permuted_layer(hidden_size=64, intermediate_size=128, activation="relu2")
    assert permuted["w13"].data_ptr() == weights.w13.data_ptr()
    assert permuted["w2"].data_ptr() == weights.w2.data_ptr()

    weights, permuted = permuted_layer(hidden_size=72, intermediate_size=40)
    assert permuted["w13"].shape == (4, 128, 128)
    assert permuted["w2"].shape == (4, 72, 64)
    assert torch.equal(permuted["w13"][:, 0:80:2, :72], weights.w13[:, :40])
    assert torch.equal(permuted["w13"][:, 1:80:2, :72], weights.w13[:, 40:])
    assert (permuted["w13"][:, 80:] == 0).all()
    assert (permuted["w13"][:, :, 72:] == 0).all()
    assert weights.w13_bias is not None
    assert torch.equal(permuted["w13_bias"][:, 1:80:2], weights.w13_bias[:, 40:])

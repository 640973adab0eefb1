"""What the Triton backends make of weights that lie in memory in unusual ways."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moereg.backends.triton_moe import TritonBatchedExperts, TritonExperts
from moereg.bench.inputs import random_weights
from moereg.errors import ArgumentError
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.selection.loader import load_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing.inputs import make_weights
from moereg.weights.layouts import ALIGNMENT
from moereg.weights.permuted import ExpertWeights

SM90 = Platform.from_name("cuda:sm90")
CPU = torch.device("cpu")

# Others read canonical tensors and copy nothing.
CLAIMS = dict.fromkeys(
    (cell.experts, scheme)
    for cell in load_backends().cells
    if cell.name == "triton"
    for scheme in cell.schemes
    if scheme.weight is not None
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
    weights = random_weights(problem, torch.Generator().manual_seed(0), CPU)
    shifted = dataclasses.replace(weights, **{name: at_offset(t, offset) for name, t in weights.tensors().items()})
    backend = experts(problem, SM90)
    plain, permuted = backend.permute_weights(weights, problem), backend.permute_weights(shifted, problem)
    assert {*plain.per_expert, *plain.shared} == {*permuted.per_expert, *permuted.shared}
    for name in (*permuted.per_expert, *permuted.shared):
        tensor = permuted[name]
        assert tensor.data_ptr() % ALIGNMENT == 0, name
        assert tensor.stride() == torch.empty(tensor.shape, device="meta").stride(), name
        assert torch.equal(tensor.view(torch.uint8), plain[name].view(torch.uint8)), name


def plain_layer(intermediate_size: int, num_experts: int = 3) -> tuple[MoEProblem, ExpertWeights]:
    """With biases; the kit checks that weights stay as they are."""
    sizes = {"num_experts": num_experts, "hidden_size": 72, "intermediate_size": intermediate_size, "top_k": 1}
    problem = MoEProblem(**sizes, has_bias=True)
    return problem, make_weights(problem, CPU)


@pytest.mark.parametrize("experts", [TritonExperts, TritonBatchedExperts])
@pytest.mark.parametrize("intermediate_size", [40, 41])
def test_canonical_weights_are_read_where_they_lie(experts: type[Experts], intermediate_size: int) -> None:
    problem, weights = plain_layer(intermediate_size)
    problem = dataclasses.replace(problem, activation_format=min(experts.facts.activation_formats))
    layer = experts(problem, SM90)
    permuted = layer.permute_weights(weights, problem)
    assert permuted.layout == "canonical"
    assert {name: id(tensor) for name, tensor in permuted.per_expert.items()} == {
        name: id(tensor) for name, tensor in weights.tensors().items()
    }
    # Rows of 82 bytes are read one by one anyway, so those of the second expert may begin anywhere.
    one = weights.expert(1)
    permuted = layer.permute_weights(one, dataclasses.replace(problem, num_experts=1, num_local_experts=1))
    assert permuted["w2"].data_ptr() == one.w2.data_ptr()


def test_recordings_are_of_any_weights_but_for_the_dtype_of_biases() -> None:
    problem, weights = plain_layer(40)
    layer = TritonExperts(problem, SM90)
    wide = dataclasses.replace(weights, w13_bias=weights.w13_bias.float(), w2_bias=weights.w2_bias.float())
    keys = [
        layer.implementation.shared_key(permuted, list(permuted.per_expert.values()))
        for permuted in (layer.permute_weights(one, problem) for one in (weights, make_weights(problem, CPU), wide))
    ]
    assert keys[0] == keys[1] != keys[2]


def test_any_stride_of_a_dimension_of_one_is_that_of_a_new_tensor() -> None:
    """Tensor maps are made of strides."""
    problem, weights = plain_layer(40, num_experts=1)
    weights = dataclasses.replace(weights, w2=at_offset(weights.w2, 0))
    w2 = TritonExperts(problem, SM90).permute_weights(weights, problem)["w2"]
    assert weights.w2.stride() == (7, 40, 1)
    assert w2.stride() == (72 * 40, 40, 1)
    assert w2.data_ptr() == weights.w2.data_ptr()


@pytest.mark.parametrize("name", ["w13", "w2", "w13_bias", "w2_bias"])
@pytest.mark.parametrize("kind", ["misaligned", "not contiguous"])
def test_other_tensors_are_declined_by_name(kind: str, name: str) -> None:
    problem, weights = plain_layer(40)
    tensor = weights.tensors()[name]
    if kind == "misaligned":
        moved, found = (
            at_offset(tensor, 1),
            f"must begin at a multiple of 16 bytes, got an address 2 bytes .* {name}.clone",
        )
    else:
        moved = tensor.repeat_interleave(2, dim=-1)[..., ::2]
        found = rf"must be contiguous, got shape \[3, .* with strides \[.*2\]; pass {name}.contiguous"
    assert torch.equal(moved, tensor)
    with pytest.raises(ArgumentError, match=rf"^{name} is read where it lies and {found}\(\)$"):
        TritonExperts(problem, SM90).permute_weights(dataclasses.replace(weights, **{name: moved}), problem)

"""Permuted weights own all tensors that a backend runs on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moereg.weights.permuted import PermutedWeights


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def permuted(start: int = 0, **changes: Any) -> PermutedWeights:
    values: dict[str, Any] = {
        "layout": "some_layout",
        "per_expert": {
            "w13": numbered(2, 4, start=start),
            "opaque": [numbered(3, start=start), numbered(3, start=start)],
        },
        "shared": {"scale": numbered(5, start=start)},
    }
    return PermutedWeights(**{**values, **changes})


def test_permuted_lookup() -> None:
    weights = permuted()
    assert torch.equal(weights["w13"], numbered(2, 4))
    assert torch.equal(weights["scale"], numbered(5))
    assert len(weights.experts("opaque")) == 2
    assert weights.get("w2") is None
    assert weights.get("scale") is weights["scale"]
    assert weights.num_bytes == 4 * (8 + 6 + 5)
    assert weights.device == torch.device("cpu")
    with pytest.raises(KeyError):
        weights["w2"]


def test_permuted_experts_are_counted() -> None:
    text = "per_expert tensors must hold the same number of experts, got {'w13': 2, 'w2': 3}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PermutedWeights("layout", {"w13": numbered(2, 4), "w2": [numbered(1)] * 3})


def test_copy_from_keeps_storage() -> None:
    weights, other = permuted(), permuted(start=100)
    pointers = {name: weights[name].data_ptr() for name in ("w13", "scale")}
    opaque = weights.experts("opaque")
    weights.copy_from(other)
    assert {name: weights[name].data_ptr() for name in pointers} == pointers
    assert torch.equal(weights["w13"], numbered(2, 4, start=100))
    assert torch.equal(weights["scale"], numbered(5, start=100))
    # Opaque tensors cannot be written into; the list that holds them is the same.
    assert weights.experts("opaque") is opaque
    assert torch.equal(opaque[0], numbered(3, start=100))
    other["w13"].zero_()
    assert weights["w13"].any()


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "other_layout"},
        {"per_expert": {"w13": numbered(2, 5), "opaque": [numbered(3), numbered(3)]}},
        {"per_expert": {"w13": numbered(2, 4).half(), "opaque": [numbered(3), numbered(3)]}},
        {"per_expert": {"w13": numbered(2, 4)}},
        {"shared": {}},
        {"shared": {"scale": numbered(6)}},
    ],
)
def test_copy_from_refuses_and_writes_nothing(changes: dict[str, Any]) -> None:
    weights = permuted()
    with pytest.raises(ValueError, match=r"^reload needs weights of the same layout and shapes, got .* for "):
        weights.copy_from(permuted(start=100, **changes))
    assert torch.equal(weights["w13"], numbered(2, 4))
    assert torch.equal(weights["scale"], numbered(5))

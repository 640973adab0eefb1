"""Reorderings, by their properties."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.weights.layouts import deinterleave_gate_up, interleave_gate_up, pad_columns

SIZES = st.integers(1, 9)


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@settings(deadline=None, max_examples=50)
@given(experts=SIZES, rows=SIZES, columns=SIZES)
def test_interleaving_is_invertible(experts: int, rows: int, columns: int) -> None:
    w13 = numbered(experts, 2 * rows, columns)
    before = w13.clone()
    interleaved = interleave_gate_up(w13)
    assert interleaved.shape == w13.shape
    assert interleaved.is_contiguous()
    for row in range(rows):
        assert torch.equal(interleaved[:, 2 * row], w13[:, row])
        assert torch.equal(interleaved[:, 2 * row + 1], w13[:, rows + row])
    assert torch.equal(deinterleave_gate_up(interleaved), w13)
    assert torch.equal(interleave_gate_up(deinterleave_gate_up(w13)), w13)
    assert torch.equal(w13, before)


@pytest.mark.parametrize("dim", [1, -1])
def test_rows_of_another_dimension(dim: int) -> None:
    bias = numbered(2, 6)
    assert interleave_gate_up(bias, dim=dim).tolist() == [[0, 3, 1, 4, 2, 5], [6, 9, 7, 10, 8, 11]]
    assert torch.equal(deinterleave_gate_up(interleave_gate_up(bias, dim=dim), dim=dim), bias)


@pytest.mark.parametrize("reorder", [interleave_gate_up, deinterleave_gate_up])
def test_reorders_into_a_part_of_a_larger_tensor(reorder: Callable[..., torch.Tensor]) -> None:
    w13 = numbered(6, 3)
    larger = torch.full((8, 5), -1, dtype=torch.int32)
    part = larger[:6, 1:4]
    assert reorder(w13, out=part) is part
    assert torch.equal(part, reorder(w13))
    # The part holds 0 and up.
    assert (larger == -1).sum() == larger.numel() - w13.numel()


@settings(deadline=None, max_examples=50)
@given(rows=SIZES, columns=SIZES, missing=st.integers(0, 9))
def test_padding_adds_zeros_on_the_right(rows: int, columns: int, missing: int) -> None:
    weight = numbered(rows, columns) + 1
    padded = pad_columns(weight, columns + missing)
    assert padded.shape == (rows, columns + missing)
    assert torch.equal(padded[:, :columns], weight)
    assert not padded[:, columns:].any()
    assert (padded.data_ptr() == weight.data_ptr()) == (missing == 0)


def test_padding_never_crops() -> None:
    with pytest.raises(ValueError, match="columns must be at least 8, got 5"):
        pad_columns(numbered(2, 8), 5)


def test_a_dimension_that_is_not_there_is_refused() -> None:
    for turn in (interleave_gate_up, deinterleave_gate_up):
        with pytest.raises(IndexError):
            turn(torch.zeros(4))  # Rows are dimension -2.
        with pytest.raises(IndexError):
            turn(torch.zeros(4, 2), dim=2)

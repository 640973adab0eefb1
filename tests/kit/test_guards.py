"""Guard bands, and the tensors between them; `test_broken_promises` has the classes that leave their tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moereg.author import PermutedWeights
from moereg.platforms import Platform
from moereg.prepare_finalize import local_prepare_finalize
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import Case
from moereg.testing.checks import check_numbers
from moereg.testing.guards import (
    FORMS,
    GuardedMemory,
    GuardedPrepareFinalize,
    GuardedWorkspaces,
    guard_permuted,
    guard_weights,
)
from moereg.testing.inputs import make_inputs, make_weights
from tests.support.fakes import FakeExperts, cell_of

CPU = torch.device("cpu")
PROBLEM = MoEProblem(num_experts=3, hidden_size=8, intermediate_size=4, top_k=2, dtype="bfloat16", has_bias=True)


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """As a kernel sees it whose addresses are off by so many elements."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + elements)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_reads_beside_a_tensor_are_nan(dtype: torch.dtype) -> None:
    memory = GuardedMemory(CPU)
    tensor = memory.copy("x", torch.zeros(3, 5, dtype=dtype))
    assert not tensor.float().isnan().any()
    for elements in (15, -15, 1000, -1000):
        assert shifted(tensor, elements).float().isnan().all()
    memory.check()
    ids = memory.copy("topk_ids", torch.zeros(3, 2, dtype=torch.int32))
    assert (shifted(ids, 6) == -1).all()


def test_bands_are_as_wide_as_a_tall_tile_and_a_mebibyte_at_most() -> None:
    memory = GuardedMemory(CPU)
    widths = []
    for shape in ((3,), (4, 2000), (4, 1 << 20)):
        tensor = memory.copy("x", torch.zeros(shape, dtype=torch.uint8))
        widths.append((len(memory._blocks[-1].raw) - tensor.numel()) // 2 - 64)
    assert widths == [1 << 16, 256 * 2000, 1 << 20]


def test_expanded_scales_and_biases_equal_the_first_element_and_nothing_else_does() -> None:
    problem = dataclasses.replace(PROBLEM, quant="int4_w4a16_g32_zp", hidden_size=64, intermediate_size=32)
    weights = make_weights(problem, CPU)
    guarded = guard_weights(GuardedMemory(CPU), weights, "expanded").tensors()
    for name, tensor in weights.tensors().items():
        is_expanded = name.endswith(("bias", "scale"))
        assert torch.equal(guarded[name], tensor.flatten()[0].expand_as(tensor) if is_expanded else tensor), name


def test_freezing_more_tensors_does_not_forgive_what_was_written() -> None:
    memory = GuardedMemory(CPU)
    tensor = memory.copy("x", torch.zeros(5))
    memory.freeze()
    tensor.numpy()[1] = 7  # As a kernel does, of which torch knows nothing.
    memory.copy("y", torch.zeros(5))
    memory.freeze()
    with pytest.raises(AssertionError, match=r"^x was written to, at byte 6$"):
        memory.check()


@pytest.mark.parametrize("alignment", [64, 256, 512])
def test_a_tensor_is_aligned_as_promised_and_no_more(alignment: int) -> None:
    for numel in (0, 3, 1000):
        address = GuardedMemory(CPU).allocate("x", (numel,), torch.float32, alignment=alignment).data_ptr()
        assert address % (2 * alignment) == alignment or numel == 0


@pytest.mark.parametrize("form", FORMS)
def test_every_form_holds_the_same_numbers(form: str) -> None:
    weights = make_weights(PROBLEM, CPU)
    memory = GuardedMemory(CPU)
    guarded = guard_weights(memory, weights, form)
    assert not guarded.w13.detach().isnan().any()
    assert torch.equal(guarded.w13, weights.w13)
    assert form == "expanded" or torch.equal(guarded.w2_bias, weights.w2_bias)
    strides = {
        "columns": (128, 16, 2),
        "transposed": (64, 1, 8),
    }
    assert guarded.w13.stride() == strides.get(form, (64, 8, 1))
    assert guarded.w2_bias.stride() == {"columns": (16, 2), "transposed": (1, 3), "expanded": (0, 0)}.get(form, (8, 1))
    assert guarded.w13.requires_grad == (form == "parameter")
    assert (guarded.w13.data_ptr() % 16 == 0) == (form != "offset")
    memory.check()


def test_permuted_weights_keep_strides_and_alignment() -> None:
    memory = GuardedMemory(CPU)
    views = guard_weights(memory, make_weights(PROBLEM, CPU), "offset").tensors()
    views["w2"] = views["w2"].transpose(1, 2)
    permuted = guard_permuted(memory, PermutedWeights("canonical", views, {"one": torch.ones(1)}))
    for name, view in views.items():
        assert torch.equal(permuted[name], view)
        assert permuted[name].stride() == view.stride()
        assert permuted[name].data_ptr() != view.data_ptr()
        assert permuted[name].data_ptr() % 16 == 6
    assert permuted["one"].data_ptr() % 16 == 0
    memory.check()
    permuted["one"].zero_()
    with pytest.raises(AssertionError, match="permuted one was written to"):
        memory.check()


@pytest.mark.parametrize("fill", ["nan", "huge", "stale"])
def test_workspaces_hold_what_is_asked_for(fill: str) -> None:
    memory = GuardedMemory(CPU)
    workspaces = GuardedWorkspaces(memory)
    shapes = ((3, 5), (7,))
    with workspaces.in_use():
        first = WORKSPACES.take(shapes, torch.float16, CPU)
        for tensor in first:
            assert tensor.isnan().all()
            assert tensor.data_ptr() % 512 == 256
            tensor.fill_(2)
        workspaces.fill = fill
        again = WORKSPACES.take(shapes, torch.float16, CPU)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in first]
    expected = {"nan": float("nan"), "huge": 6e4, "stale": 2.0}[fill]
    for tensor in again:
        torch.testing.assert_close(tensor, torch.full_like(tensor, expected), rtol=0, atol=0, equal_nan=True)
    memory.check()
    assert WORKSPACES.take(shapes, torch.float16, CPU)[0].data_ptr() != first[0].data_ptr()


def test_rows_past_an_experts_count_are_nan() -> None:
    problem = MoEProblem(num_experts=2, hidden_size=8, intermediate_size=4, top_k=1, activation_format="batched")
    inputs = make_inputs(problem, 5, "one_expert", CPU)
    prepare = GuardedPrepareFinalize(local_prepare_finalize("batched"), CPU)
    prepared = prepare.prepare(*inputs.call, problem, None)
    rows, counts = prepared.inputs.hidden_states, prepared.inputs.expert_num_tokens
    assert counts.tolist() == [0, 5]
    assert rows[0].isnan().all()
    assert torch.equal(rows[1], inputs.hidden_states)
    assert shifted(rows, rows.numel()).isnan().all()
    prepare.memory.check()
    counts[0] = 1
    with pytest.raises(AssertionError, match="prepared expert_num_tokens was written to"):
        prepare.memory.check()


def test_a_device_with_and_without_its_index_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # As cuda and cuda:0: a case names the kind of device, a tensor the one it is on.
    monkeypatch.setattr("moereg.testing.cases._device_of", lambda cell, platform: torch.device("cpu:0"))
    mapped = dataclasses.replace(PROBLEM, num_experts=8, num_local_experts=3, placement="map")
    case = Case(cell_of(FakeExperts), Platform.from_name("cpu"), mapped)
    assert case.device != torch.empty(0).device
    check_numbers(case)

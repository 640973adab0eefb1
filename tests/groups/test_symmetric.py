"""`low_latency_symmetric` on an imitation of torch's symmetric memory, and that torch has what is imitated."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

from moereg.movement import explain_movements
from moereg.platforms import Platform
from moereg.prepare_finalize import GroupFacts, symmetric
from moereg.problem import MoEProblem
from tests.groups import symmetric_imitation
from tests.groups.ranks import results_of, value_of

NAME = "low_latency_symmetric"
EXACT = ("symmetric", "symmetric_shared_bins", "symmetric_in_two_parts", "symmetric_weights_on_inputs")
MODULE = "tests.groups.symmetric_cases"


def check(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert value_of(result, "overlapped") is True
        for name in (*EXACT, "symmetric_fp8"):
            found = value_of(result, name)
            assert found["equal"] if name in EXACT else found["error"] < 1e-3, name
            assert found["way"] == NAME
            # Four calls: one exchange there and one home for each part, also without tokens.
            assert found["exchanges"] == (16 if name == "symmetric_in_two_parts" else 8)
        assert value_of(result, "symmetric_shared_bins")["bins"] == 16
        assert value_of(result, "symmetric_fp8")["wire"] == "float8_e4m3fn with float32 scales"
    # Why it is opt-in: neither torch nor the layer keeps this from happening, and then numbers are wrong.
    assert not all(value_of(result, "symmetric_overtaken")["equal"] for result in results)


@pytest.mark.slow
def test_routes_over_symmetric_memory_give_the_bits_of_one_rank() -> None:
    check(results_of(2, *EXACT, "symmetric_fp8", "overlapped", "symmetric_overtaken", module=MODULE))


@pytest.mark.slow
def test_more_ranks() -> None:
    check(results_of(3, *EXACT, "symmetric_fp8", "overlapped", "symmetric_overtaken", module=MODULE))


def test_torch_has_what_is_imitated() -> None:
    module = importlib.import_module(symmetric_imitation.MODULE)
    assert str(torch.ops.symm_mem.all_to_all_vdev_2d.default._schema) == (
        "symm_mem::all_to_all_vdev_2d(Tensor input, Tensor(a!) out, Tensor in_splits, Tensor(a!) out_splits_offsets, "
        "str group_name, int? major_align=None) -> ()"
    )
    imitated = inspect.signature(symmetric_imitation.all_to_all_vdev_2d).parameters
    assert list(imitated) == ["input", "out", "in_splits", "out_splits_offsets", "group_name", "major_align"]
    for name, parameters in {
        "rendezvous": ["tensor", "group"],
        "set_backend": ["name"],
        "get_backend": ["device"],
    }.items():
        assert list(inspect.signature(getattr(module, name)).parameters) == parameters
        assert list(inspect.signature(getattr(symmetric_imitation, name)).parameters) == parameters
    assert list(inspect.signature(module.empty).parameters) == ["size", "dtype", "device"]
    assert module.is_nvshmem_available() in (True, False)


def test_where_it_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(num_experts=256, hidden_size=256, intermediate_size=64, top_k=2, max_num_tokens=8)

    def reasons(size: int, **words: Any) -> list[str]:
        ways = explain_movements(problem, GroupFacts(size), "cuda:sm90", **words)
        (found,) = (decision for decision in ways.decisions if decision.name == NAME)
        return [reason.code for reason in found.reasons]

    assert reasons(8) == ["opt_in"]
    assert reasons(8, require=NAME) == []
    assert reasons(64, prefer=NAME) == ["group"]
    answer = symmetric._has_nvshmem(Platform("cuda", "sm90"))
    # A torch for CPUs has none.
    assert (answer is None) is importlib.import_module(symmetric_imitation.MODULE).is_nvshmem_available()
    assert answer is None or answer.startswith("requires a torch that finds NVSHMEM")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert symmetric._has_nvshmem(Platform("cuda", "sm90")) == "requires a torch with torch.distributed"

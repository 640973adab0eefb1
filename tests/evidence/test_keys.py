"""Keys of layers and machines: one function for writers and readers, and no field that does not count."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from moereg.evidence.on_machine import Machine, machine_of
from moereg.evidence.pack import Pack, key_text, problem_key
from moereg.platforms import Platform, probe
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from tests.evidence.packs import HERE, PROBLEM, choose, make_cells, pack_of, rows_of

OTHERS: dict[str, Any] = {
    "num_experts": 16,
    "hidden_size": 128,
    "intermediate_size": 64,
    "top_k": 1,
    "dtype": "float16",
    "quant": "int8_w8a16",
    "activation": "gelu",
    "has_bias": True,
    "activation_format": "batched",
    "num_local_experts": 4,
    "placement": "map",
    "apply_router_weight_on_input": True,
    "graph_capture": True,
    "deterministic": True,
    "batch_invariant": True,
    "exact_activations": True,
    "gradients": ["weights"],
    "adapter_rank": 8,
}


def other(field: str) -> MoEProblem:
    more = {"apply_router_weight_on_input": {"top_k": 1}, "adapter_rank": {"gradients": ["adapters"]}}.get(field, {})
    return MoEProblem(**{**PROBLEM.to_dict(), **more, field: OTHERS[field]})


def test_every_field_of_a_problem_but_the_most_tokens_counts() -> None:
    fields = {field.name for field in dataclasses.fields(MoEProblem)}
    assert fields == {*OTHERS, "max_num_tokens"}
    assert problem_key(MoEProblem(**{**PROBLEM.to_dict(), "max_num_tokens": 64})) == problem_key(PROBLEM)
    keys_of_all = {key_text(problem_key(problem)) for problem in (PROBLEM, *map(other, OTHERS))}
    assert len(keys_of_all) == len(OTHERS) + 1


@pytest.mark.parametrize("field", sorted(OTHERS.keys() - {"activation_format", "quant", "gradients", "adapter_rank"}))
def test_times_of_another_layer_are_not_used_and_the_nearest_is_named(field: str) -> None:
    cells = make_cells()
    pack = pack_of(cells, rows_of({1: -0.2}), problem=other(field))
    found = choose(cells, pack)
    assert (found.backend, found.source, found.measured) == ("first", "priority", "")
    (notice,) = found.notices
    assert notice.startswith("untuned: the nearest measured layer has ")
    assert f"{field} {OTHERS[field]!r}, here " in notice
    assert choose(cells, pack, problem=other(field)).backend == "second"


MACHINES: dict[str, Any] = {
    "platform": "cuda:sm90",
    "device": "Another CPU",
    "units": 1000,
    "power_limit_w": 300,
    "mig": True,
    "driver": "570",
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Machine)])
def test_times_of_another_machine_are_not_used_and_explained(field: str) -> None:
    cells = make_cells()
    pack = pack_of(cells, rows_of({1: -0.2}))
    assert choose(cells, pack).backend == "second"
    moved = dataclasses.replace(pack, machine=dataclasses.replace(pack.machine, **{field: MACHINES[field]}))
    found = choose(cells, moved)
    assert (found.backend, found.source) == ("first", "priority")
    here = getattr(pack.machine, field) if field != "driver" else "none"
    assert found.notices == (f"pack unused: it is of another machine: {field} {MACHINES[field]}, here {here}",)


SCHEMES = (*QUANT_SCHEMES, dataclasses.replace(QUANT_SCHEMES["int8_w8a16"], name="mine"))
OF_SCHEMES = [MoEProblem(**{**PROBLEM.to_dict(), "hidden_size": 1024, "quant": quant}) for quant in SCHEMES]


@pytest.mark.parametrize("problem", [PROBLEM, *map(other, OTHERS), *OF_SCHEMES], ids=str)
def test_the_reader_makes_the_key_of_the_writer(problem: MoEProblem) -> None:
    cells = make_cells(("first",))
    pack = Pack(machine_of(HERE), cells=pack_of(cells, []).cells).with_rows(problem, 0, ())
    (read,) = Pack.from_json(pack.text()).layers
    assert key_text(read.problem) == key_text(problem_key(problem)) == read.key[0]
    # As a caller gives it, by other names for the same values.
    again = MoEProblem.from_dict(json.loads(json.dumps(problem.to_dict())))
    assert key_text(problem_key(again)) == read.key[0]


def test_a_gpu_is_described_without_touching_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of.cache_clear()
    monkeypatch.setattr(probe, "gpu_settings", lambda: (16896, 700, False, "570.86.15"))
    gpu = Platform("cuda", "sm90", "NVIDIA H200", 141 << 30, probed=True)
    assert machine_of(gpu) == Machine("cuda:sm90", "NVIDIA H200", 16896, 700, False, "570")
    monkeypatch.setattr(probe, "gpu_settings", lambda: (0, 0, False, ""))
    assert machine_of(gpu).driver == "570", "it is asked once"
    machine_of.cache_clear()
    assert machine_of(gpu) == Machine("cuda:sm90", "NVIDIA H200", 0, 0, False, "")
    machine_of.cache_clear()


def test_a_cpu_is_its_name_and_the_processors_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_of.cache_clear()
    monkeypatch.setattr(probe, "num_cores", lambda: 7)
    monkeypatch.setattr(probe, "gpu_settings", lambda: (1, 1, True, "1"))
    assert machine_of(HERE) == Machine("cpu", "A CPU", 7, 0, False, "")
    machine_of.cache_clear()

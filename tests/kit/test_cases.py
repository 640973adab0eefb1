"""What is run of a cell: problems that reach all of its claim and lie just outside of it, calls, and drawn layers."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from moereg.author import Experts, Facts, MoEProblem, Platform
from moereg.registry import BackendCell
from moereg.spec.activations import ACTIVATIONS
from moereg.testing import cases, check, checks, drawing, suite
from moereg.testing.cases import (
    GPU_TOKENS,
    TOKENS,
    Case,
    accepted_neighbor,
    accepted_problems,
    calls_of,
    claimed_problems,
    fault_schemes,
    fault_tokens,
    first_case,
    rejected_problems,
)
from moereg.testing.checks import ImportWatch
from moereg.testing.drawing import INTERPRETED, NATIVE, DrawnLayer, draw_layer, limits_of, vary_sizes
from moereg.testing.guards import FILLS, FORMS
from moereg.testing.inputs import ROUTINGS
from tests.support import fakes
from tests.support.fakes import EVERYTHING, LITTLE, FakeExperts

CPU = Platform.from_name("cpu")
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU imitates no other GPU")


def cell_of(
    facts: Facts, schemes: tuple[str, ...] = ("unquantized",), rule: str = "cpu", **members: Any
) -> BackendCell:
    experts = type("FactualExperts", (FakeExperts,), {"facts": facts, "__module__": __name__, **members})
    return fakes.cell_of(experts, *schemes, rules=(rule,))


def test_claimed_problems_reach_every_fact() -> None:
    found = list(claimed_problems(cell_of(EVERYTHING, ("unquantized", "int8_w8a16"))))
    assert {problem.dtype for problem in found} == EVERYTHING.dtypes
    assert {problem.placement for problem in found if problem.is_expert_parallel} == {"contiguous", "map"}
    assert {problem.activation.name for problem in found} >= EVERYTHING.activations
    assert {problem.activation.limit for problem in found if problem.activation.name == "silu"} == {None, 1.5}
    assert {problem.activation.name for problem in found if problem.has_bias} >= {"swigluoai"}
    (on_input,) = [problem for problem in found if problem.apply_router_weight_on_input]
    assert on_input.has_bias
    assert {(problem.num_experts, problem.top_k) for problem in found} >= {(1, 1), (8, 8), (40, 3)}
    odd = {problem.hidden_size for problem in found if problem.hidden_size % 8}
    assert odd >= {130, 255, 33}
    assert any(problem.intermediate_size % 8 and problem.intermediate_size % 2 for problem in found)
    quantized = [problem for problem in found if problem.quant.name == "int8_w8a16"]
    assert {problem.hidden_size for problem in quantized} == {136, 33}
    assert [problem.has_bias for problem in quantized] == [True, False]


def test_rejected_problems_lie_outside_of_every_fact() -> None:
    codes = {code for code, _ in rejected_problems(cell_of(LITTLE))}
    assert codes == {
        "activation", "swiglu_limit", "bias", "dtype", "activation_format", "placement", "router_weight_on_input",
        "graph_capture", "deterministic", "batch_invariant", "gradients",
    }  # fmt: skip
    found = list(rejected_problems(cell_of(LITTLE)))
    assert {problem.activation.name for code, problem in found if code == "activation"} >= set(ACTIVATIONS) - {
        name for name, activation in ACTIVATIONS.items() if activation.limit is not None
    }
    assert {problem.dtype for code, problem in found if code == "dtype"} == {"bfloat16", "float16"}
    assert {problem.activation_format for code, problem in found if code == "activation_format"} == {"batched"}
    assert {problem.placement for code, problem in found if code == "placement"} == {"map"}
    aligned = {"requires_multiple": {"hidden_size": 16, "intermediate_size": 32}}
    sizes = dataclasses.replace(LITTLE, max_experts=12, max_num_tokens=99, **aligned)
    found = list(rejected_problems(cell_of(sizes)))
    assert [(p.hidden_size % 16, p.intermediate_size % 32) for code, p in found if code == "alignment"] == [
        (1, 0),
        (0, 1),
    ]
    sized = [problem for code, problem in found if code == "size"]
    assert [(problem.num_experts, problem.max_num_tokens) for problem in sized] == [
        (13, sized[0].max_num_tokens),
        (sized[1].num_experts, 100),
    ]
    assert not list(rejected_problems(cell_of(dataclasses.replace(
        EVERYTHING, activations=frozenset(ACTIVATIONS), activation_formats=frozenset({"standard", "batched"})
    ))))  # fmt: skip


def test_held_experts_have_their_neighbors_outside() -> None:
    whole = dataclasses.replace(LITTLE, held_experts=frozenset({"all"}))
    part = dataclasses.replace(LITTLE, held_experts=frozenset({"some"}))
    for facts, is_part in ((whole, True), (part, False)):
        (problem,) = [
            problem
            for code, problem in rejected_problems(cell_of(facts))
            if code == "placement" and problem.placement == "contiguous"
        ]
        assert problem.is_expert_parallel == is_part
        assert all(problem.is_expert_parallel != is_part for problem in claimed_problems(cell_of(facts)))


def test_a_refusal_by_facts_has_no_neighbor_and_one_by_the_predicate_has_the_nearest() -> None:
    def picky(cls: type, problem: MoEProblem, platform: Platform) -> list[str]:
        return [] if problem.hidden_size % 64 == 0 else ["requires hidden_size % 64 == 0"]

    cell = cell_of(LITTLE, unsupported_reasons=classmethod(picky))
    sizes = {"num_experts": 4, "intermediate_size": 24, "top_k": 2, "dtype": "float32"}
    problem = MoEProblem(hidden_size=72, **sizes)
    neighbor = accepted_neighbor(cell, problem, CPU)
    assert (neighbor.hidden_size, neighbor.intermediate_size, neighbor.num_experts) == (128, 64, 4)
    assert accepted_neighbor(cell, dataclasses.replace(problem, has_bias=True), CPU) is None
    assert accepted_neighbor(cell, dataclasses.replace(problem, hidden_size=64, has_bias=True), CPU) is None
    assert accepted_neighbor(cell, neighbor, CPU) == neighbor
    found = accepted_problems(cell, CPU)
    assert len(found) == len(set(found)) > 3


def test_calls_have_no_tokens_few_and_many_and_every_routing() -> None:
    case = first_case(cell_of(LITTLE))
    expected = {(count, "uniform") for count in (0, 1, 2, 63)} | {(17, routing) for routing in ROUTINGS}
    if case.device.type == "cuda":
        expected |= {(4096, routing) for routing in ROUTINGS}
    assert set(calls_of(case, False)) == set(calls_of(case, True)) == expected
    assert (TOKENS, GPU_TOKENS) == ((0, 1, 2, 17, 63), (0, 1, 2, 17, 63, 4096))


@without_gpu
def test_interpreted_cases_have_fewer_calls_but_for_the_first() -> None:
    cell = cell_of(LITTLE, ("unquantized", "int8_w8a16", "int8_w8a8", "fp8_block128"), rule="cuda:sm90")
    plain, weight_only, coded = (first_case(cell, scheme) for scheme in cell.schemes[:3])
    assert plain.is_imitated
    assert [count for count, _ in calls_of(plain, False)] == [0, 1, 17]
    assert [count for count, _ in calls_of(weight_only, False)] == [0, 2]
    assert len(calls_of(plain, True)) == len(TOKENS) - 1 + len(ROUTINGS)
    assert [fault_tokens(case) for case in (plain, weight_only, coded)] == [1, 1, 17]
    assert [scheme.name for scheme in fault_schemes(cell)] == ["unquantized", "int8_w8a16", "fp8_block128"]
    assert limits_of(cell) == INTERPRETED
    native = cell_of(LITTLE, ("unquantized", "int8_w8a16", "int8_w8a8"))
    assert fault_tokens(first_case(native)) == 17
    assert len(fault_schemes(native)) >= 3


def test_a_first_case_is_of_the_scheme_and_has_biases_where_they_are_preferred_and_a_kernel_its_map() -> None:
    cell = cell_of(EVERYTHING, ("unquantized", "int8_w8a16"))
    assert [first_case(cell, scheme).problem.quant for scheme in cell.schemes] == list(cell.schemes)
    assert [first_case(cell, cell.schemes[0], has_bias).problem.has_bias for has_bias in (False, True)] == [False, True]
    assert not first_case(cell_of(LITTLE), has_bias=True).problem.has_bias
    parallel = [problem for problem in claimed_problems(cell) if problem.is_expert_parallel]
    mapped = next(problem for problem in parallel if problem.placement == "map")
    kernel = cases.build(Case(cell, first_case(cell).platform, mapped))
    assert kernel.expert_map.tolist() == [2, -1, 1, -1, 0, -1, -1, -1]


def test_a_platform_that_nothing_imitates_here_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "current_platform", lambda: Platform.from_name("cpu"))
    before = cases.machine()
    with cases.running_as(Platform.from_name("cuda:sm90")):
        found = [cases.why_not_runnable(cell_of(EVERYTHING, rule=rule)) for rule in ("cuda:sm90", "*")]
    assert cases.machine() == before
    there = "requires platform in (cuda:sm90), got cpu"
    assert found == [there, "requires cuda:sm90, or device_types that imitate it, got cpu"]


def test_interpreted_kernels_beside_a_gpu_run_on_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "current_platform", lambda: Platform.from_name("cuda:sm90"))
    for value, kind in (("1", "cpu"), ("0", None)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        found = check.chosen_machine("")
        assert (found and found.kind) == kind


def test_a_class_reads_cpu_tensors_if_its_module_has_interpreted_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel() -> None: ...

    experts: type[Experts] = type("PlainExperts", (Experts,), {"__module__": __name__})
    hopper, interpreted = Platform.from_name("cuda:sm90"), InterpretedFunction(kernel)
    tuned = triton.autotune([triton.Config({}), triton.Config({}, num_warps=8)], key=[])(interpreted)
    heuristic = triton.heuristics({})(tuned)
    assert experts.device_types(hopper) == ("cuda",)
    for value in (interpreted, tuned, heuristic):
        monkeypatch.setattr(sys.modules[__name__], "KERNEL", value, raising=False)
        assert experts.device_types(hopper) == ("cuda", "cpu")
    for value in (kernel, triton.Config({}), JITFunction(kernel)):
        monkeypatch.setattr(sys.modules[__name__], "KERNEL", value)
        assert experts.device_types(hopper) == ("cuda",)
    monkeypatch.delitem(sys.modules, __name__)
    assert experts.device_types(hopper) == ("cuda",)


def drawn_of(cell: BackendCell, number: int, limits: drawing.Limits = NATIVE) -> list[DrawnLayer]:
    rng = random.Random(3)
    return [draw_layer(cell, rng.choice, limits) for _ in range(number)]


def test_drawn_layers_reach_every_value_of_every_choice() -> None:
    found = drawn_of(cell_of(EVERYTHING, ("unquantized", "int8_w8a16")), 600)
    problems = [layer.problem for layer in found]
    assert {layer.routing for layer in found} == set(ROUTINGS)
    assert {layer.fill for layer in found} == set(FILLS)
    assert {layer.form for layer in found} == set(FORMS)
    assert {layer.wide_ids for layer in found} == {False, True}
    assert {layer.ep_rank for layer in found} == {0, 1}
    assert len({layer.seed for layer in found}) > 90
    assert {layer.computes for layer in found} == {"unquantized", "int8_w8a16"}
    assert {0, 1, 2, 17, 63, 64, 65, 128, 129} <= {layer.num_tokens for layer in found}
    assert sum(layer.num_tokens > 30 for layer in found) > len(found) / 3
    assert all(layer.num_tokens * layer.problem.top_k <= NATIVE.num_routes for layer in found)
    for field in ("has_bias", "apply_router_weight_on_input", "is_expert_parallel"):
        assert {getattr(problem, field) for problem in problems} == {False, True}, field
    for placement in ("contiguous", "map"):
        assert {problem.is_expert_parallel for problem in problems if problem.placement == placement} == {False, True}
    assert {problem.dtype for problem in problems} == EVERYTHING.dtypes
    assert {problem.activation.name for problem in problems} == EVERYTHING.activations
    assert {problem.activation.limit for problem in problems} >= {None, 1.5}
    assert {problem.activation.beta for problem in problems} >= {0.0, 0.5}
    assert {1, 2, 8, 40} <= {problem.num_experts for problem in problems}
    assert {1, 2, 8} <= {problem.top_k for problem in problems}
    for field in ("hidden_size", "intermediate_size"):
        sizes = {getattr(problem, field) for problem in problems}
        assert {16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257} <= sizes
        assert max(sizes) > 300


def test_drawn_layers_keep_to_sizes_that_are_claimed() -> None:
    facts = dataclasses.replace(LITTLE, max_experts=5, requires_multiple={"hidden_size": 8, "intermediate_size": 16})
    for layer in drawn_of(cell_of(facts), 60):
        assert layer.problem.num_experts <= 5
        assert (layer.problem.hidden_size % 8, layer.problem.intermediate_size % 16) == (0, 0)
        other = vary_sizes(layer, random.Random(layer.seed).choice, NATIVE)
        assert other.problem.num_experts >= layer.problem.top_k


def test_libraries_that_choosing_must_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def file(path: str, size: int) -> Any:
        found = importlib.metadata.PackagePath(path)
        found.size = size
        return found

    files = {
        "large": [file("big_kernels/ops.so", 20_000_000), file("large-1.0.dist-info/RECORD", 100)],
        "small": [file("small_kernels/ops.so", 1_000_000), file("small_kernels/data.bin", 90_000_000)],
        "un-known": [],
        "numpy": [file("numpy/core.so", 30_000_000)],
    }
    monkeypatch.setattr(importlib.metadata, "files", lambda name: files[name])
    cell = dataclasses.replace(cell_of(LITTLE), requires=tuple(files))
    assert checks.kernel_libraries(cell) - checks.KERNEL_LIBRARIES == {"big_kernels", "un_known"}


@pytest.mark.parametrize(("importer", "is_told"), [("moereg.backends.mine", True), ("moereg.layer.factory", False)])
def test_a_built_in_class_is_told_of_what_backends_import_alone(
    importer: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "numba", SimpleNamespace())
    cell = cell_of(LITTLE, __module__="moereg.backends.mine")
    watch = ImportWatch({"numba": frozenset({importer})})
    if not is_told:
        return checks.check_deciding(cell, watch)
    with pytest.raises(AssertionError, match="imports numba"):
        checks.check_deciding(cell, watch)


def kinds_of(cell: BackendCell, is_known: bool = False) -> list[tuple[str, Any]]:
    return list(suite._promises(cell, False, is_known))


def test_a_cell_has_a_check_of_each_problem_scheme_and_promise() -> None:
    facts = dataclasses.replace(EVERYTHING, deterministic=True)
    cell = cell_of(facts, ("unquantized", "int8_w8a16", "int8_w8a8"))
    found = kinds_of(cell)
    problems = accepted_problems(cell, first_case(cell).platform)
    numbers = [argument for kind, argument in found if kind == "numbers"]
    assert [MoEProblem.from_dict(argument["problem"]) for argument in numbers] == problems
    assert [argument["is_first"] for argument in numbers] == [True] + [False] * (len(problems) - 1)
    assert not any(argument["is_first"] for kind, argument in kinds_of(cell, is_known=True) if kind == "numbers")
    assert {argument["name"] for kind, argument in found if kind == "faults"} >= {
        "unquantized",
        "int8_w8a16",
        "int8_w8a8",
    }
    assert [argument["name"] for kind, argument in found if kind == "rounding"] == ["int8_w8a8"]
    assert "equal_bits" in {kind for kind, _ in found}
    assert "equal_bits" not in {kind for kind, _ in kinds_of(cell_of(LITTLE))}
    assert [kind for kind, _ in suite._promises(cell, True, False)] == ["deciding"]


def test_a_cell_of_a_gpu_is_captured_and_must_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "runnable_platform", lambda cell: Platform.from_name("cuda:sm90"))
    monkeypatch.setattr(suite, "is_imitated", lambda cell: False)
    monkeypatch.setattr(cases, "is_imitated", lambda cell: False)
    captured = cell_of(dataclasses.replace(LITTLE, graph_capture=True), rule="cuda:sm90")
    kinds = [{kind for kind, _ in kinds_of(cell)} for cell in (captured, cell_of(LITTLE, rule="cuda:sm90"))]
    assert [kind & {"graph", "synchronization"} for kind in kinds] == [
        {"graph", "synchronization"},
        {"synchronization"},
    ]


def test_schemes_that_a_cell_serves_by_another_are_claimed_and_drawn() -> None:
    cell = cell_of(LITTLE, ("int8_w8a16",))
    for problems in (claimed_problems(cell), (layer.problem for layer in drawn_of(cell, 40))):
        assert {problem.quant.name for problem in problems} == {"int8_w8a16", "int8_w8a8"}
    substituted = dataclasses.replace(first_case(cell).problem, quant="int8_w8a8")
    assert Case(cell, CPU, substituted).computes.name == "int8_w8a16"

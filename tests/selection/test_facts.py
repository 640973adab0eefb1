"""Facts: each field is one row, which drives the check at registration, narrowing and reasons alike."""

from __future__ import annotations

import dataclasses
import random
import re
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from moereg.errors import ArgumentError
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.spec.activations import Activation
from moereg.spec.facts import FACTS, Fact, Facts, NarrowedFacts, check_facts, fact_reasons, narrow_facts
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.spec.reasons import REASON_CODES, Reason
from moereg.testing.cases import claimed_problems, rejected_problems
from moereg.testing.drawing import Limits, draw_layer
from tests.support.fakes import FakeExperts

EVERYTHING = dataclasses.replace(FakeExperts.facts, gradients=frozenset(GRADIENTS))
ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"num_experts": 8, "hidden_size": 60, "intermediate_size": 32, "top_k": 2}

# For each fact: an invalid value, a value that promises less than `EVERYTHING`, and a problem that it then rejects.
ROWS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "activations": ("silu", frozenset({"gelu"}), {}),
    "activation_scalars": (1, False, {"activation": Activation("swigluoai", alpha=2.0, beta=1.0, limit=7.0)}),
    "swiglu_limit": (None, False, {"activation": Activation("silu", limit=7.0)}),
    "bias": ("yes", False, {"has_bias": True}),
    "dtypes": (frozenset({"bf16"}), frozenset({"float32"}), {}),
    "activation_formats": ({"standard"}, frozenset(), {}),
    "placements": (None, frozenset({"map"}), {}),
    "held_experts": (frozenset({"none"}), frozenset({"some"}), {}),
    "router_weight_on_input": (0, False, {"top_k": 1, "apply_router_weight_on_input": True}),
    "requires_multiple": ({"hidden": 8}, {"hidden_size": 8}, {}),
    "max_experts": (0, 4, {}),
    "max_num_tokens": (True, 16, {}),
    "graph_capture": ("no", False, {"graph_capture": True}),
    "deterministic": (2, False, {"deterministic": True}),
    "batch_invariant": (None, False, {"batch_invariant": True}),
    "gradients": (frozenset({"biases"}), frozenset(), {"gradients": {"weights"}}),
}


def test_every_field_is_a_row_and_a_keyword() -> None:
    fields = [field.name for field in dataclasses.fields(Facts)]
    assert [name for name, _ in FACTS] == fields
    assert all(isinstance(fact, Fact) for _, fact in FACTS)
    assert list(NarrowedFacts.__annotations__) == fields
    assert list(ROWS) == fields


def test_a_keyword_has_the_type_of_its_field() -> None:
    fields = typing.get_type_hints(Facts)
    for name, keyword in typing.get_type_hints(NarrowedFacts).items():
        # A decorator may give any collection of names.
        assert keyword == (Collection[str] if fields[name] == frozenset[str] else fields[name]), name


@pytest.mark.parametrize("name", ROWS)
def test_a_row_checks_narrows_and_gives_its_reason(name: str) -> None:
    wrong, narrower, asked = ROWS[name]
    assert getattr(EVERYTHING, name) != narrower
    with pytest.raises(ArgumentError, match=re.escape(_named(name, wrong))):
        check_facts(dataclasses.replace(EVERYTHING, **{name: wrong}))
    narrowed = narrow_facts(EVERYTHING, {name: narrower})
    assert narrowed == dataclasses.replace(EVERYTHING, **{name: narrower})
    with pytest.raises(ArgumentError, match="may narrow the class's facts, never widen them"):
        narrow_facts(narrowed, {name: getattr(EVERYTHING, name)})
    problem = MoEProblem(**{**SMALL, **asked})
    assert fact_reasons(EVERYTHING, problem) == []
    (reason,) = fact_reasons(narrowed, problem)
    assert isinstance(reason, Reason)
    assert reason.code in REASON_CODES
    (fact,) = [fact for known, fact in FACTS if known == name]
    assert list(fact.reasons(narrower, problem)) == [reason]
    assert narrower != fact.widest


def _named(name: str, wrong: object) -> str:
    if isinstance(wrong, frozenset):
        return f"unknown name in {name}"
    return f"unknown size in {name}" if isinstance(wrong, dict) else f"{name} must"


@pytest.mark.parametrize("name", dict(FACTS))
def test_the_conformance_kit_has_a_problem_outside_each_fact(name: str) -> None:
    narrower = ROWS[name][1]
    if narrower == frozenset():  # Claims nothing; the class's own leaves something out already.
        narrower = getattr(FakeExperts.facts, name)
    registry, experts = BackendRegistry(), type("Lacking", (FakeExperts,), {})
    register_moe_backend("fake", 1, ("unquantized",), ("cpu",), registry=registry, **{name: narrower})(experts)
    (cell,) = registry.cells
    fact = dict(FACTS)[name]
    found = [(code, list(fact.reasons(narrower, problem))) for code, problem in rejected_problems(cell)]
    assert [reasons for code, reasons in found if code in {reason.code for reason in reasons}]


def test_the_widest_value_of_a_fact_gives_no_reason() -> None:
    problem = MoEProblem(**SMALL)
    for name, fact in FACTS:
        facts = dataclasses.replace(EVERYTHING, **{name: fact.widest})
        for _, _, asked in ROWS.values():
            assert fact_reasons(facts, dataclasses.replace(problem, **asked)) == [], name


@pytest.mark.parametrize("held", ["all", "some"])
def test_the_kit_asks_for_the_experts_that_a_cell_says_a_rank_holds(held: str) -> None:
    registry = BackendRegistry()
    register_moe_backend("fake", 1, ("unquantized",), ("cpu",), registry=registry, held_experts=(held,))(FakeExperts)
    (cell,) = registry.cells
    problems = list(claimed_problems(cell))
    assert [problem for problem in problems if fact_reasons(cell.facts, problem)] == []
    assert {problem.held_experts for problem in problems} == {held}
    other = [problem for code, problem in rejected_problems(cell) if code == "placement"]
    assert [[reason.code for reason in fact_reasons(cell.facts, problem)] for problem in other] == [["placement"]]
    choose = random.Random(0).choice
    drawn = [draw_layer(cell, choose, Limits(64, 8, 64, 128)).problem for _ in range(20)]
    assert {problem.held_experts for problem in drawn} == {held}

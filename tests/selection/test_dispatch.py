"""Selection as tables: (platform, problem, request) to winner and reasons, on a registry of fakes."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from moereg import dispatch
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import (
    EmulationWarning,
    RequestError,
    UnknownBackendError,
    UnknownSchemeError,
    UnsupportedProblemError,
)
from moereg.platforms import Platform
from moereg.registry import BackendRegistry, register_moe_backend, registering_origin
from moereg.selection import decide as deciding
from moereg.selection.decide import reading_in_place
from moereg.selection.result import Selection, nearest_by_backend
from moereg.spec.activations import Activation
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme, get_scheme
from moereg.spec.reasons import CURES, REASON_CODES
from tests.support.fakes import EVERYTHING, FakeExperts


def calls_of(run: Callable[[], object]) -> int:
    """Functions that `run` enters in this thread, of Python and of C."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


H100 = Platform("cuda", "sm90", "NVIDIA H100", versions={"some-library": "2.1"}, probed=True)


@pytest.fixture
def fakes(isolated_registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch) -> Iterator[BackendRegistry]:
    """A registry that a test fills; nothing of other tests is kept."""
    isolated_registry.restore(())
    deciding._ANSWERS.clear()
    dispatch._log_counts.cache_clear()
    return isolated_registry


def experts_class(name: str = "Fake", **members: Any) -> type[FakeExperts]:
    return type(name, (FakeExperts,), members)


def add(name: str, priority: int = 10, experts: type[FakeExperts] | None = None, **changes: Any) -> None:
    keywords: dict[str, Any] = {"quant_schemes": ("unquantized",), "platforms": ("cuda:sm80+",), **changes}
    origin = keywords.pop("origin", "tests")
    with registering_origin(origin):
        register_moe_backend(name, priority, **keywords)(experts or experts_class(name.title()))


def problem_of(**changes: Any) -> MoEProblem:
    return MoEProblem(**{"num_experts": 8, "hidden_size": 64, "intermediate_size": 96, "top_k": 2, **changes})


def codes(selection: Selection, backend: str) -> list[list[str]]:
    return [
        [reason.code for reason in decision.reasons] for decision in selection.decisions if decision.backend == backend
    ]


# Every reason code, from a cell that fails for it alone.


def raising(cls: type, problem: MoEProblem, platform: Platform) -> list[str]:
    raise KeyError("hidden")


def leaving(cls: type, problem: MoEProblem, platform: Platform) -> list[str]:
    raise SystemExit(3)


NARROW = Facts(
    activations=frozenset({"silu"}),
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16"}),
    placements=frozenset({"contiguous"}),
    requires_multiple={"hidden_size": 64, "intermediate_size": 32},
    max_experts=8,
    max_num_tokens=128,
)


def reason(code: str, text: str, **changes: dict[str, Any]) -> tuple[str, str, dict[str, dict[str, Any]]]:
    """A code, its text, and changes to the registration, members of the class, the problem and the request."""
    return code, text, changes


def undeclared(code: str, text: str, **problem: Any) -> tuple[str, str, dict[str, dict[str, Any]]]:
    """The same of a problem that asks for what `NARROW` does not declare."""
    return reason(code, text, members={"facts": NARROW}, problem=problem)


def predicate(code: str, text: str, function: Any) -> tuple[str, str, dict[str, dict[str, Any]]]:
    """The same of a class whose predicate is that function."""
    return reason(code, text, members={"unsupported_reasons": classmethod(function)})


def probe(code: str, text: str, function: Any) -> tuple[str, str, dict[str, dict[str, Any]]]:
    return reason(code, text, registration={"probes": (function,)})


REASONS = [
    reason(
        "platform",
        "requires platform in (rocm:gfx942, cpu), got cuda:sm90",
        registration={"platforms": ("rocm:gfx942", "cpu")},
    ),
    reason("package", "requires absent>=1, which is not installed", registration={"requires": ("absent>=1",)}),
    reason("package", "requires Some_Library>=3, got 2.1", registration={"requires": ("Some_Library>=3",)}),
    probe("probe", "requires nvcc, got none", lambda platform: "requires nvcc, got none"),
    reason("denied", "denied by the request (sole)", request={"deny": "sole"}),
    reason("not_required", "requires a backend in (other), got sole", request={"require": "other"}),
    reason("opt_in", "is opt-in: name it in require or prefer", registration={"opt_in": True}),
    reason("quant_scheme", "requires weights in (unquantized), got nvfp4", problem={"quant": "nvfp4"}),
    undeclared("activation", "requires activation in (silu), got gelu", activation="gelu"),
    undeclared(
        "activation", "requires alpha=1 and beta=0, got silu(alpha=2.0)", activation=Activation("silu", alpha=2.0)
    ),
    undeclared("swiglu_limit", "does not apply the swiglu clamp, got limit 7.0", activation="silu(limit=7.0)"),
    undeclared("bias", "does not apply biases, got has_bias=True", has_bias=True),
    undeclared("dtype", "requires dtype in (bfloat16), got float16", dtype="float16"),
    undeclared(
        "activation_format", "requires activation format in (standard), got batched", activation_format="batched"
    ),
    undeclared("placement", "requires placement in (contiguous), got map", placement="map"),
    undeclared(
        "router_weight_on_input",
        "does not scale inputs by the routing weight, got apply_router_weight_on_input=True",
        top_k=1,
        apply_router_weight_on_input=True,
    ),
    undeclared("alignment", "requires hidden_size % 64 == 0, got 96", hidden_size=96),
    undeclared("size", "requires num_local_experts <= 8, got 9", num_experts=9),
    undeclared("size", "requires max_num_tokens <= 128, got 129", max_num_tokens=129),
    # Fail closed: a call might have more.
    undeclared("size", "requires max_num_tokens <= 128, got None", max_num_tokens=None),
    undeclared("graph_capture", "cannot be captured in a CUDA graph, got graph_capture=True", graph_capture=True),
    undeclared("deterministic", "does not give the same bits each time, got deterministic=True", deterministic=True),
    undeclared(
        "batch_invariant",
        "a token's bits depend on the other tokens of its call, got batch_invariant=True",
        batch_invariant=True,
    ),
    undeclared(
        "gradients", "does not compute gradients of (hidden_states, weights)", gradients={"weights", "hidden_states"}
    ),
    reason(
        "precision",
        "requires activations as nvfp4 has them, got nvfp4_w4a16 instead",
        registration={"quant_schemes": ("nvfp4_w4a16",)},
        problem={"quant": "nvfp4", "exact_activations": True},
    ),
    predicate("backend", "requires top_k == 4, got 2", lambda cls, problem, platform: ["requires top_k == 4, got 2"]),
    predicate("predicate_error", "its predicate raised KeyError: 'hidden'", raising),
    predicate(
        "predicate_error",
        "its predicate raised TypeError: it has to return a list of texts, got 'requires more'",
        lambda cls, problem, platform: "requires more",
    ),
    probe("predicate_error", "its probe <lambda> raised ZeroDivisionError: ", lambda platform: 1 // 0),
    predicate("predicate_error", "its predicate raised SystemExit: 3", leaving),
    predicate(
        "predicate_error",
        "its predicate raised TypeError: it has to return a list of texts, got one with False",
        lambda cls, problem, platform: (False, "too large"),
    ),
    predicate("backend", "no text", lambda cls, problem, platform: [" "]),
    predicate("backend", r"of two \x1b[31mlines", lambda cls, problem, platform: ["of\ntwo \x1b[31mlines"]),
    probe("predicate_error", "its probe <lambda> has to return a text or None, got False", lambda platform: False),
]


def test_every_reason_code_is_covered() -> None:
    # A quarantine is a file, which test_quarantine.py writes; of groups test_dispatcher.py knows; layouts are below.
    assert {row[0] for row in REASONS} | {"quarantined", "group", "layout"} == set(REASON_CODES)
    assert all(CURES.values())


@pytest.mark.parametrize(
    ("platform", "one", "other"), [("cpu", "TorchPacked", "TorchTraining"), ("cuda:sm90", "Triton", "Triton")]
)
def test_classes_that_read_in_place(platform: str, one: str, other: str) -> None:
    problem = MoEProblem(num_experts=8, hidden_size=256, intermediate_size=128, top_k=2)
    best = explain_backends(problem, platform, deny="flashinfer*")
    found = reading_in_place(best)
    assert best.winner is not None
    assert found.winner is not None
    assert (best.winner.experts, found.winner.experts) == (f"{one}Experts", f"{other}Experts")
    assert found.source == "priority"
    rejected = {each.experts: each.reasons for each in found.decisions if each not in best.decisions}
    assert all(reasons[0].code == "layout" for reasons in rejected.values())
    assert ("TorchPackedExperts" in rejected) is (platform == "cpu")
    none = reading_in_place(
        explain_backends(dataclasses.replace(problem, quant=get_scheme("int4_w4a16_g128")), "cuda:sm90")
    )
    assert none.winner is None
    assert "requires weights that are read in place, got layouts packed64_gate_up_interleaved" in {
        reason.text for each in none.decisions for reason in each.reasons
    }


@pytest.mark.parametrize(("code", "text", "changes"), REASONS, ids=[f"{code}-{text}" for code, text, _ in REASONS])
def test_one_reason(fakes: BackendRegistry, code: str, text: str, changes: dict[str, dict[str, Any]]) -> None:
    add("sole", 100, experts_class("Sole", **changes.get("members", {})), **changes.get("registration", {}))
    add("other", 1, quant_schemes=("unquantized", "nvfp4"), platforms=("*",))
    facts = {"max_num_tokens": 128, **changes.get("problem", {})}
    selection = explain_backends(problem_of(**facts), H100, **changes.get("request", {}))
    (sole,) = (decision for decision in selection.decisions if decision.backend == "sole")
    assert [reason.code for reason in sole.reasons] == [code]
    assert sole.reasons[0].text.startswith(text)
    assert not sole.accepted
    # With any fault in one backend, the other serves.
    if code not in ("activation_format", "gradients"):
        assert selection.backend == "other"
    # Without that change nothing is wrong with it.
    add("control", 100, experts_class("Control", facts=EVERYTHING), quant_schemes=("unquantized",))
    assert explain_backends(problem_of(max_num_tokens=128), H100, require="control").backend == "control"


def test_all_reasons_are_given(fakes: BackendRegistry) -> None:
    def two(cls: type, problem: MoEProblem, platform: Platform) -> list[str]:
        return ["requires one thing, got none", "requires another, got none"]

    members = {"facts": NARROW, "unsupported_reasons": classmethod(two)}
    add("sole", 1, experts_class("Sole", **members), platforms=("cpu",), opt_in=True, requires=("absent",))
    problem = problem_of(dtype="float32", has_bias=True, hidden_size=65, intermediate_size=33, quant="nvfp4")
    selection = explain_backends(problem, H100)
    expected = "quant_scheme platform package opt_in bias dtype alignment alignment size backend backend"
    assert codes(selection, "sole") == [expected.split()]
    assert selection.backend is None
    assert selection.source is None
    assert selection.plan == ()


# Order.


def test_priority_then_name_then_class(fakes: BackendRegistry) -> None:
    add("slow", 5)
    add("b_tied", 10)
    add("a_tied", 10, experts_class("Second"))
    add("a_tied", 10, experts_class("First"))
    add("fast", 99, opt_in=True)
    selection = select_backend(problem_of(), H100)
    assert [(decision.backend, decision.experts) for decision in selection.decisions] == [
        ("a_tied", "First"),
        ("a_tied", "Second"),
        ("b_tied", "B_Tied"),
        ("slow", "Slow"),
        ("fast", "Fast"),
    ]
    assert selection.source == "priority"
    assert selection.plan == ((None, selection.decisions[0]),)
    assert selection.winner is selection.decisions[0]


def test_what_would_do_instead_needs_no_request_or_says_it(fakes: BackendRegistry) -> None:
    add("refused", 1, platforms=("rocm:gfx942",))
    add("shy", 99, opt_in=True)
    said = explain_backends(problem_of(), H100, require="refused")
    assert said.alternatives == ()
    assert "; require='shy' would do" in said.refusal
    with pytest.raises(UnsupportedProblemError):
        select_backend(problem_of(), H100)
    add("open", 1)
    said = explain_backends(problem_of(), H100, require="refused")
    assert said.alternatives == ("open",)
    assert "; without the request, open would do" in said.refusal
    assert select_backend(problem_of(), H100, require="shy").instead == "open"
    assert select_backend(problem_of(), H100).instead == "require='shy'"


REQUESTS: list[tuple[dict[str, Any], dict[str, str], str | None, str | None]] = [
    ({}, {}, "fast", "priority"),
    ({"require": "slow"}, {}, "slow", "required"),
    # In this order, whatever their priorities.
    ({"require": ("slow", "middle")}, {}, "slow", "required"),
    ({"require": {"slow": 1, "middle": 2}.keys()}, {}, "middle", "required"),  # A set has no order: by name.
    ({"require": ("elsewhere", "slow", "middle")}, {}, "slow", "required"),
    ({"prefer": ("slow", "middle")}, {}, "slow", "preferred"),
    ({"prefer": "elsewhere"}, {}, "fast", "priority"),
    ({"prefer": ("elsewhere", "middle")}, {}, "middle", "preferred"),
    ({"prefer": "chosen"}, {}, "chosen", "preferred"),
    ({"require": "chosen"}, {}, "chosen", "required"),
    ({"deny": "fast"}, {}, "middle", "priority"),
    ({"require": ("fast", "slow"), "prefer": "slow"}, {}, "slow", "required"),
    # Patterns: those that match stand side by side. They name no opt-in backend.
    ({"require": ("s*", "f*")}, {}, "slow", "required"),
    ({"require": "*"}, {}, "fast", "required"),
    ({"prefer": ("m*", "fast")}, {}, "middle", "preferred"),
    ({"prefer": "c*"}, {}, "fast", "priority"),
    ({"deny": "*a*"}, {}, "middle", "priority"),
    ({"deny": "unquantized=*a*"}, {"DENY": "m*"}, "slow", "priority"),
    ({"require": "*", "deny": "fast"}, {}, "middle", "required"),
    ({"prefer": "nothing_*", "deny": "nothing_*"}, {}, "fast", "priority"),
    # No wish, which still beats a weaker source.
    ({"require": "auto"}, {}, "fast", "priority"),
    ({"require": "auto"}, {"REQUIRE": "slow"}, "fast", "priority"),
    ({"prefer": "auto"}, {"PREFER": "slow"}, "fast", "priority"),
    ({"require": "slow,unquantized=auto"}, {}, "fast", "priority"),
    ({"require": "slow,nvfp4=auto"}, {}, "slow", "required"),
    ({}, {"REQUIRE": "auto", "PREFER": "slow"}, "slow", "preferred"),
    ({"prefer": "fast", "deny": "fast"}, {}, "middle", "priority"),
    ({"require": "elsewhere"}, {}, None, None),
    # Environment, and arguments over it; denials add up.
    ({}, {"REQUIRE": "slow"}, "slow", "required"),
    ({}, {"PREFER": "middle,slow"}, "middle", "preferred"),
    ({"require": "middle"}, {"REQUIRE": "slow"}, "middle", "required"),
    ({"prefer": "middle"}, {"PREFER": "slow"}, "middle", "preferred"),
    ({"prefer": "middle"}, {"REQUIRE": "slow"}, "slow", "required"),
    ({"deny": "fast"}, {"DENY": "middle"}, "slow", "priority"),
    # Per scheme: the problem is unquantized.
    ({"require": "unquantized=slow,nvfp4=fast"}, {}, "slow", "required"),
    ({"require": {"unquantized": "slow", "nvfp4": ("fast",)}}, {}, "slow", "required"),
    ({"require": {"unquantized": "slow,middle"}}, {}, "slow", "required"),
    ({"require": ("nvfp4=fast", "slow")}, {}, "slow", "required"),
    ({"prefer": "nvfp4=slow"}, {}, "fast", "priority"),
    ({"require": "middle, unquantized = slow"}, {}, "slow", "required"),
    ({"require": "nvfp4=fast"}, {"REQUIRE": "slow"}, "slow", "required"),
    ({"require": "nvfp4=fast"}, {"REQUIRE": "nvfp4=slow"}, "fast", "priority"),
    ({"require": "middle"}, {"REQUIRE": "unquantized=slow"}, "middle", "required"),
    ({"deny": "unquantized=fast"}, {"DENY": "nvfp4=middle"}, "middle", "priority"),
    ({"deny": "fast,unquantized=middle"}, {}, "slow", "priority"),
    ({"require": ""}, {"REQUIRE": "  "}, "fast", "priority"),
]


@pytest.mark.parametrize(("arguments", "environment", "winner", "source"), REQUESTS, ids=str)
def test_requests(
    fakes: BackendRegistry,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    environment: dict[str, str],
    winner: str | None,
    source: str | None,
) -> None:
    for priority, name in ((30, "fast"), (20, "middle"), (10, "slow")):
        add(name, priority)
    add("chosen", 40, opt_in=True)
    add("elsewhere", 50, platforms=("rocm:gfx942",))
    for word, names in environment.items():
        monkeypatch.setenv(f"MOEREG_{word}", names)
    selection = explain_backends(problem_of(), H100, **arguments)
    assert (selection.backend, selection.source) == (winner, source)
    if winner is None:
        with pytest.raises(UnsupportedProblemError):
            select_backend(problem_of(), H100, **arguments)


@pytest.mark.parametrize(
    ("arguments", "environment", "sources"),
    [
        ({"require": "one", "deny": "one"}, {}, ("require", "deny")),
        ({"require": ("one", "two"), "deny": {"unquantized": "one"}}, {}, ("require", "deny")),
        ({"require": "one", "deny": "o*"}, {}, ("require", "deny")),
        ({"deny": "one"}, {"REQUIRE": "one"}, ("MOEREG_REQUIRE", "deny")),
        ({"require": "one"}, {"REQUIRE": "two", "DENY": "one"}, ("require", "MOEREG_DENY")),
    ],
    ids=str,
)
def test_required_and_denied(
    fakes: BackendRegistry,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    environment: dict[str, str],
    sources: tuple[str, str],
) -> None:
    add("one")
    add("two")
    for word, names in environment.items():
        monkeypatch.setenv(f"MOEREG_{word}", names)
    text = (
        f"backend 'one' is both required and denied (by {sources[0]} and {sources[1]}); remove it from one of the two"
    )
    with pytest.raises(RequestError, match=f"^{re.escape(text)}$"):
        explain_backends(problem_of(), H100, **arguments)


UNKNOWN = "unknown backend 'tritonlike', did you mean 'triton_like'? (known: torch_like, triton_like)"


@pytest.mark.parametrize("word", ["require", "prefer", "deny", "MOEREG_REQUIRE"])
def test_unknown_names(fakes: BackendRegistry, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    add("triton_like")
    add("torch_like")

    def ask(names: str) -> None:
        if word.isupper():
            monkeypatch.setenv(word, names)
            explain_backends(problem_of(), H100)
        else:
            explain_backends(problem_of(), H100, **{word: names})

    for names in ("tritonlike", "torch_like,tritonlike", "nvfp4=tritonlike", "nvfp4=torch_like,unquantized=tritonlike"):
        with pytest.raises(UnknownBackendError, match=f"^{re.escape(UNKNOWN)}$"):
            ask(names)
    with pytest.raises(UnknownSchemeError, match=r"^unknown quant scheme 'nvfp5', did you mean 'nvfp4'\?"):
        ask("nvfp5=triton_like")
    if "require" in word.lower():
        with pytest.raises(UnknownBackendError, match=r"^unknown backend 'flash\*' \(known: "):
            ask("flash*")


@pytest.mark.parametrize("variable", ["MOEREG_PREFER", "MOEREG_DENY"])
def test_an_environment_may_outlive_wheels(
    fakes: BackendRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, variable: str
) -> None:
    add("triton_like", 2)
    add("torch_like", 1)
    monkeypatch.setenv(variable, "tritonlike,torch_like,flash*,mine=torch_like")
    for _ in range(2):
        selection = select_backend(problem_of(), H100)
    assert selection.backend == ("torch_like" if variable == "MOEREG_PREFER" else "triton_like")
    first, second, third = selection.notices
    assert first.startswith(f"{variable} is ignored where it names unknown things: unknown quant scheme 'mine' (known:")
    assert second == f"{variable} is ignored where it names unknown things: {UNKNOWN}"
    assert third == f"{variable}: no backend matches 'flash*' (known: torch_like, triton_like)"
    assert [record.getMessage() for record in caplog.records] == [first, second, third]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert selection.to_dict()["notices"] == [first, second, third]
    assert Selection.from_json(selection.to_json()).notices == selection.notices
    assert f"note      {third}" in selection.table()


def test_a_backend_above_every_built_in_is_said(fakes: BackendRegistry, caplog: pytest.LogCaptureFixture) -> None:
    add("ours", 150, origin="builtin")
    add("theirs", 10**6)
    add("theirs", 10**5, experts_class("Second"))
    add("modest", 150)
    add("elsewhere", 10**6, platforms=("rocm:gfx942",))
    with caplog.at_level(logging.INFO, logger="moereg"):
        selection = select_backend(problem_of(), H100)
    line = (
        "backend 'theirs' of tests has priority 1000000, above every built-in backend's (at most 150): it goes first "
        "wherever it fits; --deny theirs does without it"
    )
    assert selection.notices == (line,)
    (record,) = caplog.records
    others = "theirs (Second) of tests, modest (Modest) of tests, ours (Ours)"
    assert record.getMessage().endswith(f"by priority; next: {others}; {line}")
    assert explain_backends(problem_of(), H100, deny="theirs").notices == ()


def test_requests_may_name_a_plugins_scheme(fakes: BackendRegistry) -> None:
    scheme = QuantScheme("int4_w4a8_e5m2", QuantFormat("uint4", (1, 128)), QuantFormat("float8_e5m2", (1, -1)))
    add("one", 1, quant_schemes=(scheme,))
    add("two", 2, quant_schemes=(scheme,))
    assert select_backend(problem_of(quant=scheme), H100, require="int4_w4a8_e5m2=one").backend == "one"
    assert select_backend(problem_of(quant=scheme), H100).winner.computes == "int4_w4a8_e5m2"  # type: ignore[union-attr]
    # Of another layer than this one, and not of the first cell, nor the first scheme of its cell.
    for number in range(3):
        other = dataclasses.replace(scheme, name=f"other{number}")
        add(f"three{number}", 3, quant_schemes=("unquantized", other))
    for number in range(3):
        wish = {f"other{number}": "two", "unquantized": "three1"}
        assert select_backend(problem_of(), H100, require=wish).backend == "three1"


# Schemes.


def test_substitutes_and_exact_activations(fakes: BackendRegistry) -> None:
    add("half", 20, quant_schemes=("nvfp4_w4a16",))
    add("exact", 10, quant_schemes=("nvfp4",))
    add("both", 5, quant_schemes=("nvfp4_w4a16", "nvfp4"))
    selection = select_backend(problem_of(quant="nvfp4"), H100)
    assert [(decision.backend, decision.computes) for decision in selection.decisions] == [
        ("half", "nvfp4_w4a16"),
        ("exact", "nvfp4"),
        ("both", "nvfp4"),
    ]
    strict = select_backend(problem_of(quant="nvfp4", exact_activations=True), H100)
    assert strict.backend == "exact"
    assert codes(strict, "half") == [["precision"]]
    # The other way round the activations would be rounded more than the checkpoint says.
    other = explain_backends(problem_of(quant="nvfp4_w4a16"), H100)
    assert [(decision.backend, decision.accepted) for decision in other.decisions] == [
        ("half", True),
        ("both", True),
        ("exact", False),
    ]
    assert codes(other, "exact") == [["quant_scheme"]]


def test_emulation_comes_last_and_warns(fakes: BackendRegistry) -> None:
    add("emulated", 1000, tier="emulation")
    with pytest.warns(
        EmulationWarning, match=r"^only an emulation fits E8 .* on cuda:sm90: emulated; its numbers are right, "
    ) as caught:
        assert select_backend(problem_of(), H100).backend == "emulated"
    assert caught[0].filename == __file__
    add("real", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert select_backend(problem_of(), H100).backend == "real"
        # An emulation never beats a kernel, preferred or not.
        assert select_backend(problem_of(), H100, prefer="emulated").backend == "real"
    with pytest.warns(EmulationWarning):
        assert select_backend(problem_of(), H100, require="emulated").backend == "emulated"


# Platforms.


def test_the_most_specific_rule_of_a_class_stands(fakes: BackendRegistry) -> None:
    layered = experts_class("Layered")
    for priority, rule in ((1, "*"), (2, "cuda"), (3, "cuda:sm80+"), (4, "cuda:sm100f"), (5, "cuda:sm100")):
        # Less specific rules have the higher priority here: it must not matter.
        add("layered", 10 - priority, layered, platforms=(rule,))
    expected = {
        "cpu": ("*", 9),
        "cuda:sm75": ("cuda", 8),
        "cuda:sm90": ("cuda:sm80+", 7),
        "cuda:sm103": ("cuda:sm100f", 6),
        "cuda:sm100": ("cuda:sm100", 5),
    }
    for name, (rule, priority) in expected.items():
        selection = select_backend(problem_of(), name)
        accepted = [decision for decision in selection.decisions if decision.accepted]
        assert [(decision.rule, decision.priority) for decision in accepted] == [(rule, priority)], name


def test_of_equally_specific_cells_the_one_whose_facts_fit_stands(fakes: BackendRegistry) -> None:
    kind = experts_class("Twin")
    add("twin", 30, kind, platforms=("cuda:sm80+",), activations=("silu",), held_experts=("all",))
    add("twin", 10, kind, platforms=("cuda:sm80+",), activations=("silu",), held_experts=("some",))
    add("twin", 5, kind, platforms=("cuda:sm80+",), activations=("swigluoai",))
    add("middle", 20)
    ranks: list[tuple[dict[str, Any], list[tuple[str, int]]]] = [
        ({}, [("twin", 30), ("middle", 20)]),
        ({"num_local_experts": 4}, [("middle", 20), ("twin", 10)]),
        ({"activation": "swigluoai"}, [("middle", 20), ("twin", 5)]),
    ]
    for changes, expected in ranks:
        selection = explain_backends(problem_of(**changes), H100)
        assert [(decision.backend, decision.priority) for decision in selection.decisions] == expected
        again = Selection.from_json(selection.to_json())
        assert [decision.cell for decision in again.decisions] == [decision.cell for decision in selection.decisions]
    # What fits none of them shows them all.
    rejected = explain_backends(problem_of(activation="relu2"), H100, require="twin").decisions
    texts = {"; ".join(reason.text for reason in decision.reasons) for decision in rejected if decision.rule != "*"}
    assert texts >= {
        "requires activation in (silu), got relu2; requires experts held by this rank in (some), got all",
        "requires activation in (swigluoai), got relu2",
    }


def test_specificity_counts_among_cells_that_compute_the_same(fakes: BackendRegistry) -> None:
    both = experts_class("Both")
    add("both", 1, both, quant_schemes=("nvfp4",), platforms=("*",))
    add("both", 2, both, quant_schemes=("nvfp4_w4a16",), platforms=("cuda:sm90",))
    selection = explain_backends(problem_of(quant="nvfp4"), H100)
    assert {decision.computes for decision in selection.decisions if decision.accepted} == {"nvfp4", "nvfp4_w4a16"}


def test_a_named_platform_assumes_and_says_so(fakes: BackendRegistry) -> None:
    calls: list[Platform] = []

    def toolchain(platform: Platform) -> str | None:
        calls.append(platform)
        return "requires nvcc, got none"

    class Callable_:
        def __call__(self, platform: Platform) -> str | None:
            return toolchain(platform)

    add("needy", requires=("absent>=1", "some-library>=9"), probes=(toolchain, Callable_()))
    named = select_backend(problem_of(), "cuda:sm90")
    assert named.winner is not None
    assert named.winner.assumes == ("absent>=1", "some-library>=9", "probe toolchain", "probe Callable_")
    assert named.to_dict()["platform_source"] == "named"
    assert not calls
    probed = explain_backends(problem_of(), H100)
    assert [reason.text for reason in probed.decisions[0].reasons] == [
        "requires absent>=1, which is not installed",
        "requires some-library>=9, got 2.1",
        "requires nvcc, got none",
        "requires nvcc, got none",
    ]
    assert probed.decisions[0].assumes == ()
    assert probed.to_dict()["platform_source"] == "probed"


@pytest.mark.parametrize(
    ("requirement", "version", "met"),
    [
        ("some-library", "2.1", True),
        ("some-library>=2,<3", "2.1", True),
        ("some-library>=2", "3.0.0.dev1+git123", True),
        ("some_library==2.1.*", "2.1.7", True),
        ("some.library>=2.2", "2.1", False),
        ("some-library>=2", "unknown", False),
    ],
)
def test_versions(fakes: BackendRegistry, requirement: str, version: str, met: bool) -> None:
    add("needy", requires=(requirement,))
    platform = dataclasses.replace(H100, versions={"some-library": version})
    assert (explain_backends(problem_of(), platform).backend == "needy") == met


def test_probes_run_only_where_the_platform_fits(fakes: BackendRegistry) -> None:
    calls: list[str] = []
    for name, rule in (("here", "cuda:sm90"), ("elsewhere", "rocm:gfx942")):
        add(name, platforms=(rule,), probes=(lambda platform: calls.append(str(platform)),))
    for platform in (H100, dataclasses.replace(H100, arch="sm100")):
        explain_backends(problem_of(), platform)
    assert calls == ["cuda:sm90"]


def test_what_a_probe_said_is_of_its_platform(fakes: BackendRegistry) -> None:
    def small(platform: Platform) -> str | None:
        return "requires a larger device" if platform.memory_bytes < 2**30 else None

    def large(platform: Platform) -> str | None:
        return "requires a smaller device" if platform.memory_bytes >= 2**30 else None

    add("probed", probes=(small,))
    add("probed_too", probes=(large,))
    for memory_bytes, backend in ((2**33, "probed"), (2**20, "probed_too"), (2**33, "probed")):
        assert explain_backends(problem_of(), dataclasses.replace(H100, memory_bytes=memory_bytes)).backend == backend


def stop(*arguments: object, **keywords: object) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "words",
    [
        {"experts": experts_class(unsupported_reasons=classmethod(lambda cls, problem, platform: stop()))},
        {"probes": (stop,)},
    ],
)
def test_what_stops_the_process_is_no_reason(fakes: BackendRegistry, words: dict[str, Any]) -> None:
    add("sole", 1, **words)
    with pytest.raises(KeyboardInterrupt):
        explain_backends(problem_of(), H100)


# Texts and JSON.


def fill(registry: BackendRegistry) -> None:
    add(
        "aligned",
        50,
        experts_class("AlignedExperts", facts=dataclasses.replace(EVERYTHING, requires_multiple={"hidden_size": 128})),
    )
    add("far", 40, experts_class("FarExperts", facts=NARROW), platforms=("rocm:gfx942",))
    add("shy", 30, experts_class("ShyExperts", facts=NARROW), opt_in=True)
    add("quantized", 20, experts_class("QuantizedExperts"), quant_schemes=("nvfp4", "mxfp8"))
    # A second class of a backend is shown only where it is nearer.
    add("aligned", 1, experts_class("WorseExperts", facts=NARROW))


def test_unsupported_text(fakes: BackendRegistry) -> None:
    fill(fakes)
    problem = problem_of(has_bias=True, activation="gelu")
    with pytest.raises(UnsupportedProblemError) as raised:
        select_backend(problem, "cuda:sm90")
    assert str(raised.value).splitlines() == [
        "no backend fits E8 H64 I96 k2 bfloat16 unquantized gelu, has_bias on cuda:sm90; nearest is aligned: requires "
        "hidden_size % 128 == 0, got 64 (pad the weights to that multiple)",
        "  aligned (AlignedExperts) of tests: requires hidden_size % 128 == 0, got 64",
        "  quantized (QuantizedExperts) of tests: requires weights in (nvfp4, mxfp8), got unquantized",
        "  far (FarExperts) of tests: requires platform in (rocm:gfx942), got cuda:sm90; requires activation in "
        "(silu), got gelu; does not apply biases, got has_bias=True; requires max_num_tokens <= 128, got None",
        "  shy (ShyExperts) of tests: is opt-in: name it in require or prefer; requires activation in (silu), got "
        "gelu; does not apply biases, got has_bias=True; requires max_num_tokens <= 128, got None",
    ]
    selection = raised.value.selection
    assert selection.winner is None
    assert len(selection.decisions) == 5
    assert isinstance(raised.value, NotImplementedError)


def test_no_backend_at_all(fakes: BackendRegistry) -> None:
    with pytest.raises(UnsupportedProblemError, match="no backend is registered"):
        select_backend(problem_of(), H100)


def test_table(fakes: BackendRegistry) -> None:
    fill(fakes)
    lines = select_backend(problem_of(hidden_size=128), "cuda:sm90").table().splitlines()
    assert lines[:3] == [
        "problem   E8 H128 I96 k2 bfloat16 unquantized silu",
        "platform  cuda:sm90",
        "chosen    aligned (AlignedExperts of tests, cuda:sm80+, computes unquantized, priority 50)",
    ]
    assert "          - is opt-in: name it in require or prefer [opt_in]" in lines


def test_json_shape(fakes: BackendRegistry) -> None:
    fill(fakes)
    values = explain_backends(problem_of(), H100, deny="far").to_dict()
    assert values["notices"] == []
    assert values["schema"] == 1
    assert values["selected"] is None
    assert values["request"] == {"require": [], "prefer": [], "deny": ["far"]}
    assert values["decisions"][0] == {
        "backend": "aligned",
        "experts": "AlignedExperts",
        "rule": "cuda:sm80+",
        "computes": "unquantized",
        "accepted": False,
        "priority": 50,
        "tier": "kernel",
        "evidence": "",
        "origin": "tests",
        "origin_version": "",
        "assumes": [],
        "reasons": [{"code": "alignment", "text": "requires hidden_size % 128 == 0, got 64"}],
    }


def test_json_of_a_backend_that_is_not_here(fakes: BackendRegistry) -> None:
    add("one")
    values = select_backend(problem_of(), "cuda:sm90").to_dict()
    values["decisions"][0]["backend"] = values["selected"] = "gone"
    for key in ("notices", "origin_version"):  # Earlier versions did not write them.
        values.pop(key, None)
        values["decisions"][0].pop(key, None)
    again = Selection.from_dict(values)
    assert again.backend == "gone"
    assert again.winner is not None
    assert again.winner.cell is None


def test_json_finds_the_cell_of_the_scheme_and_rule(fakes: BackendRegistry) -> None:
    experts = experts_class("One")
    add("one", 20, experts, quant_schemes=("nvfp4",))
    add("one", 20, experts, quant_schemes=("mxfp8",))
    add("one", 10, experts, quant_schemes=("mxfp8",), platforms=("rocm:gfx942",))
    add("one", 5, experts_class("Other"), quant_schemes=("mxfp8",))
    for platform, priority in (("cuda:sm90", 20), ("rocm:gfx942", 10)):
        selection = explain_backends(problem_of(quant="mxfp8"), platform)
        again = Selection.from_dict(selection.to_dict())
        cells = [decision.cell for decision in again.decisions]
        assert cells == [decision.cell for decision in selection.decisions]
        assert cells[0] is not None
        assert cells[0].priority == priority


@pytest.mark.parametrize("change", ["backend", "experts", "computes", "origin", "origin_version"])
def test_a_fingerprint_is_of_everything_that_runs(fakes: BackendRegistry, change: str) -> None:
    add("one")
    selection = select_backend(problem_of(), H100)
    assert selection.winner is not None
    winner = dataclasses.replace(selection.winner, **{change: "another"})
    assert dataclasses.replace(selection, decisions=(winner,)).fingerprint != selection.fingerprint
    same = dataclasses.replace(selection.winner, priority=1, rule="*")
    assert dataclasses.replace(selection, decisions=(same,)).fingerprint == selection.fingerprint


def test_the_nearest_of_as_many_reasons_is_the_first(fakes: BackendRegistry) -> None:
    # The higher priority first; a reason that another request cures comes before one that another machine cures.
    facts = dataclasses.replace(EVERYTHING, bias=False)
    for name, priority in (("Second", 20), ("First", 30), ("Third", 10)):
        add("one", priority, experts_class(name, facts=facts))
    selection = explain_backends(problem_of(has_bias=True), H100)
    assert [decision.experts for decision in selection.decisions] == ["First", "Second", "Third"]
    assert [decision.experts for decision in nearest_by_backend(selection.decisions)] == ["First"]
    selection = explain_backends(problem_of(), "rocm:gfx942")
    assert [decision.experts for decision in nearest_by_backend(selection.decisions)] == ["First"]
    add("one", 1, experts_class("Shy"), platforms=("rocm:gfx942",), opt_in=True)
    selection = explain_backends(problem_of(), "rocm:gfx942")
    assert [decision.experts for decision in nearest_by_backend(selection.decisions)] == ["Shy"]


def test_fingerprint(fakes: BackendRegistry) -> None:
    add("one", 2, quant_schemes=("unquantized", "nvfp4"))
    add("two", 1)

    def fingerprint(platform: Any = H100, require: Any = None, **changes: Any) -> str:
        return select_backend(problem_of(**changes), platform, require=require).fingerprint

    base = fingerprint()
    assert re.fullmatch(r"[0-9a-f]{16}", base)
    for same in ({"num_local_experts": 4}, {"max_num_tokens": 9}, {"require": "one"}, {"platform": "cuda:sm90"}):
        assert fingerprint(**same) == base
    different = [{"require": "two"}, {"platform": "cuda:sm100"}, {"hidden_size": 128}, {"quant": "nvfp4"}]
    assert len({base, *(fingerprint(**changes) for changes in (*different, {"placement": "map"}))}) == 6


def test_one_log_line_a_layer_shape(fakes: BackendRegistry, caplog: pytest.LogCaptureFixture) -> None:
    add("fast", 2, origin="builtin")
    add("slow", 1)
    with caplog.at_level(logging.INFO, logger="moereg"):
        for _ in range(3):
            select_backend(problem_of(), H100)
        select_backend(problem_of(top_k=3), H100)
        explain_backends(problem_of(top_k=4), H100)
    chosen = (
        "bfloat16 unquantized silu on cuda:sm90: fast (Fast), computes unquantized, by priority; next: "
        "slow (Slow) of tests"
    )
    assert [record.getMessage() for record in caplog.records] == [
        f"MoE E8 H64 I96 k2 {chosen}",
        f"MoE E8 H64 I96 k3 {chosen}",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_a_selection_is_a_line_in_a_shell_and_a_table_in_a_notebook(fakes: BackendRegistry) -> None:
    add("fast", 2, platforms=("cuda:sm80+",))
    add("far", 3, platforms=("rocm:gfx942",))
    selection = explain_backends(problem_of(), H100)
    line = (
        "Selection(E8 H64 I96 k2 bfloat16 unquantized silu on cuda:sm90: fast (Fast) of tests by priority, "
        "1 of 2 candidates fit)"
    )
    assert repr(selection) == str(selection) == line
    page = selection._repr_html_()
    assert page.count("<tr>") == 3
    assert f"<caption>{line}</caption>" in page
    assert "<td>fast (Fast) of tests</td><td>cuda:sm80+</td><td>unquantized</td><td>2</td><td>chosen</td>" in page
    assert "<td>3</td><td>requires platform in (rocm:gfx942), got cuda:sm90</td>" in page
    refused = explain_backends(problem_of(), H100, deny="fast")
    assert repr(refused).endswith("on cuda:sm90: nothing fits, 0 of 2 candidates fit)")
    strange = [dataclasses.replace(each, origin="<b>") for each in refused.decisions]
    assert "of &lt;b&gt;</td>" in dataclasses.replace(refused, decisions=tuple(strange))._repr_html_()


def test_who_requires_a_backend_hears_of_it_alone(fakes: BackendRegistry) -> None:
    add("fast", 2)
    add("far", 3, platforms=("rocm:gfx942",))
    with pytest.raises(UnsupportedProblemError) as raised:
        select_backend(problem_of(), H100, require="far")
    first, *lines = str(raised.value).splitlines()
    assert "without the request, fast would do" in first
    assert lines == ["  far (Far) of tests: requires platform in (rocm:gfx942), got cuda:sm90"]


@pytest.mark.parametrize("cells", [40, 80])
def test_selecting_is_little_work(fakes: BackendRegistry, cells: int) -> None:
    for number in range(cells):
        add(f"backend_{number}", number, requires=("some-library>=2",), platforms=("cuda:sm80+", "rocm:gfx942"))
    problem = problem_of()
    select_backend(problem, H100)
    # 80 calls a cell, which are 0.8 ms beside 40 cells. Calls, since seconds tell how busy the machine is.
    assert calls_of(lambda: select_backend(problem, H100)) < 100 * cells

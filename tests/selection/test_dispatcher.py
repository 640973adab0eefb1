"""Token dispatchers: registered, judged with every reason, ranked and asked for by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moereg.errors import (
    ArgumentError,
    PluginWarning,
    RegistrationError,
    RequestError,
    UnknownNameError,
    UnsupportedProblemError,
)
from moereg.platforms import Platform
from moereg.prepare_finalize import (
    DispatcherFacts,
    DispatcherRegistry,
    GroupFacts,
    GroupPrepareFinalize,
    Moved,
    Prepared,
    register_prepare_finalize,
)
from moereg.selection.dispatcher import DispatcherSelection, decide_dispatcher, explain_dispatchers, select_dispatcher
from moereg.selection.request import Request
from moereg.spec.problem import MoEProblem
from tests.support.wheels import Wheels

H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"deep-ep": "1.1.0"}, probed=True)
BOTH = ("standard", "batched")
FACTS = DispatcherFacts(
    transports=frozenset({"cuda:nccl", "cpu:gloo"}),
    dtypes=frozenset({"bfloat16"}),
    graph_capture=True,
    deterministic=True,
    batch_invariant=True,
    router_weight_on_input=True,
)


class Moving(GroupPrepareFinalize):
    """Moves nothing."""

    facts = FACTS

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Moved:
        raise AssertionError

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        raise AssertionError


def problem_of(**changes: Any) -> MoEProblem:
    return MoEProblem(**{"num_experts": 16, "hidden_size": 256, "intermediate_size": 64, "top_k": 2, **changes})


def register(registry: DispatcherRegistry, dispatcher: Any = Moving, **changes: Any) -> None:
    keywords = {"name": "moving", "priority": 1, "formats": ("standard",), "platforms": ("cuda:sm90+",), **changes}
    register_prepare_finalize(registry=registry, **keywords)(dispatcher)


def judged(
    registry: DispatcherRegistry,
    problem: MoEProblem | None = None,
    group: GroupFacts | None = None,
    **words: tuple[str, ...],
) -> DispatcherSelection:
    group = group or GroupFacts(4)
    return decide_dispatcher(problem or problem_of(), group, H200, Request(**words), registry.cells)


@pytest.mark.parametrize(
    ("narrowed", "expected", "problem"),
    [
        ({"platforms": ("cpu",)}, "platform: requires platform in (cpu), got cuda:sm90", {}),
        ({"requires": ("deep_ep>=1.2",)}, "package: requires deep_ep>=1.2, got 1.1.0", {}),
        ({"probes": (lambda platform: "requires a fabric",)}, "probe: requires a fabric", {}),
        ({"transports": ("cpu:gloo",)}, "group: requires a group over (cpu:gloo), got cuda:nccl", {}),
        ({"max_group_size": 2}, "group: requires at most 2 ranks, got 4", {}),
        ({}, "dtype: requires dtype in (bfloat16), got float32", {"dtype": "float32"}),
        ({"graph_capture": False}, "graph_capture: waits for counts on the host, got gr", {"graph_capture": True}),
        ({"deterministic": False}, "deterministic: does not give the same bits each ti", {"deterministic": True}),
        ({"batch_invariant": False}, "batch_invariant: a token's bits depend on the ot", {"batch_invariant": True}),
        (
            {"router_weight_on_input": False},
            "router_weight_on_input: does not send routing weights, got apply_router_weight_on_input=True",
            {"top_k": 1, "apply_router_weight_on_input": True},
        ),
        ({"max_num_tokens": True}, "size: requires max_num_tokens in the problem, for which it makes room", {}),
        ({"max_top_k": 1}, "size: requires top_k <= 1, got 2", {}),
        ({"hidden_sizes": (2048, 7168)}, "alignment: requires hidden_size in (2048, 7168), got 256", {}),
        ({"opt_in": True}, "opt_in: is opt-in: name it in require or prefer", {}),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_each_reason_stands_alone(narrowed: dict[str, Any], expected: str, problem: dict[str, Any]) -> None:
    registry = DispatcherRegistry()
    register(registry, **narrowed)
    (decision,) = judged(registry, problem_of(**problem), GroupFacts(4)).decisions
    (reason,) = decision.reasons
    assert f"{reason.code}: {reason.text}".startswith(expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("most", [None, 5])
def test_experts_make_room_for_the_tokens_of_all_ranks(size: int, most: int | None) -> None:
    seen = Moving.experts_problem_of(problem_of(max_num_tokens=most), GroupFacts(size), "batched")
    assert seen == problem_of(max_num_tokens=most and size * most, activation_format="batched")


def test_limits_are_served_themselves() -> None:
    registry = DispatcherRegistry()
    register(registry, max_top_k=2, max_group_size=4)
    assert judged(registry, problem_of(top_k=2), GroupFacts(4)).winner is not None


def test_priority_ranks_and_words_beat_it() -> None:
    registry = DispatcherRegistry()
    for name, priority in (("slow", 1), ("fast", 2)):
        register(registry, type(name, (Moving,), {}), name=name, priority=priority, formats=BOTH)
    assert [decision.name for decision in judged(registry).accepted] == ["fast", "fast", "slow", "slow"]
    batched = judged(registry, problem_of(activation_format="batched")).winner
    assert batched is not None
    assert (batched.name, batched.activation_format) == ("fast", "batched")
    assert judged(registry, prefer=("slow",)).decisions[0].name == "slow"
    assert judged(registry, require=("slow", "fast")).decisions[0].name == "slow"
    denied = judged(registry, deny=("f*",))
    assert denied.decisions[0].name == "slow"
    assert denied.decisions[-1].reasons[0].text == "denied by the request (f*)"
    assert judged(registry, require=("slow",)).decisions[-1].reasons[0].code == "not_required"


def test_a_way_has_a_line_and_says_if_its_priority_is_a_guess() -> None:
    registry = DispatcherRegistry()
    register(registry, priority=3, formats=BOTH, platforms=("cuda",), predicted=True, max_group_size=4)
    register(registry, formats=BOTH, platforms=("cuda",))
    assert judged(registry).table().splitlines()[1:] == [
        f"chosen    moving (standard or batched of {__name__}, cuda, predicted priority 3)"
    ]
    many = judged(registry, group=GroupFacts(8))
    assert many.table().splitlines()[1:] == [f"chosen    moving (standard or batched of {__name__}, cuda, priority 1)"]
    assert [decision["predicted"] for decision in many.to_dict()["decisions"]] == [False, False, True, True]
    refused = judged(registry, problem_of(dtype="float32"))
    assert refused.refusal.splitlines()[1:] == [
        "  moving (standard or batched): requires dtype in (bfloat16), got float32"
    ]


def test_the_environment_asks_too_and_unknown_names_are_errors() -> None:
    named = {"MOEREG_EP_REQUIRE": "all_to_all", "MOEREG_EP_PREFER": "all_to_all", "MOEREG_EP_DENY": "all_t*"}
    known = ("all_gather", "all_to_all")
    resolved = Request.resolve_dispatchers("all_gather", "all_gather", environ=named, known=known)
    assert resolved == Request(require=("all_gather",), prefer=("all_gather",), deny=("all_t*",))
    for text, names in (
        (" all_gather", known[:1]),
        ("all_gather , all_to_all\n", known),
        (("all_to_all ", "", " all_gather"), known[::-1]),
        (" , ", ()),
    ):
        assert Request.resolve_dispatchers(prefer=text, environ={}, known=known) == Request(prefer=names)
        if isinstance(text, str):
            assert Request.resolve_dispatchers(environ={"MOEREG_EP_PREFER": text}, known=known) == Request(prefer=names)
    with pytest.raises(
        UnknownNameError, match="unknown dispatcher in MOEREG_EP_REQUIRE 'al_gather', did you mean 'all_g"
    ):
        Request.resolve_dispatchers(environ={"MOEREG_EP_REQUIRE": "al_gather"}, known=("all_gather",))
    with pytest.raises(RequestError, match="'all_gather' is both required and denied"):
        Request.resolve_dispatchers("all_gather", deny="all_*", environ={}, known=("all_gather",))


def test_a_predicate_adds_reasons_and_one_that_raises_is_a_reason() -> None:
    registry = DispatcherRegistry()

    class Picky(Moving):
        @classmethod
        def unsupported_reasons(cls, problem: MoEProblem, group: GroupFacts, platform: Platform) -> list[str]:
            if group.size == 3:
                raise KeyError("three")
            return ["requires an even number of experts a rank"]

    register(registry, Picky)
    (decision,) = judged(registry).decisions
    assert [(reason.code, reason.text) for reason in decision.reasons] == [
        ("backend", "requires an even number of experts a rank")
    ]
    (decision,) = judged(registry, group=GroupFacts(3)).decisions
    assert decision.reasons[0].text == "its unsupported_reasons raised KeyError: 'three'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": "standard"}, "formats must be a tuple of activation formats, got 'standard'"),
        ({"formats": ("padded",)}, "formats must be among standard, batched, got 'padded'"),
        ({"platforms": ("cuda:sm",)}, "sm"),
        ({"name": "Mine"}, "a name is lower-case letters"),
        ({"priority": "high"}, "priority must be an integer, got 'high'"),
        ({"predicted": "yes"}, "predicted must be True or False, got 'yes'"),
        ({"transports": ("cuda:nccl", "cpu:mpi")}, "never widen them; transports="),
        ({"max_group_size": 0}, "max_group_size must be None or an integer of at least 1, got 0"),
        (
            {"graph_captures": True},
            "unknown keyword of register_prepare_finalize 'graph_captures', did you mean 'graph_capture'?",
        ),
    ],
)
def test_a_decorator_that_is_wrong_stores_nothing(arguments: dict[str, Any], message: str) -> None:
    registry = DispatcherRegistry()
    with pytest.raises(RegistrationError, match=message):
        register(registry, **arguments)
    assert not registry.cells


def test_classes_are_checked_and_names_belong_to_one_distribution() -> None:
    registry = DispatcherRegistry()
    for dispatcher, message in (
        (dict, r"must subclass moereg\.author\.GroupPrepareFinalize"),
        (type("Half", (GroupPrepareFinalize,), {"facts": FACTS}), "abstract methods are missing: finalize, prepare"),
        *(
            (type("Other", (Moving,), {name: lambda self, tokens: None}), f"{name} must take")
            for name in ("__init__", "prepare", "finalize", "experts_problem_of", "unsupported_reasons")
        ),
    ):
        with pytest.raises(RegistrationError, match=message):
            register(registry, dispatcher)
    register(registry)
    with pytest.raises(RegistrationError, match="registers 'moving' twice"):
        register(registry, priority=2)
    registry.owner_of = lambda name, module: ("moereg-other", "1.0")
    with pytest.raises(RegistrationError, match=r"belongs to tests\.selection\.test_dispatcher"):
        register(registry, formats=("batched",))


def test_what_moereg_brings() -> None:
    problem = problem_of(max_num_tokens=64, num_experts=32)
    found = {size: explain_dispatchers(problem, GroupFacts(size), "cuda:sm90").winner for size in (16, 32)}
    assert {size: winner and winner.name for size, winner in found.items()} == {16: "all_gather", 32: "all_to_all"}
    captured = select_dispatcher(problem_of(max_num_tokens=64, graph_capture=True), GroupFacts(8), "cuda:sm90")
    assert captured.winner is not None
    assert captured.winner.cell.facts.graph_capture
    assert captured.to_dict()["selected"] == captured.winner.name
    assert captured.table().startswith("group     8 ranks over nccl on cuda\nchosen    ")


def test_a_cpu_group_cannot_move_tensors_of_a_gpu() -> None:
    with pytest.raises(UnsupportedProblemError, match=r"requires a group over \(cpu:gloo, cuda:nccl\), got cuda:gloo"):
        select_dispatcher(problem_of(), GroupFacts(2, "gloo", "cuda"), "cuda:sm90")


def test_experts_that_do_not_divide_need_a_map() -> None:
    with pytest.raises(ArgumentError, match="got 16 experts on 3 ranks; pass expert_placement"):
        explain_dispatchers(problem_of(), GroupFacts(3), "cuda:sm90")
    with pytest.raises(ArgumentError, match="num_local_experts must be 8, an equal share of 16 experts on 2 ranks"):
        explain_dispatchers(problem_of(num_local_experts=4), GroupFacts(2), "cuda:sm90")
    with pytest.raises(ArgumentError, match=r"group must be GroupFacts, such as GroupFacts\(8\), got 8"):
        explain_dispatchers(problem_of(), 8, "cuda:sm90")  # type: ignore[arg-type]


WHEEL = """
from moereg.author import register_prepare_finalize
from tests.selection.test_dispatcher import Moving
moereg_api = "1"

@register_prepare_finalize({name!r}, priority=1000, formats=("standard",), platforms=("cuda",))
class Theirs(Moving):
    pass

{rest}
"""


def test_a_wheel_brings_a_way(wheels: Wheels) -> None:
    files = {"theirs.py": WHEEL.format(name="theirs", rest="")}
    wheels.install("moereg-theirs", {"theirs": "theirs"}, files, group="prepare_finalize")
    assert wheels.load()["theirs"] == "loaded"
    winner = explain_dispatchers(problem_of(), GroupFacts(8), "cuda:sm90").winner
    assert winner is not None
    assert (winner.name, winner.origin, winner.origin_version) == ("theirs", "moereg-theirs", "1.2")


@pytest.mark.parametrize(
    ("name", "rest", "error"),
    [
        ("theirs", "1 / 0", "ZeroDivisionError: division by zero"),
        ("others", "", "must register a prepare/finalize of that name and no other, got others"),
        ("all_gather", "", "must register a prepare/finalize of that name and no other, got all_gather"),
    ],
)
def test_a_wheel_that_fails_leaves_nothing(wheels: Wheels, name: str, rest: str, error: str) -> None:
    before = explain_dispatchers(problem_of(), GroupFacts(8), "cuda:sm90").winner
    files = {"theirs.py": WHEEL.format(name=name, rest=rest)}
    wheels.install("moereg-theirs", {"theirs": "theirs"}, files, group="prepare_finalize")
    with pytest.warns(PluginWarning, match="prepare_finalize 'theirs' of moereg-theirs 1.2 did not load"):
        statuses = wheels.load()
    assert error in statuses["theirs"]
    assert explain_dispatchers(problem_of(), GroupFacts(8), "cuda:sm90").winner == before

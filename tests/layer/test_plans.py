"""Plans of several ranges: a call's number of tokens says whose experts run, on one copy of the weights."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moereg.bench.timing import can_be_captured
from moereg.errors import ArgumentError, BackendError, LayoutMismatchError, RegistrationError
from moereg.experts import Experts
from moereg.layer import backend_calls
from moereg.layer import plan as group_plan
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.ranges import counts_by_range
from moereg.layer.warm_up import CompiledVariant, ahead, compile_ahead
from moereg.platforms import Platform
from moereg.prepare_finalize.wire import CodedWire, PlainWire
from moereg.registry import register_moe_backend
from moereg.runtime.workspace import WORKSPACES
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.groups.ranks import results_of, value_of
from tests.layer.small_layers import CPU, FORMS, call, expected, problem_for, problem_of, replaced
from tests.layer.small_plans import Ranges, experts_of, plan_of, turning
from tests.support.fakes import FakeExperts, PerRouteExperts


def planned(ranges: Ranges, problem: MoEProblem | None = None, **keywords: Any) -> MoEKernel:
    problem = problem_of() if problem is None else problem
    weights = keywords.pop("weights", None) or make_weights(problem, CPU)
    return make_kernel(problem, weights, plan_of(problem, ranges), **keywords)


def factor_of(run: Callable[..., torch.Tensor], kernel: MoEKernel, weights: ExpertWeights, num_tokens: int) -> float:
    """By which factor a call's result differs from the reference's."""
    inputs = make_inputs(kernel.problem, num_tokens, "uniform", CPU)
    found = run(*inputs.call).double()
    truth = expected(dataclasses.replace(kernel.problem, activation_format="standard"), weights, inputs)
    factor = float((found * truth).sum() / (truth * truth).sum())
    torch.testing.assert_close(found, truth * factor, rtol=1e-4, atol=1e-5)
    return round(factor, 3)


BOUNDARIES = {1: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 15: 2.0, 16: 2.0, 17: 4.0, 40: 4.0}


def three_ranges(base: type[FakeExperts] = FakeExperts) -> list[tuple[int | None, Any]]:
    """1, 2 and 4 times the right result, for calls as in `BOUNDARIES`."""
    return [(4, experts_of(1.0, base)), (16, experts_of(2.0, base)), (None, experts_of(4.0, base))]


@pytest.mark.parametrize("form", FORMS)
def test_a_call_runs_the_experts_of_its_range(form: str) -> None:
    problem = problem_for(form)
    weights, ranges = make_weights(problem, CPU), three_ranges(FORMS[form])
    kernel = planned(ranges, problem, weights=weights)
    assert {count: factor_of(kernel, kernel, weights, count) for count in BOUNDARIES} == BOUNDARIES
    # Nothing is left over from a range that another one would read.
    assert {count: factor_of(kernel, kernel, weights, count) for count in reversed(BOUNDARIES)} == BOUNDARIES
    assert kernel(torch.empty(0, 16), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)).shape == (0, 16)
    assert [sum(count in kind.calls for count in BOUNDARIES) for _, kind in ranges] == [3, 3, 2]
    assert repr(kernel).startswith("MoEKernel(a to 4, b to 16, c, ")
    assert kernel.experts is kernel.ranged.ranges[-1].experts


def test_forms_of_output_differ_between_ranges() -> None:
    """Finalize takes fp32 rows of routes from one, and the other writes the result itself, in a float16 layer."""
    problem = problem_of(dtype="float16")
    weights = make_weights(problem, CPU)
    for ranges in (
        [(8, experts_of(1.0)), (None, experts_of(2.0, PerRouteExperts, wide_output=True))],
        [(8, experts_of(1.0, PerRouteExperts, wide_output=True)), (None, experts_of(2.0))],
    ):
        kernel = planned(ranges, problem, weights=weights)
        for count, factor in ((8, 1.0), (9, 2.0), (1, 1.0)):
            inputs = make_inputs(problem, count, "uniform", CPU)
            truth = factor * expected(problem, weights, inputs)
            torch.testing.assert_close(call(kernel, inputs).double(), truth, rtol=4e-3, atol=4e-3)


BOUNDS = st.sets(st.integers(1, 300), max_size=5).map(sorted)


@settings(max_examples=60, deadline=None)
@given(bounds=BOUNDS, counts=st.lists(st.integers(1, 400), min_size=1))
def test_the_first_range_that_reaches_a_number_of_tokens_serves_it(bounds: list[int], counts: list[int]) -> None:
    kinds = [experts_of() for _ in range(len(bounds) + 1)]
    kernel = planned(zip([*bounds, None], kinds, strict=True))
    for count in counts:
        place = next((place for place, most in enumerate(bounds) if most >= count), len(bounds))
        assert type(kernel.ranged.range_of(count).experts) is kinds[place]
    split = dict(counts_by_range([*bounds, None], sorted(set(counts))))
    assert sorted(sum(split.values(), ())) == sorted(set(counts))
    assert all(type(kernel.ranged.range_of(count).experts) is kinds[place] for place in split for count in split[place])


def test_experts_with_two_ranges_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = backend_calls.make_experts

    def make(selection: Selection, decision: Decision) -> Experts:
        made.append(decision.backend)
        return real(selection, decision)

    monkeypatch.setattr(backend_calls, "make_experts", make)
    first, second = experts_of(1.0), experts_of(2.0)
    kernel = planned([(4, first), (16, second), (None, first)])
    assert made == ["a", "b"]
    assert kernel.ranged.ranges[0].experts is kernel.ranged.ranges[2].experts
    assert [type(each.experts) for each in kernel.ranged.ranges] == [first, second, first]
    assert [each.selection.backend for each in kernel.ranged.ranges] == ["a", "b", "a"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_code_picks_the_range_when_it_runs(dynamic: bool) -> None:
    torch._dynamo.reset()
    problem = problem_of()
    weights = make_weights(problem, CPU)
    kernel = planned(three_ranges(), weights=weights)
    compiled = torch.compile(lambda *call: kernel(*call), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    counts = [3, 20, 4, 5, 16, 17] if dynamic else [3, 20]
    assert [factor_of(compiled, kernel, weights, count) for count in counts] == [BOUNDARIES.get(n, 4.0) for n in counts]
    assert sum(kernel.token_histogram().values()) == len(counts)


def test_weights_are_permuted_once_and_all_ranges_see_writes() -> None:
    problem = problem_of()
    weights, others = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    ranges = three_ranges()
    kernel = planned(ranges, weights=weights, own_weights=True)
    assert [kind.permuted for _, kind in ranges] == [[], [], [8]]
    assert kernel.weights.num_bytes == sum(tensor.nbytes for tensor in weights.tensors().values())
    twin = copy.deepcopy(kernel)
    kernel.update_expert(3, others.expert(3))
    changed = replaced(weights, 3, others)
    assert {count: factor_of(kernel, kernel, changed, count) for count in BOUNDARIES} == BOUNDARIES
    kernel.reload(others)
    assert {count: factor_of(kernel, kernel, others, count) for count in BOUNDARIES} == BOUNDARIES
    # The copy has plans and weights of its own.
    assert {count: factor_of(twin, twin, weights, count) for count in BOUNDARIES} == BOUNDARIES
    # The first two classes never permuted anything.
    assert [bool(kind.permuted) for _, kind in ranges] == [False, False, True]


def failing(self: Any, out: Any, inputs: Any, weights: Any) -> None:
    raise RuntimeError("a bug")


def sizeless(self: Any, problem: MoEProblem, num_tokens: int) -> Any:
    raise RuntimeError("a bug")


def unmade(self: Any, problem: MoEProblem, platform: Platform) -> None:
    raise RuntimeError("a bug")


def test_errors_name_the_backend_that_ran() -> None:
    for step, members in (("apply", {"compute": failing}), ("workspace_shapes", {"workspace_shapes": sizeless})):
        ranges = [(4, experts_of()), (16, experts_of(1.0, FakeExperts, **members)), (None, experts_of())]
        kernel = planned(ranges)
        assert call(kernel, make_inputs(kernel.problem, 3, "uniform", CPU)).shape == (3, 16)
        text = f"backend 'b' of {experts_of.__module__} raised in Shared.{step}: RuntimeError: a bug (test_plans.py:"
        with pytest.raises(BackendError, match=re.escape(text)) as found:
            call(kernel, make_inputs(kernel.problem, 5, "uniform", CPU))
        assert found.value.backend == "b"
        assert "c or a would do instead" in str(found.value)
    with pytest.raises(BackendError, match=r"^backend 'a' of [\w.]+ raised in Shared\.__init__"):
        planned([(4, experts_of(__init__=unmade)), (None, experts_of())])


def test_one_call_with_the_most_tokens_makes_room_for_all_ranges() -> None:
    """Engines measure memory with such a call; scratch that grew later would not be there."""

    def greedy(self: Any, problem: MoEProblem, num_tokens: int) -> Any:
        return (num_tokens, 10**5), (0,)

    kernel = planned([(4, experts_of(1.0, PerRouteExperts, workspace_shapes=greedy)), (None, experts_of())])
    WORKSPACES.release()
    call(kernel, make_inputs(kernel.problem, 40, "uniform", CPU))
    room = WORKSPACES.num_bytes
    assert room >= 4 * 4 * 10**5
    for count in (1, 4, 5):
        call(kernel, make_inputs(kernel.problem, count, "uniform", CPU))
    assert WORKSPACES.num_bytes == room
    WORKSPACES.release()


def test_no_room_for_other_ranges_is_taken_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    real = WORKSPACES.take

    def take(*request: Any) -> tuple[torch.Tensor, ...]:
        taken.append(request)
        return real(*request)

    monkeypatch.setattr(WORKSPACES, "take", take)
    monkeypatch.setattr("moereg.layer.ranges._may_be_captured", lambda device: True)
    kernel = planned(three_ranges())
    call(kernel, make_inputs(kernel.problem, 40, "uniform", CPU))
    assert len(taken) == 1


REFUSED: dict[str, tuple[Callable[[Selection], dict[str, Any]], str]] = {
    "two equal bounds": (lambda found: {"ranges": (found.ranges[0], *found.ranges)}, "got a to 4, a to 4, b to 16, c"),
    "descending": (lambda found: {"ranges": found.ranges[1::-1] + found.ranges[2:]}, "got b to 16, a to 4, c to None"),
    "no tokens": (lambda found: {"ranges": ((0, found.ranges[0][1]), *found.ranges[1:])}, "got a to 0, b to 16, c"),
    "two open": (lambda found: {"ranges": ((None, found.ranges[0][1]), *found.ranges[1:])}, "got a to None, b to 16"),
    "none open": (lambda found: {"ranges": found.ranges[:2]}, "got a to 4, b to 16; select again"),
    "another winner": (lambda found: {"decisions": found.decisions[::-1]}, "end with the winner's, which is open"),
    "a stranger": (
        lambda found: {"ranges": ((4, dataclasses.replace(found.ranges[0][1], cell=None)), found.ranges[2])},
        "each range of a selection must be of a backend that fits and is registered here, got 'a'; select again",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ranges_that_are_none(name: str) -> None:
    change, text = REFUSED[name]
    selection = plan_of(problem_of(), three_ranges())
    with pytest.raises(ArgumentError, match=re.escape(text)):
        make_kernel(problem_of(), make_weights(problem_of(), CPU), dataclasses.replace(selection, **change(selection)))


def test_a_plan_reads_one_layout() -> None:
    silent = type("Silent", (FakeExperts,), {})
    mine: dict[str, Any] = {"shared_layouts": ("turned",)}
    for first, last, is_shared in (
        (experts_of(), experts_of(), True),
        (silent, silent, True),
        (silent, experts_of(), False),
        (experts_of(), silent, False),
        (turning(1.0), experts_of(), False),
        (turning(1.0, **mine), turning(2.0, **mine), True),
    ):
        if is_shared:
            assert planned([(4, first), (None, last)]).weights.layout in last.layouts
        else:
            with pytest.raises(LayoutMismatchError, match=r"^\w+ reads layouts \w+, got '\w+' of \w+; permute the"):
                planned([(4, first), (None, last)])


def test_every_range_has_to_run_where_the_weights_are() -> None:
    elsewhere = experts_of(device_types=classmethod(lambda cls, platform: ("cuda",)))
    with pytest.raises(ValueError, match=r"^Shared for cpu.* needs weights on a cuda device, got cpu"):
        planned([(4, elsewhere), (None, experts_of())])


def test_a_kernel_can_be_captured_if_all_its_ranges_can() -> None:
    eager: dict[str, Any] = {"facts": dataclasses.replace(FakeExperts.facts, graph_capture=False)}
    for first, second, is_captured in (({}, {}, True), (eager, {}, False), ({}, eager, False)):
        assert can_be_captured(planned([(4, experts_of(**first)), (None, experts_of(**second))])) is is_captured


def test_warm_up_serves_each_range_with_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = planned(three_ranges())
    for counts, names in (([2, 9, 20, 30], "abc"), (range(1, 5), "a"), ([17], "c")):
        done = kernel.warm_up(counts)
        assert done.notes == tuple(f"backend {name!r} compiles nothing on cpu" for name in names)
        assert done.token_counts == tuple(counts)
    asked: list[tuple[str | None, list[int]]] = []

    def ask(selection: Selection, counts: Any, jobs: int, **others: Any) -> ahead.Ahead:
        assert not selection.ranges
        asked.append((selection.backend, list(counts)))
        fault = "it has none" if selection.backend == "b" else None
        kernels = () if fault else (CompiledVariant(f"of_{selection.backend}", 1.0, was_there=False),)
        return ahead.Ahead(kernels, tuple(counts), fault)

    monkeypatch.setattr(ahead, "ask", ask)
    pytest.importorskip("triton")
    selection = plan_of(problem_of(), three_ranges(), Platform.from_name("cuda:sm90"))
    done = compile_ahead(selection, [1, 2, 9, 20])
    assert asked == [("a", [1, 2]), ("b", [9]), ("c", [20])]
    assert [kernel.name for kernel in done.kernels] == ["of_a", "of_c"]
    assert done.notes == ("backend 'b' compiles nothing ahead: it has none; require one that does, such as "
                          "--require triton",)  # fmt: skip
    assert (done.backend, done.token_counts) == ("c", (1, 2, 9, 20))


def test_tokens_travel_as_codes_if_all_ranges_compute_them() -> None:
    problem = problem_of(hidden_size=128, intermediate_size=128, dtype="bfloat16", quant="fp8_block128")
    codes: dict[str, Any] = {"input_form": "quantized"}
    for first, second, keeps in ((codes, codes, True), (codes, {}, False), ({}, codes, False)):
        selection = plan_of(problem, [(4, experts_of(**first)), (None, experts_of(**second))])
        assert selection.winner is not None
        wire = group_plan._wire(problem, selection, selection.winner)
        assert isinstance(wire, CodedWire)
        assert wire._keeps_codes is keeps
    # A range that computes 16-bit activations gets all bits of them.
    few, last = selection.ranges
    wider = dataclasses.replace(few[1], scheme=dataclasses.replace(problem.quant, name="wider", activation=None))
    other = dataclasses.replace(selection, ranges=((4, wider), last))
    assert isinstance(group_plan._wire(problem, other, last[1]), PlainWire)


def test_the_histogram_counts_calls_by_powers_of_two() -> None:
    kernel = planned(three_ranges())
    assert kernel.token_histogram() == {}
    for count in (0, 1, 2, 3, 4, 5, 8, 9, 9, 64, 65):
        call(kernel, make_inputs(kernel.problem, count, "uniform", CPU))
    assert kernel.token_histogram() == {1: 1, 2: 1, 4: 2, 8: 2, 16: 2, 64: 1, 128: 1}
    for count in (0, 1, 2, 65, 2**62 + 1):
        kernel.count(count)
    assert kernel.token_histogram() == {1: 2, 2: 2, 4: 2, 8: 2, 16: 2, 64: 1, 128: 2, 2**63: 1}
    for wrong in (-1, 1.0, True, "4", None, 2**63):
        with pytest.raises(ArgumentError, match=r"^num_tokens must be"):
            kernel.count(wrong)  # type: ignore[arg-type]
    # A copy is another kernel. A warm-up is no call.
    assert copy.deepcopy(kernel).token_histogram() == {}
    kernel.warm_up([2])
    assert kernel.token_histogram()[2] == 2


def test_shared_layouts_are_layouts() -> None:
    for wrong in (("other",), ["canonical"], "canonical"):
        with pytest.raises(
            RegistrationError, match=r"shared_layouts must be a tuple of names in layouts \('canonical'"
        ):
            register_moe_backend("wrong", 1, ("unquantized",), ("cpu",))(experts_of(shared_layouts=wrong))


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return results_of(2, *PLANS, "other_plans", "float16_rows_of_two_kinds", module="tests.groups.plan_cases")


PLANS = ("all_to_all", "all_to_all_batched", "all_gather", "all_gather_batched")


@pytest.mark.parametrize("name", PLANS)
def test_over_a_group_tokens_that_arrive_pick_the_range(two_ranks: list[dict[str, Any]], name: str) -> None:
    both = [value_of(result, name) for result in two_ranks]
    assert all(found["equal"] for found in both)
    few, many = ([count for found in both for count in found[kind]] for kind in ("few", "many"))
    assert many
    if name.startswith("all_to_all"):
        assert max(few) <= 8 < min(many)
        # Within one call, ranks run experts of different ranges.
        assert any(one != other for one, other in zip(both[0]["order"], both[1]["order"], strict=True))
    else:
        assert few == []  # Room for as many tokens as may come, whoever many are in it.


def test_results_of_ranges_travel_in_one_dtype(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        found = value_of(result, "float16_rows_of_two_kinds")
        assert max(found["errors"]) < 1e-3, found
    # Within the second call one rank has few rows and the other many.
    first, last = (value_of(result, "float16_rows_of_two_kinds") for result in two_ranks)
    assert (first["few"], first["many"], last["few"], last["many"]) == ([3], [42], [3, 6], [])


def test_ranks_with_other_plans_all_say_so(two_ranks: list[dict[str, Any]]) -> None:
    for result in two_ranks:
        text = value_of(result, "other_plans")
        assert text.startswith("RanksDifferError: all ranks must run the same layer, got plan to 4 tokens "), text

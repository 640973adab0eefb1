"""Each check of the kit has backends that break its promise; the kit must not let one of them pass.

They run in this process, on tiny layers. What crashes or hangs is in `test_verify.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

from moereg.author import ExpertInputs, ExpertWeights, MoEProblem, PermutedWeights, Platform
from moereg.layer.factory import make_unchecked_kernel
from moereg.layer.kernel import MoEKernel
from moereg.numerics.tolerances import layer_tolerance
from moereg.registry import BackendCell, BackendRegistry, register_moe_backend
from moereg.spec.quant_schemes import QuantScheme, get_scheme
from moereg.testing import checks
from moereg.testing.cases import Case, first_case, running_as
from moereg.testing.check import CHECK_KINDS, CellName, Check, check_layer, chosen_machine
from moereg.testing.checks import ImportWatch, check_numbers
from moereg.testing.drawing import DrawnLayer
from moereg.testing.guards import FILLS, FORMS, poisoned_empty
from moereg.testing.inputs import ROUTINGS, make_inputs, make_weights
from tests.support.fakes import EVERYTHING, LITTLE, BatchedExperts, FakeExperts, cell_of

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
REAL_EMPTY = torch._C._VariableFunctions.empty  # What torch.empty is where nothing has replaced it.


class RightExperts(FakeExperts):
    """Runs the reference in any scheme. Others override `spoil`, which is called after each run."""

    facts = dataclasses.replace(LITTLE, deterministic=True)
    num_calls = 0

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        self.num_calls += 1
        super().compute(out, inputs, weights)


def spoiling(broken: Callable[..., object], base: type[FakeExperts] = RightExperts, **members: Any) -> Any:
    """A class that does this after each run, with itself, out, inputs, weights and both workspaces."""

    class SpoilingExperts(base):  # type: ignore[valid-type, misc]
        def spoil(self, *given: Any) -> None:
            broken(self, *given)

    for name, member in members.items():
        setattr(SpoilingExperts, name, member)
    return SpoilingExperts


def case_of(experts: type[FakeExperts], **changes: Any) -> Case:
    sizes = {"num_experts": 3, "hidden_size": 40, "intermediate_size": 24, "top_k": 2, "dtype": "float32"}
    problem = MoEProblem(**{**sizes, **changes})
    return Case(cell_of(experts, problem.quant.name), Platform.from_name("cpu"), problem)


def drawn(experts: type[FakeExperts], changes: dict[str, Any] | None = None, **call: Any) -> None:
    """Runs two calls of a layer."""
    case = case_of(experts, **(changes or {}))
    layer = DrawnLayer(
        backend="fresh", experts="", rule="cpu", computes="", problem=case.problem, **{"num_tokens": 5, **call}
    )
    with running_as(chosen_machine("cpu")):
        check_layer(case, layer)


def numbers(experts: type[FakeExperts], **changes: Any) -> None:
    case = case_of(experts, **changes)
    with running_as(chosen_machine("cpu")):
        CHECK_KINDS["numbers"](case.cell, {"problem": case.problem.to_dict(), "is_first": False})


def run_kind(kind: str, experts: type[FakeExperts]) -> None:
    """Runs a check on a class as it is run where nothing else is said."""
    match kind:
        case "numbers":
            numbers(experts)
        case "drawn":
            drawn(experts)
        case "rounding":
            of_scheme(kind, "int8_w8a8", cell_of(experts, "int8_w8a8"))
        case "batch_invariance":
            checks.check_batch_invariance(case_of(experts, batch_invariant=True))
        case _:
            CHECK_KINDS[kind](cell_of(experts), watch() if kind == "deciding" else None)


def of_scheme(kind: str, scheme: str, cell: BackendCell) -> None:
    """A check of one of the schemes of a cell."""
    CHECK_KINDS[kind](cell, dataclasses.asdict(get_scheme(scheme)))


def watch(*packages: str) -> ImportWatch:
    return ImportWatch({package: frozenset({f"{__name__}.backend"}) for package in packages})


def predicate(answer: Callable[[MoEProblem, Platform], list[str]]) -> Any:
    class PickyExperts(RightExperts):
        @classmethod
        def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
            return answer(problem, platform)

    return PickyExperts


def no_such_key() -> list[str]:
    raise KeyError("no such key")


class OtherLayoutExperts(RightExperts):
    """Reads what it made, and its class says something else."""

    def __init__(self, problem: MoEProblem, platform: Platform, computes: Any = None) -> None:
        super().__init__(problem, platform, computes)
        self.layouts = ("other",)  # type: ignore[misc]

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return PermutedWeights("other", weights.tensors())


class WritingExperts(RightExperts):
    """Spoils weights that it was given, in the last element."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        permuted = PermutedWeights("canonical", {name: each.clone() for name, each in weights.tensors().items()})
        weights.w2[-1, -1, -1] += 1
        return permuted


class KeepingExperts(RightExperts):
    """Runs on the weights of its first call."""

    kept: PermutedWeights | None = None

    def result(self, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        if self.kept is None:
            self.kept = PermutedWeights("", {name: weights[name].clone() for name in weights.per_expert})
        return super().result(inputs, self.kept, computes)


class WearingExperts(RightExperts):
    """Each permuting is a little off the one before."""

    num_permuted = 0

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        self.num_permuted += 1
        return PermutedWeights("canonical", {"w13": weights.w13, "w2": weights.w2 * (1 + 1e-6 * self.num_permuted)})


class Mostly16BitExperts(RightExperts):
    """Does not quantize activations, but for a third."""

    def result(self, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        kept = super().result(inputs, weights, dataclasses.replace(computes, name="kept", activation=None))
        return torch.lerp(kept, super().result(inputs, weights, computes), 1 / 3)


def shrinking(place: int, where: int) -> type[RightExperts]:
    """One workspace has an element less from so many tokens on."""

    def shapes(self: Any, problem: MoEProblem, num_tokens: int) -> Any:
        sizes = [2 * where + 10, 2 * where + 10]
        sizes[place] -= num_tokens >= where
        return tuple((size,) for size in sizes)

    return spoiling(lambda *_: None, workspace_shapes=shapes)


def in_call(number: int, **members: Any) -> type[RightExperts]:
    """Gives other bits in one call, within the tolerance."""
    return spoiling(lambda self, out, *_: out.mul_(1 + 2e-7 * (self.num_calls == number)), **members)


def wrong_where(routing: str) -> type[RightExperts]:
    """Wrong for one kind of routing, which is known by its ids."""
    looks: dict[str, Callable[[torch.Tensor], bool]] = {
        "uniform": lambda ids: (ids == 0).sum().item() <= 14,
        "skewed": lambda ids: (ids == 0).sum().item() > 14,
        "one_expert": lambda ids: bool((ids > 0).all()),
        "unmapped": lambda ids: bool((ids == -1).any()),
        "nowhere": lambda ids: bool((ids == 3).all()),
    }

    def spoil(self: Any, out: torch.Tensor, inputs: ExpertInputs, *_: Any) -> None:
        ids = inputs.topk_ids
        is_mapped = bool(((ids >= 0) & (ids < 3)).all())
        looked = is_mapped if routing in ("uniform", "skewed", "one_expert") else True
        if len(ids) == 17 and looked and looks[routing](ids):
            out.add_(1)

    return spoiling(spoil)


def beside(which: int, where: str) -> Callable[..., object]:
    """Writes to a byte just in front of or behind a tensor of apply."""

    def spoil(*given: Any) -> None:
        tensor = given[which]
        place = tensor.storage_offset() + (tensor.numel() if where == "behind" else -1)
        tensor.as_strided((1,), (1,), place).fill_(1)

    return spoil


def with_prepared(broken: Callable[[ExpertInputs], object]) -> type[FakeExperts]:
    """A batched class that does something to what `prepare` made."""

    class SpoilingBatchedExperts(BatchedExperts):
        def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
            super().compute(out, inputs, weights)
            broken(inputs)

    return SpoilingBatchedExperts


def off_by(share: float) -> type[RightExperts]:
    """Off by that share of the bound."""

    def spoil(self: Any, out: torch.Tensor, *_: Any) -> None:
        out.mul_(1 + share * layer_tolerance(self.problem, len(out)))

    return spoiling(spoil)


def writes_later(self: Any, out: torch.Tensor, *_: Any) -> None:
    def fill() -> None:
        time.sleep(0.3)
        out.fill_(1)

    threading.Thread(target=fill, daemon=True).start()


def writes_kept_weights() -> type[RightExperts]:
    """Writes to the canonical weights, of which it keeps a view, when it runs."""

    def permute(self: Any, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        self.kept = weights.w2
        return PermutedWeights("canonical", {name: each.clone() for name, each in weights.tensors().items()})

    return spoiling(lambda self, *_: self.kept.add_(1), permute_weights=permute)


def reads_stale(self: Any, out: torch.Tensor, inputs: Any, weights: Any, workspace13: torch.Tensor, *_: Any) -> None:
    """As if the last call's scratch were this one's."""
    out.add_(float(workspace13.flatten()[0] == 7))
    workspace13.fill_(7)


def deciding_beside(*packages: str) -> None:
    """The check of a class whose module has imported these, where they are there."""
    with mock.patch.dict(sys.modules, {package: ModuleType(package) for package in packages}):
        CHECK_KINDS["deciding"](cell_of(RightExperts), watch(*packages))


def taking(code: str, experts: type[RightExperts] = RightExperts) -> None:
    """The check where a cell takes a problem that it must reject, or rejects it for another reason."""
    problem = first_case(cell_of(RightExperts)).problem
    with mock.patch.object(checks, "rejected_problems", return_value=[(code, problem)]):
        CHECK_KINDS["rejections"](cell_of(experts), None)


class Wrapped:
    """A kernel whose calls go through a function of the kernel and its arguments."""

    def __init__(self, kernel: MoEKernel, call: Callable[..., torch.Tensor]) -> None:
        self.kernel, self.call = kernel, call
        self.held, self.weights, self.expert_map = kernel.held, kernel.weights, kernel.expert_map

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        self.kernel.expert_map = self.expert_map
        return self.call(self.kernel, *tensors)


@contextlib.contextmanager
def wrapped(call: Callable[..., torch.Tensor], made: Callable[..., object] = lambda *_, **__: None) -> Iterator[None]:
    """Inside, the checks' kernels call that function; `made` sees the arguments that they are made with."""

    def make(*arguments: Any, **named: Any) -> Wrapped:
        made(*arguments, **named)
        return Wrapped(make_unchecked_kernel(*arguments, **named), call)

    with mock.patch.object(checks, "make_unchecked_kernel", make):
        yield


def returning_its_own() -> None:
    with wrapped(lambda kernel, *tensors: kernel(*tensors).clone()):
        numbers(RightExperts)


def diagnosed_by_a_failure() -> None:
    with mock.patch.object(checks, "diagnose", side_effect=MemoryError("none left")):
        numbers(off_by(3))


class AloneExperts(RightExperts):
    """Runs each token alone, so that no row sees another; others override `row`."""

    facts = dataclasses.replace(LITTLE, batch_invariant=True)

    def result(self, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        rows = [self.row(token, inputs, weights, computes) for token in range(len(inputs.hidden_states))]
        return torch.cat(rows) if rows else torch.empty_like(inputs.hidden_states)

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        own = (tensor[token : token + 1] for tensor in (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids))
        return super().result(ExpertInputs(*own), weights, computes)


class DeeperTileExperts(AloneExperts):
    """From 16 tokens on sums run over the depth in another order."""

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        if len(inputs.hidden_states) < 16:
            return super().row(token, inputs, weights, computes)
        flipped = {name: tensor.flip(2) if name == "w13" else tensor for name, tensor in weights.per_expert.items()}
        other = dataclasses.replace(inputs, hidden_states=inputs.hidden_states.flip(1))
        return super().row(token, other, PermutedWeights("canonical", flipped), computes)


class SplitSumExperts(AloneExperts):
    """Beyond one token the second product's depth is summed in two halves."""

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        if len(inputs.hidden_states) == 1:
            return super().row(token, inputs, weights, computes)
        total = torch.zeros(())
        for half in weights["w2"].chunk(2, dim=2):
            # In either half the other is zero.
            w2 = torch.where(torch.isin(weights["w2"], half), weights["w2"], 0.0)
            own = PermutedWeights("canonical", {**weights.per_expert, "w2": w2})
            total = total + super().row(token, inputs, own, computes)
        return total


class SharedScaleExperts(AloneExperts):
    """Tokens are scaled by the largest magnitude of the call, and back."""

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        scale = inputs.hidden_states.abs().amax() / 448
        scaled = dataclasses.replace(inputs, hidden_states=(inputs.hidden_states / scale) * scale)
        return super().row(token, scaled, weights, computes)


class SpreadingNanExperts(AloneExperts):
    """A token that is not a number spoils the next one."""

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        before = inputs.hidden_states[token - 1, 0] * 0 if token else torch.tensor(0.0)
        return super().row(token, inputs, weights, computes) + before


class BusyExpertExperts(AloneExperts):
    """An expert with many rows takes another tile."""

    def row(self, token: int, inputs: ExpertInputs, weights: PermutedWeights, computes: QuantScheme) -> torch.Tensor:
        num_tokens, busiest = len(inputs.topk_ids), int(inputs.topk_ids.flatten().bincount().max())
        own = super().row(token, inputs, weights, computes)
        return own * (1 + 1e-6) if num_tokens >= 64 and busiest > 0.8 * num_tokens else own


# The kind of check, the fault, what the check says, and a class with that fault, or what runs the check on one.
BROKEN: list[tuple[str, str, str, Callable[[], object] | type[FakeExperts]]] = [
    ("deciding", "raises", "its predicate raised KeyError", predicate(lambda *_: no_such_key())),
    ("deciding", "raises elsewhere", "its predicate raised KeyError", predicate(
        lambda problem, platform: no_such_key() if platform.kind == "cuda" else [])),
    ("deciding", "raises outside of its claim", "its predicate raised KeyError", predicate(
        lambda problem, platform: no_such_key() if problem.has_bias else [])),
    ("deciding", "shouts", "a reason must be a lowercase clause, got 'Too small'", predicate(
        lambda problem, platform: ["Too small"])),
    ("deciding", "imports", "choosing a backend imports numba;", lambda: deciding_beside("numba", "json")),
    ("rejections", "takes all", "must be rejected with code 'bias'", lambda: taking("bias")),
    ("rejections", "another reason", "must be rejected with code 'bias'", lambda: taking(
        "bias", predicate(lambda problem, platform: ["too wide"] if problem.hidden_size == 128 else []))),
    ("deciding", "shouts outside of its claim", "a reason must be a lowercase clause, got 'Too small'", predicate(
        lambda problem, platform: ["Too small"] if problem.has_bias else [])),
    ("workspaces", "first", "elements for more tokens than ones of", shrinking(0, 20)),
    ("workspaces", "second, late", "elements for more tokens than ones of", shrinking(1, 690)),
    ("permute", "writes", "w2 was written to", WritingExperts),
    ("numbers", "undiagnosed", ", bound 1e-05; looking for the cause failed: MemoryError: none left",
        diagnosed_by_a_failure),
    ("permute", "layout", "layouts says ('canonical',), permute_weights gave 'other'", OtherLayoutExperts),
    ("reload", "keeps", "reload left the old weights", KeepingExperts),
    ("reload", "wears", "equal weights gave another result after a reload", WearingExperts),
    *(("equal_bits", f"call {number}", "equal inputs gave other bits", in_call(number)) for number in (1, 2, 4)),
    ("batch_invariance", "another tile", "rows have other bits than among 255 tokens", DeeperTileExperts),
    ("batch_invariance", "split sum", "rows have other bits than among 255 tokens", SplitSumExperts),
    ("batch_invariance", "scale of the call", "rows have other bits than among 255 tokens", SharedScaleExperts),
    ("batch_invariance", "spreads NaN", "beside NaN: 1 of 2 rows", SpreadingNanExperts),
    ("batch_invariance", "busy expert", "beside tokens of one expert", BusyExpertExperts),
    ("compile", "first size", "T=17: compiled code gave another result than eager code", in_call(2)),
    ("compile", "second size", "T=5: compiled code gave another result than eager code", in_call(4)),
    ("rounding", "mostly keeps them", "activations were kept at 16 bits", Mostly16BitExperts),
    ("numbers", "out, behind", "memory 1 bytes behind out", spoiling(beside(1, "behind"))),
    ("numbers", "out, before", "bytes in front of out", spoiling(beside(1, "before"))),
    ("numbers", "first scratch, behind", "behind workspace13", spoiling(beside(4, "behind"))),
    ("numbers", "second scratch, before", "in front of workspace2", spoiling(beside(5, "before"))),
    *(("numbers", name, f"{name} was written to", spoiling(
        lambda self, out, inputs, *_, name=name: getattr(inputs, name)[-1, -1:].add_(1)))
        for name in ("hidden_states", "topk_ids", "topk_weights")),
    ("numbers", "equal ids", "topk_ids was written to, with what it held", spoiling(
        lambda self, out, inputs, *_: inputs.topk_ids.copy_(inputs.topk_ids.clone()))),
    ("numbers", "weights", "permuted w13 was written to", spoiling(
        lambda self, out, inputs, weights, *_: weights["w13"][-1, -1, -1:].add_(1))),
    ("numbers", "canonical weights", "canonical w2 was written to", writes_kept_weights()),
    ("numbers", "permuting", "canonical w2 was written to", WritingExperts),
    ("numbers", "given map", "expert_map was written to", lambda: numbers(
        spoiling(lambda self, out, inputs, *_: inputs.expert_map.neg_(), facts=EVERYTHING),
        placement="map", num_experts=6, num_local_experts=2)),
    ("numbers", "own map", "expert_map was written to", lambda: numbers(
        spoiling(lambda self, out, inputs, *_: inputs.expert_map.neg_()), num_experts=6, num_local_experts=3)),
    ("numbers", "prepared rows", "prepared hidden_states was written to", lambda: numbers(
        with_prepared(lambda inputs: inputs.hidden_states[-1, -1:].add_(1)), activation_format="batched")),
    ("numbers", "prepared counts", "prepared expert_num_tokens was written to", lambda: numbers(
        with_prepared(lambda inputs: inputs.expert_num_tokens.neg_()), activation_format="batched")),
    ("numbers", "behind prepared rows", "bytes behind prepared hidden_states was written to", lambda: numbers(
        with_prepared(lambda inputs: beside(0, "behind")(inputs.hidden_states)), activation_format="batched")),
    ("numbers", "reads scratch", "are not finite", spoiling(
        lambda self, out, inputs, weights, one, two: out.add_(two.flatten()[0] * 0))),
    ("numbers", "leaves out as it was", "rows [0] of 1 are not finite", spoiling(
        lambda self, out, *_: out.copy_(out.new_full(out.shape, -1).sqrt()))),
    ("numbers", "a little off", ", bound", off_by(1.2)),
    *(("numbers", f"{count} tokens", f"T={count} uniform: error", spoiling(
        lambda self, out, *_, count=count: out.add_(len(out) == count))) for count in (1, 2, 17, 63)),
    *(("numbers", routing, f"T=17 {routing}: error", wrong_where(routing)) for routing in ROUTINGS),
    ("numbers", "returns its own", "a layer must return the out that it was given", returning_its_own),
    ("numbers", "later", "out was written to after the call had returned", spoiling(writes_later)),
    ("drawn", "a little off", ", bound", off_by(1.2)),
    ("drawn", "later", "out was written to after the call had returned", spoiling(writes_later)),
    ("drawn", "huge scratch", ", bound", lambda: drawn(
        spoiling(lambda self, out, inputs, weights, one, two: out.add_(float((two > 1e38).all()))), fill="huge")),
    ("drawn", "stale scratch", ", bound", lambda: drawn(spoiling(reads_stale), fill="stale")),
    *(("drawn", f"call {number}", ", bound", spoiling(
        lambda self, out, *_, number=number: out.add_(self.num_calls == number))) for number in (1, 2)),
    ("drawn", "bits", "equal inputs gave other bits", in_call(2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fault", "message", "broken"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_promise_is_seen(kind: str, fault: str, message: str, broken: Any) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_kind(kind, broken) if isinstance(broken, type) else broken()


def test_numbers_are_told_which_case_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(checks, "calls_of", lambda case, is_first: seen.append(is_first) or [])
    cell = cell_of(RightExperts)
    for is_first in (False, True):
        CHECK_KINDS["numbers"](cell, {"problem": first_case(cell).problem.to_dict(), "is_first": is_first})
    assert seen == [False, True]


def spoiled_by(share: float) -> Callable[[ExpertWeights], Iterator[tuple[str, ExpertWeights]]]:
    """A planted fault that makes the result wrong by that share, after one that is seen well."""

    def planted(weights: ExpertWeights) -> Iterator[tuple[str, ExpertWeights]]:
        name = "w2" if weights.w2_scale is None else "w2_scale"
        matrix = weights.tensors()[name]
        for each in (9.0, share):
            yield f"share {each}", dataclasses.replace(weights, **{name: matrix * (1 + each)})  # type: ignore[arg-type]

    return planted


def test_faults_are_planted_in_biases_and_in_two_experts_where_kernels_are_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, int]] = []
    planted = lambda weights: seen.append((weights.w2_bias is not None, weights.num_experts)) or []  # noqa: E731
    monkeypatch.setattr(checks, "plant_faults", planted)
    for has_bias, rule in ((True, "cpu"), (False, "cpu"), (True, "cuda:sm90")):
        facts = dataclasses.replace(LITTLE, bias=has_bias)
        of_scheme("faults", "unquantized", cell_of(spoiling(print, facts=facts), rules=(rule,)))
    assert seen == [(True, 6), (False, 6), (True, 6 if torch.cuda.is_available() else 2)]


@pytest.mark.parametrize(("scheme", "least"), [("unquantized", 10), ("int8_w8a16", 10), ("int8_w8a8", 1.5)])
def test_each_fault_must_be_seen_well_above_the_bound(
    scheme: str, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(RightExperts, scheme)
    bound = layer_tolerance(first_case(cell).problem, 17, scheme)
    monkeypatch.setattr(checks, "plant_faults", spoiled_by(1.1 * least * bound))
    of_scheme("faults", scheme, cell)
    monkeypatch.setattr(checks, "plant_faults", spoiled_by(0.9 * least * bound))
    with pytest.raises(AssertionError, match=rf"{scheme} with share .*, planted by this check: .*, must be above"):
        of_scheme("faults", scheme, cell)


def test_a_right_class_passes_what_the_others_fail() -> None:
    for kind in sorted({kind for kind, *_ in BROKEN} - {"compile"}):
        run_kind(kind, AloneExperts if kind == "batch_invariance" else RightExperts)
    CHECK_KINDS["deciding"](cell_of(RightExperts), watch("json"))
    for fill in FILLS:
        drawn(RightExperts, fill=fill)
    numbers(off_by(0.8))
    drawn(off_by(0.8))
    drawn(in_call(2, facts=LITTLE))  # It does not claim equal bits.
    numbers(with_prepared(lambda inputs: None), activation_format="batched")
    for placement, facts in (("map", EVERYTHING), ("contiguous", LITTLE)):
        numbers(spoiling(lambda *_: None, facts=facts), placement=placement, num_experts=6, num_local_experts=3)


def test_a_cell_is_compared_with_what_it_computes() -> None:
    """Such as 16-bit activations for a checkpoint whose scheme rounds them, which has a wider bound."""
    problem = case_of(RightExperts, quant="int8_w8a8", num_experts=3).problem
    bounds = [layer_tolerance(problem, 17, scheme) for scheme in ("int8_w8a16", "int8_w8a8")]
    assert bounds[0] * 2 < bounds[1]

    def case(experts: type[FakeExperts]) -> Case:
        return Case(cell_of(experts, "int8_w8a16"), Platform.from_name("cpu"), problem)

    check_numbers(case(RightExperts))
    with pytest.raises(AssertionError, match=", bound"):
        check_numbers(case(spoiling(lambda self, out, *_: out.mul_(1 + bounds[0] * 2))))


def test_a_caller_compiles_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return hidden_states

    monkeypatch.setattr(checks, "build", lambda case: kernel)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        CHECK_KINDS["compile"](cell_of(RightExperts), None)


@pytest.mark.parametrize(
    ("is_wide", "row", "passes"),
    [
        (False, float("inf"), True),
        (False, float("nan"), True),
        (False, None, True),
        (False, 6.0, False),
        (True, float("inf"), False),
        (True, None, True),
    ],
)
def test_what_is_beyond_float16_is_right_or_not_finite(is_wide: bool, row: float | None, passes: bool) -> None:
    def broken(experts: Any, out: torch.Tensor, inputs: Any, *_: Any) -> None:
        is_beyond = inputs.hidden_states.abs().amax(1) > 50
        if row is not None:
            out[is_beyond] = row

    facts = dataclasses.replace(LITTLE, dtypes=frozenset({"float16"}))
    experts = spoiling(broken, wide_intermediate=is_wide, facts=facts)
    expected = contextlib.nullcontext() if passes else pytest.raises(AssertionError, match="beyond 65,504: error")
    with expected:
        numbers(experts, dtype="float16")


@pytest.mark.parametrize("form", FORMS)
def test_a_drawn_layer_runs_as_it_says(form: str) -> None:
    """Its form, rank, ids, routing, seed and number of calls are those of what the kernel is given."""
    made: list[tuple[ExpertWeights, int]] = []
    calls: list[tuple[torch.Tensor, ...]] = []

    def call(kernel: MoEKernel, *tensors: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(tensor.clone() for tensor in tensors[:3]))
        return kernel(*tensors)

    with wrapped(call, lambda problem, weights, **named: made.append((weights, named["ep_rank"]))):
        drawn(
            RightExperts,
            changes={"num_experts": 6, "num_local_experts": 3},
            **{"form": form, "ep_rank": 1, "wide_ids": True, "routing": "skewed", "seed": 3},
        )
    ((weights, rank),) = made
    assert rank == 1
    assert weights.w2.is_contiguous() == (form not in ("columns", "transposed"))
    assert weights.w2.requires_grad == (form == "parameter")
    problem = case_of(RightExperts, num_experts=6, num_local_experts=3).problem
    assert torch.equal(weights.w2, make_weights(problem, CPU, 3).w2)
    given = make_inputs(problem, 5, "skewed", CPU, 3)
    assert len(calls) == 2
    for hidden_states, topk_weights, topk_ids in calls:
        assert topk_ids.dtype == torch.int64
        assert torch.equal(hidden_states, given.hidden_states)
        assert torch.equal(topk_weights, given.topk_weights)
        assert torch.equal(topk_ids, given.topk_ids)


class FakeGPU:
    """A kernel and torch.cuda, as far as the checks of a GPU see them: capturing a call records how to run it again.

    Args:
        broken: `waits`, or how a replay goes wrong: it reads an input of the capture, or runs not at all or once.
    """

    def __init__(self, broken: str = "") -> None:
        self.broken, self.mode, self.is_capturing, self.num_replayed = broken, "default", False, 0
        self.replay: Callable[[], object] = lambda: None

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        if self.mode == "error" and self.broken == "waits":
            raise RuntimeError("called a synchronizing CUDA operation")
        out = self.result(*tensors)
        if self.is_capturing:
            read = [each.clone() if self.broken == f"keeps {place}" else each for place, each in enumerate(tensors)]
            self.replay = lambda: self.run_again(out, read)
        return out

    def run_again(self, out: torch.Tensor, read: list[torch.Tensor]) -> None:
        self.num_replayed += 1
        if self.broken != "runs not" and (self.broken != "runs once" or self.num_replayed == 1):
            out.copy_(self.result(*read))

    @staticmethod
    def result(hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return hidden_states * topk_weights.sum() + topk_ids.sum()

    @contextlib.contextmanager
    def capturing(self, graph: object) -> Iterator[None]:
        self.is_capturing = True
        yield
        self.is_capturing = False

    def run(self, kind: str) -> None:
        with (
            mock.patch.object(checks, "build", return_value=self),
            mock.patch.object(checks, "collecting_later", contextlib.nullcontext),
            mock.patch.object(torch.cuda, "synchronize", return_value=None),
            mock.patch.object(torch.cuda, "CUDAGraph", return_value=self),
            mock.patch.object(torch.cuda, "graph", self.capturing),
            mock.patch.object(torch.cuda, "set_sync_debug_mode", lambda mode: setattr(self, "mode", mode)),
        ):
            CHECK_KINDS[kind](cell_of(RightExperts), None)


@pytest.mark.parametrize("kind", ["permute", "numbers", "faults", "rounding", "reload", "drawn"])
def test_checks_of_numbers_run_beside_poisoned_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    cell = cell_of(RightExperts)
    monkeypatch.setattr(torch, "empty", REAL_EMPTY)
    monkeypatch.setattr(CellName, "find", lambda self: cell)
    monkeypatch.setitem(CHECK_KINDS, kind, lambda cell, argument: seen.append(bool(torch.empty(3).isnan().all())))
    Check.make(CellName("fresh", "RightExperts", ("unquantized",), ("cpu",)), kind, {}).run()
    assert seen == [True]
    assert torch.empty is REAL_EMPTY


def test_memory_that_nothing_wrote_is_nan_in_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", REAL_EMPTY)
    with poisoned_empty():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            assert torch.empty(3, dtype=dtype).isnan().all()
        codes = torch.empty(3, dtype=torch.uint8)
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            assert codes.view(dtype).float().isnan().all()
        assert torch.empty(3, device="meta").shape == (3,)
        with pytest.raises(KeyError), poisoned_empty():
            raise KeyError
    assert torch.empty is REAL_EMPTY


@pytest.mark.parametrize("broken", ["", "keeps 0", "keeps 1", "keeps 2", "runs not", "runs once"])
def test_a_replay_must_read_its_inputs_anew_each_time(broken: str) -> None:
    told = pytest.raises(AssertionError, match="a replayed graph gave another result than eager code")
    with told if broken else contextlib.nullcontext():
        FakeGPU(broken).run("graph")


def test_a_call_must_not_wait_and_torch_is_left_as_it_was() -> None:
    FakeGPU().run("synchronization")
    waiting = FakeGPU("waits")
    with pytest.raises(RuntimeError, match="synchronizing"):
        waiting.run("synchronization")
    assert waiting.mode == "default"


@pytest.mark.parametrize(
    ("permute", "text"),
    [
        (lambda weights: PermutedWeights("canonical", weights.tensors()), ""),
        (
            # Experts in another order, which the class would read right.
            lambda weights: PermutedWeights("canonical", {**weights.tensors(), "w2": weights.w2.roll(1, 0)}),
            # Which of torch's classes keep canonical weights depends on the CPU.
            r"shared_layouts has 'canonical' like torch \(\w+\), whose w2 has other bytes",
        ),
        (
            lambda weights: PermutedWeights("canonical", weights.tensors(), {"table": torch.zeros(3)}),
            r"which has tensors \['w13', 'w2'\] there, not \['table', 'w13', 'w2'\]",
        ),
    ],
    ids=["equal", "rolled", "wider"],
)
def test_classes_that_share_a_layout_have_equal_bytes(
    isolated_registry: BackendRegistry, permute: Callable[[ExpertWeights], PermutedWeights], text: str
) -> None:
    def permute_weights(self: Any, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        return permute(weights)

    experts = spoiling(lambda *_: None, shared_layouts=("canonical",), permute_weights=permute_weights)
    register_moe_backend("sharing", 1, ("unquantized",), ("cpu",))(experts)
    (cell,) = isolated_registry.by_name("sharing")
    with pytest.raises(AssertionError, match=text) if text else contextlib.nullcontext():
        checks.check_permute(cell)

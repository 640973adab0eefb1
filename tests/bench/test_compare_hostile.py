"""`run` and `bench` cannot be fooled: a backend that writes to tensors of others is named, and all others are right."""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable

import pytest
import torch

from moereg import cli
from moereg.author import ExpertInputs, ExpertWeights, PermutedWeights
from moereg.bench.compare import Comparison
from moereg.bench.inputs import random_calls
from moereg.cli import _output
from moereg.dispatch import explain_backends
from moereg.numerics.reference import reference_experts, relative_error
from moereg.registry import register_moe_backend
from moereg.runtime.torch_state import AmbientState
from moereg.spec.problem import MoEProblem
from tests.bench.hostile import (
    CEILINGS,
    CPU,
    HOSTILE,
    PROBLEM,
    SharingExperts,
    check_others,
    doing,
    layer_weights,
    measure,
    permuting,
    raises,
    zero,
)
from tests.support.fakes import FakeExperts

pytestmark = pytest.mark.usefixtures("isolated_registry")


@pytest.fixture(autouse=True)
def _small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are made often here, and drawing the numbers that they are cut from is what takes time."""
    monkeypatch.setattr("moereg.bench.inputs._POOL_NUMEL", 4099)


PERMUTES: dict[str, tuple[Callable[[ExpertWeights], object], str]] = {
    "doubles": (lambda weights: weights.w13.mul_(2), "w13"),
    "doubles and halves": (lambda weights: weights.w2.mul_(2).div_(2), "w2"),
    "unseen by torch": (lambda weights: weights.w13.data.mul_(2), "w13"),
    "same sum": (lambda weights: weights.w13.data.copy_(weights.w13.flip(1)), "w13"),
    "frees": (lambda weights: weights.w2.untyped_storage().resize_(0), "w2"),
}


@pytest.mark.parametrize("name", PERMUTES)
def test_writing_the_weights_while_permuting(name: str) -> None:
    deed, tensor = PERMUTES[name]
    row = check_others(measure(permuting(deed)), "Permuting")
    assert row.damage == f"permute_weights wrote to the layer's weights ({tensor})"


def test_other_memory_for_the_tensor_is_nobodys_but_its_own() -> None:
    def swap(weights: ExpertWeights) -> None:
        weights.w13.data = torch.zeros_like(weights.w13)

    row = check_others(measure(permuting(swap)), "Permuting")
    assert not row.damage
    assert row.relative_error == 1


@pytest.mark.parametrize("through_data", [False, True])
@pytest.mark.parametrize("first", [1, 2, 7])
def test_writing_shared_weights_in_a_call(first: int, through_data: bool) -> None:
    """In the first call, in the one before timing, and in the middle of it."""
    row = check_others(measure(doing(zero("w2", through_data), first)), "Doing")
    assert row.damage == "apply wrote to the layer's weights (w2)"


STATES: dict[str, Callable[[], object]] = {
    "default dtype torch.float64": lambda: torch.set_default_dtype(torch.float64),
    "default device meta": lambda: torch.set_default_device("meta"),
    "num threads 3": lambda: torch.set_num_threads(3),
    "grad enabled True": lambda: torch.set_grad_enabled(True),
    "deterministic True": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("first", [1, 7])
@pytest.mark.parametrize("state", STATES)
def test_changing_torch_for_everybody(state: str, first: int) -> None:
    before = AmbientState.now()
    row = check_others(measure(doing(lambda *_: STATES[state](), first)), "Doing")
    assert row.damage == f"apply changed torch's state for everybody ({state})"
    assert AmbientState.now() == before


def test_writing_shared_weights_once_while_all_run_in_turns() -> None:
    found = measure(doing(zero("w2", through_data=True), 7, 7))
    for row in found.values():
        assert not row.passed
        assert row.damage.startswith("one of fake_before, fake_hostile, fake_after, ")
        assert row.damage.endswith(" wrote to the layer's weights (w2), once")


@pytest.mark.parametrize("first", [1, 7])
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("hidden_states", lambda tensor: tensor.zero_()),
        ("hidden_states", lambda tensor: tensor.mul_(1)),
        ("topk_weights", lambda tensor: tensor.data.mul_(3)),
        ("topk_ids", lambda tensor: tensor.data.fill_(0)),
    ],
)
def test_writing_inputs(first: int, name: str, write: Callable[[torch.Tensor], object]) -> None:
    def deed(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        write(getattr(inputs, name))

    row = check_others(measure(doing(deed, first)), "Doing")
    assert row.damage == f"apply wrote to its inputs ({name})"


def more(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
    out.mul_(1.5)


def more_for_others(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
    if not torch.equal(inputs.hidden_states, random_calls(PROBLEM, 5, "uniform", 0, CPU)[0].hidden_states):
        out.mul_(1.5)


class ReusingExperts(SharingExperts):
    """Right wherever its output is made anew, and wrong where it has written to it before."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        is_new = bool(out.isnan().all())
        super().compute(out, inputs, weights)
        out.mul_(1 if is_new else 1.5)


WRONG = {
    **{f"from call {first} on": doing(more, first) for first in (2, 5, 9)},
    "for other inputs": doing(more_for_others),
    "in timed runs alone": ReusingExperts,
}


@pytest.mark.parametrize("when", WRONG)
def test_right_in_the_first_call_and_wrong_elsewhere(when: str) -> None:
    row = check_others(measure(WRONG[when]), WRONG[when].__name__)
    assert row.relative_error == pytest.approx(0.5, rel=0.05)
    assert not row.damage


def test_leaving_what_was_there_before() -> None:
    """Does nothing where its output has been right once."""
    row = check_others(measure(doing(lambda out, inputs, weights: None, 6, instead=True)), "Doing")
    assert math.isnan(row.relative_error)


@pytest.mark.parametrize("first", [2, 7, 9])
def test_raising_later_takes_no_other_down(first: int) -> None:
    row = check_others(measure(doing(raises, first)), "Doing")
    assert "RuntimeError: tired" in row.failure
    assert row.error is not None


FAULT = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each fault of a device, which shows at the next wait, and in everything that follows."""
    faults: list[bool] = []

    def fails(*arguments: object) -> None:
        if faults:
            raise RuntimeError(FAULT)

    def error_of(out: torch.Tensor, reference: torch.Tensor) -> float:
        fails()
        return relative_error(out, reference)

    for module in ("compare", "timing"):
        monkeypatch.setattr(f"moereg.bench.{module}.wait_for", fails)
    monkeypatch.setattr("moereg.bench.compare.relative_error", error_of)
    return faults


def test_a_fault_that_shows_when_outputs_are_compared_is_named(lost: list[bool]) -> None:
    found = measure(doing(lambda out, inputs, weights: lost.append(True)))
    assert found["Doing"].failure.startswith(
        f"backend 'fake_hostile' of {HOSTILE} raised in Doing.apply: RuntimeError: {FAULT} (test_compare_hostile.py:"
    )
    for name in set(found) - {"Doing"}:
        assert found[name].failure == (
            f"not measured, since backend 'fake_hostile' of {HOSTILE} took the device down in apply: RuntimeError: "
            f"{FAULT}; do without it (--deny fake_hostile)"
        )
    assert len(lost) == 1
    assert found["Before"].relative_error < 5e-3
    assert math.isnan(found["After"].relative_error)
    assert not any(row.passed for row in found.values())


def test_a_device_that_is_lost_while_permuting_has_a_name(lost: list[bool]) -> None:
    found = measure(permuting(lambda weights: lost.append(True)))
    assert f"raised in Permuting.permute_weights: RuntimeError: {FAULT}" in found["Permuting"].failure
    assert "took the device down in permute_weights" in found["After"].failure


def test_a_device_that_is_lost_while_all_run_in_turns_names_all(lost: list[bool]) -> None:
    found = measure(doing(lambda out, inputs, weights: lost.append(True), 4))
    for row in found.values():
        assert not row.passed
        assert row.failure.startswith(f"backend 'fake_before' of abc or backend 'fake_hostile' of {HOSTILE} or ")
        assert "run them one by one" in row.failure


def test_weights_that_cannot_be_made_anew_name_who_wrote_them() -> None:
    """By then nothing holds the tensors that the writer ran on, which may take the memory."""
    permuted: list[weakref.ref[PermutedWeights]] = []

    def deed(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        permuted.append(weakref.ref(weights))
        weights["w2"].zero_()

    def make_weights() -> ExpertWeights:
        if permuted:
            assert permuted[0]() is None
            raise MemoryError("of 3 GB")
        return layer_weights(PROBLEM)

    found = measure(doing(deed), make_weights=make_weights)
    assert found["Doing"].damage == "apply wrote to the layer's weights (w2)"
    text = (
        f"backend 'fake_hostile' of {HOSTILE} wrote to the layer's weights, which could not be made anew: "
        "MemoryError: of 3 GB; do without it (--deny fake_hostile)"
    )
    assert found["Doing"].failure == text
    assert found["After"].failure == f"not measured, since {text}"


def zeroes_and_raises(out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
    weights["w2"].data.zero_()
    raise RuntimeError("tired")


@pytest.mark.parametrize("first", [1, 2, 4, 7])
def test_writing_shared_weights_and_raising_harms_nobody_else(first: int) -> None:
    row = check_others(measure(doing(zeroes_and_raises, first)), "Doing")
    assert "RuntimeError: tired" in row.failure
    assert row.damage == "apply wrote to the layer's weights (w2)"


class ComputingExperts(FakeExperts):
    """The reference of the scheme that its cell computes."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        canonical = ExpertWeights(**{name: weights[name] for name in weights.per_expert}, quant=self.problem.quant)
        call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
        out.copy_(reference_experts(self.problem, canonical, *call, computes=self.computes))


def test_each_candidate_is_checked_against_what_it_computes() -> None:
    """A cell of the same weights that leaves activations at 16 bits has another reference."""
    problem = MoEProblem(num_experts=2, hidden_size=128, intermediate_size=128, top_k=1, quant="nvfp4")
    for name, scheme in (("fake_rounded", "nvfp4"), ("fake_plain", "nvfp4_w4a16")):
        register_moe_backend(name, 1, (scheme,), ("*",))(type(name.title(), (ComputingExperts,), {}))
    selection = explain_backends(problem, require=["fake_rounded", "fake_plain"])
    inputs = {8: random_calls(problem, 8, "uniform", 0, CPU)[:1]}
    comparison = Comparison(selection, functools.partial(layer_weights, problem), inputs)
    found = {row.decision.backend: row for row in comparison.measure(8, CEILINGS, 1)}
    assert {name: row.decision.computes for name, row in found.items()} == {
        "fake_rounded": "nvfp4",
        "fake_plain": "nvfp4_w4a16",
    }
    for row in found.values():
        assert row.passed
        assert row.relative_error < 4e-3
    rounded, plain = (comparison.reference(row.decision, 8) for row in found.values())
    assert not torch.allclose(rounded, plain, rtol=0.02, atol=0.02)


def test_everything_is_made_before_a_backend_runs() -> None:
    """Whatever a backend does in permute_weights, weights and references exist by then and are not made again."""
    made: list[str] = []

    def make_weights() -> ExpertWeights:
        made.append("weights")
        return layer_weights(PROBLEM)

    experts = permuting(lambda weights: made.append("permuted"))
    register_moe_backend("fake_hostile", 1, ("unquantized",), ("*",))(experts)
    selection = explain_backends(PROBLEM, require="fake_hostile")
    inputs = {count: random_calls(PROBLEM, count, "uniform", 0, CPU)[:2] for count in (1, 3)}
    comparison = Comparison(selection, make_weights, inputs)
    assert made == ["weights", "permuted"]
    assert all(row.passed for count in inputs for row in comparison.measure(count, None, 1))
    assert made == ["weights", "permuted"]


LINE = "--experts 4 --hidden 32 --intermediate 16 --top-k 2"


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (permuting(PERMUTES["doubles"][0]), "permute_weights wrote to the layer's weights (w13)"),
        (doing(zero("w2", through_data=True), 4), "apply wrote to the layer's weights (w2)"),
        (doing(lambda out, inputs, weights: inputs.hidden_states.zero_()), "apply wrote to its inputs (hidden_states)"),
    ],
)
def test_run_names_what_a_backend_wrote(
    capsys: pytest.CaptureFixture[str], experts: type[FakeExperts], expected: str
) -> None:
    register_moe_backend("fake_hostile", 1, ("unquantized",), ("*",))(experts)
    assert cli.main(f"run {LINE} --tokens 3 --require fake_hostile --json".split()) == _output.WRONG_NUMBERS
    found = json.loads(capsys.readouterr().out)
    assert (found["damage"], found["passed"], found["time_us"]) == (expected, False, None)
    assert cli.main(f"run {LINE} --tokens 3 --require fake_hostile".split()) == _output.WRONG_NUMBERS
    out = " ".join(capsys.readouterr().out.split())
    assert f"WRONG: fake_hostile ({experts.__name__}) of {HOSTILE}: {expected}" in out


def test_bench_names_what_a_backend_wrote_and_the_others_are_right(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: CEILINGS)
    register_moe_backend("fake_doubles", 100_000, ("unquantized",), ("*",))(permuting(PERMUTES["doubles"][0]))
    register_moe_backend("fake_zeroes", 99_999, ("unquantized",), ("*",))(doing(zero("w13")))
    register_moe_backend("fake_right", 99_998, ("unquantized",), ("*",))(type("Right", (SharingExperts,), {}))
    line = f"bench {LINE} --tokens 2,3 --rounds 2 --deny triton"
    assert cli.main(f"{line} --json".split()) == _output.WRONG_NUMBERS
    found = json.loads(capsys.readouterr().out)
    damages = {(row["backend"], row["tokens"]): row["damage"] for row in found["rows"] if row["damage"]}
    assert damages == {
        (name, count): f"{step} wrote to the layer's weights (w13)"
        for name, step in (("fake_doubles", "permute_weights"), ("fake_zeroes", "apply"))
        for count in (2, 3)
    }
    others = [row for row in found["rows"] if not row["damage"]]
    assert {row["backend"] for row in others} == {"fake_right", "torch"}
    assert all(row["passed"] and row["time_us"] > 0 for row in others)
    assert cli.main(line.split()) == _output.WRONG_NUMBERS
    out = " ".join(capsys.readouterr().out.split())
    assert f"fake_zeroes (Doing) of {HOSTILE} is WRONG at 2 tokens: apply wrote to the layer's weights (w13)" in out

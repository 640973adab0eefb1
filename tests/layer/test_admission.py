"""A kernel without a record here is checked once on the layer's weights; a wrong one is quarantined, the next taken."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moereg.author import ExpertInputs, ExpertWeights, PermutedWeights
from moereg.backends.torch_moe import TorchTrainingExperts
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import AdmissionWarning, BackendError, RecordFileWarning
from moereg.evidence import on_machine
from moereg.evidence.ledger import Evidence, Verification
from moereg.evidence.on_machine import ADMITTED, QUARANTINE, AdmissionRecord
from moereg.experts import Experts, Gradients
from moereg.layer import admission
from moereg.layer.factory import MoEKernel, make_kernel, make_unchecked_kernel
from moereg.quantize import activation_scale
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.runtime.json_types import convert
from moereg.selection.result import Selection
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.testing.inputs import make_weights
from tests.layer.small_layers import CPU, FORMS, INPUTS, Cuda, call, expected, kernel_of, problem_for, problem_of
from tests.layer.small_plans import experts_of, plan_of
from tests.support.fakes import FakeExperts, LeavingExperts, NanExperts, RaisingExperts, WrongExperts

PROBLEM = problem_of()
WEIGHTS = make_weights(PROBLEM, CPU)


class OneScaleOffExperts(FakeExperts):
    """Has the last expert's scale off by a tenth."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        w2 = weights.w2.clone()
        w2[-1] *= 1.1
        return PermutedWeights("canonical", {**weights.tensors(), "w2": w2})


class RaisingInPermuteExperts(FakeExperts):
    """Cannot read the weights."""

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        raise RuntimeError("no such layout\nin two lines")


class RaisingInApplyExperts(FakeExperts):
    """Has a bug where tokens are many."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        if len(inputs.hidden_states) > 1:
            raise IndexError("out of range")
        super().compute(out, inputs, weights)


class OnceRightExperts(FakeExperts):
    """Is right in the first call that it gets, as with scratch memory that happens to hold zeros."""

    calls = 0

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        super().compute(out, inputs, weights)
        self.calls += 1
        out *= 1.0 + 0.5 * (self.calls > 1)


class OutOfMemoryExperts(FakeExperts):
    """Needs more memory than there is."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        raise MemoryError("no room")


FAULTS = {
    "a scale of one expert": (OneScaleOffExperts, "its first check was off by 0.0"),
    "all numbers": (WrongExperts, "its first check was off by 0.5 at T 1, bound "),
    "a NaN": (NanExperts, "its first check left NaN in the output at T 1"),
    "no output": (LeavingExperts, "its first check left NaN in the output at T 1"),
    "the second call": (OnceRightExperts, "its first check was off by 0.5 at T 1, bound "),
    "permuting raises": (
        RaisingInPermuteExperts,
        "its first check could not make a kernel: RuntimeError: no such layout in two lines",
    ),
    "a call raises": (RaisingInApplyExperts, "its first check raised at T 48: IndexError: out of range"),
    "workspaces raise": (RaisingExperts, "its first check raised at T 1: RuntimeError: a bug of two lines"),
}


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of admitted cells, in a folder that does not exist yet; nothing is remembered from other tests."""
    path = tmp_path / "data" / "admitted.json"
    monkeypatch.setenv("MOEREG_ADMISSION", str(path))
    monkeypatch.setenv("MOEREG_QUARANTINE", str(tmp_path / "data" / "quarantine.json"))
    monkeypatch.setattr(admission, "_HERE", {})
    admission._warn_once.cache_clear()
    return path


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """No record vouches for a class on this machine, whichever it is."""
    monkeypatch.setattr(admission, "_is_verified", lambda cell, platform: False)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that were checked."""
    names: list[str] = []
    compared = admission._compared

    def noted(kernel: MoEKernel, weights: ExpertWeights) -> admission.CheckResult:
        names.append(str(kernel.selection.backend))
        return compared(kernel, weights)

    monkeypatch.setattr(admission, "_compared", noted)
    return names


Register = Callable[..., None]


@pytest.fixture
def register(isolated_registry: BackendRegistry) -> Register:
    """Registers a fake backend that goes before all others."""

    def add(name: str, experts: type[Experts], priority: int = 1000) -> None:
        register_moe_backend(name, priority, ("unquantized",), ("cpu",))(experts)

    return add


def admission_warnings(make: Callable[[], MoEKernel]) -> tuple[MoEKernel, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        kernel = make()
    return kernel, [str(found.message) for found in warned if issubclass(found.category, AdmissionWarning)]


def is_right(kernel: MoEKernel, weights: ExpertWeights = WEIGHTS) -> bool:
    return torch.allclose(call(kernel, INPUTS), expected(kernel.problem, weights, INPUTS).float(), atol=1e-4)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_quarantined_and_the_next_one_runs(register: Register, checks: list[str], fault: str) -> None:
    experts, failure = FAULTS[fault]
    register("bad", experts, 1001)
    register("good", type("GoodExperts", (FakeExperts,), {}))
    kernel, (warned,) = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))
    assert (kernel.selection.backend, kernel.selection.source) == ("good", "priority")
    assert is_right(kernel)
    (record,) = QUARANTINE.read().records
    assert record.backend == "bad"
    assert record.failure.startswith(failure)
    begin = (
        f"backend 'bad' of {experts.__module__} ({experts.__name__}) does not serve on this machine: {record.failure}"
    )
    assert warned == f"{begin}; it is quarantined, and good (GoodExperts) is next; moereg verify bad says more"
    rejected = next(one for one in kernel.selection.decisions if one.backend == "bad")
    assert [reason.code for reason in rejected.reasons] == ["quarantined"]
    # From now on, selection itself rejects it.
    assert explain_backends(PROBLEM).backend == "good"
    before = list(checks)
    assert admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))[1] == []
    assert checks == before


def halved(grads: Gradients) -> None:
    assert grads.w13 is not None
    grads.w13[-1] *= 0.5


def left_out(grads: Gradients) -> None:
    """Leaves what the memory of an expert without tokens held."""
    assert grads.w2 is not None
    grads.w2[~grads.w2.flatten(1).any(1)] = 3.0


def without_routing(grads: Gradients) -> None:
    assert grads.topk_weights is not None
    grads.topk_weights.fill_(math.nan)


def raises(grads: Gradients) -> None:
    raise IndexError("out of range")


GRADIENT_FAULTS: dict[str, tuple[Callable[[Gradients], None], str]] = {
    "one expert": (halved, "its first check was off by 0.5 in the gradient of w13 at T 48, bound "),
    "experts without tokens": (left_out, "its first check was off by inf in the gradient of w2 of experts without"),
    "a NaN": (without_routing, "its first check left NaN in the gradient of topk_weights at T 48"),
    "it raises": (raises, "its first check raised at T 48: IndexError: out of range"),
}


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_wrong_gradients_are_quarantined_for_training_alone(
    register: Register, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Their forward pass is right, and infers."""
    monkeypatch.setattr(admission, "_MOST_TRAINED", 2)  # So that some experts get no token.
    spoil, failure = GRADIENT_FAULTS[fault]

    @functools.wraps(TorchTrainingExperts.apply_backward)
    def apply_backward(self: Any, *_: Any, **given: Any) -> None:
        super(kind, self).apply_backward(**given)
        spoil(given["grads"])

    kind = type("BadExperts", (TorchTrainingExperts,), {"apply_backward": apply_backward})
    register("bad", kind)
    trained = problem_of(gradients={"hidden_states", "topk_weights", "weights"})
    kernel, (warned,) = admission_warnings(lambda: make_kernel(trained, WEIGHTS))
    assert (kernel.selection.backend, "and torch (TorchTrainingExperts) is next" in warned) == ("torch", True)
    (record,) = QUARANTINE.read().records
    assert (record.trains, record.failure.startswith(failure)) == (True, True), record.failure
    inferring = make_kernel(PROBLEM, WEIGHTS)
    assert (inferring.selection.backend, is_right(inferring)) == ("bad", True)
    assert {(each.backend, each.trains) for each in ADMITTED.read().records} == {("torch", True), ("bad", False)}


TRAINED: dict[str, dict[str, Any]] = {
    "weights": {"gradients": GRADIENTS[:3], "has_bias": True, "activation": "swigluoai"},
    "float16": {"gradients": GRADIENTS[:3], "dtype": "float16"},
    "adapters of a rank's experts": {"gradients": GRADIENTS, "adapter_rank": 3, "num_local_experts": 4},
    "a map": {"gradients": {"adapters"}, "adapter_rank": 3, "num_local_experts": 4, "placement": "map"},
    "restored": {"gradients": {"hidden_states"}, "quant": "int8_w8a16"},
}


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("case", TRAINED)
def test_right_gradients_are_admitted(case: str) -> None:
    problem = problem_of(**TRAINED[case])
    place = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1], dtype=torch.int32) if case == "a map" else None
    weights = make_weights(problem, CPU)
    with torch.inference_mode():
        kernel, warned = admission_warnings(lambda: make_kernel(problem, weights, ep_rank=0, expert_map=place))
    (record,) = ADMITTED.read().records
    assert (record.experts, record.trains, warned) == ("TorchTrainingExperts", True, [])
    assert 0 < record.error <= record.bound
    assert kernel.selection.decisions[0].evidence == "admitted"


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("is_selective", [False, True])
def test_a_first_use_under_checkpointing_keeps_only_the_call(is_selective: bool) -> None:
    """A layer's first call is often in a block that is recomputed, which must keep the same tensors again."""
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.moereg.moe_train.default])
    named: dict[str, Any] = {"context_fn": contexts} if is_selective else {}
    problem = problem_of(gradients={"hidden_states"})
    inputs = INPUTS.hidden_states.clone().requires_grad_(), INPUTS.topk_weights, INPUTS.topk_ids
    layer = functools.cache(lambda: make_kernel(problem, WEIGHTS))  # Made in its first call, as a MoELayer's kernel is.
    outs = [checkpoint(lambda *given: layer()(*given), *inputs, use_reentrant=False, **named) for _ in range(2)]
    assert len(ADMITTED.read().records) == 1
    first, second = (torch.autograd.grad(out.sum(), inputs[0])[0] for out in outs)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("scale", "num_local_experts"), [(3e4, 8), (1.0, 1)])
def test_gradients_that_show_nothing_pass_without_a_record(
    scale: float, num_local_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are beyond the dtype's range, or no token comes to this rank's only expert."""
    monkeypatch.setattr(admission, "_MOST_TRAINED", 2)
    problem = problem_of(gradients={"hidden_states", "weights"}, dtype="float16", num_local_experts=num_local_experts)
    weights = make_weights(problem, CPU)
    make_kernel(problem, ExpertWeights(w13=weights.w13 / scale, w2=weights.w2 * scale))
    assert ADMITTED.read().records == ()


def test_a_required_kernel_is_an_error_that_says_why(register: Register) -> None:
    register("bad", WrongExperts)
    selection = select_backend(PROBLEM, require="bad")
    text = "'bad' of .*: its first check was off by 0.5 .*quarantined, and no other backend that the request"
    for _ in range(2):
        with pytest.raises(BackendError, match=text) as raised:
            make_kernel(PROBLEM, WEIGHTS, selection)
        assert raised.value.backend == "bad"


def test_preferred_and_required_names_are_tried_in_order(register: Register) -> None:
    for name in ("first", "second"):
        register(name, type(f"{name}Experts", (WrongExperts,), {}), 1)
    preferred, warned = admission_warnings(
        lambda: make_kernel(PROBLEM, WEIGHTS, select_backend(PROBLEM, prefer="first"))
    )
    assert len(warned) == 1
    assert (preferred.selection.backend, preferred.selection.source) == ("torch", "priority")
    required = select_backend(PROBLEM, require="second,torch")
    kernel, warned = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS, required))
    assert len(warned) == 1
    assert (kernel.selection.backend, kernel.selection.source) == ("torch", "required")


def test_layers_with_one_selection_say_it_once(register: Register, checks: list[str]) -> None:
    register("bad", WrongExperts, 1001)
    register("good", type("GoodExperts", (FakeExperts,), {}))
    selection = select_backend(PROBLEM)
    kernels, warned = [], []
    for _ in range(3):
        kernel, texts = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS, selection))
        kernels.append(kernel)
        warned += texts
    assert len(warned) == 1
    assert [kernel.selection.backend for kernel in kernels] == ["good"] * 3
    assert checks == ["bad", "good"]


def test_what_passed_is_recorded_once(register: Register, checks: list[str], file: Path) -> None:
    register("good", FakeExperts)
    before = select_backend(PROBLEM)
    kernel = make_kernel(PROBLEM, WEIGHTS)
    (record,) = ADMITTED.read().records
    assert (record.backend, record.scheme, record.platform) == ("good", "unquantized", str(before.platform))
    assert 0 <= record.error <= record.bound < 1e-3
    after = select_backend(PROBLEM)
    assert before.winner is not None
    assert after.winner is not None
    assert (before.winner.evidence, after.winner.evidence) == ("", "admitted")
    assert before.fingerprint != after.fingerprint == kernel.selection.fingerprint
    for problem in (PROBLEM, problem_of(hidden_size=32)):
        again = make_kernel(problem, make_weights(problem, CPU))
        assert again.selection.winner is not None
        assert again.selection.winner.evidence == "admitted"
    assert make_kernel(PROBLEM, WEIGHTS, before).selection.fingerprint == after.fingerprint
    assert checks == ["good"]
    file.unlink()
    make_kernel(PROBLEM, WEIGHTS)
    assert checks == ["good"] * 2


def test_what_another_process_quarantines_serves_no_more(register: Register) -> None:
    register("good", FakeExperts)
    selection = make_kernel(PROBLEM, WEIGHTS).selection
    QUARANTINE.change([admission._Subject.of(selection).failed("it was wrong there")])
    assert make_kernel(PROBLEM, WEIGHTS, selection).selection.backend == "torch"


@pytest.mark.parametrize("change", ["version", "code"])
def test_changed_versions_or_code_are_checked_again(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    register("good", FakeExperts)
    make_kernel(PROBLEM, WEIGHTS)
    assert explain_backends(PROBLEM).decisions[0].evidence == "admitted"
    if change == "version":
        monkeypatch.setattr(on_machine, "cell_versions", lambda cell, platform: {"torch": "9"})
    else:
        monkeypatch.setattr(on_machine, "class_digest", lambda experts: "changed")
    assert explain_backends(PROBLEM).decisions[0].evidence == ""
    make_kernel(PROBLEM, WEIGHTS)
    make_kernel(PROBLEM, WEIGHTS)
    assert checks == ["good"] * 2
    assert len(ADMITTED.read().records) == 1


@pytest.mark.parametrize(
    ("changes", "is_checked"),
    [({}, False), ({"platform": "cuda:sm90", "rule": "cuda:sm90"}, True), ({"versions": {"torch": "2.9.1"}}, True)],
)
def test_only_a_record_of_this_platform_and_its_versions_spares_the_check(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], is_checked: bool
) -> None:
    register("good", FakeExperts)
    selection = select_backend(PROBLEM)
    assert selection.winner is not None
    assert selection.winner.cell is not None
    record = dataclasses.replace(Verification.of(selection.winner.cell, selection.platform, 3), **changes)
    monkeypatch.setattr(admission, "evidence_of", lambda cell: Evidence((record,), (), ()))
    admission._is_verified.cache_clear()
    make_kernel(PROBLEM, WEIGHTS)
    admission._is_verified.cache_clear()
    assert bool(checks) is is_checked
    assert len(ADMITTED.read().records) == is_checked


@pytest.mark.parametrize(("place", "num_others"), [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)])
def test_a_plan_with_one_candidate_that_fails_has_no_ranges(place: int, num_others: int) -> None:
    kinds = [experts_of(1.5 if number == place else 1.0) for number in range(num_others + 1)]
    plan = plan_of(PROBLEM, zip((*(4**number for number in range(num_others)), None), kinds, strict=True))
    for is_known in (False, True):
        kernel, warned = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS, plan))
        assert kernel.selection.ranges == ()
        assert len(warned) == (not is_known)
        assert is_right(kernel)


@pytest.mark.parametrize("value", ["off", ""])
def test_turned_off_nothing_is_checked_or_read(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    register("bad", WrongExperts)
    register("good", type("GoodExperts", (FakeExperts,), {}), 999)
    make_kernel(PROBLEM, WEIGHTS, select_backend(PROBLEM, deny="bad"))
    monkeypatch.setenv("MOEREG_ADMISSION", value)
    kernel, warned = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))
    assert (kernel.selection.backend, warned, checks) == ("bad", [], ["good"])
    assert {decision.evidence for decision in kernel.selection.decisions} == {""}


def test_a_file_that_cannot_be_written_is_one_warning_and_one_check(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("good", FakeExperts)
    register("other", type("OtherExperts", (FakeExperts,), {}), 999)
    monkeypatch.setenv("MOEREG_ADMISSION", "/dev/null/admitted.json")
    with pytest.warns(RecordFileWarning, match="each process checks kernels again"):
        make_kernel(PROBLEM, WEIGHTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_kernel(PROBLEM, WEIGHTS)
        make_kernel(PROBLEM, WEIGHTS, select_backend(PROBLEM, deny="good"))
    assert checks == ["good", "other"]


@pytest.mark.parametrize("value", ["", "/dev/null/quarantine.json"])
def test_without_a_quarantine_a_failure_holds_for_this_process(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    register("bad", WrongExperts, 1001)
    register("good", type("GoodExperts", (FakeExperts,), {}))
    monkeypatch.setenv("MOEREG_QUARANTINE", value)
    kernel, (warned,) = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))
    assert "; it is left out in this process, and good (GoodExperts) is next" in warned
    again, nothing = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))
    assert [kernel.selection.backend, again.selection.backend] == ["good", "good"]
    assert (nothing, checks) == ([], ["bad", "good"])


UNLIKE = {
    "zeros": lambda tensor: torch.zeros_like(tensor),
    "NaN": lambda tensor: torch.full_like(tensor, math.nan),
    "beyond the range": lambda tensor: tensor * 1e20,
}


@pytest.mark.parametrize("case", UNLIKE)
def test_weights_that_show_nothing_pass_without_a_record(register: Register, checks: list[str], case: str) -> None:
    register("bad", WrongExperts)
    weights = ExpertWeights(w13=UNLIKE[case](WEIGHTS.w13), w2=UNLIKE[case](WEIGHTS.w2))
    kernel, warned = admission_warnings(lambda: make_kernel(PROBLEM, weights))
    assert (kernel.selection.backend, warned, ADMITTED.read().records) == ("bad", [], ())
    make_kernel(PROBLEM, weights)
    assert checks == ["bad"]


def test_lack_of_memory_is_no_failure(register: Register) -> None:
    register("good", OutOfMemoryExperts)
    kernel, warned = admission_warnings(lambda: make_kernel(PROBLEM, WEIGHTS))
    assert (kernel.selection.backend, warned) == ("good", [])
    assert (ADMITTED.read().records, QUARANTINE.read().records) == ((), ())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a device that does not answer")
def test_a_backend_that_took_the_device_down_is_the_only_culprit(register: Register) -> None:
    register("bad", WrongExperts)
    selection = select_backend(PROBLEM)
    with pytest.raises(
        BackendError, match=r"'bad' .* took the device down: an illegal access; .*start the process again"
    ):
        admission._after(selection, "an illegal access", torch.device("cuda"))
    assert [(record.backend, record.failure) for record in QUARANTINE.read().records] == [("bad", "an illegal access")]
    assert admission._after(selection, "a bug", CPU) == "a bug"


def test_named_machines_and_meta_and_captured_graphs_are_not_checked(
    register: Register, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    register("bad", WrongExperts)
    named = select_backend(PROBLEM, platform="cpu")
    assert not named.platform.probed
    assert make_kernel(PROBLEM, WEIGHTS, named).selection.backend == "bad"
    assert checks == []
    here = select_backend(PROBLEM)
    cuda = Cuda(monkeypatch)
    devices = ("cpu", "meta", "cuda")
    assert [admission._can_check(here, torch.device(device)) for device in devices] == [True, False, True]
    cuda.is_capturing = True
    assert [admission._can_check(here, torch.device(device)) for device in devices] == [True, False, False]


def test_code_that_judges_kernels_itself_gets_the_winner(register: Register, checks: list[str]) -> None:
    register("bad", WrongExperts)
    kernel = make_unchecked_kernel(PROBLEM, WEIGHTS, select_backend(PROBLEM))
    assert (kernel.selection.backend, checks) == ("bad", [])


@pytest.mark.parametrize("mode", ["plain", "inference", "no_grad"])
def test_the_check_leaves_torch_as_it_was(register: Register, mode: str) -> None:
    register("good", FakeExperts)
    contexts = {"plain": torch.enable_grad, "inference": torch.inference_mode, "no_grad": torch.no_grad}
    weights = ExpertWeights(w13=WEIGHTS.w13.clone().requires_grad_(), w2=WEIGHTS.w2.clone())
    before = torch.get_rng_state()
    with contexts[mode](), torch.autocast("cpu"):
        kernel = make_kernel(PROBLEM, weights)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_grad_enabled() is (mode == "plain")
    assert torch.equal(torch.get_rng_state(), before)
    assert len(ADMITTED.read().records) == 1
    assert is_right(kernel)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("share", ["all", "some", "map"])
def test_every_form_and_placement_is_checked(form: str, share: str, checks: list[str]) -> None:
    if form == "per_expert" and share != "all":
        pytest.skip("the fake of that form takes all experts")
    facts: dict[str, Any] = {"some": {"num_local_experts": 4}, "map": {"num_local_experts": 4, "placement": "map"}}
    problem = problem_for(form, max_num_tokens=5, **facts.get(share, {}))
    place = torch.tensor([-1, 2, -1, 0, 3, -1, 1, -1], dtype=torch.int32) if share == "map" else None
    others = {"expert_map": place} if share == "map" else {"ep_rank": 1} if share == "some" else {}
    kernel_of(problem, FORMS[form], **others)
    (record,) = ADMITTED.read().records
    assert record.error <= record.bound
    assert checks == ["fake"]


def test_tokens_fit_static_scales() -> None:
    """Tokens of a trained layer are of the size that its static scales were made for, whatever that is."""
    problem = problem_of(quant="fp8_tensor_static", hidden_size=256, dtype="bfloat16")
    weights = make_weights(problem, CPU)
    winner = select_backend(problem, platform="cuda:sm90").winner
    assert winner is not None
    assert winner.scheme is not None
    assert winner.scheme.activation is not None
    largest = 1000.0
    scale = activation_scale(torch.tensor(largest), winner.scheme)
    scaled = dataclasses.replace(weights, a13_scale=torch.full((8,), float(scale)))
    *_, (tokens, topk_weights, topk_ids) = admission._calls(problem, scaled, winner, 2**27)
    assert largest / 2 < float(tokens.abs().amax()) < largest * 2
    assert tokens.shape[0] == len(topk_ids) == 48
    assert topk_ids.sort(dim=1).values.diff(dim=1).min() > 0
    assert float(topk_weights.sum(1).min()) > 0.5


def test_large_layers_route_to_some_experts_and_the_last_one() -> None:
    problem = problem_of(num_experts=64)
    winner = select_backend(problem).winner
    assert winner is not None
    calls = [*admission._calls(problem, make_weights(problem, CPU), winner, 10 * 3 * 16 * 12)]
    for _, _, topk_ids in calls[1:]:
        named = set(topk_ids.flatten().tolist())
        assert len(named) == 10
        assert 63 in named


def test_records_say_error_and_bound(register: Register, file: Path) -> None:
    register("good", FakeExperts)
    make_kernel(PROBLEM, WEIGHTS)
    document = json.loads(file.read_text())
    (values,) = document["records"]
    assert convert(values, AdmissionRecord, "a record") == ADMITTED.read().records[0]
    for wrong in ("0.1", True, -1.0, math.nan, math.inf, None):
        with pytest.raises(ValueError, match=r"error must be a finite number( [<>]= [^ ]*)?, got"):
            convert({**values, "error": wrong}, AdmissionRecord, "a record")


def test_evidence_goes_through_json(register: Register) -> None:
    register("good", FakeExperts)
    make_kernel(PROBLEM, WEIGHTS)
    found = select_backend(PROBLEM)
    read = Selection.from_json(found.to_json())
    assert (read.decisions, read.fingerprint) == (found.decisions, found.fingerprint)
    old = found.to_dict()
    for decision in old["decisions"]:
        del decision["evidence"]
    read = Selection.from_dict(old)
    assert {decision.evidence for decision in read.decisions} == {""}
    old["decisions"][0]["evidence"] = "hearsay"
    with pytest.raises(ValueError, match=r"decisions\[0\].evidence"):
        Selection.from_dict(old)

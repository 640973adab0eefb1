"""Admission: where nothing vouches for a kernel on this machine, it is checked on the layer's weights before it serves.

checked         makes the winner's kernel and, if need be, compares a few calls with the reference
admitted        keeps what passed, so that it is not checked again
next_choice     quarantines what failed and says which candidate is next
checked_plan    does the same for the other candidates of a plan, which goes if one of them fails
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

from moereg.errors import (
    AdmissionWarning,
    BackendError,
    MoeregError,
    RecordFileError,
    RecordFileWarning,
    described,
    is_lack_of_memory,
)
from moereg.evidence.ledger import evidence_of
from moereg.evidence.on_machine import (
    ADMITTED,
    ADMITTED_TIER,
    QUARANTINE,
    AdmissionRecord,
    MachineRecord,
    QuarantineRecord,
)
from moereg.layer.kernel import MoEKernel
from moereg.layer.ranges import RangeExperts, only_candidate
from moereg.layer.train_op import CallTensors, Tokens, most_saved_bytes
from moereg.numerics.gradients import Comparison, reference_gradients
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.prepare_finalize import resolve_prepare_finalize
from moereg.quantize import activation_scale
from moereg.registry import BackendCell
from moereg.runtime.graph_pools import outside_pools
from moereg.runtime.torch_state import plain_torch
from moereg.selection.decide import without_winner
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.adapters import ExpertAdapters, adapter_shapes
from moereg.weights.permuted import ExpertWeights

logger: Final = logging.getLogger("moereg")

_TOKENS: Final = (1, 48)
"""Numbers of tokens of the calls: kernels take other ways for one token than for many."""
_NUM_RUNS: Final = 2
"""Runs of each call without gradients, since the first one may find scratch memory that happens to hold zeros."""
_SEED: Final = 33
_MOST_WEIGHTS: Final = 2**27
"""Most weights of the experts that tokens are routed to: on one core of a CPU the check takes 2 s then."""
_MOST_TRAINED: Final = 2**24
"""Likewise where gradients are compared, in fp64 and with gradients of all these weights."""
_MIN_ROUTE_WEIGHT: Final = 0.1
_STATIC_SPREAD: Final = 4.0
"""Standard deviations of tokens up to the largest that static activation scales are made for."""
_RANGE_MARGIN: Final = 100.0

_OUTPUT: Final = "output"

_Key = tuple[object, ...]
_Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Compare = Callable[[], list[Comparison]]

_HERE: Final[dict[_Key, str]] = {}
"""Outcomes that no file keeps, for this process: why a cell failed, or an empty text."""


class CheckResult(NamedTuple):
    """The outcome of a kernel's check.

    Attributes:
        failure: Why the kernel must not serve; empty if it may.
        error, bound: Largest relative error, and the bound of that call; both 0 if no numbers were compared.
    """

    failure: str = ""
    error: float = 0.0
    bound: float = 0.0


class _Subject(NamedTuple):
    """The winner of a selection: one scheme of a cell on this machine, with or without gradients."""

    cell: BackendCell
    scheme: QuantScheme
    platform: Platform
    trains: bool

    @classmethod
    def of(cls, selection: Selection) -> _Subject:
        winner = selection.chosen
        assert winner.cell is not None and winner.scheme is not None
        return cls(winner.cell, winner.scheme, selection.platform, bool(selection.problem.gradients))

    @property
    def key(self) -> _Key:
        """Changes with code and versions, as files of records do."""
        return _key_of(MachineRecord.of(*self[:3], trains=self.trains))

    def failed(self, failure: str) -> QuarantineRecord:
        """The record of a failure."""
        return QuarantineRecord.failed(*self[:3], failure, self.trains)

    @property
    def is_admitted(self) -> bool:
        return ADMITTED.read().record(*self) is not None

    def known(self) -> str | None:
        """Why it must not serve here; empty if it may, None if it has to be checked first."""
        held = QUARANTINE.read().record(*self)
        if held is not None:
            return held.failure
        if _HERE and (failure := _HERE.get(self.key)) is not None:
            return failure
        return "" if self.is_admitted or _is_verified(self.cell, self.platform) else None


def _key_of(record: MachineRecord) -> _Key:
    return (*record.key, record.digest, *sorted(record.versions.items()))


@functools.lru_cache(maxsize=1024)
def _is_verified(cell: BackendCell, platform: Platform) -> bool:
    return evidence_of(cell).on(platform) is not None


def check_first_use(
    selection: Selection, weights: ExpertWeights, make: Callable[[Selection], MoEKernel]
) -> tuple[MoEKernel | None, CheckResult]:
    """Makes the winner's kernel, and checks it if it is to run on this machine and nothing vouches for it here.

    Not checked are kernels on `meta` and those made while a CUDA graph is captured. What cannot be judged, such as
    weights that are zeros or NaN, passes without a record. Gradients are checked where the problem has some. Raises
    where the kernel took the device down, so that no other one can run in this process.

    Returns:
        The kernel, None if it must not serve, and what was found.
    """
    if not _can_check(selection, weights.w13.device):
        return make(selection), CheckResult()
    subject = _Subject.of(selection)
    failure = subject.known()
    if failure is not None:
        return (None, CheckResult(failure)) if failure else (make(selection), CheckResult())
    try:
        kernel = make(selection)
    except BackendError as error:
        return None, CheckResult(f"its first check could not make a kernel: {described(error.__cause__ or error)}")
    start = time.perf_counter()
    found = outside_pools(lambda: _compared(kernel, weights), weights.w13.device)
    if found.failure:
        return None, found
    if not found.bound:
        _HERE[subject.key] = ""
    logger.info("first check of %r took %.1f s: %s", kernel, time.perf_counter() - start, found)
    return kernel, found


def _can_check(selection: Selection, device: torch.device) -> bool:
    if not _keeps_records(selection) or device.type == "meta":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def _keeps_records(selection: Selection) -> bool:
    return selection.platform.probed and ADMITTED.path() is not None


def _compared(kernel: MoEKernel, weights: ExpertWeights) -> CheckResult:
    """Compares calls, and passes forward and backward if the problem has gradients, with the reference."""
    # Over a group the experts are called alone.
    local = resolve_prepare_finalize(kernel.selection.problem, None)
    ranges = (RangeExperts(None, kernel.selection, kernel.experts),)
    problem = kernel.selection.problem
    checking = MoEKernel(problem, kernel.selection, ranges, kernel.weights, local, kernel.expert_map)
    worst, is_whole = CheckResult(), not kernel.selection.problem.gradients
    try:
        # What the caller keeps of its own pass, as checkpointing does, is none of what is compared.
        with plain_torch(), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            for num_tokens, compare, trains in _comparisons(checking, weights):
                found = _judged(checking, num_tokens, compare)
                if found.failure:
                    return found
                worst, is_whole = max(worst, found, key=_closeness), is_whole or trains
    except Exception as error:
        if not is_lack_of_memory(error):
            raise
        return CheckResult()
    return worst if is_whole else CheckResult()  # Nothing was seen of its gradients.


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _judged(checking: MoEKernel, num_tokens: int, compare: _Compare) -> CheckResult:
    """Runs a call, and compares its numbers."""
    worst = CheckResult()
    try:
        compared = compare()
    except Exception as raised:
        is_callers = isinstance(raised, MoeregError) and not isinstance(raised, BackendError)
        if is_callers or is_lack_of_memory(raised):
            raise
        text = f"its first check raised at T {num_tokens}: {described(raised.__cause__ or raised)}"
        return CheckResult(_after(checking.selection, text, checking.weights.device))
    for name, error, bound in compared:
        if math.isnan(error):
            return CheckResult(f"its first check left NaN in the {name} at T {num_tokens}")
        if error > bound:
            where = "" if name == _OUTPUT else f" in the {name}"
            return CheckResult(f"its first check was off by {error:.2g}{where} at T {num_tokens}, bound {bound:.2g}")
        worst = max(worst, CheckResult("", error, bound), key=_closeness)
    return worst


def _closeness(found: CheckResult) -> float:
    """How close an error comes to its bound; below 0 where nothing was compared."""
    return found.error / found.bound if found.bound else -1.0


def _comparisons(checking: MoEKernel, weights: ExpertWeights) -> Iterator[tuple[int, _Compare, bool]]:
    """Yields a number of tokens, what runs and compares such a call, and whether it compares gradients."""
    problem, winner = checking.problem, checking.selection.chosen
    training = None
    if problem.gradients:
        *_, call = _calls(problem, weights, winner, _MOST_TRAINED)
        training = _training(checking, weights, call)
    for call in _calls(problem, weights, winner, _MOST_WEIGHTS):
        truth = reference_experts(problem, weights, *call, checking.expert_map, computes=winner.scheme)
        for _ in range(_NUM_RUNS if _is_in_range(problem, truth) else 0):
            yield len(call[0]), functools.partial(_outputs, checking, call, truth), False
    if training is not None:
        yield len(call[0]), training, True


def _outputs(checking: MoEKernel, call: _Tensors, truth: torch.Tensor) -> list[Comparison]:
    out = torch.full_like(call[0], math.nan)
    bound = layer_tolerance(checking.problem, len(out), _Subject.of(checking.selection).scheme)
    return [Comparison(_OUTPUT, relative_error(checking(*call, out=out), truth), bound)]


def _training(checking: MoEKernel, weights: ExpertWeights, call: _Tensors) -> _Compare | None:
    """Makes what runs a pass forward and backward and compares its numbers; None if they would show nothing.

    The reference has those of the experts that get tokens; the other experts' gradients are zeros.
    """
    problem, device, num_tokens = checking.problem, weights.w13.device, len(call[0])
    generator = torch.Generator("cpu").manual_seed(_SEED)

    def drawn(*shape: int) -> torch.Tensor:
        random = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return (random / math.sqrt(shape[-1])).to(problem.torch_dtype).to(device)

    everyone = torch.arange(problem.num_experts, device=device)
    place = everyone if checking.expert_map is None else checking.expert_map.long()
    numbers = torch.full((problem.num_local_experts + 1,), -1, dtype=torch.int32, device=device)
    numbers[place[call[2].long()]] = 0
    numbers[-1] = -1  # The place of experts that are not here.
    active, idle = (numbers[:-1] == 0).nonzero().view(-1), (numbers[:-1] < 0).nonzero().view(-1)
    if not len(active):
        return None
    numbers[active] = everyone[: len(active)].int()
    part = dataclasses.replace(problem, num_local_experts=len(active), placement="map")
    tensors = {name: tensor[active] if tensor.dim() else tensor for name, tensor in weights.tensors().items()}
    shapes = adapter_shapes(part, problem.adapter_rank) if problem.adapter_rank else {}
    own: dict[str, Any] = {name: drawn(*shape) for name, shape in shapes.items()}
    factors: dict[str, Any] = {
        name: factor.new_zeros(problem.num_local_experts, *factor.shape[1:]).index_copy_(0, active, factor)
        for name, factor in own.items()
    }
    grad_out, adapters = drawn(*call[0].shape), ExpertAdapters(**own) if own else None
    held = ExpertWeights.unchecked(tensors, weights.scheme)
    truth = reference_gradients(part, held, *call, grad_out, numbers[place], adapters)
    trained = weights.tensors() if "weights" in problem.gradients else {}
    given = CallTensors(trained, ExpertAdapters(**factors) if own else None)
    of_experts = {**trained, **factors}
    likes = {"hidden_states": call[0], "topk_weights": call[1]}
    likes = {**{name: like for name, like in likes.items() if name in problem.gradients}, **of_experts}
    # Only a few: to fill the gradients of all experts of a large layer takes seconds on a CPU.
    idle = idle[: len(active)]

    def compare() -> list[Comparison]:
        # Bytes of NaN. Workspaces hold what earlier calls left.
        saved = torch.full((most_saved_bytes(problem, num_tokens),), 255, dtype=torch.uint8, device=device)
        found = {name: torch.empty_like(like) for name, like in likes.items()}
        for name, tensor in found.items():
            tensor[torch.cat((active, idle)) if name in of_experts else ...] = math.nan
        out = checking.run_saving(Tokens(*call), given, saved)
        checking.run_backward(found, grad_out, saved, Tokens(*call), given)
        bound = layer_tolerance(problem, num_tokens, _Subject.of(checking.selection).scheme)
        compared = [Comparison("output that gradients are of", relative_error(out, truth.output), bound)]
        for name in of_experts:
            error = math.inf if found[name][idle].any() else 0.0
            compared.append(Comparison(f"gradient of {name} of experts without tokens", error, 0.0))
            found[name] = found[name][active]
        for name, error, bound in truth.compare(found):
            compared.append(Comparison(f"gradient of {name.partition(' of ')[0]}", error, bound))
        return compared

    return compare if all(_is_in_range(problem, truth.tensors[name]) for name in likes) else None


def _calls(problem: MoEProblem, weights: ExpertWeights, winner: Decision, most_weights: int) -> Iterator[_Tensors]:
    """Random tokens and routes, with a generator of their own, to experts with so many weights."""
    generator = torch.Generator("cpu").manual_seed(_SEED)
    device, scheme = weights.w13.device, winner.scheme
    spread = 1.0
    if weights.a13_scale is not None and scheme is not None and scheme.activation is not None:
        unit = activation_scale(torch.ones((), device="cpu"), scheme)
        spread = float(weights.a13_scale.float().amax()) / float(unit) / _STATIC_SPREAD

    def drawn(*shape: int, draw: Callable[..., torch.Tensor] = torch.rand) -> torch.Tensor:
        return draw(shape, generator=generator, dtype=torch.float32, device="cpu")

    of_one = (problem.activation.num_halves + 1) * problem.hidden_size * problem.intermediate_size
    share = most_weights // of_one / problem.num_local_experts
    num_experts = min(problem.num_experts, max(problem.top_k, int(share * problem.num_experts)))
    order = drawn(problem.num_experts)
    order[-1] = 1.0  # The last expert is among them: an offset that overflows does so there.
    experts = order.topk(num_experts).indices
    for most in _TOKENS:
        num_tokens = min(most, problem.max_num_tokens or most)
        tokens = drawn(num_tokens, problem.hidden_size, draw=torch.randn) * spread
        topk_ids = experts[drawn(num_tokens, num_experts).topk(problem.top_k, dim=1).indices]
        # A weight near 0 would hide a wrong route.
        topk_weights = drawn(num_tokens, problem.top_k) + _MIN_ROUTE_WEIGHT
        yield (
            tokens.to(problem.torch_dtype).to(device),
            (topk_weights / (_MIN_ROUTE_WEIGHT + topk_weights.sum(1, keepdim=True))).to(device),
            topk_ids.int().to(device),
        )


def _is_in_range(problem: MoEProblem, truth: torch.Tensor) -> bool:
    """Whether the bounds, which assume the dtype's full precision, hold: not for weights of zeros or NaN."""
    dtype = torch.finfo(problem.torch_dtype)
    size = float(truth.square().mean().sqrt())
    return dtype.tiny * _RANGE_MARGIN <= size <= dtype.max / _RANGE_MARGIN


def _after(selection: Selection, failure: str, device: torch.device) -> str:
    """The failure, if the device still answers."""
    if device.type == "cpu":
        return failure
    try:
        torch.zeros(1, device=device).item()
    except Exception as lost:
        winner = selection.chosen
        _quarantine(_Subject.of(selection).failed(failure))
        raise BackendError(
            f"backend {winner.backend!r} of {winner.provider} took the device down: {failure}; it is quarantined, so "
            "start the process again to run on another one",
            winner.backend,
            winner.origin,
        ) from lost
    return failure


def mark_admitted(kernel: MoEKernel, found: CheckResult) -> MoEKernel:
    """Keeps what passed on this machine, and says so in the kernel's selection.

    If the file cannot be written, issues one `RecordFileWarning`, and this process remembers it.
    """
    selection = kernel.selection
    if not _keeps_records(selection):
        return kernel
    subject = _Subject.of(selection)
    if found.bound:
        try:
            given: dict[str, Any] = {"trains": subject.trains, "error": found.error, "bound": found.bound}
            ADMITTED.change([AdmissionRecord.of(*subject[:3], **given)])
        except RecordFileError as error:
            _HERE[subject.key] = ""
            _warn_once(str(error))
    if subject.is_admitted and selection.winner is not None:
        kernel.selection = _with_evidence(selection, selection.winner)
    return kernel


def _with_evidence(selection: Selection, decision: Decision) -> Selection:
    """The selection whose decision is admitted, wherever it stands."""
    said = dataclasses.replace(decision, evidence=ADMITTED_TIER)
    decisions = tuple(said if one is decision else one for one in selection.decisions)
    ranges = tuple((most, said if one is decision else one) for most, one in selection.ranges)
    return dataclasses.replace(selection, decisions=decisions, ranges=ranges)


def unchecked_candidates(selection: Selection) -> list[Decision]:
    """The candidates of a plan beside its winner that nothing vouches for here."""
    if not _keeps_records(selection):
        return []
    others = {id(one): one for _, one in selection.ranges if one is not selection.winner}
    return [one for one in others.values() if _Subject.of(only_candidate(selection, one)).known() != ""]


def check_plan(selection: Selection, weights: ExpertWeights, make: Callable[[Selection], MoEKernel]) -> Selection:
    """Checks the candidates of a plan beside its winner, with a copy of the weights of its own for one at a time.

    Returns:
        The selection, without ranges if one of them failed; that one is quarantined with a warning.
    """
    for decision in unchecked_candidates(selection):
        own = only_candidate(selection, decision)
        kernel, found = check_first_use(own, weights, make)
        if kernel is None:
            next_choice(own, found.failure)
            return dataclasses.replace(selection, ranges=())
        if mark_admitted(kernel, found).selection.decisions[0].evidence:
            selection = _with_evidence(selection, decision)
    return selection


@functools.lru_cache(maxsize=16)
def _warn_once(text: str) -> None:
    warnings.warn(f"{text}; until then each process checks kernels again", RecordFileWarning, stacklevel=5)


def next_choice(selection: Selection, failure: str) -> Selection:
    """Quarantines the winner on this machine for a failure, and returns the selection without it.

    Issues one `AdmissionWarning`, unless the failure was known. Raises if no other candidate fits, such as when the
    request requires the one that failed.
    """
    subject, winner = _Subject.of(selection), selection.chosen
    is_known = bool(subject.known())
    record = subject.failed(failure)
    held = "it is quarantined" if is_known else _quarantine(record)
    found = without_winner(selection, record.reason)
    about = (
        f"backend {winner.backend!r} of {winner.provider} ({winner.experts}) does not serve on this machine: {failure}"
    )
    cure = f"moereg verify {winner.backend} says more"
    if found.winner is None:
        allowed = " that the request allows" if selection.request.require or selection.request.deny else ""
        raise BackendError(
            f"{about}; {held}, and no other backend{allowed} fits; {cure}", winner.backend, winner.origin
        )
    if not is_known:
        taken = f"{found.winner.backend} ({found.winner.experts})"
        warnings.warn(f"{about}; {held}, and {taken} is next; {cure}", AdmissionWarning, stacklevel=4)
    return found


def _quarantine(record: QuarantineRecord) -> str:
    """Quarantines a cell, and says until when."""
    try:
        QUARANTINE.change([record])
    except RecordFileError:
        _HERE[_key_of(record)] = record.failure
        return "it is left out in this process"
    return "it is quarantined"

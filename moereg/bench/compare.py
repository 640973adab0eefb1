"""Compares every candidate that fits a problem, on the same weights and inputs: first numbers, then time.

References and inputs are made before any candidate's code runs. Each candidate gets its own inputs and outputs. Weights
are too large to copy, so they are shared and watched. A candidate that writes to them is wrong, the report names the
tensors, and they are restored so that others are not harmed. The same goes for torch's ambient state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch

from moereg.bench.inputs import Call
from moereg.bench.roofline import Ceilings, Traffic, roofline_us, work_of
from moereg.bench.timing import ROUNDS, SECONDS, Run, Timing, is_replay, kernel_runs, time_kernels, time_runs, wait_for
from moereg.errors import BackendError, described, is_lack_of_memory
from moereg.layer.backend_calls import make_experts, named
from moereg.layer.factory import MoEKernel, make_unchecked_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.runtime.torch_state import AmbientState
from moereg.selection.result import Decision, Selection
from moereg.weights.permuted import ExpertWeights
from moereg.weights.unpermute import same_bits
from moereg.weights.versions import checksums

Phase = Callable[[str], contextlib.AbstractContextManager[Callable[[int, int], object]]]
"""Shows a long step, given its name; yields a callback for (done, all)."""

Watch = Callable[[Decision, str], object]
"""Called with the candidate and method to run next, since a crash leaves no other trace."""

IN_TURNS: Final = "apply, in turns with others"
"""The step that is watched for each candidate before all are timed: a crash in it is any one's of them."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One candidate's results for one number of tokens.

    Attributes:
        relative_error: Error against the reference; NaN if the output has a NaN or is missing. From the first call, or
            the first one after timing that exceeds the bound, `tolerance`.
        failure, error: The exception's text, empty if it ran, and the exception.
        timing: None if the numbers are wrong.
        flops, num_bytes: Mean over the calls.
        roofline_us: Time that the device could reach; NaN if unknown.
        damage: Memory or state that it changed but must not; empty if none.
        first_ms: Time until the first call's output was compared, including compiling and tuning.
        graph: Whether replays of CUDA graphs were timed.
        is_culprit: Whether what went wrong is its own fault; False where it may be another's, or nothing was measured.
    """

    decision: Decision
    num_tokens: int
    relative_error: float
    tolerance: float
    failure: str
    timing: Timing | None
    flops: float
    num_bytes: float
    roofline_us: float
    damage: str = ""
    error: Exception | None = dataclasses.field(default=None, compare=False, repr=False)
    first_ms: float = math.nan
    graph: bool = False
    is_culprit: bool = False

    @property
    def passed(self) -> bool:
        """Whether it ran, wrote only its output, and its error is within the tolerance."""
        return not self.failure and not self.damage and self.relative_error <= self.tolerance  # False for NaN.

    @property
    def reason(self) -> str:
        """The cause of a failure; empty if it passed and was timed."""
        if self.failure or self.damage or self.timing is not None:
            return self.failure or self.damage
        return f"wrong numbers: error {self.relative_error:.2e} > {self.tolerance:.1e}"

    @property
    def lacks_memory(self) -> bool:
        """Whether it failed for lack of memory, which is nobody's fault."""
        error = self.error
        return error is not None and any(is_lack_of_memory(one) for one in (error, error.__cause__) if one is not None)

    @property
    def time_us(self) -> float:
        """The median; NaN, like the rates, if it was not timed."""
        return self.timing.median_us if self.timing else math.nan

    @property
    def tflops(self) -> float:
        """Rate of operations in TFLOPS."""
        return self.flops / self.time_us / 1e6

    @property
    def gbps(self) -> float:
        """Rate of moving the necessary bytes in GB/s."""
        return self.num_bytes / self.time_us / 1e3

    @property
    def share(self) -> float:
        """Share of the roofline; 1 is the device's limit."""
        return self.roofline_us / self.time_us


_State = tuple[int, int, int, tuple[int, ...]]
"""Address and bytes of the storage, torch's count of writes, checksums."""


class WatchedTensors:
    """Remembers tensors' contents by checksums, without a second copy of gigabytes.

    Writes that torch does not count, by kernels and through `.data`, change the bytes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Reads all tensors, contiguous ones by name on one device, which synchronizes."""
        self._tensors: Final = dict(tensors)
        self._states: dict[str, _State] = {}
        self.renew()

    def written(self) -> tuple[str, ...]:
        """Names of tensors written since they were last read or restored."""
        return tuple(name for name in self._tensors if self._state(name) != self._states[name])

    def restore(self, pristine: Mapping[str, torch.Tensor]) -> None:
        """Writes the original contents back into the same memory, which others' views may share."""
        for name, tensor in self._tensors.items():
            storage, num_bytes = tensor.untyped_storage(), self._states[name][1]
            if storage.nbytes() != num_bytes:
                storage.resize_(num_bytes)
            with torch.no_grad():
                tensor.copy_(pristine[name])
        self.renew()

    def renew(self) -> None:
        """Takes the current contents as the expected ones."""
        self._states = {name: self._state(name) for name in self._tensors}

    def _state(self, name: str) -> _State:
        tensor = self._tensors[name]
        wait_for(tensor.device)
        storage = tensor.untyped_storage()
        version = 0 if tensor.is_inference() else tensor._version
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        sums = checksums(tensor) if storage.nbytes() >= end else ()
        return storage.data_ptr(), storage.nbytes(), version, sums


class _OwnCalls:
    """One candidate's own copies of calls, outputs filled with NaN, and runs on them once it is known to be right."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._pristine = calls
        self.calls = [Call(*(tensor.clone() for tensor in call)) for call in calls]
        self.outs = [torch.full_like(call.hidden_states, math.nan) for call in calls]
        self.runs: list[Run] = []

    def written(self) -> tuple[str, ...]:
        """Names of inputs that differ from their originals or that torch saw written."""
        names: dict[str, None] = {}
        for own, call in zip(self.calls, self._pristine, strict=True):
            for name, tensor, pristine in zip(Call._fields, own, call, strict=True):
                if (not tensor.is_inference() and tensor._version) or not same_bits(tensor, pristine):
                    names[name] = None
        return tuple(names)


_Errors = MutableMapping[Decision, Exception]


@dataclasses.dataclass
class _Findings:
    """Findings on the candidates for one number of tokens, or before any call."""

    relative_errors: dict[Decision, float] = dataclasses.field(default_factory=dict)
    errors: dict[Decision, Exception] = dataclasses.field(default_factory=dict)
    damages: dict[Decision, str] = dataclasses.field(default_factory=dict)
    timings: dict[Decision, Timing] = dataclasses.field(default_factory=dict)
    first_ms: dict[Decision, float] = dataclasses.field(default_factory=dict)
    graphs: set[Decision] = dataclasses.field(default_factory=set)


class Comparison:
    """The accepted candidates of a selection, all built on the same weights, so that they run in turns.

    A candidate that raises, or writes outside its own tensors, does not affect the others. A GPU reports an invalid
    access only at the next synchronization, and from then on nothing else.

    Attributes:
        candidates: Those that are measured, in the selection's order.
        permute_ms: Time to permute the weights, by candidate.
        stopped: Why nothing more can be measured in this process; None while it can.
    """

    @torch.no_grad()
    def __init__(
        self,
        selection: Selection,
        make_weights: Callable[[], ExpertWeights],
        inputs: Mapping[Any, Sequence[Call]],
        phase: Phase = lambda description: contextlib.nullcontext(lambda done, total: None),
        watch: Watch = lambda decision, step: None,
    ) -> None:
        """Makes the weights and the references, then permutes the weights for every accepted candidate.

        Args:
            selection: A selection for this machine.
            make_weights: Makes the canonical weights; called again for the same weights if a candidate wrote to them.
            inputs: Calls by key, such as the number of tokens; at least one each, all with as many tokens. Copied for
                each candidate.
            phase, watch: Shows progress; called before a candidate's code runs.
        """
        self.problem: Final = selection.problem
        self.permute_ms: Final[dict[Decision, float]] = {}
        self._make_weights: Final = make_weights
        self._inputs: Final[dict[Hashable, tuple[Call, ...]]] = {}
        self.candidates: Final = [decision for decision in selection.decisions if decision.accepted]
        self._kernels: Final[dict[Decision, MoEKernel]] = {}
        self._found: Final = _Findings()
        self.weights: Final = make_weights().contiguous()
        self._references: Final[dict[Hashable, dict[str, list[torch.Tensor]]]] = {}
        self._works: Final[dict[Hashable, list[Traffic]]] = {}
        with phase("computing references"):
            for key, calls in inputs.items():
                self.add(key, calls)
        self._watch: Final = watch
        self._selection: Final = selection
        self._device: Final = self.weights.w13.device
        self._unsure: Final[set[Decision]] = set()  # With an error or damage that may be another's.
        self.stopped: BackendError | None = None
        self._watched: Final = WatchedTensors(self.weights.tensors())
        self._torch = AmbientState.now()
        with phase("permuting weights") as advance:
            for number, decision in enumerate(self.candidates, start=1):
                if self.stopped is None:
                    self._permute(selection, decision)
                advance(number, len(self.candidates))

    @torch.no_grad()
    def add(self, key: Hashable, calls: Sequence[Call]) -> None:
        """Adds inputs, and references of the first and last call; no candidate has changed the weights by then."""
        self._inputs[key] = tuple(calls)
        checked = [calls[place] for place in _checked_places(calls)]
        # By computed scheme, which may leave activations at 16 bits.
        schemes = {decision.computes: decision.scheme for decision in self.candidates if decision.cell is not None}
        self._references[key] = {
            name: [reference_experts(self.problem, self.weights, *call, computes=scheme) for call in checked]
            for name, scheme in schemes.items()
        }
        self._works[key] = [work_of(self.problem, call) for call in calls]

    def remove(self, key: Hashable) -> None:
        """Frees a key's inputs and references."""
        for values in (self._inputs, self._references, self._works):
            values.pop(key, None)

    def leave_out(self, decision: Decision) -> None:
        """Measures a candidate no more, and frees its weights."""
        self.candidates.remove(decision)
        self._kernels.pop(decision, None)

    @torch.no_grad()
    def measure(
        self, key: Hashable, ceilings: Ceilings | None, rounds: int = ROUNDS, seconds: float = SECONDS
    ) -> list[Measurement]:
        """Compares the candidates with the reference, and times the right ones in turns; in the selection's order.

        A candidate takes so many samples (`rounds`), or no more than three once it has taken so many seconds.
        """
        found = _Findings(errors=dict(self._found.errors), damages=dict(self._found.damages))
        self._torch = AmbientState.now()  # The caller may have set another device.
        for decision in list(self._kernels):
            if self.stopped is None:
                self._check(found, decision, key)
        if self.stopped is None:
            self._time(found, key, rounds, seconds)
        if self.stopped is not None:
            is_judged = found.timings.keys() | found.damages.keys()
            errors = found.relative_errors
            # NaN is wrong.
            unjudged = [one for one in self.candidates if errors.get(one, 0.0) <= self._bound(one, key)]
            self._skip(found.errors, [one for one in unjudged if one not in is_judged])
        works = self._works[key]
        best_us = math.nan if ceilings is None else roofline_us(works, ceilings)
        return [
            Measurement(
                decision=decision,
                num_tokens=self._num_tokens(key),
                relative_error=found.relative_errors.get(decision, math.nan),
                tolerance=self._bound(decision, key),
                failure=_text(found.errors.get(decision)),
                timing=found.timings.get(decision),
                flops=statistics.fmean(work.flops for work in works),
                num_bytes=statistics.fmean(work.num_bytes for work in works),
                roofline_us=best_us,
                damage=found.damages.get(decision, ""),
                error=found.errors.get(decision),
                first_ms=found.first_ms.get(decision, math.nan),
                graph=decision in found.graphs,
                is_culprit=decision not in found.timings and decision not in self._unsure,
            )
            for decision in self.candidates
        ]

    @torch.no_grad()
    def time_again(self, key: Hashable, rounds: int = ROUNDS, seconds: float = SECONDS) -> dict[Decision, Timing]:
        """Times previously measured candidates again in turns, without comparing."""
        return time_kernels(self._kernels, self._inputs[key], rounds, seconds)

    def workspace_bytes(self, decision: Decision, num_tokens: int) -> int:
        """Bytes of a candidate's two workspaces for a call; KeyError if it could not be built, or was excluded."""
        shapes = self._kernels[decision].experts.workspace_shapes(self.problem, num_tokens)
        return sum(math.prod(shape) for shape in shapes) * self.problem.torch_dtype.itemsize

    def output(self, decision: Decision, key: Hashable) -> torch.Tensor:
        """A candidate's output of a key's first call, [T,H], NaN where it writes nothing; KeyError as above."""
        call = self._inputs[key][0]
        written = torch.full_like(call.hidden_states, math.nan)
        self._kernels[decision](*call, out=written)
        return written

    def reference(self, decision: Decision, key: Hashable) -> torch.Tensor:
        """The reference for a candidate's output of a key's first call, [T,H] fp32."""
        return self._references[key][decision.computes][0]

    def _num_tokens(self, key: Hashable) -> int:
        return len(self._inputs[key][0].hidden_states)

    def _permute(self, selection: Selection, decision: Decision) -> None:
        chosen = dataclasses.replace(selection, decisions=(decision,), source="required")
        # Aliases, so that a candidate cannot rebind our tensors' memory.
        aliases = {name: tensor.detach() for name, tensor in self.weights.tensors().items()}
        weights = dataclasses.replace(self.weights, **aliases)  # type: ignore[arg-type]
        device = self.weights.w13.device
        with self._naming(self._found.errors, decision, "permute_weights"):
            make_experts(chosen, decision)  # Loads the backend's code before permuting is timed.
            wait_for(device)
            start = time.perf_counter()
            self._kernels[decision] = make_unchecked_kernel(self.problem, weights, chosen)
            wait_for(device)
            self.permute_ms[decision] = (time.perf_counter() - start) * 1e3
        if decision in self._found.errors:
            self._kernels.pop(decision, None)
        self._blame(self._found, decision, "permute_weights")

    def _check(self, found: _Findings, decision: Decision, key: Hashable) -> None:
        """Compares the output of the first call."""
        reference = self._references[key][decision.computes][0]
        with self._naming(found.errors, decision, "apply"):
            own = _OwnCalls(self._inputs[key][:1])
            start = time.perf_counter()
            with self._naming(found.errors, decision, "apply"):
                found.relative_errors[decision] = output_error(self._kernels[decision], own.calls[0], reference)
                found.first_ms[decision] = (time.perf_counter() - start) * 1e3
            self._blame(found, decision, "apply", own)

    def _blame(self, found: _Findings, decision: Decision, step: str, own: _OwnCalls | None = None) -> bool:
        """Reports writes and state changes since the last time, if any, and restores weights and torch's state."""
        has_written = True  # Where this raises, writes cannot be attributed.
        with self._naming(found.errors, decision, step):
            if changed := self._torch.restore():
                found.damages[decision] = self._found.damages[decision] = f"{step} {_changed(changed)}"
                self._kernels.pop(decision, None)
            inputs = own.written() if own else ()
            if inputs:
                found.damages[decision] = f"{step} wrote to its inputs ({', '.join(inputs)})"
            if written := self._watched.written():
                # Excluded for good, since it may have written to its own weights.
                found.damages[decision] = self._found.damages[decision] = f"{step} {_wrote(written)}"
                # Frees its permuted weights first, which may be as large as the new ones.
                self._kernels.pop(decision, None)
                if own:
                    own.runs.clear()
                self._restore(found, [decision])
            has_written = bool(changed or inputs or written)
        return has_written

    def _restore(self, found: _Findings, writers: Sequence[Decision]) -> None:
        try:
            if len(self.candidates) > 1:  # Otherwise no later candidate can be harmed.
                self._watched.restore(self._make_weights().tensors())
            else:
                self._watched.renew()
        except Exception as error:
            deed = f"wrote to the layer's weights, which could not be made anew: {described(error)}"
            self._stop(found.errors, writers, deed)

    def _bound(self, decision: Decision, key: Hashable) -> float:
        return layer_tolerance(self.problem, self._num_tokens(key), decision.scheme or decision.computes)

    def _is_right(self, found: _Findings, decision: Decision, key: Hashable) -> bool:
        is_whole = decision not in found.errors and decision not in found.damages
        return is_whole and found.relative_errors[decision] <= self._bound(decision, key)

    @contextlib.contextmanager
    def _naming(self, errors: _Errors, decision: Decision, step: str) -> Iterator[None]:
        """Records the candidate's first exception within the context, in its method `step`."""
        self._watch(decision, step)
        try:
            yield
        except Exception as error:
            found = named(dataclasses.replace(self._selection, decisions=(decision,), source="required"), step, error)
            assert isinstance(found, Exception)
            # Frames keep the candidate's weights and workspaces alive.
            for raised in (error, error.__cause__):
                traceback.clear_frames(raised.__traceback__ if raised else None)
            errors.setdefault(decision, found)
            self._stop_if_lost(errors, [decision], step, error)

    def _stop_if_lost(self, errors: _Errors, decisions: Sequence[Decision], step: str, error: Exception) -> None:
        """If the device no longer answers, records that one of the backends that ran took it down."""
        try:
            wait_for(self._device)
        except Exception:
            if decisions:
                self._stop(errors, decisions, f"took the device down in {step}: {described(error)}")

    def _skip(self, errors: _Errors, decisions: Sequence[Decision]) -> None:
        """Records why candidates were not measured."""
        assert self.stopped is not None
        self._unsure.update(decisions)
        for decision in decisions:
            name, origin = self.stopped.backend, self.stopped.origin
            errors.setdefault(decision, BackendError(f"not measured, since {self.stopped}", name, origin))

    def _stop(self, errors: _Errors, decisions: Sequence[Decision], deed: str) -> None:
        """Records that a backend did something after which no other can be judged."""
        who = " or ".join(f"backend {decision.backend!r} of {decision.origin}" for decision in decisions)
        first = decisions[0]
        cure = f"do without it (--deny {first.backend})" if len(decisions) == 1 else "run them one by one (--require)"
        found = BackendError(f"{who} {deed}; {cure}", first.backend, first.origin)
        self.stopped = self.stopped or found
        if len(decisions) > 1:
            self._unsure.update(decisions)
        for decision in decisions:
            errors.setdefault(decision, found)

    def _time(self, found: _Findings, key: Hashable, rounds: int, seconds: float) -> None:
        """Times the right candidates, and drops the times of those that are wrong afterwards."""
        device = self.weights.w13.device
        owns: dict[Decision, _OwnCalls] = {}
        for decision in [one for one in self._kernels if self._is_right(found, one, key)]:
            # For example, a kernel cannot be captured although its facts say so.
            with self._naming(found.errors, decision, "apply"):
                own = _OwnCalls(self._inputs[key])
                own.runs.extend(kernel_runs(self._kernels[decision], own.calls, own.outs))
                owns[decision] = own
                if is_replay(own.runs[0]):
                    found.graphs.add(decision)
            if decision in found.errors:
                self._blame(found, decision, "apply")
            if self.stopped is not None:
                return
        for decision in owns:
            self._watch(decision, IN_TURNS)
        try:
            found.timings = time_runs({one: own.runs for one, own in owns.items()}, device, rounds, seconds)
            is_clean = True
        except Exception as error:
            is_clean = False
            self._stop_if_lost(found.errors, list(owns), "apply", error)
        if len(owns) == 1 and self.stopped is None:  # The culprit is already known.
            (only,) = owns
            self._blame(found, only, "apply", owns[only])
        changed = self._torch.restore()
        written = self._watched.written() if self.stopped is None else ()
        if (written or changed or not is_clean) and self.stopped is None:
            self._time_one_by_one(found, owns, rounds, seconds, written, changed)
        for decision in list(found.timings):
            if self.stopped is None and self._is_right(found, decision, key):
                self._check_again(found, decision, owns[decision], key)
                if self._is_right(found, decision, key):
                    continue
            del found.timings[decision]

    def _time_one_by_one(
        self,
        found: _Findings,
        owns: Mapping[Decision, _OwnCalls],
        rounds: int,
        seconds: float,
        written: tuple[str, ...],
        changed: tuple[str, ...],
    ) -> None:
        """Runs candidates one by one to find which raised, wrote to shared weights or changed torch's state."""
        found.timings = {}
        if written:
            self._restore(found, list(owns))
        is_found = False
        for decision, own in owns.items():
            if self.stopped is not None:
                return
            if not own.runs:  # Already blamed.
                continue
            with self._naming(found.errors, decision, "apply"):
                found.timings |= time_runs({decision: own.runs}, self.weights.w13.device, rounds, seconds)
            if decision in found.errors:
                is_found = True
            if self._blame(found, decision, "apply", own):
                found.timings.pop(decision, None)
                is_found = True
        if (written or changed) and not is_found:
            names = ", ".join(decision.backend for decision in owns)
            deed = _wrote(written) if written else _changed(changed)
            for decision in owns:
                found.damages[decision] = f"one of {names} {deed}, once"
                self._unsure.add(decision)
            found.timings = {}

    def _check_again(self, found: _Findings, decision: Decision, own: _OwnCalls, key: Hashable) -> None:
        """Compares the timed runs' outputs, and those of another run on outputs filled with NaN."""
        references = self._references[key][decision.computes]
        errors: list[float] = []
        with self._naming(found.errors, decision, "apply"):
            errors.append(relative_error(own.outs[0], references[0]))
            for place, reference in zip(_checked_places(own.calls), references, strict=True):
                own.outs[place].fill_(math.nan)
                own.runs[place]()
                wait_for(own.outs[place].device)
                errors.append(relative_error(own.outs[place], reference))
        bound = self._bound(decision, key)
        found.relative_errors[decision] = next(
            (error for error in errors if not error <= bound), found.relative_errors[decision]
        )
        self._blame(found, decision, "apply", own)


def _wrote(names: Sequence[str]) -> str:
    return f"wrote to the layer's weights ({', '.join(names)})"


def _changed(settings: Sequence[str]) -> str:
    return f"changed torch's state for everybody ({', '.join(settings)})"


def _checked_places(calls: Sequence[Call]) -> tuple[int, ...]:
    return (0,) if len(calls) == 1 else (0, len(calls) - 1)


def output_error(kernel: MoEKernel, call: Call, reference: torch.Tensor) -> float:
    """Relative error of a call whose output was filled with NaN before; NaN if any is left."""
    if call.hidden_states.is_cuda:
        # Timed calls are not the first of their size, and may take another path.
        kernel(*call)
    out = torch.full_like(call.hidden_states, math.nan)
    kernel(*call, out=out)
    return relative_error(out, reference)


def _text(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, BackendError) else f"{type(error).__name__}: {error}"

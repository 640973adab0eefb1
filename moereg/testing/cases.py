"""Conformance cases generated from the registry: each cell's claims, on the platform this machine runs it as."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import re
from collections.abc import Iterator
from typing import Final

import torch

from moereg.dispatch import Decision, Selection, evaluate, machine_reasons
from moereg.layer.factory import MoEKernel, make_unchecked_kernel
from moereg.platforms import Platform, current_platform, torch_device
from moereg.registry import BackendCell
from moereg.selection.request import Request
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.testing.inputs import ROUTINGS, make_expert_map, make_weights
from moereg.testing.problems import accepted_problems, claimed_problems, served_schemes
from moereg.weights.permuted import ExpertWeights

TOKENS: Final = (0, 1, 2, 17, 63)
GPU_TOKENS: Final = (*TOKENS, 4096)

_MACHINE: Final[contextvars.ContextVar[Platform | None]] = contextvars.ContextVar("moereg_kit_machine", default=None)


def machine() -> Platform:
    """The platform to treat this machine as: its own, or the one set by `running_as`."""
    return _MACHINE.get() or current_platform()


@contextlib.contextmanager
def running_as(platform: Platform | None) -> Iterator[None]:
    """Within this context cases run as on that platform: a GPU machine's CPU, or one that experts classes imitate.

    It is probed if it is this machine; None changes nothing.
    """
    token = _MACHINE.set(platform)
    try:
        yield
    finally:
        _MACHINE.reset(token)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem that a cell claims, on its platform."""

    cell: BackendCell
    platform: Platform
    problem: MoEProblem

    @property
    def computes(self) -> QuantScheme:
        """The scheme that the cell computes for the problem."""
        scheme = self.cell.scheme_for(self.problem.quant)
        assert scheme is not None
        return scheme

    @property
    def device(self) -> torch.device:
        """Device of the case: the machine's, or the one whose tensors the experts class reads there."""
        return _device_of(self.cell, self.platform)

    @property
    def is_imitated(self) -> bool:
        """Whether the platform is imitated, such as by an interpreter."""
        return _imitates(self.cell, self.platform)

    @property
    def id(self) -> str:
        """An id that is readable and unique within a run."""
        text = f"{self.cell.name}-{self.cell.class_name}-{self.platform}-{self.problem}"
        if self.computes != self.problem.quant:
            text += f"-computes {self.computes.name}"
        return re.sub(r"[^A-Za-z0-9_.=+:-]+", "_", text)


def _device_of(cell: BackendCell, platform: Platform) -> torch.device:
    here = default_device()
    types = tuple(cell.experts.device_types(platform))
    return here if not types or here.type in types else torch.device(types[0])


def _imitates(cell: BackendCell, platform: Platform) -> bool:
    here = _physical()
    # Kernels that read another device's tensors, such as through DLPack, are no imitation.
    return platform.kind != here.kind and platform.device_type != _device_of(cell, platform).type


def runnable_platform(cell: BackendCell) -> Platform | None:
    """The platform as which this machine can run a cell: its own, or one that the experts class imitates; or None.

    Either way the required versions of the cell's packages are installed.
    """
    named, here = machine(), _physical()
    if named.probed and not machine_reasons(cell, here):
        return here if accepted_problems(cell, here) else None
    # For an imitated platform selection assumes the packages, so check them here.
    if any(reason.code == "package" for reason in machine_reasons(cell, here)):
        return None
    for platform in [rule.instance for rule in cell.rules] if named.probed else [named]:
        if platform is None or platform.device_type == here.device_type or cell.rule_for(platform) is None:
            continue
        if here.device_type in cell.experts.device_types(platform) and accepted_problems(cell, platform):
            return platform
    return None


def why_not_runnable(cell: BackendCell) -> str:
    """Why this machine cannot run a cell's simplest problem."""
    named, here = machine(), _physical()
    decision = evaluate(cell, next(iter(claimed_problems(cell))), named, Request(require=(cell.name,)))
    # Selection assumes of a named platform what is checked here.
    texts = [reason.text for reason in decision.reasons or machine_reasons(cell, here)]
    return "; ".join(texts) or f"requires {named}, or device_types that imitate it, got {here}"


def is_imitated(cell: BackendCell) -> bool:
    """Whether this machine runs a cell only by imitating another platform, such as with an interpreter."""
    platform = runnable_platform(cell)
    return platform is not None and _imitates(cell, platform)


def first_case(cell: BackendCell, scheme: QuantScheme | None = None, has_bias: bool = False) -> Case:
    """The first case of a cell that runs here, or of a scheme that it serves, with biases if there is one."""
    platform = runnable_platform(cell)
    assert platform is not None
    problems = [problem for problem in accepted_problems(cell, platform) if scheme is None or problem.quant == scheme]
    preferred = [problem for problem in problems if has_bias and problem.has_bias]
    return Case(cell, platform, (preferred or problems)[0])


def select_cell(case: Case) -> Selection:
    """A selection of exactly this cell, even if another would win."""
    request = Request(require=(case.cell.name,))
    decision: Decision = evaluate(case.cell, case.problem, case.platform, request)
    assert decision.accepted, decision.reasons
    return Selection(case.problem, case.platform, request, (decision,), "required")


def fault_schemes(cell: BackendCell) -> list[QuantScheme]:
    """Served schemes whose planted faults a cell must show; if imitated, one per kind of weights."""
    schemes = served_schemes(cell)
    if not is_imitated(cell):
        return schemes
    kinds: dict[object, QuantScheme] = {}
    for scheme in schemes:
        fmt = scheme.weight
        kind = None if fmt is None else (fmt.dtype, fmt.scale_dtype, fmt.symmetric)
        kinds.setdefault(kind, scheme)
    return list(kinds.values())


def calls_of(case: Case, is_first: bool) -> list[tuple[int, str]]:
    """Numbers of tokens and routings to run a case with.

    An interpreted kernel takes seconds for a GPU's microseconds. There only the first case of a class runs with all
    numbers of tokens; the others, which differ in sizes and facts, run with none and a few, fewest if quantized.
    """
    tokens: tuple[int, ...] = GPU_TOKENS if case.device.type == "cuda" else TOKENS
    if case.is_imitated and not is_first:
        tokens = (0, 1, 17) if case.problem.quant.weight is None else (0, 2)
        return [(num_tokens, "uniform") for num_tokens in tokens]
    return [
        (num_tokens, routing)
        for num_tokens in tokens
        for routing in (ROUTINGS if num_tokens in (17, 4096) else ("uniform",))
    ]


def fault_tokens(case: Case) -> int:
    """Tokens that suffice to show a planted fault, which is in every expert: one if kernels are interpreted.

    More if activations are rounded too, since that bound is wide for few numbers.
    """
    return 1 if case.is_imitated and case.computes.activation is None else 17


def build(case: Case, weights: ExpertWeights | None = None) -> MoEKernel:
    """The cell's kernel on random or given weights."""
    return make_unchecked_kernel(
        case.problem,
        make_weights(case.problem, case.device) if weights is None else weights,
        selection=select_cell(case),
        expert_map=make_expert_map(case.problem, case.device),
    )


def default_device() -> torch.device:
    """The machine's device, on which cases run; UnknownPlatformError if this torch has none."""
    return torch_device(_physical(), touch=False)


def _physical() -> Platform:
    """The actual machine: a probed platform is the machine, a named one is only imitated."""
    named = machine()
    return named if named.probed else current_platform()

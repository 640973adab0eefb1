"""Conformance cases generated from the registry: problems inside and just outside cells' claims, and where they run."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg.dispatch import Decision, Selection, evaluate, machine_reasons
from moereg.layer.factory import MoEKernel, make_unchecked_kernel
from moereg.platforms import Platform, current_platform, torch_device
from moereg.registry import BackendCell
from moereg.selection.request import Request
from moereg.spec.activations import ACTIVATIONS
from moereg.spec.facts import Facts
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme
from moereg.testing.inputs import ROUTINGS, make_expert_map, make_weights
from moereg.weights.permuted import ExpertWeights

TOKENS: Final = (0, 1, 2, 17, 63)
GPU_TOKENS: Final = (*TOKENS, 4096)
INVARIANT_TOKENS: Final = (1, 2, 3, 5, 8, 16, 17, 64, 255)
GPU_INVARIANT_TOKENS: Final = (*INVARIANT_TOKENS, 1024, 4096)

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


_INVARIANT_SIZES: Final[tuple[dict[str, Any], ...]] = ({}, {"hidden_size": 256, "intermediate_size": 256})


def invariant_problems(cell: BackendCell, platform: Platform) -> list[MoEProblem]:
    """Problems of a cell whose rows must keep their bits: the first of each scheme and dtype, and of even sizes.

    Kernels for many rows serve whole blocks alone. One problem if kernels are interpreted.
    """
    found: dict[object, MoEProblem] = {}
    for problem in accepted_problems(cell, platform):
        for sizes in _INVARIANT_SIZES:
            asked = dataclasses.replace(problem, batch_invariant=True, **sizes)
            key = problem.quant, problem.dtype, bool(sizes)
            if key not in found and not evaluate(cell, asked, platform, Request(require=(cell.name,))).reasons:
                found[key] = asked
    return list(found.values())[: 1 if _imitates(cell, platform) else None]


def invariant_tokens(case: Case) -> tuple[int, ...]:
    """Tokens of the calls in which rows must have equal bits; fewer where kernels are interpreted."""
    if case.is_imitated:
        return 1, 2, 17
    return GPU_INVARIANT_TOKENS if case.device.type == "cuda" else INVARIANT_TOKENS


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


def claimed_problems(cell: BackendCell) -> Iterator[MoEProblem]:
    """Problems that reach each fact that the cell claims, including odd sizes, and each scheme that it can serve."""
    facts = cell.facts
    first, *others = served_schemes(cell)
    dtypes = sorted(facts.dtypes)
    activations = [ACTIVATIONS[name] for name in sorted(facts.activations)]
    if facts.swiglu_limit:
        activations += [
            dataclasses.replace(activation, limit=1.5)
            for activation in activations
            if activation.gated and activation.limit is None
        ]
    else:
        activations = [activation for activation in activations if activation.limit is None]
    base: dict[str, Any] = {
        "num_experts": 6,
        "top_k": 2,
        "quant": first,
        "activation": activations[0],
        "activation_format": min(facts.activation_formats),
        "placement": min(facts.placements),
    }

    def sized(hidden_size: int, intermediate_size: int, **changes: Any) -> MoEProblem:
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        for field, divisor in facts.requires_multiple.items():
            sizes[field] = -(-sizes[field] // divisor) * divisor
        return held(MoEProblem(**{"dtype": dtypes[0], **base, **sizes, **changes}), facts)

    for dtype, activation_format in itertools.product(dtypes, sorted(facts.activation_formats)):
        yield sized(128, 64, dtype=dtype, activation_format=activation_format)
    for activation in activations:
        yield sized(64, 96, activation=activation, dtype=dtypes[-1])
    for hidden_size, intermediate_size in ((72, 40), (130, 88), (255, 129)):
        yield sized(hidden_size, intermediate_size)
    yield sized(64, 64, num_experts=8, top_k=8)
    yield sized(64, 64, num_experts=40 if facts.max_experts is None else min(40, facts.max_experts), top_k=3)
    yield sized(64, 64, num_experts=1, top_k=1)
    if facts.bias:
        for activation in (activations[0], ACTIVATIONS["swigluoai"]):
            if activation in activations:
                yield sized(96, 64, has_bias=True, activation=activation)
    if facts.router_weight_on_input:
        yield sized(64, 64, top_k=1, apply_router_weight_on_input=True, has_bias=facts.bias)
    for placement in sorted(facts.placements):
        yield sized(64, 64, num_experts=8, num_local_experts=3 if placement == "map" else 4, placement=placement)
    for scheme in others:
        # More than one block of 128 x 128 with a partial last one; then odd sizes, which 4-bit codes pad.
        yield sized(136, 264, quant=scheme, has_bias=facts.bias)
        yield sized(33, 65, quant=scheme)


def held(problem: MoEProblem, facts: Facts) -> MoEProblem:
    """Adjusts a problem to have all experts on this rank, or half of them, if the facts serve only that."""
    if problem.held_experts in facts.held_experts:
        return problem
    if "all" in facts.held_experts:
        return dataclasses.replace(problem, num_local_experts=problem.num_experts)
    num_experts = problem.num_experts + problem.num_experts % 2
    return dataclasses.replace(problem, num_experts=num_experts, num_local_experts=num_experts // 2)


def accepted_problems(cell: BackendCell, platform: Platform) -> list[MoEProblem]:
    """The claimed problems that the class's own predicate accepts as well, without duplicates.

    A problem that only the predicate refuses is replaced by its nearest accepted neighbor: larger by some usual kernel
    steps, or with another number of experts.
    """
    found: dict[MoEProblem, None] = {}
    for problem in claimed_problems(cell):
        accepted = accepted_neighbor(cell, problem, platform)
        if accepted is not None:
            found.setdefault(accepted)
    return list(found)


def accepted_neighbor(cell: BackendCell, problem: MoEProblem, platform: Platform) -> MoEProblem | None:
    """The problem, or the nearest one that the class's own predicate accepts, or None."""
    request = Request(require=(cell.name,))
    for neighbor in _neighbors(problem):
        reasons = evaluate(cell, neighbor, platform, request).reasons
        if not reasons:
            return neighbor
        if {reason.code for reason in reasons} != {"backend"}:
            return None
    return None


def _neighbors(problem: MoEProblem) -> Iterator[MoEProblem]:
    yield problem
    is_whole = not problem.is_expert_parallel
    for num_experts in [problem.num_experts, *(count for count in (8, 16) if is_whole and count > problem.num_experts)]:
        for step in (1, 16, 64, 128, 256, 512):
            yield dataclasses.replace(
                problem,
                num_experts=num_experts,
                num_local_experts=num_experts if is_whole else problem.num_local_experts,
                hidden_size=-(-problem.hidden_size // step) * step,
                intermediate_size=-(-problem.intermediate_size // step) * step,
            )


def served_schemes(cell: BackendCell) -> list[QuantScheme]:
    """The scheme that a cell computes, then checkpoints' schemes that it serves with 16-bit activations."""
    substituted = [
        scheme
        for scheme in QUANT_SCHEMES.values()
        if scheme not in cell.schemes and cell.scheme_for(scheme) is not None
    ]
    return [*cell.schemes, *substituted]


def rejected_problems(cell: BackendCell) -> Iterator[tuple[str, MoEProblem]]:
    """Problems just outside the claims, each with the reason code that must be given."""
    facts = cell.facts
    inside = next(iter(claimed_problems(cell)))

    def changed(**changes: Any) -> MoEProblem:
        return dataclasses.replace(inside, **changes)

    for activation in ACTIVATIONS.values():
        if activation.name not in facts.activations and activation.limit is None:
            yield "activation", changed(activation=activation)
    if not facts.activation_scalars and inside.activation.gated:
        yield "activation", changed(activation=dataclasses.replace(inside.activation, beta=inside.activation.beta + 1))
    if not facts.swiglu_limit and inside.activation.gated:
        yield "swiglu_limit", changed(activation=dataclasses.replace(inside.activation, limit=1.0))
    for field, values, claimed in (
        ("dtype", {"bfloat16", "float16", "float32"}, facts.dtypes),
        ("activation_format", {"standard", "batched"}, facts.activation_formats),
        ("placement", {"contiguous", "map"}, facts.placements),
    ):
        for value in sorted(values - claimed):
            yield field, changed(**{field: value})
    if inside.held_experts == "all" and "some" not in facts.held_experts:
        yield "placement", changed(num_local_experts=inside.num_experts - 1)
    if "all" not in facts.held_experts:
        yield "placement", changed(num_local_experts=inside.num_experts)
    for field in facts.requires_multiple:
        yield "alignment", changed(**{field: getattr(inside, field) + 1})
    if facts.max_experts is not None:
        yield "size", changed(num_experts=facts.max_experts + 1, num_local_experts=facts.max_experts + 1)
    if facts.max_num_tokens is not None:
        yield "size", changed(max_num_tokens=facts.max_num_tokens + 1)
    for code, is_claimed, changes in (
        ("bias", facts.bias, {"has_bias": True}),
        ("router_weight_on_input", facts.router_weight_on_input, {"top_k": 1, "apply_router_weight_on_input": True}),
        ("graph_capture", facts.graph_capture, {"graph_capture": True}),
        ("deterministic", facts.deterministic, {"deterministic": True}),
        ("batch_invariant", facts.batch_invariant, {"batch_invariant": True}),
    ):
        if not is_claimed:
            yield code, changed(**changes)
    gradients = set(GRADIENTS) - facts.gradients - ({"weights"} if inside.quant.weight is not None else set())
    if gradients and inside.activation_format == "standard":
        rank = 16 if "adapters" in gradients else 0
        yield "gradients", changed(gradients=gradients, adapter_rank=rank)

"""Conformance cases generated from the registry: every cell's claim, inside and just outside."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg.activations import ACTIVATIONS
from moereg.discovery import current_platform, load_backends
from moereg.dispatch import Decision, Selection, evaluate, machine_reasons
from moereg.facts import Facts
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES, QuantScheme
from moereg.registry import BackendCell
from moereg.request import Request
from moereg.testing.inputs import ROUTINGS, make_expert_map, make_weights
from moereg.weights import ExpertWeights

__all__ = [
    "GPU_TOKENS",
    "TOKENS",
    "Case",
    "build",
    "calls_of",
    "claimed_problems",
    "default_device",
    "fault_schemes",
    "fault_tokens",
    "first_case",
    "held",
    "is_imitated",
    "registered_cases",
    "rejected_problems",
    "runnable_cells",
    "runnable_platform",
    "select_cell",
    "served_schemes",
    "unverifiable_cells",
]

TOKENS: Final = (0, 1, 2, 17, 63)
GPU_TOKENS: Final = (*TOKENS, 4096)


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
        """Device of the case."""
        return default_device()

    @property
    def is_imitated(self) -> bool:
        """Whether the platform is imitated, as an interpreter does."""
        return self.platform.device_type != self.device.type

    @property
    def id(self) -> str:
        """Readable and unique within a run."""
        text = f"{self.cell.name}-{self.cell.class_name}-{self.platform}-{self.problem}"
        if self.computes != self.problem.quant:
            text += f"-computes {self.computes.name}"
        return re.sub(r"[^A-Za-z0-9_.=+:-]+", "_", text)


def runnable_platform(cell: BackendCell) -> Platform | None:
    """The platform as which this machine can run a cell: its own, or one that its experts class can imitate here.

    Either way the cell's requirements are installed, in the required versions.
    """
    here = current_platform()
    request = Request(require=(cell.name,))
    small = next(iter(claimed_problems(cell)))
    if evaluate(cell, small, here, request).accepted:
        return here
    # A platform that is only imitated assumes the packages.
    if any(reason.code == "package" for reason in machine_reasons(cell, here)):
        return None
    for rule in cell.rules:
        platform = rule.instance
        if platform is not None and here.device_type in cell.experts.device_types(platform):
            return platform
    return None


def unverifiable_cells() -> dict[str, str]:
    """Cells that this machine cannot run, with their own predicate's reasons."""
    found = {}
    for cell in load_backends().cells:
        if runnable_platform(cell) is None:
            decision = evaluate(cell, next(iter(claimed_problems(cell))), current_platform(), Request())
            found[f"{cell.name} ({cell.class_name})"] = "; ".join(reason.text for reason in decision.reasons)
    return found


def claimed_problems(cell: BackendCell) -> Iterator[MoEProblem]:
    """Problems that reach each fact the cell claims, odd sizes included, and each scheme that it can serve."""
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
        # More than one block of 128 x 128 and a last one that is short; then odd sizes, which 4-bit codes pad.
        yield sized(136, 264, quant=scheme, has_bias=facts.bias)
        yield sized(33, 65, quant=scheme)


def held(problem: MoEProblem, facts: Facts) -> MoEProblem:
    """A problem with all experts on this rank, or half of them, where facts say that only such ones are served."""
    if problem.held_experts in facts.held_experts:
        return problem
    if "all" in facts.held_experts:
        return dataclasses.replace(problem, num_local_experts=problem.num_experts)
    num_experts = problem.num_experts + problem.num_experts % 2
    return dataclasses.replace(problem, num_experts=num_experts, num_local_experts=num_experts // 2)


def served_schemes(cell: BackendCell) -> list[QuantScheme]:
    """The scheme that a cell computes, then checkpoints' schemes that it serves with 16-bit activations."""
    substituted = [
        scheme
        for scheme in QUANT_SCHEMES.values()
        if scheme not in cell.schemes and cell.scheme_for(scheme) is not None
    ]
    return [*cell.schemes, *substituted]


def runnable_cells() -> list[BackendCell]:
    """Registered cells that this machine can run."""
    return [cell for cell in load_backends().cells if runnable_platform(cell) is not None]


def is_imitated(cell: BackendCell) -> bool:
    """Whether this machine runs a cell only by imitating another platform, as an interpreter does."""
    platform = runnable_platform(cell)
    return platform is not None and platform.device_type != current_platform().device_type


def registered_cases() -> list[Case]:
    """Every claimed problem of every registered cell that this machine can run.

    Cells of one class differ in hardware and schemes. If their kernels are interpreted, the first cell runs all of its
    claim, and the others run a problem of each scheme.
    """
    cases: list[Case] = []
    interpreted: set[str] = set()
    for cell in runnable_cells():
        platform = runnable_platform(cell)
        assert platform is not None
        problems = list(dict.fromkeys(claimed_problems(cell)))
        if is_imitated(cell):
            if cell.class_name in interpreted:
                problems = list({problem.quant: problem for problem in reversed(problems)}.values())[::-1]
            interpreted.add(cell.class_name)
        cases += [Case(cell, platform, problem) for problem in problems]
    return cases


def first_case(cell: BackendCell, scheme: QuantScheme | None = None, has_bias: bool = False) -> Case:
    """The first case of a cell, or of one of its schemes.

    Args:
        cell: A cell that runs here.
        scheme: Scheme of the weights; the first that the cell serves where None.
        has_bias: Whether a case with biases is preferred.
    """
    platform = runnable_platform(cell)
    assert platform is not None
    problems = [problem for problem in claimed_problems(cell) if scheme is None or problem.quant == scheme]
    preferred = [problem for problem in problems if has_bias and problem.has_bias]
    return Case(cell, platform, (preferred or problems)[0])


def rejected_problems(cell: BackendCell) -> Iterator[tuple[str, MoEProblem]]:
    """Problems just outside the claim, each with the code of the reason that has to come."""
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
    if not facts.bias:
        yield "bias", changed(has_bias=True)
    for dtype in {"bfloat16", "float16", "float32"} - facts.dtypes:
        yield "dtype", changed(dtype=dtype)
    for activation_format in {"standard", "batched"} - facts.activation_formats:
        yield "activation_format", changed(activation_format=activation_format)
    for placement in {"contiguous", "map"} - facts.placements:
        yield "placement", changed(placement=placement)
    if inside.held_experts == "all" and "some" not in facts.held_experts:
        yield "placement", changed(num_local_experts=inside.num_experts - 1)
    if "all" not in facts.held_experts:
        yield "placement", changed(num_local_experts=inside.num_experts)
    if not facts.router_weight_on_input:
        yield "router_weight_on_input", changed(top_k=1, apply_router_weight_on_input=True)
    for field in facts.requires_multiple:
        yield "alignment", changed(**{field: getattr(inside, field) + 1})
    if facts.max_experts is not None:
        yield "size", changed(num_experts=facts.max_experts + 1, num_local_experts=facts.max_experts + 1)
    if facts.max_num_tokens is not None:
        yield "size", changed(max_num_tokens=facts.max_num_tokens + 1)
    if not facts.graph_capture:
        yield "graph_capture", changed(graph_capture=True)
    if not facts.deterministic:
        yield "deterministic", changed(deterministic=True)


def select_cell(case: Case) -> Selection:
    """A selection of exactly this cell, even where another would win."""
    request = Request(require=(case.cell.name,))
    decision: Decision = evaluate(case.cell, case.problem, case.platform, request)
    assert decision.accepted, decision.reasons
    return Selection(case.problem, case.platform, request, (decision,), "required")


def fault_schemes(cell: BackendCell) -> list[QuantScheme]:
    """Served schemes whose planted faults a cell must show: where it is imitated, the first of each kind of weights."""
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
    """Numbers of tokens and routings that a case is run with.

    An interpreted kernel takes seconds where a GPU takes microseconds. There the first case of a class runs with all
    numbers of tokens; the others, which differ in sizes and facts, with none and a few, fewest if weights are
    quantized.
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
    """Tokens that show a planted fault, which is in every expert: one where kernels are interpreted.

    More where activations are rounded too, whose bound is wide for few numbers.
    """
    return 1 if case.is_imitated and case.computes.activation is None else 17


def build(case: Case, weights: ExpertWeights | None = None) -> MoEKernel:
    """The cell's kernel on random or given weights."""
    return make_kernel(
        case.problem,
        make_weights(case.problem, case.device) if weights is None else weights,
        selection=select_cell(case),
        expert_map=make_expert_map(case.problem, case.device),
    )


@functools.cache
def default_device() -> torch.device:
    """The device for cases: a GPU if torch has one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

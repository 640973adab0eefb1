"""Conformance cases generated from the registry: every cell's claim, inside and just outside.

Written against public names only, so that it can move into the kit that backend authors run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moereg.activations import ACTIVATIONS
from moereg.discovery import current_platform, load_backends
from moereg.dispatch import Decision, Request, Selection, evaluate, machine_reasons
from moereg.layer import MoEKernel, make_kernel
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES, QuantScheme
from moereg.quantize import quantize_weights
from moereg.reference import calibrate_activation_scales
from moereg.registry import BackendCell
from moereg.weights import ExpertWeights

ROUTINGS = ("uniform", "skewed", "one_expert", "unmapped")
TOKENS = (0, 1, 2, 17, 63)
GPU_TOKENS = (*TOKENS, 4096)
_SPREAD = 0.25


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem that a cell claims, on the platform it is run as."""

    cell: BackendCell
    platform: Platform
    problem: MoEProblem

    @property
    def computes(self) -> QuantScheme:
        """What the cell computes for the problem's scheme."""
        scheme = self.cell.scheme_for(self.problem.quant)
        assert scheme is not None
        return scheme

    @property
    def id(self) -> str:
        """Readable and unique within a run."""
        text = f"{self.cell.name}-{self.cell.class_name}-{self.platform}-{self.problem}"
        if self.computes != self.problem.quant:
            text += f"-computes {self.computes.name}"
        return re.sub(r"[^A-Za-z0-9_.=+:-]+", "_", text)


def runnable_platform(cell: BackendCell) -> Platform | None:
    """The platform as which this machine can run a cell: its own, or one that its experts class can imitate here.

    Either way what the cell requires is installed, in the versions that it requires.
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
        platform = Platform.from_name(re.sub(r"[+f]$", "", rule.text)) if ":" in rule.text else None
        if platform is not None and here.device_type in cell.experts.device_types(platform):
            return platform
    return None


def unverifiable_cells() -> dict[str, str]:
    """Cells that this machine cannot run, with the reasons of their own predicate."""
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
        return MoEProblem(**{"dtype": dtypes[0], **base, **sizes, **changes})

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


def served_schemes(cell: BackendCell) -> list[QuantScheme]:
    """What a cell computes, and then checkpoints' schemes that it serves with 16-bit activations."""
    substituted = [
        scheme
        for scheme in QUANT_SCHEMES.values()
        if scheme not in cell.schemes and cell.scheme_for(scheme) is not None
    ]
    return [*cell.schemes, *substituted]


def registered_cases() -> list[Case]:
    """Every claimed problem of every registered cell that this machine can run.

    Cells of one class differ in hardware and schemes. Where their kernels are interpreted, the first has all of its
    claim run, and the others a problem of each scheme.
    """
    cases: list[Case] = []
    interpreted: set[str] = set()
    device_type = current_platform().device_type
    for cell in load_backends().cells:
        platform = runnable_platform(cell)
        if platform is None:
            continue
        problems = list(dict.fromkeys(claimed_problems(cell)))
        if platform.device_type != device_type:
            if cell.class_name in interpreted:
                problems = list({problem.quant: problem for problem in reversed(problems)}.values())[::-1]
            interpreted.add(cell.class_name)
        cases += [Case(cell, platform, problem) for problem in problems]
    return cases


def rejected_problems(cell: BackendCell) -> Iterator[tuple[str, MoEProblem]]:
    """Problems just outside the claim, with the code of the one reason that has to come."""
    facts = cell.facts
    inside = next(iter(claimed_problems(cell)))

    def changed(**changes: Any) -> MoEProblem:
        return dataclasses.replace(inside, **changes)

    for activation in ACTIVATIONS.values():
        if activation.name not in facts.activations and activation.limit is None:
            yield "activation", changed(activation=activation)
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
    if not facts.router_weight_on_input:
        yield "router_weight_on_input", changed(top_k=1, apply_router_weight_on_input=True)
    for field in facts.requires_multiple:
        yield "alignment", changed(**{field: getattr(inside, field) + 1})
    if facts.max_experts is not None:
        yield "size", changed(num_experts=facts.max_experts + 1, num_local_experts=facts.max_experts + 1)
    if not facts.graph_capture:
        yield "graph_capture", changed(graph_capture=True)
    if not facts.deterministic:
        yield "deterministic", changed(deterministic=True)


def select_cell(case: Case) -> Selection:
    """A selection of exactly this cell, past any that would win over it."""
    request = Request(require=(case.cell.name,))
    decision: Decision = evaluate(case.cell, case.problem, case.platform, request)
    assert decision.accepted, decision.reasons
    return Selection(case.problem, case.platform, request, (decision,), "required")


@dataclasses.dataclass
class Inputs:
    """What one call takes."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    def clone(self) -> Inputs:
        """Independent copies."""
        return Inputs(self.hidden_states.clone(), self.topk_weights.clone(), self.topk_ids.clone())


def make_weights(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Random weights; gate and up are scaled differently, and every expert too, so that no swap can pass.

    Weights of a quantised scheme are quantised by moereg itself, from ones whose rows and groups differ in magnitude,
    so that a scale of another group cannot pass. Static activation scales come from other random tokens.
    """
    plain = make_plain_weights(problem, device, seed)
    if problem.quant.weight is None:
        return plain
    scales: dict[str, torch.Tensor] = {}
    if problem.quant.activation is not None and (
        problem.quant.activation.static or problem.quant.activation.global_scale
    ):
        sample = make_inputs(problem, 64, "uniform", device, seed=seed + 77)
        scales["a13_scale"], scales["a2_scale"] = calibrate_activation_scales(
            dataclasses.replace(problem, quant=plain.scheme),
            plain,
            sample.hidden_states,
            sample.topk_weights,
            sample.topk_ids,
            problem.quant,
            make_expert_map(problem, device),
        )
    return quantize_weights(plain, problem.quant, **scales)


def make_plain_weights(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """What `make_weights` quantises, unquantized."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    dtype = problem.torch_dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    scale = torch.linspace(0.7, 1.4, experts, device=device).view(-1, 1, 1)
    w13 = random(experts, problem.activation.num_halves * inter, hidden) * scale * (2 / hidden**0.5)
    if problem.activation.gated:
        w13[:, :inter] *= 1.3
        w13[:, inter:] *= 0.6
    biases = {}
    if problem.has_bias:
        # Larger where the bound is, so that a dropped one is seen.
        size = 1 if problem.quant.activation is None else 2
        biases = {
            "w13_bias": (size * random(experts, w13.shape[1])).to(dtype),
            "w2_bias": (size * random(experts, hidden)).to(dtype),
        }
    w2 = random(experts, hidden, inter) * (1 / inter**0.5)
    if problem.quant.weight is not None:
        w13, w2 = (_vary(matrix, random) for matrix in (w13, w2))
    return ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), **biases)


def _vary(matrix: torch.Tensor, random: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Multiplies rows and runs of 16 columns by random factors whose mean square is 1."""
    experts, rows, columns = matrix.shape
    # Little enough that no single element of the intermediate is most of it.
    shapes = ((experts, rows, 1), (experts, 1, -(-columns // 16)))
    by_row, by_group = (torch.exp(_SPREAD * random(*shape) - _SPREAD**2) for shape in shapes)
    return matrix * by_row * by_group.repeat_interleave(16, 2)[..., :columns]


def fault_schemes(cell: BackendCell, device: torch.device) -> list[QuantScheme]:
    """Served schemes whose planted faults a cell must show: interpreted, the first of each kind of weights."""
    platform = runnable_platform(cell)
    assert platform is not None
    schemes = served_schemes(cell)
    if platform.device_type == device.type:
        return schemes
    kinds: dict[object, QuantScheme] = {}
    for scheme in schemes:
        fmt = scheme.weight
        kind = None if fmt is None else (fmt.dtype, fmt.scale_dtype, fmt.symmetric)
        kinds.setdefault(kind, scheme)
    return list(kinds.values())


def calls_of(case: Case, device: torch.device, is_first: bool) -> list[tuple[int, str]]:
    """Numbers of tokens and routings that a case is run with.

    An interpreted kernel takes seconds where a GPU takes microseconds. There the first case of a cell is run with all,
    the others with none and a few, fewest where weights are quantised; their sizes and facts tell them apart.
    """
    tokens: tuple[int, ...] = GPU_TOKENS if device.type == "cuda" else TOKENS
    if case.platform.device_type != device.type and not is_first:
        tokens = (0, 1, 17) if case.problem.quant.weight is None else (0, 2)
        return [(num_tokens, "uniform") for num_tokens in tokens]
    return [
        (num_tokens, routing)
        for num_tokens in tokens
        for routing in (ROUTINGS if num_tokens in (17, 4096) else ("uniform",))
    ]


def fault_tokens(case: Case, device: torch.device) -> int:
    """Tokens that show a planted fault, which is in every expert: one where kernels are interpreted.

    More where activations are rounded too, whose bound is wide for few numbers.
    """
    return 1 if case.platform.device_type != device.type and case.computes.activation is None else 17


def make_inputs(problem: MoEProblem, num_tokens: int, routing: str, device: torch.device, seed: int = 0) -> Inputs:
    """Random tokens and routes. `unmapped` adds ids below 0 and beyond num_experts."""
    generator = torch.Generator(device).manual_seed(1000 + seed)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator, device=device)
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator, device=device)
    if routing == "skewed":
        scores = scores / torch.arange(1, problem.num_experts + 1, device=device) ** 2
    elif routing == "one_expert":
        scores = torch.arange(problem.num_experts, device=device).float().expand_as(scores)
    topk_weights, topk_ids = scores.topk(problem.top_k, dim=1)
    topk_weights = torch.rand(topk_ids.shape, generator=generator, device=device) + 0.1
    topk_ids = topk_ids.to(torch.int32)
    if routing == "unmapped" and num_tokens:
        topk_ids[0, 0] = -1
        topk_ids[-1, -1] = problem.num_experts
        topk_ids[num_tokens // 2, 0] = 2**31 - 1
    return Inputs(hidden_states.to(problem.torch_dtype), topk_weights, topk_ids)


def make_expert_map(problem: MoEProblem, device: torch.device) -> torch.Tensor | None:
    """Local experts in reverse order on every second global expert, where placement is `map`."""
    if problem.placement != "map":
        return None
    expert_map = torch.full((problem.num_experts,), -1, dtype=torch.int32)
    local = torch.arange(problem.num_local_experts, dtype=torch.int32).flip(0)
    expert_map[: 2 * problem.num_local_experts : 2] = local[: len(expert_map[: 2 * problem.num_local_experts : 2])]
    return expert_map.to(device)


def build(case: Case, device: torch.device, weights: ExpertWeights | None = None) -> MoEKernel:
    """The cell's kernel on random weights."""
    return make_kernel(
        case.problem,
        make_weights(case.problem, device) if weights is None else weights,
        selection=select_cell(case),
        expert_map=make_expert_map(case.problem, device),
    )


@functools.cache
def test_device() -> torch.device:
    """Where cases run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


test_device.__test__ = False  # type: ignore[attr-defined]

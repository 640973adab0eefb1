"""Problems inside a cell's claims, reaching each fact, and just outside."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from moereg.dispatch import evaluate
from moereg.platforms import Platform
from moereg.registry import BackendCell
from moereg.selection.request import Request
from moereg.spec.activations import ACTIVATIONS
from moereg.spec.facts import Facts
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme


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
    ):
        if not is_claimed:
            yield code, changed(**changes)
    gradients = set(GRADIENTS) - facts.gradients - ({"weights"} if inside.quant.weight is not None else set())
    if gradients and inside.activation_format == "standard":
        rank = 16 if "adapters" in gradients else 0
        yield "gradients", changed(gradients=gradients, adapter_rank=rank)

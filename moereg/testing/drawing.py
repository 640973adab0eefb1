"""Draws random layers within a cell's claims, with sizes around kernels' steps, pads and tiles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from moereg.plugins.loader import load_backends
from moereg.registry import BackendCell
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import Case, default_device, is_imitated, runnable_platform
from moereg.testing.guards import FILLS, FORMS
from moereg.testing.inputs import ROUTINGS
from moereg.testing.problems import accepted_neighbor, held, served_schemes

Choose = Callable[[Sequence[Any]], Any]
"""Picks a value from a sequence; earlier ones are simpler."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest sizes that are drawn.

    Attributes:
        size: H and I.
        num_tokens: T.
        num_experts: E.
        num_routes: T * K.
    """

    size: int
    num_tokens: int
    num_experts: int
    num_routes: int


INTERPRETED: Final = Limits(size=168, num_tokens=65, num_experts=4, num_routes=66)
"""Limits for Triton's interpreter, where a layer takes some tenths of a second."""

INTERPRETED_QUANTIZED: Final = Limits(size=168, num_tokens=33, num_experts=3, num_routes=34)
"""Limits for the interpreter if kernels dequantize weights or quantize rows, element by element."""

NATIVE: Final = Limits(size=400, num_tokens=130, num_experts=40, num_routes=1040)
"""Limits for compiled kernels."""

GPU: Final = Limits(size=640, num_tokens=1025, num_experts=40, num_routes=4100)
"""Limits for a GPU, whose kernels have taller tiles for many rows per expert."""

# Tile heights, and thresholds between kernels.
_TOKENS: Final = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 513, 1025, 0)
_TOKENS_OF_A_KIND: Final = (range(2), range(2, 9), range(9, 17), range(17, 66), range(66, 1 << 20))
# Layers without any route are too easy, so they are drawn more rarely.
_ROUTINGS: Final = ("uniform", "skewed", "unmapped", *ROUTINGS)
_EXPERTS: Final = (1, 2, 3, 4, 6, 8, 9, 16, 17, 33, 40)
_TOP_K: Final = (1, 2, 3, 4, 5, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnLayer:
    """One call of one cell. `str` is a line that `from_json` and `moereg verify --check` read.

    `summary` is for people.

    Attributes:
        backend, experts, rule: Name, class and first platform rule of the cell.
        computes: Name of the scheme that the cell computes.
        problem: The layer.
        num_tokens: T.
        routing: One of `moereg.testing.inputs.ROUTINGS`.
        ep_rank: Which slice of the experts is here, if placement is contiguous.
        wide_ids: Whether topk_ids are int64.
        fill: One of `moereg.testing.guards.FILLS`.
        form: One of `moereg.testing.guards.FORMS`.
        seed: Seed of weights and inputs.
    """

    backend: str
    experts: str
    rule: str
    computes: str
    problem: MoEProblem
    num_tokens: int
    routing: str = "uniform"
    ep_rank: int = 0
    wide_ids: bool = False
    fill: str = "nan"
    form: str = "contiguous"
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values; `from_dict` reads it back."""
        return {**vars(self), "problem": self.problem.to_dict()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DrawnLayer:
        """Inverse of `to_dict`."""
        return cls(**{**values, "problem": MoEProblem.from_dict(values["problem"])})

    @classmethod
    def from_json(cls, text: str) -> DrawnLayer:
        """Inverse of `str`."""
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        return json.dumps(self.to_dict())

    __repr__ = __str__

    @property
    def summary(self) -> str:
        """Such as `E4 H64 I32 k2 bfloat16 unquantized silu, T=1 uniform`, and what is unusual of the call."""
        words = [str(self.problem), f"T={self.num_tokens} {self.routing}"]
        words += [f"rank {self.ep_rank}"] if self.ep_rank else []
        words += ["int64 ids"] if self.wide_ids else []
        words += [f"{self.form} weights"] if self.form != "contiguous" else []
        words += [f"{self.fill} workspaces"] if self.fill != "nan" else []
        return ", ".join([*words, f"seed {self.seed}"])

    def case(self) -> Case | None:
        """The cell, problem and platform to run as; None if the cell is missing or does not run here.

        If cells differ only in narrowed facts, takes the one that accepts the problem.
        """
        found = list(self._cases())
        accepted = [case for case in found if accepted_neighbor(case.cell, self.problem, case.platform) == self.problem]
        return next(iter([*accepted, *found]), None)

    def _cases(self) -> Iterator[Case]:
        for cell in load_backends().cells:
            computes = cell.scheme_for(self.problem.quant)
            name = (cell.name, cell.class_name, cell.rules[0].text, computes and computes.name)
            if name == (self.backend, self.experts, self.rule, self.computes):
                platform = runnable_platform(cell)
                if platform is not None:
                    yield Case(cell, platform, self.problem)


def draw_layer(cell: BackendCell, choose: Choose, limits: Limits) -> DrawnLayer:
    """Draws a layer that the cell claims.

    Args:
        cell: The cell to run it.
        choose: Makes every choice, such as `random.Random(seed).choice`.
        limits: Largest sizes.
    """
    facts = cell.facts
    scheme = choose(served_schemes(cell))
    computes = cell.scheme_for(scheme)
    assert computes is not None
    most_experts = min(limits.num_experts, facts.max_experts or limits.num_experts)
    num_experts = choose(_up_to(_EXPERTS, most_experts))
    top_k = choose(_up_to(_TOP_K, num_experts))
    most_tokens = min(limits.num_tokens, limits.num_routes // top_k)
    placement = choose(sorted(facts.placements))
    # Make every choice even if it is not needed, so that later choices do not depend on that.
    some_experts, is_half, ep_rank = choose(range(num_experts, 0, -1)), choose((False, True)), choose((0, 1))
    has_bias, weight_on_input = choose((False, True)), choose((False, True))
    num_local_experts = some_experts if placement == "map" else num_experts
    if placement == "contiguous" and is_half and num_experts % 2 == 0:
        num_local_experts = num_experts // 2
    problem = MoEProblem(
        num_experts=num_experts,
        num_local_experts=num_local_experts,
        hidden_size=_draw_size(choose, limits.size, facts.requires_multiple.get("hidden_size", 1)),
        intermediate_size=_draw_size(choose, limits.size, facts.requires_multiple.get("intermediate_size", 1)),
        top_k=top_k,
        dtype=choose(sorted(facts.dtypes, reverse=True)),
        quant=scheme,
        activation=choose(claimed_activations(cell)),
        has_bias=facts.bias and has_bias,
        activation_format=choose(sorted(facts.activation_formats)),
        placement=placement,
        apply_router_weight_on_input=facts.router_weight_on_input and top_k == 1 and weight_on_input,
    )
    problem = held(problem, facts)
    return DrawnLayer(
        backend=cell.name,
        experts=cell.class_name,
        rule=cell.rules[0].text,
        computes=computes.name,
        problem=problem,
        # Kernels differ most in tall tiles, so half of the calls have many tokens.
        num_tokens=choose(_up_to(choose((_TOKENS, _TOKENS[9:-1])), most_tokens) or [most_tokens]),
        routing=choose(_ROUTINGS),
        ep_rank=ep_rank if placement == "contiguous" and problem.is_expert_parallel else 0,
        wide_ids=choose((False, True)),
        fill=choose(FILLS),
        form=choose(FORMS),
        seed=choose(range(1000)),
    )


def redraw(layer: DrawnLayer, choose: Choose, limits: Limits) -> DrawnLayer:
    """Varies a layer's sizes and tensors such that, as far as moereg knows, no kernel is compiled again.

    Sizes keep their remainder modulo 128. Tokens and experts stay between the thresholds of kernels. 1 and multiples
    of 16 stay so, since Triton specializes on them.

    Args:
        layer: A drawn layer.
        choose: As in `draw_layer`.
        limits: As in `draw_layer`.
    """
    problem = layer.problem
    most_experts = max(problem.num_experts, limits.num_experts)
    is_half = problem.placement == "contiguous" and problem.is_expert_parallel
    num_experts = choose(
        [
            count
            for count in _alike(problem.num_experts, range(problem.top_k, most_experts + 1))
            if count.bit_length() == problem.num_experts.bit_length() and not (is_half and count % 2)
        ]
    )
    num_local_experts = num_experts // 2 if is_half else num_experts
    if problem.placement == "map" and problem.is_expert_parallel:
        num_local_experts = choose(_alike(problem.num_local_experts, range(1, num_experts)) or [num_experts])
    tokens = next(kind for kind in _TOKENS_OF_A_KIND if layer.num_tokens in kind)
    most_tokens = max(layer.num_tokens, min(limits.num_tokens, limits.num_routes // problem.top_k))
    hidden_size, intermediate_size = (
        choose(range(_least_alike(size), max(limits.size, size) + 1, 128))
        for size in (problem.hidden_size, problem.intermediate_size)
    )
    return dataclasses.replace(
        layer,
        problem=dataclasses.replace(
            problem,
            num_experts=num_experts,
            num_local_experts=num_local_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        ),
        num_tokens=choose(range(tokens.start, min(tokens.stop, most_tokens + 1))),
        routing=choose(_ROUTINGS),
        fill=choose(FILLS),
        form=choose(FORMS),
        seed=choose(range(1000)),
    )


def simpler_layers(layer: DrawnLayer) -> Iterator[DrawnLayer]:
    """Layers that are each simpler in one respect, the most informative first."""
    usual: dict[str, Any] = {"routing": "uniform", "form": "contiguous", "fill": "nan", "wide_ids": False}
    for field, value in usual.items():
        if getattr(layer, field) != value:
            yield dataclasses.replace(layer, **{field: value})
    for num_tokens in (1, 2, layer.num_tokens // 2, layer.num_tokens - 1):
        if 0 < num_tokens < layer.num_tokens:
            yield dataclasses.replace(layer, num_tokens=num_tokens)
    for changes in _simpler_problems(layer.problem):
        problem = dataclasses.replace(layer.problem, **changes)
        ep_rank = layer.ep_rank if problem.is_expert_parallel else 0
        yield dataclasses.replace(layer, problem=problem, ep_rank=ep_rank)


def _simpler_problems(problem: MoEProblem) -> Iterator[dict[str, Any]]:
    if problem.is_expert_parallel:
        yield {"num_local_experts": problem.num_experts}
    else:
        for num_experts in sorted({1, 2, problem.num_experts // 2}):
            if problem.top_k <= num_experts < problem.num_experts:
                yield {"num_experts": num_experts, "num_local_experts": num_experts}
    if problem.top_k > 1:
        yield {"top_k": 1}
    for field, value in (
        ("has_bias", False),
        ("apply_router_weight_on_input", False),
        ("placement", "contiguous"),
        ("activation", ACTIVATIONS["silu"]),
        ("dtype", "bfloat16"),
    ):
        if getattr(problem, field) != value:
            yield {field: value}
    for field in ("hidden_size", "intermediate_size"):
        size = getattr(problem, field)
        for smaller in (16, 32, 64, 128, size // 2):
            if 0 < smaller < size:
                yield {field: smaller}


def _least_alike(size: int) -> int:
    """The smallest size equal modulo 128 that is not tiny, since errors do not average out over few elements."""
    return size % 128 if size % 128 >= 15 else min(size, size % 128 + 128)


def _alike(count: int, others: Sequence[int]) -> list[int]:
    return [other for other in others if (other == 1, other % 16 == 0) == (count == 1, count % 16 == 0)]


def limits_of(cell: BackendCell) -> Limits:
    """The largest sizes at which this machine runs a cell's layers quickly."""
    if is_imitated(cell):
        return INTERPRETED if any(scheme.weight is None for scheme in cell.schemes) else INTERPRETED_QUANTIZED
    return GPU if default_device().type == "cuda" else NATIVE


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    return [size for size in sizes if size <= most]


def _draw_size(choose: Choose, most: int, divisor: int) -> int:
    """Draws a size at, one below or one above steps, pads and tiles, or half a pad past a multiple of the pad."""
    beside = [size + more for size in (16, 32, 64, 128, 256) for more in (0, -1, 1) if 16 <= size + more <= most]
    half_pad = [size for size in range(32, most + 1, 64)]
    between = [size for step in (16, 24, 48) for size in range(48, most + 1, step)]
    size: int = choose(choose((half_pad, beside, between)))
    return -(-size // divisor) * divisor


def claimed_activations(cell: BackendCell) -> list[Activation]:
    """Activations that the cell claims, the most usual first, with further clamps and scalars if claimed."""
    facts = cell.facts
    known = sorted(facts.activations, key=lambda name: (name != "silu", name))
    found = [ACTIVATIONS[name] for name in known if facts.swiglu_limit or ACTIVATIONS[name].limit is None]
    gated = [activation for activation in found if activation.gated]
    if facts.swiglu_limit:
        found += [dataclasses.replace(activation, limit=1.5) for activation in gated]
    if facts.activation_scalars:
        found += [dataclasses.replace(activation, beta=0.5) for activation in gated if activation.beta == 0]
    return found

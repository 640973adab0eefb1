"""Draws layers within a cell's claims by hypothesis, with sizes around kernels' steps, pads and tiles."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from moereg.errors import ArgumentError, described, shown, stops_the_process
from moereg.registry import BackendCell
from moereg.selection.loader import load_backends
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import (
    Case,
    accepted_neighbor,
    default_device,
    held,
    is_imitated,
    runnable_platform,
    served_schemes,
)
from moereg.testing.diagnosis import split_message
from moereg.testing.guards import FILLS, FORMS
from moereg.testing.inputs import ROUTINGS

if TYPE_CHECKING:
    from hypothesis import strategies as st

Choose = Callable[[Sequence[Any]], Any]
"""Picks a value from a sequence; earlier ones are simpler."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Largest sizes that are drawn: H and I, T, E, and T * K."""

    size: int
    num_tokens: int
    num_experts: int
    num_routes: int


# Triton's interpreter takes some tenths of a second for a layer, and more for quantized ones.
INTERPRETED: Final = Limits(size=168, num_tokens=65, num_experts=4, num_routes=66)
INTERPRETED_QUANTIZED: Final = Limits(size=168, num_tokens=33, num_experts=3, num_routes=34)
NATIVE: Final = Limits(size=400, num_tokens=130, num_experts=40, num_routes=1040)
GPU: Final = Limits(size=640, num_tokens=1025, num_experts=40, num_routes=4100)  # Taller tiles for many rows.

# Tile heights, and thresholds between kernels.
_TOKENS: Final = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 513, 1025, 0)
_TOKENS_OF_A_KIND: Final = (range(2), range(2, 9), range(9, 17), range(17, 66), range(66, 1 << 20))
# Layers without any route are too easy, so they are drawn more rarely.
_ROUTINGS: Final = ("uniform", "skewed", "unmapped", *ROUTINGS)
_EXPERTS: Final = (1, 2, 3, 4, 6, 8, 9, 16, 17, 33, 40)
_TOP_K: Final = (1, 2, 3, 4, 5, 8)
# hypothesis draws 100 and more from the constants of loaded modules too, which are not the same in each run.
_MOST_CHOICES: Final = 100

_LAYERS_PER_KERNEL: Final = 8  # On a GPU, where compiling takes most of the time.
_SHRINK_SECONDS: Final = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawnLayer:
    """One call of one cell. `str` is a line that `from_json` and `moereg verify --check` read.

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
        """Inverse of `str`; ArgumentError if the text is no layer."""
        try:
            return cls.from_dict(json.loads(text))
        except ArgumentError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            found = f"{shown(text)} ({described(error)})"
            raise ArgumentError(f"a drawn layer must be its whole line of JSON, got {found}; copy all of it") from error

    def __str__(self) -> str:
        return json.dumps(self.to_dict())

    __repr__ = __str__

    def case(self) -> Case | None:
        """The cell that accepts the problem, and the platform to run as; None if none runs here."""
        for cell in load_backends().cells:
            computes = cell.scheme_for(self.problem.quant)
            name = (cell.name, cell.class_name, cell.rules[0].text, computes and computes.name)
            if name == (self.backend, self.experts, self.rule, self.computes):
                platform = runnable_platform(cell)
                if platform is not None and accepted_neighbor(cell, self.problem, platform) == self.problem:
                    return Case(cell, platform, self.problem)
        return None


def draw_layer(cell: BackendCell, choose: Choose, limits: Limits) -> DrawnLayer:
    """Draws a layer that the cell claims; `choose` makes every choice, such as `random.Random(seed).choice`."""
    facts = cell.facts
    scheme = choose(served_schemes(cell))
    computes = cell.scheme_for(scheme)
    assert computes is not None
    num_experts = choose(_up_to(_EXPERTS, min(limits.num_experts, facts.max_experts or limits.num_experts)))
    top_k = choose(_up_to(_TOP_K, num_experts))
    placement = choose(sorted(facts.placements))
    num_local_experts = num_experts
    if placement == "map":
        num_local_experts = choose(range(num_experts, 0, -1))
    elif num_experts % 2 == 0 and choose((False, True)):
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
        has_bias=choose((False, facts.bias)),
        activation_format=choose(sorted(facts.activation_formats)),
        placement=placement,
        apply_router_weight_on_input=choose((False, facts.router_weight_on_input and top_k == 1)),
    )
    problem = held(problem, facts)
    most_tokens = min(limits.num_tokens, limits.num_routes // top_k)
    return DrawnLayer(
        backend=cell.name,
        experts=cell.class_name,
        rule=cell.rules[0].text,
        computes=computes.name,
        problem=problem,
        # Kernels differ most in tall tiles, so half of the calls have many tokens.
        num_tokens=choose(_up_to(choose((_TOKENS, _TOKENS[9:-1])), most_tokens) or [most_tokens]),
        ep_rank=choose((0, int(placement == "contiguous" and problem.is_expert_parallel))),
        wide_ids=choose((False, True)),
        **_draw_tensors(choose),
    )


def vary_sizes(layer: DrawnLayer, choose: Choose, limits: Limits) -> DrawnLayer:
    """Varies a layer's sizes and tensors such that, as far as moereg knows, no kernel is compiled again.

    Sizes keep their remainder modulo 128, since Triton specializes on multiples of 16. Tokens stay between the
    thresholds of kernels.
    """
    problem = layer.problem
    sizes = {
        field: choose(range(_smallest_congruent(size), max(limits.size, size) + 1, 128))
        for field, size in (("hidden_size", problem.hidden_size), ("intermediate_size", problem.intermediate_size))
    }
    tokens = next(kind for kind in _TOKENS_OF_A_KIND if layer.num_tokens in kind)
    most_tokens = max(layer.num_tokens, min(limits.num_tokens, limits.num_routes // problem.top_k))
    num_tokens = choose(range(tokens.start, min(tokens.stop, most_tokens + 1))[:: 11 if tokens.start > 65 else 1])
    problem = dataclasses.replace(problem, **sizes)
    return dataclasses.replace(layer, problem=problem, num_tokens=num_tokens, **_draw_tensors(choose))


def _draw_tensors(choose: Choose) -> dict[str, Any]:
    choices = {"routing": _ROUTINGS, "fill": FILLS, "form": FORMS, "seed": range(_MOST_CHOICES)}
    return {name: choose(values) for name, values in choices.items()}


def _smallest_congruent(size: int) -> int:
    """The smallest size equal modulo 128 that is not tiny, since errors do not average out over few elements."""
    return size % 128 if size % 128 >= 15 else min(size, size % 128 + 128)


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


def drawn_layers(cell: BackendCell, layers_per_kernel: int = 1) -> st.SearchStrategy[list[DrawnLayer]]:
    """Layers that a cell accepts here, in lists of some that share compiled kernels."""
    from hypothesis import assume
    from hypothesis import strategies as st

    platform, limits = runnable_platform(cell), limits_of(cell)
    assert platform is not None

    @st.composite
    def draw_layers(draw: st.DrawFn) -> list[DrawnLayer]:
        def choose(values: Sequence[Any]) -> Any:
            return draw(st.sampled_from(values))

        found = [draw_layer(cell, choose, limits)]
        found += [vary_sizes(found[0], choose, limits) for _ in range(1, layers_per_kernel)]
        for place, layer in enumerate(found):
            problem = accepted_neighbor(cell, layer.problem, platform)
            assume(problem is not None)
            found[place] = dataclasses.replace(layer, problem=problem or layer.problem)
        return found

    return draw_layers()


def check_drawn(
    cell: BackendCell,
    check: Callable[[DrawnLayer], object],
    seed: int,
    num_layers: int | None,
    seconds: float | None,
    tell: Callable[[tuple[int, DrawnLayer]], object],
) -> None:
    """Checks layers that hypothesis draws, the simplest first, until one fails, which it then makes simpler.

    Args:
        cell: A cell that runs here.
        check: Raises if a layer is wrong.
        seed: Equal seeds draw equal layers.
        num_layers, seconds: How many to draw, and the time for all; None if that is not limited.
        tell: Called with each layer and its number before it is checked; if one failed, last with the simplest.
    """
    from hypothesis import Phase, configuration, errors, find, settings

    end, number = math.inf if seconds is None else time.monotonic() + seconds, 0
    failed: tuple[DrawnLayer, BaseException] | None = None

    def fails(layers: Sequence[DrawnLayer]) -> bool:
        nonlocal end, failed, number
        for layer in layers:
            if time.monotonic() > end:
                raise _TimeIsUp
            number += 1
            tell((number, layer))
            try:
                check(layer)
            except BaseException as error:
                if stops_the_process(error):
                    raise
                if failed is None:
                    end = time.monotonic() + _SHRINK_SECONDS
                elif (known := _causes(failed[1])) and _causes(error) != known:
                    continue  # In the simplest layers many mistakes look the same.
                failed = layer, error
                return True
        return False

    layers_per_kernel = _LAYERS_PER_KERNEL if default_device().type == "cuda" and not is_imitated(cell) else 1
    most = 1 << 30 if num_layers is None else -(-num_layers // layers_per_kernel)
    options = settings(max_examples=most, deadline=None, database=None, phases=(Phase.generate, Phase.shrink))
    # Equal in every process, unlike the cell's own text: sets have an order of their own there.
    names = (*(scheme.name for scheme in cell.schemes), *(rule.text for rule in cell.rules))
    text = "/".join((str(seed), cell.name, cell.class_name, *names))
    configuration.set_hypothesis_home_dir(os.devnull)  # It would write to the current folder.
    try:
        find(drawn_layers(cell, layers_per_kernel), fails, settings=options, random=random.Random(text))
    except (_TimeIsUp, errors.NoSuchExample, errors.Unsatisfiable, errors.Flaky):
        pass
    finally:
        configuration.set_hypothesis_home_dir(None)
    if failed is not None:
        tell((number, failed[0]))
        raise failed[1]


class _TimeIsUp(BaseException):
    """Ends hypothesis' search, which takes an `Exception` for a failure."""


def _causes(error: BaseException) -> set[str]:
    return set(split_message(str(error))[1])

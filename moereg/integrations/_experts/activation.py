"""Recognizes a live module's activation by comparing it with ours on probe values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import torch

from moereg.errors import ArgumentError, described
from moereg.spec.activations import ACTIVATIONS, Activation

_LIMITS: Final = ("limit", "swiglu_limit")
_SLOPES: Final = ("alpha", "swiglu_alpha")
"""Attributes with the gate's scalars in transformers' modules."""

_QUICK_GELU_SLOPE: Final = 1.702

# The same formula in another order of operations differs by a few ulps, another formula by far more.
_TOLERANCE: Final = 1e-5


def recognize(module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], is_gated: bool) -> Activation:
    """Finds the activation that a function of [..., 2I], gate first, or not gated of [..., I], computes.

    Names and scalars differ between classes, and a class may clamp in unexpected places. So the function is evaluated
    on values beyond any of the module's limits.
    """
    candidates = list(dict.fromkeys(_candidates(module, is_gated)))
    probe = _probe(candidates, is_gated)
    try:
        with torch.no_grad(), torch.device("cpu"):
            found = function(probe)
    except Exception as error:
        raise ArgumentError(f"its activation cannot be asked: {described(error)}") from error
    for candidate in candidates:
        expected = candidate(probe)
        if found.shape == expected.shape and torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE):
            return candidate
    name = type(getattr(module, "act_fn", None) or module).__name__
    known = ", ".join(name for name, value in ACTIVATIONS.items() if value.gated == is_gated)
    raise ArgumentError(
        f"its activation ({name}, {'gated' if is_gated else 'not gated'}) is none that moereg computes ({known}, with "
        "a clamp before the gate or without)"
    )


def gated_by(act_fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a function of [..., 2I], gate first, that applies another one to the gate only."""

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return act_fn(gate) * up

    return gated


def gate_function(module: torch.nn.Module, is_concatenated: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """A module's own gate, or its `act_fn` on the gate, as a function of [..., 2I], gate first."""
    own: Callable[[torch.Tensor], torch.Tensor] | None = getattr(module, "_apply_gate", None)
    if own is None:
        return gated_by(module.act_fn)  # type: ignore[arg-type]
    if is_concatenated:
        return own
    return lambda gate_up: own(torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2))


def _candidates(module: torch.nn.Module, is_gated: bool) -> Iterator[Activation]:
    if not is_gated:
        yield from (value for value in ACTIVATIONS.values() if not value.gated)
        return
    limits = (None, *_numbers(module, _LIMITS))
    slopes = (*_numbers(module, _SLOPES), _QUICK_GELU_SLOPE)
    for limit in limits:
        yield from (Activation(name, limit=limit) for name in ("silu", "gelu", "gelu_tanh"))
    for limit, slope in itertools.product(limits, slopes):
        yield Activation("swigluoai", alpha=slope, beta=1.0, limit=limit)
        yield Activation("silu", alpha=slope, limit=limit)
    # Modules of the activation (Inkling 2).
    caps = (getattr(getattr(module, "act_fn", None), name, None) for name in ("gate_softcap", "up_softcap"))
    for gate, up in itertools.product(*(_numbers(cap, ("softcap",)) for cap in caps)):
        yield Activation("situ", gate_softcap=gate, up_softcap=up)


def _numbers(module: object, names: tuple[str, ...]) -> tuple[float, ...]:
    values = (getattr(module, name, None) for name in names)
    return tuple(
        float(value)
        for value in values
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    )


def _probe(candidates: list[Activation], is_gated: bool) -> torch.Tensor:
    """Probe values [N,2] for gate and up, or [N,1]: a grid around zero and beyond every candidate's limits."""
    limits = ((one.limit, one.gate_softcap, one.up_softcap) for one in candidates)
    largest = max((limit or 0.0 for limit in itertools.chain.from_iterable(limits)), default=0.0)
    near = torch.linspace(-6, 6, 25, device="cpu", dtype=torch.float32)
    far = torch.tensor([-2 * largest - 20, 2 * largest + 20, -0.75 * largest, 0.75 * largest], device="cpu")
    points = torch.cat([near, far])
    return torch.cartesian_prod(points, points) if is_gated else points[:, None]

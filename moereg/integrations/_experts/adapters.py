"""Reads the low-rank adapters that PEFT puts on experts (`target_parameters`) as factors, never their product.

PEFT parametrizes the parameters during each call, so that reading one computes the sum of a weight and its adapter.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Final, NamedTuple

import torch
from torch.nn.utils import parametrize

from moereg.integrations._experts.packed import PackedExperts
from moereg.weights.adapters import ExpertAdapters

_FACTORS: Final = "_LoraFactorsProxy"
"""PEFT's parametrization with the factors of the one active adapter, from PEFT 0.21 on."""

_PRODUCT: Final = "_LoraParameterProxy"
"""PEFT's parametrization with the product: of all adapters before PEFT 0.21, of several active ones since."""

KNOWN: Final = frozenset({"0.21.0", "0.21.1", "0.21.2"})
"""Versions of PEFT whose code is changed where it would compute all weights of a layer. Others are read too."""

_MATRICES: Final = {"gate_up_proj": "w13", "up_proj": "w13", "down_proj": "w2"}
_LEAST_RANK: Final = 8


class Factors(NamedTuple):
    """A parameter that computes as `base + scaling * left @ right`.

    Attributes:
        base: [E,M,N].
        left: [E,M,R] in the dtype of `base`, in any order in memory; autograd follows it to the adapter.
        right: [E,R,N], likewise.
        scaling: As in `ExpertAdapters`.
    """

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor
    scaling: float


def factors_of(module: torch.nn.Module, name: str) -> Factors | None:
    """The factors of a parameter during a call; None if PEFT does not hand over any."""
    if not parametrize.is_parametrized(module, name):
        return None
    computed: Any = module.parametrizations[name]  # type: ignore[index]
    entry = computed[0]
    if len(computed) > 1 or type(entry).__name__ != _FACTORS or not {"lhs", "rhs", "scaling"} <= vars(entry).keys():
        return None
    if not torch.compiler.is_compiling() and skip_check(type(entry)) and torch.is_grad_enabled():
        # A checkpoint that recomputes this call has to save the same tensors again.
        for each in module.parametrizations.values():  # type: ignore[operator]
            each.original.moereg_is_checked = True
    return Factors(computed.original, entry.lhs, entry.rhs, float(entry.scaling))


def parameter_of(module: torch.nn.Module, name: str) -> Any:
    """A parameter without what factors add to it, given its dotted name; None if there is none."""
    value: Any = module
    for part in name.split("."):
        factors = factors_of(value, part)
        value = getattr(value, part, None) if factors is None else factors.base
    return value


def adapters_of(module: torch.nn.Module) -> ExpertAdapters | str | None:
    """Adapters of a module in a call of it, in canonical order; None if it has none, or a clause why not.

    Its parameters are canonical, or quantized.
    """
    if not parametrize.is_parametrized(module):
        return None
    fields: dict[str, Any] = {}
    for name in module.parametrizations:  # type: ignore[union-attr]
        factors, matrix = factors_of(module, name), _MATRICES.get(name)
        if factors is None or matrix is None:
            return _reason(module, name)
        b, a = factors.left, factors.right
        if isinstance(factors.base, PackedExperts):
            b, a = factors.base.form.factors(b, a)
        fields |= {f"{matrix}_a": a, f"{matrix}_b": b, f"{matrix}_scaling": factors.scaling}
    return ExpertAdapters(**fields)


def rank_of(adapters: ExpertAdapters | None) -> int:
    """The rank to plan for: the largest one, rounded up to a power of two, so that ranks share plans; 0 for none."""
    held = {} if adapters is None else adapters.tensors()
    ranks = [tensor.shape[1] for name, tensor in held.items() if name.endswith("_a")]
    return max(_LEAST_RANK, 1 << (max(ranks) - 1).bit_length()) if ranks else 0


def _reason(module: torch.nn.Module, name: str) -> str:
    computed: Any = module.parametrizations[name]  # type: ignore[index]
    kinds = [type(entry).__name__ for entry in computed]
    if kinds == [_PRODUCT]:
        return f"PEFT adds a product to {name}: more than one adapter is active, or PEFT is older than 0.21"
    return f"{' and '.join(kinds)} computes {name}, which is not one adapter of PEFT's LoRA"


def skip_check(kind: Any) -> bool:
    """Lets torch's check of a parametrization, PEFT's first use of each one, compare a tensor on meta.

    Otherwise each call computes all weights of the layer once, and drops them.

    Returns:
        Whether checks of the running call have computed weights, and those of later calls do not.
    """
    version = getattr(sys.modules.get("peft"), "__version__", "")
    if hasattr(kind.forward, "_is_moereg") or version not in KNOWN:
        return False
    begin, compute = kind.__init__, kind.forward

    @functools.wraps(begin)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        self._moereg_is_new = True

    @functools.wraps(compute)
    def forward(self: Any, weight: torch.Tensor) -> Any:
        plain = (torch.Tensor, torch.nn.Parameter, PackedExperts)
        is_plain = type(weight) in plain and not hasattr(weight, "moereg_is_checked")
        if vars(self).pop("_moereg_is_new", False) and is_plain:
            return torch.empty_like(weight, device="meta")
        return compute(self, weight)

    forward._is_moereg = True  # type: ignore[attr-defined]
    # In this order: until it is marked as new, a proxy of another thread computes.
    kind.forward = forward
    kind.__init__ = __init__
    return True

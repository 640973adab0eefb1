"""The hook: SGLang's layers get a quantization method that runs moereg's kernel.

SGLang builds its own method first, which creates parameters and loads weights as usual. Where moereg serves the layer,
the method's class becomes a subclass with the same name, since SGLang branches on it; the subclass takes the weights
out of the parameters when they are loaded, and calls the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from typing import Any, Final, NoReturn

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.runtime_context import get_server_args

from moereg import MoEKernel, Selection, explain_backends, make_kernel
from moereg.platforms import platform_of
from moereg.runtime.workspace import WORKSPACES
from sglang_moereg.problem import Described, describe, take_weights

__all__ = ["install"]

logger: Final = logging.getLogger("sglang.moereg")

_SAID: Final[set[str]] = set()
_WARMED: Final[set[str]] = set()
"""Fingerprints of choices whose kernels were compiled ahead."""


def install() -> None:
    """Wraps `FusedMoE.__init__`; a second call changes nothing."""
    # Not by SGLang's HookRegistry, which logs a hook that it could not apply and goes on without it.
    original = FusedMoE.__init__
    if hasattr(original, "of_moereg"):
        return

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _serve(self)

    __init__.of_moereg = True  # type: ignore[attr-defined]
    FusedMoE.__init__ = __init__


@dataclasses.dataclass
class Served:
    """A layer that moereg serves; a quantization method has it as `moereg`."""

    name: str
    described: Described
    selection: Selection
    kernel: MoEKernel | None = None


def _serve(layer: Any) -> None:
    """Makes a layer's method moereg's where moereg serves the layer; else says why not."""
    method, name = layer.quant_method, f"layer {layer.layer_id}"
    described = describe(layer, get_server_args(), get_moe_runner_backend(), get_moe_a2a_backend())
    if isinstance(described, Described):
        selection = explain_backends(described.problem, platform_of(next(layer.parameters()).device))
        if selection.winner is not None:
            _say_choice(name, selection, selection.winner)
            method.__class__ = _subclass(type(method))
            method.moereg = Served(name, described, selection)
            return
    reasons = selection.refusal if isinstance(described, Described) else "; ".join(described)
    text = f"moereg leaves MoE layers such as {{layer}} ({type(method).__name__}) to SGLang: {reasons}"
    if os.environ.get("MOEREG_SGLANG") == "require":
        raise RuntimeError(f"MOEREG_SGLANG=require, but {text.replace('{layer}', name)}")
    _say(logging.WARNING, text, name)


def _say_choice(name: str, selection: Selection, winner: Any) -> None:
    text = (
        f"MoE {selection.problem} on {selection.platform}: {winner.label}, "
        f"computes {winner.computes}, by {selection.source}; next: {', '.join(selection.alternatives) or 'none'}"
    )
    _say(logging.INFO, f"moereg runs {{layer}} and layers like it: {text}", name)
    if winner.tier == "emulation":
        text = f"{winner.backend} is an emulation: right numbers, not the scheme's speed"
        _say(logging.WARNING, f"{text}; MOEREG_SGLANG=off leaves it to SGLang", name)
    for notice in selection.notices:
        _say(logging.WARNING, f"moereg: {notice}", name)


def _say(level: int, text: str, name: str) -> None:
    """Logs a text with the layer's name in it, once for layers alike."""
    if text not in _SAID:
        _SAID.add(text)
        logger.log(level, "%s", text.replace("{layer}", name))


@functools.cache
def _subclass(base: type) -> type:
    """A subclass with the base's name. One base: with a second, Python refuses to change an instance's class."""
    namespace = {"__module__": __name__, "process_weights_after_loading": _process_weights, "apply": _apply}
    return type(base.__name__, (base,), namespace)


def _process_weights(method: Any, layer: Any) -> None:
    served: Served = method.moereg
    try:
        weights = take_weights(layer, served.described)
        served.kernel = make_kernel(served.described.problem, weights, selection=served.selection)
    except ValueError as error:
        text = f"moereg cannot read the weights of {served.name} ({type(method).__name__}): {error}"
        raise RuntimeError(f"{text}; MOEREG_SGLANG=off leaves them to SGLang") from error

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"moereg cannot load weights of {served.name} again, since it freed them; start a new engine"
        )

    for parameter in layer.parameters(recurse=False):
        parameter.weight_loader = refuse
    # Here, so that no request waits for a compiler.
    key = served.selection.fingerprint
    if served.kernel.weights.device.type == "cuda" and key not in _WARMED:
        _WARMED.add(key)
        try:
            logger.info("moereg: %s", served.kernel.warm_up())
        except (ValueError, RuntimeError) as error:
            logger.warning("moereg: kernels compile when they are first called, since they did not ahead: %s", error)
        WORKSPACES.release()  # SGLang's calls run on other streams, which have scratch memory of their own.


def _apply(method: Any, layer: Any, dispatch_output: Any) -> StandardCombineInput:
    served: Served = method.moereg
    assert served.kernel is not None, "weights are loaded before the first call"
    routes = dispatch_output.topk_output
    weights = routes.topk_weights.float()
    if served.described.scale != 1.0:
        weights = weights * served.described.scale
    # Ids are this rank's own, and -1 for experts of other ranks and for padding.
    sums = served.kernel(dispatch_output.hidden_states.contiguous(), weights, routes.topk_ids)
    return StandardCombineInput(hidden_states=sums)

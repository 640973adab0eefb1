"""Finds the experts modules of a live model, and patches classes without the experts interface."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from types import MethodType
from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts.calls import call
from moereg.integrations._experts.layouts import LiveExperts, read_experts
from moereg.integrations._experts.own import follows, own_output
from moereg.integrations._experts.serving import NAME, NAMES, has_interface, served


@dataclasses.dataclass(frozen=True)
class FoundExperts:
    """The routed experts of one layer of a model.

    Attributes:
        name: Dotted name of the module with the weights, which also holds the kernels.
        block: The block whose forward is patched; None if the experts interface calls us.
        top_k: Experts per token; None if no module or config says.
        live: The meaning of the parameters; None if they cannot be served.
        refusal: Why not, as a clause, or None.
    """

    name: str
    module: torch.nn.Module
    block: torch.nn.Module | None = None
    top_k: int | None = None
    live: LiveExperts | None = None
    refusal: str | None = None

    @property
    def class_name(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__


def find_experts(model: torch.nn.Module) -> tuple[FoundExperts, ...]:
    """All modules with routed experts, in model order."""
    found: list[FoundExperts] = []
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue  # Inside a block that was found as a whole.
        class_name = type(module).__name__
        prefix = f"{name}." if name else ""
        reason = _REFUSED.get(class_name)
        if (row := _PATCHES.get(class_name)) is not None:
            inside = prefix
            path = f"{prefix}{row.experts}" if row.experts else name
            experts = module.get_submodule(row.experts) if row.experts else module
            found.append(_read(model, path, experts, module, row.top_k))
        elif reason is None and has_interface(module):
            found.append(_read(model, name, module, None))
        elif reason is not None or _EXPERTS_NAME.search(class_name):
            inside = prefix
            found.append(FoundExperts(name, module, refusal=reason or _NO_INTERFACE))
    return tuple(found)


_UNTRAINED: Final = "it does not use transformers' experts interface"
_NO_INTERFACE: Final = "it does not use transformers' experts interface, and moereg has no patch for it"
_EXPERTS_NAME: Final = re.compile(r"(?<!Shared)(Experts|SparseMLP)$")


def _read(
    model: torch.nn.Module,
    name: str,
    module: torch.nn.Module,
    block: torch.nn.Module | None,
    top_k: int | None = None,
) -> FoundExperts:
    top_k = top_k or _top_k(model, name)
    known = served(module)
    if known is not None:
        known.settle()
    try:
        live = known.live if known is not None and known.released else read_experts(module)
    except ArgumentError as error:
        return FoundExperts(name, module, block, top_k, refusal=str(error))
    return FoundExperts(name, module, block, top_k, live)


_TOP_K: Final = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


def _top_k(model: torch.nn.Module, name: str) -> int | None:
    """Experts per token, from the block around the experts, its router, or a config."""
    module = model.get_submodule(name)
    block = model.get_submodule(name.rpartition(".")[0])
    sources: list[Any] = [block, *block.children()] if "." in name else []
    configs = [getattr(each, "config", None) for each in (module, block, model)]
    for config in configs:
        sources += [config, getattr(config, "text_config", None), getattr(config, "ffn_config", None)]
    for source in sources:
        for attribute in _TOP_K:
            value = getattr(source, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def switch(model: torch.nn.Module, found: tuple[FoundExperts, ...]) -> None:
    """Sets the implementation of the configs that the experts' modules read."""
    if not any(has_interface(each.module) for each in found):
        return
    set_implementation = getattr(model, "set_experts_implementation", None)
    if set_implementation is not None:
        set_implementation(NAME)
    for each in found:
        if has_interface(each.module):
            config: Any = each.module.config
            # A bare layer lacks this method, and a wrapper's may not reach every config.
            if config._experts_implementation not in NAMES:
                config._experts_implementation = NAME


@dataclasses.dataclass(frozen=True)
class _Patch:
    """How to serve a class without the interface.

    Attributes:
        forward: Replaces the class's own, for instances whose experts are prepared.
        experts: Dotted name of the experts in it; empty if it is the experts module.
        top_k: Experts per row in `forward`'s calls, if different from the router's.
    """

    forward: Callable[..., Any]
    experts: str = ""
    top_k: int | None = None


def patch(block: torch.nn.Module) -> None:
    """Makes a prepared block run on its kernels; unprepared blocks of its class run as before."""
    kind, row = type(block), _PATCHES[type(block).__name__]
    original: Any = kind.forward
    if getattr(original, "_is_moereg", False):
        forward = original
    else:

        @functools.wraps(original)
        def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = served(self.get_submodule(row.experts) if row.experts else self)
            if found is None:
                return original(self, *args, **kwargs)
            is_followed = follows(self, (*args, *kwargs.values()))
            if found.released or not (is_followed or self.training):
                return row.forward(self, *args, **kwargs)
            ways = {"code": lambda: original(self, *args, **kwargs)}
            own = own_output(self, found, is_followed, _UNTRAINED, ways)
            return row.forward(self, *args, **kwargs) if own is None else own

        forward._is_moereg = True
        kind.forward = forward
    # accelerate's hook calls the method that it found when it was added.
    if "_old_forward" in vars(block):
        block._old_forward = MethodType(forward, block)  # type: ignore[assignment]


def _dbrx(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    rows = hidden_states.reshape(-1, self.hidden_size)
    out = call(self, rows, top_k_index, top_k_weights)
    return out.view(hidden_states.shape[0], -1, self.hidden_size)


def _llama4(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Llama4TextMoe`: the router's scores scale the experts' inputs; unchosen experts have score zero."""
    rows = hidden_states.reshape(-1, self.hidden_dim)
    router_scores, router_logits = self.router(rows)
    scores, ids = torch.topk(router_scores, self.top_k, dim=1)
    # Each route becomes a token, since a token's input is scaled differently for each of its experts.
    routed = rows.repeat_interleave(self.top_k, dim=0) * scores.reshape(-1, 1)
    ones = torch.ones_like(scores).reshape(-1, 1)
    experts_out = call(self.experts, routed, ids.reshape(-1, 1), ones)
    out = self.shared_expert(rows)
    out = out + experts_out.view(-1, self.top_k, self.hidden_dim).sum(dim=1)
    return out, router_logits


def _mxfp4(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Mxfp4GptOssMLP`, which bypasses the forward of its experts."""
    rows = hidden_states.reshape(-1, self.router.hidden_dim)
    router_logits, router_scores, router_indices = self.router(rows)
    out = call(self.experts, rows, router_indices, router_scores)
    return out.reshape(hidden_states.shape[0], -1, self.router.hidden_dim), router_logits


_PATCHES: Final = {
    "DbrxExperts": _Patch(_dbrx),
    "Llama4TextMoe": _Patch(_llama4, experts="experts", top_k=1),
    "Mxfp4GptOssMLP": _Patch(_mxfp4, experts="experts"),
    "Step3p7Experts": _Patch(call),
}
"""transformers classes with experts but without the interface that moereg serves anyway."""

_REFUSED: Final = {
    "DogeCDMoE": "each of its experts is a pair of vectors, not of matrices",
    "JetMoeMoE": "it sorts tokens by expert itself and its attention is made of experts too",
    "LongcatFlashExperts": "some of its experts return their input, which no kernel here does",
    "Mxfp4GptOssExperts": "this version of transformers routes inside its kernels; update transformers to 5.23",
    "NllbMoeSparseMLP": "its experts are separate modules with relu, which no kernel here computes",
    "SwitchTransformersSparseMLP": "its experts are separate modules with relu, which no kernel here computes",
}
"""Classes with routed experts that are not served, with reasons."""

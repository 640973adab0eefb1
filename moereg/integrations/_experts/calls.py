"""The function that transformers calls in place of its own, one opaque operator in compiled code."""

from __future__ import annotations

from typing import Any, Final

import torch

from moereg.integrations._experts.serving import ServedExperts, attach, refused, served
from moereg.runtime.graph_pools import in_compiled_code
from moereg.runtime.torch_op import layer_of

_attach_while_compiling = torch.compiler.disable(
    attach,
    reason="moereg makes kernels outside of compiled code: call moereg.integrations.transformers.prepare(model), or "
    "the model once, before torch.compile(fullgraph=True)",
)


def call(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function that transformers calls.

    Args:
        module: The experts module.
        hidden_states: [T,H].
        top_k_index: [T,K] int64, local experts; `num_experts` for other ranks' experts.
        top_k_weights: [T,K] in fp32 or the model's dtype.

    Returns:
        [T,H] in the dtype of `hidden_states`. Its gradient raises.

    Raises:
        ArgumentError: The module cannot be served, or it is being trained.
    """
    found = served(module)
    if found is None:
        found = _attach_while_compiling(module) if torch.compiler.is_compiling() else attach(module)
    needs_gradient = torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad)
    if needs_gradient and module.training:
        raise refused(module, "it is being trained, and moereg computes no gradients; call model.eval() to infer")
    if torch.compiler.is_compiling():
        out: torch.Tensor = torch.ops.moereg.live_experts(
            hidden_states.detach(), top_k_index, top_k_weights.detach(), found.handle
        )
    else:
        out = found.run(hidden_states, top_k_index, top_k_weights)
    if not needs_gradient:
        return out
    joined: torch.Tensor = _NoGradient.apply(hidden_states, out)  # type: ignore[no-untyped-call]
    return joined


class _NoGradient(torch.autograd.Function):
    """Joins an output to the autograd graph, so that a backward pass raises instead of omitting gradients."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.moereg.no_gradient(gradients[0]), None


_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_LIBRARY.define(
    "live_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor handle) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define("no_gradient(Tensor gradient) -> Tensor")


def _live_experts(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    found: ServedExperts = layer_of(handle)
    with in_compiled_code():
        return found.run(hidden_states, topk_ids, topk_weights)


def _no_gradient(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError(
        "moereg computes no gradients: call the model under torch.no_grad(), or train it after "
        "moereg.integrations.transformers.restore(model) and set_experts_implementation('grouped_mm')"
    )


_LIBRARY.impl("live_experts", _live_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moereg::live_experts",
    lambda hidden_states, *_: torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)
_LIBRARY.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::no_gradient", torch.empty_like, lib=_LIBRARY)

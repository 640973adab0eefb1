"""The function that transformers calls in place of its own, one opaque operator in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from moereg.integrations._experts.own import own_output, weights_of
from moereg.integrations._experts.serving import ServedExperts, attach, has_interface, served
from moereg.layer.no_backward import joined
from moereg.runtime.graph_pools import in_compiled_code
from moereg.runtime.torch_op import detached, layer_of

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
        [T,H] in the dtype of `hidden_states`. A backward pass to what a kernel computed raises `GradientError`.

    Raises:
        ArgumentError: The module cannot be served.
    """
    found = served(module)
    if has_interface(module):  # The others are patched where their own code is known.
        inputs = (hidden_states, top_k_index, top_k_weights)
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "grouped_mm": lambda: _functions(module)["grouped_mm"](module, *inputs),
            "eager": lambda: type(module).forward.__wrapped__(module, *inputs),  # type: ignore[attr-defined]
        }
        own = own_output(module, found, inputs, ways)
        if own is not None:
            return own  # type: ignore[no-any-return]
    if found is None:
        found = _attach_while_compiling(module) if torch.compiler.is_compiling() else attach(module)
    if torch.compiler.is_compiling():
        rows, ids, weights = detached([hidden_states, top_k_index, top_k_weights])
        out: torch.Tensor = torch.ops.moereg.live_experts(rows, ids, weights, found.handle)
    else:
        out = found.run(hidden_states, top_k_index, top_k_weights)
    if not torch.is_grad_enabled():
        return out
    return joined(out, hidden_states, top_k_weights, *weights_of(module))


def _functions(module: torch.nn.Module) -> Any:
    """Transformers' own implementations for a module."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_FP8_EXPERTS_FUNCTIONS if isinstance(module, FP8Experts) else ALL_EXPERTS_FUNCTIONS


_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_LIBRARY.define(
    "live_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor handle) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _live_experts(
    hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, handle: torch.Tensor
) -> torch.Tensor:
    found: ServedExperts = layer_of(handle)
    with in_compiled_code():
        return found.run(hidden_states, topk_ids, topk_weights)


_LIBRARY.impl("live_experts", _live_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moereg::live_experts",
    lambda hidden_states, *_: torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)

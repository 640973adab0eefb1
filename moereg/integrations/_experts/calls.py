"""The function that transformers calls in place of its own, one opaque operator in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.utils import parametrize

from moereg.errors import MoeregError
from moereg.integrations._experts.layouts import has_fp8
from moereg.integrations._experts.own import first_that_runs, follows, own_output, say, weights_of
from moereg.integrations._experts.packed import is_packed
from moereg.integrations._experts.serving import (
    NOT_IN_COMPILED_CODE,
    CopiesError,
    ServedExperts,
    attach,
    has_interface,
    kinds_of,
    refused,
    served,
)
from moereg.integrations._experts.training import Trainer, trainer_of
from moereg.layer.checks import check_no_transform
from moereg.layer.train_op import joined
from moereg.runtime.graph_pools import in_compiled_code
from moereg.runtime.torch_op import detached, layer_of

_check_while_compiling = torch.compiler.disable(ServedExperts.check_in_place, reason=NOT_IN_COMPILED_CODE)
_attach_while_compiling = torch.compiler.disable(attach, reason=NOT_IN_COMPILED_CODE)


def call(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts function that transformers calls; a backward pass raises if neither moereg nor the module has one.

    `hidden_states` are [T,H], as is the result in their dtype, `top_k_index` [T,K] int64, local experts or
    `num_experts` for other ranks', and `top_k_weights` [T,K] in fp32 or the model's dtype.
    """
    inputs = (hidden_states, top_k_index, top_k_weights)
    is_followed, is_compiling = follows(module, inputs), torch.compiler.is_compiling()
    found = served(module)
    ways: dict[str, Callable[[], torch.Tensor]] = {}
    # The others are patched where their own code is known.
    if has_interface(module) and not (found is not None and found.released):
        ways["grouped_mm"] = lambda: own_functions(module)["grouped_mm"](module, *inputs)
        ways["eager"] = lambda: _own_forward(module)(module, *inputs)
    try:
        check_no_transform(inputs, weights_of(module))
    except MoeregError:
        name, own, reasons = first_that_runs(ways, is_followed)
        if not name:
            raise
        say(
            "moereg does not run inside of torch.func's transforms and forward-mode AD, where transformers' own "
            f"{name} does{reasons}"
        )
        return own  # type: ignore[no-any-return]
    is_trained, is_adapted = is_followed or module.training, parametrize.is_parametrized(module)
    is_frozen = is_packed(module)
    if ways and (is_trained or is_adapted or is_frozen):
        trainer = trainer_of(module, top_k_index.shape[-1])
        found = served(module)
        is_prepared = found is not None and found.is_prepared
        # A prepared kernel has quantized weights without adapters.
        if isinstance(trainer, str) and (is_trained or not is_prepared or (is_frozen and is_adapted)):
            own = own_output(module, found, is_followed, trainer, ways, is_trained)
            if own is not None:
                return own  # type: ignore[no-any-return]
        elif isinstance(trainer, Trainer) and (is_followed or is_adapted or (is_frozen and not is_prepared)):
            if found is not None and any(each.requires_grad for each in module.parameters()):
                found.forget()  # Inference reads all weights again: training may write them where torch does not count.
            return trainer.run(module, *inputs)
    if found is None:
        found = _attach_while_compiling(module) if is_compiling else attach(module)
    try:
        out = _run_compiled(found, *inputs) if is_compiling else found.run(*inputs)
    except CopiesError as error:
        own = own_output(module, found, is_followed, str(error), ways, is_trained=False)
        if own is None:
            raise refused(module, error) from error
        return own  # type: ignore[no-any-return]
    if not is_followed:
        return out
    return joined(out, hidden_states, top_k_weights, *weights_of(module))


def _run_compiled(
    found: ServedExperts, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One opaque operator, whose inputs are the parameters too."""
    top_k, dtype = top_k_index.shape[-1], found.dtype_of(hidden_states)
    if not (found.is_prepared or found.released or (top_k, dtype) in found.kernels):
        if (reason := found.declined.get((top_k, dtype, *kinds_of(found.module)))) is not None:
            raise CopiesError(reason)
        _check_while_compiling(found, top_k, dtype)
    tensors = [] if found.released else found.tensors()
    rows, ids, weights, *tensors = detached([hidden_states, top_k_index, top_k_weights, *tensors])
    out: torch.Tensor = torch.ops.moereg.live_experts(rows, ids, weights, tensors, found.handle)
    return out


def own_functions(module: torch.nn.Module) -> Any:
    """Transformers' own implementations for a module."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    return ALL_FP8_EXPERTS_FUNCTIONS if has_fp8(module) else ALL_EXPERTS_FUNCTIONS


def _own_forward(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """A class's own code, below the interface, which wraps `FP8Experts` once more for each layer of a model."""
    forward: Any = type(module).forward
    interface = forward.__code__
    while forward.__code__ is interface:
        forward = forward.__wrapped__
    return forward  # type: ignore[no-any-return]


_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_LIBRARY.define(
    "live_experts(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor[] tensors, Tensor handle) "
    "-> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def _live_experts(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    tensors: list[torch.Tensor],
    handle: torch.Tensor,
) -> torch.Tensor:
    found: ServedExperts = layer_of(handle)
    with in_compiled_code():
        return found.run(hidden_states, topk_ids, topk_weights, tensors)


_LIBRARY.impl("live_experts", _live_experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "moereg::live_experts",
    lambda hidden_states, *_: torch.empty_like(hidden_states, memory_format=torch.contiguous_format),
    lib=_LIBRARY,
)

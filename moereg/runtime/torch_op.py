"""The opaque torch op by which compiled and exported code runs a layer."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

from moereg.errors import CompiledCodeError
from moereg.runtime.graph_pools import in_compiled_code

# Each process starts at another number, so that code exported elsewhere finds no layer of this process.
_HANDLES: Final = itertools.count(random.SystemRandom().getrandbits(62))
_LAYERS: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()

_LIBRARY: Final = torch.library.Library("moereg", "DEF")
_LIBRARY.define(
    "moe_layer(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor(a!) out, Tensor handle) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def is_exporting() -> bool:
    """Whether code is compiled for `torch.export`, like `torch.compiler.is_exporting`.

    Dynamo in torch 2.11 treats that function as true in every compilation, so this reads the flag behind it.
    """
    return bool(torch.compiler._is_exporting_flag)


@torch.inference_mode(False)  # A layer that is first called in inference mode may train later.
def new_handle(layer: object) -> torch.Tensor:
    """Makes a number by which compiled code finds a layer, without keeping it alive.

    Args:
        layer: For `run_compiled`, one whose `check_and_run` checks addresses and values, which tensors lack while code
            is compiled, and writes `out`.

    Returns:
        [] int64. A tensor, since compiled code treats a number as a constant and would recompile for each layer. It is
        on the CPU whatever the default device, since each call of compiled code reads it.
    """
    number = next(_HANDLES)
    _LAYERS[number] = layer
    return torch.tensor(number, device="cpu")


def layer_of(handle: torch.Tensor) -> Any:
    """The layer of a handle, unless it is gone or another process's."""
    layer = _LAYERS.get(int(handle))  # The handle is on the CPU, so nothing synchronizes.
    if layer is None:
        raise CompiledCodeError(
            f"the MoE layer of compiled code (handle {int(handle)}) is gone; keep a reference to it, and export again "
            "in another process"
        )
    return layer


def run_compiled(*call_and_handle: torch.Tensor) -> None:
    """Runs a layer while its caller is compiled: one opaque op that writes `out`; arguments as in its schema."""
    torch.ops.moereg.moe_layer(*detached(call_and_handle))


def detached(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that autograd does not follow: it refuses operators that write into an argument."""
    return [each.detach() if each.requires_grad else each for each in tensors]


def _moe_layer(*call_and_handle: torch.Tensor) -> None:
    *call, handle = call_and_handle
    layer = layer_of(handle)
    with in_compiled_code():
        layer.check_and_run(*call)


_LIBRARY.impl("moe_layer", _moe_layer, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::moe_layer", lambda *call_and_handle: None, lib=_LIBRARY)

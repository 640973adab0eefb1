"""The torch op by which exported programs run a layer: the program holds its weights, and any process can load it."""

from __future__ import annotations

import dataclasses
import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.dispatch import platform_of, select_backend
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.runtime.graph_pools import in_compiled_code
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights
from moereg.weights.versions import TensorState, check_counted, states_of

__all__ = ["run_exported"]


@dataclasses.dataclass
class _Layer:
    """The kernel of a layer of a program.

    Attributes:
        kernel: Has its own weights, so that it does not keep the program's alive.
        seen: State of the tensors that the kernel was made of.
    """

    kernel: MoEKernel
    seen: tuple[TensorState, ...]


_LAYERS: Final[dict[tuple[str, tuple[int, ...]], _Layer]] = {}
"""By what a program says of a layer and the addresses of its tensors; gone with the first of these tensors."""
_LOCK: Final = threading.Lock()

_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_LIBRARY.define(
    "exported_layer(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, Tensor(a!) out, Tensor[] tensors, "
    "str layer) -> ()",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def run_exported(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
    problem: MoEProblem,
    **keywords: Any,
) -> None:
    """Runs a layer where its caller is being exported: one opaque op that writes `out`.

    Args:
        hidden_states: [T,H].
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int32 or int64.
        out: [T,H].
        tensors: Canonical weights by field, and `expert_map` where placement is `map`.
        problem: The layer.
        **keywords: `ep_rank`, `require`, `prefer` and `deny`. Collections that JSON lacks, such as sets, become lists.
    """
    layer = _said_of({"problem": problem.to_dict(), "tensors": list(tensors), **keywords})
    torch.ops.moereg.exported_layer(hidden_states, topk_weights, topk_ids, out, list(tensors.values()), layer)


# Dynamo, which `torch.export.export(..., strict=True)` uses, cannot look into the encoder.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _said_of(layer: dict[str, Any]) -> str:
    return json.dumps(layer, default=list)


def _exported_layer(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    tensors: list[torch.Tensor],
    layer: str,
) -> None:
    if not hidden_states.shape[0]:
        return
    with in_compiled_code():
        with _LOCK:
            kernel = _kernel_of(tensors, layer)
        kernel.check_and_run(hidden_states, topk_weights, topk_ids, out)


def _kernel_of(tensors: list[torch.Tensor], layer: str) -> MoEKernel:
    key = (layer, tuple(tensor.data_ptr() for tensor in tensors))
    said = json.loads(layer)
    held = dict(zip(said.pop("tensors"), tensors, strict=True))
    expert_map = held.pop("expert_map", None)
    found, seen = _LAYERS.get(key), states_of(held.values())
    if found is not None:
        check_counted(found.seen, seen, "call torch.autograd.graph.increment_version(tensor) after such writes")
    if found is not None and found.seen == seen:
        return found.kernel
    problem = MoEProblem.from_dict(said.pop("problem"))
    weights = ExpertWeights(**held, quant=problem.quant)
    if found is not None:
        found.kernel.reload(weights)
        found.seen = seen
        return found.kernel
    ep_rank = said.pop("ep_rank")
    selection = select_backend(problem, platform_of(weights.w13.device), **said)
    kernel = make_kernel(problem, weights, selection, ep_rank=ep_rank, expert_map=expert_map, own_weights=True)
    kernel.copied = None
    made = _LAYERS[key] = _Layer(kernel, seen)
    for tensor in held.values():
        weakref.finalize(tensor.untyped_storage(), _drop, key, weakref.ref(made)).atexit = False
    return kernel


def _drop(key: tuple[str, tuple[int, ...]], layer: weakref.ref[_Layer]) -> None:
    # Without the lock: memory may be given back at any moment, while this thread holds it too.
    if _LAYERS.get(key) is layer():
        _LAYERS.pop(key, None)


def _exported_layer_fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    tensors: list[torch.Tensor],
    layer: str,
) -> None:
    return None


_LIBRARY.impl("exported_layer", _exported_layer, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::exported_layer", _exported_layer_fake, lib=_LIBRARY)

"""The torch op by which exported programs run a layer. The program holds the weights, and any process can load it."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.dispatch import select_backend
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.ranges import Reads
from moereg.platforms import platform_of
from moereg.runtime.graph_pools import in_compiled_code
from moereg.runtime.torch_op import detached
from moereg.selection.decide import reading_in_place
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.versions import TensorState, check_counted, states_of

_LAYERS: Final[dict[tuple[str, tuple[int, ...]], tuple[MoEKernel, tuple[TensorState, ...]]]] = {}
"""Kernels with a copy of a program's weights, by its description of the layer and its tensors' addresses, with the
state of those tensors. Dropped with the first of them."""
_IN_PLACE: Final[dict[str, MoEKernel]] = {}
"""Kernels that read the tensors of each call, by the description of the layer."""
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
    """Runs a layer while its caller is exported: one opaque op that writes `out`; arguments as in `MoEKernel`.

    `tensors` are canonical weights by field, with `expert_map` if placement is `map`; keywords are `ep_rank` and those
    of a request, whose collections that JSON lacks, such as sets, become lists.
    """
    said = problem.to_dict()
    said.pop("gradients", None)  # A program infers.
    layer = _said_of({"problem": said, "tensors": list(tensors), **keywords})
    call = detached([hidden_states, topk_weights, topk_ids, out])
    torch.ops.moereg.exported_layer(*call, detached(tensors.values()), layer)


# Dynamo, which `torch.export.export(..., strict=True)` uses, cannot trace the encoder.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _said_of(layer: dict[str, Any]) -> str:
    return json.dumps(layer, default=list)


def _exported_layer(*arguments: Any) -> None:
    hidden_states, topk_weights, topk_ids, out, tensors, layer = arguments
    if not len(hidden_states):
        return
    with in_compiled_code():
        with _LOCK:
            kernel, reads = _kernel_of(tensors, layer)
        kernel.check_and_run(hidden_states, topk_weights, topk_ids, out, reads=reads)


def _kernel_of(tensors: list[torch.Tensor], layer: str) -> tuple[MoEKernel, Reads | None]:
    """A call's kernel, and what it reads if that is not the kernel's own."""
    said = json.loads(layer)
    held = dict(zip(said.pop("tensors"), tensors, strict=True))
    expert_map = held.pop("expert_map", None)
    kernel = _IN_PLACE.get(layer)
    if kernel is not None and kernel.held.fits(held):
        return kernel, Reads(PermutedWeights.in_place(held), expert_map)
    key = (layer, tuple(tensor.data_ptr() for tensor in tensors))
    (kernel, before), seen = _LAYERS.get(key, (None, ())), states_of(held.values())
    check_counted(before, seen, "call torch.autograd.graph.increment_version(tensor) after such writes")
    if kernel is not None and before == seen:
        return kernel, None
    problem = MoEProblem.from_dict(said.pop("problem"))
    weights = ExpertWeights(**held, quant=problem.quant)
    if kernel is not None:
        kernel.reload(weights)
        _LAYERS[key] = kernel, seen
        return kernel, None
    ep_rank = said.pop("ep_rank")
    selection = select_backend(problem, platform_of(weights.w13.device), **said)
    in_place = reading_in_place(selection)
    is_contiguous = all(one.is_contiguous() for one in held.values())
    if problem.quant.weight is None and in_place.winner is not None and is_contiguous:
        kernel = make_kernel(problem, weights, in_place, ep_rank=ep_rank, expert_map=expert_map)
        kernel.held.read_from(dict)  # Each call brings its tensors.
        kernel.expert_map = None
        _IN_PLACE[layer] = kernel
        return kernel, Reads(PermutedWeights.in_place(held), expert_map)
    kernel = make_kernel(problem, weights, selection, ep_rank=ep_rank, expert_map=expert_map, own_weights=True)
    kernel.held.leave_to_owner()
    _LAYERS[key] = kernel, seen
    for tensor in held.values():
        weakref.finalize(tensor.untyped_storage(), _drop, key, weakref.ref(kernel)).atexit = False
    return kernel, None


def _drop(key: tuple[str, tuple[int, ...]], kernel: weakref.ref[MoEKernel]) -> None:
    # Without the lock: memory may be freed at any moment, even while this thread holds it.
    if _LAYERS.get(key, (None, ()))[0] is kernel():
        _LAYERS.pop(key, None)


_LIBRARY.impl("exported_layer", _exported_layer, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::exported_layer", lambda *arguments: None, lib=_LIBRARY)

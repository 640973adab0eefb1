"""Checks what a layer is made of, and one call of it: shapes, dtypes and devices always, values where that is cheap.

Each check raises a ValueError that names the tensor, the rule and the cure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.autograd import forward_ad

from moereg.errors import ArgumentError, GradientError
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.checks import DEBUG_VARIABLE, checks_values

_FEW_ROUTES: Final = 64
"""Up to this many routes, comparing in Python is faster than calling torch."""


def check_call(
    problem: MoEProblem,
    device: torch.device,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor | None,
) -> None:
    """Checks what tensors have even while code is compiled: shapes, dtypes and devices."""
    # `check_tensor` rejects non-tensors.
    is_tensor = isinstance(hidden_states, torch.Tensor)
    num_tokens = hidden_states.shape[0] if is_tensor and hidden_states.dim() else 0
    if is_tensor and hidden_states.dim() > 2:
        raise ArgumentError(
            f"hidden_states must be [T,H], got {list(hidden_states.shape)}; flatten batch and sequence with "
            f".reshape(-1, {problem.hidden_size}), as moereg.MoELayer does by itself"
        )
    rows = (num_tokens, problem.hidden_size)
    routes = (num_tokens, problem.top_k)
    dtype = problem.torch_dtype
    check_tensor("hidden_states", hidden_states, rows, (dtype,), device)
    check_tensor("topk_weights", topk_weights, routes, (torch.float32,), device)
    check_tensor("topk_ids", topk_ids, routes, (torch.int32, torch.int64), device)
    if out is not None:
        check_tensor("out", out, rows, (dtype,), device)
    if problem.max_num_tokens is not None and num_tokens > problem.max_num_tokens:
        raise ArgumentError(f"the problem says max_num_tokens={problem.max_num_tokens}, got {num_tokens} tokens")


def check_values(
    problem: MoEProblem,
    device: torch.device,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> None:
    """Checks the values of a call's routing on a CPU; with MOEREG_DEBUG=1 also on a GPU, which synchronizes."""
    if checks_values(device):
        _check_routing(topk_weights, topk_ids, problem)
        if expert_map is not None:
            check_expert_map(expert_map, problem)


def check_no_alias(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> None:
    """Checks that `out` shares no byte with an input."""
    start = out.data_ptr()
    end = start + out.nbytes
    for tensor in inputs:
        address = tensor.data_ptr()
        # Tensors without storage, such as meta ones, have no address.
        if address and address < end and start < address + tensor.nbytes:
            raise ArgumentError(
                "out must not alias an input: it is overwritten while inputs are read; pass another tensor"
            )


def check_no_transform(*tensors: Iterable[torch.Tensor | None]) -> None:
    """Checks that no tensor of a call is one of torch.func's transforms or of forward-mode AD."""
    transform: Any = torch._C._functorch.peek_interpreter_stack()  # None outside of transforms.
    if not isinstance(transform, torch._C._functorch.CInterpreter) and forward_ad._current_level < 0:
        return
    if torch.compiler.is_compiling():  # Without tensors to look at; torch runs code that raises without its compiler.
        raise GradientError("a layer is not compiled inside of torch.func's transforms or forward-mode AD")
    for tensor in itertools.chain(*tensors):
        if not isinstance(tensor, torch.Tensor):
            continue
        if transform is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            kind = transform.key().name.lower()
            raise (GradientError if kind in ("grad", "jvp") else ArgumentError)(
                "moereg's kernels read memory, which tensors of torch.func's transforms do not have, got a call inside "
                f"of {kind}; call the layer outside of it, on the whole batch: a MoELayer takes hidden_states "
                "[..., H], and torch.autograd.grad computes gradients"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise GradientError(
                f"moereg computes gradients by backward passes only, got a dual tensor {list(tensor.shape)} of "
                "forward-mode AD; call torch.autograd.grad for gradients, or pass unpack_dual(tensor).primal"
            )


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Checks a caller's tensor; errors use `name`."""
    # Up to four times per call, so a right tensor passes by plain comparisons.
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it")
    if tensor.shape != shape:
        raise ArgumentError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(f"{name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}; convert it")
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{name} must be a dense tensor, got layout {tensor.layout}; call .to_dense()")
    if not tensor.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, got strides {list(tensor.stride())}; call .contiguous()")
    if tensor.device != device:
        raise ArgumentError(f"{name} must be on the weights' device {device}, got {tensor.device}; move it")


def ids_in_32_bits(topk_ids: torch.Tensor, problem: MoEProblem) -> torch.Tensor:
    """Ids as int32; clamped first, since one beyond 32 bits must stay out of range and not wrap around into it."""
    return topk_ids if topk_ids.dtype == torch.int32 else topk_ids.clamp(-1, problem.num_experts).to(torch.int32)


def _is_plainly_right(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> bool:
    """Whether every expert's weight is finite and no token names one twice, checked in plain Python."""
    for ids, weights in zip(topk_ids.tolist(), topk_weights.tolist(), strict=True):
        experts = [expert for expert in ids if 0 <= expert < num_experts]
        if len(set(experts)) != len(experts):
            return False
        if not all(map(math.isfinite, weights)):
            return False  # Unless no expert has it, which the other check knows.
    return True


def _check_routing(topk_weights: torch.Tensor, topk_ids: torch.Tensor, problem: MoEProblem) -> None:
    # torch calls cost more than a few comparisons: a twelfth of one token's time in a small layer.
    if topk_ids.numel() <= _FEW_ROUTES and _is_plainly_right(topk_weights, topk_ids, problem.num_experts):
        return
    wrong = ~torch.isfinite(topk_weights)
    # Padding names no expert, and its weights may be what memory held.
    if wrong.any() and (wrong := wrong & (topk_ids >= 0) & (topk_ids < problem.num_experts)).any():
        token, slot = torch.nonzero(wrong)[0].tolist()
        raise ArgumentError(
            f"topk_weights must be finite, got {topk_weights[token, slot].item()} at token {token}, slot {slot}; "
            f"look at the router (on a GPU this is checked with {DEBUG_VARIABLE}=1 only)"
        )
    if problem.top_k == 1:
        return
    ordered = topk_ids.sort(dim=1).values
    known = (ordered[:, 1:] >= 0) & (ordered[:, 1:] < problem.num_experts)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & known
    if twice.any():
        token = int(torch.nonzero(twice)[0, 0])
        raise ArgumentError(
            f"topk_ids of one token must be distinct, got {topk_ids[token].tolist()} at token {token}; "
            f"add the two weights up instead (on a GPU this is checked with {DEBUG_VARIABLE}=1 only)"
        )


def check_expert_map(expert_map: torch.Tensor, problem: MoEProblem) -> None:
    """Checks the values of an expert map; synchronizes with a GPU."""
    wrong = (expert_map < -1) | (expert_map >= problem.num_local_experts)
    if wrong.any():
        expert = int(torch.nonzero(wrong)[0, 0])
        raise ArgumentError(
            f"expert_map must hold local experts in [0, {problem.num_local_experts}) or -1, got "
            f"{int(expert_map[expert])} for expert {expert}; give experts of other ranks -1"
        )


@torch.inference_mode(False)
def resolve_expert_map(
    problem: MoEProblem, ep_rank: int, expert_map: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """A rank's map, [num_experts] int32 on the device, local expert or -1; None if all experts are local.

    The caller's own tensor if one is given, which it may write outside of inference mode.
    """
    if problem.placement == "contiguous":
        if expert_map is not None:
            raise ArgumentError("expert_map needs placement='map' in the problem, got placement='contiguous'")
        return _slice_of(problem, ep_rank, device)
    if expert_map is None:
        raise ArgumentError("placement 'map' needs expert_map, int32 [num_experts] with the local expert or -1")
    check_tensor("expert_map", expert_map, (problem.num_experts,), (torch.int32,), device)
    if device.type != "meta":
        check_expert_map(expert_map, problem)
    return expert_map


def _slice_of(problem: MoEProblem, ep_rank: int, device: torch.device) -> torch.Tensor | None:
    if not problem.is_expert_parallel:
        if ep_rank != 0:
            raise ArgumentError(f"ep_rank must be 0 where all experts are local, got {ep_rank}")
        return None
    if ep_rank and problem.num_experts % problem.num_local_experts:
        raise ArgumentError(
            f"contiguous placement needs num_experts % num_local_experts == 0, got {problem.num_experts} and "
            f"{problem.num_local_experts}; give uneven ranks placement='map' and an expert_map"
        )
    first = ep_rank * problem.num_local_experts
    if ep_rank < 0 or first + problem.num_local_experts > problem.num_experts:
        raise ArgumentError(
            f"ep_rank must be in [0, {problem.num_experts // problem.num_local_experts}) for "
            f"{problem.num_local_experts} of {problem.num_experts} experts a rank, got {ep_rank}"
        )
    local = torch.arange(problem.num_experts, dtype=torch.int32, device=device) - first
    return torch.where((local >= 0) & (local < problem.num_local_experts), local, -1)


def winner_of(selection: Selection, problem: MoEProblem) -> Decision:
    """The winner of a selection, which must be for this problem."""
    if selection.problem != problem:
        raise ArgumentError(f"the selection was made for {selection.problem}, got {problem}; select again")
    if selection.winner is None or selection.winner.cell is None:
        raise ArgumentError(
            f"the selection has no backend that is registered here (it names {selection.backend!r}); select again"
        )
    for _, one in selection.ranges:
        if one.cell is None or not one.accepted:
            raise ArgumentError(
                f"each range of a selection must be of a backend that fits and is registered here, got "
                f"{one.backend!r}; select again"
            )
    return selection.winner

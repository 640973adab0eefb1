"""What MoEKernel and make_kernel refuse: tensors of another shape, dtype or device, and values that mean nothing."""

from __future__ import annotations

import torch

from moereg.problem import MoEProblem
from moereg.weight_checks import DEBUG_VARIABLE

__all__ = ["check_expert_map", "check_routing", "check_tensor", "overlaps"]


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Checks a tensor that a caller gave.

    Raises:
        ValueError: It is no tensor, or of another shape, dtype or device, or not contiguous.
    """
    # Every call of a layer comes through here up to four times, so what is right passes on plain comparisons.
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if tensor.dtype is not dtype and tensor.dtype is not other_dtype:
        allowed = " or ".join(str(allowed).removeprefix("torch.") for allowed in dict.fromkeys((dtype, other_dtype)))
        raise ValueError(f"{name} must be {allowed}, got {str(tensor.dtype).removeprefix('torch.')}; convert it")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}; call .to_dense()")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}; call .contiguous()")
    if tensor.device != device:
        raise ValueError(f"{name} must be on the weights' device {device}, got {tensor.device}; move it")


def overlaps(out: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether a byte of `out` is one of an input."""
    start = out.data_ptr()
    end = start + out.nbytes
    for tensor in inputs:
        address = tensor.data_ptr()
        # Without storage, as on a meta device, there is no address.
        if address and address < end and start < address + tensor.nbytes:
            return True
    return False


def check_routing(topk_weights: torch.Tensor, topk_ids: torch.Tensor, problem: MoEProblem) -> None:
    """Checks the values of a call's routing; waits for a GPU.

    Raises:
        ValueError: A weight is not finite, or a token names an expert twice.
    """
    if not torch.isfinite(topk_weights).all():
        token, slot = torch.nonzero(~torch.isfinite(topk_weights))[0].tolist()
        raise ValueError(
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
        raise ValueError(
            f"topk_ids of one token must be distinct, got {topk_ids[token].tolist()} at token {token}; "
            f"add the two weights up instead (on a GPU this is checked with {DEBUG_VARIABLE}=1 only)"
        )


def check_expert_map(expert_map: torch.Tensor, problem: MoEProblem) -> None:
    """Checks the values of an expert map; waits for a GPU.

    Raises:
        ValueError: One is out of range.
    """
    wrong = (expert_map < -1) | (expert_map >= problem.num_local_experts)
    if wrong.any():
        expert = int(torch.nonzero(wrong)[0, 0])
        raise ValueError(
            f"expert_map must hold local experts in [0, {problem.num_local_experts}) or -1, got "
            f"{int(expert_map[expert])} for expert {expert}; give experts of other ranks -1"
        )

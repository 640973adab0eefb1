"""Faults that a comparison has to catch: each spoils weights the way a faulty kernel might read them.

A fault in the weights has the effect of the same fault in a kernel's addressing. So a kernel on spoiled weights gives
what a wrong kernel would give on right ones. Faults of a backward pass spoil its inputs likewise, or its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Final

import torch

from moereg.quantize import pack_nibbles
from moereg.spec.quant_schemes import MATRICES
from moereg.testing.inputs import Inputs
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import ExpertWeights

Fault = Callable[[ExpertWeights, str], ExpertWeights | None]
"""Spoils w13 or w2; returns None if there is nothing to spoil."""


def gate_up_swapped(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Swaps gate and up rows, with their scales, zero points and biases."""
    if matrix != "w13" or weights.num_halves != 2:
        return None
    swapped = {}
    for name in ("w13", "w13_scale", "w13_scale_2", "w13_zero_point", "w13_bias"):
        tensor = weights.tensors().get(name)
        # A scale of all rows has no halves.
        if tensor is not None and tensor.dim() > 1 and tensor.shape[1] % 2 == 0:
            swapped[name] = torch.cat(_bytes(tensor).chunk(2, dim=1)[::-1], dim=1).view(tensor.dtype)
    return _with(weights, swapped)


def experts_rotated(weights: ExpertWeights, matrix: str = "w2") -> ExpertWeights | None:
    """Gives each expert the codes of the previous one, with its own scales."""
    if weights.num_experts == 1:
        return None
    codes = weights.tensors()[matrix]
    return _with(weights, {matrix: _bytes(codes).roll(1, dims=0).view(codes.dtype)})


def bias_dropped(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Zeroes the bias."""
    bias = weights.tensors().get(f"{matrix}_bias")
    return None if bias is None else _with(weights, {f"{matrix}_bias": torch.zeros_like(bias)})


def scale_off_by_one_group(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Gives each group the scale of the previous one in its row.

    If a row is one group, that is the previous row's scale; if a matrix is, that of the previous half or expert.
    """
    scale = weights.tensors().get(f"{matrix}_scale")
    if scale is None or scale.numel() == 1:
        return None
    dims = [dim for dim in range(scale.dim()) if scale.shape[dim] > 1]
    return _with(weights, {f"{matrix}_scale": _bytes(scale).roll(1, dims=dims[-1]).view(scale.dtype)})


def global_scale_dropped(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Omits the global scale, or the scales of blocks of scales."""
    scale_2 = weights.tensors().get(f"{matrix}_scale_2")
    return None if scale_2 is None else _with(weights, {f"{matrix}_scale_2": torch.ones_like(scale_2)})


def zero_point_dropped(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Sets all zero points to the symmetric one, half the range."""
    zero_point = weights.tensors().get(f"{matrix}_zero_point")
    fmt = weights.scheme.weight
    if zero_point is None or fmt is None:
        return None
    half = 1 << (fmt.bits - 1)
    groups = weights.tensors()[f"{matrix}_scale"].shape[-1]
    codes = torch.full((*zero_point.shape[:-1], groups), half, dtype=torch.uint8, device=zero_point.device)
    return _with(weights, {f"{matrix}_zero_point": pack_nibbles(codes) if fmt.bits == 4 else codes})


def nibbles_swapped(weights: ExpertWeights, matrix: str = "w13") -> ExpertWeights | None:
    """Swaps the nibbles of each byte."""
    fmt = weights.scheme.weight
    if fmt is None or fmt.bits != 4:
        return None
    packed = weights.tensors()[matrix]
    return _with(weights, {matrix: packed >> 4 | packed << 4})


FAULTS: Final[dict[str, Fault]] = {
    "gate and up swapped": gate_up_swapped,
    "experts rotated": experts_rotated,
    "bias dropped": bias_dropped,
    "scale off by one group": scale_off_by_one_group,
    "global scale dropped": global_scale_dropped,
    "zero point dropped": zero_point_dropped,
    "nibbles swapped": nibbles_swapped,
}


def plant_faults(weights: ExpertWeights) -> Iterator[tuple[str, ExpertWeights]]:
    """Yields every fault that the weights can have, one at a time, with its name and matrix.

    A comparison sees a wrong scale only if scales differ by more than its tolerance, so groups, rows and experts need
    different magnitudes.
    """
    for name, fault in FAULTS.items():
        for matrix in MATRICES:
            spoiled = fault(weights, matrix)
            if spoiled is not None:
                yield f"{name} in {matrix}", spoiled


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """A backward pass to plant faults in, of a kernel or of the reference: how to run it, on what, and its result.

    `local_ids` [T,K] int64 has each route's local expert or -1.
    """

    run: Callable[[ExpertWeights, Inputs, ExpertAdapters | None], dict[str, torch.Tensor]]
    weights: ExpertWeights
    inputs: Inputs
    adapters: ExpertAdapters | None
    local_ids: torch.Tensor
    right: dict[str, torch.Tensor]


def plant_gradient_faults(backward: BackwardPass) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields every fault that a backward pass can have, with its name and all gradients that it computes."""
    right = backward.right
    for name, spoiled in _spoiled_gradients(backward):
        if spoiled.keys() & right.keys():
            yield name, {key: spoiled.get(key, tensor) for key, tensor in right.items()}


def _spoiled_gradients(backward: BackwardPass) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    weights, inputs, local_ids, adapters = backward.weights, backward.inputs, backward.local_ids, backward.adapters
    experts_own = weights.tensors().keys() | (set() if adapters is None else adapters.tensors().keys())
    of_experts = {name: tensor for name, tensor in backward.right.items() if name in experts_own}
    if weights.num_halves == 2:
        halves = {
            name: tensor.chunk(2, dim=1) for name, tensor in of_experts.items() if name in ("w13", "w13_bias", "w13_b")
        }
        yield "gradients of gate and up swapped", {name: torch.cat(each[::-1], dim=1) for name, each in halves.items()}
    if weights.num_experts > 1:
        yield "gradients of another expert", {name: tensor.roll(1, dims=0) for name, tensor in of_experts.items()}
    yield "gradient of routing weights dropped", {"topk_weights": torch.zeros_like(inputs.topk_weights)}
    ones = torch.ones_like(inputs.topk_weights)
    unscaled = backward.run(weights, dataclasses.replace(inputs, topk_weights=ones), adapters)
    unscaled |= {key: tensor for key, tensor in backward.right.items() if key == "topk_weights"}
    yield "gradients not scaled by routing weights", unscaled

    experts = local_ids[local_ids >= 0].unique().tolist()
    if len(experts) > 1:
        topk_ids = torch.full_like(inputs.topk_ids, -1)
        for expert in experts[1:]:
            token, slot = torch.nonzero(local_ids == expert)[0].tolist()
            topk_ids[token, slot] = inputs.topk_ids[token, slot]
        first_rows = backward.run(weights, dataclasses.replace(inputs, topk_ids=topk_ids), adapters)
        longer = {name: tensor.clone() for name, tensor in of_experts.items()}
        for name, tensor in longer.items():
            tensor[experts[:-1]] += first_rows[name][experts[1:]]
        yield "the next expert's first row in an expert's gradients", longer
    if empty := sorted(set(range(weights.num_experts)) - set(experts)):
        unwritten = {name: tensor.clone() for name, tensor in of_experts.items()}
        for tensor in unwritten.values():
            tensor[empty] = torch.nan
        yield "gradients of an expert without rows not written", unwritten
    # Before an optimizer made them a third larger.
    before = {name: 0.75 * tensor for name, tensor in weights.tensors().items()}
    yield "gradients with the weights before a step", backward.run(_with(weights, before), inputs, adapters)
    if adapters is not None:
        tensors = adapters.tensors()
        inert = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        yield "adapters ignored", {**backward.run(weights, inputs, None), **inert}
        unscaled_adapters = dataclasses.replace(adapters, w13_scaling=1.0, w2_scaling=1.0)
        yield "adapters not scaled", backward.run(weights, inputs, unscaled_adapters)
        before = {name: 0.75 * tensor for name, tensor in tensors.items()}
        yield "gradients with the adapters before a step", backward.run(weights, inputs, adapters.with_tensors(before))
        if weights.num_experts > 1:
            # As if the expert came before the rank in memory, where it comes after.
            others = {name: _misread(tensor) for name, tensor in tensors.items() if name.endswith("_b")}
            yield "experts of lora_B misordered", backward.run(weights, inputs, adapters.with_tensors(others))


def _misread(b: torch.Tensor) -> torch.Tensor:
    """[E,rows,R], stored as [rows,R*E] with the expert fastest, read with the expert slower than the rank."""
    num_experts, num_rows, rank = b.shape
    stored = b.permute(1, 2, 0).reshape(num_rows, rank * num_experts)
    return stored.view(num_rows, num_experts, rank).transpose(0, 1).contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Views 8-bit elements as uint8, since torch on CUDA cannot roll or concatenate 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _with(weights: ExpertWeights, tensors: dict[str, torch.Tensor]) -> ExpertWeights:
    return dataclasses.replace(weights, **tensors)  # type: ignore[arg-type]

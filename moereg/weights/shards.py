"""Parts of a layer along its intermediate size: shards for tensor parallelism, and padding."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch

from moereg.arguments import check_count, check_instance
from moereg.errors import ArgumentError
from moereg.runtime.torch_state import in_plain_torch
from moereg.spec.quant_schemes import MATRICES, NESTED_BLOCK, WHOLE, QuantFormat, tensor_name
from moereg.weights.elements import pack_nibbles, unpack_nibbles
from moereg.weights.formats import element_of, spread_zero_points
from moereg.weights.layouts import round_up
from moereg.weights.permuted import ExpertWeights
from moereg.weights.quantize_weights import expert_matrix, take_groups


@in_plain_torch
def shard_experts(weights: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    """Cuts a layer for tensor parallelism: every rank has all experts and a part of the intermediate size.

    The outputs of the ranks' layers add up to the whole layer's. Weights keep their codes and scales. If a rank's part
    begins inside a block or group, zeros in front complete it, and every rank is padded behind to the size of the
    largest: with blocks of 128, 1536 on 8 ranks make parts of 192, of which every other one begins in the middle of a
    block, so each rank holds 256, a third more bytes. `intermediate_size` of the result says how many.

    Schemes that quantize activations have scales of a rank's own intermediate, so sums differ from the whole layer
    within the scheme's tolerance.

    Args:
        weights: The whole layer, of any scheme, on any device.
        rank: This rank, from 0.
        size: The number of ranks.

    Returns:
        New tensors, or those given where nothing is cut. `w2_bias` is rank 0's; the others have zeros.

    Raises:
        ArgumentError: There is no such rank.

    Example:
        >>> import torch
        >>> from moereg import ExpertWeights, shard_experts
        >>> weights = ExpertWeights(w13=torch.randn(4, 2 * 96, 64), w2=torch.randn(4, 64, 96))
        >>> shard_experts(weights, rank=1, size=4).intermediate_size
        24
    """
    check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(...)")
    check_count("size", size)
    check_count("rank", rank, minimum=0)
    if rank >= size:
        raise ArgumentError(f"rank must be below size, got rank {rank} of {size}; ranks count from 0")
    if size == 1:
        return weights
    fmt = weights.scheme.weight
    # A multiple of it begins a group of w13's rows and one of w2's columns.
    whole = 1 if fmt is None else math.lcm(*(extent for extent in fmt.group if extent != WHOLE), 1)
    starts = [weights.intermediate_size * each // size for each in range(size + 1)]
    parts = [_Part(start, stop, start % whole) for start, stop in itertools.pairwise(starts)]
    return _cut(weights, parts[rank], max(part.front + part.stop - part.start for part in parts), has_bias=rank == 0)


@in_plain_torch
def pad_intermediate(weights: ExpertWeights, multiple: int) -> ExpertWeights:
    """The same layer with an intermediate size that is a multiple of `multiple`; itself if it is one.

    Outputs stay the same: columns of w2 that are added are zero, and so are the rows of w13.
    """
    size = weights.intermediate_size
    padded = round_up(size, multiple)
    return weights if padded == size else _cut(weights, _Part(0, size, 0), padded, has_bias=True)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of the intermediate, which go behind `front` others."""

    start: int
    stop: int
    front: int

    def copy(self, target: torch.Tensor, source: torch.Tensor, dim: int, unit: int) -> torch.Tensor:
        """Copies this part of a tensor's groups of `unit` elements to its place; returns the target."""
        first, last = self.start // unit, -(-self.stop // unit)
        # As bytes, since not every torch copies every 8-bit float.
        to, found = (one.view(torch.uint8) if one.element_size() == 1 else one for one in (target, source))
        to.narrow(dim, self.front // unit, last - first).copy_(found.narrow(dim, first, last - first))
        return target


def _cut(weights: ExpertWeights, part: _Part, size: int, has_bias: bool) -> ExpertWeights:
    """Weights of this intermediate size with a part of the given ones'."""
    fmt, tensors = weights.scheme.weight, weights.tensors()
    if fmt is not None and fmt.nested:
        raise ArgumentError(
            f"scales that are quantized, {NESTED_BLOCK} at a time, cannot be cut, got scheme {weights.scheme.name}; "
            "quantize to one with float32 scales, such as nf4"
        )

    def resized(tensor: torch.Tensor, matrix: str, unit: int, fill: float) -> torch.Tensor:
        """A tensor that counts the intermediate in groups of `unit`: w13's in halves of dim 1, w2's in its last one."""
        dim, halves = (1, weights.num_halves) if matrix == "w13" else (tensor.dim() - 1, 1)
        source = tensor.unflatten(dim, (halves, -1))
        shape = (*source.shape[: dim + 1], -(-size // unit), *source.shape[dim + 2 :])
        # Not every torch or device fills 8-bit floats.
        dtype = torch.float32 if tensor.is_floating_point() and tensor.element_size() == 1 else tensor.dtype
        target = torch.full(shape, fill, dtype=dtype, device=tensor.device).to(tensor.dtype)
        return part.copy(target, source, dim + 1, unit).flatten(dim, dim + 1)

    for matrix in MATRICES:
        if fmt is None:
            tensors[matrix] = resized(tensors[matrix], matrix, 1, 0)
            continue
        unit = fmt.group[0 if matrix == "w13" else 1]
        scale, zero_point = tensor_name(matrix, "scale"), tensor_name(matrix, "zero_point")
        num_groups = tensors[scale].shape[-1]
        if unit != WHOLE and tensors[scale].dim() == 3:
            tensors[scale] = resized(tensors[scale], matrix, unit, 1)
        if unit != WHOLE and zero_point in tensors:
            if fmt.bits == 8:
                tensors[zero_point] = resized(tensors[zero_point], matrix, unit, 0)
            else:
                points = resized(unpack_nibbles(tensors[zero_point], num_groups), matrix, unit, 0)
                tensors[zero_point] = pack_nibbles(points)
        tensors[matrix] = _cut_codes(weights, tensors, matrix, part, size)
    if weights.w13_bias is not None:
        tensors["w13_bias"] = resized(weights.w13_bias, "w13", 1, 0)
    if weights.w2_bias is not None and not has_bias:
        tensors["w2_bias"] = torch.zeros_like(weights.w2_bias)
    return ExpertWeights.unchecked(tensors, weights.scheme)


def _cut_codes(
    weights: ExpertWeights, tensors: dict[str, torch.Tensor], matrix: str, part: _Part, size: int
) -> torch.Tensor:
    """Codes of the part, expert by expert, padded with codes that stand for zero with the zero points in `tensors`."""
    fmt, halves, given = weights.scheme.weight, weights.num_halves, weights.tensors()[matrix]
    assert fmt is not None
    is_w13, hidden = matrix == "w13", weights.hidden_size
    rows, columns = (halves * size, hidden) if is_w13 else (hidden, size)
    shape = (len(given), rows, fmt.packed_columns(columns))
    found = torch.empty(shape, dtype=torch.uint8, device=given.device)
    for expert, codes in enumerate(given.view(torch.uint8)):
        target = _codes_of_zero({**tensors, matrix: found}, fmt, matrix, expert, columns, halves)
        if fmt.bits == 4:
            codes = unpack_nibbles(codes, hidden if is_w13 else weights.intermediate_size)
        if is_w13:
            part.copy(target.unflatten(0, (halves, -1)), codes.unflatten(0, (halves, -1)), 1, 1)
        else:
            part.copy(target, codes, 1, 1)
        found[expert] = pack_nibbles(target) if fmt.bits == 4 else target
    return found.view(fmt.storage_dtype)


def _codes_of_zero(
    tensors: dict[str, torch.Tensor], fmt: QuantFormat, matrix: str, expert: int, columns: int, halves: int
) -> torch.Tensor:
    """Codes [N,K] uint8, one each, that stand for zero."""
    whole = expert_matrix(tensors, matrix, expert, halves)
    rows, zero = len(whole.q), torch.zeros(1, dtype=torch.float32, device=whole.q.device)
    # A 4-bit code alone in its row is the whole byte: the high half is 0.
    zeros = element_of(fmt).encode(zero).view(torch.uint8).repeat(rows, columns)
    if whole.zero_point is not None:
        points = take_groups(whole, fmt, slice(0, rows)).zero_point
        assert points is not None
        zeros += spread_zero_points(points, fmt, whole.scale.shape[-1], rows, columns).to(torch.int8).view(torch.uint8)
    return zeros

"""Quantizes and dequantizes a layer's weights, expert by expert in blocks of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.runtime.torch_state import in_plain_torch
from moereg.spec.quant_schemes import (
    MATRICES,
    NESTED_BLOCK,
    WHOLE,
    QuantFormat,
    QuantScheme,
    TensorRole,
    get_scheme,
    tensor_name,
)
from moereg.weights.elements import code_values, decode_scales, encode_scales
from moereg.weights.formats import Quantized, element_of, restore, spread_zero_points, total_scale
from moereg.weights.groups import choose_scale, global_scale, group_extrema
from moereg.weights.permuted import ExpertWeights

# In fp32. Besides input and output this needs only ten temporaries of this size, which stay in cache.
BLOCK_BYTES: Final = 4 << 20


@in_plain_torch
def quantize_weights(
    weights: ExpertWeights,
    scheme: QuantScheme | str,
    *,
    a13_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    separate_halves: bool = False,
) -> ExpertWeights:
    """Rounds unquantized weights to a scheme's format; see docs/quantization.md for every rule.

    Args:
        weights: Unquantized weights in bf16, fp16 or fp32, on any device.
        scheme: A scheme or its name.
        a13_scale: fp32 [E] or []: static scale of the first matmul's input, if the scheme has one.
        a2_scale: The same for the second matmul's input.
        separate_halves: Whether gate and up rows of w13 get separate scales, [E,2], if a scale spans all rows.

    Returns:
        New weights on the same device; biases are the same tensors. Besides input and output this takes one expert's
        codes and a few times 4 MiB.

    Raises:
        ArgumentError: The weights are already quantized or not finite, the scheme is unquantized or not encodable, or a
            static activation scale is missing or superfluous.
    """
    scheme = get_scheme(scheme)
    if weights.scheme.weight is not None:
        raise ArgumentError(
            f"quantize_weights needs unquantized weights, got {weights.scheme.name}; dequantize them first"
        )
    if scheme.weight is None:
        raise ArgumentError(f"quantize_weights needs a scheme with quantized weights, got {scheme.name}")
    rows = scheme.tensor_rows(
        weights.num_experts, weights.hidden_size, weights.intermediate_size, weights.num_halves, has_bias=False
    )
    given = {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias, "a13_scale": a13_scale, "a2_scale": a2_scale}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    for row in rows:
        if row.role == "activation_scale" and row.required and row.name not in tensors:
            raise ArgumentError(
                f"scheme {scheme.name} has static activation scales; pass {row.name}=..., "
                "for example from moereg.numerics.reference.calibrate_activation_scales"
            )
    for name in MATRICES:
        matrices, halves = getattr(weights, name), weights.num_halves if name == "w13" else 1
        tensors |= quantize_matrices(
            name, matrices, matrices.shape, scheme, halves, weights.w13.device, separate_halves
        )
    return ExpertWeights(**tensors, quant=scheme)


@in_plain_torch
def quantize_matrices(
    name: str,
    matrices: Iterable[torch.Tensor],
    sizes: Sequence[int],
    scheme: QuantScheme,
    halves: int,
    device: torch.device,
    separate_halves: bool = False,
) -> dict[str, torch.Tensor]:
    """Rounds the matrices of one kind as `quantize_weights` does, whose text has the rest.

    Args:
        name: `w13` or `w2`.
        matrices: One per expert, [rows, columns], on `device`.
        sizes: Experts, rows and columns.
        halves: 2 for gate and up rows, else 1.

    Returns:
        Tensors by field of `ExpertWeights`, without activation scales.
    """
    num_experts, rows, columns = sizes
    hidden, width = (columns, rows // halves) if name == "w13" else (rows, columns)
    fmt = scheme.weight
    assert fmt is not None
    tensors = {
        row.name: torch.empty(row.shapes[-1 if separate_halves else 0], dtype=row.dtype, device=device)
        for row in scheme.tensor_rows(num_experts, hidden, width, halves, has_bias=False)
        if row.matrix == name and row.role != "activation_scale"
    }
    for expert, matrix in enumerate(matrices):
        quantized = _quantize_matrix(matrix, fmt, halves, separate_halves)
        scale = quantized.scale if quantized.scale_2 is None else quantized.scale_2
        if not scale.float().isfinite().all():
            raise ArgumentError(
                f"weights must be finite to be quantized, got infinity or NaN in {name} of expert {expert}; "
                "look at the checkpoint"
            )
        parts: dict[TensorRole, torch.Tensor | None] = {
            "weight": quantized.q,
            "scale": quantized.scale,
            "scale_2": quantized.scale_2,
            "zero_point": quantized.zero_point,
        }
        for role, value in parts.items():
            if value is not None:
                target = tensors[tensor_name(name, role)][expert]
                target.copy_(value.view(target.shape))
    return tensors


@in_plain_torch
def dequantize_weights(
    weights: ExpertWeights, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantizes weights, w = (q - zero_point) * scale * scale_2.

    Args:
        weights: Weights of any scheme, on any device.
        dtype: The result's dtype. Products are computed in fp32 and rounded to it once; in fp64 if dtype is fp64.

    Returns:
        w13 [E,2I,H] (or [E,I,H]) and w2 [E,H,I], new tensors. `dequantize_matrices` says what this takes besides them.
    """
    if weights.scheme.weight is None:
        return weights.w13.to(dtype, copy=True), weights.w2.to(dtype, copy=True)
    num_experts, hidden, width = weights.num_experts, weights.hidden_size, weights.intermediate_size
    sizes = (num_experts, weights.num_halves * width, hidden), (num_experts, hidden, width)
    w13, w2 = (torch.empty(size, dtype=dtype, device=weights.w13.device) for size in sizes)
    dequantize_into(weights, w13, w2)
    return w13, w2


@in_plain_torch
def dequantize_into(weights: ExpertWeights, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Dequantizes quantized weights into memory that is there: what `dequantize_weights` returns."""
    fmt, tensors = weights.scheme.weight, weights.tensors()
    assert fmt is not None
    for name, out in (("w13", w13), ("w2", w2)):
        dequantize_matrices(stored_matrices(tensors, name, weights.num_halves), fmt, out)


@in_plain_torch
def dequantize_matrices(matrices: Quantized, fmt: QuantFormat, out: torch.Tensor) -> None:
    """Dequantizes one matrix of every expert, such as all of a layer's w13, without waiting for the device.

    Args:
        matrices: The stored tensors, each with a leading dimension E.
        fmt: Their format.
        out: [E, rows, columns], overwritten as `dequantize_weights` says. On a GPU with Triton, where all tensors are
            contiguous, this is one launch that needs no other memory; elsewhere, for fp64 and for formats that no
            kernel decodes, it takes a few times 4 MiB, and many operations for each expert.

    Raises:
        ArgumentError: Codes and `out` do not have the same matrices.
    """
    num_experts, rows, columns = out.shape
    expected = (num_experts, rows, fmt.packed_columns(columns))
    if matrices.q.shape != expected:
        raise ArgumentError(
            f"codes of matrices {list(out.shape)} must be {list(expected)} in {fmt}, got {list(matrices.q.shape)}; "
            "pass one matrix of every expert in canonical order"
        )
    if out.device.type == "cuda" and restore_in_triton(matrices, fmt, out):
        return
    for expert, result in enumerate(out):
        matrix = plain_scales(matrices.of(expert))
        for block in row_blocks(rows, columns, fmt):
            result[block] = dequantize_rows(matrix, fmt, columns, block, out.dtype)


def restore_in_triton(matrices: Quantized, fmt: QuantFormat, out: torch.Tensor) -> bool:
    """Does what `dequantize_matrices` does in one launch.

    Returns:
        False, with nothing done, if Triton or a decoder is missing, or a tensor is not contiguous.
    """
    try:
        from moereg.kernels import restore as kernel
    except ImportError:
        return False
    is_decoded = fmt.dtype in kernel.ELEMENTS and matrices.scale.dtype in kernel.SCALES
    if not is_decoded or out.dtype == torch.float64:
        return False
    tensors = (out, matrices.q, matrices.scale, matrices.scale_2, matrices.zero_point)
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return False
    group_rows, group_columns = (0 if extent == WHOLE else extent for extent in fmt.group)
    with torch.cuda.device_of(out):
        kernel.restore_matrices(
            *(out, matrices.q, matrices.scale),
            element=fmt.dtype,
            bits=fmt.bits,
            group=(group_rows, group_columns),
            halves=matrices.halves,
            scale_2=matrices.scale_2,
            zero_point=matrices.zero_point,
            values=code_values(out.device) if fmt.dtype == "nf4" or fmt.nested else None,
            nested_block=NESTED_BLOCK,
        )
    return True


def stored_matrices(tensors: Mapping[str, torch.Tensor], name: str, num_halves: int) -> Quantized:
    """One matrix of every expert, `w13` or `w2`, as a layer's tensors by field store it.

    `num_halves` is that of the weights, 2 if the layer is gated.
    """
    scale_2, zero_point = (tensors.get(tensor_name(name, role)) for role in ("scale_2", "zero_point"))
    halves = num_halves if name == "w13" else 1
    return Quantized(tensors[name], tensors[tensor_name(name, "scale")], scale_2, zero_point, halves)


def expert_matrix(tensors: Mapping[str, torch.Tensor], name: str, expert: int, num_halves: int) -> Quantized:
    """Views of one expert's `stored_matrices`; scales that are quantized are dequantized."""
    return plain_scales(stored_matrices(tensors, name, num_halves).of(expert))


def plain_scales(matrix: Quantized) -> Quantized:
    """The same matrix with scales in fp32 if they are quantized."""
    if matrix.scale.dtype != torch.uint8:
        return matrix
    assert matrix.scale_2 is not None
    return dataclasses.replace(matrix, scale=decode_scales(matrix.scale, matrix.scale_2, NESTED_BLOCK), scale_2=None)


def dequantize_rows(matrix: Quantized, fmt: QuantFormat, columns: int, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes rows of one expert's matrix.

    Returns:
        [rows, K], a new tensor; `dequantize_weights` has the dtypes.
    """
    start, stop, _ = rows.indices(matrix.q.shape[0])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return restore(_take_rows(matrix, fmt, slice(start, stop)), fmt, stop - start, columns, wide).to(dtype)


def row_blocks(rows: int, columns: int, fmt: QuantFormat, start: int = 0) -> Iterator[slice]:
    """Slices of rows from `start` on, each of at most `BLOCK_BYTES` in fp32 or one row of groups, in whole groups."""
    group = 1 if fmt.group == (WHOLE, WHOLE) else rows if fmt.group[0] == WHOLE else fmt.group[0]
    step = max(1, BLOCK_BYTES // (4 * columns * group)) * group
    for first in range(start, start + rows, step):
        yield slice(first, min(first + step, start + rows))


def _quantize_matrix(weight: torch.Tensor, fmt: QuantFormat, halves: int, separate: bool) -> Quantized:
    """Quantizes [R, K]; if `separate`, each of the `halves` parts has its own of a scale that spans all rows."""
    element = element_of(fmt)
    scale_dtype: torch.dtype = getattr(torch, fmt.scale_dtype)
    rows, columns = weight.shape
    scale = scale_2 = None
    if fmt.global_scale or fmt.group == (WHOLE, WHOLE):
        low, high = torch.aminmax(weight.reshape(halves if separate else 1, -1), dim=1)
        amax = torch.maximum(-low, high).float()
        if fmt.global_scale:
            scale_2 = global_scale(amax, element.half_range, scale_dtype)
        if fmt.group == (WHOLE, WHOLE):
            scale = choose_scale(amax, element.half_range, scale_dtype, scale_2)
    size = rows // halves if fmt.group[0] > 1 else rows  # A group of rows lies within one half.
    blocks = [
        _quantize_rows(weight[block].float(), fmt, _of_rows(scale, rows, block), _of_rows(scale_2, rows, block))
        for start in range(0, rows, size)
        for block in row_blocks(size, columns, fmt, start)
    ]
    if scale is None:
        scale = torch.cat([block.scale for block in blocks])
        if fmt.nested:
            scale, scale_2 = encode_scales(scale, NESTED_BLOCK)
    zero_points = [block.zero_point for block in blocks if block.zero_point is not None]
    q = torch.cat([block.q for block in blocks])
    return Quantized(q, scale, scale_2, torch.cat(zero_points) if zero_points else None)


def _quantize_rows(
    x: torch.Tensor, fmt: QuantFormat, scale: torch.Tensor | None, scale_2: torch.Tensor | None
) -> Quantized:
    """Quantizes some rows in fp32; scales that span more than these rows are passed in, one per row."""
    element = element_of(fmt)
    rows, columns = x.shape
    zero_point = None
    if scale is None:
        low, high = group_extrema(x, fmt.group)
        scale_dtype: torch.dtype = torch.float32 if fmt.nested else getattr(torch, fmt.scale_dtype)
        if fmt.symmetric:
            scale = choose_scale(torch.maximum(-low, high), element.half_range, scale_dtype, scale_2)
            if fmt.nested:
                # A group of zeros has scale 1, which would stretch its block's range.
                scale = torch.where(low == high, 0.0, scale)
        else:
            scale = choose_scale(high - low, element.max_value - element.min_value, scale_dtype, scale_2)
            total = scale.float() if scale_2 is None else scale.float() * scale_2
            zero_point = element.encode(element.min_value - low / total)
    scaled = x / total_scale(scale, scale_2, fmt, rows, columns)
    if zero_point is not None:
        scaled += spread_zero_points(zero_point, fmt, scale.shape[-1], rows, columns)
    return Quantized(element.encode(scaled), scale, None, zero_point)


def _take_rows(matrix: Quantized, fmt: QuantFormat, rows: slice) -> Quantized:
    num_rows = len(matrix.q)
    found = take_groups(matrix, fmt, rows)
    if fmt.group == (WHOLE, WHOLE):
        found = dataclasses.replace(found, scale=_of_rows(found.scale, num_rows, rows))
    return dataclasses.replace(found, q=matrix.q[rows], scale_2=_of_rows(matrix.scale_2, num_rows, rows))


def take_groups(matrix: Quantized, fmt: QuantFormat, rows: slice) -> Quantized:
    """Repeats scales and zero points of groups of several rows for each of these rows [..., rows, G]."""
    extent = fmt.group[0]
    if extent == WHOLE:
        return matrix
    groups: slice | torch.Tensor = rows
    if extent > 1:
        size = matrix.q.shape[-2] // matrix.halves
        row = torch.arange(rows.start, rows.stop, device=matrix.q.device)
        groups = row // size * -(-size // extent) + row % size // extent
    scale, zero_point = matrix.scale[..., groups, :], matrix.zero_point
    return dataclasses.replace(
        matrix, scale=scale, zero_point=None if zero_point is None else zero_point[..., groups, :]
    )


def _of_rows(value: torch.Tensor | None, num_rows: int, rows: slice) -> Any:
    """Expands a value for all rows [] or per half [halves] to one per row [rows, 1]; None stays."""
    return None if value is None else value.reshape(-1).repeat_interleave(num_rows // value.numel())[rows, None]

"""Products of sorted rows and canonical weights, forward and back, on Hopper, in Triton's Gluon.

The same results as `kernels/backward/products.py`, where sizes are named, by the kernel of `kernel.py`. Weights are
read where the trained parameter lies, by tensor maps: gates and ups of w13, which are far apart there, come side by
side, and a product along the other axis of a weight multiplies its tile transposed. An adapter is one more step of the
reduction for every 64 of its rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moereg.kernels.backward.products import LowRank
from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.hopper.arguments import clipped_map, tensor_map, weight_map
from moereg.kernels.hopper.config import TRAINED, select_group_m
from moereg.kernels.hopper.kernel import launch_product
from moereg.kernels.hopper.producer import SAVED_ROWS
from moereg.kernels.hopper.ring import BLOCK_K
from moereg.kernels.hopper.training_consumer import NUM_WARPS
from moereg.kernels.launch.replay import launch
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS


@triton.jit
def _clear_kernel(counters, NUMBER: tl.constexpr):
    tl.store(counters + tl.arange(0, NUMBER), tl.zeros([NUMBER], dtype=tl.int32))


def gate_up(
    act: torch.Tensor,
    pre: torch.Tensor | None,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    counter: torch.Tensor,
    activation: ActivationConstant,
    *,
    top_k: int,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> None:
    """As `saving_gate_up` of `kernels/backward/products.py`.

    Args:
        act: [GUARD_ROWS + N, I] bf16 or fp16, contiguous: overwritten behind the guard up to the last valid row.
        pre: [GUARD_ROWS + N, P], likewise; None: not saved.
        hidden_states: [T, H], same dtype, within 2**31 elements; H, I and strides multiples of 8, pointers of 16
            bytes, here and for every tensor of 16-bit elements.
        w13: [E, P, H], same dtype, contiguous, gates first.
        plan: from `sort_routes` with `TRAINED.block_m` and no slack.
        counter: [1] int32, zero; used up.
        bias: [E, P], any float dtype, contiguous; None: no bias.
        low_rank: an adapter's part, from `expanding`, of contiguous matrices; None: no adapter.
    """
    halves, width = (2, act.shape[1]) if activation.gated else (1, act.shape[1])
    assert w13.shape[1:] == (halves * width, hidden_states.shape[1])
    columns = TRAINED.block_n // 2 // halves
    _launch(
        "gate_up",
        (act, pre, None, None),
        hidden_states,
        weight_map(w13, TRAINED.block_n, halves),
        plan,
        counter,
        columns,
        (None, None) if low_rank is None else _low_maps(low_rank, low_rank.matrix.transpose(1, 2), halves),
        num_columns=w13.shape[1],
        halves=halves,
        activation=activation,
        bias=bias,
        top_k=top_k,
    )


def rows_product(
    out: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    plan: RoutePlan,
    counter: torch.Tensor,
    *,
    by_depth: bool,
    topk_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> None:
    """Writes `(rows @ weight[expert].T + bias) * topk_weight`, or `rows @ weight[expert]`, for every sorted row.

    Args:
        out: [GUARD_ROWS + N, C] bf16 or fp16, contiguous: overwritten behind the guard up to the last valid row.
        rows: [N, D], same dtype, contiguous.
        weight: [E, C, D], contiguous; with `by_depth` [E, D, C].
        plan: as for `gate_up`, like all arguments not listed.
        by_depth: whether rows of the weight are steps of the reduction.
        topk_weights: [T, K] fp32, contiguous; None: rows are not weighted.
        bias: [E, C], any float dtype, contiguous; None: no bias.
    """
    assert weight.shape[1:] == ((rows.shape[1], out.shape[1]) if by_depth else (out.shape[1], rows.shape[1]))
    columns = TRAINED.block_n // 2
    box_columns = columns if by_depth else None
    low: tuple[TensorDescriptor | None, TensorDescriptor | None] = (None, None)
    if low_rank is not None:
        matrix = low_rank.matrix if by_depth else low_rank.matrix.transpose(1, 2)
        low = _low_maps(low_rank, matrix, 0, box_columns)
    _launch(
        "rows",
        (out, None, None, None),
        rows,
        weight_map(weight, TRAINED.block_n, 0, box_columns),
        plan,
        counter,
        columns,
        low,
        num_columns=out.shape[1],
        by_depth=by_depth,
        bias=bias,
        topk_weights=topk_weights,
    )


def down_input(
    pre_grad: torch.Tensor | None,
    act: torch.Tensor | None,
    partials: torch.Tensor | None,
    grad_out: torch.Tensor,
    w2: torch.Tensor,
    pre: torch.Tensor,
    topk_weights: torch.Tensor,
    plan: RoutePlan,
    counter: torch.Tensor,
    activation: ActivationConstant,
    *,
    low_rank: LowRank | None = None,
) -> None:
    """As `down_input_gradients` of `kernels/backward/products.py`.

    Args:
        pre_grad: [GUARD_ROWS + N, P] bf16 or fp16, contiguous, likewise behind the guard.
        act: [GUARD_ROWS + N, I], likewise.
        partials: [`num_partials`, N] fp32, contiguous.
        grad_out: [T, H], as `hidden_states` of `gate_up`.
        w2: [E, H, I], contiguous.
        pre: [N, P], contiguous.
        topk_weights: [T, K] fp32, contiguous.
        plan: as for `gate_up`, like all arguments not listed.
    """
    num_routes, halves, width = topk_weights.numel(), 2 if activation.gated else 1, w2.shape[2]
    assert w2.shape[1] == grad_out.shape[1] and pre.shape == (num_routes, halves * width)
    assert partials is None or partials.shape == (num_partials(width), num_routes)
    columns = TRAINED.block_n
    _launch(
        "down_input",
        (act, pre_grad, partials, tensor_map(*_by_half(pre, halves), (1, SAVED_ROWS.value, columns))),
        grad_out,
        weight_map(w2, TRAINED.block_n, 0, columns),
        plan,
        counter,
        columns,
        (None, None) if low_rank is None else _low_maps(low_rank, low_rank.matrix, 0, columns),
        num_columns=width,
        halves=halves,
        activation=activation,
        topk_weights=topk_weights,
        top_k=topk_weights.shape[1],
        by_depth=True,
    )


def num_partials(width: int) -> int:
    """Sums of a row that `down_input` writes, one for each warp of the consumer; `width` is I."""
    return int(NUM_WARPS.value) * -(-width // TRAINED.block_n)


def clear(counters: torch.Tensor) -> None:
    """Zeroes tile counters, [C] int32, C a power of two; by a kernel, so that it is replayed with the others."""
    launch(_clear_kernel, (1,), counters, NUMBER=counters.numel(), num_warps=1)


def _by_half(pre: torch.Tensor, halves: int) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """A base, and its shape and strides as [halves, N, I]."""
    width = pre.shape[1] // halves
    return pre, (halves, len(pre), width), (width, pre.shape[1], 1)


def _low_maps(
    low_rank: LowRank, matrix: torch.Tensor, halves: int, box_columns: int | None = None
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Maps of an adapter's low-rank rows and of its contiguous matrix; boxes past the rank are filled with zeros."""
    low = low_rank.rows
    rows = tensor_map(low, tuple(low.shape), low.stride(), (TRAINED.block_m // 2, BLOCK_K.value))
    return rows, weight_map(matrix, TRAINED.block_n, halves, box_columns)


def _pre_map(pre: torch.Tensor, halves: int, box: tuple[int, int]) -> TensorDescriptor:
    """Map of rows behind the guard by half, clipped at an expert's end as by `clipped_map`."""
    num_columns = pre.shape[1]
    width = num_columns // halves
    shape = halves, len(pre) - GUARD_ROWS + 1, GUARD_ROWS, width
    return tensor_map(pre, shape, (width, num_columns, num_columns, 1), (1, 1, *box))


def _launch(
    product: str,
    results: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, TensorDescriptor | None],
    rows: torch.Tensor,
    weights: TensorDescriptor,
    plan: RoutePlan,
    counter: torch.Tensor,
    columns: int,
    low: tuple[TensorDescriptor | None, TensorDescriptor | None],
    *,
    num_columns: int,
    halves: int = 1,
    by_depth: bool = False,
    activation: ActivationConstant | None = None,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    top_k: int | None = None,
) -> None:
    """Launches a product: `results` are out, pre, partials and what is saved; a store has that many columns."""
    out, pre, partials, saved = results
    assert all(one is None or one.is_contiguous() for one in (out, pre, partials, bias, topk_weights))
    depth = rows.shape[1]
    assert depth % 8 == rows.stride(0) % 8 == 0
    low_rows, low_weights = low
    # Rows of the pre-activation's gradient are stored from the ring.
    staged = (SAVED_ROWS.value if saved else TRAINED.rows_of_store(columns)), columns
    launch_product(
        rows,
        weights,
        plan,
        TRAINED,
        num_columns=num_columns,
        group_m=select_group_m(num_columns * depth * rows.element_size()),
        top_k=top_k,
        activation=activation,
        bias=bias,
        counter=counter,
        tile={
            "bodies": TRAINED.bodies,
            "stages": TRAINED.num_stages,
            "consumers": 1 if saved else 2,
            "trained": product,
            "by_depth": by_depth,
            "halves": halves,
        },
        out=None if out is None else clipped_map(out, (1, *staged)),
        pre=None if pre is None else _pre_map(pre, halves, staged),
        partials=partials,
        saved=saved,
        low_rows=low_rows,
        low_weights=low_weights,
        topk_weights=topk_weights,
        num_steps=triton.cdiv(depth, BLOCK_K.value),
        low_steps=None if low_rows is None else triton.cdiv(low_rows.shape[1], BLOCK_K.value),
        num_routes=plan.sorted_routes.numel(),
        num_warps=8 if saved else 4,
    )

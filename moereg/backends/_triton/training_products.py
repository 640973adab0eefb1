"""The full products of a training step: the portable kernels', or Hopper's own.

Buffers of sorted rows begin with `guard` unused ones, or none, for Hopper's clipped stores. Sizes as in `training`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from moereg.kernels.backward import products, weights
from moereg.kernels.backward.config import TrainingConfigs
from moereg.kernels.backward.products import LowRank
from moereg.kernels.gemm.epilogue import ActivationConstant, GateUpEpilogue
from moereg.kernels.hopper import training_gemm, training_weights
from moereg.kernels.hopper.config import MIN_TRAINED_ROWS, TRAINED
from moereg.kernels.launch.remembered import POINTER_ALIGNMENT
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS

_CHUNK: Final = 8
"""Elements of a 16-byte copy."""

NUM_COUNTERS: Final = 4
"""Tile counters of a backward pass, one for each of its products."""


@dataclass(frozen=True)
class Products:
    """The products of a call, over rows of one plan: by Hopper's own kernels, or by those for any GPU and dtype."""

    plan: RoutePlan  # of the call; on Hopper with tiles of 128 rows
    configs: TrainingConfigs  # of the call; read by the portable kernels
    guard: int  # unused rows in front of sorted rows, which Hopper's products need
    # zeros, [2] for a forward pass, [NUM_COUNTERS] for a backward pass; used up. None: the portable kernels run, as in
    # `kernels/backward`
    counters: torch.Tensor | None = None

    def rows_of(self, buffer: Any) -> Any:
        """The rows behind the guard, or None."""
        return None if buffer is None else buffer[self.guard :]

    def num_partials(self, width: int) -> int:
        """Rows of `down_input`'s partial sums for I columns."""
        if self.counters is not None:
            return training_gemm.num_partials(width)
        return products.num_partials(width, self.configs.down_input.block_n)

    def gate_up(
        self,
        act: torch.Tensor,
        pre: torch.Tensor,
        hidden_states: torch.Tensor,
        w13: torch.Tensor,
        epilogue: GateUpEpilogue,
        top_k: int,
        low_rank: LowRank | None,
    ) -> None:
        """Writes `act` [guard + N, I] and `pre` [guard + N, P]."""
        named: dict[str, Any] = {"top_k": top_k, "bias": epilogue.bias, "low_rank": low_rank}
        given = hidden_states, w13, self.plan
        if self.counters is not None:
            training_gemm.gate_up(act, pre, *given, self.counters[:1], epilogue.activation, **named)
        else:
            act, pre = self.rows_of(act), self.rows_of(pre)
            products.saving_gate_up(act, pre, *given, self.configs.rows, epilogue.activation, **named)

    def down(
        self,
        rows: torch.Tensor,
        act: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        bias: torch.Tensor | None,
        low_rank: LowRank | None,
    ) -> None:
        """Writes the weighted `rows` [guard + N, H]."""
        named: dict[str, Any] = {"topk_weights": topk_weights, "bias": bias, "low_rank": low_rank}
        given = self.rows_of(act), w2, self.plan
        if self.counters is not None:
            training_gemm.rows_product(rows, *given, self.counters[1:2], by_depth=False, **named)
        else:
            products.down_rows(self.rows_of(rows), *given, self.configs.rows, **named)

    def down_input(
        self,
        pre_grad: torch.Tensor | None,
        act: torch.Tensor | None,
        partials: torch.Tensor | None,
        grad_out: torch.Tensor,
        w2: torch.Tensor,
        pre: torch.Tensor,
        topk_weights: torch.Tensor,
        activation: ActivationConstant,
        low_rank: LowRank | None,
    ) -> None:
        """Writes `pre_grad` [guard + N, P], `act` [guard + N, I] and `partials`."""
        given = grad_out, w2, self.rows_of(pre), topk_weights, self.plan
        if self.counters is not None:
            training_gemm.down_input(pre_grad, act, partials, *given, self.counters[:1], activation, low_rank=low_rank)
        else:
            pre_grad, act, config = self.rows_of(pre_grad), self.rows_of(act), self.configs.down_input
            products.down_input_gradients(pre_grad, act, partials, *given, config, activation, low_rank=low_rank)

    def gate_up_input(
        self, rows: torch.Tensor, pre_grad: torch.Tensor, w13: torch.Tensor, low_rank: LowRank | None
    ) -> None:
        """Writes `rows` [guard + N, H]."""
        given = self.rows_of(pre_grad), w13, self.plan
        if self.counters is not None:
            training_gemm.rows_product(rows, *given, self.counters[1:2], by_depth=True, low_rank=low_rank)
        else:
            products.gate_up_input_gradients(self.rows_of(rows), *given, self.configs.rows, low_rank=low_rank)

    def w13_gradients(self, grad: torch.Tensor, pre_grad: torch.Tensor, tokens: torch.Tensor, **named: Any) -> None:
        """Writes or adds to `grad` [E, P, H]; `named` are `top_k` and `accumulate`."""
        self._weight_gradients(grad, pre_grad, tokens, 2, gathers="right", **named)

    def w2_gradients(self, grad: torch.Tensor, grad_out: torch.Tensor, act: torch.Tensor, **named: Any) -> None:
        """Writes or adds to `grad` [E, H, I]; `named` likewise."""
        self._weight_gradients(grad, grad_out, act, 3, gathers="left", **named)

    def _weight_gradients(
        self, grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, number: int, *, gathers: str, **named: Any
    ) -> None:
        """Reads the rows of the side that does not gather from a buffer with a guard; uses that tile counter."""
        if self.counters is not None and not named["accumulate"] and _fits(grad, left.dtype):
            counter = self.counters[number : number + 1]
            training_weights.weight_gradients(
                grad, left, right, self.plan, counter, top_k=named["top_k"], gathers=gathers
            )
            return
        left, right = (left, self.rows_of(right)) if gathers == "left" else (self.rows_of(left), right)
        weights.weight_gradients(grad, left, right, self.plan, self.configs.weights, gathers=gathers, **named)


def max_partials(width: int, block_n: int, on_hopper: bool) -> int:
    """Most partial sums of a row that a call's kernel may write; `block_n` is the portable one's narrowest tile."""
    return max(products.num_partials(width, block_n), training_gemm.num_partials(width) if on_hopper else 0)


def hopper_guard(num_routes: int, rows_per_expert: float, dtype: torch.dtype) -> int:
    """Rows in front of sorted rows for Hopper's products, or 0 where a call has too few rows for these to pay."""
    fits = dtype.itemsize == 2 and rows_per_expert > MIN_TRAINED_ROWS and num_routes >= GUARD_ROWS
    return GUARD_ROWS if fits else 0


def fits_hopper(
    block_m: int,
    tokens: torch.Tensor,
    contiguous: tuple[torch.Tensor | None, ...],
    adapters: tuple[torch.Tensor | None, ...],
) -> bool:
    """Whether Hopper's kernels can read a call's tensors.

    Args:
        block_m: rows of the plan's tiles.
        tokens: [T, H]: the rows that are gathered.
        contiguous: weights, biases, and whatever else a tensor map or a plain pointer describes.
        adapters: [E, R, in] and [E, out, R], or None.
    """
    return (
        block_m == TRAINED.block_m
        and len(tokens) * tokens.stride(0) < 2**31
        and tokens.stride(0) % _CHUNK == tokens.shape[1] % _CHUNK == tokens.data_ptr() % POINTER_ALIGNMENT == 0
        and all(one is None or _fits(one, one.dtype) for one in contiguous)
        and all(one is None or (_fits(one, one.dtype) and one.shape[1] % _CHUNK == 0) for one in adapters)
    )


def _fits(one: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor map can describe a contiguous tensor, whose rows then begin at multiples of 16 bytes."""
    aligned = one.shape[-1] % _CHUNK == one.data_ptr() % POINTER_ALIGNMENT == 0
    return aligned and one.is_contiguous() and one.dtype == dtype

"""The two grouped matmuls of a Mixture-of-Experts layer with 16- or 32-bit weights, in Triton.

Sizes: T tokens, K choices per token, N = T * K routes, E local experts, H hidden, I intermediate, `I_pad` and `H_pad`
the sizes of the zero-padded weights. Rows come in the compact order of a `RoutePlan`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moereg.kernels.triton_routing import RoutePlan

# The reduced dimension of permuted weights is a multiple of this, so that no load of a weight is masked along it.
WEIGHT_PAD = 64


@dataclass(frozen=True, slots=True)
class GroupedGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two).
        block_k: reduced elements per step; halved until it divides the padded dimension.
        group_m: tiles of rows that share the columns of a weight before the next columns are taken, for the L2.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        max_rows_per_expert: applies up to this average of rows per expert.
        element_bytes: bytes of a weight.
        gate_up: configuration of the first GEMM.
        down: configuration of the second, with the same `block_m`.
    """

    max_rows_per_expert: float
    element_bytes: int
    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig


# First match counts. Up to 16 rows the weights are streamed once whatever the tile, so tiles are small and many; from
# 64 rows on they are as large as registers allow. 32-bit products run on plain FMA, so their tiles stay small.
CONFIG_RULES = (
    ConfigRule(16, 2, GroupedGemmConfig(16, 64, 128, 1, 4, 4), GroupedGemmConfig(16, 64, 128, 1, 4, 4)),
    ConfigRule(32, 2, GroupedGemmConfig(32, 128, 128, 4, 4, 3), GroupedGemmConfig(32, 128, 128, 4, 4, 3)),
    ConfigRule(96, 2, GroupedGemmConfig(64, 128, 64, 8, 4, 4), GroupedGemmConfig(64, 128, 64, 8, 4, 4)),
    ConfigRule(math.inf, 2, GroupedGemmConfig(128, 256, 64, 8, 8, 3), GroupedGemmConfig(128, 256, 64, 8, 8, 3)),
    ConfigRule(32, 4, GroupedGemmConfig(16, 64, 64, 4, 4, 2), GroupedGemmConfig(16, 64, 64, 4, 4, 2)),
    ConfigRule(math.inf, 4, GroupedGemmConfig(64, 64, 32, 8, 8, 2), GroupedGemmConfig(64, 64, 32, 8, 8, 2)),
)

# What a plan's block map is sized for when the configuration is not known yet.
MIN_BLOCK_M = min(rule.gate_up.block_m for rule in CONFIG_RULES)


def select_config(
    rows_per_expert: float, element_bytes: int, shared_bytes: int | None = None
) -> tuple[GroupedGemmConfig, GroupedGemmConfig]:
    """Returns the configurations of both GEMMs.

    Args:
        rows_per_expert: average number of rows per expert.
        element_bytes: 2 or 4.
        shared_bytes: shared memory that one program may use on the device; shortens pipelines that would not fit.

    Returns:
        The first GEMM's and the second's, with equal `block_m`.
    """
    for rule in CONFIG_RULES:
        if rows_per_expert <= rule.max_rows_per_expert and element_bytes == rule.element_bytes:
            return (
                _fit_pipeline(rule.gate_up, element_bytes, shared_bytes),
                _fit_pipeline(rule.down, element_bytes, shared_bytes),
            )
    raise AssertionError(f"no launch configuration for {element_bytes}-byte elements")


@functools.cache
def max_shared_bytes(device: torch.device) -> int | None:
    """Shared memory that one program may use on a device; None for the interpreter, which has no limit."""
    if device.type == "cpu":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


@triton.jit
def _tile_of_program(num_blocks, num_tiles_n, GROUP_M: tl.constexpr):
    # Programs run roughly in order, so a group of row tiles times all columns is what the L2 sees at a time.
    pid = tl.program_id(0)
    first_block = pid // (GROUP_M * num_tiles_n) * GROUP_M
    group_blocks = tl.minimum(num_blocks - first_block, GROUP_M)
    within = pid % (GROUP_M * num_tiles_n)
    return first_block + within % group_blocks, within // group_blocks


@triton.jit
def _accumulate(
    a_pointers,
    b_pointers,
    reduced,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MASK_K: tl.constexpr,
):
    offs_k = tl.arange(0, BLOCK_K)
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, reduced, BLOCK_K):
        if MASK_K:
            # The weights beyond are zeros, but what lies behind a row of the activations may be NaN.
            a = tl.load(a_pointers, mask=(start + offs_k < reduced)[None, :], other=0.0)
        else:
            a = tl.load(a_pointers)
        b = tl.load(b_pointers)
        # Matters for 32-bit operands only: TF32 would keep 10 bits of their mantissa.
        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")
        a_pointers += BLOCK_K
        b_pointers += BLOCK_K
    return accumulator


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        return x / (1.0 + tl.exp(-ALPHA * x))
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) * (x + 0.044715 x^3).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACTIVATION == "relu2")
        # Written so that NaN stays NaN.
        x = tl.where(x < 0.0, 0.0, x)
        return x * x


@triton.jit
def _gate_up_kernel(
    out,
    hidden_states,
    w13,
    bias,
    topk_weights,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    hidden_size,
    num_columns,
    num_tiles_n,
    stride_hidden,
    stride_expert,
    stride_column,
    stride_bias,
    stride_out,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
    MASK_K: tl.constexpr,
    MASK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    used_blocks = tl.load(num_blocks)
    if tl.program_id(0) >= used_blocks * num_tiles_n:
        return
    block, tile_n = _tile_of_program(used_blocks, num_tiles_n, GROUP_M)
    expert = tl.load(block_expert + block)
    row = tl.load(block_row + block)
    end = tl.load(block_end + block)

    # Rows and columns past the end repeat the last one, which costs no bandwidth and needs no mask; they are dropped
    # when stored.
    rows = row + tl.arange(0, BLOCK_M)
    routes = tl.load(sorted_routes + tl.minimum(rows, end - 1))
    tokens = (routes // TOP_K).to(tl.int64)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if MASK_N:
        columns = tl.minimum(columns, num_columns - 1)
    offs_k = tl.arange(0, BLOCK_K)
    a_pointers = hidden_states + tokens[:, None] * stride_hidden + offs_k[None, :]
    b_pointers = w13 + expert.to(tl.int64) * stride_expert + columns[None, :] * stride_column + offs_k[:, None]
    x = _accumulate(a_pointers, b_pointers, hidden_size, BLOCK_M, BLOCK_N, BLOCK_K, MASK_K)

    if topk_weights is not None:
        x *= tl.load(topk_weights + routes)[:, None]
    if bias is not None:
        x += tl.load(bias + expert.to(tl.int64) * stride_bias + columns).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_N // 2, 2)))
        if LIMIT is not None:
            # Comparisons keep NaN, which a minimum would replace by the limit.
            gate = tl.where(gate > LIMIT, LIMIT, gate)
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        y = _activate(gate, ACTIVATION, ALPHA) * (up + BETA)
        out_columns = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        num_out_columns = num_columns // 2
    else:
        y = _activate(x, ACTIVATION, ALPHA)
        out_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        num_out_columns = num_columns
    mask = (rows < end)[:, None]
    if MASK_N:
        mask = mask & (out_columns < num_out_columns)[None, :]
    out_pointers = out + rows.to(tl.int64)[:, None] * stride_out + out_columns[None, :]
    tl.store(out_pointers, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _down_kernel(
    out,
    intermediate,
    w2,
    bias,
    topk_weights,
    sorted_routes,
    block_expert,
    block_row,
    block_end,
    num_blocks,
    reduced,
    num_columns,
    num_tiles_n,
    stride_intermediate,
    stride_expert,
    stride_column,
    stride_bias,
    stride_out,
    MASK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    used_blocks = tl.load(num_blocks)
    if tl.program_id(0) >= used_blocks * num_tiles_n:
        return
    block, tile_n = _tile_of_program(used_blocks, num_tiles_n, GROUP_M)
    expert = tl.load(block_expert + block)
    row = tl.load(block_row + block)
    end = tl.load(block_end + block)

    rows = row + tl.arange(0, BLOCK_M)
    loaded_rows = tl.minimum(rows, end - 1)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    loaded_columns = columns
    if MASK_N:
        loaded_columns = tl.minimum(columns, num_columns - 1)
    offs_k = tl.arange(0, BLOCK_K)
    a_pointers = intermediate + loaded_rows.to(tl.int64)[:, None] * stride_intermediate + offs_k[None, :]
    b_pointers = w2 + expert.to(tl.int64) * stride_expert + loaded_columns[None, :] * stride_column + offs_k[:, None]
    x = _accumulate(a_pointers, b_pointers, reduced, BLOCK_M, BLOCK_N, BLOCK_K, False)

    routes = tl.load(sorted_routes + loaded_rows)
    if bias is not None:
        x += tl.load(bias + expert.to(tl.int64) * stride_bias + loaded_columns).to(tl.float32)[None, :]
    if topk_weights is not None:
        x *= tl.load(topk_weights + routes)[:, None]
    mask = (rows < end)[:, None]
    if MASK_N:
        mask = mask & (columns < num_columns)[None, :]
    out_pointers = out + routes.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_pointers, x.to(out.dtype.element_ty), mask=mask)


def gate_up_gemm(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    top_k: int,
    activation: str,
    gated: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> None:
    """Writes `act(hidden_states[token] @ w13[expert].T + bias)` for every sorted row.

    Where gated, column 2j of the product is gate j and column 2j + 1 is up j, and the activation is
    `f(min(gate, limit)) * (clamp(up, -limit, limit) + beta)`. Accumulation and activation are in fp32.

    Args:
        out: [N, I_pad], dtype of the activations, rows contiguous: overwritten up to the last valid row. Columns
            from I on become zeros, since their weights and biases are.
        hidden_states: [T, H] bf16, fp16 or fp32, rows contiguous; read only in its H columns.
        w13: [E, 2 * I_pad, H_pad] interleaved, or [E, I_pad, H_pad] where not gated; same dtype, zero padded, H_pad a
            multiple of 64, fewer than 2**31 elements per expert.
        plan: from `sort_routes` with `config.block_m`.
        config: launch configuration.
        top_k: K.
        activation: `silu` and `swigluoai` (`x * sigmoid(alpha * x)`), `gelu`, `gelu_tanh` or `relu2`.
        gated: whether w13 holds gates.
        alpha: slope inside the sigmoid.
        beta: added to the clamped up half; only where gated.
        limit: the clamp, or None; only where gated.
        bias: [E, 2 * I_pad] or [E, I_pad] in w13's row order, any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous: multiplies the product before the bias; None: no weight.
    """
    num_columns = w13.shape[1]
    hidden_size = hidden_states.shape[1]
    block_k = math.gcd(config.block_k, w13.shape[2])
    assert config.block_m == plan.block_m and w13.shape[2] % WEIGHT_PAD == 0 and hidden_size <= w13.shape[2]
    assert topk_weights is None or (topk_weights.dtype == torch.float32 and topk_weights.is_contiguous())
    assert hidden_states.stride(1) == w13.stride(2) == out.stride(1) == 1
    assert out.shape[1] == num_columns // (2 if gated else 1)
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    _gate_up_kernel[(plan.max_blocks * num_tiles_n,)](
        out,
        hidden_states,
        w13,
        bias,
        topk_weights,
        plan.sorted_routes,
        plan.block_expert,
        plan.block_row,
        plan.block_end,
        plan.num_blocks,
        hidden_size,
        num_columns,
        num_tiles_n,
        hidden_states.stride(0),
        w13.stride(0),
        w13.stride(1),
        0 if bias is None else bias.stride(0),
        out.stride(0),
        TOP_K=top_k,
        ACTIVATION=activation,
        GATED=gated,
        ALPHA=alpha,
        BETA=beta,
        LIMIT=limit,
        MASK_K=hidden_size % block_k != 0,
        MASK_N=num_columns % config.block_n != 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def down_gemm(
    out: torch.Tensor,
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: RoutePlan,
    config: GroupedGemmConfig,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> None:
    """Writes `(intermediate[row] @ w2[expert].T + bias) * topk_weight` for every sorted row to its route's row.

    Args:
        out: [N, H], rows contiguous: the rows of valid routes are overwritten, the others stay as they are. Its dtype
            is the caller's choice: that of the activations halves the traffic of this buffer, the largest of the
            layer, at the price of one more rounding per route, of the size of the output's own.
        intermediate: [N, I_pad] bf16, fp16 or fp32, rows contiguous, from `gate_up_gemm`.
        w2: [E, H, I_pad], same dtype, zero padded, I_pad a multiple of 64, fewer than 2**31 elements per expert.
        plan: from `sort_routes` with `config.block_m`.
        config: launch configuration.
        bias: [E, H], any float dtype, or None.
        topk_weights: [T, K] fp32 contiguous, or None for no weight.
    """
    num_columns = w2.shape[1]
    reduced = w2.shape[2]
    assert config.block_m == plan.block_m and reduced % WEIGHT_PAD == 0 and intermediate.shape[1] == reduced
    assert topk_weights is None or (topk_weights.dtype == torch.float32 and topk_weights.is_contiguous())
    assert intermediate.stride(1) == w2.stride(2) == out.stride(1) == 1
    num_tiles_n = triton.cdiv(num_columns, config.block_n)
    _down_kernel[(plan.max_blocks * num_tiles_n,)](
        out,
        intermediate,
        w2,
        bias,
        topk_weights,
        plan.sorted_routes,
        plan.block_expert,
        plan.block_row,
        plan.block_end,
        plan.num_blocks,
        reduced,
        num_columns,
        num_tiles_n,
        intermediate.stride(0),
        w2.stride(0),
        w2.stride(1),
        0 if bias is None else bias.stride(0),
        out.stride(0),
        MASK_N=num_columns % config.block_n != 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=math.gcd(config.block_k, reduced),
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def gate_up_reference(
    hidden_states: torch.Tensor,
    w13: torch.Tensor,
    plan: RoutePlan,
    *,
    top_k: int,
    activation: str,
    gated: bool,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `gate_up_gemm` writes, in torch and fp32, expert by expert; synchronises.

    Args:
        hidden_states: as for `gate_up_gemm`, and so on.

    Returns:
        [valid routes, I_pad] fp32, rows in sorted order, not rounded.
    """
    offsets = plan.expert_offsets.tolist()
    num_columns = w13.shape[1]
    out = hidden_states.new_empty(offsets[-1], num_columns // (2 if gated else 1), dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = hidden_states[routes // top_k].float() @ w13[expert, :, : hidden_states.shape[1]].float().T
        if topk_weights is not None:
            x *= topk_weights.flatten()[routes, None]
        if bias is not None:
            x += bias[expert].float()
        if gated:
            gate, up = x[:, 0::2], x[:, 1::2]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            out[row:end] = _activate_reference(gate, activation, alpha) * (up + beta)
        else:
            out[row:end] = _activate_reference(x, activation, alpha)
    return out


def down_reference(
    intermediate: torch.Tensor,
    w2: torch.Tensor,
    plan: RoutePlan,
    *,
    bias: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `down_gemm` writes, in torch and fp32, expert by expert; synchronises.

    Args:
        intermediate: as for `down_gemm`, and so on.

    Returns:
        [N, H] fp32 by route, not rounded; NaN where a route is not valid.
    """
    offsets = plan.expert_offsets.tolist()
    out = intermediate.new_full((plan.route_expert.numel(), w2.shape[1]), math.nan, dtype=torch.float32)
    for expert, (row, end) in enumerate(itertools.pairwise(offsets)):
        routes = plan.sorted_routes[row:end].long()
        x = intermediate[row:end].float() @ w2[expert].float().T
        if bias is not None:
            x += bias[expert].float()
        if topk_weights is not None:
            x *= topk_weights.flatten()[routes, None]
        out[routes] = x
    return out


def _activate_reference(x: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    if activation in ("silu", "swigluoai"):
        return x * torch.sigmoid(alpha * x)
    if activation == "gelu":
        return torch.nn.functional.gelu(x)
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    assert activation == "relu2", activation
    return torch.relu(x).square()


def _fit_pipeline(config: GroupedGemmConfig, element_bytes: int, shared_bytes: int | None) -> GroupedGemmConfig:
    if shared_bytes is None:
        return config
    stage_bytes = (config.block_m + config.block_n) * config.block_k * element_bytes
    # A kilobyte for the reductions and barriers that Triton adds.
    stages = max(1, min(config.num_stages, (shared_bytes - 1024) // stage_bytes))
    return dataclasses.replace(config, num_stages=stages)

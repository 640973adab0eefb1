"""The layer in JAX: sort rows by expert, two ragged matmuls, weigh and sum. T tokens, K experts a token, N = T * K."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["run_layer"]


@functools.partial(jax.jit, static_argnames=("activation", "scales_inputs"))
def run_layer(
    hidden_states: jax.Array,
    topk_weights: jax.Array,
    local_ids: jax.Array,
    w13: jax.Array,
    w2: jax.Array,
    w13_bias: jax.Array | None,
    w2_bias: jax.Array | None,
    *,
    activation: Any,
    scales_inputs: bool,
) -> jax.Array:
    """Runs the experts; compiled once for each set of shapes, dtypes and keywords.

    Args:
        hidden_states: [T,H] bf16 or fp32.
        topk_weights: [T,K] fp32.
        local_ids: [T,K] int32; -1 adds nothing.
        w13: [E,H,2I] or [E,H,I] in the dtype of hidden_states; gate columns first.
        w2: [E,I,H], likewise.
        w13_bias: [E,2I] or [E,I], or None.
        w2_bias: [E,H] or None.
        activation: moereg's Activation, for its name and scalars.
        scales_inputs: Whether routing weights scale the input instead of the output; K is 1 then.

    Returns:
        [T,H] in the dtype of hidden_states.
    """
    num_tokens, top_k = local_ids.shape
    num_experts = w13.shape[0]
    dtype = hidden_states.dtype
    flat = local_ids.reshape(-1)
    # Routes without an expert sort last, past all groups, where a ragged matmul leaves rows undefined.
    keys = jnp.where(flat < 0, num_experts, flat)
    order = jnp.argsort(keys, stable=True)  # [N]
    keys = keys[order]
    rows_of = jnp.zeros(num_experts, jnp.int32).at[keys].add(1, mode="drop")  # [E]
    row_expert = jnp.minimum(keys, num_experts - 1)
    scales = topk_weights.reshape(-1)[order][:, None]
    rows = hidden_states[order // top_k]  # [N, H]
    if scales_inputs:
        rows = (rows * scales).astype(dtype)
    matmul = functools.partial(
        jax.lax.ragged_dot,
        group_sizes=rows_of,
        # A GPU and a TPU would round fp32 operands.
        precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    gemm1 = matmul(rows, w13)  # [N, 2I] fp32
    if w13_bias is not None:
        gemm1 = gemm1 + w13_bias[row_expert]
    result = matmul(_activate(gemm1, activation).astype(dtype), w2)  # [N, H] fp32
    if w2_bias is not None:
        result = result + w2_bias[row_expert]
    if not scales_inputs:
        result = result * scales
    # Selected away, since 0 * NaN is NaN.
    result = jnp.where((keys < num_experts)[:, None], result, 0.0)
    position = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    return result[position].reshape(num_tokens, top_k, -1).sum(1).astype(dtype)


def _activate(gemm1: jax.Array, activation: Any) -> jax.Array:
    if not activation.gated:
        return jnp.square(jnp.maximum(gemm1, 0.0))  # relu2
    gate, up = jnp.split(gemm1, 2, axis=1)
    if activation.limit is not None:
        gate = jnp.minimum(gate, activation.limit)
        up = jnp.clip(up, -activation.limit, activation.limit)
    if activation.name in ("silu", "swigluoai"):
        gated = gate * jax.nn.sigmoid(activation.alpha * gate)
    else:
        gated = jax.nn.gelu(gate, approximate=activation.name == "gelu_tanh")
    return gated * (up + activation.beta)

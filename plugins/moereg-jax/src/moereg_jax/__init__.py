"""`jax`: experts as two `jax.lax.ragged_dot` on rows sorted by expert, with torch's tensors handed over by DLPack.

Importing this and selecting import no jax. `moereg_jax._torch` and `moereg_jax._layer` do, at a layer's first call.
"""

from __future__ import annotations

import os
from typing import Final

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    Facts,
    MoEProblem,
    PermutedWeights,
    Platform,
    register_moe_backend,
)

__all__ = ["JaxRaggedExperts"]

moereg_api = "1"

LAYOUT: Final = "jax_ragged"

# What JAX_PLATFORMS calls the devices of a platform.
_NAMES: Final = {"cpu": ("cpu",), "cuda": ("cuda", "gpu"), "tpu": ("tpu",)}
# Distributions that bring JAX a device. Asking for them imports nothing, as asking JAX would.
_DRIVERS: Final = {"cuda": ("jax-cuda12-plugin", "jax-cuda13-plugin"), "tpu": ("libtpu",)}


def jax_sees_device(platform: Platform) -> str | None:
    """Why JAX cannot see the platform's device, from the environment and the installed distributions, or None."""
    allowed = [name.strip() for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name.strip()]
    names = _NAMES[platform.kind]
    if allowed and not set(names) & set(allowed):
        return f"requires {names[0]} in JAX_PLATFORMS, got {','.join(allowed)}"
    drivers = _DRIVERS.get(platform.kind, ())
    if drivers and not set(drivers) & set(platform.versions):
        return f"requires {' or '.join(drivers)}, without which JAX sees no {platform.kind} device; install it"
    return None


# Below every built-in cell of these platforms. Where XLA has no grouped matmul it multiplies every row by every expert:
# one thread of an AMD EPYC took 6 to 18 times as long as `torch`, an H200 3 to 40 times as long as `triton`
# (README.md has the tables). TPUs are not measured.
@register_moe_backend(
    name="jax",
    priority=5,
    quant_schemes=("unquantized",),
    platforms=("cpu",),
    requires=("jax>=0.6,<1",),
    probes=(jax_sees_device,),
)
@register_moe_backend(
    name="jax",
    priority=5,
    quant_schemes=("unquantized",),
    platforms=("cuda:sm75+",),
    requires=("jax>=0.6,<1",),
    probes=(jax_sees_device,),
    # Which kernel XLA takes for a GPU is tuned anew in each process.
    deterministic=False,
)
@register_moe_backend(
    name="jax",
    priority=5,
    quant_schemes=("unquantized",),
    platforms=("tpu",),
    # torch-xla holds the tensors of a TPU; 2.7 is its first version that takes a JAX function into its graph.
    requires=("jax>=0.6,<1", "torch-xla>=2.7"),
    probes=(jax_sees_device,),
    deterministic=False,
)
class JaxRaggedExperts(Experts):
    """Rows sorted by expert, one ragged matmul for gate and up and one for down, compiled by XLA."""

    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        bias=True,
        dtypes=frozenset({"bfloat16", "float32"}),
        activation_formats=frozenset({"standard"}),
        placements=frozenset({"contiguous", "map"}),
        router_weight_on_input=True,
        deterministic=True,
    )
    layouts = (LAYOUT,)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Transposes both matrices of each expert, so that a ragged matmul reads them as [E,columns,rows]."""
        tensors = {"w13": _transposed(weights.w13), "w2": _transposed(weights.w2)}
        for name, bias in (("w13_bias", weights.w13_bias), ("w2_bias", weights.w2_bias)):
            if bias is not None:
                tensors[name] = bias
        return PermutedWeights(LAYOUT, tensors)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The first holds a piece of tokens, padded to its bucket."""
        return (min(bucket(num_tokens), self.piece_tokens), problem.hidden_size), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs pieces of at most `piece_tokens`, each padded to its bucket: a bucket is compiled once, in seconds."""
        from moereg_jax import _torch

        _torch.run(out, inputs, weights, workspace13, self.problem, self.piece_tokens)

    @property
    def piece_tokens(self) -> int:
        """Tokens of one compiled call: a power of two that bounds XLA's temporaries.

        Where XLA has no grouped matmul it copies all rows once for each expert.
        """
        problem = self.problem
        row_bytes = max(problem.hidden_size, problem.intermediate_size) * problem.torch_dtype.itemsize
        token_bytes = problem.num_local_experts * problem.top_k * row_bytes
        budget = (256 << 20) if self.platform.kind == "cpu" else (2 << 30)
        most = min(max(budget // token_bytes, 1), 4096)
        return 1 << (most.bit_length() - 1)


def bucket(num_tokens: int) -> int:
    """The next power of two."""
    return 1 << (num_tokens - 1).bit_length()


def _transposed(matrices: torch.Tensor) -> torch.Tensor:
    """[E,rows,columns] as [E,columns,rows], expert by expert."""
    num_experts, rows, columns = matrices.shape
    result = matrices.new_empty(num_experts, columns, rows)
    for mine, theirs in zip(result, matrices, strict=True):
        mine.copy_(theirs.T)
    return result

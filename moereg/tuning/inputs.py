"""What kernels are measured with: random weights, tokens and routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from moereg.problem import MoEProblem
from moereg.weights import ExpertWeights

__all__ = ["ROUTINGS", "Call", "num_calls", "random_call", "random_weights"]

ROUTINGS: Final = ("uniform", "zipf", "one_set")
"""Each token's experts alike likely; likely as 1 / rank, the ranks anew each call; the same experts for all tokens."""

# Prime, so that no row of any matrix starts where another row of it started in the pool.
_POOL_NUMEL: Final = 4_194_301
# Gate and up differ, as they do in real models, so that a kernel that swaps them is caught.
_GATE_STD: Final = 1.0
_UP_STD: Final = 1.6
_BIAS_STD: Final = 0.5
# A weight near 0 would hide that its route is wrong.
_MIN_ROUTE_WEIGHT: Final = 0.1


class Call(NamedTuple):
    """Inputs of one call.

    Attributes:
        hidden_states: [T,H] in the problem's dtype.
        topk_weights: [T,K] fp32.
        topk_ids: [T,K] int32, distinct within a token.
    """

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def random_weights(
    problem: MoEProblem,
    generator: torch.Generator,
    device: torch.device,
    advance: Callable[[int, int], object] | None = None,
) -> ExpertWeights:
    """Random weights at which outputs are of the order of 1; the same on every device.

    Drawing a normal number takes far longer than copying one, so experts are cut at different places from one pool of
    them and scaled differently: no two experts and no two rows of one are equal.

    Args:
        problem: The layer; unquantized.
        generator: Of the CPU.
        device: To build on.
        advance: Told of each expert as (done, in all).

    Raises:
        ValueError: The scheme is quantised.
    """
    if problem.quant.weight is not None:
        raise ValueError(
            f"random weights of scheme {problem.quant.name} cannot be made in this version; "
            "leave --quant out or use moereg explain"
        )
    pool = torch.randn(_POOL_NUMEL, generator=generator).to(device, problem.torch_dtype)
    num_experts, hidden, intermediate = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    halves = problem.activation.num_halves
    w13 = torch.empty(num_experts, halves * intermediate, hidden, dtype=problem.torch_dtype, device=device)
    w2 = torch.empty(num_experts, hidden, intermediate, dtype=problem.torch_dtype, device=device)
    for expert in range(num_experts):
        starts = torch.randint(_POOL_NUMEL, (3,), generator=generator).tolist()
        # Experts of one model differ in scale too.
        scale = 0.8 + 0.4 * float(torch.rand((), generator=generator))
        up = w13[expert, -intermediate:]
        _fill(up, pool, starts[0], scale * _UP_STD / math.sqrt(hidden))
        if halves == 2:
            _fill(w13[expert, :intermediate], pool, starts[1], scale * _GATE_STD / math.sqrt(hidden))
        _fill(w2[expert], pool, starts[2], scale / math.sqrt(intermediate))
        if advance is not None:
            advance(expert + 1, num_experts)
    biases: dict[str, Any] = {}
    if problem.has_bias:
        for name, columns in (("w13_bias", halves * intermediate), ("w2_bias", hidden)):
            bias = torch.randn(num_experts, columns, generator=generator) * _BIAS_STD
            biases[name] = bias.to(device, problem.torch_dtype)
    return ExpertWeights(w13=w13, w2=w2, **biases)


def _fill(target: torch.Tensor, pool: torch.Tensor, start: int, scale: float) -> None:
    """Overwrites a contiguous tensor with the pool, scaled, from `start` on and round again."""
    flat = target.view(-1)
    done = 0
    while done < len(flat):
        piece = pool[start : start + len(flat) - done]
        torch.mul(piece, scale, out=flat[done : done + len(piece)])
        done += len(piece)
        start = 0


def random_call(problem: MoEProblem, num_tokens: int, routing: str, generator: torch.Generator) -> Call:
    """Random tokens and routes, on the generator's device.

    Args:
        problem: The layer.
        num_tokens: T.
        routing: One of `ROUTINGS`.
        generator: Of the device.

    Raises:
        ValueError: The routing is not known.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"unknown routing {routing!r} (known: {', '.join(ROUTINGS)})")
    device, num_experts = generator.device, problem.num_experts

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    # The largest of log(weight) + Gumbel noise are a draw by weight without replacement.
    rows = 1 if routing == "one_set" else num_tokens
    keys = -torch.log(-torch.log(uniform(rows, num_experts)))
    if routing == "zipf":
        rank = torch.randperm(num_experts, generator=generator, device=device) + 1
        keys = keys - torch.log(rank.float())
    topk_ids = keys.topk(problem.top_k, dim=1).indices.int().expand(num_tokens, -1).contiguous()
    topk_weights = uniform(num_tokens, problem.top_k) + _MIN_ROUTE_WEIGHT
    if problem.top_k > 1:  # A single weight would be 1, and a kernel that ignores it would pass.
        topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)
    tokens = torch.randn(num_tokens, problem.hidden_size, generator=generator, device=device)
    return Call(tokens.to(problem.torch_dtype), topk_weights, topk_ids)


def num_calls(num_tokens: int) -> int:
    """How many calls to rotate over: many where a call touches few experts, whose weights would stay in a cache."""
    return 16 if num_tokens <= 64 else 8 if num_tokens <= 1024 else 2

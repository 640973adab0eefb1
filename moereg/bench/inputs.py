"""Inputs for measuring kernels: random weights, tokens and routes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from moereg.errors import ArgumentError
from moereg.numerics.reference import calibrate_activation_scales
from moereg.quantize import quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

ROUTINGS: Final = ("uniform", "zipf", "one_set")
"""Uniform; probability 1 / rank, with new ranks in each call; the same experts for all tokens."""

# Prime, so that no two rows of a matrix start at the same place in the pool.
_POOL_NUMEL: Final = 4_194_301
# Gate and up differ, as in real models, to catch a kernel that swaps them.
_GATE_STD: Final = 1.0
_UP_STD: Final = 1.6
_BIAS_STD: Final = 0.5
_SAMPLE_TOKENS: Final = 64
# A weight near 0 would hide a wrong route.
_MIN_ROUTE_WEIGHT: Final = 0.1

_Draw = tuple[list[int], float]
"""Places in the pool where an expert's matrices start, and the expert's scale."""


class Call(NamedTuple):
    """Inputs of one call."""

    hidden_states: torch.Tensor  # [T,H] in the problem's dtype.
    topk_weights: torch.Tensor  # [T,K] fp32.
    topk_ids: torch.Tensor  # [T,K] int32, distinct within a token.


def random_weights(
    problem: MoEProblem,
    generator: torch.Generator,
    device: torch.device,
    advance: Callable[[int, int], object] = lambda done, total: None,
    experts: Sequence[int] | None = None,
) -> ExpertWeights:
    """Makes random weights with outputs of the order of 1, equal on every device.

    Drawing a normal number takes far longer than copying one. So experts are cut at different places from one pool of
    numbers and scaled differently: no two experts, and no two rows of one, are equal. For a quantized scheme, weights
    are quantized expert by expert, and static activation scales come from random tokens.

    Args:
        problem, generator, device: The layer, a CPU generator, and the device to build on.
        advance: Called after each expert with (experts done, all experts).
        experts: Ids of these experts, if several ranks build parts of one layer: an expert has the same numbers on
            every rank. None means the first ones.
    """
    num_drawn = problem.num_local_experts if experts is None else problem.num_experts
    experts = list(range(num_drawn) if experts is None else experts)
    pool = torch.randn(_POOL_NUMEL, generator=generator).to(device, problem.torch_dtype)
    # Experts of one model differ in scale too. Those that others hold are drawn all the same.
    draws: list[_Draw] = []
    for _ in range(num_drawn):
        starts = torch.randint(_POOL_NUMEL, (3,), generator=generator).tolist()
        draws.append((starts, 0.8 + 0.4 * float(torch.rand((), generator=generator))))
    own = [draws[expert] for expert in experts]
    if problem.quant.weight is None:
        tensors = _empty_experts(problem, len(own), device)
        for place, draw in enumerate(own):
            _fill_expert(problem, tensors["w13"][place], tensors["w2"][place], pool, draw)
            advance(place + 1, len(own))
    else:
        tensors = _quantized_experts(problem, pool, generator.initial_seed(), own, advance)
    if problem.has_bias:
        rows = problem.activation.num_halves * problem.intermediate_size
        for name, columns in (("w13_bias", rows), ("w2_bias", problem.hidden_size)):
            bias = torch.randn(num_drawn, columns, generator=generator) * _BIAS_STD
            tensors[name] = bias[experts].to(device, problem.torch_dtype)
    return ExpertWeights(**tensors, quant=problem.quant)


def _empty_experts(problem: MoEProblem, num_experts: int, device: torch.device) -> dict[str, torch.Tensor]:
    hidden, intermediate = problem.hidden_size, problem.intermediate_size
    shapes = {
        "w13": (num_experts, problem.activation.num_halves * intermediate, hidden),
        "w2": (num_experts, hidden, intermediate),
    }
    return {name: torch.empty(shape, dtype=problem.torch_dtype, device=device) for name, shape in shapes.items()}


def _fill_expert(problem: MoEProblem, w13: torch.Tensor, w2: torch.Tensor, pool: torch.Tensor, draw: _Draw) -> None:
    """Overwrites one expert's matrices."""
    hidden, intermediate = problem.hidden_size, problem.intermediate_size
    (up, gate, down), scale = draw
    _fill(w13[-intermediate:], pool, up, scale * _UP_STD / math.sqrt(hidden))
    if problem.activation.num_halves == 2:
        _fill(w13[:intermediate], pool, gate, scale * _GATE_STD / math.sqrt(hidden))
    _fill(w2, pool, down, scale / math.sqrt(intermediate))


def _quantized_experts(
    problem: MoEProblem, pool: torch.Tensor, seed: int, draws: Sequence[_Draw], advance: Callable[[int, int], object]
) -> dict[str, torch.Tensor]:
    buffer = _empty_experts(problem, 1, pool.device)
    # Uses its own generator, so that the weights are the rounded ones of the unquantized layer.
    own = torch.Generator().manual_seed(seed + 1)
    sample = torch.randn(_SAMPLE_TOKENS, problem.hidden_size, generator=own).to(pool)
    ids = torch.zeros(len(sample), 1, dtype=torch.int32, device=sample.device)
    # A problem of one expert, whose activation scales are as in a checkpoint of the problem's scheme.
    sizes: dict[str, Any] = {"hidden_size": problem.hidden_size, "intermediate_size": problem.intermediate_size}
    alone = MoEProblem(num_experts=1, **sizes, top_k=1, dtype=problem.dtype, activation=problem.activation)
    fmt, scales = problem.quant.activation, dict[str, Any]()
    experts: list[dict[str, torch.Tensor]] = []
    for draw in draws:
        _fill_expert(problem, buffer["w13"][0], buffer["w2"][0], pool, draw)
        plain = ExpertWeights(w13=buffer["w13"], w2=buffer["w2"])
        if fmt is not None and (fmt.static or fmt.global_scale):
            found = calibrate_activation_scales(alone, plain, sample, ids.float(), ids, problem.quant)
            scales = {"a13_scale": found[0], "a2_scale": found[1]}
        experts.append(quantize_weights(plain, problem.quant, **scales).tensors())
        advance(len(experts), len(draws))
    return {name: torch.cat([tensors.pop(name) for tensors in experts]) for name in list(experts[0])}


def _fill(target: torch.Tensor, pool: torch.Tensor, start: int, scale: float) -> None:
    """Overwrites a contiguous tensor with the scaled pool, cyclically from `start`."""
    flat = target.view(-1)
    done = 0
    while done < len(flat):
        piece = pool[start : start + len(flat) - done]
        torch.mul(piece, scale, out=flat[done : done + len(piece)])
        done += len(piece)
        start = 0


def random_call(
    problem: MoEProblem, num_tokens: int, routing: str, generator: torch.Generator, rank: torch.Tensor | None = None
) -> Call:
    """Makes random tokens and routes on the generator's device; raises ValueError for an unknown routing.

    `rank` [E] has the experts' ranks of zipf from 1, drawn anew if left out.
    """
    if routing not in ROUTINGS:
        raise ArgumentError(f"unknown routing {routing!r} (known: {', '.join(ROUTINGS)})")
    device, num_experts = generator.device, problem.num_experts

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    # The largest values of log(weight) + Gumbel noise are a weighted draw without replacement.
    rows = 1 if routing == "one_set" else num_tokens
    keys = -torch.log(-torch.log(uniform(rows, num_experts)))
    if routing == "zipf":
        if rank is None:
            rank = torch.randperm(num_experts, generator=generator, device=device) + 1
        keys = keys - torch.log(rank.float())
    topk_ids = keys.topk(problem.top_k, dim=1).indices.int().expand(num_tokens, -1).contiguous()
    topk_weights = uniform(num_tokens, problem.top_k) + _MIN_ROUTE_WEIGHT
    if problem.top_k > 1:  # With one expert per token the weight would be 1, and a kernel that ignores it would pass.
        topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)
    tokens = torch.randn(num_tokens, problem.hidden_size, generator=generator, device=device)
    return Call(tokens.to(problem.torch_dtype), topk_weights, topk_ids)


def random_calls(problem: MoEProblem, num_tokens: int, routing: str, seed: int, device: torch.device) -> list[Call]:
    """The calls to rotate over for a number of tokens: `num_calls` of `random_call`, by a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return [random_call(problem, num_tokens, routing, generator) for _ in range(num_calls(num_tokens))]


def num_calls(num_tokens: int) -> int:
    """How many calls to rotate over: many if a call touches few experts, whose weights would stay in cache."""
    return 16 if num_tokens <= 64 else 8 if num_tokens <= 1024 else 2

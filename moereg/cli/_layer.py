"""Layers to run: seeded random weights of a model's shape, or one layer of a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from moereg.cli._options import UsageError
from moereg.cli._progress import Advance
from moereg.problem import MoEProblem
from moereg.routing import softmax_topk
from moereg.weights import ExpertWeights

__all__ = ["Layer", "Router", "load_layer", "random_hidden_states", "random_layer"]

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""hidden_states [T,H] to topk_weights [T,K] fp32 and topk_ids [T,K] int32."""

# Prime, so that no row of any matrix starts where another row of it started in the pool.
_POOL_NUMEL: Final = 4_194_301
# Gate and up differ, as they do in real models, so that a kernel that swaps them is caught.
_GATE_STD: Final = 1.0
_UP_STD: Final = 1.6
_BIAS_STD: Final = 0.5


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a run needs of a layer.

    Attributes:
        weights: Canonical, local experts.
        route: Its router.
    """

    weights: ExpertWeights
    route: Router


def random_layer(problem: MoEProblem, seed: int, device: torch.device, advance: Advance) -> Layer:
    """Random weights at which outputs are of the order of 1, and random routing; the same on every device.

    Drawing a normal number takes far longer than copying one, so experts are cut at different places from one pool of
    them and scaled differently: no two experts and no two rows of one are equal.

    Args:
        problem: The layer; unquantized.
        seed: Of everything random.
        device: To build on.
        advance: Told of each expert.

    Raises:
        UsageError: The scheme is quantised.
    """
    if problem.quant.weight is not None:
        raise UsageError(
            f"run cannot make random weights of scheme {problem.quant.name} in this version; "
            "leave --quant out or use moereg explain"
        )
    generator = torch.Generator().manual_seed(seed)
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
        advance(expert + 1, num_experts)
    biases: dict[str, Any] = {}
    if problem.has_bias:
        for name, columns in (("w13_bias", halves * intermediate), ("w2_bias", hidden)):
            bias = torch.randn(num_experts, columns, generator=generator) * _BIAS_STD
            biases[name] = bias.to(device, problem.torch_dtype)
    return Layer(ExpertWeights(w13=w13, w2=w2, **biases), _random_router(problem, generator))


def _fill(target: torch.Tensor, pool: torch.Tensor, start: int, scale: float) -> None:
    """Overwrites a contiguous tensor with the pool, scaled, from `start` on and round again."""
    flat = target.view(-1)
    done = 0
    while done < len(flat):
        piece = pool[start : start + len(flat) - done]
        torch.mul(piece, scale, out=flat[done : done + len(piece)])
        done += len(piece)
        start = 0


def _random_router(problem: MoEProblem, generator: torch.Generator) -> Router:
    def route(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(len(hidden_states), problem.num_experts, generator=generator)
        # A single weight would be 1 after renormalising, and a kernel that ignores it would pass.
        topk_weights, topk_ids = softmax_topk(logits, problem.top_k, renormalize=problem.top_k > 1)
        return topk_weights.to(hidden_states.device), topk_ids.to(hidden_states.device)

    return route


def load_layer(path: Path, layer: int, problem: MoEProblem, device: torch.device, advance: Advance) -> Layer:
    """One layer of a checkpoint, with its own router.

    Args:
        path: Checkpoint directory.
        layer: Index in the whole model.
        problem: As `read_problem` says it.
        device: To load to.
        advance: Told of each expert.

    Raises:
        CheckpointError: The layer cannot be read.
        TooLargeError: It does not fit.
    """
    from moereg.checkpoints import load_experts

    num_local_experts = problem.num_local_experts if problem.is_expert_parallel else None
    loaded = load_experts(path, layer, problem.dtype, device, num_local_experts=num_local_experts, progress=advance)
    return Layer(loaded.weights, loaded.route)


def random_hidden_states(problem: MoEProblem, num_tokens: int, seed: int, device: torch.device) -> torch.Tensor:
    """Normal numbers [T,H] in the problem's dtype, the same on every device."""
    # Another stream than the weights', which would correlate with what they multiply.
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(num_tokens, problem.hidden_size, generator=generator).to(device, problem.torch_dtype)

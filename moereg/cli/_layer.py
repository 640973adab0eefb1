"""Layers to run: seeded random weights of a model's shape, or one layer of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from moereg.cli._progress import Advance
from moereg.problem import MoEProblem
from moereg.routing import softmax_topk
from moereg.tuning.inputs import random_weights
from moereg.weights import ExpertWeights

__all__ = ["RoutedWeights", "Router", "load_layer", "random_hidden_states", "random_layer"]

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""hidden_states [T,H] to topk_weights [T,K] fp32 and topk_ids [T,K] int32."""


@dataclasses.dataclass(frozen=True)
class RoutedWeights:
    """The parts of a layer that a run needs.

    Attributes:
        weights: Canonical, local experts.
        route: Its router.
        notices: Lines on what the layer lacks.
    """

    weights: ExpertWeights
    route: Router
    notices: tuple[str, ...] = ()


def random_layer(problem: MoEProblem, seed: int, device: torch.device, advance: Advance) -> RoutedWeights:
    """Random weights as `random_weights` makes them, and random routing; the same on every device.

    Weights of a quantized scheme are quantized expert by expert; static activation scales are those of random tokens.

    Args:
        problem: The layer.
        seed: Seed of everything random.
        device: Device to build on.
        advance: Called after each expert.
    """
    generator = torch.Generator().manual_seed(seed)
    return RoutedWeights(random_weights(problem, generator, device, advance), _random_router(problem, generator))


def _random_router(problem: MoEProblem, generator: torch.Generator) -> Router:
    def route(hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(len(hidden_states), problem.num_experts, generator=generator)
        # A single weight would be 1 after renormalizing, and a kernel that ignores it would pass.
        topk_weights, topk_ids = softmax_topk(logits, problem.top_k, renormalize=problem.top_k > 1)
        return topk_weights.to(hidden_states.device), topk_ids.to(hidden_states.device)

    return route


def load_layer(path: Path, layer: int, problem: MoEProblem, device: torch.device, advance: Advance) -> RoutedWeights:
    """One layer of a checkpoint, with its own router.

    Args:
        path: Checkpoint directory.
        layer: Index in the whole model.
        problem: From `read_problem`.
        device: Device to load to.
        advance: Called after each expert.

    Raises:
        CheckpointError: The layer cannot be read.
        TooLargeError: The layer does not fit.
    """
    from moereg.checkpoints import load_experts

    num_local_experts = problem.num_local_experts if problem.is_expert_parallel else None
    loaded = load_experts(path, layer, problem.dtype, device, num_local_experts=num_local_experts, progress=advance)
    return RoutedWeights(loaded.weights, loaded.route, loaded.notices)


def random_hidden_states(problem: MoEProblem, num_tokens: int, seed: int, device: torch.device) -> torch.Tensor:
    """Normal numbers [T,H] in the problem's dtype, the same on every device."""
    # A stream apart from the weights', since equal draws would correlate with what they multiply.
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(num_tokens, problem.hidden_size, generator=generator).to(device, problem.torch_dtype)

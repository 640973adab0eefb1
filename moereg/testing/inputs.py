"""Random weights, tokens and routes that expose every mix-up of gate and up, experts, rows or groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch

from moereg.numerics.reference import calibrate_activation_scales
from moereg.quantize import quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ExpertAdapters, adapter_shapes
from moereg.weights.permuted import ExpertWeights

ROUTINGS: Final = ("uniform", "skewed", "one_expert", "unmapped", "nowhere")
"""Kinds of routing: even; to few experts; all to the last ones; even with some ids out of range; all out of range."""

_SPREAD: Final = 0.25


@dataclasses.dataclass
class Inputs:
    """The inputs of one call."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor

    @property
    def call(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of a kernel's call, in order."""
        return self.hidden_states, self.topk_weights, self.topk_ids

    def clone(self) -> Inputs:
        """Independent copies."""
        return Inputs(*(tensor.clone() for tensor in self.call))


def make_weights(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Makes random weights; gate, up and every expert are scaled differently, so that no swap can pass.

    For a quantized scheme, moereg quantizes weights whose magnitudes differ by row and group, so that another group's
    scale cannot pass. Static activation scales come from other random tokens.
    """
    plain = make_plain_weights(problem, device, seed)
    if problem.quant.weight is None:
        return plain
    scales: dict[str, torch.Tensor] = {}
    fmt = problem.quant.activation
    if fmt is not None and (fmt.static or fmt.global_scale):
        sample = make_inputs(problem, 64, "uniform", device, seed=seed + 77)
        scales["a13_scale"], scales["a2_scale"] = calibrate_activation_scales(
            dataclasses.replace(problem, quant=plain.scheme),
            plain,
            *sample.call,
            problem.quant,
            make_expert_map(problem, device),
        )
    return quantize_weights(plain, problem.quant, **scales)  # type: ignore[arg-type]


def make_plain_weights(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertWeights:
    """The unquantized weights that `make_weights` quantizes."""
    generator = torch.Generator(device).manual_seed(seed)
    experts, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    dtype = problem.torch_dtype

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

    scale = torch.linspace(0.7, 1.4, experts, device=device).view(-1, 1, 1)
    w13 = random(experts, problem.activation.num_halves * inter, hidden) * scale * (2 / hidden**0.5)
    if problem.activation.gated:
        w13[:, :inter] *= 1.3
        w13[:, inter:] *= 0.6
    biases = {}
    if problem.has_bias:
        # Larger if the bound is, so that a dropped bias is seen.
        size = 1 if problem.quant.activation is None else 2
        biases = {
            "w13_bias": (size * random(experts, w13.shape[1])).to(dtype),
            "w2_bias": (size * random(experts, hidden)).to(dtype),
        }
    w2 = random(experts, hidden, inter) * (1 / inter**0.5)
    if problem.quant.weight is not None:
        w13, w2 = (_vary(matrix, random) for matrix in (w13, w2))
    return ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), **biases)  # type: ignore[arg-type]


def _vary(matrix: torch.Tensor, random: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Multiplies rows and runs of 16 columns by random factors whose mean square is 1."""
    experts, rows, columns = matrix.shape
    # Small enough that no single element dominates the intermediate.
    shapes = ((experts, rows, 1), (experts, 1, -(-columns // 16)))
    by_row, by_group = (torch.exp(_SPREAD * random(*shape) - _SPREAD**2) for shape in shapes)
    return matrix * by_row * by_group.repeat_interleave(16, 2)[..., :columns]


def make_inputs(problem: MoEProblem, num_tokens: int, routing: str, device: torch.device, seed: int = 0) -> Inputs:
    """Makes random tokens and routes; `routing` is one of `ROUTINGS`."""
    assert routing in ROUTINGS, routing
    generator = torch.Generator(device).manual_seed(1000 + seed)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator, device=device)
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator, device=device)
    if routing == "skewed":
        scores = scores / torch.arange(1, problem.num_experts + 1, device=device) ** 2
    elif routing == "one_expert":
        scores = torch.arange(problem.num_experts, device=device).float().expand_as(scores)
    topk_weights, topk_ids = scores.topk(problem.top_k, dim=1)
    topk_weights = torch.rand(topk_ids.shape, generator=generator, device=device) + 0.1
    topk_ids = topk_ids.to(torch.int32)
    if routing == "unmapped" and num_tokens:
        topk_ids[0, 0] = -1
        topk_ids[-1, -1] = problem.num_experts
        topk_ids[num_tokens // 2, 0] = 2**31 - 1
    elif routing == "nowhere":
        topk_ids.fill_(problem.num_experts)
    return Inputs(hidden_states.to(problem.torch_dtype), topk_weights, topk_ids)


def make_grad_out(inputs: Inputs, seed: int = 0) -> torch.Tensor:
    """Makes a random gradient of the output of a call."""
    like = inputs.hidden_states
    generator = torch.Generator(like.device).manual_seed(2000 + seed)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)


def make_adapters(problem: MoEProblem, device: torch.device, seed: int = 0) -> ExpertAdapters | None:
    """Makes random adapters about as large as the weights; None if the problem has none.

    Scalings, experts, and the ranks of w13 and w2 differ, so that no swap can pass.
    """
    if not problem.adapter_rank:
        return None
    generator = torch.Generator(device).manual_seed(3000 + seed)
    ranks = {"w13": problem.adapter_rank, "w2": problem.adapter_rank - problem.adapter_rank // 4}
    tensors: dict[str, Any] = {}
    for matrix, rank in ranks.items():
        for name, shape in adapter_shapes(problem, rank).items():
            if name.startswith(f"{matrix}_"):
                scale = torch.linspace(1.4, 0.7, shape[0], device=device).view(-1, 1, 1) / shape[2] ** 0.5
                random = torch.randn(shape, generator=generator, device=device)
                tensors[name] = (random * scale).to(problem.torch_dtype)
    return ExpertAdapters(**tensors, w13_scaling=0.75, w2_scaling=1.25)


def make_expert_map(problem: MoEProblem, device: torch.device) -> torch.Tensor | None:
    """For placement `map`: local experts in reverse order on every second global expert; else None."""
    if problem.placement != "map":
        return None
    expert_map = torch.full((problem.num_experts,), -1, dtype=torch.int32)
    local = torch.arange(problem.num_local_experts, dtype=torch.int32).flip(0)
    expert_map[: 2 * problem.num_local_experts : 2] = local[: len(expert_map[: 2 * problem.num_local_experts : 2])]
    return expert_map.to(device)

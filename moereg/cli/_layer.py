"""Layers to run on this machine: seeded random weights of a model's shape, or one layer of a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from moereg.cli._options import UsageError
from moereg.cli._progress import Advance
from moereg.errors import TooLargeError
from moereg.layer.backend_calls import device_types
from moereg.platforms import Platform, probe_cpu, torch_device
from moereg.plugins.loader import current_platform, load_backends
from moereg.routing import softmax_topk
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.tuning.inputs import random_weights
from moereg.tuning.roofline import expert_bytes
from moereg.weights.permuted import ExpertWeights

MAX_FRACTION: Final = 0.6
"""The share of free memory that a command may ask for."""

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


def platform_at_hand(command: str, name: str | None) -> Platform:
    """This machine as a platform; a named platform must be this machine or its CPU.

    Args:
        command: Which asks, for the message.
        name: What `--platform` says.

    Raises:
        UsageError: The name is another machine's.
        UnknownPlatformError: No machine has that name.
    """
    load_backends()  # A plugin's kind of platform is known once it is loaded.
    named = None if name is None else Platform.from_name(name)
    # The CPU is there whichever accelerator this machine has, and whoever claims to know.
    here = probe_cpu() if named is not None and named.kind == "cpu" else current_platform()
    if named is None or (named.kind == here.kind and named.arch in ("", here.arch)):
        return here
    raise UsageError(
        f"{command} needs the machine itself, and this one is {here.kind}:{here.arch}, not {name}; "
        f"moereg explain --platform {name} answers what would be chosen there"
    )


def layer_device(selection: Selection) -> torch.device:
    """The device on which a command builds the layer that was selected.

    Raises:
        UnknownPlatformError: This torch has no such device.
    """
    platform, winner = selection.platform, selection.winner
    types: tuple[str, ...] = ()
    if winner is not None and winner.cell is not None:
        with contextlib.suppress(Exception):  # It fails again, under the backend's name, once the layer is built.
            types = device_types(selection, winner.cell.experts)
    # A backend may read another device's tensors, as with DLPack.
    return torch_device(platform, None if not types or platform.device_type in types else types[0])


def check_run_fits(
    problem: MoEProblem, num_tokens: int, device: torch.device, num_kernels: int = 1, num_calls: int = 1
) -> None:
    """Checks that the layer's weights, one expert in fp32 and the tokens fit into free memory.

    Args:
        problem: The layer, whose weights take memory once in canonical order and once permuted for each kernel.
        num_tokens: Tokens of one call.
        device: Device to run on.
        num_kernels: Number of kernels at the same time.
        num_calls: Number of inputs and outputs at the same time.

    Raises:
        TooLargeError: They take more than 60 % of it; the message has the size and the option that makes it smaller.
    """
    free_bytes = free_memory_bytes(device)
    if free_bytes is None:
        return
    one_bytes = expert_bytes(problem)
    numbers = problem.activation.num_halves * problem.intermediate_size * problem.hidden_size
    fp32_bytes = (numbers + problem.hidden_size * problem.intermediate_size) * torch.float32.itemsize
    tokens_bytes = _tokens_bytes(problem, num_tokens, num_calls)
    limit_bytes = MAX_FRACTION * free_bytes
    copies = 1 + num_kernels
    layer_bytes = copies * problem.num_local_experts * one_bytes + fp32_bytes
    if layer_bytes + tokens_bytes <= limit_bytes:
        return
    cures = []
    num_fitting = int((limit_bytes - fp32_bytes - tokens_bytes) // (copies * one_bytes))
    if 1 <= num_fitting < problem.num_local_experts:
        cures.append(f"--num-local-experts {num_fitting}")
    is_quantized = problem.quant.weight is not None
    if problem.dtype == "float32" and not is_quantized:
        cures.append("--dtype bfloat16")
    if num_kernels > 1:
        cures.append("--require with fewer backends")
    if tokens_bytes > layer_bytes:
        cures.append("a smaller --tokens")
    stored = problem.quant.name if is_quantized else problem.dtype
    permuted = f"permuted for {num_kernels} kernels" if num_kernels > 1 else "permuted"
    raise TooLargeError(
        f"a run of this layer needs {format_bytes(layer_bytes + tokens_bytes)} ({problem.num_local_experts} experts of "
        f"{format_bytes(one_bytes)} in {stored}, canonical and {permuted}, and {num_tokens} tokens), over "
        f"{MAX_FRACTION:.0%} of the {format_bytes(free_bytes)} free on {device}; "
        f"{'pass ' + ' or '.join(cures) if cures else 'free memory or use a larger machine'}"
    )


def _tokens_bytes(problem: MoEProblem, num_tokens: int, num_calls: int) -> int:
    """Inputs, outputs and intermediate rows of a call, the reference's fp32 and the comparison's fp64 copies."""
    itemsize = problem.torch_dtype.itemsize
    per_call = 2 * problem.hidden_size * itemsize
    once = problem.hidden_size * (2 * torch.float32.itemsize + 2 * torch.float64.itemsize)
    rows = num_tokens * (problem.num_local_experts if problem.activation_format == "batched" else problem.top_k)
    per_row = 2 * problem.hidden_size + (problem.activation.num_halves + 1) * problem.intermediate_size
    return num_tokens * (num_calls * per_call + once) + rows * per_row * itemsize

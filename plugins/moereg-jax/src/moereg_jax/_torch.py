"""Torch's side: pads tokens to buckets and hands tensors over by DLPack, without a copy where memory is aligned."""

from __future__ import annotations

import collections
import os
import sys
from typing import Any, Final

import torch

from moereg.author import ExpertInputs, MoEProblem, PermutedWeights, local_expert_ids

if "jax" not in sys.modules:
    # Torch holds the weights on the same GPU, of which JAX takes three quarters at its first use otherwise.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

from moereg_jax import bucket
from moereg_jax._layer import run_layer

__all__ = ["run"]


def run(
    out: torch.Tensor,
    inputs: ExpertInputs,
    weights: PermutedWeights,
    padded: torch.Tensor,
    problem: MoEProblem,
    piece_tokens: int,
) -> None:
    """Runs a call's tokens in pieces.

    Args:
        out: [T,H]; overwritten.
        inputs: Of the standard format.
        weights: In this backend's layout.
        padded: Workspace of at least a piece's bucket x H.
        problem: The layer.
        piece_tokens: The most tokens of a piece; a power of two.
    """
    num_tokens = out.shape[0]
    local_ids = local_expert_ids(inputs.topk_ids, problem.num_local_experts, inputs.expert_map)
    # JAX has no int64 unless told so, and would narrow it by a copy of its own.
    routing = (inputs.topk_weights, local_ids.to(torch.int32))
    call = _call_on_xla if out.device.type == "xla" else _call_by_dlpack
    for first in range(0, num_tokens, piece_tokens):
        tokens = slice(first, min(first + piece_tokens, num_tokens))
        hidden_states = inputs.hidden_states[tokens]
        topk_weights, ids = (tensor[tokens] for tensor in routing)
        count = len(hidden_states)
        if (size := bucket(count)) != count:
            rows = padded[:size]
            rows[:count].copy_(hidden_states)
            rows[count:].zero_()
            hidden_states = rows
            topk_weights = torch.nn.functional.pad(topk_weights, (0, 0, 0, size - count))
            ids = torch.nn.functional.pad(ids, (0, 0, 0, size - count), value=-1)
        tensors = (hidden_states, topk_weights, ids, *(weights.get(name) for name in _WEIGHTS))
        call(out[tokens], tensors, problem)


_WEIGHTS: Final = ("w13", "w2", "w13_bias", "w2_bias")


def _keywords(problem: MoEProblem) -> dict[str, Any]:
    return {"activation": problem.activation, "scales_inputs": problem.apply_router_weight_on_input}


def _call_by_dlpack(out: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], problem: MoEProblem) -> None:
    result = run_layer(*(None if tensor is None else _to_jax(tensor) for tensor in tensors), **_keywords(problem))
    if out.device.type == "cpu":
        # XLA's threads still run, and the tensors that they read belong to the caller.
        result.block_until_ready()
    # On a GPU each import makes the importer's stream wait for the exporter's work, so that no host has to wait.
    shared = torch.from_dlpack(result)
    out.copy_(shared[: len(out)])
    if out.device.type != "cpu":
        _BEING_READ.hold(shared)


def _to_jax(tensor: torch.Tensor) -> jax.Array:
    # JAX imports no tensor that requires gradients. Memory that is not aligned to 64 bytes is copied.
    return jax.dlpack.from_dlpack(tensor.detach())


class _BeingRead:
    """JAX's results that torch's stream still reads: JAX would give their memory to its next computation."""

    def __init__(self) -> None:
        self._held: collections.deque[tuple[torch.cuda.Event, torch.Tensor]] = collections.deque()

    def hold(self, tensor: torch.Tensor) -> None:
        """Keeps a tensor until the work that is enqueued now has run."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensor.device))
        self._held.append((event, tensor))
        while len(self._held) > 1 and self._held[0][0].query():
            self._held.popleft()


_BEING_READ: Final = _BeingRead()


def _call_on_xla(out: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], problem: MoEProblem) -> None:
    """On a TPU the tensors are torch_xla's, whose graph takes a JAX function in. Lowered here, never run on a TPU."""
    from torch_xla.core import xla_builder

    given = tuple(tensor for tensor in tensors if tensor is not None)
    places = [tensor is not None for tensor in tensors]

    def moereg_jax_layer(*arrays: jax.Array) -> jax.Array:
        found = iter(arrays)
        return run_layer(*(next(found) if is_given else None for is_given in places), **_keywords(problem))

    out.copy_(xla_builder.call_jax(moereg_jax_layer, given)[: len(out)])

"""A call over a group: tokens in, experts, results home; with two parts, one moves while the other is computed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from moereg.prepare_finalize import GroupPrepareFinalize, Prepared
from moereg.weights.checks import checks_values


class Tokens(NamedTuple):
    """The arguments of a call, which travel together."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


def run_over_group(
    moves: GroupPrepareFinalize,
    tokens: Tokens,
    out: torch.Tensor,
    expert_map: torch.Tensor | None,
    multiply: Callable[[Prepared], torch.Tensor],
) -> None:
    """Runs a call that all ranks make together, cut into `moves.num_batches` parts of nearly equal numbers of tokens.

    On a CPU each call checks that ranks call the same layer. On a GPU the host would have to wait for the other hosts,
    so it is checked in the layer's first call, where a call is captured, and with MOEREG_DEBUG=1 in each call that is
    not a graph's replay. A dispatcher whose host waits for counts sends the layer's number with them in every call.

    Every rank runs as many parts, even without tokens. On a GPU several parts move on a stream of their own: the second
    one's tokens arrive while the first is computed, and the first one's results leave while the second is.

    Args:
        moves: The token dispatcher, which has the experts' problem.
        tokens: [T,H], [T,K] and [T,K].
        out: [T,H], overwritten.
        expert_map: For the experts.
        multiply: Runs the experts on what arrived, on the current stream; returns their output.

    Raises:
        GroupError: Ranks call different layers, another thread uses the group, or a rank has ended or stalled.
    """
    with moves.group.exclusive(f"call {moves.group.named_layer(moves.layer_number)}"):
        is_captured = out.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not moves.has_met or is_captured or checks_values(out.device):
            moves.group.call_together(moves.layer_number)
            moves.has_met = True
        parts = _parts(tokens, out, moves.num_batches)
        if len(parts) > 1 and out.device.type == "cuda":
            _overlap(moves, parts, expert_map, multiply)
            return
        for part, rows in parts:
            prepared = moves.prepare(*part, moves.experts_problem, expert_map)
            moves.finalize(rows, multiply(prepared), prepared, moves.experts_problem)


def _overlap(
    moves: GroupPrepareFinalize,
    parts: list[tuple[Tokens, torch.Tensor]],
    expert_map: torch.Tensor | None,
    multiply: Callable[[Prepared], torch.Tensor],
) -> None:
    device, problem = parts[0][1].device, moves.experts_problem
    main, moving = torch.cuda.current_stream(device), _stream(device)

    def arrive(part: Tokens) -> tuple[Prepared, torch.cuda.Event]:
        with torch.cuda.stream(moving):
            prepared = moves.prepare(*part, problem, expert_map)
            return prepared, moving.record_event()

    moving.wait_stream(main)
    # Everything that one stream makes and the other reads lives until both have synchronized.
    alive: list[object] = []
    prepared, arrived = arrive(parts[0][0])
    for place, (_, rows) in enumerate(parts):
        main.wait_event(arrived)
        expert_out = multiply(prepared)
        multiplied = main.record_event()
        alive += [prepared, expert_out]
        current = prepared
        if place + 1 < len(parts):
            prepared, arrived = arrive(parts[place + 1][0])
        with torch.cuda.stream(moving):
            moving.wait_event(multiplied)
            moves.finalize(rows, expert_out, current, problem)
    main.wait_stream(moving)
    del alive


def _parts(tokens: Tokens, out: torch.Tensor, count: int) -> list[tuple[Tokens, torch.Tensor]]:
    """The tokens of each part and the rows of its results; the first parts are the larger ones."""
    num_tokens = out.shape[0]
    ends = [-(-num_tokens * place // count) for place in range(count + 1)]
    parts = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
    return [(Tokens(*(tensor[part] for tensor in tokens)), out[part]) for part in parts]


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for movement on a GPU: layers run one after another, and so does what they move."""
    # Movement is short, and the next products wait for it: it goes first where both could start. NCCL keeps streams of
    # its own, whose priority is the process group's.
    return torch.cuda.Stream(device, priority=-1)

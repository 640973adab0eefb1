"""Warms up a layer on the machine that it runs on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import time
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from moereg.arguments import check_count
from moereg.errors import ArgumentError
from moereg.layer import backend_calls
from moereg.layer.ranges import RangeExperts, counts_by_range
from moereg.layer.warm_up.ahead import Ahead, ask, num_compilers
from moereg.layer.warm_up.dummy import DummyLayer, described
from moereg.layer.warm_up.result import CompiledVariant, WarmUp, check_token_counts
from moereg.layer.warm_up.shipped import check_shipped, check_writable
from moereg.prepare_finalize import BatchedPrepareFinalize, PrepareFinalize
from moereg.runtime.progress import logger
from moereg.runtime.torch_state import plain_torch
from moereg.selection.result import Selection
from moereg.weights.permuted import PermutedWeights

_MOST_RECORDED: Final = 128
"""Up to this many of the caller's numbers of tokens are called, so that their launches are recorded."""

_HOSTS: Final = ("cpu", "meta")

_DONE: Final[dict[str, Ahead]] = {}
"""Kernels compiled in this process, by request, since a model has many equal layers."""


def warm_up(
    ranges: Sequence[RangeExperts],
    weights: PermutedWeights,
    expert_map: torch.Tensor | None,
    token_counts: Iterable[int] | None,
    jobs: int | None,
    moves: PrepareFinalize | None = None,
) -> WarmUp:
    """Implements `MoEKernel.warm_up`.

    All ranges read `weights`; `moves` lays out tokens on this rank and may launch kernels for that.
    """
    selection, is_asked = ranges[-1].selection, token_counts is not None
    winner = selection.chosen
    counts = check_token_counts(token_counts, selection.problem.max_num_tokens)
    if jobs is not None:
        check_count("jobs", jobs)
    parts = [
        _warm_up_range(ranges[place], weights, expert_map, inside, is_asked, jobs, moves)
        for place, inside in counts_by_range([each.most for each in ranges], counts)
    ]
    return parts[0] if len(parts) == 1 else WarmUp.of_ranges(winner.backend, counts, parts)


def _warm_up_range(
    served: RangeExperts,
    weights: PermutedWeights,
    expert_map: torch.Tensor | None,
    counts: tuple[int, ...],
    is_asked: bool,
    jobs: int | None,
    moves: PrepareFinalize | None,
) -> WarmUp:
    """Warms up one range for its numbers of tokens, ascending; `is_asked` if the caller named them."""
    start = time.monotonic()
    selection, experts = served.selection, served.experts
    winner = selection.chosen
    device = weights.device
    if device.type in _HOSTS:
        note = f"backend {winner.backend!r} compiles nothing on {device.type}"
        return WarmUp(winner.backend, counts, seconds=time.monotonic() - start, notes=(note,))
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ArgumentError("warm_up must come before a CUDA graph is captured; call it ahead of the capture")
    found = _ahead(selection, weights, expert_map is not None, counts, num_compilers(jobs))
    if found.fault is None:
        named = counts if is_asked and len(counts) <= _MOST_RECORDED else ()
        to_run = tuple(sorted({*found.counts, *named}))
    else:
        to_run = counts if is_asked else _powers_of_two(counts[0], counts[-1])
    batches = moves if isinstance(moves, BatchedPrepareFinalize) else None
    layer = DummyLayer(experts, weights, expert_map, batches)
    num_compiled = _run(selection, layer, to_run, counts_compilations=found.fault is None)
    notes = found.notes
    if found.fault is not None:
        notes += (f"backend {winner.backend!r} compiles nothing ahead ({found.fault}), so it ran instead",)
    elif num_compiled:
        notes += (f"{num_compiled} kernels were compiled while calls were made, which the list of launches lacked",)
        logger.warning("warm_up of %s: %s", winner.backend, notes[-1])
    taken = time.monotonic() - start
    folder = None
    if found.fault is None:
        from moereg.kernels.launch import cache

        folder = cache.cache_folder()
    return WarmUp(winner.backend, counts, found.kernels, len(to_run), taken, folder, notes)


def _powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """Powers of two within a range, and its ends."""
    return tuple(sorted({least, most, *(2**n for n in range(most.bit_length()) if least <= 2**n <= most)}))


def _ahead(selection: Selection, weights: PermutedWeights, has_map: bool, counts: tuple[int, ...], jobs: int) -> Ahead:
    """Compiles what can be compiled without the device."""
    description = described(weights)
    if importlib.util.find_spec("triton") is None or description is None:
        return Ahead(fault="Triton is not installed" if description else "experts lie apart in memory")
    from moereg.kernels.launch import cache
    from moereg.kernels.launch.ahead import Target

    platform, device = selection.platform, weights.device
    shared_bytes = None
    if device.type == "cuda":  # Not every torch build has this attribute.
        shared_bytes = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    if Target.of(platform.kind, platform.arch, shared_bytes) is None:
        return Ahead(fault=f"Triton's kernels are not compiled ahead for {platform}")
    folder = cache.cache_folder()
    # A shipped folder may be complete and read-only. If not, the compiler will name what it lacks.
    if check_shipped(folder, platform, shared_bytes) is None:
        check_writable(folder)
    key = json.dumps([selection.to_dict(), counts, has_map, description, str(folder)])
    if key not in _DONE:
        found = ask(selection, counts, jobs, has_map=has_map, weights=description, shared_bytes=shared_bytes)
        there = tuple(CompiledVariant(kernel.name, 0.0, was_there=True) for kernel in found.kernels)
        _DONE[key] = dataclasses.replace(found, kernels=there)
        return found
    return _DONE[key]


def _run(selection: Selection, layer: DummyLayer, counts: tuple[int, ...], *, counts_compilations: bool) -> int:
    """Makes calls on the device; returns how many kernels Triton compiled in the meantime."""
    device = layer.weights.device
    try:
        with contextlib.ExitStack() as stack:
            count = None
            if counts_compilations:
                from moereg.kernels.launch.ahead import counted_compilations

                count = stack.enter_context(counted_compilations())
            stack.enter_context(plain_torch())
            # Largest first, so that scratch memory is allocated once.
            for num_tokens in reversed(counts):
                layer.call(num_tokens)
        return 0 if count is None else count.compiled
    except BaseException as error:
        backend_calls.raise_named(selection, "apply", error)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

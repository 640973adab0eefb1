"""Calls a backend's own code while a layer is built and run; errors name the backend."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Final, NoReturn

import torch

from moereg.errors import (
    ArgumentError,
    BackendError,
    MoeregError,
    RegistrationError,
    described,
    is_lack_of_memory,
    shown,
    stops_the_process,
)
from moereg.experts import Experts, SavedShapes
from moereg.layer.in_place import check_aligned
from moereg.layer.restored import RestoredExperts
from moereg.platforms import KINDS, current_platform, is_device_type
from moereg.registry import BUILTIN
from moereg.runtime.torch_state import plain_torch
from moereg.selection.result import Decision, Selection
from moereg.weights.permuted import ExpertWeights, PermutedWeights

Shapes = tuple[tuple[int, ...], tuple[int, ...]]

_MOST_ELEMENTS: Final = 2**48
"""Most elements of a workspace, more than any device can address. Asking for more is a bug, not a lack of memory."""


def make_experts(selection: Selection, decision: Decision) -> Experts:
    """Makes a candidate's experts for the selection's problem; see `RestoredExperts` where they read other weights."""
    assert decision.cell is not None
    problem, chosen, computes = selection.problem, decision.cell.experts, decision.scheme
    given = problem.computed_as(computes)
    try:
        if _takes_computes(chosen):
            experts = chosen(problem=given, platform=selection.platform, computes=computes)
        else:
            experts = chosen(problem=given, platform=selection.platform)
            if computes is not None:
                experts.computes = computes
    except BaseException as error:
        raise_named(selection, "__init__", error)
    return experts if given is problem else RestoredExperts(experts, problem)


@functools.lru_cache(maxsize=256)
def _takes_computes(experts: type[Experts]) -> bool:
    parameters = inspect.signature(experts.__init__).parameters
    return any(name == "computes" or each.kind is each.VAR_KEYWORD for name, each in parameters.items())


def permute(selection: Selection, experts: Experts, weights: ExpertWeights) -> PermutedWeights:
    """The weights in a layout that the experts read."""
    inner = experts.inner if isinstance(experts, RestoredExperts) else experts
    check_device(selection, type(inner), weights.w13.device)
    if inner.reads_in_place():
        check_aligned(weights.tensors())  # The caller's, and no fault of the backend.
    try:
        # Tensors made in inference mode could not be reloaded outside it.
        with plain_torch(), torch.inference_mode(False):
            permuted: object = experts.permute_weights(weights=weights.contiguous(), problem=selection.problem)
    except BaseException as error:
        if (lack := _lacking_copy(selection, weights, error)) is not error:
            raise lack from error
        raise_named(selection, "permute_weights", error)
    if not isinstance(permuted, PermutedWeights):
        raise backend_error(selection, "permute_weights", "returned no PermutedWeights from", shown(permuted))
    if permuted.layout not in experts.layouts:
        found = f"{shown(permuted.layout)}, and its class declares {', '.join(experts.layouts)}"
        raise backend_error(selection, "permute_weights", "returned an undeclared layout from", found)
    try:
        device = permuted.device
    except (StopIteration, AttributeError, TypeError):
        raise backend_error(selection, "permute_weights", "returned no tensors from", shown(permuted)) from None
    if device != weights.w13.device:
        found = f"{device}, and the weights are on {weights.w13.device}"
        raise backend_error(selection, "permute_weights", "returned tensors of another device from", found)
    return permuted


def device_types(selection: Selection, experts: Experts | type[Experts]) -> tuple[str, ...]:
    """Names, as torch has them, of devices whose tensors the experts read on the selection's platform."""
    platform = selection.platform
    try:
        found: object = experts.device_types(platform=platform)
    except BaseException as error:
        raise_named(selection, "device_types", error)
    if not isinstance(found, (tuple, list)) or not found or not all(isinstance(name, str) for name in found):
        raise backend_error(selection, "device_types", "returned no tuple of names of devices from", shown(found))
    for name in found:
        # The device of the platform itself may need an extension of torch, and its error says so.
        if name != platform.device_type and not is_device_type(name):
            raise backend_error(selection, "device_types", "named a device that torch does not know in", shown(name))
    return tuple(map(str.__str__, found))


def check_device(selection: Selection, experts: type[Experts], device: torch.device) -> None:
    """Checks that experts, which need not be made for that, run where the weights are."""
    allowed = device_types(selection, experts)
    if device.type in allowed:
        return
    platform, here = selection.platform, current_platform()
    if platform.kind not in (here.kind, "cpu"):
        raise ArgumentError(f"this selection is for {platform}, and this machine is {here}; select again here")
    raise ArgumentError(
        f"{experts.__name__} for {platform} needs weights on a {' or '.join(allowed)} device, got {device}; move the "
        f"weights there or select for the platform of {device} (kinds: {', '.join(KINDS)})"
    )


def saved_shapes(selection: Selection, experts: Experts, num_tokens: int, most_bytes: int) -> SavedShapes:
    """Shapes of the tensors that a forward pass keeps, in room of that many bytes."""
    try:
        shapes: object = experts.saved_shapes(problem=selection.problem, num_tokens=num_tokens)
        assert isinstance(shapes, Mapping)
        num_bytes = sum(-(-math.prod(shape) * dtype.itemsize // 256) * 256 for shape, dtype in shapes.values())
    except BaseException as error:
        raise_named(selection, "saved_shapes", error)
    if num_bytes > most_bytes:
        found = f"{num_bytes} bytes for {num_tokens} tokens, and there is room for {most_bytes}"
        raise backend_error(
            selection, "saved_shapes", "wants to keep more than the rows before the activation in", found
        )
    return shapes


def workspace_shapes(selection: Selection, experts: Experts, num_tokens: int, step: str = "apply") -> Shapes:
    """Shapes of the two workspaces for a step of a call."""
    method = "backward_workspace_shapes" if step == "apply_backward" else "workspace_shapes"
    try:
        shapes: object = getattr(experts, method)(problem=selection.problem, num_tokens=num_tokens)
    except BaseException as error:
        raise_named(selection, method, error)
    if isinstance(shapes, (tuple, list)) and len(shapes) == 2:
        try:
            first, second = (tuple(map(operator.index, shape)) for shape in shapes)
        except TypeError:
            pass
        else:
            # Of empty tensors too: torch refuses an oversized dimension even next to a zero.
            extents = [math.prod(max(size, 1) for size in shape) for shape in (first, second)]
            if min((*first, *second, 0)) == 0 and max(extents) <= _MOST_ELEMENTS:
                return first, second
    raise backend_error(selection, method, "returned no two shapes from", shown(shapes))


def lacking_workspaces(selection: Selection, shapes: Sequence[tuple[int, ...]], error: BaseException) -> BaseException:
    """Names the backend and its shapes in an out-of-memory error for workspaces: a shape may be absurd."""
    winner = selection.chosen
    return _lacking(
        error,
        f"backend {winner.backend!r} of {winner.provider} asked for workspaces {shapes[0]} and {shapes[1]}: if that is "
        f"absurd, do without it (--deny {winner.backend}) and report it to its authors{_instead(selection)}",
    )


def _lacking_copy(selection: Selection, weights: ExpertWeights, error: BaseException) -> BaseException:
    """Names the backend in an out-of-memory error for permuted weights, which are about one more copy."""
    winner = selection.chosen
    return _lacking(
        error,
        f"backend {winner.backend!r} of {winner.provider} was permuting {weights.num_bytes / 2**30:.1f} GiB of weights "
        f"and needs about that much again: free memory, load fewer layers before it, or do without it (--deny "
        f"{winner.backend}){_instead(selection)}",
    )


def _lacking(error: BaseException, text: str) -> BaseException:
    """Appends a text to an out-of-memory error, keeping its type; returns other errors unchanged."""
    if not is_lack_of_memory(error):
        return error
    try:
        return type(error)(f"{error} ({text})")
    except Exception:  # An allocator's own type may take other arguments.
        return error


def _instead(selection: Selection) -> str:
    """A clause that names alternative backends, or nothing."""
    return f"; {selection.instead} would do instead" if selection.instead else ""


def raise_named(selection: Selection, step: str, error: BaseException) -> NoReturn:
    """Raises an error as `named` wraps it."""
    raise named(selection, step, error)


def named(selection: Selection, step: str, error: BaseException) -> BaseException:
    """Wraps an exception of the chosen backend's method in a `BackendError` that names it.

    Out-of-memory errors and requests to stop the process pass unchanged, since the backend did not cause them; so do
    moereg's own errors, except about arguments and registrations, which are the backend's here.
    """
    is_told = isinstance(error, MoeregError) and not isinstance(error, (ArgumentError, RegistrationError))
    if is_told or is_lack_of_memory(error) or stops_the_process(error):
        return error
    found = backend_error(selection, step, "raised in", described(error, _package(selection)))
    found.__cause__ = error
    return found


def _package(selection: Selection) -> str:
    """The package or file of the chosen class; empty for moereg's own, whose lines mean nothing to a user."""
    cell = selection.chosen.cell
    return "" if cell is None or cell.origin == BUILTIN else cell.experts.__module__.partition(".")[0]


def backend_error(selection: Selection, step: str, fault: str, found: str) -> BackendError:
    """The error about a fault of the chosen backend in a step, and what was found there."""
    winner = selection.chosen
    name, origin = winner.backend, winner.origin
    # A file that was named is of who named it.
    report = "" if origin.endswith(".py") else " and report it to its authors"
    return BackendError(
        f"backend {name!r} of {origin} {fault} {winner.experts}.{step}: {found}; do without it (--deny {name}, or "
        f"deny={name!r} in code){report}{_instead(selection)}",
        name,
        origin,
    )

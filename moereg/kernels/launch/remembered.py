"""Replays launches that recur with tensors of the same sizes, whichever layer's tensors they are."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Final

import torch

from moereg.kernels.launch.replay import LaunchRecording, launch, recording

# Triton compiles pointers that are multiples of this into wider loads, so recordings hold for such pointers only.
POINTER_ALIGNMENT: Final = 16

# 2 KB a launch on the host, so up to 24 KB each, shared by layers of one shape; the least recently used is dropped.
_MAX_RECORDINGS: Final = 1024

_RECORDINGS: Final[collections.OrderedDict[Hashable, LaunchRecording]] = collections.OrderedDict()
_LOCK: Final = threading.Lock()


def launch_again(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """As `launch`, or the replay of its recording if it came before with tensors like these and equal numbers.

    Arguments are tensors, None and numbers, the first a tensor.
    """
    tensors = tuple(value for value in arguments if isinstance(value, torch.Tensor))
    numbers = tuple("" if isinstance(value, torch.Tensor) else value for value in arguments)
    known = (grid, numbers, *options.items())
    launch_remembered(kernel, lambda: launch(kernel, grid, *arguments, **options), tensors, known)


def launch_remembered(
    what: Hashable, launches: Callable[[], None], tensors: tuple[torch.Tensor | None, ...], numbers: Hashable = ()
) -> None:
    """Launches, or replays the recording of an earlier call like this one in a tenth of the host time.

    Args:
        what: Names the launches; each function has one of its own.
        launches: Launches with these tensors, and depends on nothing but them and the numbers.
        tensors: All that the kernels are given, the first not None.
        numbers: Whatever else the launches depend on.
    """
    first = tensors[0]
    assert first is not None
    pointers, all_bits, is_empty = [], 0, False
    for tensor in tensors:
        pointer = 0 if tensor is None else tensor.data_ptr()
        pointers.append(pointer)
        all_bits |= pointer
        is_empty = is_empty or (tensor is not None and tensor.numel() == 0)
    if first.device.type != "cuda" or all_bits % POINTER_ALIGNMENT or is_empty:
        launches()
        return
    kinds = [None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
    key = (what, first.device.index, numbers, *kinds)
    replay_or_record(key, launches, tensors, pointers)


def replay_or_record(
    key: Hashable, launches: Callable[[], None], tensors: Sequence[torch.Tensor | None], pointers: list[int]
) -> None:
    """Launches and records, or replays what was recorded under the key.

    Args:
        key: Everything that the launches depend on but pointers.
        launches: Launches with these tensors.
        tensors: All that the kernels are given.
        pointers: Their addresses, multiples of `POINTER_ALIGNMENT`; 0 for None.
    """
    with _LOCK:
        recorded = _RECORDINGS.get(key)
        if recorded is not None:
            _RECORDINGS.move_to_end(key)
    if recorded is None:
        with recording(tensors) as recorded:
            launches()
        with _LOCK:
            _RECORDINGS[key] = recorded
            while len(_RECORDINGS) > _MAX_RECORDINGS:
                _RECORDINGS.popitem(last=False)
    elif recorded.complete:
        recorded.replay(pointers)
    else:
        launches()


def forget_recordings() -> None:
    """Drops all recordings, for measurements that change what is launched."""
    with _LOCK:
        _RECORDINGS.clear()

"""Keeps memory that outlives a call of compiled code out of that call's graph pool.

`torch.compile(mode="reduce-overhead")` runs a graph once before capturing it, and meanwhile everything that the thread
allocates comes from the graph's pool. Anything alive there afterwards, except the graph's outputs, is an error. A
layer's kernel and scratch memory stay alive, since they serve later calls too.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch

T = TypeVar("T")


class _Here(threading.local):
    num_ops: int = 0  # Depth of compiled code's ops in this thread.


_HERE: Final = _Here()


@contextlib.contextmanager
def in_compiled_code() -> Iterator[None]:
    """Marks an op run by compiled code, which may allocate from a graph's pool."""
    _HERE.num_ops += 1
    try:
        yield
    finally:
        _HERE.num_ops -= 1


def outside_pools(function: Callable[[], T], device: torch.device) -> T:
    """Runs a function whose tensors outlive the current call.

    Pools belong to threads, so within compiled code on a GPU it runs in a new thread, with the caller's stream, grad
    mode and inference mode. Otherwise it is just called. It has the caller's context variables, but neither its locks
    nor other thread-local state, such as autocast and torch's default device.
    """
    if not _HERE.num_ops or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return function()
    stream = torch.cuda.current_stream(device)
    with_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.cuda.stream(stream), torch.inference_mode(is_inference), torch.set_grad_enabled(with_gradients):
                results.append(function())
        except BaseException as error:
            errors.append(error)

    # Not an executor, which refuses work once the main thread has ended.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="moereg-outside-pools")
    thread.start()
    try:
        thread.join()
    finally:
        # Even after an interrupt, since it works on the caller's stream, which the caller will use.
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # The error's frames hold this list, and with it the function's allocations.
    return results[0]

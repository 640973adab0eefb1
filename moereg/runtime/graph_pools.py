"""Memory that outlives a call of compiled code stays out of the pool from which that call allocates.

`torch.compile(mode="reduce-overhead")` runs a graph once before it captures it, and everything that the running thread
allocates meanwhile comes from the pool of the graph. What is alive there afterwards, the graph's outputs apart, is an
error. A layer's kernel and scratch are alive: they serve later calls too.
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
    num_ops: int = 0  # Ops of compiled code that this thread is in.


_HERE: Final = _Here()


@contextlib.contextmanager
def in_compiled_code() -> Iterator[None]:
    """Says that its body is an op that compiled code runs, and so may allocate from a graph's pool."""
    _HERE.num_ops += 1
    try:
        yield
    finally:
        _HERE.num_ops -= 1


def outside_pools(function: Callable[[], T], device: torch.device) -> T:
    """Runs a function whose tensors outlive the call that needs them.

    Pools are a thread's, so within compiled code on a GPU it runs in a thread of its own, on the caller's stream and in
    its grad and inference mode. Elsewhere it is just called.

    Args:
        function: Allocates on `device`. It has the caller's context variables, but neither its locks nor other state of
            its thread, such as autocast and torch's default device.
        device: Where.

    Returns:
        What the function returns.
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

    # No executor: those refuse work once the main thread has ended.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="moereg-outside-pools")
    thread.start()
    try:
        thread.join()
    finally:
        # After an interrupt, too: it works on the caller's stream, where the caller goes on.
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # The error's frames hold this list, and with it what the function had allocated.
    return results[0]

"""Runs tasks of a CPU layer side by side, in one parallel region of the OpenMP runtime that torch uses.

An operation that several threads share ends when the last of them does. A layer of one token has a dozen such
operations, and beside a busy process each may wait for a time slice of the operating system. Here a thread takes a task
alone, and then the next one: the layer waits once, and if a thread does not run, others take its tasks. Operations
within a parallel region are not divided further, neither torch's own nor oneDNN's.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

Task = Callable[[], None]

MAX_THREADS: Final = 2
"""Most threads that were measured. With more, threads might wait for the GIL rather than for memory."""

MOST_IDLE: Final = 1.15
"""Largest ratio of the busiest thread's work to the mean at which threads get tasks of their own."""

# A matmul of fewer rows takes as long: it is bound by reading its weights.
_FREE_ROWS: Final = 16

_Region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_tasks(tasks: Sequence[Task], rows: Sequence[int], *, min_tasks: int = 2) -> None:
    """Runs every task: side by side if threads would have about equal and enough work, else one after the other.

    Args:
        tasks: Functions in any order, no two of which write the same memory.
        rows: Rows of each one's matmuls.
        min_tasks: Fewest tasks that are worth a thread each.

    Raises:
        BaseException: A task's error. Tasks that had started have finished by then; the others were not started.
    """
    num_threads = torch.get_num_threads()
    is_worth_it = len(tasks) >= min_tasks and 2 <= num_threads <= MAX_THREADS and are_even(rows, num_threads)
    if not (is_worth_it and _can_run_in_threads()):
        for task in tasks:
            task()
        return
    # The largest first, so that threads end together.
    waiting = iter([tasks[place] for place in sorted(range(len(tasks)), key=rows.__getitem__, reverse=True)])
    lock, errors = threading.Lock(), list[BaseException]()
    is_inference, has_grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def take() -> Task | None:
        with lock:
            return None if errors else next(waiting, None)

    def help_out(_data: int | None = None) -> None:
        # An interrupt that arrives before the first line is lost: `ctypes` prints it, and the tasks run.
        try:
            # These modes are per thread.
            with torch.inference_mode(is_inference), torch.set_grad_enabled(has_grad):
                while (task := take()) is not None:
                    task()
        except BaseException as error:
            errors.append(error)  # OpenMP propagates none.

    _openmp().GOMP_parallel(_Region(help_out), None, num_threads, 0)
    help_out()  # A runtime may have given no thread at all.
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # They hold this frame, and the frame holds tasks and their tensors.


def are_even(rows: Sequence[int], num_threads: int) -> bool:
    """Whether threads would have about equal work, by rows of each task, each taking the largest that is left."""
    costs = sorted((max(count, _FREE_ROWS) for count in rows), reverse=True)
    loads = [0] * num_threads
    for cost in costs:
        heapq.heapreplace(loads, loads[0] + cost)
    return bool(costs) and max(loads) * num_threads <= MOST_IDLE * sum(costs)


def _can_run_in_threads() -> bool:
    """Whether there are other threads, and tasks do the same in them, although they lack this thread's modes."""
    has_modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    # While Python finalizes, a thread that asks for the GIL never gets it.
    return not has_modes and not sys.is_finalizing() and _openmp() is not None


@functools.cache
def _openmp() -> Any:
    """The OpenMP runtime that torch is linked with, or None.

    GNU's and LLVM's runtimes for Linux export `GOMP_parallel`: compilers call it for a parallel region.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        # The search goes through the libraries that this one needs.
        found: Any = ctypes.CDLL(torch._C.__file__)
        found.GOMP_parallel.argtypes = (_Region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        found.GOMP_parallel.restype = None
    except (OSError, AttributeError, TypeError):
        return None
    return found

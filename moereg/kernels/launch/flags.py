"""Counters in memory by which programs of one launch wait for each other, in Triton.

Programs take the launch's tasks from a ticket, in an order in which no task waits for a later one. So a program that
waits holds back nothing that it waits for: whatever that is, another program has it already. This asks nothing of how
many programs run at a time, also not that any two do, as in the interpreter. Without a ticket, a program's number says
its task, which saves a round trip to the L2, and is right where programs start in the order of their numbers: NVIDIA's
GPUs do that, and nobody promises it.

Counters only grow. Every task in front adds one to its flag in every launch, whether there is work in it or not. So a
launch knows from its ticket, or from the waiting tasks that have ended, what a flag says once it is full. Nothing is
cleared between launches, and a CUDA graph may be replayed. Counters therefore belong to launches of one number of
tasks, one behind the other.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

_FLAG_WORDS: Final = 32
"""Words from one flag to the next: each has its own line, so that waiting for one does not slow another."""

FLAG_WORDS = tl.constexpr(_FLAG_WORDS)


@triton.constexpr_function
def _is_cuda():
    return not triton.knobs.runtime.interpret and triton.language.target_info.is_cuda()


def counter_words(num_flags: int) -> int:
    """int32 words of the counters of a launch, which are zero before the first.

    The first two are the ticket, the next two the waiting tasks that have ended, and each flag has a line.
    """
    return _FLAG_WORDS * (1 + num_flags)


def new_counters(num_flags: int, device: torch.device) -> torch.Tensor:
    """Counters, [words] int32 zeros."""
    return torch.zeros(counter_words(num_flags), dtype=torch.int32, device=device)


@triton.jit
def take_ticket(counters):
    """The next task of this launch, and how many launches were before it, modulo 2**32."""
    num_tasks = tl.num_programs(0)
    ticket = tl.atomic_add(counters.to(tl.pointer_type(tl.int64), bitcast=True), 1, sem="relaxed", scope="gpu")
    launches = ticket // num_tasks
    return (ticket - launches * num_tasks).to(tl.int32), launches.to(tl.int32)


@triton.jit
def _num_ended(counters):
    return counters.to(tl.pointer_type(tl.int64), bitcast=True) + 1


@triton.jit
def launches_before(counters, num_waiting):
    """How many launches were before this one, modulo 2**32, for one of its waiting tasks, which has not ended."""
    return (tl.atomic_add(_num_ended(counters), 0, sem="relaxed", scope="gpu") // num_waiting).to(tl.int32)


@triton.jit
def end_waiting(counters):
    """Says that a waiting task has ended."""
    tl.atomic_add(_num_ended(counters), 1, sem="relaxed", scope="gpu")


@triton.jit
def flag_of(counters, number):
    """Pointer to a flag."""
    return counters + FLAG_WORDS * (1 + number)


@triton.jit
def raise_flag(flag):
    """Adds one after all threads of the program have written what the flag stands for."""
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="gpu")


@triton.jit
def flag_value(flag):
    """What a flag says; what was written before it was raised so far can be read then."""
    return tl.atomic_add(flag, 0, sem="acquire", scope="gpu")


@triton.jit
def wait_for_flag(flag, target, count):
    """Waits until a flag says `target`, int32 modulo 2**32; what was written before can be read then.

    Args:
        count: what it said last.
    """
    while count - target < 0:
        count = flag_value(flag)
    tl.debug_barrier()


@triton.jit
def prefetch_bytes(pointers):
    """Asks the L2 for the 256 bytes from each pointer on; does nothing but on NVIDIA's GPUs."""
    if _is_cuda():
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], 256; mov.u32 $0, 0;",
            "=r,l",
            [pointers],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

"""`python -m moereg.layer.warm_up.worker`: compiles everything that a layer's calls launch, without needing a GPU.

Started by `moereg.layer.warm_up.ahead`. It reads one JSON request from standard input and answers on standard output,
one line of JSON per progress step and one with the result. It imitates a process with the target device, records
launches instead of making them, and forks once everything is imported:

1. Forks run the launch code at every number of tokens, and keep those whose launches differ from all smaller ones'.
2. The process reruns those numbers, so that it holds the variants, and forks compile them one by one.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any, Final

import filelock
import torch

from moereg.errors import ArgumentError, MoeregError, described
from moereg.kernels.launch import cache
from moereg.kernels.launch.ahead import HostBuilder, Target, Variant, become
from moereg.layer import backend_calls
from moereg.layer.warm_up.dummy import MOVING_KERNELS, DummyLayer, empty_weights, moving_kernels, undescribed
from moereg.selection.modules import import_modules
from moereg.selection.result import Selection

_BLOCK: Final = 64
"""Numbers of tokens per task of a fork."""

Tell = Callable[[dict[str, Any]], None]


class _NothingAheadError(Exception):
    """Nothing of a layer can be compiled ahead; says why."""


def main() -> None:
    """Answers the request on standard input."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Plugins may print.

    def tell(values: dict[str, Any]) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        tell({"result": _answer(json.load(sys.stdin), tell)})
    except MoeregError as error:
        tell({"error": type(error).__name__, "message": str(error)})


def _answer(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    try:
        import_modules(request["modules"])
    except ArgumentError as error:
        return {"fault": str(error)}
    selection = Selection.from_dict(request["selection"])
    platform, winner = selection.platform, selection.winner
    target = Target.of(platform.kind, platform.arch, request["shared_bytes"])
    if target is None or winner is None or winner.cell is None:
        return {"fault": "its class is not registered in a process of its own"}
    try:
        take = become(target)
    except ValueError as error:
        raise ArgumentError(f"{error}; compile where it has one") from None
    experts = backend_calls.make_experts(selection, winner)
    described = request["weights"]
    with torch.inference_mode(False), torch.no_grad():
        weights = [undescribed(described)] if described else list(empty_weights(experts))
    expert_map = torch.empty(selection.problem.num_experts, dtype=torch.int32, device="meta")
    asked_map = expert_map if request["has_map"] else None
    moves = moving_kernels(selection.problem, platform)
    layers = [DummyLayer(experts, each, asked_map, moves=moves) for each in weights]
    try:
        counts, variants = _sweep(layers, take, request["counts"], request["jobs"])
    except _NothingAheadError as fault:
        return {"fault": str(fault)}
    # Kernels that move tokens exist for every backend, even one without kernels of its own.
    if all(variant.name.startswith(MOVING_KERNELS) for variant in variants):
        return {"fault": "it launches no Triton kernels"}
    # Reads Triton's own files, once for all forks.
    facts = cache.compiler_facts(target)
    with contextlib.ExitStack() as stack:
        # One process at a time, so that an engine's other ranks find its kernels. A read-only folder may be complete.
        with contextlib.suppress(OSError):
            stack.enter_context(filelock.FileLock(cache.cache_folder() / "moereg_compiling.lock"))
        kernels, notes = _compile(target, variants, request["jobs"], tell)
    return {"kernels": kernels, "counts": counts, "fault": None, "notes": notes, "facts": facts}


def _sweep(
    layers: Sequence[DummyLayer], take: Callable[[], list[Variant]], counts: Sequence[int], jobs: int
) -> tuple[list[int], list[Variant]]:
    """Runs the launch code at every number of tokens.

    Returns:
        One number of tokens per distinct list of launches, and the variants that they launch.
    """

    def launched(count: int) -> list[list[Variant]]:
        found = []
        for layer in layers:
            with torch.no_grad():
                layer.call(count)
            found.append(take())
        return found

    def fault_of(error: Exception) -> str:
        return f"its calls need the device: {described(error)}"

    try:
        launched(counts[0])  # Forks inherit what this imports.
    except Exception as error:  # A backend's launch code may need the device.
        raise _NothingAheadError(fault_of(error)) from error
    # Interleaved, since calls with more tokens may launch more.
    num_blocks = -(-len(counts) // _BLOCK)

    def block(number: int) -> dict[str, int] | str:
        first: dict[str, int] = {}
        try:
            for count in counts[number::num_blocks]:
                digests = json.dumps([[variant.digest for variant in lot] for lot in launched(count)])
                first.setdefault(digests, count)
        except Exception as error:
            return fault_of(error)
        return first

    first: dict[str, int] = {}
    for _, answer in fan_out(num_blocks, block, jobs):
        if not isinstance(answer, dict):
            raise _NothingAheadError(answer or "its launch code ended the process")
        for digests, count in answer.items():
            first[digests] = min(count, first.get(digests, count))
    found = sorted(first.values())
    variants = {variant.digest: variant for count in found for lot in launched(count) for variant in lot}
    return found, list(variants.values())


def _compile(target: Target, variants: list[Variant], jobs: int, tell: Tell) -> tuple[list[dict[str, Any]], list[str]]:
    """Compiles all variants, slow ones first; also returns notes for the user."""
    variants = sorted(variants, key=lambda variant: -variant.effort)
    host = HostBuilder(target)

    def one(number: int) -> dict[str, Any]:
        # ptxas and LLVM write to the standard streams.
        with contextlib.redirect_stdout(io.StringIO()):
            if number == len(variants):
                host.build_binding()
                return {"lack": host.lack}
            variant = variants[number]
            try:
                compiled, was_there, seconds = variant.compile()
                host.build_launcher(compiled)
            except Exception as error:
                return {"name": variant.name, "error": described(error)}
        shared, most = compiled.metadata.shared, target.shared_bytes
        lack = f"requires at most {most:,} bytes of shared memory, got {shared:,} in {variant.name}" * (shared > most)
        return {"name": variant.name, "seconds": seconds, "was_there": was_there, "lack": lack or host.lack}

    kernels: list[dict[str, Any]] = []
    lacks: list[str] = []
    for number, answer in fan_out(len(variants) + 1, one, jobs):
        if answer is not None and (lack := answer.pop("lack", None)):
            lacks.append(lack)
        if number == len(variants):
            continue
        kernels.append(answer or {"name": variants[number].name, "error": "its compiler ended the process"})
        num_compiled = sum(not kernel.get("was_there", False) for kernel in kernels)
        tell({"total": len(variants), "done": len(kernels), "compiled": num_compiled})
    host.close()
    return kernels, lacks[:1]


def fan_out(num_tasks: int, work: Callable[[int], Any], num_forks: int) -> Iterator[tuple[int, Any]]:
    """Runs tasks 0, 1, ... in forks of this process, which must be single-threaded, each taking the next one when free.

    Args:
        work: Maps a task's number to a picklable result; must not raise.

    Yields:
        Each task with its result, in order of completion; None if its process ended.
    """
    context = multiprocessing.get_context("fork")
    tasks = iter(range(num_tasks))
    forks: list[Any] = []
    at_work: dict[connection.Connection, int] = {}

    def hand_next(fork: connection.Connection) -> None:
        if (task := next(tasks, None)) is not None:
            at_work[fork] = task
            with contextlib.suppress(OSError):  # A fork that has ended sends nothing either.
                fork.send(task)

    try:
        for _ in range(min(num_forks, num_tasks)):
            here, there = context.Pipe()
            fork = context.Process(target=_serve, args=(there, [*at_work, here], work))
            fork.start()
            forks.append(fork)
            there.close()
            hand_next(here)
        while at_work:
            for answered in connection.wait(list(at_work)):
                assert isinstance(answered, connection.Connection)
                task, answer = at_work.pop(answered), None
                with contextlib.suppress(EOFError, OSError):
                    answer = answered.recv()
                    hand_next(answered)
                yield task, answer
        # No fork is left to do the rest.
        yield from ((task, None) for task in tasks)
    finally:
        for fork in forks:
            fork.kill()
            fork.join()


def _serve(tasks: connection.Connection, ends: list[connection.Connection], work: Callable[[int], Any]) -> None:
    """A fork's main loop; it closes its copies of the parent's pipe ends, so that it ends with the parent."""
    for end in ends:
        end.close()
    with contextlib.suppress(EOFError):
        while True:
            tasks.send(work(tasks.recv()))


if __name__ == "__main__":
    main()

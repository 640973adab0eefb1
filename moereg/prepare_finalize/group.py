"""A group of ranks: its facts as a value, and collectives whose errors say what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from moereg.arguments import check_count, check_instance
from moereg.errors import ArgumentError, GroupError, described, index_ranges, stops_the_process

_GATHERS_OF_SEVERAL: Final = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
"""Methods of a process group, newest name first: torch shards parameters with them, and does not document them."""


@dataclasses.dataclass(frozen=True)
class GroupFacts:
    """Facts about a group that selection needs.

    Attributes:
        size: Number of ranks.
        backend: torch.distributed's backend for the tensors' device, such as `nccl` or `gloo`.
        device_type: Torch's name of that device.

    Example:
        >>> print(moereg.prepare_finalize.GroupFacts(8))
        8 ranks over nccl on cuda
    """

    size: int
    backend: str = "nccl"
    device_type: str = "cuda"

    def __post_init__(self) -> None:
        check_count("size of a group", self.size)

    @property
    def transport(self) -> str:
        """`cuda:nccl`, `cpu:gloo`: the device and the backend that moves its tensors."""
        return f"{self.device_type}:{self.backend}"

    def __str__(self) -> str:
        return f"{self.size} rank{'s' * (self.size > 1)} over {self.backend} on {self.device_type}"


class _Use:
    """This process's use of a process group, whichever layers share it.

    Attributes:
        lock: Held while a thread exchanges something. A thread may take it twice.
        doing: What the holder is doing, in the words of an error.
        layers: Layers made over the group, by number; the numbers are the same on all ranks.
        num_met: Exchanges over the group's store so far.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.doing = ""
        self.layers: dict[int, str] = {}
        self.num_met = 0


_USES: Final[weakref.WeakKeyDictionary[Any, _Use]] = weakref.WeakKeyDictionary()
"""By process group."""

_USES_LOCK: Final = threading.Lock()


class Group:
    """A torch.distributed process group, for tensors of one device.

    Attributes:
        facts: Size, backend and device.
        rank: Rank of this process in the group.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """Reads a `torch.distributed.ProcessGroup`, for tensors of a device; no communication.

        Raises:
            ArgumentError: It is not a process group, or this process is not in it.
        """
        if not torch.distributed.is_available():
            raise ArgumentError("group needs a torch with torch.distributed, got one without; install another build")
        check_instance("group", group, torch.distributed.ProcessGroup, "make one with torch.distributed.new_group()")
        self.process_group: torch.distributed.ProcessGroup = group
        with _USES_LOCK:
            self._use = _USES.setdefault(group, _Use())
        self.device = device
        self.rank = torch.distributed.get_rank(group)
        if self.rank < 0:
            raise ArgumentError("group must have this process as a member, got one without it; pass its own group")
        config = torch.distributed.get_backend_config(group)
        backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
        backend = backends.get(device.type) or torch.distributed.get_backend(group)
        self.facts = GroupFacts(torch.distributed.get_world_size(group), str(backend), device.type)

    @property
    def size(self) -> int:
        """Its ranks."""
        return self.facts.size

    @property
    def timeout(self) -> datetime.timedelta | None:
        """How long a collective may wait for a rank; None if the backend does not tell."""
        try:
            backend = self.process_group._get_backend(self.device)
            timeout = backend.options._timeout
        except Exception:  # A private name of torch, and a word in an error message only.
            return None
        return timeout if isinstance(timeout, datetime.timedelta) else None

    @property
    def num_layers(self) -> int:
        """The largest number of a layer that was made over the process group here."""
        return max(self._use.layers, default=0)

    def add_layer(self, number: int, sizes: str) -> None:
        """Registers a layer under a number that all ranks agreed on, for `named_layer`."""
        self._use.layers[number] = sizes

    def copy_layer(self, number: int) -> int:
        """Registers a copy of a layer under a number of its own: ranks that copy alike number it alike."""
        copied = self.num_layers + 1
        self.add_layer(copied, self._use.layers.get(number, "not made here"))
        return copied

    def named_layer(self, number: int) -> str:
        """A layer as an error names it: by the order in which layers were made over the group, and its sizes."""
        return f"layer {number} of the group ({self._use.layers.get(number, 'not made here')})"

    @contextlib.contextmanager
    def exclusive(self, doing: str) -> Iterator[None]:
        """Keeps out other threads of this process while it is `doing` something, such as `make the kernel`.

        Raises GroupError if another one is inside, whose exchanges other ranks would take for this one's.
        """
        use = self._use
        if not use.lock.acquire(blocking=False):
            raise GroupError(
                f"one thread at a time may use a group, got one that wants to {doing} on rank {self.rank} of "
                f"{self.facts} while another is to {use.doing}; call from one thread, or make a process group for each"
            )
        before = use.doing
        use.doing = before or doing
        try:
            yield
        finally:
            use.doing = before
            use.lock.release()

    def gather_numbers(self, number: int, doing: str) -> list[int]:
        """Gathers a number of each rank, in order, and waits for no device. Raises as `gather_objects`."""
        if self.device.type == "cpu":
            found = torch.empty(self.size, dtype=torch.int64, device="cpu")
            self.all_gather(found, torch.tensor([number], device="cpu"), doing)
            return found.tolist()
        use, store, limit = self._use, self.process_group.get_group_store(), self.timeout
        keys = [f"moereg/{use.num_met}/{rank}" for rank in range(self.size)]
        with self._named(doing):
            store.set(keys[self.rank], str(number))
            store.wait(keys, *filter(None, [limit]))
            numbers = [int(value) for value in store.multi_get(keys)]
            if use.num_met:
                # All ranks are here, so all have read what they wrote the last time.
                store.delete_key(f"moereg/{use.num_met - 1}/{self.rank}")
        use.num_met += 1
        return numbers

    def call_together(self, number: int) -> None:
        """Checks that all ranks are about to call the same layer, before any of them sends a token.

        Otherwise a rank's tokens would be another layer's on the other ranks: wrong numbers, or an abort if sizes
        differ. So ranks first exchange the layer's number, whose size never differs; 0 where experts move or a kernel
        is made. Each rank raises a GroupError if they call different layers, or one has ended or did not come.
        """
        self.check_called(self.gather_numbers(number, "which layer they call"))

    def check_called(self, numbers: Sequence[int]) -> None:
        """Checks the numbers of the layers that ranks call, in order of ranks. Raises as `call_together`."""
        if len(set(numbers)) > 1:
            called = [self.named_layer(each) if each else "make_kernel or move_experts" for each in numbers]
            raise GroupError(
                f"all ranks must call the same layer at a time, got {by_rank(called)}; call layers in the same order "
                "on all ranks, each group from one thread"
            )

    def gather_objects(self, value: object, doing: str) -> list[Any]:
        """Gathers the values of all ranks, in order; they travel as pickles and wait for the host.

        Raises GroupError if a rank has ended or did not come within the group's time limit.
        """
        found: list[Any] = [None] * self.size
        with self._named(doing):
            torch.distributed.all_gather_object(found, value, group=self.process_group)
        return found

    def all_to_all(
        self,
        out: torch.Tensor,
        sent: torch.Tensor,
        doing: str,
        out_rows: list[int] | None = None,
        sent_rows: list[int] | None = None,
    ) -> None:
        """Sends rows to each rank, in rank order; equal shares if no counts are given.

        Args:
            out: [rows received, ...], overwritten.
            sent: [rows sent, ...] of the same dtype.
            doing: What is exchanged, for the error.
            out_rows, sent_rows: Rows from and to each rank.

        Raises:
            GroupError: As `gather_objects`; with NCCL torch's watchdog ends the process instead.
        """
        with self._named(doing):
            torch.distributed.all_to_all_single(out, sent, out_rows, sent_rows, group=self.process_group)

    def all_gather(self, out: torch.Tensor, sent: torch.Tensor, doing: str) -> None:
        """Gathers the rows of all ranks, in order; the same number from each. Raises as `all_to_all`."""
        with self._named(doing):
            _newest("all_gather_single", "all_gather_into_tensor")(out, sent, group=self.process_group)

    def all_gather_columns(self, outs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], doing: str) -> None:
        """`all_gather` of several contiguous tensors as one exchange: NCCL launches one kernel for all of them."""
        gather = next(filter(None, (getattr(self.process_group, name, None) for name in _GATHERS_OF_SEVERAL)), None)
        options = getattr(torch.distributed.distributed_c10d, "AllgatherOptions", None)
        if gather is None or options is None:
            for out, part in zip(outs, sent, strict=True):
                self.all_gather(out, part, doing)
            return
        wanted = options()
        wanted.asyncOp = False  # On the stream of the call, as `all_gather`.
        with self._named(doing):
            work = gather(list(outs), list(sent), wanted)
            if work is not None:
                work.wait()

    def reduce_scatter(self, out: torch.Tensor, sent: torch.Tensor, doing: str) -> None:
        """Sums this rank's share of the rows over all ranks. Raises as `all_to_all`."""
        with self._named(doing):
            _newest("reduce_scatter_single", "reduce_scatter_tensor")(out, sent, group=self.process_group)

    @contextlib.contextmanager
    def _named(self, doing: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RuntimeError) or stops_the_process(error):
                raise
            limit = self.timeout
            waits = "" if limit is None else f", time limit {limit.total_seconds():g} s"
            # The rest of gloo's text guesses at causes.
            found = described(error).partition(". ")[0]
            raise GroupError(
                f"rank {self.rank} of {self.facts}{waits} could not exchange {doing}: another rank has ended, stalled "
                f"or raised before it; see the output of the others and start all of them again ({found})"
            ) from error

    def __str__(self) -> str:
        return str(self.facts)


def _newest(name: str, before: str) -> Callable[..., Any]:
    """A collective that torch 2.13 renamed; it warns about the old name."""
    found: Callable[..., Any] = getattr(torch.distributed, name, None) or getattr(torch.distributed, before)
    return found


def by_rank(values: Sequence[str]) -> str:
    """`triton on ranks 0-2, torch on rank 3`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(those) > 1)} {' and '.join(index_ranges(those))}" for value, those in ranks.items()
    )

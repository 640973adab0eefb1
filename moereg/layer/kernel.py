"""MoEKernel: prepare, experts and finalize on permuted weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from typing import Any, NoReturn

import torch

from moereg.arguments import check_count, check_flag, check_instance
from moereg.dispatch import Selection
from moereg.errors import ArgumentError, GradientError, PicklingError
from moereg.experts import Experts
from moereg.layer import backend_calls
from moereg.layer.checks import check_call, check_no_alias, check_no_transform, check_values, ids_in_32_bits
from moereg.layer.in_turn import InTurn
from moereg.layer.move_experts import exchange_experts
from moereg.layer.no_backward import joined, wants_gradient
from moereg.layer.one_expert import OneExpert
from moereg.layer.ranges import RangedExperts, RangeExperts, Reads
from moereg.layer.train_op import CallTensors, run_training, trains
from moereg.layer.training_calls import TrainingCalls
from moereg.layer.warm_up import WarmUp, warm_up
from moereg.prepare_finalize import GroupPrepareFinalize, Prepared, PrepareFinalize
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables
from moereg.prepare_finalize.overlap import Tokens, run_over_group
from moereg.prepare_finalize.ranks_agree import MOVING
from moereg.runtime.torch_op import new_handle, run_compiled
from moereg.runtime.torch_state import fp32_is_exact, plain_torch
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.expert_weights import check_expert
from moereg.weights.permuted import CANONICAL, ExpertWeights, PermutedWeights
from moereg.weights.versions import CopiedFrom


class MoEKernel:
    """One layer, ready to run. Serves one stream at a time.

    Make one with `make_kernel`. Threads may share it: `reload`, `update_expert` and `move_experts` wait for running
    calls, and calls for them. On a GPU this orders only what is queued: write weights on the stream of the calls, or
    let one stream wait for the other.

    Attributes:
        problem: The layer.
        selection: How the backend was chosen; its problem is the layer as the experts see it, which differs from
            `problem` if tokens come from other ranks.
        experts: The chosen class's instance for this layer; a plan's open range's.
        ranges: The experts of each range of the selection's plan, ascending, the open range last.
        ranged: Runs them.
        expert_map: [num_experts] int32 on the weights' device, local expert or -1; update it in place. None if all
            experts are local.
        copied: Warns if an optimizer trains weights that this kernel has copies of; None if its owner reloads it.
        borrowed: Names of permuted tensors that share the caller's memory, which only the caller writes unless a method
            is told `write_shared=True`.
        in_turn: Keeps calls and writes apart.
        checks_values: Whether values of routing are checked at all; an engine that warms up on memory that nothing
            wrote sets it to False.
    """

    checks_values: bool = True
    copied: CopiedFrom | None = None

    def __init__(
        self,
        problem: MoEProblem,
        selection: Selection,
        experts: Experts,
        weights: PermutedWeights,
        prepare_finalize: PrepareFinalize,
        expert_map: torch.Tensor | None,
        borrowed: frozenset[str] = frozenset(),
        ranges: tuple[RangeExperts, ...] = (),
    ) -> None:
        facts = prepare_finalize.facts if isinstance(prepare_finalize, GroupPrepareFinalize) else None
        # Rows of room for `max_num_tokens` say nothing of a call's tokens, which only the device can count.
        knows_counts = facts is None or not facts.max_num_tokens
        self.ranges = ranges or (RangeExperts(None, selection, experts),)
        self.ranged = RangedExperts(self.ranges, selection.problem, weights.device, knows_counts)
        self.ranged.check_layout(weights.layout)
        self._weights = weights
        self._source: Callable[[], Mapping[str, torch.Tensor]] | None = None
        self._trained: Mapping[str, torch.Tensor] = {}
        self.borrowed = borrowed
        self.problem = problem
        self.selection = selection
        self.experts = experts
        self.expert_map = expert_map
        self.prepare_finalize = prepare_finalize
        self.in_turn = InTurn()
        self._experts_problem = selection.problem
        self._communicates = prepare_finalize.communicates
        self._device = weights.device
        # Devices without autocast, such as meta, raise when asked about it.
        self._autocast_type = weights.device.type if torch.amp.is_autocast_available(weights.device.type) else "cpu"
        # Checking fp32 precision costs 2 us, so on a GPU only layers that may multiply in fp32 do it: float16 ones
        # do if gates leave its range.
        self._needs_exact_fp32 = self._device.type == "cpu" or problem.torch_dtype != torch.bfloat16
        if problem.gradients and isinstance(prepare_finalize, GroupPrepareFinalize):
            raise ArgumentError(
                f"gradients require experts that no group shares, got {prepare_finalize.name!r} with gradients of "
                f"{', '.join(sorted(problem.gradients))}; make the kernel without a group"
            )
        self._handle = new_handle(self)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        adapters: ExpertAdapters | None = None,
    ) -> torch.Tensor:
        """Runs the layer. No host synchronization on a GPU; T = 0 works.

        Args:
            hidden_states: [T,H] in the problem's dtype, contiguous.
            topk_weights: [T,K] fp32.
            topk_ids: [T,K] int32 (int64 is converted), global experts, distinct within a token; ids outside
                [0, num_experts) or not mapped add nothing.
            out: [T,H] to overwrite, contiguous, aliasing no input; None allocates one.
            adapters: Of this rank's experts, if the problem has gradients of adapters, which need not be wanted; None
                runs the layer without.

        Returns:
            `out`: the sum over this rank's experts. A backward pass computes the problem's `gradients`; where another
            input requires one, it raises `GradientError`.

        Raises:
            BackendError: The backend's own code raised; names it and its distribution.
            GradientError: `out` is passed and an input requires a gradient.
            GroupError: Ranks of the group call different layers, another thread of this process calls one, or a rank
                has ended or stalled.
            ArgumentError: A shape, dtype or device is wrong, or `out` aliases an input; on a CPU, or on a GPU with
                MOEREG_DEBUG=1, also NaN in topk_weights, a token that names an expert twice, or an out-of-range
                expert_map. Compiled code makes the same checks when it runs.
        """
        check_call(self.problem, self._device, hidden_states, topk_weights, topk_ids, out)
        is_own, trained = out is None, self.trained
        followed: tuple[torch.Tensor, ...] = (hidden_states, topk_weights, *trained.values())
        if adapters is not None:
            check_instance("adapters", adapters, ExpertAdapters, "make them with ExpertAdapters(w13_a=..., w13_b=...)")
            adapters.check_against(self.problem, self._device)
            adapters = adapters.computed_in(self.problem.torch_dtype)
            followed = (*followed, *adapters.tensors().values())
        check_no_transform(followed, (topk_ids,))
        if out is not None and wants_gradient(*followed):
            raise GradientError(
                "out must be None where an input requires a gradient, since a tensor that is passed stays outside of "
                "autograd's graph; leave it out, or call under torch.no_grad()"
            )
        call = hidden_states, topk_weights, topk_ids
        if trains(self.problem, hidden_states, topk_weights, trained, adapters):
            return run_training(self.problem, *call, trained, self._handle, adapters)
        if adapters is not None:
            with torch.no_grad():
                found = run_training(self.problem, *call, trained, self._handle, adapters)
            return joined(found if out is None else out.copy_(found), *followed)
        if out is None:
            out = torch.empty_like(hidden_states)
        if self._communicates or hidden_states.shape[0]:
            if torch.compiler.is_compiling():
                run_compiled(hidden_states, topk_weights, topk_ids, out, self._handle)
            else:
                self.check_and_run(hidden_states, topk_weights, topk_ids, out, is_own)
        return joined(out, *followed)

    @property
    def weights(self) -> PermutedWeights:
        """The tensors that calls read: permuted weights, or the owner's tensors as they are now."""
        return self._weights if self._source is None else PermutedWeights.in_place(self._source())

    @weights.setter
    def weights(self, weights: PermutedWeights) -> None:
        self._weights, self._source = weights, None

    @property
    def trained(self) -> Mapping[str, torch.Tensor]:
        """The canonical tensors that training calls read in place, by name, detached where they are not trained."""
        if self._source is None or not self.problem.gradients:
            return self._trained
        held = self._source()
        # A backward pass reads what its forward pass read, and torch notices if it was written in between.
        return held if "weights" in self.problem.gradients else {name: one.detach() for name, one in held.items()}

    @trained.setter
    def trained(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._trained = tensors

    @property
    def reads_in_place(self) -> bool:
        """Whether its classes read canonical weights where their owner keeps them, and nothing else."""
        is_whole = len(self.borrowed) == len(self._weights.per_expert) and not self._weights.shared
        return is_whole and all(each.experts.reads_in_place() for each in self.ranges)

    def read_from(self, source: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """Lets each call read its owner's tensors, and keeps none: nothing can be stale, and nothing is held.

        Args:
            source: Returns canonical tensors by name, which it has checked; must not hold them itself.

        Raises:
            BackendError: The class says that it reads in place, and copied a tensor or made another.
        """
        if not self.reads_in_place:
            backend_calls.raise_copied(self.selection)
        empty = {name: torch.empty_like(self._weights[name], device="meta") for name in self._weights.per_expert}
        self._weights = PermutedWeights(CANONICAL, empty, reader=self._weights.reader)
        self._source, self._trained, self.copied, self.borrowed = source, {}, None, frozenset(empty)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEKernel:
        # Compiled code finds a kernel by its handle, so a copy needs its own.
        parts_of = self.weights, self.expert_map, self.trained if "weights" in self.problem.gradients else {}
        weights, expert_map, trained = copy.deepcopy(parts_of, memo)
        moves = self.prepare_finalize
        if isinstance(moves, GroupPrepareFinalize):
            knows_places = self.expert_map is moves.tables.expert_map
            moves = moves.copied()
            if knows_places:
                # A copy's experts move independently.
                moves.tables = PlacementTables(moves.tables.placement, moves.group.rank, self._device)
                expert_map = moves.tables.expert_map
        if trained:
            # Parameters are copied into memory of their own, which the copy's calls without gradients must read too.
            tensors = {name: tensor.detach() for name, tensor in trained.items()}
            weights = dataclasses.replace(weights, per_expert=tensors)
        # If the caller's tensors are copied along, shared memory stays shared between the copies.
        parts = self.problem, self.selection, self.experts, weights, moves, expert_map
        made = MoEKernel(*parts, self.borrowed, self.ranges)
        made.trained = trained
        return made

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            "a MoEKernel holds weights in one machine's layout and is not pickled; "
            "send the problem and Selection.to_dict(), and make it there"
        )

    def warm_up(self, token_counts: Iterable[int] | None = None, *, jobs: int | None = None) -> WarmUp:
        """Compiles on all cores what calls launch, loads it and records launches, so that later calls do not wait.

        Args:
            token_counts: Numbers of tokens per call, such as `range(1, 8193)` or the sizes of CUDA graphs; by default
                1 to the problem's `max_num_tokens`, or to 16,384 if that is None.
            jobs: Parallel compilers; None means as many as cores and memory allow.

        Returns:
            What was compiled. [docs/cold-start.md](docs/cold-start.md) says which calls may still compile something.

        Raises:
            ArgumentError: A number is negative, Triton's cache cannot be written, or another Triton filled it.
            BackendError: A kernel did not compile, or a call failed.
        """
        moves = self.prepare_finalize
        local = moves.local if isinstance(moves, GroupPrepareFinalize) else moves
        return warm_up(self.ranged.serving, self.weights, self.expert_map, token_counts, jobs, local)

    def token_histogram(self) -> dict[int, int]:
        """Counts calls of the experts by their number of tokens, since the kernel was made.

        Counts what runs on the host, in eager and compiled code, and what `count` is told. A captured call counts once;
        its replays do not. Over a group these are tokens that arrive, padding included, once for each part of a call.
        Calls without tokens run no experts and do not count. Threads that call at once may lose a count.

        Returns:
            {power of two: calls with at most so many tokens and more than half as many}, ascending, none of 0.
        """
        return {1 << place: calls for place, calls in enumerate(self.ranged.num_calls) if calls}

    def count(self, num_tokens: int) -> None:
        """Counts a call that the host does not see, such as a CUDA graph's replay, in `token_histogram`.

        Args:
            num_tokens: Tokens of the call; 0 counts nothing.

        Raises:
            ArgumentError: It is negative, above 64 bits or no integer.
        """
        if type(num_tokens) is int and 0 < num_tokens < 2**63:
            self.ranged.count(num_tokens)
        else:  # Checked only here, since engines count every replay of every layer.
            check_count("num_tokens", num_tokens, minimum=0)

    def reload(self, weights: ExpertWeights, *, write_shared: bool = False) -> None:
        """Permutes other weights of the same problem into the same storage, so that captured graphs see them.

        A tensor that the layout leaves unchanged is the caller's own, which the kernel reads in place. Only its owner
        writes it; given again, it is up to date.

        Args:
            weights: New weights of this problem on the kernel's device; only read.
            write_shared: Whether to write into the tensors that `make_kernel` was given. Other readers, such as kernels
                that share them, then see the new values.

        Raises:
            ArgumentError: The kernel reads tensors that are not its own, the new ones lie elsewhere, and `write_shared`
                is not set; or the weights are not this problem's or are on another device.
        """
        check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(w13=..., w2=...)")
        check_flag("write_shared", write_shared)
        weights.check_against(self.problem)
        with self.in_turn.alone():
            held = self.weights
            new = backend_calls.permute(self.ranges[-1].selection, self.experts, weights)
            if not write_shared:
                self._check_own(held.elsewhere(self.borrowed, new))
            # Inference mode may write both kinds of tensors; outside it, tensors made inside may not be written.
            with plain_torch(), torch.inference_mode():
                held.copy_from(new)
        if self.copied is not None:
            self.copied.tensors(self.copied_from(weights))

    def update_expert(self, expert: int, weights: ExpertWeights, *, write_shared: bool = False) -> None:
        """Replaces one expert in the same storage, so that captured graphs see it; the others keep their bits.

        The backend permutes only that expert. The first update of a shape also permutes two random experts, to check
        that the layout keeps experts apart.

        Args:
            expert: Local expert, a row of the canonical weights. If it becomes another global expert, update
                `expert_map` in place as well.
            weights: That expert alone, E = 1, with the layer's tensors, on the kernel's device; only read.
            write_shared: As in `reload`.

        Raises:
            ArgumentError: There is no such expert, the weights are not one expert of this layer, or the kernel reads
                tensors that are not its own and `write_shared` is not set.
            BackendError: The backend's layout does not keep experts apart, or its code raised.
        """
        check_expert(expert, self.problem.num_local_experts)
        check_flag("write_shared", write_shared)
        held = self.weights
        reader = self._weights.reader
        if not isinstance(reader, OneExpert):
            raise ArgumentError("update_expert needs a kernel that make_kernel made; reload the whole layer")
        row = reader.rows_for(held, weights)
        self._check_own(frozenset() if write_shared else self.borrowed)
        with self.in_turn.alone(), plain_torch(), torch.inference_mode():
            held.write_expert(expert, row)

    @property
    def expert_placement(self) -> ExpertPlacement | None:
        """The placement of experts on the group's ranks; None without a group."""
        moves = self.prepare_finalize
        return moves.tables.placement if isinstance(moves, GroupPrepareFinalize) else None

    def move_experts(self, placement: ExpertPlacement, *, write_shared: bool = False) -> int:
        """Moves experts between the ranks of the group, in the same storage, so that captured graphs see it.

        Every rank calls it, between two calls of the layer. Each rank keeps its number of experts. Experts travel in
        the backend's layout, or as canonical weights if that layout cannot be copied between ranks. Nothing is written
        before everything has arrived, so arriving experts briefly need memory twice.

        Args:
            placement: The new placement, such as from `balance_experts(..., before=kernel.expert_placement)`.
            write_shared: As in `reload`.

        Returns:
            How many of this rank's experts changed.

        Raises:
            ArgumentError: The kernel was made without `expert_placement`, the placement has other sizes, or as in
                `update_expert`.
            RanksDifferError: Ranks got different placements or one could not continue; no expert has moved.
            GroupError: A rank of the group has ended or timed out.
            LayoutNotInvertibleError: The layout can neither be copied nor keeps the canonical numbers.
        """
        moves = self.prepare_finalize
        if not isinstance(moves, GroupPrepareFinalize) or self.expert_map is not moves.tables.expert_map:
            raise ArgumentError(
                "move_experts needs a kernel that knows where all experts are; pass group and expert_placement to "
                "make_kernel, which may be ExpertPlacement.contiguous(num_experts, num_ranks)"
            )
        error: Exception | None = None
        try:
            check_flag("write_shared", write_shared)
            check_instance("placement", placement, ExpertPlacement, "make one with balance_experts(...)")
            self._check_own(frozenset() if write_shared else self.borrowed)
        except Exception as raised:
            error = raised
        # A call between exchange and writes would meet ranks that have already written.
        with moves.group.alone(MOVING.act):
            arrived = exchange_experts(moves.group, self.weights, moves.tables.placement, placement, error)
            with self.in_turn.alone():
                with plain_torch(), torch.inference_mode():
                    arrived.write(self.weights)
                moves.tables.update(placement)
        return len(arrived.places)

    def copied_from(self, weights: ExpertWeights) -> list[torch.Tensor]:
        """Canonical tensors of which the kernel holds a copy, in any layout."""
        return self.weights.copied_from(weights)

    def _check_own(self, names: frozenset[str]) -> None:
        if names:
            raise ArgumentError(
                f"this kernel reads {', '.join(sorted(names))} where its owner keeps them, got other numbers; write "
                "them into those tensors, say write_shared=True to have the kernel write there, or make it with "
                "own_weights=True"
            )

    def check_and_run(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
        is_own: bool = False,
        reads: Reads | None = None,
    ) -> None:
        """Runs a call whose shapes and dtypes were checked, as compiled code does.

        Checks addresses and values, which tensors lack while code is compiled.

        Args:
            hidden_states, topk_weights, topk_ids, out: As in a call; T at least 1 unless tokens come from other ranks.
            is_own: Whether `out` was newly allocated, so that nothing aliases it.
            reads: What the call reads instead of the kernel's weights and map.
        """
        thread = get_ident()
        reads = reads or Reads(self.weights, self.expert_map)
        try:
            self.in_turn.begin(thread)
            if not is_own:
                check_no_alias(out, (hidden_states, topk_weights, topk_ids))
            if self.checks_values:
                check_values(self.problem, self._device, topk_weights, topk_ids, reads.expert_map)
            self._run(reads, hidden_states, topk_weights, topk_ids, out)
        finally:
            self.in_turn.end(thread)

    @functools.cached_property
    def _training(self) -> TrainingCalls:
        return TrainingCalls(self.ranged, self.prepare_finalize, self._experts_problem, self.in_turn)

    def training_kernel(self) -> MoEKernel:
        """Itself, for the op by which layers train."""
        return self

    def run_saving(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        tensors: CallTensors,
        saved: torch.Tensor,
    ) -> torch.Tensor:
        """Runs a call whose shapes and dtypes were checked, and keeps what its backward pass needs.

        Args:
            hidden_states, topk_weights, topk_ids: As in a call.
            tensors: The weights to read, and adapters.
            saved: uint8, overwritten; empty if there will be no backward pass.

        Returns:
            [T,H], new.
        """
        out = torch.empty_like(hidden_states)
        if len(hidden_states) and not saved.numel():
            self.check_and_run(hidden_states, topk_weights, topk_ids, out, True, self._reads(tensors))
        elif len(hidden_states):
            if self.checks_values:
                check_values(self.problem, self._device, topk_weights, topk_ids, self.expert_map)
            tokens = Tokens(hidden_states, topk_weights, topk_ids)
            self._training.forward(tokens, self._reads(tensors), tensors.adapters, saved, out)
        return out

    def run_backward(
        self,
        gradients: Mapping[str, torch.Tensor],
        grad_out: torch.Tensor,
        saved: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        tensors: CallTensors,
    ) -> None:
        """Computes gradients of a call of `run_saving`.

        Args:
            gradients: Tensors to overwrite, by the names of `Gradients`.
            grad_out: [T,H] in the problem's dtype, contiguous.
            saved, hidden_states, topk_weights, topk_ids, tensors: As in that call.
        """
        if len(hidden_states):
            tokens, reads = Tokens(hidden_states, topk_weights, topk_ids), self._reads(tensors)
            self._training.backward(tokens, reads, tensors.adapters, saved, gradients, grad_out)
        else:
            for tensor in gradients.values():
                tensor.zero_()

    def _reads(self, tensors: CallTensors) -> Reads:
        """Operands of a call that was given its layer's tensors."""
        own = not (tensors.weights and self.reads_in_place)
        return Reads(self.weights if own else PermutedWeights.in_place(tensors.weights), self.expert_map)

    def _run(self, *reads_and_call: Any) -> None:
        if torch.is_autocast_enabled(self._autocast_type) or (self._needs_exact_fp32 and not fp32_is_exact()):
            # `plain_torch` costs 10 us, so it is entered only if needed.
            with plain_torch():
                self._run_plainly(*reads_and_call)
        elif torch.is_grad_enabled():
            # The common case, 2 us. Weights may be parameters, and permuted weights views of them.
            with torch.no_grad():
                self._run_plainly(*reads_and_call)
        else:
            self._run_plainly(*reads_and_call)

    def _run_plainly(
        self,
        reads: Reads,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        problem = self._experts_problem
        topk_ids = ids_in_32_bits(topk_ids, problem)
        moves = self.prepare_finalize
        if isinstance(moves, GroupPrepareFinalize):
            tokens = Tokens(hidden_states, topk_weights, topk_ids)
            run_over_group(moves, tokens, out, self.expert_map, self.run_experts)
            return
        prepared = moves.prepare(hidden_states, topk_weights, topk_ids, problem, reads.expert_map)
        expert_out = self.ranged.run(prepared, reads.weights, out)
        if expert_out is not out:
            moves.finalize(out, expert_out, prepared, problem)

    def run_experts(self, prepared: Prepared) -> torch.Tensor:
        """The rows, new, that the experts make of what arrived from other ranks."""
        return self.ranged.run(prepared, self._weights)

    def __repr__(self) -> str:
        names = [f"{each.selection.backend or 'none'}{f' to {each.most}' if each.most else ''}" for each in self.ranges]
        name = ", ".join(names)
        held = "weights in place" if self._source else f"{self._weights.num_bytes / 2**20:.0f} MiB"
        return f"MoEKernel({name}, {self.problem}, {held} on {self._device})"

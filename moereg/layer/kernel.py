"""MoEKernel: prepare, experts and finalize on permuted weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from threading import get_ident
from typing import Any, NoReturn

import torch

from moereg.arguments import check_count, check_instance
from moereg.dispatch import Selection
from moereg.errors import ArgumentError, GradientError, PicklingError
from moereg.experts import Gradients, SavedShapes
from moereg.layer import backend_calls
from moereg.layer.checks import check_call, check_no_alias, check_no_transform, check_values, ids_in_32_bits
from moereg.layer.held_weights import HeldWeights
from moereg.layer.move_experts import move_experts
from moereg.layer.ranges import RangedExperts, RangeExperts, Reads
from moereg.layer.train_op import CallTensors, Tokens, cut_saved, joined, run_training, trains, wants_gradient
from moereg.layer.warm_up import WarmUp, warm_up
from moereg.prepare_finalize import GroupPrepareFinalize, PrepareFinalize
from moereg.prepare_finalize.expert_placement import ExpertPlacement, PlacementTables
from moereg.runtime.torch_op import new_handle, run_compiled
from moereg.runtime.torch_state import fp32_is_exact, plain_torch
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import ExpertWeights, PermutedWeights


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
        ranged: The experts of each range of the selection's plan, and what runs them.
        expert_map: [num_experts] int32 on the weights' device, local expert or -1; update it in place. None if all
            experts are local.
        held: The weights, and what writes other numbers into them.
        checks_values: Whether values of routing are checked at all; an engine that warms up on memory that nothing
            wrote sets it to False.
    """

    checks_values: bool = True

    def __init__(
        self,
        problem: MoEProblem,
        selection: Selection,
        ranges: tuple[RangeExperts, ...],
        weights: PermutedWeights | HeldWeights,
        prepare_finalize: PrepareFinalize,
        expert_map: torch.Tensor | None,
    ) -> None:
        facts = prepare_finalize.facts if isinstance(prepare_finalize, GroupPrepareFinalize) else None
        # Rows of room for `max_num_tokens` say nothing of a call's tokens, which only the device can count.
        knows_counts = facts is None or not facts.max_num_tokens
        self.held = weights if isinstance(weights, HeldWeights) else HeldWeights(problem, ranges, weights)
        self._device = self.weights.device
        self.ranged = RangedExperts(ranges, selection.problem, self._device, knows_counts)
        self.problem = problem
        self.selection = selection
        self.experts = ranges[-1].experts
        self.expert_map = expert_map
        self.prepare_finalize = prepare_finalize
        # Devices without autocast, such as meta, raise when asked about it.
        self._autocast_type = self._device.type if torch.amp.is_autocast_available(self._device.type) else "cpu"
        # Checking fp32 precision costs 2 us, so on a GPU only layers that may multiply in fp32 do it: float16 ones
        # do if gates leave its range.
        self._needs_exact_fp32 = self._device.type == "cpu" or problem.torch_dtype != torch.bfloat16
        if problem.gradients and isinstance(prepare_finalize, GroupPrepareFinalize):
            raise ArgumentError(
                f"gradients require experts that no group shares, got {prepare_finalize.name!r} with gradients of "
                f"{', '.join(sorted(problem.gradients))}; make the kernel without a group"
            )
        # Of each step of training: the last number of tokens, with its shapes.
        self._training: dict[str, tuple[int, tuple[backend_calls.Shapes, SavedShapes]]] = {}
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
        is_own, trained = out is None, self.held.trained
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
        # Other ranks wait for each call of this one.
        if isinstance(self.prepare_finalize, GroupPrepareFinalize) or hidden_states.shape[0]:
            if torch.compiler.is_compiling():
                run_compiled(hidden_states, topk_weights, topk_ids, out, self._handle)
            else:
                self.check_and_run(hidden_states, topk_weights, topk_ids, out, is_own)
        return joined(out, *followed)

    @property
    def weights(self) -> PermutedWeights:
        """The tensors that calls read: permuted weights, or the owner's tensors as they are now."""
        return self.held.now

    def __deepcopy__(self, memo: dict[int, Any]) -> MoEKernel:
        # Compiled code finds a kernel by its handle, so a copy needs its own.
        held, expert_map = copy.deepcopy((self.held, self.expert_map), memo)
        moves = self.prepare_finalize
        if isinstance(moves, GroupPrepareFinalize):
            knows_places = self.expert_map is moves.tables.expert_map
            moves = moves.copied()
            if knows_places:
                # A copy's experts move independently.
                moves.tables = PlacementTables(moves.tables.placement, moves.group.rank, self._device)
                expert_map = moves.tables.expert_map
        return MoEKernel(self.problem, self.selection, self.ranged.ranges, held, moves, expert_map)

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
        its replays do not. Over a group these are tokens that arrive, padding included. Calls without tokens run no
        experts and do not count. Threads that call at once may lose a count.

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
        self.held.reload(weights, write_shared)
        self.held.watch(repr(self), weights)

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
        self.held.update_expert(expert, weights, write_shared)

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
        return move_experts(self.held, moves, placement, write_shared)

    def check_and_run(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor,
        is_own: bool = False,
        reads: Reads | None = None,
    ) -> None:
        """Runs a call whose shapes and dtypes were checked, as compiled code does; checks addresses and values here.

        Args:
            hidden_states, topk_weights, topk_ids, out: As in a call; T at least 1 unless tokens come from other ranks.
            is_own: Whether `out` was newly allocated, so that nothing aliases it.
            reads: What the call reads instead of the kernel's weights and map.
        """
        thread = get_ident()
        reads = reads or Reads(self.held.now, self.expert_map)
        try:
            self.held.in_turn.begin(thread)
            if not is_own:
                check_no_alias(out, (hidden_states, topk_weights, topk_ids))
            if self.checks_values:
                check_values(self.problem, self._device, topk_weights, topk_ids, reads.expert_map)
            self._run(reads, hidden_states, topk_weights, topk_ids, out)
        finally:
            self.held.in_turn.end(thread)

    def training_kernel(self) -> MoEKernel:
        """Itself, for the op by which layers train."""
        return self

    def run_saving(self, tokens: Tokens, tensors: CallTensors, saved: torch.Tensor) -> torch.Tensor:
        """Runs a call whose shapes and dtypes were checked, and keeps what its backward pass needs.

        Args:
            tokens: The call.
            tensors: The weights to read, and adapters.
            saved: uint8, overwritten; empty if there will be no backward pass.
        """
        out = torch.empty_like(tokens.hidden_states)
        if len(out) and saved.numel():
            if self.checks_values:
                check_values(self.problem, self._device, tokens.topk_weights, tokens.topk_ids, self.expert_map)
            self.ranged.count(len(out))
            self._train("apply_saving", tokens, tensors, saved, out=out)
        elif len(out):
            self.check_and_run(*tokens, out, True, self._reads(tensors))
        return out

    def run_backward(
        self,
        gradients: Mapping[str, torch.Tensor],
        grad_out: torch.Tensor,
        saved: torch.Tensor,
        tokens: Tokens,
        tensors: CallTensors,
    ) -> None:
        """Computes gradients of a call of `run_saving`.

        Args:
            gradients: Tensors to overwrite, by the names of `Gradients`.
            grad_out: [T,H] in the problem's dtype, contiguous.
            saved, tokens, tensors: As in that call.
        """
        if len(grad_out):
            targets: dict[str, Any] = {**gradients}
            grads = Gradients(**targets)
            self._train("apply_backward", tokens, tensors, saved, grads=grads, grad_out=grad_out)
            return
        for tensor in gradients.values():
            tensor.zero_()

    def _train(self, step: str, tokens: Tokens, tensors: CallTensors, saved: torch.Tensor, **others: Any) -> None:
        """Runs a step of training of the experts, `apply_saving` or `apply_backward`, on at least one token."""
        thread, num_tokens, reads = get_ident(), len(tokens.hidden_states), self._reads(tensors)
        served = self.ranged.range_of(num_tokens)
        selection, experts = served.selection, served.experts
        try:
            self.held.in_turn.begin(thread)
            with plain_torch():
                known, shapes = self._training.get(step, (0, None))
                if shapes is None or known != num_tokens:
                    shapes = (
                        backend_calls.workspace_shapes(selection, experts, num_tokens, step),
                        backend_calls.saved_shapes(selection, experts, num_tokens, saved.numel()),
                    )
                    self._training[step] = num_tokens, shapes
                workspace13, workspace2 = self.ranged.scratch(served, shapes[0])
                topk_ids = ids_in_32_bits(tokens.topk_ids, self.problem)
                rows = tokens.hidden_states, tokens.topk_weights, topk_ids
                inputs = self.prepare_finalize.prepare(*rows, self.problem, reads.expert_map).inputs
                others |= {
                    "saved": cut_saved(saved, shapes[1]),
                    "inputs": dataclasses.replace(inputs, adapters=reads.adapters),
                    "weights": reads.weights,
                    "workspace13": workspace13,
                    "workspace2": workspace2,
                }
                try:
                    getattr(experts, step)(**others)
                except BaseException as error:
                    backend_calls.raise_named(selection, step, error)
        finally:
            self.held.in_turn.end(thread)

    def _reads(self, tensors: CallTensors) -> Reads:
        """Operands of a call that was given its layer's tensors."""
        is_given = tensors.weights and self.held.reads_in_place
        weights = PermutedWeights.in_place(tensors.weights) if is_given else self.held.now
        return Reads(weights, self.expert_map, tensors.adapters)

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
        problem = self.selection.problem
        topk_ids = ids_in_32_bits(topk_ids, problem)
        moves = self.prepare_finalize
        if isinstance(moves, GroupPrepareFinalize):
            with moves.called(self._device):
                prepared = moves.prepare(hidden_states, topk_weights, topk_ids, problem, reads.expert_map)
                moves.finalize(out, self.ranged.run(prepared, reads.weights), prepared, problem)
            return
        prepared = moves.prepare(hidden_states, topk_weights, topk_ids, problem, reads.expert_map)
        expert_out = self.ranged.run(prepared, reads.weights, out)
        if expert_out is not out:
            moves.finalize(out, expert_out, prepared, problem)

    def __dir__(self) -> list[str]:
        """The names for users, without those that only moereg's other modules use."""
        ours = ("_", "check_and_run", "count", "held", "ranged", "run_", "training_kernel")
        return [name for name in super().__dir__() if not name.startswith(ours)]

    def __repr__(self) -> str:
        plan = ((each.selection.backend or "none", each.most) for each in self.ranged.ranges)
        names = [f"{backend} to {most}" if most else backend for backend, most in plan]
        return f"MoEKernel({', '.join(names)}, {self.problem}, {self.held} on {self._device})"

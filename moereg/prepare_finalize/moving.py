"""The contract of token dispatchers between the ranks of a group."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Final

import torch
from typing_extensions import Self

from moereg.experts import ExpertInputs
from moereg.platforms import Platform
from moereg.prepare_finalize.base import Prepared, PrepareFinalize, StandardPrepareFinalize
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.prepare_finalize.expert_placement import PlacementTables
from moereg.prepare_finalize.group import Group, GroupFacts
from moereg.prepare_finalize.wire import Received, Wire
from moereg.spec.facts import DispatcherFacts
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.weights.checks import checks_values

OVER_TORCH: Final = DispatcherFacts(
    transports=frozenset({"cuda:nccl", "cpu:gloo"}),
    dtypes=frozenset(DTYPES),
    deterministic=True,
    router_weight_on_input=True,
)
"""The facts of every dispatcher of moereg itself, to which one whose host waits for nothing adds two."""


def local_prepare_finalize(activation_format: str) -> PrepareFinalize:
    """Returns the dispatcher without communication for an activation format."""
    kinds = {kind.activation_format: kind for kind in (StandardPrepareFinalize, BatchedPrepareFinalize)}
    return kinds[activation_format]()


@dataclasses.dataclass(frozen=True)
class Moved(Prepared):
    """The result of prepare where tokens came from other ranks.

    Attributes:
        local: The local prepare's result for the tokens that arrived, for its finalize; None if there is none.
    """

    local: Prepared | None = None


class GroupPrepareFinalize(PrepareFinalize):
    """Moves tokens to the ranks of their experts and results back home.

    Every rank of the group calls `prepare` and `finalize` in turn, even without tokens. The local prepare/finalize of
    the activation format lays out the tokens that arrive, so that one class serves both formats.

    Attributes:
        facts: What it can do.
        name: As requests spell it; set by the decorator.
        problem: The layer as the caller sees it: tokens are this rank's.
        experts_problem: The layer as the experts see it, by `experts_problem_of`.
        group: The ranks.
        tables: Which rank holds which expert, on the weights' device.
        wire: How tokens travel.
        layer_number: The layer's number among those made over the group, from 1; the same on all ranks.
        has_met: Whether all ranks have once called the layer at the same time.
    """

    layer_number: int = 0
    has_met: bool = False
    facts: ClassVar[DispatcherFacts] = DispatcherFacts()

    def __init__(
        self, problem: MoEProblem, experts_problem: MoEProblem, group: Group, tables: PlacementTables, wire: Wire
    ) -> None:
        """Stores what calls need; no communication."""
        self.problem = problem
        self.experts_problem = experts_problem
        self.group = group
        self.tables = tables
        self.wire = wire
        self.activation_format = experts_problem.activation_format  # type: ignore[misc]  # one class, both formats
        self.local = local_prepare_finalize(self.activation_format)

    def copied(self) -> Self:
        """Returns a copy over the same group, as another layer."""
        other = copy.copy(self)
        other.layer_number, other.has_met = self.group.copy_layer(self.layer_number), False
        return other

    @contextlib.contextmanager
    def called(self, device: torch.device) -> Iterator[None]:
        """Surrounds a call, which all ranks make together; no other thread of this process uses the group meanwhile.

        On a CPU each call checks that ranks call the same layer. On a GPU the host would have to wait for the other
        hosts, so it is checked in the layer's first call, where a call is captured, and with MOEREG_DEBUG=1 in each
        call that is not a graph's replay. A dispatcher whose host waits for counts sends the layer's number with them
        in every call.

        Raises:
            GroupError: Ranks call different layers, another thread uses the group, or a rank has ended or stalled.
        """
        with self.group.exclusive(f"call {self.group.named_layer(self.layer_number)}"):
            is_captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            if not self.has_met or is_captured or checks_values(device):
                self.group.call_together(self.layer_number)
                self.has_met = True
            yield

    @classmethod
    def experts_problem_of(cls, problem: MoEProblem, group: GroupFacts, activation_format: str) -> MoEProblem:
        """The layer as the experts of one rank see it, in the format that was chosen; `problem` is the caller's."""
        most = problem.max_num_tokens
        return dataclasses.replace(
            problem,
            activation_format=activation_format,
            max_num_tokens=None if most is None else most * group.size,
        )

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, group: GroupFacts, platform: Platform) -> list[str]:
        """Every reason that `facts` cannot express; empty means supported. As `Experts.unsupported_reasons`."""
        return []

    def laid_out(
        self, received: Received, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None
    ) -> Moved:
        """Lays out tokens that arrived, with their routes to this rank, as the inputs of its experts.

        Args:
            received: n tokens.
            topk_weights: [n,K] fp32.
            topk_ids: [n,K] int32, experts of the layer; -1 where a route goes to another rank.
            expert_map: [num_experts] int32 or None.
        """
        hidden_states = received.hidden_states
        if hidden_states.shape[0] == 0:
            # Nothing to lay out, and the experts are not called.
            return Moved(ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map), 0)
        local = self.local.prepare(hidden_states, topk_weights, topk_ids, self.experts_problem, expert_map)
        inputs = dataclasses.replace(local.inputs, hidden_scale=received.hidden_scale)
        return Moved(inputs, local.num_tokens, local.row_of_route, local)

    def reduced(self, expert_out: torch.Tensor, prepared: Prepared) -> torch.Tensor:
        """[rows,H]: one row for each row that arrived, from any of the experts' output forms."""
        assert isinstance(prepared, Moved)
        if expert_out.dim() == 2 or prepared.local is None:
            return expert_out.reshape(-1, expert_out.shape[-1])
        rows = expert_out.new_empty(prepared.num_tokens, expert_out.shape[-1])
        self.local.finalize(rows, expert_out, prepared.local, self.experts_problem)
        return rows

"""No communication, tokens grouped by expert: [E,max_T,H] and the number of valid rows."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Final

import torch
from packaging.version import InvalidVersion, Version

from moereg.errors import ArgumentError
from moereg.experts import ExpertInputs
from moereg.platforms import Platform, PlatformRule, probe_platform
from moereg.prepare_finalize.base import Prepared, PrepareFinalize, sum_routes
from moereg.spec.problem import MoEProblem


class BatchedPrepareFinalize(PrepareFinalize):
    """Gives each expert its own rows; max_T is T, since a token takes an expert at most once.

    If an expert map gives several experts the same local one, a token's routes to it share a row: it is computed once
    and summed with the weight of each.

    Triton kernels do it in three launches, torch in about 30; `runs_kernels` says where.
    """

    name = "batched"
    activation_format = "batched"

    def __init__(self, in_triton: bool | None = None) -> None:
        """Chooses between Triton and torch.

        Args:
            in_triton: Triton kernels, on any device that Triton knows, or torch; None: what the call's device runs.
                A call on a device that Triton does not know is an `ArgumentError`.
        """
        self._in_triton = in_triton

    def prepare(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        problem: MoEProblem,
        expert_map: torch.Tensor | None,
    ) -> Prepared:
        if calls_kernels(self._in_triton, hidden_states.device.type):
            from moereg.kernels.rows.batches import lay_out_batches  # Loads Triton, which may not be there.

            with torch.cuda.device_of(hidden_states):
                scales = topk_weights if problem.apply_router_weight_on_input else None
                batches = lay_out_batches(hidden_states, topk_ids, expert_map, problem.num_local_experts, scales)
            quick = ExpertInputs(batches.rows, topk_weights, topk_ids, batches.counts, expert_map)
            return Prepared(quick, hidden_states.shape[0], batches.row_of_route)
        from moereg.kernels.plain.device import local_expert_ids  # Loads torch, which choosing does without.

        num_tokens, hidden_size = hidden_states.shape
        num_slots = topk_ids.shape[1]
        num_local_experts = problem.num_local_experts
        local = local_expert_ids(topk_ids, num_local_experts, expert_map).flatten()
        # Unmapped routes form a group after the last expert, so that one stable sort places everything.
        group = torch.where(local >= 0, local, num_local_experts)
        sorted_group, order = torch.sort(group, stable=True)
        token = order // num_slots
        # The sort is stable, so a token's routes to one expert are neighbors; all but the first add no row.
        is_new = torch.ones_like(sorted_group)
        is_new[1:] = (sorted_group[1:] != sorted_group[:-1]) | (token[1:] != token[:-1])
        num_rows = torch.nn.functional.pad(is_new.cumsum(0), (1, 0))
        first = num_rows[torch.searchsorted(sorted_group, torch.arange(num_local_experts + 1, device=group.device))]
        place = num_rows[1:] - 1 - first[sorted_group]
        kept = sorted_group < num_local_experts
        surplus = num_local_experts * num_tokens
        row = torch.where(kept, sorted_group * num_tokens + place, surplus)
        # One extra row takes routes that go nowhere.
        rows = hidden_states.new_empty(surplus + 1, hidden_size)
        rows[row] = hidden_states[token]
        if problem.apply_router_weight_on_input:
            # The experts do not see routes in this format, so the scaling happens here.
            rows[row] = (rows[row] * topk_weights.flatten()[order].unsqueeze(1)).to(rows.dtype)
        row_of_route = torch.empty_like(row)
        row_of_route[order] = torch.where(kept, row, -1)
        counts = (first[1:] - first[:-1]).to(torch.int32)
        of_experts = rows[:surplus].view(num_local_experts, num_tokens, hidden_size)
        inputs = ExpertInputs(of_experts, topk_weights, topk_ids, counts, expert_map)
        return Prepared(inputs, num_tokens, row_of_route.view(num_tokens, num_slots))

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert prepared.row_of_route is not None
        weights = None if problem.apply_router_weight_on_input else prepared.inputs.topk_weights
        in_triton = calls_kernels(self._in_triton, expert_out.device.type)
        sum_routes(out, expert_out, prepared.row_of_route, weights, in_triton)


def calls_kernels(in_triton: bool | None, device_type: str, dtype: torch.dtype | None = None) -> bool:
    """Whether Triton kernels move a call's tokens, or torch does.

    Args:
        in_triton: As requested; None: what the device runs.
        device_type: Device type of the call's tensors.
        dtype: Dtype of codes that the kernels make or restore, if any.

    Raises:
        ArgumentError: Triton was requested on a device that it does not know.
    """
    if in_triton is None:
        return _device_runs_kernels(device_type, is_float8=dtype is not None and dtype.is_floating_point)
    if in_triton:
        # Triton's own error does not say where the request came from.
        if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ArgumentError("in_triton=True needs a GPU that Triton knows, got tokens on cpu; pass None")
        if not _has_triton():
            raise ArgumentError("in_triton=True needs Triton, got a Python without it; install triton or pass None")
    return in_triton


_RULE: Final = PlatformRule("cuda:sm80+")
_FLOAT8_RULE: Final = PlatformRule("cuda:sm89+")
_TRITON: Final = Version("3.6")


def runs_kernels(platform: Platform) -> bool:
    """Whether Triton kernels move tokens on a platform that has Triton.

    Elsewhere torch does: Triton does not support older GPUs, and these kernels have not been run on AMD's.
    """
    return _RULE.matches(platform)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _device_runs_kernels(device_type: str, is_float8: bool = False) -> bool:
    # A CPU would have to interpret them, and `meta` runs nothing.
    if device_type != "cuda":
        return False
    platform = probe_platform()
    try:
        # The oldest version that the `triton` backend takes; 0 where there is none.
        has_triton = Version(platform.versions.get("triton", "0")) >= _TRITON
    except InvalidVersion:
        has_triton = False
    # Triton converts to 8-bit floats only where the hardware does.
    return has_triton and runs_kernels(platform) and (not is_float8 or _FLOAT8_RULE.matches(platform))

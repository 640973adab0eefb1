"""No communication, tokens grouped by expert: [E,max_T,H] and the number of valid rows."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Final

import torch
from packaging.specifiers import SpecifierSet

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
        """Takes Triton kernels, on any device that Triton knows, or torch; None: what the call's device runs.

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

        (num_tokens, hidden_size), num_local = hidden_states.shape, problem.num_local_experts
        local = local_expert_ids(topk_ids, num_local, expert_map)
        # Unmapped routes go to one expert more, whose rows are dropped.
        expert = torch.where(local >= 0, local, num_local)
        is_routed = torch.zeros((num_tokens, num_local + 1), dtype=torch.int32, device=local.device)
        place = is_routed.scatter_(1, expert, 1).cumsum(0) - 1  # [T,E+1], each token counts itself
        row = torch.where(local >= 0, expert * num_tokens + place.gather(1, expert), num_local * num_tokens)
        rows = hidden_states.new_empty(num_local * num_tokens + 1, hidden_size)
        if problem.apply_router_weight_on_input:
            # The experts do not see routes in this format, so the scaling happens here.
            rows[row] = (hidden_states.unsqueeze(1) * topk_weights.unsqueeze(2)).to(rows.dtype)
        else:
            rows[row] = hidden_states.unsqueeze(1).expand(*row.shape, hidden_size)
        of_experts = rows[:-1].view(num_local, num_tokens, hidden_size)
        counts = is_routed[:, :-1].sum(0, dtype=torch.int32)
        inputs = ExpertInputs(of_experts, topk_weights, topk_ids, counts, expert_map)
        return Prepared(inputs, num_tokens, torch.where(local >= 0, row, -1))

    def finalize(self, out: torch.Tensor, expert_out: torch.Tensor, prepared: Prepared, problem: MoEProblem) -> None:
        assert prepared.row_of_route is not None
        weights = None if problem.apply_router_weight_on_input else prepared.inputs.topk_weights
        in_triton = calls_kernels(self._in_triton, expert_out.device.type)
        sum_routes(out, expert_out, prepared.row_of_route, weights, in_triton)


def calls_kernels(in_triton: bool | None, device_type: str, dtype: torch.dtype | None = None) -> bool:
    """Whether Triton kernels move a call's tokens, or torch does; None: what the device runs for that dtype.

    Raises ArgumentError if Triton was requested on a device that it does not know.
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
_TRITON: Final = SpecifierSet(">=3.6")
"""The versions that the `triton` backend takes."""


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
    has_triton = _TRITON.contains(platform.versions.get("triton", "0"), prereleases=True)
    # Triton converts to 8-bit floats only where the hardware does.
    return has_triton and runs_kernels(platform) and (not is_float8 or _FLOAT8_RULE.matches(platform))

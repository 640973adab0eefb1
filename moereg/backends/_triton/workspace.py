"""Sizes of a call, as far as the host knows them: of the plans in front of a workspace, and of an expert's rows."""

from __future__ import annotations

from moereg.kernels.gemm.config import MIN_BLOCK_M
from moereg.kernels.rows.block_map import batch_workspace_numel
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.sizes import WORKSPACE_ALIGNMENT
from moereg.layouts import round_up
from moereg.problem import MoEProblem


def numel_of_words(problem: MoEProblem, num_words: int) -> int:
    """Elements of the problem's dtype that hold so many 32-bit words, up to the next piece."""
    return round_up(4 * num_words, WORKSPACE_ALIGNMENT) // problem.torch_dtype.itemsize


def route_plan_numel(problem: MoEProblem, num_tokens: int) -> int:
    """Elements of the problem's dtype that hold the plan of sorted routes of any shipped configuration."""
    words = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_BLOCK_M)
    return numel_of_words(problem, words)


def batch_plan_numel(problem: MoEProblem, max_tokens: int) -> int:
    """Elements of the problem's dtype that hold the tile plan of the batched format of any shipped configuration."""
    return numel_of_words(problem, batch_workspace_numel(problem.num_local_experts, max_tokens, MIN_BLOCK_M))


def batched_rows_per_expert(problem: MoEProblem, max_tokens: int) -> float:
    """Rows an expert in the batched format, as far as the host knows: only the device knows the counts.

    Sizes say as much as max_T does: moereg's own prepare makes it the number of tokens, as does a dispatch that has to
    have room for every token at one expert, and then this is the average.
    """
    return max_tokens * problem.top_k / problem.num_experts

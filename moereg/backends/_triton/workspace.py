"""How large the plans are that the `triton` backend keeps in front of a workspace."""

from __future__ import annotations

from moereg.kernels.gemm.config import MIN_BLOCK_M
from moereg.kernels.rows.block_map import batch_workspace_numel
from moereg.kernels.rows.sort import route_workspace_numel
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

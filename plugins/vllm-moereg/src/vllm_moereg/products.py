"""Both products of a layer apart, with a row for each route in the routes' order, for adapters to add to each."""

from __future__ import annotations

import torch

from moereg import MoEKernel
from moereg.kernels.gemm import rules
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.gemm.grouped import down_gemm
from moereg.kernels.launch import device as limits
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.rows.sort import sort_routes


class RouteProducts:
    """The products of one call, whose routes are sorted once; those of no local expert give zeros.

    Args:
        kernel: Of `triton`, with canonical weights of 16 or 32 bits.
        topk_ids: [T,K] int32, contiguous, T at least 1.
    """

    def __init__(self, kernel: MoEKernel, topk_ids: torch.Tensor) -> None:
        device, num_routes, problem = topk_ids.device, topk_ids.numel(), kernel.problem
        # As for two tokens at least, since one takes kernels that store no rows.
        sizes = max(len(topk_ids), 2), num_routes / problem.num_experts, problem.torch_dtype.itemsize
        least = limits.least_block_m(device)
        configs = rules.select_config(*sizes, limits.max_shared_bytes(device), least_block_m=least)
        assert isinstance(configs, GemmPair)
        self._configs, self._weights, self._shape = configs, kernel.weights, topk_ids.shape
        counts, block_m = (problem.num_experts, problem.num_local_experts), configs.gate_up.block_m
        numel = route_workspace_numel(*topk_ids.shape, problem.num_local_experts, block_m)
        workspace = torch.empty(numel, dtype=torch.int32, device=device)
        self._plan = sort_routes(topk_ids, kernel.expert_map, *counts, block_m, workspace)
        # Behind the last valid route nothing was written.
        self._routes = self._plan.sorted_routes.clamp(0, num_routes - 1)

    def gate_up(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns `hidden_states[token] @ w13[expert].T + bias`, [T,K,2I]."""
        return self._product("w13", hidden_states[self._routes // self._shape[1]], self._configs.gate_up, None)

    def down(self, rows: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        """Returns `(rows[route] @ w2[expert].T + bias) * topk_weight`, [T,K,H], from rows [T*K,I]."""
        return self._product("w2", rows[self._routes], self._configs.down, topk_weights)

    def _product(
        self, name: str, rows: torch.Tensor, config: GroupedGemmConfig, factors: torch.Tensor | None
    ) -> torch.Tensor:
        matrices, bias = self._weights[name], self._weights.get(f"{name}_bias")
        out = rows.new_zeros((len(rows), matrices.shape[1]))
        down_gemm(out, rows, matrices, self._plan, config, bias=bias, topk_weights=factors)
        return out.view(*self._shape, -1)

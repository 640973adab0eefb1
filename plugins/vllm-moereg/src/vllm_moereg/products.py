"""Both products of a layer apart, with a row for each route in the routes' order, for hosts that add to each."""

from __future__ import annotations

import torch

from moereg.kernels.gemm import rules
from moereg.kernels.gemm.config import GemmPair, GroupedGemmConfig
from moereg.kernels.gemm.grouped import down_gemm
from moereg.kernels.launch import device as limits
from moereg.kernels.rows.plan import route_workspace_numel
from moereg.kernels.rows.sort import sort_routes


class RouteProducts:
    """The products of one call, whose routes are sorted once; sizes as in `grouped`, P rows of an expert's w13.

    Args:
        topk_ids, expert_map, num_experts, num_local_experts: As in `sort_routes`.
        element_bytes: Of an activation, 2 or 4.
    """

    def __init__(
        self,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        num_experts: int,
        num_local_experts: int,
        element_bytes: int,
    ) -> None:
        device, self._shape, num_routes = topk_ids.device, topk_ids.shape, topk_ids.numel()
        shared_bytes, least = limits.max_shared_bytes(device), limits.least_block_m(device)
        # As for two tokens at least, since one takes kernels that store no rows.
        sizes = max(len(topk_ids), 2), num_routes / num_experts, element_bytes
        configs = rules.select_config(*sizes, shared_bytes, least_block_m=least)
        assert isinstance(configs, GemmPair)
        block_m, self._configs = configs.gate_up.block_m, configs
        numel = route_workspace_numel(*topk_ids.shape, num_local_experts, block_m)
        workspace = torch.empty(numel, dtype=torch.int32, device=device)
        self._plan = sort_routes(topk_ids, expert_map, num_experts, num_local_experts, block_m, workspace)
        # Behind the last valid route nothing was written.
        self._routes = self._plan.sorted_routes.clamp(0, num_routes - 1)

    def gate_up(self, hidden_states: torch.Tensor, w13: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns `hidden_states[token] @ w13[expert].T + bias`, [T, K, P]; zero for routes of no local expert."""
        return self._product(hidden_states[self._routes // self._shape[1]], w13, self._configs.gate_up, bias, None)

    def down(
        self, rows: torch.Tensor, w2: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Returns `(rows[route] @ w2[expert].T + bias) * weight`, [T, K, H], from [N, I] and [T, K]; zero likewise."""
        return self._product(rows[self._routes], w2, self._configs.down, bias, weights)

    def _product(
        self, rows: torch.Tensor, matrices: torch.Tensor, config: GroupedGemmConfig, *more: torch.Tensor | None
    ) -> torch.Tensor:
        out = rows.new_zeros((len(rows), matrices.shape[1]))
        down_gemm(out, rows, matrices, self._plan, config, bias=more[0], topk_weights=more[1])
        return out.view(*self._shape, -1)

"""moereg's kernel as experts of vLLM's modular kernel, for layers whose tokens vLLM moves between ranks."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moereg import MoEKernel
from vllm_moereg.contract import ADAPTER_PLAN

__all__ = ["MoeregExperts"]


class MoeregExperts(LoRAExpertsMixin, modular_kernel.FusedMoEExpertsModular):
    """Experts that hold a kernel of moereg, which has the weights; vLLM's oracles never choose it.

    Where vLLM has set the state of adapters, their parts are added to each of the layer's products.

    Args:
        moe_config, quant_config: As vLLM's base class takes them.
        kernel: The layer's.
    """

    def __init__(self, moe_config: Any, quant_config: Any, kernel: MoEKernel) -> None:
        super().__init__(moe_config, quant_config)
        self.kernel = kernel

    @property
    def expects_unquantized_inputs(self) -> bool:
        """The kernel quantizes activations as its scheme says."""
        return True

    @staticmethod
    def activation_format() -> Any:
        """[T,H], in the tokens' order."""
        return modular_kernel.FusedMoEActivationFormat.Standard

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        """E, M, N, K and top-k; the base class reads them from weights, which are empty here."""
        problem = self.kernel.problem
        rows = problem.activation.num_halves * problem.intermediate_size
        return problem.num_local_experts, a1.shape[0], rows, problem.hidden_size, topk_ids.shape[1]

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: Any,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No scratch memory, since moereg has its own, and the output [T,H]."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> Any:
        """Nothing is left to weight or sum."""
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes this rank's weighted sums into `output` [T,H]."""
        if apply_router_weight_on_input:
            topk_weights = torch.ones_like(topk_weights)  # Applied before the tokens moved.
        call = hidden_states.contiguous(), topk_weights.float(), topk_ids
        if self._lora_context is None:
            self.kernel(*call, out=output)
        else:
            self._apply_with_adapters(output, *call, expert_map, activation)

    def _apply_with_adapters(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        activation: Any,
    ) -> None:
        from vllm_moereg.products import RouteProducts

        weights, products = self.kernel.weights, RouteProducts(self.kernel, topk_ids.to(torch.int32).contiguous())
        more = {"w1": weights["w13"], "w2": weights["w2"], "topk_weights": topk_weights}
        more |= {"num_tokens": len(topk_ids), "top_k_num": topk_ids.shape[1]}
        gate_up, routing = products.gate_up(hidden_states), {"topk_ids": topk_ids, "expert_map": expert_map}  # [T,K,2I]
        plan = self.apply_w13_lora(self._lora_context, y=gate_up, x=hidden_states, **routing, **more)
        rows = gate_up.new_empty((topk_ids.numel(), self.kernel.problem.intermediate_size))
        self.activation(activation, rows, gate_up.flatten(0, 1))
        routes = products.down(rows, topk_weights)  # [T,K,H]
        more |= zip(ADAPTER_PLAN, plan, strict=True)
        self.apply_w2_lora(self._lora_context, y=routes, x=rows, **more)
        torch.sum(routes, 1, out=output)

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return True

    @staticmethod
    def _supports_activation(activation: Any) -> bool:
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return True

"""`vllm_triton`: vLLM's Triton MoE kernel with the configurations that vLLM tuned."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NamedTuple

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    MoEProblem,
    PermutedWeights,
    Platform,
    register_moe_backend,
)
from moereg_vllm._activation import activate
from moereg_vllm._claims import FACTS, REQUIRES, sorting_reasons
from moereg_vllm._library import fused_moe, vllm_module
from moereg_vllm._routes import expert_table, mapped_routes

__all__ = ["VllmTritonExperts", "VllmTritonQuantizedExperts", "moereg_api"]

moereg_api = "1"

_BLOCK: Final = 128
_NO_BIAS: Final = dataclasses.replace(FACTS, bias=False)


class _Rows(NamedTuple):
    """Rows that a matmul reads: values, or codes with their scales."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


# Below moereg's own Triton kernels, and below the kernels for one machine: it is here to compare with and to ask for.
@register_moe_backend(
    name="vllm_triton", priority=50, quant_schemes=("unquantized",), platforms=("cuda:sm80+",), requires=REQUIRES
)
class VllmTritonExperts(Experts):
    """Standard format: two launches of one grouped GEMM with an activation between them, and a sum over choices."""

    facts = FACTS
    layouts = ("canonical",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """The number of experts."""
        return sorting_reasons(problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Views, since vLLM reads the canonical order."""
        shared = {"expert_table": expert_table(problem, weights.w13.device)}
        return PermutedWeights("canonical", weights.tensors(), shared)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Outputs of both matmuls, one after the other in one place, and the intermediate."""
        rows = num_tokens * problem.top_k
        width = max(problem.activation.num_halves * problem.intermediate_size, problem.hidden_size)
        return (rows, width), (rows, problem.intermediate_size)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """As vLLM's layer calls its kernels."""
        problem = self.problem
        routes = mapped_routes(inputs, problem, weights["expert_table"])
        w13, w2 = weights["w13"], weights["w2"]
        num_tokens, top_k = routes.topk_ids.shape
        rows, columns = num_tokens * top_k, w13.shape[1]
        kernels = fused_moe("fused_moe")
        config = kernels.try_get_optimal_moe_config(
            w13.shape, w2.shape, top_k, self._config_dtype(), num_tokens, block_shape=self._block_shape()
        )
        if routes.expert_map is None and rows * 4 <= problem.num_experts:
            # Few routes: a block each, without a sort.
            block_rows = torch.full((1,), rows * config["BLOCK_SIZE_M"], dtype=torch.int32, device=out.device)
            blocks = (None, routes.topk_ids.view(-1), block_rows)
        else:
            blocks = fused_moe("moe_align_block_size").moe_align_block_size(
                routes.topk_ids,
                config["BLOCK_SIZE_M"],
                problem.num_local_experts if routes.expert_map is None else routes.num_experts,
                routes.expert_map,
                ignore_invalid_experts=True,
            )
        flat = workspace13.view(-1)
        gemm1, gemm2 = flat[: rows * columns].view(num_tokens, top_k, columns), flat[: rows * out.shape[1]]
        gemm2 = gemm2.view(num_tokens, top_k, out.shape[1])
        intermediate = workspace2.view(-1)[: rows * problem.intermediate_size].view(rows, -1)

        def multiply(matrix: str, x: _Rows, result: torch.Tensor, applies_weights: bool, choices: int) -> None:
            kernels.invoke_fused_moe_triton_kernel(
                x.values,
                weights[matrix],
                result,
                x.scales,
                weights.get(f"{matrix}_scale"),
                routes.topk_weights,
                *blocks,
                applies_weights,
                choices,
                config,
                compute_type=_triton_dtype(out.dtype),
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                block_shape=self._block_shape(),
                B_bias=weights.get(f"{matrix}_bias"),
                **self._flags(),
            )

        multiply("w13", self._quantized(routes.hidden_states), gemm1, False, top_k)
        activate(problem, intermediate, gemm1.view(rows, columns))
        if routes.expert_map is not None:
            gemm2.zero_()  # Routes to other ranks are not computed, and their rows are summed.
        multiply("w2", self._quantized(intermediate), gemm2, True, 1)
        vllm_module("_custom_ops").moe_sum(gemm2, out)

    def _config_dtype(self) -> str | None:
        """Name of a dtype in vLLM's tuned configurations: 8-bit floats have their own."""
        return None

    def _block_shape(self) -> list[int] | None:
        return None

    def _flags(self) -> dict[str, bool]:
        """How vLLM's kernel reads codes and scales."""
        return {"use_fp8_w8a8": False, "use_int8_w8a8": False, "per_channel_quant": False}

    def _quantized(self, x: torch.Tensor) -> _Rows:
        return _Rows(x)


# Per-tensor activations are left out: vLLM's scale for them spans the rows of routes that have no local expert.
@register_moe_backend(
    name="vllm_triton",
    priority=51,
    quant_schemes=("fp8_channel_token",),
    platforms=("cuda:sm89+",),
    requires=REQUIRES,
    requires_multiple={"hidden_size": 16, "intermediate_size": 16},
)
@register_moe_backend(
    name="vllm_triton",
    priority=51,
    quant_schemes=("fp8_block128",),
    platforms=("cuda:sm89+",),
    requires=REQUIRES,
    requires_multiple={"hidden_size": 128, "intermediate_size": 128},
)
@register_moe_backend(
    name="vllm_triton",
    priority=51,
    quant_schemes=("int8_w8a8",),
    platforms=("cuda:sm80+",),
    requires=REQUIRES,
    requires_multiple={"hidden_size": 16, "intermediate_size": 16},
)
class VllmTritonQuantizedExperts(VllmTritonExperts):
    """8-bit weights and activations: both matmuls read codes that a launch before them made."""

    facts = _NO_BIAS

    def _is_integer(self) -> bool:
        return self._weight_dtype() == "int8"

    def _weight_dtype(self) -> str:
        assert self.computes.weight is not None
        return self.computes.weight.dtype

    def _config_dtype(self) -> str | None:
        return None if self._is_integer() else "fp8_w8a8"

    def _block_shape(self) -> list[int] | None:
        assert self.computes.weight is not None
        return [_BLOCK, _BLOCK] if self.computes.weight.group == (_BLOCK, _BLOCK) else None

    def _flags(self) -> dict[str, bool]:
        is_integer = self._is_integer()
        per_row = self._block_shape() is None
        return {"use_fp8_w8a8": not is_integer, "use_int8_w8a8": is_integer, "per_channel_quant": per_row}

    def _quantized(self, x: torch.Tensor) -> _Rows:
        if self._block_shape() is not None:
            quant = vllm_module("model_executor.layers.quantization.utils.fp8_utils")
            # vLLM rounds scales up to powers of two on Hopper, for DeepGEMM's sake. The scheme does not.
            return _Rows(*quant.per_token_group_quant_fp8(x, _BLOCK, use_ue8m0=False))
        if self._is_integer():
            return _Rows(*vllm_module("model_executor.layers.quantization.utils.int8_utils").per_token_quant_int8(x))
        return _Rows(*vllm_module("_custom_ops").scaled_fp8_quant(x, use_per_token_if_dynamic=True))


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]

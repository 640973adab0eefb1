"""`marlin`: vLLM's Marlin kernels, which multiply 4-bit and 8-bit weights by 16-bit activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    MoEProblem,
    PermutedWeights,
    Platform,
    QuantFormat,
    QuantScheme,
    register_moe_backend,
    round_up,
)
from moereg_vllm import _marlin_layout as layout
from moereg_vllm._activation import activate
from moereg_vllm._claims import FACTS, REQUIRES, sorting_reasons
from moereg_vllm._library import fused_moe, vllm_module
from moereg_vllm._routes import add_routed_bias, expert_table, mapped_routes, sum_routes

__all__ = ["FP8_SCHEMES", "MarlinExperts", "moereg_api"]

moereg_api = "1"

_E4M3: Final = "float8_e4m3fn"

FP8_SCHEMES: Final = (
    QuantScheme("fp8_tensor_w8a16", QuantFormat(_E4M3, (-1, -1))),
    QuantScheme("fp8_channel_w8a16", QuantFormat(_E4M3, (1, -1))),
)
"""Weights of 8-bit floats with 16-bit activations: what Marlin computes for checkpoints of fp8."""

FP8_BLOCK_SCHEME: Final = QuantScheme("fp8_block128_w8a16", QuantFormat(_E4M3, (128, 128)))

_GPUS: Final = ("cuda:sm80+",)


# Below moereg's own kernels: on an H200, moereg's took 0.66 of Marlin's time in the mean of int4_w4a16_g128.
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("int4_w4a16_gall", "int4_w4a16_gall_zp", "int8_w8a16"),
    platforms=_GPUS,
    requires=REQUIRES,
)
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("int4_w4a16_g32", "int4_w4a16_g32_zp"),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 64, "intermediate_size": 32},
)
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("int4_w4a16_g64", "int4_w4a16_g64_zp"),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 64, "intermediate_size": 64},
)
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("int4_w4a16_g128", "int4_w4a16_g128_zp"),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 128, "intermediate_size": 128},
)
@register_moe_backend(name="marlin", priority=44, quant_schemes=FP8_SCHEMES, platforms=_GPUS, requires=REQUIRES)
@register_moe_backend(
    name="marlin",
    priority=44,
    quant_schemes=(FP8_BLOCK_SCHEME,),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 128, "intermediate_size": 8},
)
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("nvfp4_w4a16",),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 64, "intermediate_size": 16},
)
# float16 cannot hold most scales that are powers of two, and vLLM has no kernel for it.
@register_moe_backend(
    name="marlin",
    priority=45,
    quant_schemes=("mxfp4_w4a16",),
    platforms=_GPUS,
    requires=REQUIRES,
    requires_multiple={"hidden_size": 64, "intermediate_size": 32},
    dtypes=("bfloat16",),
)
class MarlinExperts(Experts):
    """Standard format: two grouped GEMMs on repacked codes with an activation between them, and a sum over choices.

    Scales become 16-bit numbers, as they are in most checkpoints. The intermediate is padded to whole tiles.
    """

    facts = dataclasses.replace(FACTS, requires_multiple={"hidden_size": 64, "intermediate_size": 8})
    layouts = ("vllm_marlin",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """The number of experts."""
        return sorting_reasons(problem)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Repacks expert by expert with vLLM's kernel.

        Raises:
            ValueError: Gate and up have different global scales.
        """
        tensors: dict[str, torch.Tensor] = {}
        for matrix in ("w13", "w2"):
            for name, permute in self._parts(matrix, weights).items():
                tensors[name] = _stacked(permute, weights.num_experts)
        return PermutedWeights(self.layouts[0], tensors, {"expert_table": expert_table(problem, weights.w13.device)})

    def _parts(self, matrix: str, weights: ExpertWeights) -> dict[str, Callable[[int], torch.Tensor]]:
        """How each of Marlin's tensors of a matrix is made, for one expert."""
        fmt, dtype = self._format, self.problem.torch_dtype
        given = weights.tensors()
        weight, scale = given[matrix], given[f"{matrix}_scale"]
        rows = weight.shape[1]

        def grouped(expert: int) -> torch.Tensor:
            halves = self.problem.activation.num_halves if matrix == "w13" and fmt.group[0] > 1 else 1
            scales = [
                layout.group_scales(half, rows // halves, fmt.group[0] if fmt.group[0] > 0 else None)
                for half in (scale[expert].chunk(halves) if halves > 1 else (scale[expert],))
            ]
            return self._padded_groups(matrix, torch.cat(scales, dim=1))

        parts: dict[str, Callable[[int], torch.Tensor]] = {
            matrix: lambda expert: _repacked(self._padded_codes(matrix, weight[expert]), fmt.bits)
        }
        if fmt.dtype == "float4_e2m1fn" and fmt.global_scale:
            global_scale = _one_of_halves(given[f"{matrix}_scale_2"])
            raise_range = dtype == torch.bfloat16
            # Codes are restored with the exponent's bias off by 14 or 126, and scales by 7 the other way.
            bias = 2.0 ** ((126 if raise_range else 14) - 7)
            parts[f"{matrix}_scale"] = lambda expert: layout.marlin_e4m3_scales(grouped(expert), raise_range)[0]
            parts[f"{matrix}_global_scale"] = lambda expert: (
                global_scale[expert] * bias / layout.marlin_e4m3_scales(grouped(expert), raise_range)[1]
            )
        elif fmt.dtype == "float4_e2m1fn":
            parts[f"{matrix}_scale"] = lambda expert: layout.marlin_e8m0_scales(grouped(expert))
        elif fmt.dtype == _E4M3:
            # Likewise off by 8 or 120, which the scales make up for.
            bias = 2.0**120 if dtype == torch.bfloat16 else 2.0**8
            parts[f"{matrix}_scale"] = lambda expert: layout.marlin_scales((grouped(expert) * bias).to(dtype))
        else:
            parts[f"{matrix}_scale"] = lambda expert: layout.marlin_scales(grouped(expert).to(dtype))
        if (zero_point := given.get(f"{matrix}_zero_point")) is not None:
            parts[f"{matrix}_zero_point"] = lambda expert: layout.marlin_zero_points(
                self._padded_groups(matrix, layout.group_zero_points(zero_point[expert], scale.shape[-1]))
            )
        if (rows_bias := given.get(f"{matrix}_bias")) is not None:
            is_plain = matrix == "w2" and self._adds_bias_last
            parts[f"{matrix}_bias"] = lambda expert: (
                rows_bias[expert].to(dtype)
                if is_plain
                else layout.marlin_bias(
                    self._padded_groups(matrix, rows_bias[expert : expert + 1].to(dtype), is_bias=True)[0]
                )
            )
        return parts

    def _padded_codes(self, matrix: str, weight: torch.Tensor) -> torch.Tensor:
        """Codes [N,K] of one expert with the intermediate padded by zeros."""
        missing = _padded_intermediate(self.problem) - self.problem.intermediate_size
        if not missing:
            return weight
        data = weight.view(torch.uint8)
        if matrix == "w2":
            return torch.nn.functional.pad(data, (0, missing * self._format.bits // 8)).view(weight.dtype)
        halves = data.view(self.problem.activation.num_halves, -1, data.shape[1])
        return torch.nn.functional.pad(halves, (0, 0, 0, missing)).flatten(0, 1).view(weight.dtype)

    def _padded_groups(self, matrix: str, values: torch.Tensor, is_bias: bool = False) -> torch.Tensor:
        """Scales, zero points or a bias [G,N] of one expert with the intermediate padded by zeros."""
        intermediate, padded = self.problem.intermediate_size, _padded_intermediate(self.problem)
        if padded == intermediate:
            return values
        data = values.view(torch.uint8) if values.element_size() == 1 else values
        if matrix == "w13":
            halves = data.view(len(data), self.problem.activation.num_halves, intermediate)
            data = torch.nn.functional.pad(halves, (0, padded - intermediate)).flatten(1)
        elif (group := self._format.group[1]) > 0 and not is_bias:
            data = torch.nn.functional.pad(data, (0, 0, 0, padded // group - len(data)))
        return data.view(values.dtype)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Outputs of both matmuls, one after the other in one place, and the intermediate."""
        rows = num_tokens * problem.top_k
        intermediate = _padded_intermediate(problem)
        width = max(problem.activation.num_halves * intermediate, problem.hidden_size)
        return (rows * width,), (rows, intermediate)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Calls what vLLM's layer calls, with moereg's activation between the matmuls."""
        problem = self.problem
        routes = mapped_routes(inputs, problem, weights["expert_table"])
        names = fused_moe("activation").MoEActivation
        last_bias = weights.get("w2_bias") if self._adds_bias_last else None

        def activation(_: object, result: torch.Tensor, gemm1: torch.Tensor, **__: object) -> None:
            activate(problem, result, gemm1)

        def sum_choices(rows: torch.Tensor, result: torch.Tensor, _ids: torch.Tensor, _map: Any) -> None:
            sum_routes(result, rows, routes, problem.num_local_experts)
            if last_bias is not None:
                add_routed_bias(result, last_bias, routes)

        fused_moe("experts.marlin_moe").fused_marlin_moe(
            hidden_states=routes.hidden_states,
            w1=weights["w13"],
            w2=weights["w2"],
            bias1=weights.get("w13_bias"),
            bias2=None if last_bias is not None else weights.get("w2_bias"),
            w1_scale=weights["w13_scale"],
            w2_scale=weights["w2_scale"],
            # The kernel would round the weights and each product to 16 bits; the sum multiplies in fp32 instead.
            topk_weights=torch.ones_like(routes.topk_weights),
            topk_ids=routes.topk_ids,
            quant_type_id=self._scalar_type().id,
            global_num_experts=routes.num_experts,
            # Says how wide the intermediate is; the function below is what runs.
            activation=names.SILU if problem.activation.gated else names.RELU2_NO_MUL,
            activation_func=activation,
            moe_sum=sum_choices,
            expert_map=routes.expert_map,
            global_scale1=weights.get("w13_global_scale"),
            global_scale2=weights.get("w2_global_scale"),
            w1_zeros=weights.get("w13_zero_point"),
            w2_zeros=weights.get("w2_zero_point"),
            intermediate_cache13=workspace13,
            intermediate_cache2=workspace2,
            output=out,
        )

    @property
    def _adds_bias_last(self) -> bool:
        """Whether w2_bias is added here.

        vLLM 0.26 multiplies it by the global scale where the kernel applies routing weights.
        """
        return self._format.global_scale

    @property
    def _format(self) -> QuantFormat:
        assert self.computes.weight is not None
        return self.computes.weight

    def _scalar_type(self) -> Any:
        types = vllm_module("scalar_type").scalar_types
        if self._format.dtype == "uint4":
            return types.uint4b8 if self._format.symmetric else types.uint4
        named = {"int8": types.uint8b128, _E4M3: types.float8_e4m3fn, "float4_e2m1fn": types.float4_e2m1f}
        return named[self._format.dtype]


def _stacked(permute: Callable[[int], torch.Tensor], num_experts: int) -> torch.Tensor:
    first = permute(0)
    result = first.new_empty((num_experts, *first.shape))
    for expert in range(num_experts):
        result[expert] = permute(expert) if expert else first
    return result


def _padded_intermediate(problem: MoEProblem) -> int:
    """Marlin's tiles take multiples of 128 x 64 or 64 x 128: the intermediate has to be what hidden_size is not."""
    group = problem.quant.weight.group[1] if problem.quant.weight is not None else 1
    tile = 64 if problem.hidden_size % 128 == 0 else 128
    return round_up(problem.intermediate_size, max(tile, group))


def _repacked(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """One expert's codes [N,K] in Marlin's tiles, [K/16, N * 2 or N * 4] int32."""
    no_order = torch.empty(0, dtype=torch.int32, device=weight.device)
    rows, columns = weight.shape[0], weight.shape[1] * 8 // bits
    ops = vllm_module("_custom_ops")
    repacked: torch.Tensor = ops.gptq_marlin_repack(layout.packed_rows(weight), no_order, columns, rows, bits)
    return repacked


def _one_of_halves(global_scale: torch.Tensor) -> torch.Tensor:
    """[E] of [E], or of [E,2] where gate and up agree."""
    if global_scale.dim() == 1:
        return global_scale
    if not torch.equal(global_scale[:, 0], global_scale[:, 1]):
        raise ValueError(
            "marlin requires one global scale for gate and up of an expert, got w13_scale_2 [E,2] where they differ; "
            "deny it for this layer"
        )
    return global_scale[:, 0]

"""TensorRT-LLM's generated kernels through FlashInfer: sm100 and its family. No such machine has run this yet.

There is an entry point for each kind of weights. The kernels' own routing only sorts, since routes are given.

FlashInfer downloads the GEMMs as binaries at first use, some MiB per kind of weights.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch

from moereg.backends._flashinfer import layouts
from moereg.backends._flashinfer.calls import LocalRoutes, first_call
from moereg.backends._flashinfer.layouts import one_for_all, one_scale
from moereg.backends._loaded import Call
from moereg.backends._workspace import Piece
from moereg.spec.quant_schemes import QuantFormat
from moereg.weights.layouts import aligned, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_COMPILING_SECONDS: Final = 300.0
"""A guess: nvcc compiles the launcher, and FlashInfer downloads kernels."""

_SCALARS: Final = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
_KEPT: Final = "launcher and downloads are kept in FlashInfer's cache"


class TrtLlm(LocalRoutes):
    """One entry point: prepares routes, quantizes tokens if it wants that, and calls it."""

    multiple: ClassVar[int] = 1
    """The intermediate is padded to multiples of this."""

    def run(self, call: Call) -> None:
        problem, weights = self.problem, call.weights
        scratch = self.place_routes(call)
        if self.coded is None:
            tokens = {"hidden_states": aligned(call.inputs.hidden_states)}
        else:
            tokens = self.coded_arguments(scratch, *self.quantize_tokens(call, scratch))
        entry, options = self._call
        with first_call("flashinfer_trtllm", problem, _COMPILING_SECONDS, _KEPT, call.out) as out:
            entry(
                topk_ids=self.routes(scratch),
                **tokens,
                **self.weight_arguments(weights),
                num_experts=problem.num_experts,
                top_k=problem.top_k,
                n_group=None,
                topk_group=None,
                intermediate_size=self.intermediate,
                local_expert_offset=0,
                local_num_experts=problem.num_local_experts,
                routed_scaling_factor=None,
                do_finalize=True,
                output=out,
                **options,
            )

    @functools.cached_property
    def _call(self) -> tuple[Any, dict[str, Any]]:
        return self.entry(), self.options()

    @abc.abstractmethod
    def entry(self) -> Any:
        """Imports FlashInfer's function."""

    def routes(self, scratch: Mapping[str, torch.Tensor]) -> Any:
        """Ids and weights, or both packed in one tensor."""
        return scratch["topk_ids"], scratch["topk_weights"]

    def coded_arguments(
        self, scratch: Mapping[str, torch.Tensor], codes: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Quantized tokens and scales as arguments of the entry point."""
        return {"hidden_states": codes, "hidden_states_scale": scales}

    @abc.abstractmethod
    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        """Permuted weights as arguments of the entry point."""

    def options(self) -> dict[str, Any]:
        """Further arguments."""
        from flashinfer.tllm_enums import ActivationType, RoutingMethodType

        activation = ActivationType.Swiglu if self.problem.activation.gated else ActivationType.Relu2
        # Routes are given. This routing method is compiled for the most experts and choices.
        return {"activation_type": activation.value, "routing_method_type": RoutingMethodType.Renormalize.value}

    @property
    def intermediate(self) -> int:
        """I as the kernels see it."""
        return round_up(self.problem.intermediate_size, self.multiple)

    @property
    def halves(self) -> int:
        """2 if gated, else 1."""
        return self.problem.activation.num_halves

    def scalars(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """As `activation_scalars`."""
        return layouts.activation_scalars(weights, self.problem.activation, *_SCALARS)

    def shuffled(self, tensor: torch.Tensor, matrix: str, blocks: bool = False) -> torch.Tensor:
        """Permutes rows of w13 or w2, of scales or of biases [E, N, ...] into the kernels' order, expert by expert.

        With `blocks`, splits rows into column blocks of 128 bytes.
        """
        num_rows = tensor.shape[1]
        order = layouts.gemm1_rows(num_rows, self.halves) if matrix == "w13" else layouts.shuffled_rows(num_rows)
        rows = order.to(tensor.device)

        def permute(expert: torch.Tensor) -> torch.Tensor:
            data = expert.view(torch.uint8) if expert.element_size() == 1 else expert
            data = data.index_select(0, rows)
            return layouts.blocks_of_columns(data) if blocks else data

        return layouts.each_expert(tensor, permute, tensor.dtype)

    def shuffled_scales(self, scale: torch.Tensor, matrix: str) -> torch.Tensor:
        """Scales [E, N, G] in their matrix's row order and blocks of 128 x 4; the shape stays."""
        shuffled = self.shuffled(scale, matrix)
        return layouts.each_expert(shuffled, layouts.swizzled_scales).view(scale.shape)


class Bfloat16(TrtLlm):
    """16-bit weights."""

    def entry(self) -> Any:
        from flashinfer.fused_moe import trtllm_bf16_routed_moe

        return trtllm_bf16_routed_moe

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """`w13` [E, H / 64, 2 * I, 64] and `w2` [E, I / 64, H, 64], rows shuffled, up and gate alternating."""
        tensors = weights.tensors("weight")
        matrices = {name: self.shuffled(tensors[name], name, blocks=True) for name in tensors}
        return PermutedWeights(self.layouts[0], {**matrices, **self.scalars(weights)})

    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        return {"gemm1_weights": weights["w13"], "gemm2_weights": weights["w2"], **_scalars(weights)}

    def options(self) -> dict[str, Any]:
        from flashinfer.tllm_enums import WeightLayout

        return {
            **super().options(),
            "use_shuffled_weight": True,
            "weight_layout": WeightLayout.BlockMajorK.value,
        }


class _Float8(TrtLlm):
    def entry(self) -> Any:
        from flashinfer.fused_moe import trtllm_fp8_block_scale_routed_moe

        return trtllm_fp8_block_scale_routed_moe

    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        return {"routing_bias": None, **_scaled(weights), **_scalars(weights)}

    def options(self) -> dict[str, Any]:
        from flashinfer.tllm_enums import WeightLayout

        return {**super().options(), "weight_layout": WeightLayout.MajorK.value}


class Float8Blocks(_Float8):
    """Scales of 128 x 128, as DeepSeek stores them."""

    multiple = 128

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Puts up rows and their scales first, and pads the intermediate to whole blocks."""
        tensors = {name: aligned(tensor) for name, tensor in weights.tensors("weight", "scale").items()}
        intermediate, halves, scale = self.intermediate, self.halves, tensors["w13_scale"]
        tensors["w13"] = layouts.arrange(tensors["w13"], intermediate, weights.hidden_size, halves)
        tensors["w2"] = layouts.arrange(tensors["w2"], weights.hidden_size, intermediate)
        tensors["w13_scale"] = layouts.arrange(scale, scale.shape[1] // halves, scale.shape[2], halves)
        return PermutedWeights(self.layouts[0], {**tensors, **self.scalars(weights)})

    def pieces(self, num_tokens: int) -> dict[str, Piece]:
        turned = Piece((self.problem.hidden_size // 128, num_tokens), torch.float32)
        return {**super().pieces(num_tokens), "turned_scales": turned}

    def coded_arguments(
        self, scratch: Mapping[str, torch.Tensor], codes: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        # Scales of a column group are contiguous.
        turned = scratch["turned_scales"].copy_(scales.T)
        return super().coded_arguments(scratch, codes, turned)

    def options(self) -> dict[str, Any]:
        from flashinfer.tllm_enums import Fp8QuantizationType

        kind = Fp8QuantizationType.DeepSeekFp8
        return {**super().options(), "use_shuffled_weight": False, "fp8_quantization_type": kind}


class Float8Groups(_Float8):
    """mxfp8: power-of-two scales per 32 columns."""

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Rows shuffled, up and gate alternating; scales as bytes, in blocks."""
        tensors = _shuffled_groups(self, weights)
        scales = {name: tensors[name].view(torch.uint8) for name in ("w13_scale", "w2_scale")}
        return PermutedWeights(self.layouts[0], {**tensors, **scales, **self.scalars(weights)})

    def options(self) -> dict[str, Any]:
        from flashinfer.tllm_enums import Fp8QuantizationType

        return {**super().options(), "use_shuffled_weight": True, "fp8_quantization_type": Fp8QuantizationType.MxFp8}


class Float8Tensor(TrtLlm):
    """8-bit floats with a scale per matrix or half, and static activation scales."""

    def entry(self) -> Any:
        from flashinfer.fused_moe import trtllm_fp8_per_tensor_scale_routed_moe

        return trtllm_fp8_per_tensor_scale_routed_moe

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Rows shuffled, up and gate alternating; scales combined as the kernels apply them, [E].

        Tokens are quantized before their experts are known, so the largest of the experts' scales is used.
        """
        tensors = weights.tensors()
        matrices = {name: self.shuffled(tensors[name], name) for name in ("w13", "w2")}
        scales = _output_scales(self, tensors["w13_scale"], tensors["w2_scale"], weights)
        return PermutedWeights(
            self.layouts[0], {**matrices, **scales}, {"a13_scale": one_for_all(weights, "a13_scale")}
        )

    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        return {
            "routing_bias": None,
            "gemm1_weights": weights["w13"],
            "gemm2_weights": weights["w2"],
            "output1_scales_scalar": weights["output1_scale"],
            "output1_scales_gate_scalar": weights["gate_scale"],
            "output2_scales_scalar": weights["output2_scale"],
        }

    def coded_arguments(
        self, scratch: Mapping[str, torch.Tensor], codes: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {"hidden_states": codes}

    def options(self) -> dict[str, Any]:
        return {**super().options(), "use_routing_scales_on_input": False}


class Float4(TrtLlm):
    """4-bit floats: mxfp4 with 16-bit or mxfp8 activations, or nvfp4 with static global scales."""

    def entry(self) -> Any:
        from flashinfer.fused_moe import trtllm_fp4_block_scale_routed_moe

        return trtllm_fp4_block_scale_routed_moe

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Rows shuffled, up and gate alternating; scales in blocks, biases fp32 in the rows' order.

        Raises:
            ValueError: nvfp4 without static activation scales, or with a clamp and different gate and up scales.
        """
        tensors = _shuffled_groups(self, weights)
        shared: dict[str, torch.Tensor] = {}
        for name, bias in weights.tensors("bias").items():
            tensors[name] = self.shuffled(bias.float().unsqueeze(2), name.removesuffix("_bias")).squeeze(2)
        if self._weight.global_scale:
            assert weights.w13_scale_2 is not None and weights.w2_scale_2 is not None
            tensors |= _output_scales(self, weights.w13_scale_2, weights.w2_scale_2, weights)
            shared["a13_scale"] = one_for_all(weights, "a13_scale")
            if self.halves == 2:
                # These kernels read it even if it is 1.
                tensors["gemm1_alpha"] = torch.ones_like(tensors["gate_scale"])
            if (limit := self.problem.activation.limit) is not None:
                # The kernels clamp before scaling.
                one_scale(weights.w13_scale_2, "w13_scale_2")
                tensors["gemm1_clamp_limit"] = limit / tensors["gate_scale"]
        return PermutedWeights(self.layouts[0], {**self.scalars(weights), **tensors}, shared)

    @property
    def _weight(self) -> QuantFormat:
        assert self.computes.weight is not None
        return self.computes.weight

    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        arguments = {
            "routing_bias": None,
            **_scaled(weights),
            "gemm1_bias": weights.get("w13_bias"),
            "gemm2_bias": weights.get("w2_bias"),
            **_scalars(weights),
            "output1_scale_scalar": weights.get("output1_scale"),
            "output1_scale_gate_scalar": weights.get("gate_scale"),
            "output2_scale_scalar": weights.get("output2_scale"),
        }
        for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
            # The entry point wants this dtype for power-of-two scales too; it tells them apart by their count.
            scale = arguments[name]
            assert scale is not None
            arguments[name] = scale.view(torch.float8_e4m3fn)
        if self.coded is None:
            arguments["hidden_states_scale"] = None
        return arguments

    def coded_arguments(
        self, scratch: Mapping[str, torch.Tensor], codes: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return super().coded_arguments(scratch, codes, scales.view(torch.float8_e4m3fn))

    def options(self) -> dict[str, Any]:
        from flashinfer.tllm_enums import SfLayout

        return {**super().options(), "hidden_states_scale_layout": SfLayout.layout_linear}


class Integer4(TrtLlm):
    """4-bit integers in groups of 32 with 16-bit scales: mxint4."""

    def entry(self) -> Any:
        from flashinfer.fused_moe import trtllm_mxint4_block_scale_routed_moe

        return trtllm_mxint4_block_scale_routed_moe

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Codes without their offset of 8, rows shuffled, in column blocks of 128 bytes; scales bf16, in blocks."""
        tensors = weights.tensors()
        permuted: dict[str, torch.Tensor] = {}
        for name in ("w13", "w2"):
            # q - 8 in two's complement is q with its highest bit flipped.
            codes = layouts.each_expert(tensors[name], lambda expert: expert ^ 0x88)
            permuted[name] = self.shuffled(codes, name, blocks=True)
            permuted[f"{name}_scale"] = self.shuffled_scales(tensors[f"{name}_scale"].bfloat16(), name)
        return PermutedWeights(self.layouts[0], {**permuted, **self.scalars(weights)})

    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        return {**_scaled(weights), **_scalars(weights)}

    def routes(self, scratch: Mapping[str, torch.Tensor]) -> Any:
        """Packs the expert in the upper half and the bf16 weight in the lower, the only form this entry point takes."""
        low = scratch["topk_weights"].bfloat16().view(torch.int16).to(torch.int32) & 0xFFFF
        return (scratch["topk_ids"] << 16) | low

    def options(self) -> dict[str, Any]:
        options = super().options()
        del options["activation_type"]
        return options


def _scaled(weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
    return {
        "gemm1_weights": weights["w13"],
        "gemm1_weights_scale": weights["w13_scale"],
        "gemm2_weights": weights["w2"],
        "gemm2_weights_scale": weights["w2_scale"],
    }


def _scalars(weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
    return {name: weights.get(name) for name in _SCALARS}


def _shuffled_groups(layer: TrtLlm, weights: ExpertWeights) -> dict[str, torch.Tensor]:
    tensors = weights.tensors()
    permuted = {name: layer.shuffled(tensors[name], name) for name in ("w13", "w2")}
    for name in ("w13", "w2"):
        permuted[f"{name}_scale"] = layer.shuffled_scales(tensors[f"{name}_scale"], name)
    return permuted


def _output_scales(
    layer: TrtLlm, w13_scale: torch.Tensor, w2_scale: torch.Tensor, weights: ExpertWeights
) -> dict[str, torch.Tensor]:
    """Combined scales, [E] fp32: for the gate, for the up half over the intermediate's, and for the output."""
    inputs = one_for_all(weights, "a13_scale")
    halves = w13_scale.reshape(len(w13_scale), -1) * inputs
    intermediate = one_for_all(weights, "a2_scale", largest=False).expand(len(w13_scale))
    return {
        # Without a gate this is the first GEMM's whole scale, and the next one only quantizes.
        "gate_scale": aligned(halves[:, 0].contiguous()),
        "output1_scale": aligned(((halves[:, -1] if layer.halves == 2 else 1.0) / intermediate).contiguous()),
        "output2_scale": aligned((w2_scale * intermediate).contiguous()),
    }

"""FlashInfer's `cutlass_fused_moe` in torch, by its documented contract: for tests of what is handed to it.

It reads weights in FlashInfer's orders, checks what FlashInfer checks, and refuses what FlashInfer gets wrong.
"""

from __future__ import annotations

import enum
import functools
from pathlib import Path

import torch

from moereg.backends import flashinfer_moe
from moereg.backends._flashinfer.layouts import interleave_fp4
from moereg.backends._flashinfer.loading import Library
from moereg.quantize import unpack_nibbles
from tests.peers.contract import stand_in

ActivationType = enum.IntEnum("ActivationType", {"Swiglu": 3, "Geglu": 4, "SwigluBias": 5, "Relu2": 6, "GegluTanh": 8})

_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


class Imitation:
    """A library whose calls are recorded.

    Attributes:
        pairs: Tactics of each call.
        calls: Keyword arguments of each call.
    """

    def __init__(self) -> None:
        self.pairs: list[list[int]] = []
        self.calls: list[dict[str, object]] = []
        self._most_block_bytes = 0

    @property
    def library(self) -> Library:
        functions = {"cutlass_fused_moe": self.fused_moe, "cutlass_fused_moe_workspace_size": self.workspace_bytes}
        checked = (stand_in(f"flashinfer.fused_moe.{name}", function) for name, function in functions.items())
        return Library(*checked, ActivationType, None, Path("fused_moe_90.so"))

    def workspace_bytes(self, max_num_tokens, hidden_size, intermediate_size, top_k, **_):
        assert hidden_size % 8 == 0
        assert intermediate_size % 8 == 0
        return max_num_tokens * top_k * (2 * intermediate_size + hidden_size) + 256

    def _block_bytes(self, num_rows, hidden, intermediate, top_k):
        """As much as any call of the process asked for, whatever its layer: FlashInfer's runner keeps the largest."""
        needed = num_rows * top_k * (2 * intermediate + hidden) + 256
        self._most_block_bytes = max(self._most_block_bytes, needed)
        return self._most_block_bytes

    def fused_moe(
        self,
        *,
        input,
        token_selected_experts,
        token_final_scales,
        fc1_expert_weights,
        fc2_expert_weights,
        output_dtype,
        quant_scales,
        fc1_expert_biases,
        fc2_expert_biases,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
        output,
        activation_type,
        use_fused_finalize,
        workspace_buffer,
        profile_ids,
        input_sf=None,
        swizzled_input_sf=True,
        use_deepseek_fp8_block_scale=False,
        use_w4_group_scaling=False,
        use_mxfp8_act_scaling=False,
        use_packed_weights=False,
    ):
        self.pairs.append(profile_ids)
        self.calls.append({"input": input, "ids": token_selected_experts})
        assert not use_fused_finalize
        assert token_selected_experts.dtype == torch.int32
        assert token_final_scales.dtype == torch.float32
        for tensor in (input, fc1_expert_weights, fc2_expert_weights, output, *quant_scales):
            assert tensor.is_contiguous()
            assert tensor.dim() == 0 or tensor.data_ptr() % 16 == 0
        top_k = token_selected_experts.shape[1]
        num_experts, hidden = fc2_expert_weights.shape[:2]
        if workspace_buffer is not None:
            assert workspace_buffer.dtype == torch.uint8
            assert workspace_buffer.dim() == 1
            if use_deepseek_fp8_block_scale:
                needed = self._block_bytes(input.shape[0], hidden, fc2_expert_weights.shape[2], top_k)
                if workspace_buffer.numel() < needed:
                    raise RuntimeError(f"workspace_buffer too small: need {needed}, got {workspace_buffer.numel()}")
        alpha, beta, limit = swiglu_alpha, swiglu_beta, swiglu_limit
        if activation_type != ActivationType.Swiglu:
            assert alpha is None
            assert beta is None
            assert limit is None
        x, scheme = input.float(), None
        first_quant = second_quant = None
        if use_deepseek_fp8_block_scale:
            scheme = "block"
            # Smaller ones become NaN on Hopper.
            assert all(float(scale.min()) >= 0.9e-10 for scale in quant_scales)
            w1, w2 = (
                weight.float() * scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
                for weight, scale in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
            )
            x = _round_groups(x)
        elif use_packed_weights:
            assert use_w4_group_scaling
            assert input.dtype == torch.bfloat16
            *scales, first_quant, second_quant, zero1, zero2, alpha1, alpha2 = quant_scales
            assert [len(quant) for quant in (first_quant, second_quant)] == [hidden, fc2_expert_weights.shape[2] * 2]
            assert zero1.numel() == zero2.numel() == 0
            x = _rounded_e4m3(input * first_quant)
            scheme = "int4"
            w1, w2 = (
                _restore_hopper_int4(weight, scale) * alpha[:, None, None]
                for weight, scale, alpha in zip(
                    (fc1_expert_weights, fc2_expert_weights), scales, (alpha1, alpha2), strict=True
                )
            )
            first_quant = None
        elif use_w4_group_scaling:
            w1, w2 = (
                _restore_hopper(weight, scale)
                for weight, scale in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
            )
        elif use_mxfp8_act_scaling:
            assert not swizzled_input_sf
            x = x * _powers(input_sf).repeat_interleave(32, 1)
            scheme = "mxfp8"
            w1 = _restore_blackwell(fc1_expert_weights, quant_scales[0], 32) * quant_scales[1][:, None, None]
            w2 = _restore_blackwell(fc2_expert_weights, quant_scales[2], 32) * quant_scales[3][:, None, None]
        elif fc1_expert_weights.dtype == torch.int64:
            scheme = "nvfp4"
            first_quant, second_quant = quant_scales[0], quant_scales[3]
            w1 = _restore_blackwell(fc1_expert_weights, quant_scales[1], 16) * quant_scales[2][:, None, None]
            w2 = _restore_blackwell(fc2_expert_weights, quant_scales[4], 16) * quant_scales[5][:, None, None]
        elif fc1_expert_weights.dtype == torch.float8_e4m3fn:
            assert input.dtype == torch.float8_e4m3fn
            assert quant_scales[3].dim() == 0
            scheme = "tensor"
            w1 = fc1_expert_weights.float() * quant_scales[0][:, None, None]
            second_quant = quant_scales[1].expand(num_experts)
            w2 = fc2_expert_weights.float() * quant_scales[2][:, None, None]
        else:
            w1, w2 = fc1_expert_weights.float(), fc2_expert_weights.float()
        total = torch.zeros(x.shape[0], hidden)
        for row in range(x.shape[0]):
            for slot in range(top_k):
                expert = int(token_selected_experts[row, slot])
                if not 0 <= expert < num_experts:
                    continue
                taken = x[row] if first_quant is None else _round_nvfp4(x[row], first_quant[expert])
                gemm = w1[expert] @ taken
                if fc1_expert_biases is not None:
                    assert fc1_expert_biases.dtype == output_dtype
                    gemm = gemm + fc1_expert_biases[expert].float()
                mid = _activate(gemm.to(output_dtype).float(), activation_type, alpha, beta, limit, expert)
                mid = _round_intermediate(mid.to(output_dtype).float(), scheme, second_quant, expert)
                result = w2[expert] @ mid
                if fc2_expert_biases is not None:
                    result = result + fc2_expert_biases[expert].float()
                total[row] += token_final_scales[row, slot] * result
        output.copy_(total)
        return [output, None, None, None]


def _activate(gemm, kind, alpha, beta, limit, expert):
    if kind == ActivationType.Relu2:
        return gemm.relu().square()
    up, gate = gemm.chunk(2)
    if limit is not None:
        gate, up = gate.clamp(max=float(limit[expert])), up.clamp(-float(limit[expert]), float(limit[expert]))
    if kind == ActivationType.Swiglu:
        slope = 1.0 if alpha is None else float(alpha[expert])
        gate = gate * torch.sigmoid(slope * gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh" if kind == ActivationType.GegluTanh else "none")
    return gate * (up + (0.0 if beta is None else float(beta[expert])))


def _rounded_e4m3(x):
    return x.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _round_intermediate(mid, scheme, second_quant, expert):
    if scheme == "int4":
        return _rounded_e4m3(mid.bfloat16() * second_quant)
    if scheme == "block":
        return _round_groups(mid[None])[0]
    if scheme == "tensor":
        return (mid * second_quant[expert]).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    if scheme == "nvfp4":
        return _round_nvfp4(mid, second_quant[expert])
    if scheme == "mxfp8":
        groups = mid.view(-1, 32)
        exponent = torch.floor(torch.log2(groups.abs().amax(1, keepdim=True).clamp(min=1e-30))) - 8
        scale = torch.exp2(exponent)
        return ((groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(-1)
    return mid


def _round_groups(x):
    groups = x.unflatten(1, (-1, 128))
    scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-12) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)


def _round_nvfp4(x, quant):
    groups = x.view(-1, 16)
    scale = (groups.abs().amax(1, keepdim=True) * quant / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
    scaled = torch.where(scale > 0, groups * quant / scale, torch.zeros_like(groups))
    codes = (scaled[..., None] - _FP4[:8].copysign(scaled[..., None])).abs().argmin(-1)
    # The factor 1 / quant is part of the weights' global scale.
    return (_FP4[codes].copysign(scaled) * scale).view(-1)


def _powers(codes):
    return torch.exp2(codes.float() - 127)


def _restore_hopper(weight, scale):
    """Takes the interleaving back by where it brings every bit, and unfolds the scales."""
    experts, rows, width = weight.shape
    plain = torch.zeros_like(weight)
    for expert in range(experts):
        plain[expert] = _inverse(weight[expert])
    codes = unpack_nibbles(plain.view(-1, width), width * 2).long()
    folded = scale.view(torch.uint8).view(experts, rows // 64, width * 2 // 128, 16, 4, 4)
    scales = folded.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, -1)
    return _FP4[codes].view(experts, rows, -1) * _powers(scales).repeat_interleave(32, 2)


def _restore_hopper_int4(weight, scale):
    """Takes the interleaving back, pairs of bytes as FlashInfer's kernel numbers them, and unfolds the scales."""
    experts, rows, width = weight.shape
    assert weight.dtype == torch.uint8
    assert scale.dtype == torch.bfloat16
    assert scale.shape == (experts, rows // 64, width // 64, 8, 8)
    pairs, plain = weight.view(torch.int16), torch.empty(experts, rows, width // 2, dtype=torch.int16)
    for lane in range(16):
        for tall in range(2):
            source = torch.arange(rows).view(-1, 2, 8)[:, tall].reshape(-1)
            target = torch.arange(rows).view(-1, 2, 8)[:, lane % 8 // 4].reshape(-1)
            plain[:, source, lane::16] = pairs[:, target, lane // 8 * 8 + lane % 4 * 2 + tall :: 16]
    codes = unpack_nibbles(plain.view(torch.uint8).view(-1, width), width * 2).view(experts, rows, -1)
    signed = torch.where(codes < 8, codes.float(), codes.float() - 16)
    scales = scale.permute(0, 1, 4, 3, 2).reshape(experts, rows, -1).float()
    return signed * scales.repeat_interleave(128, 2)


@functools.cache
def _places() -> torch.Tensor:
    """Where each bit of a tile of 16 rows and 64 codes is after interleaving, [4096]: its number's digits are moved."""
    numbers = torch.arange(16 * 32 * 8).view(16, 32, 8)
    source = torch.zeros(16 * 32 * 8, dtype=torch.long)
    for digit in range(12):
        tile = sum((numbers[..., bit] >> digit & 1) << bit for bit in range(8)).to(torch.uint8)
        moved = interleave_fp4(tile).view(-1)
        source |= torch.stack([moved >> bit & 1 for bit in range(8)], 1).view(-1).long() << digit
    return source.argsort()


def _inverse(matrix):
    rows, width = matrix.shape
    tiles = matrix.view(rows // 16, 16, width // 32, 32).transpose(1, 2).reshape(-1, 16 * 32)
    bits = torch.stack([tiles >> k & 1 for k in range(8)], 2).flatten(1)[:, _places()]
    plain = sum(bits.view(-1, 16 * 32, 8)[:, :, k] << k for k in range(8)).to(torch.uint8)
    return plain.view(rows // 16, width // 32, 16, 32).transpose(1, 2).reshape(rows, width)


def _restore_blackwell(weight, scale, group):
    experts, rows = weight.shape[:2]
    if weight.dtype == torch.int64:
        packed = weight.view(torch.uint8)
        values = _FP4[unpack_nibbles(packed.view(-1, packed.shape[2]), packed.shape[2] * 2).long()]
        values = values.view(experts, rows, -1)
    else:
        values = weight.float()
    groups = values.shape[2] // group
    tiles = scale.view(torch.uint8).view(experts, rows // 128, groups // 4, 32, 4, 4)
    plain = tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, groups)
    factors = _powers(plain) if group == 32 else plain.view(torch.float8_e4m3fn).float()
    return values * factors.repeat_interleave(group, 2)


CLASSES = {
    "unquantized": flashinfer_moe.FlashInferCutlassExperts,
    "fp8_tensor_static": flashinfer_moe.FlashInferCutlassFp8Experts,
    "fp8_block128": flashinfer_moe.FlashInferCutlassBlockExperts,
    "mxfp4_w4a16": flashinfer_moe.FlashInferCutlassPackedExperts,
    "mxfp4_mxfp8": flashinfer_moe.FlashInferCutlassMxfp8Experts,
    "mxfp8": flashinfer_moe.FlashInferCutlassMxfp8Experts,
    "nvfp4": flashinfer_moe.FlashInferCutlassNvfp4Experts,
    "int4_w4a8_g128": flashinfer_moe.FlashInferCutlassInt4Experts,
}
"""The class of each scheme that `flashinfer_cutlass` computes."""


class Fixed:
    """A tuner that timed everything already."""

    def pair(self, num_tokens, candidates, timer, is_capturing):
        return (3, 47)

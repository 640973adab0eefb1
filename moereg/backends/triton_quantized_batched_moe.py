"""The `triton` backend for quantized weights with quantized activations, tokens batched by expert."""

from __future__ import annotations

import dataclasses
import math

import torch

from moereg.backends._triton.quantized_workspace import (
    cut,
    intermediate_pieces,
    piece_bytes,
    row_pieces,
)
from moereg.backends.triton_quantized_moe import TritonQuantizedExperts
from moereg.experts import ExpertInputs
from moereg.kernels.sizes import WORKSPACE_ALIGNMENT
from moereg.layouts import round_up
from moereg.problem import MoEProblem
from moereg.registry import register_moe_backend
from moereg.weights import PermutedWeights


# Not measured yet; as in the standard format.
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic"),
    platforms=("cuda:sm89+",),
    requires=("triton>=3.6",),
    # As in the standard format.
    dtypes=("bfloat16", "float16"),
)
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("int8_w8a8",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("mxfp8",),
    platforms=("cuda:sm100+",),
    requires=("triton>=3.8",),
    dtypes=("bfloat16", "float16"),
)
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("mxfp4_mxfp8", "nvfp4"),
    platforms=("cuda:sm100",),
    requires=("triton>=3.8",),
    dtypes=("bfloat16", "float16"),
)
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("mxfp8",),
    platforms=("cuda:sm90",),
    requires=("triton>=3.6",),
    tier="emulation",
)
class TritonQuantizedBatchedExperts(TritonQuantizedExperts):
    """Batched format: the grouped GEMMs of `TritonQuantizedExperts` over each expert's own rows, which stay in place.

    Rows of `out` past an expert's count hold anything, and rows of the tokens there have no part in any scale. Equal
    inputs give equal bits in the others.
    """

    facts = dataclasses.replace(TritonQuantizedExperts.facts, activation_formats=frozenset({"batched"}))
    output_form = "per_expert"

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Flat: the intermediate [E * max_T, I_pad], its codes and scales; the plan of the tiles, codes of tokens."""
        itemsize = problem.torch_dtype.itemsize
        rows = problem.num_local_experts * num_tokens
        first = sum(map(piece_bytes, intermediate_pieces(problem, self._activation_format, rows)))
        codes = sum(map(piece_bytes, row_pieces(self._activation_format, rows, problem.hidden_size)))
        return (first // itemsize,), ((_plan_bytes(problem, num_tokens) + codes) // itemsize,)

    def _launch(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.config import max_shared_bytes
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.quantized.config import select_quantized_config
        from moereg.kernels.quantized.gemm import quantized_down_gemm, quantized_gate_up_gemm
        from moereg.kernels.quantized.operands import CodedOutput, Quantizer
        from moereg.kernels.quantized.rows_batched import quantize_batched_rows
        from moereg.kernels.rows.block_map import plan_batches

        assert inputs.expert_num_tokens is not None
        problem, fmt = self.problem, self._row_format()
        num_experts, max_tokens, hidden_size = inputs.hidden_states.shape
        num_rows = num_experts * max_tokens
        overlap = can_overlap(out.device)
        # Only the device knows the counts; what max_T says of them is said at `TritonBatchedExperts`.
        configs = select_quantized_config(
            math.inf,
            max_tokens * problem.top_k / problem.num_experts,
            problem.activation.num_halves,
            max_shared_bytes(out.device),
        )
        plan_bytes = _plan_bytes(problem, max_tokens)
        second = workspace2.view(torch.uint8)
        plan = plan_batches(
            inputs.expert_num_tokens,
            max_tokens,
            configs.gate_up.block_m,
            second[:plan_bytes].view(torch.int32),
            overlap=overlap,
        )
        pieces = row_pieces(self._activation_format, num_rows, hidden_size)
        tokens = self._quantized_rows(*cut(second[plan_bytes:], pieces))
        pieces = intermediate_pieces(problem, self._activation_format, num_rows)
        intermediate, amax, *coded = cut(workspace13.view(torch.uint8), pieces)
        rows = self._quantized_rows(*coded)
        amax_of_all = amax if fmt.spans_rows else None
        quantize_batched_rows(
            tokens,
            inputs.hidden_states.view(num_rows, hidden_size),
            Quantizer(fmt, weights.get("a13_scale"), amax_of_all),
            plan,
            overlap=overlap,
        )
        quantizer = Quantizer(fmt, weights.get("a2_scale"), amax_of_all)
        fuses = fmt.fits_tile(configs.gate_up.block_n)
        quantized_gate_up_gemm(
            CodedOutput(rows, quantizer, problem.torch_dtype) if fuses else intermediate,
            tokens,
            self._matrices(weights, "w13"),
            plan,
            configs.gate_up,
            self._epilogue(weights),
            top_k=1,
            overlap=overlap,
        )
        if not fuses:
            quantize_batched_rows(rows, intermediate, quantizer, plan, overlap=overlap)
        quantized_down_gemm(
            out.view(num_rows, hidden_size),
            rows,
            self._matrices(weights, "w2"),
            plan,
            configs.down,
            bias=weights.get("w2_bias"),
            overlap=overlap,
        )


def _plan_bytes(problem: MoEProblem, max_tokens: int) -> int:
    """What holds the plan of any shipped configuration."""
    from moereg.kernels.quantized.config import MIN_BLOCK_M
    from moereg.kernels.rows.block_map import batch_workspace_numel

    return round_up(4 * batch_workspace_numel(problem.num_local_experts, max_tokens, MIN_BLOCK_M), WORKSPACE_ALIGNMENT)

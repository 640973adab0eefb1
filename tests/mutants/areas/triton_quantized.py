"""Triton kernels of 8-bit weights and of activations that are quantized on the way."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_AROUND: Final = "tests/backends/test_triton_hopper_codes.py::test_a_layer_around_the_products"
_DIVIDED: Final = "tests/kernels/test_triton_quantize_sorted.py::test_codes_by_given_scales_are_those_of_a_division"
_GIVEN: Final = (
    "tests/kernels/test_triton_quantize_sorted.py::"
    "test_given_scales_are_of_all_experts_or_of_the_one_that_a_route_goes_to"
)

MUTANTS: Final = (
    Mutant(
        "powers of two are rounded down",
        "moereg/kernels/quantized/codes.py",
        old="(scale_bits + 0x7FFFFF) >> 23",
        new="scale_bits >> 23",
        tests=(
            "tests/backends/test_triton_quantized.py::test_codes_and_scales_are_those_of_quantize[384-dtype0-mxfp8]",
        ),
    ),
    Mutant(
        "tokens that go nowhere raise the largest magnitude",
        "moereg/kernels/quantized/rows.py",
        old="bits = tl.where(expert >= 0, bits, largest)",
        new="bits = bits",
        tests=("tests/backends/test_triton_quantized.py::test_one_scale_spans_the_rows_that_count",),
    ),
    Mutant(
        "the weighted input is not rounded",
        "moereg/kernels/quantized/codes.py",
        old="(values * tl.load(topk_weights + source)).to(x.dtype.element_ty).to(tl.float32)",
        new="values * tl.load(topk_weights + source)",
        tests=("tests/backends/test_triton_quantized.py::test_routing_weights_multiply_and_round_first",),
    ),
    Mutant(
        "ties of int8 go up",
        "moereg/kernels/quantized/codes.py",
        old="(values + 12582912.0) - 12582912.0",
        new="tl.floor(values + 0.5)",
        tests=(
            "tests/backends/test_triton_quantized.py::test_codes_and_scales_are_those_of_quantize[384-dtype0-int8_w8a8]",
        ),
    ),
    Mutant(
        "the largest code of a global scale is off by 2",
        "moereg/kernels/quantized/rows.py",
        old="MAX_CODE * 448.0, False)",
        new="MAX_CODE * 224.0, False)",
        tests=("tests/backends/test_triton_nvfp4.py::test_random_rows[16-dtype0-0]",),
    ),
    Mutant(
        "up is scaled as the gate is",
        "moereg/kernels/quantized/products.py",
        old="weights.global_scale, expert * HALVES + 1)",
        new="weights.global_scale, expert * HALVES)",
        tests=("tests/backends/test_triton_nvfp4.py::test_global_scales_of_weights_become_one_a_half[True]",),
    ),
    Mutant(
        "up has the scales of the gate's rows",
        "moereg/kernels/quantized/products.py",
        old="own_scales, num_columns + first, num_columns + columns, group_rows",
        new="own_scales, first, columns, group_rows",
        tests=("tests/backends/test_triton_quantized.py::test_gate_up_gemm[fp8_block128-130-silu]",),
    ),
    Mutant(
        "a static scale is the first expert's",
        "moereg/kernels/quantized/products.py",
        old="scale = tl.load(static_scale + expert * stride_static) + tl.zeros",
        new="scale = tl.load(static_scale) + tl.zeros",
        tests=(
            (
                "tests/backends/test_triton_quantized.py::"
                "test_codes_of_the_first_gemm_are_those_of_its_rounded_output[fp8_tensor_static-130-silu]"
            ),
        ),
    ),
    Mutant(
        "the intermediate is not rounded before it is quantized",
        "moereg/kernels/quantized/products.py",
        old="y = y.to(ROUNDED).to(tl.float32)",
        new="y = y",
        tests=(
            (
                "tests/backends/test_triton_quantized.py::"
                "test_codes_of_the_first_gemm_are_those_of_its_rounded_output[fp8_tensor_static-130-silu]"
            ),
        ),
    ),
    Mutant(
        "columns of padding are not zero",
        "moereg/kernels/quantized/products.py",
        old="y = tl.where((out_columns < num_columns)[None, :], y, 0.0)",
        new="y = y",
        tests=("tests/backends/test_triton_quantized.py::test_gate_up_gemm[fp8_block128-130-silu]",),
    ),
    Mutant(
        "every part of a turn has the scales of its first",
        "moereg/kernels/quantized/products.py",
        old="start = first + part * BLOCK_K",
        new="start = first",
        tests=("tests/backends/test_triton_quantized.py::test_two_steps_a_turn_give_the_same_bits[fp8_block128]",),
    ),
    Mutant(
        "sorted rows keep the first group's scales",
        "moereg/kernels/quantized/rows_sorted.py",
        old="groups = first // GROUP + tl.arange(0, BLOCK // GROUP)[None, :].to",
        new="groups = tl.arange(0, BLOCK // GROUP)[None, :].to",
        tests=(
            (
                "tests/kernels/test_triton_quantize_sorted.py::"
                "test_tokens_go_to_the_rows_of_their_routes[1288-dtype1-fp8_block128]"
            ),
        ),
    ),
    Mutant(
        "a route is encoded by the first expert's given scale",
        "moereg/kernels/quantized/rows_sorted.py",
        old="given = tl.load(static_scale + expert, mask=expert >= 0, other=1.0)",
        new="given = tl.load(static_scale)",
        tests=(f"{_GIVEN}[by expert]",),
    ),
    Mutant(
        "quotients that overflow are corrected to NaN",
        "moereg/kernels/quantized/rows_sorted.py",
        old="quotient = tl.where(tl.abs(quotient) < 4096.0, divide(values, divisor), quotient)",
        new="quotient = divide(values, divisor)",
        tests=(f"{_GIVEN}[by expert]",),
    ),
    Mutant(
        "quotients of large codes are not corrected",
        "moereg/kernels/quantized/rows_sorted.py",
        old="tl.where(tl.abs(quotient) < 4096.0, divide(values, divisor), quotient)",
        new="tl.where(tl.abs(quotient) < 16.0, divide(values, divisor), quotient)",
        tests=(f"{_DIVIDED}[0.3333333333333333-fp8]", f"{_DIVIDED}[7.0-fp8]", f"{_DIVIDED}[-0.03-fp8]"),
    ),
    Mutant(
        "Hopper's intermediate has the given scale of tokens",
        "moereg/backends/_triton/quantized_ways.py",
        old='static_scale = call.weights.get("a2_scale")',
        new='static_scale = call.weights.get("a13_scale")',
        tests=(f"{_AROUND}[gated-fp8_tensor_static]",),
    ),
    Mutant(
        "nothing looks for the largest token before Hopper's codes",
        "moereg/backends/_triton/quantized_ways.py",
        old=(
            "find_amax(\n                    amax_of_all, inputs.hidden_states, work.route_ids, num_tokens, "
            "work.input_weights, overlap=overlap\n                )"
        ),
        new="pass",
        tests=(f"{_AROUND}[gated-fp8_tensor_dynamic]",),
    ),
    Mutant(
        "the largest token of Hopper's codes may have no local expert",
        "moereg/backends/_triton/quantized_ways.py",
        old="return RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts)",
        new="return RouteIds(inputs.topk_ids, None, problem.num_experts, problem.num_experts)",
        tests=(f"{_AROUND}[a map-fp8_tensor_dynamic]",),
    ),
    Mutant(
        "the largest token of Hopper's codes is found without routing weights",
        "moereg/backends/_triton/quantized_ways.py",
        old="work.route_ids, num_tokens, work.input_weights, overlap=overlap",
        new="work.route_ids, num_tokens, None, overlap=overlap",
        tests=(f"{_AROUND}[weights on inputs-fp8_tensor_dynamic]",),
    ),
    Mutant(
        "a scale of any size is divided by its reciprocal",
        "moereg/kernels/quantized/rows_sorted.py",
        old="if (scale > 8.673617379884035e-19) & (scale < 1.152921504606847e18):",
        new="if scale > 0.0:",
        tests=(f"{_GIVEN}[extreme]",),
    ),
    Mutant(
        "a dynamic scale of all tokens is that of each",
        "moereg/kernels/quantized/rows_sorted.py",
        old="bits = tl.max(tl.load(amax + tl.arange(0, NUM_AMAX)), 0) + tl.zeros([1], tl.int32)  # [1]",
        new="bits = amax_bits(values, 1)",
        tests=(
            (
                "tests/kernels/test_triton_quantize_sorted.py::"
                "test_one_dynamic_scale_is_that_of_the_tokens_that_have_a_local_expert"
            ),
        ),
    ),
    Mutant(
        "a token goes to its first row only",
        "moereg/kernels/quantized/rows_sorted.py",
        old="row = tl.load(route_row + token * TOP_K + k).to(tl.int64)",
        new="row = tl.load(route_row + token * TOP_K).to(tl.int64)",
        tests=(
            (
                "tests/kernels/test_triton_quantize_sorted.py::"
                "test_tokens_go_to_the_rows_of_their_routes[384-dtype0-fp8_block128]"
            ),
        ),
    ),
    Mutant(
        "a token has the next one's first choice",
        "moereg/kernels/quantized/rows.py",
        old="tl.where(choices < ROUTES_PER_ROW, row",
        new="tl.where(choices <= ROUTES_PER_ROW, row",
        tests=(
            "tests/kernels/test_triton_quantize_sorted.py::test_a_token_without_a_local_expert_is_not_told_by_the_next_ones_choices",
        ),
    ),
    Mutant(
        "Hopper's rows of float16 are weighted after they are stored",
        "moereg/backends/_triton/work.py",
        old="return self.output_weights if self.call.out.dtype == torch.float16 else None",
        new="return None",
        tests=(f"{_AROUND}[plain, float16, biases-fp8_channel_token]",),
    ),
    Mutant(
        "Hopper's rows of float16 are weighted twice",
        "moereg/backends/_triton/work.py",
        old="return self.output_weights if self.early_weights is None else None",
        new="return self.output_weights",
        tests=(f"{_AROUND}[plain, float16, biases-fp8_channel_token]",),
    ),
)

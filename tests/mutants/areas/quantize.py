"""Kernels of torch, quantizers, the reference and its bounds."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "router weights of nobody are not masked",
        "moereg/kernels/plain/host.py",
        old="weights = weights.masked_fill(positions == routes.num_rows, 0.0)",
        new="weights = weights",
        tests=("tests/backends/test_torch_moe.py::test_unmapped_and_out_of_range_ids_add_nothing",),
    ),
    Mutant(
        "router weights are rounded",
        "moereg/kernels/plain/host.py",
        old="(weights - scales.float()).to(rows.dtype)",
        new="torch.zeros_like(scales)",
        tests=("tests/backends/test_torch_moe.py::test_routing_weights_keep_32_bits",),
    ),
    Mutant(
        "one token's weights belong to its first slots",
        "moereg/kernels/plain/host.py",
        old='weights[torch.tensor(slots, dtype=torch.int64, device="cpu")]',
        new="weights[: len(slots)]",
        tests=("tests/kernels/test_plain_host.py::test_one_token",),
    ),
    Mutant(
        "one token's rows are not rounded",
        "moereg/kernels/plain/host.py",
        old="mlp(x, expert).to(dtype)",
        new="mlp(x, expert)",
        tests=("tests/kernels/test_plain_host.py::test_rows_are_rounded_however_many_tokens_there_are",),
    ),
    Mutant(
        "a few routes are sorted by token alone",
        "moereg/kernels/plain/host.py",
        old="    order.sort(key=ids.__getitem__)\n",
        new="",
        tests=("tests/kernels/test_plain_host.py::test_few_routes_are_sorted_as_many_are",),
    ),
    Mutant(
        "experts side by side begin with the smallest",
        "moereg/kernels/plain/threads.py",
        old="key=rows.__getitem__, reverse=True)",
        new="key=rows.__getitem__)",
        tests=("tests/kernels/test_plain_threads.py::test_the_largest_task_is_taken_first",),
    ),
    Mutant(
        "one thread stays one after the call",
        "moereg/kernels/plain/threads.py",
        old="openmp.omp_set_num_threads(before)",
        new="openmp.omp_get_max_threads()",
        tests=("tests/kernels/test_plain_threads.py::test_who_takes_tasks",),
    ),
    Mutant(
        "an error of another thread is lost",
        "moereg/kernels/plain/threads.py",
        old="            if self._error is not None:\n                raise self._error",
        new="            pass",
        tests=(
            "tests/kernels/test_plain_threads.py::test_what_a_task_raises_reaches_the_caller_when_others_have_ended",
        ),
    ),
    Mutant(
        "rows past the count stay as they are",
        "moereg/kernels/plain/host.py",
        old="        out[expert, count:].zero_()\n",
        new="        pass\n",
        tests=("tests/backends/test_torch_moe.py::test_batched_rows_past_the_count_are_zero",),
    ),
    Mutant(
        "the first block's bias is every block's",
        "moereg/kernels/plain/quantized_mlp.py",
        old="self.bias[expert, rows].to(x.dtype)",
        new="self.bias[expert, : rows.stop - rows.start].to(x.dtype)",
        tests=("tests/backends/test_torch_quantized_moe.py::test_some_rows_are_restored_at_a_time[nvfp4_w4a16]",),
    ),
    Mutant(
        "the intermediate is not rounded",
        "moereg/kernels/plain/quantized_mlp.py",
        old=".to(self.compute_dtype if self.round_intermediate is None else x.dtype)",
        new=".to(self.compute_dtype)",
        tests=("tests/backends/test_torch_quantized_moe.py::test_within_the_closer_bound",),
    ),
    Mutant(
        "every expert has the bias of the first",
        "moereg/kernels/plain/mlp.py",
        old=(
            '        gemm1 = _packed_linear(x, self.w13[expert], _row(self.w13_bias, expert), "none", [], "")\n'
            "        hidden = self.activation("
        ),
        new=(
            '        gemm1 = _packed_linear(x, self.w13[expert], _row(self.w13_bias, 0), "none", [], "")\n'
            "        hidden = self.activation("
        ),
        tests=("tests/backends/test_torch_moe.py::test_matches_reference",),
    ),
    Mutant(
        "powers of two are rounded up once more",
        "moereg/quantize/scales.py",
        old="torch.where(mantissa == 0.5, exponent - 1, exponent)",
        new="exponent",
        tests=("tests/quantize/test_elements.py::test_e8m0_scale_is_the_smallest_that_saturates_nothing",),
    ),
    Mutant(
        "the bias of e8m0 is 128",
        "moereg/quantize/scales.py",
        old="_E8M0_BIAS: Final = 127",
        new="_E8M0_BIAS: Final = 126",
        tests=("tests/quantize/test_elements.py::test_e8m0_scale_is_the_smallest_that_saturates_nothing",),
    ),
    Mutant(
        "nibbles are looked up high one first",
        "moereg/quantize/nibbles.py",
        old="low, high = values.expand(16, 16), values.unsqueeze(1).expand(16, 16)",
        new="high, low = values.expand(16, 16), values.unsqueeze(1).expand(16, 16)",
        tests=("tests/quantize/test_elements.py::test_floats_round_to_nearest_even_and_saturate",),
    ),
    Mutant(
        "groups are repeated as a whole",
        "moereg/quantize/groups.py",
        old="values.repeat_interleave(extent, dim).narrow(dim, 0, size)",
        new=(
            "values.repeat(*(extent if d == dim % values.dim() else 1 for d in "
            "range(values.dim()))).narrow(dim, 0, size)"
        ),
        tests=("tests/quantize/test_elements.py::test_groups",),
    ),
    Mutant(
        "zero points are of the upper end",
        "moereg/quantize/weights.py",
        old="element.encode(element.min_value - low / total)",
        new="element.encode(element.max_value - high / total)",
        tests=("tests/quantize/test_quantize_weights.py::test_weights_are_what_slow_loops_give",),
    ),
    Mutant(
        "asymmetric scales span half of the range",
        "moereg/quantize/weights.py",
        old="choose_scale(high - low, element.max_value - element.min_value,",
        new="choose_scale(high - low, element.max_value,",
        tests=("tests/quantize/test_quantize_weights.py::test_weights_are_what_slow_loops_give",),
    ),
    Mutant(
        "uint4 has 15 as its half range",
        "moereg/quantize/integers.py",
        old='"uint4": Element(7.5, 7.0, -8.0,',
        new='"uint4": Element(7.0, 7.0, -8.0,',
        tests=("tests/quantize/test_quantize_weights.py::test_weights_are_what_slow_loops_give",),
    ),
    Mutant(
        "the limit clamps the gate from below too",
        "moereg/activations.py",
        old="gate = gate.clamp(max=self.limit)",
        new="gate = gate.clamp(min=-self.limit, max=self.limit)",
        tests=("tests/selection/test_activations.py::test_gated_maths[swigluoai]",),
    ),
    Mutant(
        "up is clamped from above only",
        "moereg/activations.py",
        old="up = up.clamp(min=-self.limit, max=self.limit)",
        new="up = up.clamp(max=self.limit)",
        tests=("tests/selection/test_activations.py::test_gated_maths",),
    ),
    Mutant(
        "the reference does not round the intermediate",
        "moereg/reference.py",
        old="ROUNDS_INTERMEDIATE: Final = True",
        new="ROUNDS_INTERMEDIATE: Final = False",
        tests=("tests/layer/test_reference.py::test_quantized_matches_slow_loops",),
    ),
    Mutant(
        "the reference keeps 32 bits where activations are quantized",
        "moereg/reference.py",
        old="x = x.to(self.problem.torch_dtype).to(self.dtype)",
        new="x = x.to(self.dtype)",
        tests=("tests/layer/test_reference.py::test_quantized_matches_slow_loops",),
    ),
    Mutant(
        "errors are relative to nothing",
        "moereg/reference.py",
        old="return float(difference / norm)",
        new="return float(difference)",
        tests=("tests/layer/test_reference.py::test_matches_brute_force",),
    ),
    Mutant(
        "the bound of bfloat16 is three times wider",
        "moereg/tolerances.py",
        old='"bfloat16": 8e-3',
        new='"bfloat16": 24e-3',
        tests=(
            (
                "tests/layer/test_tolerances.py::"
                "test_kernels_that_round_as_the_reference_pass_a_closer_bound[int8_w8a8-bfloat16]"
            ),
        ),
    ),
    Mutant(
        "the bound forgets the roundings before the quantizer",
        "moereg/tolerances.py",
        old="bound += 2 * math.sqrt(mean_square * before)",
        new="bound += 0 * math.sqrt(mean_square * before)",
        tests=("tests/layer/test_tolerances.py::test_kernels_that_store_gate_and_up_in_16_bits_pass",),
    ),
    Mutant(
        "a copy's place is not tried",
        "moereg/checkpoints/_save.py",
        old='with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=place):\n                pass',
        new="pass",
        tests=("tests/cli/test_quantize.py::test_bad_input",),
    ),
    Mutant(
        "SIGTERM leaves a half written copy",
        "moereg/cli/_quantize.py",
        old="    signal.signal(signal.SIGTERM, end)\n",
        new="",
        tests=("tests/cli/test_quantize.py::test_sigterm_while_the_copy_is_written_leaves_nothing",),
    ),
)

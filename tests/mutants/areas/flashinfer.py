"""Faults in what `flashinfer_cutlass` hands to FlashInfer, and in how it finds, builds and keeps what it needs."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SOURCES: Final = "moereg/backends/_flashinfer/"
_CUTLASS: Final = "tests/backends/test_flashinfer_cutlass.py::"
_LAYOUTS: Final = "tests/backends/test_flashinfer_cutlass_layouts.py::"
_TACTICS: Final = "tests/backends/test_flashinfer_tactics.py::"
_PACKAGE: Final = "tests/backends/test_flashinfer_package.py::"
_BUILDING: Final = "tests/backends/test_flashinfer_building.py::"

MUTANTS: Final = (
    Mutant(
        "FlashInfer is handed gate rows first",
        _SOURCES + "cutlass_layouts.py",
        old="moved[:, num_halves - 1 - half, :",
        new="moved[:, half, :",
        tests=(f"{_LAYOUTS}test_up_rows_come_first_and_halves_are_padded_apart",),
    ),
    Mutant(
        "two bits of Hopper's 4-bit floats change places",
        _SOURCES + "cutlass_layouts.py",
        old="((31, 30), (28, 29), (29, 26), (30, 27)),",
        new="((31, 30), (28, 26), (29, 29), (30, 27)),",
        tests=(f"{_LAYOUTS}test_every_word_of_4_bit_floats_lies_where_the_kernel_puts_it",),
    ),
    Mutant(
        "every expert has the first one's scale of its inputs",
        _SOURCES + "cutlass_quantized.py",
        old='if "input_scale" in weights.shared:',
        new="if True:",
        tests=(f"{_CUTLASS}test_a_scale_for_each_expert_makes_one_row_a_route",),
    ),
    Mutant(
        "up rows have the gate's scale",
        _SOURCES + "cutlass_quantized.py",
        old='"second_quant": second_quant if up is None else second_quant * up,',
        new='"second_quant": second_quant,',
        tests=(f"{_CUTLASS}test_scales_of_gate_and_up_that_differ[fp8_tensor_static-plain]",),
    ),
    Mutant(
        "the bias of up rows is scaled with the gate's",
        _SOURCES + "cutlass_quantized.py",
        old="of_up.copy_(of_up.float() / up[:, None])",
        new="of_up.copy_(of_up.float())",
        tests=(f"{_CUTLASS}test_scales_of_gate_and_up_that_differ[nvfp4-bias]",),
    ),
    Mutant(
        "the pool of graphs is given back between two captures",
        _SOURCES + "timing.py",
        old="            self._graphs = {pair: self._captured(pair)}",
        new="            self._graphs.clear()\n            self._graphs = {pair: self._captured(pair)}",
        tests=("tests/backends/test_flashinfer_timing.py::test_one_pair_after_the_other_is_captured",),
    ),
    Mutant(
        "a finalize that adds in any order",
        _SOURCES + "cutlass.py",
        old='            "use_fused_finalize": False,\n            "workspace_buffer"',
        new='            "use_fused_finalize": True,\n            "workspace_buffer"',
        tests=(f"{_CUTLASS}test_numbers_of_each_scheme[unquantized]",),
    ),
    Mutant(
        "columns that were padded hold what was there",
        _SOURCES + "cutlass.py",
        old="        x[:, hidden_size:].zero_()\n",
        new="",
        tests=(f"{_CUTLASS}test_sizes_that_the_kernels_do_not_take_are_padded[unquantized]",),
    ),
    Mutant(
        "experts of other ranks are taken for local ones",
        _SOURCES + "cutlass.py",
        old="        if inputs.expert_map is None:\n            return inputs.topk_ids.contiguous()\n",
        new="        return inputs.topk_ids.contiguous()\n",
        tests=(f"{_CUTLASS}test_a_part_of_the_experts",),
    ),
    Mutant(
        "a tactic is taken whose numbers are wrong",
        _SOURCES + "tactics.py",
        old="if difference <= _SAME:",
        new="if True:",
        tests=(f"{_TACTICS}test_tactics_that_raise_or_give_other_numbers_are_not_taken",),
    ),
    Mutant(
        "tactics are timed while a graph is captured",
        _SOURCES + "tactics.py",
        old="                if is_capturing():\n",
        new="                if False:\n",
        tests=(f"{_TACTICS}test_nothing_is_timed_while_a_graph_is_captured",),
    ),
    Mutant(
        "tuning goes on when its time is over",
        _SOURCES + "tactics.py",
        old="if len(best.times) > known and self._clock() > until:",
        new="if False:",
        tests=(f"{_TACTICS}test_tuning_ends_when_its_time_is_over",),
    ),
    Mutant(
        "what was found in a hurry is kept for good",
        _SOURCES + "tactics.py",
        old="return pair, is_checked and is_long_enough",
        new="return pair, True",
        tests=(f"{_TACTICS}test_tuning_ends_when_its_time_is_over",),
    ),
    Mutant(
        "a process takes other tactics than its graphs",
        _SOURCES + "tactics.py",
        old="found = self._store.pin(key, self._nearest(bucket))",
        new="return self._nearest(bucket)",
        tests=(f"{_TACTICS}test_a_process_stays_with_what_a_capture_took",),
    ),
    Mutant(
        "tactics are timed on whatever the first call brings",
        _SOURCES + "cutlass.py",
        old="return CallTimer(functools.partial(_call, function, drawn), rows.out)",
        new="return CallTimer(functools.partial(_call, function, arguments), rows.out)",
        tests=(f"{_CUTLASS}test_tactics_are_timed_on_drawn_rows[unquantized]",),
    ),
    Mutant(
        "FlashInfer's fp8 blocks get the memory of the first call",
        _SOURCES + "cutlass_blocks.py",
        old="    def buffer(self, call: Call) -> torch.Tensor | None:\n        return None\n",
        new="    def buffer(self, call: Call) -> torch.Tensor | None:\n        return super().buffer(call)\n",
        tests=(f"{_CUTLASS}test_few_tokens_after_many_of_any_layer",),
    ),
    Mutant(
        "kernels of 31 tokens are taken for those of 32",
        _SOURCES + "cutlass_blocks.py",
        old="_LIMITS: Final = (32, 64, 1024)",
        new="_LIMITS: Final = ()",
        tests=(f"{_CUTLASS}test_tokens_that_share_their_kernels[h200]",),
    ),
    Mutant(
        "block scales that Hopper makes NaN of are handed on",
        _SOURCES + "cutlass_blocks.py",
        old="    if not is_small.any():\n",
        new="    if True:\n",
        tests=(f"{_CUTLASS}test_block_scales_that_are_too_small_for_the_kernels_go_into_the_codes",),
    ),
    Mutant(
        "a ratio of scales is 0 or infinite",
        _SOURCES + "cutlass_quantized.py",
        old="return super().permute_weights(without_zero_scales(weights))",
        new="return super().permute_weights(weights)",
        tests=(f"{_CUTLASS}test_halves_whose_scale_is_zero[nvfp4-bias]",),
    ),
    Mutant(
        "nobody looks at the folder of kernels that are compiled at run time",
        _SOURCES + "package.py",
        old='    return _unwritable(deepgemm_folder(), "TRTLLM_DG_CACHE_DIR")\n',
        new="    return None\n",
        tests=(f"{_PACKAGE}test_kernels_that_are_compiled_at_run_time",),
    ),
    Mutant(
        "kernels are loaded that the shared object does not hold",
        _SOURCES + "loading.py",
        old="    if name not in manifest.sets:\n",
        new="    if False:\n",
        tests=(f"{_BUILDING}test_kernels_that_are_not_in_it",),
    ),
    Mutant(
        "a shared object is trusted that nobody describes",
        _SOURCES + "loading.py",
        old="        is_handmade = path == package.aot_path(module)\n",
        new="        is_handmade = False\n",
        tests=(f"{_BUILDING}test_a_shared_object_that_nobody_describes",),
    ),
    Mutant(
        "4-bit integers keep their offset",
        _SOURCES + "cutlass_int4.py",
        old="_SIGN_BITS: Final = 0x88",
        new="_SIGN_BITS: Final = 0x00",
        tests=(f"{_CUTLASS}test_4_bit_integers_take_codes_as_numbers[one]",),
    ),
    Mutant(
        "intermediates of 4-bit integers keep their scale",
        _SOURCES + "cutlass_int4.py",
        old="            w13_scale[:, w13_scale.shape[1] // 2 :] *= factor[:, None, None]\n",
        new="",
        tests=(f"{_CUTLASS}test_4_bit_integers_take_codes_as_numbers[own]",),
    ),
    Mutant(
        "rows of 4-bit integers lie 4 apart",
        _SOURCES + "cutlass_int4.py",
        old="parts.permute(0, 4, 2, 3, 5, 1, 6)",
        new="parts.permute(0, 4, 2, 3, 1, 5, 6)",
        tests=(f"{_LAYOUTS}test_every_4_bit_integer_lies_where_the_kernel_puts_it",),
    ),
    Mutant(
        "a layer without a gate scales the checkpoint's bias",
        _SOURCES + "cutlass_int4.py",
        old='biases["w13_bias"] = biases["w13_bias"].clone()',
        new='biases["w13_bias"]',
        tests=(f"{_CUTLASS}test_biases_of_layers_without_a_gate_stay_as_they_are",),
    ),
    Mutant(
        "a set has the tiles of another one",
        _SOURCES + "kernel_sets.py",
        old='sets_of(path.read_text(encoding="utf-8")) & wanted)',
        new='sets_of(path.read_text(encoding="utf-8")))',
        tests=(f"{_BUILDING}test_a_set_takes_its_own_sources_and_what_all_need[fp8]",),
    ),
    Mutant(
        "a workspace holds rows of tokens alone",
        "moereg/backends/_flashinfer/cutlass_quantized.py",
        old="return max(of_tokens, self.bytes_for(num_tokens * self.problem.top_k, 1))",
        new="return of_tokens",
        tests=("tests/backends/test_flashinfer_cutlass.py::test_workspaces_serve_rows_of_tokens_and_of_routes",),
    ),
)

"""The `cutlass` backend: QuACK's epilogues and what they are given, and torch's scaled products."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_QUACK: Final = "tests/backends/test_cutlass_quack.py"

MUTANTS: Final = (
    Mutant(
        "the up half is clamped on one side",
        "moereg/kernels/quack/epilogues.py",
        old="up = _value(_maxnumf(_minnumf(up, limit), -limit))",
        new="up = _value(_minnumf(up, limit))",
        tests=(f"{_QUACK}::test_epilogues_match_the_reference[scalars]",),
    ),
    Mutant(
        "the slope inside the sigmoid is left out",
        "moereg/kernels/quack/epilogues.py",
        old="sigmoid(gate * alpha if alpha != 1.0 else gate)",
        new="sigmoid(gate)",
        tests=(f"{_QUACK}::test_epilogues_match_the_reference[swigluoai]",),
    ),
    Mutant(
        "the second bias is not weighted",
        "moereg/kernels/quack/epilogues.py",
        old='return {"D": (acc + bias) * weight}',
        new='return {"D": acc * weight + bias}',
        tests=(f"{_QUACK}::test_epilogues_match_the_reference[relu2]",),
    ),
    Mutant(
        "an installed moereg has one kernel for all activations",
        "moereg/kernels/quack/epilogues.py",
        old="    _name(epilogue, function)\n",
        new="    _name(epilogue)\n",
        tests=(f"{_QUACK}::test_names_tell_epilogues_apart",),
    ),
    Mutant(
        "gate and up keep the checkpoint's order",
        "moereg/backends/_cutlass/interleaved.py",
        old="return interleave_gate_up(w13, dim=dim) if self.problem.activation.gated else aligned(w13)",
        new="return aligned(w13)",
        tests=(f"{_QUACK}::test_products_match_the_reference[unquantized]",),
    ),
    Mutant(
        "rows are gathered by route",
        "moereg/kernels/rows/sorted_inputs.py",
        old="found = route // ROUTES_PER_SOURCE",
        new="found = route",
        tests=(f"{_QUACK}::test_products_match_the_reference[unquantized]",),
    ),
    Mutant(
        "every route is coded with its token's first expert's scale",
        "moereg/backends/_cutlass/interleaved.py",
        old="return _Rows(codes, scales.view(-1), 1 if self._codes_routes else top_k)",
        new="return _Rows(codes, scales.view(-1), top_k)",
        tests=(f"{_QUACK}::test_products_match_the_reference[fp8_tensor_static]",),
    ),
    Mutant(
        "compiling is announced again and again",
        "moereg/backends/_cutlass/interleaved.py",
        old="            _COMPILED.update(keys)\n",
        new="            pass\n",
        tests=(f"{_QUACK}::test_compiling_is_announced_once",),
    ),
    Mutant(
        "scaled products of nobody's rows are kept",
        "moereg/backends/_cutlass/torch_scaled.py",
        old="result = torch.where(rows.counts.unsqueeze(1), result, 0.0)",
        new="result = result.nan_to_num()",
        tests=("tests/backends/test_cutlass_torch.py::test_routes_to_nobody_add_nothing",),
    ),
    Mutant(
        "scales of weights are those of the first half",
        "moereg/backends/_cutlass/scales.py",
        old="flat.repeat_interleave(num_rows // flat.shape[1], dim=1)",
        new="flat[:, :1].repeat_interleave(num_rows, dim=1)",
        tests=("tests/backends/test_cutlass_torch.py::test_every_row_has_the_scale_of_its_part",),
    ),
    Mutant(
        "tokens that begin anywhere go to QuACK as they are",
        "moereg/backends/_cutlass/interleaved.py",
        old="hidden_states = hidden_states.clone()",
        new="hidden_states = hidden_states[:]",
        tests=("tests/backends/test_cutlass_quack.py::test_tokens_may_begin_anywhere_and_take_weights_in_fp32",),
    ),
    Mutant(
        "routing weights are rounded before tokens take them",
        "moereg/backends/_cutlass/interleaved.py",
        old="(hidden_states * inputs.topk_weights).to(hidden_states.dtype)",
        new="hidden_states * inputs.topk_weights.to(hidden_states.dtype)",
        tests=("tests/backends/test_cutlass_quack.py::test_tokens_may_begin_anywhere_and_take_weights_in_fp32",),
    ),
)

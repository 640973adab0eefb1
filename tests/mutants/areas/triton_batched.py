"""Triton kernels of the batched format."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_BATCHES: Final = "tests/kernels/test_batches.py"
_LOADS_CODES: Final = (
    "    def _load(self) -> Implementation:\n        from moereg.backends._triton import quantized\n\n"
    "        return quantized.Batched"
)

MUTANTS: Final = (
    Mutant(
        "short tiles come before long ones",
        "moereg/kernels/rows/block_map.py",
        old="first_middle = tl.where(heavy, first_heavy, num_heavy + first_middle)",
        new="first_middle = tl.where(heavy, num_middle + first_heavy, first_middle)",
        tests=("tests/backends/test_triton_batched.py::test_plan_covers_every_valid_row_once",),
    ),
    Mutant(
        "a token that names an expert twice takes two rows of it",
        "moereg/kernels/rows/batches.py",
        old="named = tl.max(here.to(tl.int32), 1)",
        new="named = tl.sum(here.to(tl.int32), 1)",
        tests=(f"{_BATCHES}::test_writes_nothing_beside_its_rows",),
    ),
    Mutant(
        "places begin again with each piece of the routes",
        "moereg/kernels/rows/batches.py",
        old="count += tl.sum(named, 0)",
        new="count = tl.sum(named, 0)",
        tests=(f"{_BATCHES}::test_places_go_on_from_one_piece_to_the_next[2]",),
    ),
    Mutant(
        "routes that go nowhere have a row",
        "moereg/kernels/rows/batches.py",
        old="row = tl.where(own >= 0, own * num_tokens + place, -1)",
        new="row = own * num_tokens + place",
        tests=(f"{_BATCHES}::test_places_go_on_from_one_piece_to_the_next[2048]",),
    ),
    Mutant(
        "routing weights always scale results, where tokens are laid out by expert",
        "moereg/prepare_finalize/batched.py",
        old="scales = topk_weights if problem.apply_router_weight_on_input else None",
        new="scales = None",
        tests=(f"{_BATCHES}::test_weights_may_scale_inputs[float32]",),
    ),
    Mutant(
        "laying out by expert is replayed with pointers of another alignment",
        "moereg/kernels/launch/remembered.py",
        old='device.type != "cuda" or all_bits % _POINTER_ALIGNMENT',
        new='device.type != "cuda"',
        tests=("tests/kernels/test_moved_tokens.py::test_later_launches_are_replayed",),
    ),
    Mutant(
        "counts may be larger than the rows",
        "moereg/kernels/rows/block_map.py",
        old="tl.minimum(tl.maximum(counts, 0), max_tokens)",
        new="tl.maximum(counts, 0)",
        tests=("tests/backends/test_triton_batched.py::test_plan_covers_every_valid_row_once",),
    ),
    Mutant(
        "rows that do not count raise the largest magnitude",
        "moereg/kernels/quantized/rows_batched.py",
        old="columns_in_use = tl.where(counts, size, 0)",
        new="columns_in_use = size",
        tests=("tests/backends/test_triton_layers.py::test_rows_that_do_not_count_change_no_bit[fp8_tensor_dynamic]",),
    ),
    Mutant(
        "rows that do not count are quantized",
        "moereg/kernels/quantized/rows_batched.py",
        old=("        if counts:\n            values"),
        new=("        if True:\n            values"),
        tests=(
            (
                "tests/backends/test_triton_quantized_batched.py::"
                "test_codes_and_scales_are_those_of_quantize[nan-384-dtype0-fp8_block128]"
            ),
        ),
    ),
    Mutant(
        "only the first row of a tile is quantized",
        "moereg/kernels/quantized/rows_batched.py",
        old="row = tl.load(tiles.block_row + block) + slot % BLOCK_M",
        new="row = tl.load(tiles.block_row + block)",
        tests=(
            (
                "tests/backends/test_triton_quantized_batched.py::"
                "test_codes_and_scales_are_those_of_quantize[nan-384-dtype0-fp8_block128]"
            ),
        ),
    ),
    Mutant(
        "rows of float16 are stored in it before they are weighted, codes",
        "moereg/backends/triton_moe.py",
        old=f"    wide_output = True\n\n{_LOADS_CODES}",
        new=f"\n{_LOADS_CODES}",
        tests=("tests/backends/test_triton_float16.py::test_every_class[int8_w8a8-batched]",),
    ),
    Mutant(
        "rounded rows of float16 are written in the dtype of the results",
        "moereg/backends/_triton/emulated.py",
        old="route_rows.view(work.tokens.dtype)[:, : work.tokens.shape[1]]",
        new="route_rows",
        tests=("tests/backends/test_triton_float16.py::test_every_class[nvfp4-batched]",),
    ),
)

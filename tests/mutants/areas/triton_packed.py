"""Triton kernels of packed 4-bit and 8-bit weights, one-token kernels among them."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ON_HOPPER: Final = "tests/kernels/test_packed_hopper.py::"
_ONE_LAUNCH: Final = "tests/backends/test_triton_one_launch.py::"

MUTANTS: Final = (
    Mutant(
        "Hopper's kernels of bfloat16 take float16",
        "moereg/backends/_triton/packed.py",
        old='            problem.dtype == "bfloat16"\n',
        new="            problem.dtype\n",
        tests=(f"{_ON_HOPPER}test_what_the_kernels_lack_takes_the_triton_tiles[float16]",),
    ),
    Mutant(
        "Hopper's kernels take zero points",
        "moereg/backends/_triton/packed.py",
        old="            and fmt.symmetric\n",
        new="",
        tests=(f"{_ON_HOPPER}test_what_the_kernels_lack_takes_the_triton_tiles[zero_points]",),
    ),
    Mutant(
        "on Hopper, odd steps have the scales of even ones",
        "moereg/kernels/hopper/packed_restore.py",
        old="(parity * 0x2222)",
        new="(parity * 0)",
        tests=(f"{_ON_HOPPER}test_operands_are_the_weights[mxfp4_w4a16-w2]",),
    ),
    Mutant(
        "on Hopper, a tile's rule ends a row early",
        "moereg/kernels/hopper/packed_config.py",
        old="rows_per_expert <= rule.max_rows_per_expert",
        new="rows_per_expert < rule.max_rows_per_expert",
        tests=(f"{_ON_HOPPER}test_rows_an_expert_choose_the_rule[160-tile2-False-int8_w8a16]",),
    ),
    Mutant(
        "scales are read for every second block of small groups",
        "moereg/kernels/packed/product.py",
        old="if GROUP == 16 or within % 2 == 0:",
        new="if within % 2 == 0:",
        tests=(
            (
                "tests/backends/test_triton_packed.py::"
                "test_products_are_those_of_restored_weights[nvfp4_w4a16-bfloat16-warps_share_columns]"
            ),
        ),
    ),
    Mutant(
        "parts of a block share the first one's scale",
        "moereg/kernels/packed/product.py",
        old="group = (scaled_block * 64 + part * PART) // GROUP",
        new="group = scaled_block * 64 // GROUP",
        tests=(
            (
                "tests/backends/test_triton_packed.py::"
                "test_products_are_those_of_restored_weights[int4_w4a16_g32-bfloat16-warps_share_columns]"
            ),
        ),
    ),
    Mutant(
        "slices all take the first piece",
        "moereg/kernels/packed/product.py",
        old="% PIECES * BLOCK_K + offs_k",
        new="* 0 + offs_k",
        tests=("tests/backends/test_triton_packed.py::test_slices_give_the_layer[int4_w4a16_g32_zp-1]",),
    ),
    Mutant(
        "an element has the code of its pair",
        "moereg/kernels/packed/weights.py",
        old="offset // group % (4 if group <= 32 else 2)",
        new="offset // group % 2",
        tests=(
            (
                "tests/backends/test_triton_packed.py::"
                "test_products_are_those_of_restored_weights[int4_w4a16_g32_zp-bfloat16-warps_share_columns]"
            ),
        ),
    ),
    Mutant(
        "scales of float16 are off by a power of two",
        "moereg/kernels/packed/weights.py",
        old="bits = (low | high << 16).to(tl.uint32) << 3",
        new="bits = (low | high << 16).to(tl.uint32) << 2",
        tests=(
            (
                "tests/backends/test_triton_packed.py::"
                "test_products_are_those_of_restored_weights[mxfp4_w4a16-float16-warps_share_columns]"
            ),
        ),
    ),
    Mutant(
        "every slice adds the bias",
        "moereg/kernels/gemm/single.py",
        old="x += tl.where((slices % PIECES == 0)[:, None], b, 0.0)",
        new="x += b",
        tests=("tests/backends/test_triton_packed.py::test_routes_of_one_token_are_added_up[int4_w4a16_g128-2]",),
    ),
    Mutant(
        "the columns of a row count as whole pieces",
        "moereg/kernels/gemm/single.py",
        old="depth, depth, config.block_k * pieces",
        new="depth, depth, config.block_k",
        tests=("tests/backends/test_triton_packed.py::test_routes_of_one_token_are_added_up[int4_w4a16_g128-8]",),
    ),
    Mutant(
        "scales of rows are forgotten",
        "moereg/kernels/gemm/operand.py",
        old="x *= tl.load(matrices.row_scale + expert * num_columns + columns)[None, :]",
        new="x *= tl.load(matrices.row_scale + expert * num_columns + columns * 0)[None, :]",
        tests=(
            (
                "tests/backends/test_triton_packed.py::"
                "test_products_are_those_of_restored_weights[int4_w4a16_gall-bfloat16-warps_share_columns]"
            ),
        ),
    ),
    Mutant(
        "scales of groups are not arranged",
        "moereg/backends/_triton/packed.py",
        old="scale = arrange(matrix.scale)\n",
        new="scale = matrix.scale\n",
        tests=("tests/backends/test_triton_packed.py::test_slices_give_the_layer[int4_w4a16_g32_zp-1]",),
    ),
    Mutant(
        "zero points are not arranged",
        "moereg/backends/_triton/packed.py",
        old="_pack_bytes(arrange(zero_point), num_groups, group)",
        new="_pack_bytes(zero_point, num_groups, group)",
        tests=("tests/backends/test_triton_packed.py::test_slices_give_the_layer[int4_w4a16_g32_zp-1]",),
    ),
    Mutant(
        "scales of groups of zeros count",
        "moereg/backends/_triton/packed.py",
        old="largest = exponent.where(counts, 0).amax(1, keepdim=True)",
        new="largest = exponent.amax(1, keepdim=True)",
        tests=("tests/backends/test_triton_packed.py::test_scales_of_groups_of_zeros_do_not_count",),
    ),
    Mutant(
        "weights of 8 bits take the rules of 4",
        "moereg/kernels/gemm/rules.py",
        old="(packed_bits or 0) <= rule.max_packed_bits",
        new="True",
        tests=(f"{_ONE_LAUNCH}test_which_calls_share_a_launch[int8_w8a16-gpt-oss-120b-2-Direct-64]",),
    ),
    Mutant(
        "products share a launch on any GPU",
        "moereg/backends/_triton/packed.py",
        old='self.may_share_launch = is_hopper and self.problem.dtype == "bfloat16"',
        new='self.may_share_launch = self.problem.dtype == "bfloat16"',
        tests=(f"{_ONE_LAUNCH}test_others_take_two_launches[changes2-cuda:sm100]",),
    ),
    Mutant(
        "products of weights of 8 bits share a launch",
        "moereg/kernels/gemm/rules.py",
        old=" and packed_bits <= 4",
        new="",
        tests=(f"{_ONE_LAUNCH}test_which_calls_share_a_launch[int8_w8a16-qwen3-30b-a3b-16-Flagged-128]",),
    ),
    Mutant(
        "flags lie behind the scratch of narrow layers",
        "moereg/backends/_triton/packed.py",
        old="            and has_room_for_flags(self.problem, num_routes)\n",
        new="",
        tests=(f"{_ONE_LAUNCH}test_others_take_two_launches[changes6-cuda:sm90]",),
    ),
    Mutant(
        "the sort leaves flags as they were",
        "moereg/kernels/rows/block_map.py",
        old="tl.store(tiles.flags + slot * _FLAG_WORDS, tl.zeros([EXPERTS], tl.int32), mask=i < blocks)",
        new="slot += 0",
        tests=(f"{_ONE_LAUNCH}test_the_sort_clears_the_flags_of_used_tiles_alone[one]",),
    ),
    Mutant(
        "the sort starts before the call in front has ended",
        "moereg/kernels/rows/sort.py",
        old="ROUTES=config.routes_per_program,\n",
        new="ROUTES=config.routes_per_program,\n            launch_pdl=overlap,\n",
        tests=(f"{_ONE_LAUNCH}test_only_what_comes_behind_the_sort_starts_early",),
    ),
    Mutant(
        "a tile of the first product counts twice",
        "moereg/kernels/gemm/flagged.py",
        old='tl.atomic_add(flag, 1, sem="release", scope="gpu")',
        new='tl.atomic_add(flag, 2, sem="release", scope="gpu")',
        tests=(f"{_ONE_LAUNCH}test_one_launch_gives_the_bits_of_two[mxfp4_w4a16-False-tokens0]",),
    ),
)

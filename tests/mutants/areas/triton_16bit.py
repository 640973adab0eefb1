"""Triton kernels of 16-bit weights, the sort of routes, and recorded launches."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "a tile has one row too many",
        "moereg/kernels/rows/tiles.py",
        old="row_mask = rows < end",
        new="row_mask = rows <= end",
        tests=("tests/kernels/test_triton_kernels.py::test_gate_up_gemm[T1k1E4H64I64-bfloat16-silu]",),
    ),
    Mutant(
        "accumulated in 16 bits",
        "moereg/kernels/gemm/operand.py",
        old='        accumulator = tl.dot(a, b, accumulator, input_precision="ieee")',
        new=('        accumulator = tl.dot(a, b, accumulator, input_precision="ieee").to(a.dtype).to(tl.float32)'),
        tests=("tests/kernels/test_triton_kernels.py::test_gate_up_gemm[T2k2E8H72I40-float16-gelu]",),
    ),
    Mutant(
        "up is clamped from above only",
        "moereg/kernels/gemm/activation.py",
        old="up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))",
        new="up = tl.where(up > LIMIT, LIMIT, up)",
        tests=("tests/kernels/test_triton_kernels.py::test_gate_up_gemm[T17k4E8H256I129-bfloat16-swigluoai]",),
    ),
    Mutant(
        "alpha is ignored",
        "moereg/kernels/gemm/activation.py",
        old="return x / (1.0 + tl.exp(-ALPHA * x))",
        new="return x / (1.0 + tl.exp(-x))",
        tests=("tests/kernels/test_triton_kernels.py::test_gate_up_gemm[T17k4E8H256I129-bfloat16-swigluoai]",),
    ),
    Mutant(
        "a tile for an expert without rows",
        "moereg/kernels/rows/block_map.py",
        old="(counts > 0).to(tl.int32))",
        new="1)",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes[1-1-4-4-16-random-one_launch]",),
    ),
    Mutant(
        "the last tile of one row is lost",
        "moereg/kernels/rows/block_map.py",
        old="(counts - SLACK + height - 1) // height,",
        new="(counts - SLACK + height - 2) // height,",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes[17-1-4-4-16-one_expert-one_launch]",),
    ),
    Mutant(
        "low tiles of tall experts",
        "moereg/kernels/rows/block_map.py",
        old="height = tl.where(counts > BLOCK_M, TALL, BLOCK_M)",
        new="height = tl.where(counts > TALL, TALL, BLOCK_M)",
        tests=("tests/kernels/test_triton_sort.py::test_tall_tiles_come_first[mixed-one_launch]",),
    ),
    Mutant(
        "tall tiles stay where their experts are",
        "moereg/kernels/rows/block_map.py",
        old="first_block = tl.where(counts > BLOCK_M, first_tall, num_tall + first_block - first_tall)",
        new="first_block += 0",
        tests=("tests/kernels/test_triton_sort.py::test_tall_tiles_come_first[mixed-one_launch]",),
    ),
    Mutant(
        "low tiles begin among the tall ones",
        "moereg/kernels/rows/tiles.py",
        old="        block += first_block\n",
        new="",
        tests=("tests/kernels/test_tall_tiles.py::test_layers_with_tall_and_low_tiles[one_has_most]",),
    ),
    Mutant(
        "too few programs for tall tiles",
        "moereg/kernels/gemm/grouped.py",
        old=" + num_routes // config.tall.block_m * tall_tiles_n",
        new="",
        tests=("tests/kernels/test_tall_tiles.py::test_there_are_programs_for_any_counts",),
    ),
    Mutant(
        "few tall tiles of the second product stay few",
        "moereg/kernels/gemm/fit.py",
        old="-(-shape.down_columns // columns) <= _ONE_EACH else",
        new="-(-shape.down_columns // columns) < 0 else",
        tests=("tests/kernels/test_tall_tiles.py::test_fitted_tiles",),
    ),
    Mutant(
        "tall tiles take more stages than their part",
        "moereg/kernels/gemm/fit.py",
        old="(shared_bytes // programs - 1024)",
        new="(shared_bytes - 1024)",
        tests=("tests/kernels/test_tall_tiles.py::test_fitted_tiles",),
    ),
    Mutant(
        "the last group of tiles counts as full",
        "moereg/kernels/rows/tiles.py",
        old="group_blocks = tl.minimum(num_blocks - first_block, GROUP_M)",
        new="group_blocks = GROUP_M",
        tests=("tests/backends/test_triton_layers.py::test_16_and_32_bits[fp32-standard]",),
    ),
    Mutant(
        "an expert that is named twice loses a route",
        "moereg/kernels/rows/direct.py",
        old="tl.where(tokens == own_route // TOP_K, 1 << 20, 1)",
        new="tl.where(tokens == own_route // TOP_K, 1, 1)",
        tests=(
            (
                "tests/kernels/test_triton_kernels.py::"
                "test_unsorted_stages_agree_with_sorted_ones[direct-T16k2E4H255I64-float32-silu]"
            ),
        ),
    ),
    Mutant(
        "ids past the experts read the map",
        "moereg/kernels/rows/direct.py",
        old="    expert = tl.where(expert < num_experts, expert, -1)\n",
        new="",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes",),
    ),
    Mutant(
        "totals are not carried from one run of chunks to the next",
        "moereg/kernels/rows/sort.py",
        old="counts + totals[None, :], mask=mask)",
        new="counts, mask=mask)",
        tests=("tests/kernels/test_triton_sort.py::test_more_chunks_than_a_scan_adds_up_at_a_time",),
    ),
    Mutant(
        "a tile too few is launched",
        "moereg/kernels/rows/plan.py",
        old="active * (block_m - 1)) // block_m",
        new="active * (block_m - 2)) // block_m",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes",),
    ),
    Mutant(
        "the bias of the second product is not weighted",
        "moereg/kernels/gemm/gemv.py",
        old="                    b *= tl.load(topk_weights + route)\n",
        new="                    pass\n",
        tests=(
            (
                "tests/kernels/test_triton_kernels.py::"
                "test_unsorted_stages_agree_with_sorted_ones[gemv-T2k2E8H72I40-float16-gelu]"
            ),
        ),
    ),
    Mutant(
        "one element behind the row is read",
        "moereg/kernels/gemm/gemv.py",
        old="            mask = offs_k < hidden_size\n",
        new="            mask = offs_k <= hidden_size\n",
        tests=(
            (
                "tests/kernels/test_triton_kernels.py::"
                "test_unsorted_stages_agree_with_sorted_ones[gemv-T1k1E4H64I64-bfloat16-silu]"
            ),
        ),
    ),
    Mutant(
        "up before gate",
        "moereg/layouts.py",
        old="copy_(w13.unflatten(dim, (2, -1)).transpose(dim, dim + 1))",
        new="copy_(w13.unflatten(dim, (2, -1)).flip(dim).transpose(dim, dim + 1))",
        tests=("tests/backends/test_triton_layers.py::test_16_and_32_bits[one_token-standard]",),
    ),
    Mutant(
        "a replay forgets where pointers are",
        "moereg/kernels/launch/replay.py",
        old="                self._starts = pointers\n",
        new="                pass\n",
        tests=("tests/kernels/test_triton_launch.py::test_a_replay_launches_the_same_with_other_pointers",),
    ),
    Mutant(
        "row offsets of 32 bits",
        "moereg/kernels/gemm/grouped.py",
        old="gemm.out + tile.rows.to(tl.int64)[:, None]",
        new="gemm.out + tile.rows[:, None]",
        tests=("tests/kernels/test_triton_rows.py::test_rows_may_lie_2_to_the_31_elements_apart",),
    ),
    Mutant(
        "all copies of a token go to its first row",
        "moereg/kernels/rows/copy.py",
        old="tl.load(route_row + token * TOP_K + k)",
        new="tl.load(route_row + token * TOP_K)",
        tests=(
            (
                "tests/kernels/test_triton_rows.py::test_tokens_are_copied_to_the_rows_of_all_their_routes[5-3-130-11-dtype1]"
            ),
        ),
    ),
    Mutant(
        "a sorted row gets the weight of another route",
        "moereg/kernels/rows/reduce.py",
        old="tl.load(topk_weights + route, mask=row >= 0, other=0.0)",
        new="tl.load(topk_weights + row, mask=row >= 0, other=0.0)",
        tests=(
            (
                "tests/kernels/test_triton_rows.py::test_sorted_rows_are_added_with_the_weights_of_their_routes[5-3-130-11-False-True]"
            ),
        ),
    ),
    Mutant(
        "every choice has the early weight of the first",
        "moereg/kernels/rows/reduce.py",
        old="value *= tl.sum(tl.where(choices == k, weights, 0.0), 0)",
        new="value *= tl.sum(tl.where(choices == 0, weights, 0.0), 0)",
        tests=(
            (
                "tests/kernels/test_triton_rows.py::test_sorted_rows_are_added_with_the_weights_of_their_routes[5-3-130-11-True-True]"
            ),
        ),
    ),
    Mutant(
        "a program that scans alone leaves out the chunks in front",
        "moereg/kernels/rows/sort.py",
        old="offsets += tl.sum(tl.where((chunks < chunk)[:, None], by_chunk, 0), 0)",
        new="offsets += tl.sum(tl.where((chunks < 0)[:, None], by_chunk, 0), 0)",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes[17-4-60-15-32-random-two_launches]",),
    ),
    Mutant(
        "any number of routes is scanned by the programs that place them",
        "moereg/kernels/rows/sort.py",
        old="scans_alone = num_routes <= config.short_scan_routes and chunks",
        new="scans_alone = chunks",
        tests=("tests/kernels/test_triton_sort.py::test_few_routes_are_sorted_in_few_launches[8193-8-3]",),
    ),
    Mutant(
        "a rule for few tiles ends before its last number of them",
        "moereg/kernels/hopper/config.py",
        old="fewest_tiles <= rule.max_fewest_tiles",
        new="fewest_tiles < rule.max_fewest_tiles",
        tests=("tests/kernels/test_config.py::test_few_tiles_have_half_the_columns[96-28672-88-128]",),
    ),
    Mutant(
        "a shard's rule serves layers of any number of columns",
        "moereg/kernels/hopper/config.py",
        old="rule.min_columns <= num_columns <= rule.max_columns",
        new="rule.min_columns <= num_columns",
        tests=("tests/kernels/test_config.py::test_hopper_rules[769-64-expected5]",),
    ),
    Mutant(
        "heavy tiles that should be spread come first",
        "moereg/kernels/hopper/config.py",
        old="min_experts=64, heavy_first=SPREAD_HEAVY,",
        new="min_experts=64, heavy_first=True,",
        tests=("tests/kernels/test_config.py::test_hopper_rules[1536-128-expected6]",),
    ),
    Mutant(
        "a staged store may reach into the slack behind half a tile",
        "moereg/kernels/hopper/config.py",
        old="if self.bodies & 0b100 else self.block_m",
        new="if self.bodies & 0b1 == 0 else self.block_m",
        tests=("tests/kernels/test_config.py::test_no_store_of_a_body_reaches_into_its_slack",),
    ),
    Mutant(
        "a heavy tile takes the place of the light one that it meets",
        "moereg/kernels/rows/block_map.py",
        old="before = (scaled + tl.where(after, own, own - 1))",
        new="before = (scaled + own - 1)",
        tests=("tests/kernels/test_triton_sort.py::test_heavy_tiles_are_spread_evenly[2-2-LHLH]",),
    ),
    Mutant(
        "routes are added from the last to the first",
        "moereg/kernels/rows/reduce.py",
        old=("    for k in tl.static_range(TOP_K):\n        route = token * TOP_K + k\n        # Rows of"),
        new=("    for k in tl.static_range(TOP_K):\n        route = token * TOP_K + TOP_K - 1 - k\n        # Rows of"),
        tests=("tests/kernels/test_triton_rows.py::test_routes_are_added_from_the_first_choice_to_the_last[False]",),
    ),
    Mutant(
        "sorted rows are added from the last to the first",
        "moereg/kernels/rows/reduce.py",
        old=("        route = token * TOP_K + k\n        if EARLY"),
        new=("        route = token * TOP_K + TOP_K - 1 - k\n        if EARLY"),
        tests=("tests/kernels/test_triton_rows.py::test_routes_are_added_from_the_first_choice_to_the_last[True]",),
    ),
    Mutant(
        "rows of routes that add nothing are read",
        "moereg/kernels/rows/reduce.py",
        old="        mask = (columns < hidden_size) & (expert >= 0)\n",
        new="        mask = columns < hidden_size\n",
        tests=("tests/kernels/test_triton_kernels.py::test_reduce_routes[1-1-64-dtype0]",),
    ),
    Mutant(
        "a replay for another number of tokens",
        "moereg/backends/_triton/recorded.py",
        old="hidden_states.shape[-2], out.stride(-2)",
        new="0, out.stride(-2)",
        tests=("tests/kernels/test_triton_launch.py::test_what_a_launch_depends_on_is_recorded_anew",),
    ),
    Mutant(
        "a replay with pointers of another alignment",
        "moereg/backends/_triton/recorded.py",
        old='device.type != "cuda" or all_bits % _POINTER_ALIGNMENT',
        new='device.type != "cuda"',
        tests=("tests/kernels/test_triton_launch.py::test_pointers_that_are_not_aligned_are_never_replayed",),
    ),
    Mutant(
        "a replay where a tensor is missing",
        "moereg/backends/_triton/recorded.py",
        old="device.index, missing)",
        new="device.index, 0)",
        tests=("tests/kernels/test_triton_launch.py::test_what_a_launch_depends_on_is_recorded_anew",),
    ),
    Mutant(
        "counts of a chunk behind the last are added",
        "moereg/kernels/rows/sort.py",
        old="(chunks * CHUNK < num_routes)",
        new="(chunks * CHUNK <= num_routes)",
        tests=("tests/kernels/test_triton_sort.py::test_sort_routes",),
    ),
    Mutant(
        "the last columns of a GEMV are read past the last expert",
        "moereg/kernels/gemm/gemv.py",
        old="loaded_columns = tl.minimum(columns, num_columns - 1)\n    wait",
        new="loaded_columns = columns\n    wait",
        tests=("tests/kernels/test_triton_kernels.py::test_unsorted_stages_agree_with_sorted_ones",),
    ),
    Mutant(
        "rows that fill one tile get a tall one",
        "moereg/kernels/gemm/fit.py",
        old="shape.most_rows > gate_up.block_m",
        new="shape.most_rows >= gate_up.block_m",
        tests=("tests/kernels/test_tall_tiles.py::test_fitted_tiles",),
    ),
    Mutant(
        "the last group of tiles is one too tall",
        "moereg/kernels/rows/tiles.py",
        old="tl.minimum(num_blocks - first_block, GROUP_M)",
        new="tl.minimum(num_blocks - first_block + 1, GROUP_M)",
        tests=(
            "tests/kernels/test_triton_kernels.py::test_every_tile_has_one_number_and_a_group_takes_its_columns_in_turn",
        ),
    ),
)

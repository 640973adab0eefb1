"""Faults that only a Hopper GPU shows: Gluon has no interpreter, and a CPU neither captures nor overlaps.

Each names few tests, since compiling their kernels takes most of the time.
"""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_KERNELS: Final = "moereg/kernels/"
_OF_ROWS: Final = "tests/kernels/test_gluon_kernels.py::test_layer_of_kernels"
_REPEATED: Final = "tests/kernels/test_gluon_kernels.py::test_a_repeated_call_equals_a_first_one_on_other_tensors"
_PACKED: Final = "tests/backends/test_gluon_packed.py::test_layers"
_ONE_LAUNCH: Final = "tests/backends/test_triton_one_launch.py::TestOnHopper::"
_QUANTIZED: Final = "tests/backends/test_gluon_quantized.py::test_layers"

MUTANTS: Final = (
    Mutant(
        "the second half of a tile has the scales of the first",
        _KERNELS + "hopper/quantized_consumer.py",
        old="high0 += first * high_scale[:, None]",
        new="high0 += first * low_scale[:, None]",
        tests=(f"{_QUANTIZED}[fp8_block128-silu-0]",),
    ),
    Mutant(
        "the second half of an unscaled tile is the last step's alone",
        _KERNELS + "hopper/quantized_consumer.py",
        old="            mbarrier.arrive(ring.empty.index(slot))\n            high += product\n",
        new="            mbarrier.arrive(ring.empty.index(slot))\n            high = product\n",
        tests=(f"{_QUANTIZED}[fp8_channel_token-silu-8]",),
    ),
    Mutant(
        "products of packed weights lack the scales of their rows",
        _KERNELS + "hopper/packed_consumer.py",
        old="return x * (value * UNIT)[:, None]",
        new="return x * UNIT",
        tests=(f"{_PACKED}[0-int8_w8a16-silu]",),
    ),
    Mutant(
        "both halves of a consumer's packed weights are the first",
        _KERNELS + "hopper/packed_consumer.py",
        old="second = _fragment(ring, slot, 1, k & 1,",
        new="second = _fragment(ring, slot, 0, k & 1,",
        tests=(f"{_PACKED}[1-mxfp4_w4a16-silu]",),
    ),
    Mutant(
        "every step of packed weights has the scales of the first",
        _KERNELS + "hopper/packed_producer.py",
        old="tile.expert * scale_words + k // SPAN",
        new="tile.expert * scale_words",
        tests=(f"{_PACKED}[2-int4_w4a16_g128-swigluoai]",),
    ),
    Mutant(
        "up is clamped from above only",
        _KERNELS + "hopper/consumer.py",
        old="up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))",
        new="up = gl.where(up > LIMIT, LIMIT, up)",
        tests=(f"{_OF_ROWS}[0-False-1000-16-16-4-448-192-dtype1-swigluoai-True-1.0-True]",),
    ),
    Mutant(
        "every expert has the bias of the first",
        _KERNELS + "hopper/consumer.py",
        old="gl.load(bias + place.expert.to(gl.int64) * num_columns + at,",
        new="gl.load(bias + at,",
        tests=(f"{_OF_ROWS}[0-False-1000-16-16-4-448-192-dtype1-swigluoai-True-1.0-True]",),
    ),
    Mutant(
        "the second half of the rows is the first",
        _KERNELS + "hopper/producer.py",
        old="load_box(half_rows, [row + HALF, at], ready, ring.rows.index(2 * slot + 1), pred=has_high)",
        new="load_box(half_rows, [row, at], ready, ring.rows.index(2 * slot + 1), pred=has_high)",
        tests=(f"{_OF_ROWS}[1-True-3000-32-16-4-520-320-dtype2-gelu_tanh-True-0.0-True]",),
    ),
    Mutant(
        "a tile is left out where programs take their next ones",
        _KERNELS + "hopper/ring.py",
        old='return gl.num_programs(0) + gl.atomic_add(tile_counter, 1, sem="relaxed")',
        new='return gl.num_programs(0) + 1 + gl.atomic_add(tile_counter, 1, sem="relaxed")',
        tests=(f"{_OF_ROWS}[4-False-3000-16-16-4-1024-1856-dtype4-relu2-False-0.0-False]",),
    ),
    Mutant(
        "the slack behind a half is the one behind all",
        _KERNELS + "hopper/producer.py",
        old="return has_slack, gl.where(num_rows > MOST[1], BLOCK_M, BLOCK_M // 2)",
        new="return has_slack, gl.where(num_rows > MOST[1], BLOCK_M, BLOCK_M)",
        tests=("tests/kernels/test_gluon_kernels.py::test_tiles_of_every_body",),
    ),
    Mutant(
        "the slack of a tile is left out",
        _KERNELS + "hopper/ring.py",
        old="num_rows = gl.where(num_rows > BLOCK_M + SLACK, BLOCK_M, num_rows)",
        new="num_rows = gl.minimum(num_rows, BLOCK_M)",
        tests=(_OF_ROWS,),
    ),
    Mutant(
        "no kernel waits for the one in front",
        _KERNELS + "launch/overlap.py",
        old="        tl.extra.cuda.gdc_wait()\n",
        new="        pass\n",
        tests=(f"{_REPEATED}[standard]",),
    ),
    Mutant(
        "a captured call takes its scratch from the pool",
        "moereg/workspace.py",
        old="if torch.cuda.is_current_stream_capturing():",
        new="if False:",
        tests=("tests/backends/test_gpu_capture.py",),
    ),
    Mutant(
        "no rows of guard in front of sorted rows",
        "moereg/backends/_triton/plain.py",
        old="rows = GUARD_ROWS + num_tokens * problem.top_k",
        new="rows = num_tokens * problem.top_k",
        tests=(f"{_REPEATED}[standard]",),
    ),
    Mutant(
        "a replay for another number of tokens",
        "moereg/backends/_triton/recorded.py",
        old="hidden_states.shape[-2], out.stride(-2)",
        new="0, out.stride(-2)",
        tests=(f"{_REPEATED}[standard]",),
    ),
    Mutant(
        "a replay keeps the tensor maps of the first call",
        _KERNELS + "launch/replay.py",
        old="        self.arguments[self.place] = self.encode(self.descriptor)\n",
        new="        pass\n",
        tests=(f"{_REPEATED}[standard]",),
    ),
    Mutant(
        "tiles of the second product do not wait for those of the first in their launch",
        _KERNELS + "gemm/flagged.py",
        old="while count < up_tiles:",
        new="while count < 0:",
        tests=(f"{_ONE_LAUNCH}test_replays_behind_each_other_without_a_pause",),
    ),
)

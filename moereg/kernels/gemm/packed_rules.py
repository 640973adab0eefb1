"""The shipped launch configurations of packed weights, any format, by the activations' 2 bytes: data.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on 2026-11-21: up to 5 rows an expert or 8 tokens 10 to 30
candidates on int4_w4a16_g128 of qwen3-30b-a3b and mixtral-8x7b, mxfp4_w4a16 and nvfp4_w4a16 of qwen3-30b-a3b and
gpt-oss-120b and int8_w8a16 of qwen3-30b-a3b; beyond 3 to 11 candidates on some of these. Three or more programs of four
warps on a multiprocessor, some of which restore weights while others multiply, beat larger tiles, which restore less
often. Tiles of 8 rows, or of 1 where there is one token, take up to a quarter less time than tiles of 16, whose rows
that do not count are filled with zeros too. The pairs for up to 22 and 96 rows are those of mixtral-8x7b at T 64 and
256. All with uniform routings: an expert that gets many more rows than the average has its weights restored once for
every 8 or 16 of them.
"""

from __future__ import annotations

from moereg.kernels.gemm.config import read_rules

# First match counts, as in `rules`.
PACKED_RULES = read_rules(
    """
    bytes tokens rows bits way    | m  group mask | n   k   warps stages slices | n   k   warps stages slices
    2     1      any  8    single | 1  1     yes  | 32  128 4     3      4      | 16  128 8     3      8
    # Two tokens name so few experts that more, narrower tiles pay: 1 to 10 % (mxfp4 and int4). From four on they lose.
    2     2      any  4    direct | 8  1     yes  | 64  256 4     3      1      | 64  128 4     4      1
    2     8      any  8    direct | 8  1     yes  | 128 256 4     3      1      | 128 128 4     4      1
    # Excluded in the batched format, whose tokens are infinitely many: tiles of 8 rows were not timed there.
    2     finite 5    8    sorted | 8  1     yes  | 128 256 4     3      1      | 128 128 4     4      1
    2     16     any  8    direct | 16 1     yes  | 128 128 4     4      1      | 128 128 4     3      1
    2     any    11   8    sorted | 16 1     yes  | 128 128 4     4      1      | 128 128 4     4      1
    2     any    22   8    sorted | 32 1     yes  | 128 128 4     3      1      | 128 256 4     3      1
    2     any    96   8    sorted | 64 1     yes  | 128 128 8     3      1      | 128 128 8     3      1
    2     any    any  8    sorted | 64 8     no   | 128 128 4     3      1      | 128 128 4     3      1
    """
)


def shares_launch(num_tokens: int, rows_per_expert: float, packed_bits: int) -> bool:
    """Whether both products of sorted rows are faster in one launch (`flagged`) on an H200, in bfloat16.

    5 to 16 % of the layer at 9 and 16 tokens, measured on 2026-11-23 with mxfp4_w4a16 of gpt-oss-120b and
    qwen3-30b-a3b, nvfp4_w4a16 of qwen3-30b-a3b and int4_w4a16_g128 of qwen3-30b-a3b and mixtral-8x7b. No more tokens
    were, nor weights of 8 bits, nor other devices.
    """
    return num_tokens <= 16 and rows_per_expert <= 5 and packed_bits <= 4

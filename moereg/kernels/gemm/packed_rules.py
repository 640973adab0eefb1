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

from moereg.kernels.gemm.config import ConfigRule, GemmPair, GroupedGemmConfig, SinglePair

# First match counts, as in `rules`.
PACKED_RULES = (
    ConfigRule(
        element_bytes=2,
        max_tokens=1,
        configs=SinglePair(
            gate_up=GroupedGemmConfig(
                block_m=1, block_n=32, block_k=128, group_m=1, num_warps=4, num_stages=3, mask_rows=True, slices=4
            ),
            down=GroupedGemmConfig(
                block_m=1, block_n=16, block_k=128, group_m=1, num_warps=8, num_stages=3, mask_rows=True, slices=8
            ),
        ),
    ),
    # Two tokens name so few experts that more, narrower tiles pay: 1 to 10 % (mxfp4 and int4). From four on they lose.
    ConfigRule(
        element_bytes=2,
        max_tokens=2,
        max_packed_bits=4,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=8, block_n=64, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=8, block_n=64, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_tokens=8,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=8, block_n=128, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=8, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    # Excluded in the batched format, where tiles of 8 rows were not timed.
    ConfigRule(
        element_bytes=2,
        max_tokens=2**31,
        max_rows_per_expert=5,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=8, block_n=128, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=8, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_tokens=16,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=11,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=22,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=32, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=32, block_n=128, block_k=256, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=96,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=64, block_n=128, block_k=128, group_m=1, num_warps=8, num_stages=3, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=64, block_n=128, block_k=128, group_m=1, num_warps=8, num_stages=3, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(block_m=64, block_n=128, block_k=128, group_m=8, num_warps=4, num_stages=3),
            down=GroupedGemmConfig(block_m=64, block_n=128, block_k=128, group_m=8, num_warps=4, num_stages=3),
        ),
    ),
)


def shares_launch(num_tokens: int, rows_per_expert: float, packed_bits: int) -> bool:
    """Whether both products of sorted rows are faster in one launch (`flagged`) on an H200, in bfloat16.

    5 to 16 % of the layer at 9 and 16 tokens, measured on 2026-11-23 with mxfp4_w4a16 of gpt-oss-120b and
    qwen3-30b-a3b, nvfp4_w4a16 of qwen3-30b-a3b and int4_w4a16_g128 of qwen3-30b-a3b and mixtral-8x7b. No more tokens
    were, nor weights of 8 bits, nor other devices.
    """
    return num_tokens <= 16 and rows_per_expert <= 5 and packed_bits <= 4

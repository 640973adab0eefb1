"""Launch configurations of the expert matmuls, and the rule that picks one: data, without device code.

Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on 2026-11-20 and 21 over mixtral-8x7b, qwen3-30b-a3b,
olmoe-1b-7b, gpt-oss-120b and sonic-30b at T 1, 4, 16, 64 and 256, each half of a pair swept over 10 to 50 candidates. A
row is the candidate with the best geometric mean. `benches/results/h200_sweep.json` has what a choice from the other
shapes costs a shape: so little that the rows look at no size but the rows per expert.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GemvConfig:
    """Launch configuration of one product of a vector.

    Attributes:
        block_n: weight rows per program (gate and up count as two); a power of two.
        block_k: reduced elements per step; a power of two, masked where it does not divide.
        num_warps: warps per program.
        num_stages: steps whose weights are on their way at a time.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedGemmConfig:
    """Launch configuration of one grouped GEMM.

    Attributes:
        block_m: rows of a tile; equal to the plan's.
        block_n: columns of the weight product per tile (gate and up count as two).
        block_k: reduced elements per step; masked where it does not divide the padded dimension.
        group_m: tiles of rows that share the columns of a weight before the next columns are taken, for the L2.
        num_warps: warps per program.
        num_stages: depth of the software pipeline. Two to four programs per multiprocessor beat a deeper pipeline.
        mask_rows: whether rows past the end of a tile are left out instead of repeating the last one: pays where tiles
            are mostly empty.
        slices: `block_k` long pieces of a step, one per warp, or 1: warps share columns. Packed weights only. In the
            second product of a `SinglePair` each belongs to one route.
        tall: of tiles of experts with more than `block_m` rows, in the same launch and with as many warps; the plan's
            `tall` is its `block_m`. None: these experts have several tiles like the others.
    """

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    mask_rows: bool = False
    slices: int = 1
    tall: GroupedGemmConfig | None = None


@dataclass(frozen=True, slots=True)
class GemvPair:
    """Configurations of both products where every route is a vector; routes are neither sorted nor stored."""

    gate_up: GemvConfig
    down: GemvConfig


@dataclass(frozen=True, slots=True)
class GemmPair:
    """Configurations of both grouped GEMMs, with equal `block_m`.

    Attributes:
        gate_up: the first GEMM's.
        down: the second's.
        sort_routes: whether rows come from a plan; else from `DirectRoutes`, for at most `block_m` tokens.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig
    sort_routes: bool = True

    @property
    def tall(self) -> int:
        """Rows of a plan's tall tiles; 0: it has none."""
        return 0 if self.gate_up.tall is None else self.gate_up.tall.block_m


@dataclass(frozen=True, slots=True)
class SinglePair:
    """Configurations of both products of one token with packed weights; the second one adds up the routes itself.

    Attributes:
        gate_up: the first product's, on `DirectRoutes`.
        down: the second's, whose slices the routes share.
    """

    gate_up: GroupedGemmConfig
    down: GroupedGemmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRule:
    """One row of the table of shipped configurations.

    Attributes:
        element_bytes: bytes of an activation.
        configs: of both products.
        max_tokens: the rule applies up to this number of tokens,
        max_rows_per_expert: and up to this average of rows per expert,
        max_packed_bits: and for packed weights of up to so many bits.
    """

    element_bytes: int
    configs: GemvPair | SinglePair | GemmPair
    max_tokens: float = math.inf
    max_rows_per_expert: float = math.inf
    max_packed_bits: int = 8


# First match counts. A tile holds all rows of nearly every expert up to 128 rows (the average and two to three times
# its root), so that weights are read once. Rows beyond the last measured ones (T 256 of mixtral, 64 rows an expert) and
# of 32-bit weights, whose products run on plain multiply-adds, are not tuned.
CONFIG_RULES = (
    ConfigRule(
        element_bytes=2,
        max_tokens=1,
        configs=GemvPair(
            gate_up=GemvConfig(block_n=32, block_k=128, num_warps=2, num_stages=4),
            down=GemvConfig(block_n=8, block_k=1024, num_warps=4, num_stages=3),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_tokens=16,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=64, block_k=128, group_m=1, num_warps=4, num_stages=5, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            sort_routes=False,
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=11,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=16, block_n=64, block_k=128, group_m=1, num_warps=4, num_stages=5, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=16, block_n=64, block_k=128, group_m=1, num_warps=4, num_stages=4, mask_rows=True
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
                block_m=32, block_n=128, block_k=128, group_m=1, num_warps=4, num_stages=3, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=48,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=64, block_n=128, block_k=64, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=64, block_n=128, block_k=64, group_m=1, num_warps=4, num_stages=4, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        max_rows_per_expert=96,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(
                block_m=128, block_n=256, block_k=64, group_m=1, num_warps=8, num_stages=4, mask_rows=True
            ),
            down=GroupedGemmConfig(
                block_m=128, block_n=256, block_k=64, group_m=1, num_warps=8, num_stages=4, mask_rows=True
            ),
        ),
    ),
    ConfigRule(
        element_bytes=2,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3),
            down=GroupedGemmConfig(block_m=128, block_n=256, block_k=64, group_m=8, num_warps=8, num_stages=3),
        ),
    ),
    ConfigRule(
        element_bytes=4,
        max_tokens=1,
        configs=GemvPair(
            gate_up=GemvConfig(block_n=32, block_k=64, num_warps=2, num_stages=4),
            down=GemvConfig(block_n=8, block_k=512, num_warps=4, num_stages=3),
        ),
    ),
    ConfigRule(
        element_bytes=4,
        max_rows_per_expert=32,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(block_m=16, block_n=32, block_k=64, group_m=4, num_warps=4, num_stages=2),
            down=GroupedGemmConfig(block_m=16, block_n=32, block_k=64, group_m=4, num_warps=4, num_stages=2),
        ),
    ),
    ConfigRule(
        element_bytes=4,
        configs=GemmPair(
            gate_up=GroupedGemmConfig(block_m=64, block_n=64, block_k=32, group_m=8, num_warps=8, num_stages=2),
            down=GroupedGemmConfig(block_m=64, block_n=64, block_k=32, group_m=8, num_warps=8, num_stages=2),
        ),
    ),
)

# Packed weights, any format, by the activations' 2 bytes. Measured on one NVIDIA H200 (torch 2.11, Triton 3.6, bf16) on
# 2026-11-21: up to 5 rows an expert or 8 tokens 10 to 30 candidates on int4_w4a16_g128 of qwen3-30b-a3b and
# mixtral-8x7b, mxfp4_w4a16 and nvfp4_w4a16 of qwen3-30b-a3b and gpt-oss-120b and int8_w8a16 of qwen3-30b-a3b; beyond 3
# to 11 candidates on some of these. Three or more programs of four warps on a multiprocessor, some of which restore
# weights while others multiply, beat larger tiles, which restore less often. Tiles of 8 rows, or of 1 where there is
# one token, take up to a quarter less time than tiles of 16, whose rows that do not count are filled with zeros too.
# The pairs for up to 22 and 96 rows are those of mixtral-8x7b at T 64 and 256. All with uniform routings: an expert
# that gets many more rows than the average has its weights restored once for every 8 or 16 of them.
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

# Sizes a plan's block map before the configuration is known.
MIN_BLOCK_M = min(
    rule.configs.gate_up.block_m for rule in (*CONFIG_RULES, *PACKED_RULES) if isinstance(rule.configs, GemmPair)
)


def select_config(
    num_tokens: float,
    rows_per_expert: float,
    element_bytes: int,
    shared_bytes: int | None = None,
    packed_bits: int | None = None,
    least_block_m: int = 1,
    single: bool = True,
) -> GemvPair | SinglePair | GemmPair:
    """Returns the configurations of both products.

    Args:
        num_tokens: T; infinity for the batched format, whose rows come with a plan however few they are.
        rows_per_expert: average number of rows per expert.
        element_bytes: 2 or 4, of an activation.
        shared_bytes: shared memory that one program may use on the device; shortens pipelines that would not fit.
        packed_bits: of a weight, where it is packed; else weights have the dtype of the activations.
        least_block_m: rows that the device's matrix units take at least.
        single: whether the caller has kernels that add up the routes of one token.
    """
    # With scales, at most 1.25 bits a weight.
    weight_bits = 8 * element_bytes if packed_bits is None else packed_bits + 2
    for rule in CONFIG_RULES if packed_bits is None else PACKED_RULES:
        if (
            element_bytes == rule.element_bytes
            and num_tokens <= rule.max_tokens
            and rows_per_expert <= rule.max_rows_per_expert
            and (packed_bits or 0) <= rule.max_packed_bits
        ):
            configs = rule.configs
            if isinstance(configs, GemvPair):
                return configs
            if configs.gate_up.block_m < least_block_m or (isinstance(configs, SinglePair) and not single):
                continue
            gate_up = fit_pipeline(
                configs.gate_up, _stage_bytes(configs.gate_up, element_bytes, weight_bits), shared_bytes
            )
            down = fit_pipeline(configs.down, _stage_bytes(configs.down, element_bytes, weight_bits), shared_bytes)
            return dataclasses.replace(configs, gate_up=gate_up, down=down)
    raise AssertionError(f"no launch configuration for {element_bytes}-byte elements")


def fit_pipeline(config: GroupedGemmConfig, stage_bytes: int, shared_bytes: int | None) -> GroupedGemmConfig:
    """The configuration with as many stages as fit.

    Args:
        config: launch configuration.
        stage_bytes: that one stage keeps in shared memory.
        shared_bytes: that a program may use; None: any number.
    """
    if shared_bytes is None:
        return config
    # A kilobyte for the reductions and barriers that Triton adds.
    stages = max(1, min(config.num_stages, (shared_bytes - 1024) // stage_bytes))
    return dataclasses.replace(config, num_stages=stages)


def _stage_bytes(config: GroupedGemmConfig, element_bytes: int, weight_bits: int) -> int:
    return config.slices * config.block_k * (config.block_m * element_bytes + config.block_n * weight_bits // 8)

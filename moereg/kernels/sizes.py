"""Sizes, and an order, that kernels and backends agree on. Needs no library: backends read them before any kernel."""

from __future__ import annotations

from typing import Final

WEIGHT_PAD: Final = 64
"""The reduced dimension of 16- and 32-bit weights is padded to a multiple of this; packed weights have blocks of it."""

CODE_PAD: Final = 128
"""The reduced dimension of codes that are multiplied directly is padded to a multiple of this."""

GROUPED_BLOCK: Final = 1024
"""Columns of a program that rounds rows, where no scale makes it take a whole row."""

AMAX_PROGRAMS: Final = 256
"""Programs that look for the largest magnitude of a tensor; each leaves one number in the workspace."""

WORKSPACE_ALIGNMENT: Final = 256
"""Bytes: every piece of a workspace starts at a multiple, so that pointers stay aligned for any number of tokens."""

GUARD_ROWS: Final = 288
"""Unused rows in front of a buffer of rows, the longest tile: a store of the Hopper kernels is anchored there."""

FLAG_WORDS: Final = 32
"""int32 from one flag of a tile to the next: each has its own line, so that waiting for one does not slow another."""

SPREAD_HEAVY: Final = 2
"""A value of `heavy_first`: the tiles of experts with more than one are spread evenly among the others, each in order.

A tile of a light expert waits for its weights, one of a heavy expert multiplies: side by side both share the GPU.
"""

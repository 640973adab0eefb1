"""Sizes, and a tile order, that kernels and backends agree on. Imports no library: backends read it without kernels."""

from __future__ import annotations

from typing import Final

WEIGHT_PAD: Final = 64
"""Both sizes of packed weights, which have blocks of it, and rows of an intermediate are padded to a multiple."""

CODE_PAD: Final = 128
"""The reduced dimension of quantized weights that are multiplied directly is padded to a multiple of this."""

GROUPED_BLOCK: Final = 1024
"""Columns per program of a kernel that quantizes rows, unless a scale needs the whole row."""

AMAX_PROGRAMS: Final = 256
"""Programs that compute a tensor's absolute maximum; each leaves one number in the workspace."""

WORKSPACE_ALIGNMENT: Final = 256
"""Bytes: every piece of a workspace starts at a multiple, so that pointers stay aligned for any number of tokens."""

GUARD_ROWS: Final = 288
"""Unused rows in front of a row buffer, as many as the longest tile: the Hopper kernels' clipped stores begin there."""

FLAG_WORDS: Final = 32
"""int32 words per tile flag: each flag has its own cache line, so that polling one does not slow another."""

SPREAD_HEAVY: Final = 2
"""A value of `heavy_first`: tiles of experts with several are spread evenly among the others, each kind in order.

Tiles of light experts wait for weights while those of heavy experts multiply: side by side they overlap.
"""

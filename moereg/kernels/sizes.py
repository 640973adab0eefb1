"""Sizes that kernels and their callers agree on: paddings, guards and counts. Needs no library."""

from __future__ import annotations

from typing import Final

WEIGHT_PAD: Final = 64
"""The reduced dimension of 16- and 32-bit weights is padded to a multiple of this, and a block of packed ones is it."""

CODE_PAD: Final = 128
"""The reduced dimension of codes that are multiplied as they are is padded to a multiple of this."""

AMAX_PROGRAMS: Final = 256
"""Programs that look for the largest magnitude of a tensor; each leaves one number in the workspace."""

GUARD_ROWS: Final = 288
"""Unused rows in front of a buffer of rows: a store of the Hopper kernels is anchored there."""

WORKSPACE_ALIGNMENT: Final = 256
"""Bytes to whose multiples the pieces of a workspace are aligned, so that pointers stay so for any number of tokens."""

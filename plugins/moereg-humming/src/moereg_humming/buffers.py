"""The workspaces of a call: where its intermediate tensors lie, and how large they are at most."""

from __future__ import annotations

import dataclasses
import functools
from typing import Final

import torch

from moereg.author import MoEProblem, round_up

MAX_BLOCK_ROWS: Final = 256
"""Most rows of a tile. Humming has no larger one."""

NUM_LOCKS: Final = 8192
"""Counters by which CTAs that share a tile take turns, for both products. 580 tiles x 4 on a GPU of 132 SMs suffice."""

_ALIGNMENT: Final = 256
_ITEM_BYTES: Final = 2


@dataclasses.dataclass(frozen=True)
class Buffers:
    """Sizes of a call's buffers. N is T * K routes, S the padded routes at most.

    Attributes:
        problem: The layer.
        num_tokens: T.
    """

    problem: MoEProblem
    num_tokens: int

    @functools.cached_property
    def num_routes(self) -> int:
        """N."""
        return self.num_tokens * self.problem.top_k

    @functools.cached_property
    def num_columns(self) -> int:
        """Columns of the first product: 2I where gated, else I."""
        return self.problem.activation.num_halves * self.problem.intermediate_size

    @functools.cached_property
    def num_products(self) -> int:
        """Elements of workspace13: the output of either product, since the first is used up before the second runs."""
        return self.num_routes * max(self.num_columns, self.problem.hidden_size)

    @functools.cached_property
    def num_padded(self) -> int:
        """S: each expert's routes are padded to a multiple of the tile's rows."""
        num_used = min(self.num_routes, self.problem.num_local_experts)
        return round_up(self.num_routes + num_used * (MAX_BLOCK_ROWS - 1), MAX_BLOCK_ROWS)

    @functools.cached_property
    def parts(self) -> dict[str, tuple[int, int]]:
        """Parts of workspace2 by name: offset and size in bytes."""
        problem = self.problem
        sizes = {
            "intermediate": self.num_routes * problem.intermediate_size * _ITEM_BYTES,
            "inputs": self.num_tokens * problem.hidden_size * _ITEM_BYTES * problem.apply_router_weight_on_input,
            # The smallest tiles have 8 rows.
            "sorted": 2 * self.num_padded * 4,
            "experts": 2 * (self.num_padded // 8) * 4,
            "totals": 2 * 4,
            "locks": NUM_LOCKS * 4,
        }
        parts, offset = {}, 0
        for name, size in sizes.items():
            parts[name] = (offset, size)
            offset += round_up(size, _ALIGNMENT)
        parts["end"] = (offset, 0)
        return parts

    @property
    def num_intermediate(self) -> int:
        """Elements of workspace2."""
        return self.parts["end"][0] // _ITEM_BYTES

    def part(self, workspace2: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One part of workspace2 as a flat tensor."""
        offset, size = self.parts[name]
        part = workspace2[offset // _ITEM_BYTES : (offset + size) // _ITEM_BYTES]
        return part.view(dtype)

"""The numbers of tokens that kernels are compiled for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from moereg.arguments import check_count
from moereg.errors import ArgumentError, shown

__all__ = ["LARGEST_COUNT", "check_token_counts", "powers_of_two", "shown_counts"]

LARGEST_COUNT: Final = 16384
"""Up to here where nobody says how many tokens a call has."""


def check_token_counts(token_counts: object, most: int | None = None) -> tuple[int, ...]:
    """The numbers of tokens, ascending.

    Args:
        token_counts: Whole numbers, a call without tokens among them or not; 1 to `most` where None.
        most: Of a call of the layer, where known; 16,384 where None.

    Raises:
        ArgumentError: Something else was passed, a number is negative, or there is none.
    """
    if token_counts is None:
        return tuple(range(1, (most or LARGEST_COUNT) + 1))
    if isinstance(token_counts, (str, bytes)) or not isinstance(token_counts, Iterable):
        raise ArgumentError(
            f"token_counts must be numbers of tokens such as [1, 16, 64] or range(1, 8193), got {shown(token_counts)}"
        )
    counts = {check_count("a number of token_counts", count, minimum=0) for count in token_counts}
    if found := sorted(counts - {0}):
        return tuple(found)
    raise ArgumentError(f"token_counts must have a number of at least 1, got {shown(token_counts)}")


def powers_of_two(least: int, most: int) -> tuple[int, ...]:
    """The powers of two in a range, and its ends."""
    return tuple(sorted({least, most, *(2**n for n in range(most.bit_length()) if least <= 2**n <= most)}))


def shown_counts(counts: Sequence[int]) -> str:
    """`1 token`, `1 to 64 tokens`, or `3 numbers of tokens from 1 to 64` where some are left out."""
    least, most = counts[0], counts[-1]
    if len(counts) == 1:
        return f"{least} token{'s' * (least > 1)}"
    if len(counts) == most - least + 1:
        return f"{least} to {most} tokens"
    return f"{len(counts)} numbers of tokens from {least} to {most}"

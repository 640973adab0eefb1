"""Tables of the pages that commands write."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["cell", "table", "wrapped"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, a line for each row."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Somebody else's text as one cell, cut at 240 characters."""
    return " ".join(text.split()).replace("|", "\\|")[:240]


def wrapped(text: str) -> str:
    """A paragraph in lines of the pages' length."""
    return "\n".join(textwrap.wrap(text, 120, break_on_hyphens=False, break_long_words=False))

"""Tables of the pages that commands write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["cell", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, a line for each row."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(text: str) -> str:
    """Somebody else's text as one cell, cut at 240 characters."""
    return " ".join(text.split()).replace("|", "\\|")[:240]

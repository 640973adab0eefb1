"""Backends that only the board has: another one's class with something switched off, to show what that gives."""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers them, once."""

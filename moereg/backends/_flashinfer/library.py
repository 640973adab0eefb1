"""What every call of FlashInfer's kernels that compile at first use has to say before."""

from __future__ import annotations

import functools
import logging
from typing import Final

__all__ = ["announce"]

logger: Final = logging.getLogger("moereg")


@functools.cache
def announce(message: str) -> None:
    """Says once that something slow is about to start: what, how long about, and how to avoid it."""
    logger.warning(message)

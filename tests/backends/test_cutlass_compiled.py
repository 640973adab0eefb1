"""QuACK itself: its kernels with our epilogues compile for GPUs that are not there, on their tensor cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).parents[1] / "kernels" / "quack_compile.py"


@pytest.mark.parametrize(("arch", "instruction"), [("sm_90a", "wgmma"), ("sm_100a", "tcgen05")])
def test_kernels_compile_and_nothing_spills(arch: str, instruction: str) -> None:
    pytest.importorskip("quack", reason="quack-kernels is not installed; make test-peers installs it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("TRITON_INTERPRET", None)
    run = subprocess.run(
        [sys.executable, str(SCRIPT), arch], capture_output=True, text=True, env=environment, timeout=600
    )
    assert run.returncode == 0, run.stderr
    kernels = json.loads(run.stdout.splitlines()[-1])
    assert len(kernels) == 4
    for kernel in kernels:
        assert kernel[instruction] > 0, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["registers"] <= 168, kernel

"""The Gluon kernels compile for sm_90a without a device, with wgmma and tensor copies, without spilling."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

# 256 KiB of registers for a program's 384 threads, 168 each before they are shared out anew by role.
MAX_REGISTERS = 168
MAX_SHARED_BYTES = 227 * 1024


@pytest.mark.slow
@pytest.mark.timeout(1260)
def test_every_shipped_rule_compiles() -> None:
    script = pathlib.Path(__file__).with_name("gluon_aot.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(script.parents[2])
    process = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=environment, timeout=1200, check=False
    )
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert len(rows) >= 2
    for row in rows:
        assert row["wgmma"], row
        assert row["bulk_tensor"], row
        assert row["stack_bytes"] == 0, row
        assert row["registers"] <= MAX_REGISTERS, row
        # Numbers that are encoded are not clamped before their conversion.
        stores_codes = row["name"].startswith("gate_up") and ("grouped" in row["name"] or "given" in row["name"])
        assert (row["saturating"] > 0) == stores_codes, row
        assert row["shared_bytes"] <= MAX_SHARED_BYTES, row

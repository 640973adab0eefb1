"""The bench over the registry covers every registered backend, and a wrong backend gets no number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import ROOT, run_python

# Two more backends, and ceilings that take no time.
PLUGIN = """
from moereg.registry import register_moe_backend
from moereg.bench import roofline
from tests.support.fakes import FakeExperts, WrongExperts

roofline._CPU_READ_BYTES, roofline._CPU_MATMUL_SIZES = 1 << 24, (128,)
register_moe_backend("fake_right", 1, ("unquantized",), ("*",))(FakeExperts)
register_moe_backend("fake_wrong", 1, ("unquantized",), ("*",))(WrongExperts)
"""


def bench(folder: Path, expression: str) -> tuple[str, dict[str, Any]]:
    """Output and stored results of the benches that the expression selects."""
    (folder / "more_backends.py").write_text(PLUGIN)
    results = folder / "results.json"
    command = ["-m", "pytest", "benches/bench_experts.py", "-q", "-p", "more_backends"]
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]
    # Under several workers, pytest-benchmark measures nothing.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(*command, "-k", expression, f"--benchmark-json={results}", env=environment)
    assert done.returncode == 1, done.stdout + done.stderr  # The wrong one failed.
    stored: dict[str, Any] = json.loads(results.read_text())
    return done.stdout, stored


@pytest.mark.slow
def test_backends_are_compared_and_a_wrong_one_has_no_number(tmp_path: Path) -> None:
    out, stored = bench(tmp_path, "small-fp32-T1-")
    names = sorted(entry["name"].split("-")[3] for entry in stored["benchmarks"])
    assert "fake_right" in names
    assert "torch" in names
    assert "fake_wrong" not in names
    assert "wrong numbers (5.0" in out
    assert len({entry["group"] for entry in stored["benchmarks"]}) == 1
    assert stored["device"]
    assert stored["date"]
    assert "commit" in stored
    assert "torch" in stored["versions"]
    assert set(stored["machine_info"]) == {"cpu", "python_version"}
    for entry in stored["benchmarks"]:
        facts = entry["extra_info"]
        assert facts["share_of_roofline"] * entry["stats"]["median"] * 1e6 == pytest.approx(facts["roofline_us"])
        for name in ("tflops", "gbps", "relative_error", "workspace_bytes", "ceilings"):
            assert facts[name] is not None
        assert "float32 unquantized" in entry["group"]
        assert entry["group"].endswith("1 tokens")

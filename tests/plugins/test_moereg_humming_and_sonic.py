"""`moereg-humming` and `moereg-sonic` as a user installs them, without the libraries that they call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site

LAYER = "--experts 16 --hidden 512 --intermediate 256 --top-k 4"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "quant", "missing"),
    [
        ("humming", "int4_w4a16_g128", "requires humming-kernels<0.2,>=0.1.19, which is not installed"),
        ("sonic", "unquantized", "requires nvidia-cutlass-dsl<4.3,>=4.2.1, which is not installed"),
    ],
)
def test_a_wheel_without_its_library(tmp_path: Path, name: str, quant: str, missing: str) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / f"moereg-{name}")
    process = site.moereg(f"explain {LAYER} --quant {quant} --platform cuda:sm90 --json")
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    decision = next(each for each in found["decisions"] if each["backend"] == name and each["accepted"])
    assert decision["origin"] == f"moereg-{name}"
    # Nothing was measured that would put it above moereg's own.
    assert found["selected"] == "triton"

    process = site.moereg(f"explain {LAYER} --quant {quant} --json")
    assert process.returncode == 0, process.stderr
    decisions = [each for each in json.loads(process.stdout)["decisions"] if each["backend"] == name]
    assert all(missing in [reason["text"] for reason in each["reasons"]] for each in decisions)

    tests = f"plugins/moereg-{name}/tests"
    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, seconds=500)
    assert process.returncode == 0, process.stdout + process.stderr

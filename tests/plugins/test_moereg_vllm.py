"""`moereg-vllm` as a user without vllm installs it; with vllm it needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site

LAYER = "--experts 16 --hidden 1024 --intermediate 256 --top-k 4"


@pytest.mark.slow
def test_without_vllm_it_says_what_is_missing(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / "moereg-vllm")
    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "plugins/moereg-vllm/tests")
    assert process.returncode == 0, process.stdout + process.stderr

    process = site.moereg(f"explain {LAYER} --json")
    assert process.returncode == 0, process.stderr
    decisions = json.loads(process.stdout)["decisions"]
    found = {decision["backend"]: decision for decision in decisions if decision["origin"] == "moereg-vllm"}
    assert set(found) == {"deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton"}
    for decision in found.values():
        assert "requires vllm<0.27,>=0.26, which is not installed" in [reason["text"] for reason in decision["reasons"]]

    process = site.moereg(f"explain {LAYER} --quant int4_w4a16_g128 --platform cuda:sm90 --require marlin --json")
    assert process.returncode == 0, process.stderr
    said = json.loads(process.stdout)
    assert said["selected"] == "marlin"
    assert any("vllm" in text for decision in said["decisions"][:1] for text in decision["assumes"])

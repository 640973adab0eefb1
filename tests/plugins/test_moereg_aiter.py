"""`moereg-aiter` as a user installs it, without AITER."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site

LAYER = "--experts 16 --hidden 512 --intermediate 256 --top-k 4"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_without_its_library(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / "moereg-aiter")
    for request, selected, codes in (("", "triton", ["opt_in"]), ("--prefer aiter", "aiter", [])):
        process = site.moereg(f"explain {LAYER} --platform rocm:gfx942 {request} --json")
        assert process.returncode == 0, process.stderr
        found = json.loads(process.stdout)
        assert found["selected"] == selected
        decision = next(each for each in found["decisions"] if each["experts"] == "AiterExperts")
        assert (decision["backend"], decision["origin"], decision["priority"]) == ("aiter", "moereg-aiter", 55)
        assert [reason["code"] for reason in decision["reasons"]] == codes

    process = site.moereg("info --json")
    assert process.returncode == 0, process.stderr
    (backend,) = (each for each in json.loads(process.stdout)["backends"] if each["name"] == "aiter")
    assert not backend["available"]
    assert len(backend["cells"]) == 4
    texts = [reason["text"] for reason in backend["reasons"]]
    assert any("amd-aiter" in text and text.endswith("which is not installed") for text in texts)

    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "plugins/moereg-aiter/tests", seconds=500)
    assert process.returncode == 0, process.stdout + process.stderr

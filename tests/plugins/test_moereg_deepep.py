"""`moereg-deepep` as a user installs it, without DeepEP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site

GROUP = "--experts 16 --hidden 2048 --intermediate 256 --top-k 4 --tokens 64 --ep 2"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_without_its_library(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / "moereg-deepep")
    process = site.moereg(f"explain {GROUP} --platform cuda:sm90")
    assert process.returncode == 0, process.stderr
    shown = process.stdout.partition("experts of a rank behind")[0]
    assert "rejected  deepep (standard of moereg-deepep 0.1.0, cuda:sm90+, predicted priority 80)" in shown
    assert "is opt-in: name it in require or prefer [opt_in]" in shown
    process = site.moereg(f"explain {GROUP} --platform cuda:sm90 --way deepep --json")
    assert process.returncode == 0, process.stderr
    movement = json.loads(process.stdout)["movement"]
    assert movement["selected"] == "deepep"
    assert movement["decisions"][0]["origin"] == "moereg-deepep"

    info = json.loads(site.moereg("info --json").stdout)
    statuses = {(plugin["group"], plugin["name"]): plugin["status"] for plugin in info["plugins"]}
    assert statuses == {("moereg.prepare_finalize", "deepep"): "loaded"}
    (found,) = (way for way in info["ways"] if way["name"] == "deepep")
    assert not found["available"]
    assert (found["origin"], found["origin_version"]) == ("moereg-deepep", "0.1.0")
    assert all(cell["opt_in"] for cell in found["cells"])
    shown = " ".join(site.moereg("info").stdout.split())
    assert "deepep (opt-in, no), low_latency plugin moereg-deepep 0.1.0: way deepep" in shown

    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "plugins/moereg-deepep/tests", seconds=500)
    assert process.returncode == 0, process.stdout + process.stderr

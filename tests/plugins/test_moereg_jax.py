"""`moereg-jax` as a user installs it. JAX comes from the index into a temporary folder, so this test is slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site

LAYER = "--experts 16 --hidden 512 --intermediate 256 --top-k 4"


@pytest.mark.slow
def test_without_jax_it_says_what_is_missing_and_where_it_was_verified(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / "moereg-jax")
    process = site.moereg(f"explain {LAYER} --json")
    assert process.returncode == 0, process.stderr
    decisions = json.loads(process.stdout)["decisions"]
    (decision,) = (found for found in decisions if (found["backend"], found["rule"]) == ("jax", "cpu"))
    assert decision["origin"] == "moereg-jax"
    assert [reason["text"] for reason in decision["reasons"]] == ["requires jax<1,>=0.6, which is not installed"]

    info = json.loads(site.moereg("info --json").stdout)
    statuses = {(plugin["group"], plugin["name"]): plugin["status"] for plugin in info["plugins"]}
    assert statuses == {("moereg.backends", "jax"): "loaded", ("moereg.platforms", "tpu"): "loaded"}
    assert info["platform"] == "cpu"
    (cells,) = (backend["cells"] for backend in info["backends"] if backend["name"] == "jax")
    records = [record for cell in cells for record in cell["verified"]]
    assert "cpu" in {record["platform"] for record in records}
    # When the code changes: moereg verify jax --ledger plugins/moereg-jax/src/moereg_jax/moereg_ledger.json
    assert not [record for record in records if record["stale"]]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_jax_it_is_right(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.install(ROOT / "plugins" / "moereg-jax")
    site.install_from_index("jax>=0.10,<1")
    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", "plugins/moereg-jax/tests", seconds=600)
    assert process.returncode == 0, process.stdout + process.stderr

    process = site.moereg(f"bench {LAYER} --tokens 1,24 --json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)["rows"]
    assert {row["tokens"] for row in rows if row["backend"] == "jax"} == {1, 24}
    assert all(row["passed"] for row in rows), rows

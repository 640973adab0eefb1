"""The wheels of plugins/ as a user installs them, without the libraries that they call; then one with JAX."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site, ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LAYER = "--experts 16 --hidden 1024 --intermediate 256 --top-k 4"
WHEELS = {
    "aiter": ("aiter", "rocm:gfx942", "unquantized", "amd-aiter<0.1.21,>=0.1.16"),
    "humming": ("humming", "cuda:sm90", "int4_w4a16_g128", "humming-kernels<0.2,>=0.1.19"),
    "jax": ("jax", "tpu:v5e", "unquantized", "jax<1,>=0.6"),
    "sonic": ("sonic", "cuda:sm90", "unquantized", "sonic-moe<0.2,>=0.1.2"),
    "vllm": ("marlin", "cuda:sm90", "int4_w4a16_g128", "vllm<0.27,>=0.26"),
}
"""A backend of each, a machine and a scheme that it is for, and what it misses here."""


def installed(folder: Path, name: str) -> Site:
    site = Site(folder)
    site.install(ROOT / "plugins" / f"moereg-{name}")
    return site


def run_its_tests(site: Site, name: str) -> None:
    process = site.python("-m", "pytest", "-q", "-p", "no:cacheprovider", f"plugins/moereg-{name}/tests", seconds=600)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize("name", WHEELS)
def test_a_wheel_without_its_library(tmp_path: Path, name: str) -> None:
    backend, platform, quant, missing = WHEELS[name]
    site = installed(tmp_path, name)
    layer = f"explain {LAYER} --quant {quant} --json"
    lines = [f"{layer} --platform {platform}", f"{layer} --platform {platform} --require {backend}", layer]
    answers = ask(site, [line.split() for line in (*lines, "info --json")])
    assert [answer.code for answer in answers] == [0] * 4, answers
    there, asked, here, info = (answer.json for answer in answers)
    found = [each for each in there["decisions"] if each["backend"] == backend]
    assert {each["origin"] for each in found} == {f"moereg-{name}"}
    # Nothing was measured that would put it above moereg's own.
    assert there["selected"] == ("torch" if name == "jax" else "triton")
    if name == "aiter":
        assert {reason["code"] for each in found for reason in each["reasons"]} >= {"opt_in"}
    assert asked["selected"] == backend
    assert any(missing.partition("<")[0] in text for text in asked["decisions"][0]["assumes"])
    reasons = [[one["text"] for one in each["reasons"]] for each in here["decisions"] if each["backend"] == backend]
    assert reasons
    assert all(any(f"{missing}, which is not installed" in text for text in texts) for texts in reasons), reasons
    assert {plugin["status"] for plugin in info["plugins"]} == {"loaded"}
    (listed,) = (each for each in info["backends"] if each["name"] == backend)
    assert not listed["available"]
    assert listed["cells"]
    records = [record for cell in listed["cells"] for record in cell["verified"]]
    if name == "jax":
        # When the code changes: moereg verify jax --ledger plugins/moereg-jax/src/moereg_jax/moereg_ledger.json
        assert "cpu" in {record["platform"] for record in records}
        assert not [record for record in records if record["stale"]]
    else:
        run_its_tests(site, name)


def test_a_dispatcher_without_its_library(tmp_path: Path) -> None:
    site = installed(tmp_path, "deepep")
    group = "explain --experts 16 --hidden 2048 --intermediate 256 --top-k 4 --tokens 64 --ep 2 --platform cuda:sm90"
    lines = [group, f"{group} --dispatcher deepep --json", "info --json", "info"]
    shown, asked, info, printed = ask(site, [line.split() for line in lines])
    dispatchers = shown.out.partition("experts of a rank behind")[0]
    assert "rejected  deepep (standard of moereg-deepep 0.1.0, cuda:sm90+, predicted priority 80)" in dispatchers
    assert "is opt-in: name it in require or prefer [opt_in]" in dispatchers
    dispatcher = asked.json["dispatcher"]
    assert (dispatcher["selected"], dispatcher["decisions"][0]["origin"]) == ("deepep", "moereg-deepep")
    statuses = {(plugin["group"], plugin["name"]): plugin["status"] for plugin in info.json["plugins"]}
    assert statuses == {("moereg.prepare_finalize", "deepep"): "loaded"}
    (found,) = (one for one in info.json["dispatchers"] if one["name"] == "deepep")
    assert not found["available"]
    assert (found["origin"], found["origin_version"]) == ("moereg-deepep", "0.1.0")
    assert all(cell["opt_in"] for cell in found["cells"])
    assert "deepep (opt-in, no) plugin moereg-deepep 0.1.0: dispatcher deepep" in " ".join(printed.out.split())
    run_its_tests(site, "deepep")


@pytest.mark.peers
@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="requires jax, which make test-peers installs")
def test_jax_is_right(tmp_path: Path) -> None:
    site = installed(tmp_path, "jax")
    run_its_tests(site, "jax")
    process = site.moereg(f"bench {LAYER} --tokens 1,24 --json")
    assert process.returncode == 0, process.stderr
    rows = json.loads(process.stdout)["rows"]
    assert {row["tokens"] for row in rows if row["backend"] == "jax"} == {1, 24}
    assert all(row["passed"] for row in rows), rows

"""`moereg info`: its evidence and its reasons for backends that cannot run."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import moereg
from moereg.evidence.on_machine import QUARANTINE, QuarantineRecord
from moereg.platforms import Platform, current_platform
from moereg.registry import BUILTIN, BackendRegistry, register_moe_backend
from moereg.selection.loader import list_cells
from tests.cli.command import Call, CallJson
from tests.support.fakes import FakeExperts


def test_info_json_has_every_backend_and_why_it_cannot_run(call_json: CallJson) -> None:
    code, found = call_json("info")
    assert code == 0
    assert (found["schema"], found["version"]) == (1, moereg.__version__)
    names = [backend["name"] for backend in found["backends"]]
    assert names == sorted(set(names))
    assert "torch" in names
    for backend in found["backends"]:
        assert backend["cells"]
        assert backend["available"] is not bool(backend["reasons"])
        assert all(reason["code"] in ("platform", "package", "probe") for reason in backend["reasons"])


def test_info_lists_the_ways_of_moving_tokens(call: Call, call_json: CallJson) -> None:
    dispatchers = {dispatcher["name"]: dispatcher for dispatcher in call_json("info")[1]["dispatchers"]}
    assert {"all_gather", "all_to_all", "all_to_all_sums"} <= set(dispatchers)
    assert [cell["max_group_size"] for cell in dispatchers["all_gather"]["cells"]] == [None, 16]
    assert all(cell["predicted"] for dispatcher in dispatchers.values() for cell in dispatcher["cells"])
    assert dispatchers["all_to_all"]["available"]
    assert all(cell["opt_in"] for cell in dispatchers["all_to_all_sums"]["cells"])
    out = " ".join(call("info")[1].split())
    assert "token dispatchers: all_gather, all_to_all, all_to_all_sums (opt-in)" in out
    assert "AllGather" in call("info --cells")[1]


def test_info_is_one_screen_of_80_columns(
    call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    own = [cell for cell in isolated_registry.cells if cell.origin == BUILTIN]
    isolated_registry.restore(own)
    lines = call("info")[1].splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for backend in call_json("info")[1]["backends"]:
        (start,) = (place for place, line in enumerate(lines) if line.split()[:1] == [backend["name"]])
        rest = itertools.takewhile(lambda line: line.startswith(" "), lines[start + 1 :])
        row, text = lines[start], " ".join(" ".join((lines[start], *rest)).split())
        assert ("yes" in row.split()) is backend["available"]
        num_verified = sum(any(not record["stale"] for record in cell["verified"]) for cell in backend["cells"])
        if 0 < num_verified < len(backend["cells"]):
            assert f"({num_verified} of {len(backend['cells'])})" in text
        was_verified = any(cell["verified"] for cell in backend["cells"])
        assert row.rstrip().endswith("-") is (not was_verified)
        assert row.rstrip().endswith("code changed") is (was_verified and num_verified == 0)


def test_info_says_why_a_backend_cannot_run(
    call: Call, call_json: CallJson, isolated_registry: BackendRegistry
) -> None:
    def no_compiler(platform: Platform) -> str | None:
        return "requires a compiler, got none"

    register = register_moe_backend
    register("fake_here", 1, ("unquantized",), ("*",))(type("Here", (FakeExperts,), {}))
    lacking = type("Lacking", (FakeExperts,), {})
    register("fake_lacking", 1, ("unquantized",), ("*",), requires=("no-such-package>=2",))(lacking)
    register("fake_lacking", 1, ("nvfp4",), ("*",), requires=("no-such-package>=2",), probes=(no_compiler,))(lacking)
    register("fake_far", 2, ("unquantized",), ("tpu:v5e",))(type("Far", (FakeExperts,), {}))
    backends = {backend["name"]: backend for backend in call_json("info")[1]["backends"]}
    assert backends["fake_here"]["available"] is True
    assert backends["fake_here"]["origin"] == "abc"
    missing = {"code": "package", "text": "requires no-such-package>=2, which is not installed"}
    assert backends["fake_lacking"]["reasons"] == [missing, {"code": "probe", "text": "requires a compiler, got none"}]
    assert [reason["code"] for reason in backends["fake_far"]["reasons"]] == ["platform"]
    code, out, err = call("info --cells")
    assert (code, err) == (0, "")
    for text in ("moereg ", "Lacking", "tpu:v5e", "fake_lacking (abc) cannot run here", "[package]"):
        assert text in out
    for name, word in (("Here", "yes"), ("Far", "no")):
        (row,) = [line.split() for line in out.splitlines() if f" {name} " in line]
        assert {"yes", "no"} & {*row} == {word}


def test_info_shows_what_is_quarantined_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, call_json: CallJson
) -> None:
    monkeypatch.setenv("MOEREG_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = current_platform()
    dense = next(cell for cell in list_cells("torch") if cell.class_name == "TorchDenseExperts")
    weights = next(
        cell for cell in list_cells("torch") if cell.class_name == "TorchQuantizedExperts" and len(cell.schemes) > 1
    )
    failed = [(dense, dense.schemes[0]), (weights, weights.schemes[1])]
    QUARANTINE.change([QuarantineRecord.failed(cell, scheme, here, "off by 0.5") for cell, scheme in failed])
    found = call_json("info")[1]
    shown = {
        entry["experts"]: [(held["scheme"], held["failure"]) for held in entry["quarantined"]]
        for backend in found["backends"]
        for entry in backend["cells"]
        if entry["quarantined"]
    }
    assert shown == {cell.class_name: [(scheme.name, "off by 0.5")] for cell, scheme in failed}
    out = re.sub(r"\s+", " ", call("info --cells")[1])
    assert "quarantined here, in" in out
    for cell, scheme in failed:
        assert re.search(rf"- torch \({cell.class_name}\), {scheme.name}: \S+, off by 0.5", out)
    # All of this cell is out, and none of the other's schemes but one.
    assert re.search(r"TorchDenseExperts unquantized \* 10 kernel quarantined", out)


def test_a_report_has_what_a_bug_report_needs_and_no_path_of_the_home_folder(
    call: Call, call_json: CallJson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOEREG_QUARANTINE", str(tmp_path / "quarantine.json"))
    here = current_platform()
    (cell, *_) = (cell for cell in list_cells("torch") if cell.rule_for(here))
    QUARANTINE.change([QuarantineRecord.of(cell, cell.schemes[0], here, failure=f"raised in {tmp_path}/x.py")])
    code, out, err = call("info --report")
    assert (code, err) == (0, "")
    first, *lines, last = out.splitlines()
    assert (first, last) == ("```text", "```")
    heads = dict.fromkeys(line.partition(":")[0] for line in lines)
    order = "moereg system packages torch GPUs CPU plugins variables quarantined admitted"
    assert list(heads) == order.split()
    assert lines[0] == f"moereg: {moereg.__version__} on {here}"
    assert f"packages: torch {here.versions['torch']}" in lines
    assert {"variables: MOEREG_QUARANTINE=~/quarantine.json", "variables: OMP_NUM_THREADS=1"} <= {*lines}
    (held,) = (line for line in lines if line.startswith("quarantined: "))
    assert held.startswith(f"quarantined: torch ({cell.class_name}), {cell.schemes[0].name}: ")
    assert held.endswith("raised in ~/x.py")
    assert str(tmp_path) not in out
    assert call_json("info --report")[1]["report"] == out.rstrip("\n")

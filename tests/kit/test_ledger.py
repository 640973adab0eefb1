"""The ledger tells no more than was run: of which cell, by which rule, on which machine, and of which code."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from moereg.errors import LedgerWarning
from moereg.evidence import code_digest, ledger
from moereg.evidence.code_digest import class_digest
from moereg.evidence.ledger import Verification, arch_name, evidence_of, merge_ledger, read_ledger
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BUILTIN, REGISTRY, BackendCell, BackendRegistry, register_moe_backend, registering_origin
from moereg.runtime.json_types import convert
from moereg.selection.loader import load_backends
from tests.support.fakes import FakeExperts

VERSIONS = {"torch": "2.11.0", "triton": "3.6.0"}
H200 = Platform("cuda", "sm90", "NVIDIA H200", versions=VERSIONS, probed=True)
B200 = Platform("cuda", "sm100", "NVIDIA B200", versions=VERSIONS, probed=True)
EPYC = Platform("cpu", "x86_64", "AMD EPYC", versions=VERSIONS, probed=True)

BACKEND = """
from moereg.author import register_moe_backend
from tests.support.fakes import FakeExperts
from .impl import VALUE


@register_moe_backend("wheel_y", 5, ("unquantized",), ("cuda:sm80+", "rocm:gfx942", "cpu"))
class WheelExperts(FakeExperts):
    value = VALUE
"""


def builtin(experts: str, scheme: str, platform: Platform) -> BackendCell:
    """The cell of an experts class that would serve a scheme there."""
    found = [
        cell
        for cell in load_backends().cells
        if cell.class_name == experts and scheme in {known.name for known in cell.schemes} and cell.rule_for(platform)
    ]
    (cell,) = found
    return cell


@pytest.fixture
def wheel(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry
) -> Iterator[pathlib.Path]:
    """The package of a wheel with one cell, imported; its ledger is still to be written."""
    root = tmp_path / "wheel_y"
    root.mkdir()
    for name, text in {"__init__": "", "impl": "VALUE = 1\n", "backend": BACKEND}.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("wheel_y.backend")
    yield root
    for name in [name for name in sys.modules if name.partition(".")[0] == "wheel_y"]:
        del sys.modules[name]


def wheel_cell() -> BackendCell:
    (cell,) = load_backends().by_name("wheel_y")
    return cell


def write(wheel: pathlib.Path, *records: Verification) -> None:
    merge_ledger(wheel / ledger.LEDGER_NAME, records)


def edit(wheel: pathlib.Path, content: bytes) -> None:
    """Changes code between two processes, each of which reads it once."""
    (wheel / "impl.py").write_bytes(content)
    code_digest.class_digest.cache_clear()
    code_digest._module_digest.cache_clear()


def dated(record: Verification, date: str = "2026-11-22") -> Verification:
    return dataclasses.replace(record, date=date)


def test_evidence_says_what_was_run_and_what_was_not(wheel: pathlib.Path) -> None:
    cell = wheel_cell()
    assert str(evidence_of(cell)) == "not verified"
    write(wheel, dated(Verification.of(cell, H200, 31)))
    evidence = evidence_of(cell)
    assert str(evidence) == "on H200 with torch 2.11 (sm90, 2026-11-22); not on sm80, gfx942, cpu"
    assert evidence.missing == ("cuda:sm80", "rocm:gfx942", "cpu")
    assert evidence.on(H200)
    assert not evidence.on(B200)
    assert not evidence.on(EPYC)
    write(wheel, dated(Verification.of(cell, EPYC, 29), "2026-11-23"))
    assert str(evidence_of(cell)) == (
        "on AMD EPYC with torch 2.11 (cpu, 2026-11-23), H200 with torch 2.11 (sm90, 2026-11-22); not on sm80, gfx942"
    )
    (record, _) = evidence_of(cell).to_dict()["verified"]
    keys = ["rule", "platform", "device", "versions", "commit", "date", "cases", "digest", "stale", "machine"]
    assert list(record) == keys
    assert (record["rule"], record["platform"], record["cases"]) == ("cpu", "cpu", 29)
    assert (record["digest"], record["machine"]) == (class_digest(cell.experts), "AMD EPYC, torch 2.11")


@pytest.mark.parametrize(
    ("device", "changes", "holds"),
    [
        (H200, {}, True),
        (H200, {"device_name": "NVIDIA H200 NVL"}, False),
        (H200, {"versions": {**VERSIONS, "torch": "2.11.1+cu128"}}, True),
        (H200, {"versions": {**VERSIONS, "torch": "2.12.0"}}, False),
        (H200, {"versions": {**VERSIONS, "triton": "3.7.0"}}, False),
        (H200, {"versions": {"torch": "2.11.0"}}, False),
        (H200, {"arch": "sm100"}, False),
        # Only its architecture is known.
        (H200, {"device_name": "", "versions": {}, "probed": False}, True),
        (H200, {"arch": "sm100", "device_name": "", "versions": {}, "probed": False}, False),
        # Of CPUs every one.
        (EPYC, {"device_name": "Another CPU"}, True),
        (EPYC, {"device_name": "Another CPU", "versions": {**VERSIONS, "torch": "2.12.0"}}, False),
    ],
)
def test_a_record_holds_for_its_device_and_its_minor_versions(
    wheel: pathlib.Path, device: Platform, changes: dict[str, Any], holds: bool
) -> None:
    made = dataclasses.replace(Verification.of(wheel_cell(), device, 31), versions=VERSIONS)
    assert made.is_on(dataclasses.replace(device, **changes)) is holds


@pytest.mark.parametrize(
    "change",
    [
        {"backend": "other"},
        {"experts": "OtherExperts"},
        {"schemes": ("unquantized", "mxfp8")},
        {"tier": "emulation"},
        {"rule": "cuda:sm90"},
        {"rule": "cuda:sm90", "platform": "cuda:sm90"},
        {"rule": "*"},
        {"rule": "cpu", "platform": "cpu", "tier": "emulation"},
    ],
)
def test_a_record_of_something_else_is_no_evidence(wheel: pathlib.Path, change: dict[str, Any]) -> None:
    cell = wheel_cell()
    write(wheel, dataclasses.replace(Verification.of(cell, H200, 31), **change))
    assert str(evidence_of(cell)) == "not verified"


def test_a_more_specific_rule_of_the_cell_takes_a_record_over(wheel: pathlib.Path) -> None:
    cell = wheel_cell()
    write(wheel, Verification.of(cell, H200, 31))
    narrower = dataclasses.replace(cell, rules=(PlatformRule("cuda:sm90"), *cell.rules))
    assert evidence_of(narrower).current == ()


def test_the_evidence_of_a_cell_is_none_for_another_on_its_rule() -> None:
    registry = BackendRegistry()
    for activation in ("silu", "swigluoai"):
        register = register_moe_backend(
            "twin", 1, ("unquantized",), ("cuda:sm80+",), registry=registry, activations=(activation,)
        )
        register(FakeExperts)
    one, other = registry.cells
    record = Verification.of(one, H200, 32)
    assert record.facts == "activations=silu"
    assert record.is_of(one)
    assert not record.is_of(other)
    again = convert({**dataclasses.asdict(record), "schemes": list(record.schemes)}, Verification, "a record")
    assert again == record
    assert again.key != Verification.of(other, H200, 32).key
    # Records from before say nothing about it.
    assert dataclasses.replace(record, facts="").is_of(other)


def test_the_emulation_of_one_gpu_is_no_evidence_for_the_kernel_of_another() -> None:
    emulation, kernel = (builtin("TritonQuantizedExperts", "mxfp8", platform) for platform in (H200, B200))
    assert (emulation.tier, kernel.tier) == ("emulation", "kernel")
    record = Verification.of(emulation, H200, 32)
    assert record.is_of(emulation)
    assert not record.is_of(kernel)
    assert not dataclasses.replace(record, platform="cuda:sm100", rule="cuda:sm100+").is_of(kernel)
    assert str(evidence_of(kernel)) == "not verified"
    with pytest.raises(ValueError, match=r"needs a platform in \(cuda:sm100\+\), got cuda:sm90; run it there"):
        Verification.of(kernel, H200, 32)


def test_changed_code_is_stale_until_it_is_run_again(wheel: pathlib.Path) -> None:
    cell = wheel_cell()
    write(wheel, dated(Verification.of(cell, H200, 31)))
    edit(wheel, b'"""A docstring."""\n\nVALUE = 1  # A comment.\n')
    assert evidence_of(cell).on(H200)
    edit(wheel, b"VALUE = 1 + 1\n")
    evidence = evidence_of(cell)
    assert not evidence.on(H200)
    assert [record["stale"] for record in evidence.to_dict()["verified"]] == [True]
    with_versions = "H200 with torch 2.11"
    assert str(evidence) == f"before its code changed on {with_versions} (sm90, 2026-11-22); not on sm80, gfx942, cpu"
    assert "cuda:sm80" in evidence.missing
    write(wheel, dated(Verification.of(cell, H200, 32), "2026-11-24"))
    assert str(evidence_of(cell)) == f"on {with_versions} (sm90, 2026-11-24); not on sm80, gfx942, cpu"


def test_code_that_cannot_be_read_is_not_what_was_run(wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "class_digest", lambda experts: code_digest.UNKNOWN)
    write(wheel, Verification.of(wheel_cell(), H200, 31))
    assert not evidence_of(wheel_cell()).current  # Two unknown digests are not the same code.


GOOD: dict[str, Any] = {
    "backend": "wheel_y",
    "experts": "WheelExperts",
    "schemes": ["unquantized"],
    "rule": "cuda:sm80+",
    "tier": "kernel",
    "platform": "cuda:sm90",
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "commit": "",
    "date": "2026-11-22",
    "cases": 31,
    "digest": "0123456789abcdef",
}


def document(**changes: Any) -> bytes:
    return json.dumps({"schema": 3, "records": [{**GOOD, **changes}]}).encode()


MALFORMED = {
    "no JSON": (b"{", "readable JSON, got DecodeError"),
    "no text": (b"\xff\xfe", "readable JSON, got DecodeError"),
    "too long a number": (b"1" * 10_000, "readable JSON, got ValidationError"),
    "no cases": (document(cases=0), "records[0].cases must be an integer >= 1, got 0"),
    "too deep": (b"[" * 100_000, "readable JSON, got RecursionError"),
    "no object": (b"[]", "it must be an object, got []"),
    "another schema": (b'{"schema": 4, "records": []}', "schema must be 3, got 4"),
    "an older schema": (b'{"schema": 2, "records": []}', "made by an older moereg (schema 2, now 3) and is ignored"),
    "no records": (b'{"schema": 3}', "records is required"),
    "a missing key": (b'{"schema": 3, "records": [{"backend": "x"}]}', "records[0].experts is required"),
    "schemes": (document(schemes="unquantized"), "records[0].schemes must be a list"),
    "digest": (document(digest=None), "records[0].digest must be a text, got None"),
    "platform": (document(platform="cuda"), "needs an architecture"),
    "rule": (document(rule="cuda:sm100+"), "rule 'cuda:sm100+' does not match platform 'cuda:sm90'"),
    "escape": (document(device="\x1b[2J"), r"records[0].device must be printable on one line, got '\x1b[2J'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_ledger_is_one_warning_and_no_evidence(wheel: pathlib.Path, name: str) -> None:
    content, expected = MALFORMED[name]
    path = wheel / ledger.LEDGER_NAME
    path.write_bytes(content)
    with pytest.warns(LedgerWarning) as warned:
        assert str(evidence_of(wheel_cell())) == "not verified"
    (text,) = [str(warning.message) for warning in warned]
    assert text.startswith(f"the ledger of wheel_y.backend, {path}, cannot be used as evidence, and its cells ")
    assert expected in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(evidence_of(wheel_cell())) == "not verified"  # The warning comes once.
        assert evidence_of(builtin("TorchDenseExperts", "unquantized", EPYC)).to_dict()["verified"]
    with pytest.raises(ValueError, match=re.escape(expected)):
        merge_ledger(path, [])
    assert path.read_bytes() == content


def test_more_than_is_known_is_left_aside(wheel: pathlib.Path) -> None:
    (wheel / ledger.LEDGER_NAME).write_bytes(document(digest=class_digest(wheel_cell().experts), seconds=3))
    assert evidence_of(wheel_cell()).on(H200)


def test_a_wheel_has_the_records_of_its_own_package_alone(
    wheel: pathlib.Path, isolated_registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = wheel_cell()
    write(wheel, Verification.of(cell, H200, 31))
    assert evidence_of(cell).current
    # The class of the one registered by another, with the first one's ledger speaking for it.
    with registering_origin("child-wheel"):
        from moereg.author import register_moe_backend

        register_moe_backend("child", 5, ("unquantized",), ("cuda:sm80+",))(cell.experts)
    (child,) = load_backends().by_name("child")
    write(wheel, Verification.of(child, H200, 31))
    assert evidence_of(child).current == ()
    # An installed distribution's package is the one that its entry points name.
    monkeypatch.setattr(REGISTRY, "owner_of", lambda name, module: ("child-wheel", "1.0"))
    assert evidence_of(child).current


def test_records_are_merged_by_cell_and_device(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ledger.json"
    record = Verification.of(builtin("TritonExperts", "unquantized", H200), H200, 10)
    merge_ledger(path, [record])
    merge_ledger(path, [dataclasses.replace(record, cases=20), dataclasses.replace(record, device="NVIDIA H100")])
    assert [(found.device, found.cases) for found in read_ledger(path)] == [("NVIDIA H100", 10), ("NVIDIA H200", 20)]
    assert (record.versions, record.rule, record.tier) == (VERSIONS, "cuda:sm80+", "kernel")


def test_a_commit_of_moereg_says_nothing_of_another_distribution(
    wheel: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEREG_COMMIT", "0123abc")
    (strangers,) = [cell for cell in REGISTRY.cells if cell.name == "wheel_y"]
    assert Verification.of(strangers, H200, 31).commit == ""
    assert Verification.of(builtin("TorchDenseExperts", "unquantized", EPYC), EPYC, 31).commit == "0123abc"


def test_nothing_of_moereg_starts_a_program() -> None:
    """Someone else's repository, environment or file could name a program."""
    allowed = {
        # The conformance kit's own process: `worker` starts this interpreter on itself, by that name alone.
        "moereg/testing/worker.py": {"subprocess"},
        # The compiler that FlashInfer would start itself.
        "moereg/backends/_flashinfer/loading.py": {"subprocess"},
        # Kernels are compiled ahead by forks of a process that is this interpreter on `moereg.layer.warm_up.worker`, by
        # that name alone, and linked by the compiler that Triton would start itself.
        "moereg/kernels/launch/ahead.py": {"subprocess"},
        "moereg/layer/warm_up/ahead.py": {"subprocess"},
        "moereg/layer/warm_up/worker.py": {"multiprocessing"},
    }
    found: dict[str, set[str]] = {}
    starts = {"subprocess", "pty", "popen", "system", "execv", "execve", "execvp", "posix_spawn", "spawnv", "fork"}
    starts |= {"multiprocessing"}
    for path in pathlib.Path(ledger.__file__).parents[1].rglob("*.py"):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names |= {node.module} | ({alias.name for alias in node.names} if node.module == "os" else set())
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                names.add(node.attr)
        if names & starts:
            found[path.relative_to(pathlib.Path(ledger.__file__).parents[2]).as_posix()] = names & starts
    assert found == allowed


def test_the_shipped_ledger_is_of_registered_cells_only() -> None:
    path = pathlib.Path(ledger.__file__).parents[1] / ledger.LEDGER_NAME
    for record in read_ledger(path):
        assert [cell for cell in load_backends().cells if record.is_of(cell)], record


def test_an_architecture_is_named_with_its_kind_where_a_plugin_brings_it() -> None:
    named = [arch_name(name) for name in ("cuda:sm90", "rocm:gfx942", "cpu", "lantern:g3")]
    assert named == ["sm90", "gfx942", "cpu", "lantern:g3"]


# Below: no kernel changes under its records without a line that says why: a CPU cannot check what only a GPU runs.
LIST = pathlib.Path(__file__).with_name("stale_evidence.txt")


def shipped() -> list[BackendCell]:
    """moereg's own cells."""
    return [cell for cell in load_backends().cells if cell.origin == BUILTIN]


def stale(cells: list[BackendCell]) -> set[str]:
    """Backends and platforms with a cell whose records there are all stale."""
    found = set()
    for cell in cells:
        evidence = evidence_of(cell)
        current = {record.platform for record in evidence.current}
        found |= {f"{cell.name} {record.platform}" for record in evidence.stale if record.platform not in current}
    return found


def test_each_stale_backend_has_a_line_and_each_line_a_stale_backend() -> None:
    lines = [line for line in LIST.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    parts = [line.partition(": ") for line in lines]
    assert all(len(why.split()) >= 3 for _, _, why in parts), "a line says BACKEND PLATFORM: WHY"
    named = [name for name, _, _ in parts]
    assert sorted(named) == sorted(stale(shipped())), (
        f"{LIST.name} and the ledger disagree; verify what changed there with --ledger, or say why nobody did"
    )


def test_a_changed_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = (cell for cell in shipped() if cell.class_name == "TritonExperts")
    record = Verification.of(cell, H200, 3)
    old = dataclasses.replace(record, digest="of the code before")
    for records, expected in (((record,), set()), ((old,), {"triton cuda:sm90"}), ((old, record), set())):
        monkeypatch.setattr(ledger, "_own_records", lambda asked, found=records: found)
        assert stale([cell]) == expected

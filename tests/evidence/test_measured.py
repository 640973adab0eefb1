"""Packs in force: which choose, for which backends, and what is said of those that do not."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moereg.dispatch import explain_backends
from moereg.errors import RecordFileWarning
from moereg.evidence import measured
from moereg.evidence.measured import Source, read_tuning, tuning_path
from moereg.evidence.on_machine import Quarantine, QuarantineRecord
from moereg.evidence.pack import Pack
from moereg.platforms import Platform
from moereg.registry import BUILTIN, BackendCell, BackendRegistry, register_moe_backend
from moereg.selection.decide import decide
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.evidence.packs import (
    HERE,
    NAMES,
    PROBLEM,
    VERSIONS,
    changed_cell,
    choose,
    make_cells,
    pack_of,
    rows_of,
)
from tests.support.fakes import FakeExperts

CELLS = make_cells()
FASTER = -0.2
PACK = pack_of(CELLS, rows_of({1: 0.1, 2: FASTER, 3: 0.3}))
"""The third of the first three is 18 % faster than the first."""


def names(selection: Selection) -> list[str]:
    return [decision.backend for decision in selection.decisions]


def test_a_measured_order_goes_before_priority() -> None:
    found = choose(CELLS, PACK)
    assert names(found) == ["third", "first", "second", "fourth"]
    assert (found.source, found.ranges, found.plan) == ("measured", (), ((None, found.winner),))
    assert found.notices == ("measured 2026-11-22: third 18 % less than first, two sessions",)
    assert found.measured
    # One that confirms priority says so.
    found = choose(CELLS, pack_of(CELLS, rows_of({1: 0.1, 2: -0.01})))
    assert (found.backend, found.source) == ("first", "measured")
    assert found.notices == ("measured 2026-11-22: nothing beats first, two sessions",)
    assert found.measured


def ranges_of(selection: Selection) -> list[tuple[int | None, str]]:
    return [(most, decision.backend) for most, decision in selection.plan]


LOGS = {1: 0.1, 2: {1: 0.1, 4: FASTER, 16: FASTER, 64: 0.3}}


ROWS = {"layouts": ("rows",), "shared_layouts": ("rows",)}
BLOCKS = {"layouts": ("blocks",), "shared_layouts": ("blocks",)}
EITHER = {"layouts": ("rows", "blocks"), "shared_layouts": ("rows", "blocks")}
OWN = {"layouts": ("rows",)}
SHARING = make_cells(attributes={0: ROWS, 2: ROWS})


@pytest.mark.parametrize(
    ("first", "third", "has_ranges"),
    [
        (ROWS, ROWS, True),
        (ROWS, BLOCKS, False),
        (ROWS, OWN, False),
        (OWN, OWN, False),
        (ROWS, EITHER, False),
        (EITHER, EITHER, False),
    ],
)
def test_ranges_are_of_cells_that_read_the_layout_of_the_one_for_all(
    first: dict[str, Any], third: dict[str, Any], has_ranges: bool
) -> None:
    cells = make_cells(attributes={0: first, 2: third})
    # Older packs could grant memory for a second layout.
    values = {**json.loads(pack_of(cells, rows_of(LOGS)).text()), "memory": [[0, 2]]}
    found = choose(cells, Pack.from_json(json.dumps(values)))
    assert names(found) == list(NAMES)
    if not has_ranges:
        assert ranges_of(found) == [(None, "first")]
        assert found.ranges == ()
        return
    assert ranges_of(found) == [(3, "first"), (16, "third"), (None, "first")]
    assert found.notices == ("measured 2026-11-22: third 18 % less than first at 4-16, two sessions",)
    assert found.winner is found.plan[-1][1] is found.decisions[0]
    assert "\nplan      first to 3 tokens, third to 16, first above\n" in found.table()


def test_a_plan_comes_back_from_json_with_its_fingerprint() -> None:
    found = choose(SHARING, pack_of(SHARING, rows_of(LOGS)))
    again = Selection.from_json(found.to_json(), cells=SHARING)
    assert again == found
    assert (again.fingerprint, again.source) == (found.fingerprint, "measured")
    assert found.to_dict()["plan"] == [
        {"most_tokens": 3, "decision": 0},
        {"most_tokens": 16, "decision": 2},
        {"most_tokens": None, "decision": 0},
    ]
    # Those of earlier versions have no plan.
    values = {key: value for key, value in found.to_dict().items() if key not in ("plan", "measured")}
    assert Selection.from_dict(values, SHARING).plan == ((None, found.winner),)


RANGES = "the plan of a selection must have ranges that ascend, .* got "

BROKEN_PLANS: dict[str, tuple[Any, str]] = {
    "no list": (3, "plan must be a list"),
    "not open": ([[3, 0]], f"{RANGES}third to 3;"),
    "the last of another": ([[3, 0], [None, 2]], f"{RANGES}third to 3, second to None;"),
    "descending": ([[16, 2], [3, 0], [None, 0]], f"{RANGES}second to 16, third to 3, third to None;"),
    "open in the middle": ([[None, 2], [None, 0]], f"{RANGES}second to None, third to None;"),
    "no such decision": ([[3, 99], [None, 0]], r"plan\[0\].decision must be the place of an accepted decision, got 99"),
    "no tokens": ([[0, 2], [None, 0]], r"plan\[0\].most_tokens must be an integer >= 1"),
    "a text": ([["3", 2], [None, 0]], r"plan\[0\].most_tokens must be an integer"),
}


@pytest.mark.parametrize("name", BROKEN_PLANS)
def test_an_altered_plan_is_refused(name: str) -> None:
    plan, message = BROKEN_PLANS[name]
    values = choose(CELLS, PACK).to_dict()
    values["plan"] = plan
    if isinstance(plan, list):
        values["plan"] = [{"most_tokens": most, "decision": place} for most, place in plan]
    with pytest.raises(ValueError, match=f"^{message}"):
        Selection.from_dict(values, CELLS)


def test_the_fingerprint_tells_plans_and_packs_apart_and_nothing_else() -> None:
    by_priority = choose(CELLS)
    plans = [
        by_priority,
        choose(CELLS, PACK),
        choose(SHARING, pack_of(SHARING, rows_of(LOGS))),
        choose(SHARING, pack_of(SHARING, rows_of({2: {1: FASTER, 4: FASTER, 16: 0.1, 64: 0.3}}))),
        choose(CELLS, pack_of(CELLS, rows_of({1: 0.1}))),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    other_layer = pack_of(CELLS, rows_of({1: FASTER}), problem=MoEProblem(**{**PROBLEM.to_dict(), "top_k": 4}))
    assert choose(CELLS, other_layer).fingerprint == by_priority.fingerprint
    both = PACK.with_rows(other_layer_problem := MoEProblem(**{**PROBLEM.to_dict(), "top_k": 4}), 0, [])
    assert other_layer_problem.top_k == 4
    assert choose(CELLS, both).fingerprint == choose(CELLS, PACK).fingerprint


def test_a_named_platform_ignores_the_users_pack() -> None:
    named = dataclasses.replace(HERE, probed=False)
    found = choose(CELLS, PACK, platform=named)
    assert (found.backend, found.source, found.notices) == ("first", "priority", ())


REQUESTS: dict[str, tuple[dict[str, tuple[str, ...]], str, str]] = {
    "preferred": ({"prefer": ("second",)}, "second", "preferred"),
    "required": ({"require": ("fourth",)}, "fourth", "required"),
    "required in order": ({"require": ("second", "third")}, "second", "required"),
    "preferred as equals": ({"prefer": ("*h", "*d", "*t")}, "fourth", "preferred"),
    "equals of one pattern": ({"require": ("*d",)}, "third", "measured"),
    "denied": ({"deny": ("third",)}, "first", "measured"),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_requests_beat_packs(name: str) -> None:
    request, backend, source = REQUESTS[name]
    found = choose(CELLS, PACK, **request)
    assert (found.backend, found.source) == (backend, source)


def test_where_the_default_is_denied_the_rest_is_compared_with_the_next() -> None:
    pack = pack_of(CELLS, rows_of({1: 0.5, 2: 0.3, 3: 0.29}))
    found = choose(CELLS, pack, deny=("first",))
    assert names(found) == ["third", "second", "fourth", "first"]
    assert found.notices == ("measured 2026-11-22: third 18 % less than second, two sessions",)


def test_an_emulation_stays_last() -> None:
    registry = BackendRegistry()
    for name, tier in (("kernel", "kernel"), ("emulated", "emulation")):
        register_moe_backend(name, 10, ("unquantized",), ("cpu",), tier=tier, registry=registry)(
            type(f"{name.capitalize()}Experts", (FakeExperts,), {})
        )
    found = choose(registry.cells, pack_of(registry.cells, rows_of({1: -2.0})))
    assert names(found) == ["kernel", "emulated"]
    assert found.source == "priority"


def test_what_is_rejected_or_quarantined_never_returns() -> None:
    record = QuarantineRecord.failed(CELLS[2], PROBLEM.quant, HERE, "off by 0.5")
    found = decide(PROBLEM, HERE, Request(), CELLS, Quarantine([record]), tuning=[Source(PACK)])
    assert names(found) == ["first", "second", "fourth", "third"]
    assert found.decisions[-1].reasons
    narrow = make_cells(NAMES[:2], activations={"silu"})
    problem = MoEProblem(**{**PROBLEM.to_dict(), "activation": "gelu"})
    fast = pack_of(narrow, rows_of({1: FASTER}), problem=problem)
    assert choose(narrow, fast, problem=problem).winner is None


def test_one_session_chooses_nothing() -> None:
    found = choose(CELLS, pack_of(CELLS, rows_of({2: FASTER}, sessions=(1,))))
    assert (found.backend, found.source, found.measured) == ("first", "priority", "")
    assert found.notices == ("pack unused: one session compared it with others, and a choice takes two sessions",)
    alone = choose(CELLS, pack_of(CELLS, rows_of({})))
    assert alone.notices == ("pack unused: only first was measured",)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "version": (
        {"versions": {**{name: VERSIONS[name] for name in ("moereg", "torch")}, "kernels": "1.1"}},
        "1.1 -> 1.2",
    ),
    "code": ({"digest": "0123456789abcdef"}, "code"),
    "state": ({"state": "tactics"}, "state"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_stale_challenger_drops_out_alone(name: str) -> None:
    changes, text = CHANGES[name]
    pack = pack_of(CELLS, rows_of({1: FASTER, 2: 2 * FASTER}))
    assert choose(CELLS, pack).backend == "third"
    found = choose(CELLS, changed_cell(pack, 2, **changes))
    assert (found.backend, found.source) == ("second", "measured")
    assert found.notices[0].startswith("measured 2026-11-22: second 18 % less than first")
    assert found.notices[1].startswith("pack unused for third: ")
    assert found.notices[1].endswith(text)


@pytest.mark.parametrize("name", CHANGES)
def test_a_stale_default_voids_the_layer(name: str) -> None:
    changes, text = CHANGES[name]
    found = choose(CELLS, changed_cell(PACK, 0, **changes))
    assert (found.backend, found.source, found.measured) == ("first", "priority", "")
    (notice,) = found.notices
    assert notice.startswith("pack unused: ")
    assert notice.endswith(text)
    # Nor is its time known where another goes first by now; among others it does not matter.
    later = tuple(dataclasses.replace(cell, priority=1) if cell.name == "first" else cell for cell in CELLS)
    assert choose(later, changed_cell(PACK, 0, **changes)).notices == found.notices
    assert choose(CELLS, changed_cell(PACK, 0, **changes), deny=("first",)).backend == "third"


@pytest.mark.parametrize("field", ["backend", "experts", "rule", "scheme", "facts"])
def test_times_of_another_cell_are_not_those_of_a_cell(field: str) -> None:
    found = choose(CELLS, changed_cell(PACK, 2, **{field: "other"}))
    assert (found.backend, found.source) == ("first", "measured")
    found = choose(CELLS, changed_cell(PACK, 0, **{field: "other"}))
    assert (found.backend, found.source) == ("first", "priority")
    assert found.notices == ("pack unused: first was not measured",)


def test_a_new_backend_that_goes_first_was_not_measured() -> None:
    newer = (*make_cells(("new",)), *CELLS)
    cells = tuple(dataclasses.replace(cell, priority=200) if cell.name == "new" else cell for cell in newer)
    found = choose(cells, PACK)
    assert (found.backend, found.source, found.notices) == ("new", "priority", ("pack unused: new was not measured",))
    last = tuple(dataclasses.replace(cell, priority=1) if cell.name == "new" else cell for cell in newer)
    assert choose(last, PACK).backend == "third"


def test_a_cell_that_failed_is_left_out() -> None:
    found = choose(CELLS, pack_of(CELLS, rows_of({1: FASTER, 2: 2 * FASTER}), wrong=[(2, "off by 0.5")]))
    assert found.backend == "second"
    assert found.notices[1] == "pack unused for third: third failed when it was measured: off by 0.5"


def test_cells_of_two_versions_are_told_apart() -> None:
    """A pack keeps the rows of former versions, and those of the current one count."""
    newer = dataclasses.replace(HERE, versions={**VERSIONS, "kernels": "1.3"})
    pack = PACK
    rule = CELLS[0].rule_for(HERE)
    assert rule is not None
    indices = []
    for cell in CELLS:
        timed = dataclasses.replace(PACK.cells[0], **{"backend": cell.name, "experts": cell.class_name})
        fields = timed.fields_of(cell, PROBLEM.quant, rule, newer)
        pack, index = pack.with_cell(dataclasses.replace(timed, **fields))
        indices.append(index)
    rows = [msgspec.structs.replace(row, cell=indices[row.cell]) for row in rows_of({1: FASTER, 2: 0.1})]
    pack = pack.with_rows(PROBLEM, indices[0], rows)
    assert choose(CELLS, pack).backend == "third"
    assert choose(CELLS, pack, platform=newer).backend == "second"


def of_wheel(cells: Sequence[BackendCell], *own: str) -> tuple[BackendCell, ...]:
    return tuple(dataclasses.replace(cell, origin="Moereg_Mine") if cell.name in own else cell for cell in cells)


def test_a_wheel_that_favors_itself_is_not_believed() -> None:
    cells = of_wheel(CELLS, "third", "fourth")
    pack = pack_of(cells, rows_of({1: 0.1, 2: -2.0, 3: -1.0}))
    assert choose(cells, pack).backend == "third"
    found = choose(cells, Source(pack, "moereg-mine", is_users=False))
    assert (names(found), found.source, found.notices) == (list(NAMES), "priority", ())


def test_a_wheel_orders_its_own_backends() -> None:
    cells = of_wheel(CELLS, "first", "third")
    pack = pack_of(cells, rows_of({1: -2.0, 2: FASTER, 3: -2.0}))
    found = choose(cells, Source(pack, "moereg-mine", is_users=False))
    assert (names(found), found.source) == (["third", "first", "second", "fourth"], "measured")
    assert choose(cells, Source(pack, "other", is_users=False)).source == "priority"


def test_a_wheel_that_a_pack_puts_behind_is_not_said_to_go_first() -> None:
    (first, *others) = of_wheel(CELLS, "first")
    cells = (first, *(dataclasses.replace(cell, origin=BUILTIN) for cell in others))
    assert "it goes first wherever it fits; --deny first" in choose(cells).notices[0]
    behind = choose(cells, pack_of(cells, rows_of({1: FASTER})))
    assert behind.backend == "second"
    assert "it goes first where no measured times choose another; --deny first" in behind.notices[0]


def test_the_first_pack_with_usable_times_of_the_layer_chooses() -> None:
    second = pack_of(CELLS, rows_of({1: FASTER}))
    other_layer = pack_of(CELLS, rows_of({3: FASTER}), problem=MoEProblem(**{**PROBLEM.to_dict(), "top_k": 4}))
    stale = changed_cell(PACK, 0, digest="other")
    assert choose(CELLS, PACK, second).backend == "third"
    assert choose(CELLS, second, PACK).backend == "second"
    assert choose(CELLS, other_layer, second).backend == "second"
    found = choose(CELLS, stale, second)
    assert (found.backend, found.notices[1]) == ("second", "pack unused: code")


def test_shipped_packs_say_why_they_are_unused_but_not_which_layers_they_lack() -> None:
    moved = dataclasses.replace(PACK, machine=dataclasses.replace(PACK.machine, device="Another CPU", units=3))
    why = f"it is of another machine: device Another CPU, here {HERE.device_name}"
    assert choose(CELLS, Source(moved, is_users=False)).notices == (f"pack of moereg unused: {why}",)
    assert Source(moved).unused(HERE, CELLS) == {"": why}
    other_layer = pack_of(CELLS, [], problem=MoEProblem(**{**PROBLEM.to_dict(), "top_k": 4}))
    assert choose(CELLS, Source(other_layer, is_users=False)).notices == ()
    assert choose(CELLS, other_layer).notices != ()
    changed = changed_cell(PACK, 0, digest="other")
    assert choose(CELLS, Source(changed, is_users=False)).notices == ("pack of moereg unused: code",)
    assert choose(CELLS, changed).notices == ("pack unused: code",)
    assert Source(changed).unused(HERE, CELLS) == {"first": "code"}
    assert Source(changed).unused(HERE, CELLS[1:])["first"] == "not installed"
    assert Source(PACK).unused(HERE, CELLS) == {}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's pack, and a folder without one that MOEREG_TUNING could name."""
    monkeypatch.setattr(measured, "user_data", lambda: tmp_path / "data")
    monkeypatch.setattr(measured, "_SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(measured, "_files_of_wheels", lambda: ((tmp_path / "wheel.json", "moereg-mine"),))
    monkeypatch.delenv("MOEREG_TUNING")
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "tuning.json"


def origins(tuning: Sequence[Source]) -> list[tuple[str, bool, int]]:
    return [(source.origin, source.is_users, len(source.pack.sessions)) for source in tuning]


def test_places_of_packs_in_their_order(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = [pack_of(CELLS, rows_of({1: 0.1}, sessions=range(1, number + 1))) for number in range(1, 5)]
    paths = [tmp_path / "named.json", file, tmp_path / "shipped.json", tmp_path / "wheel.json"]
    assert read_tuning() == ()
    assert tuning_path() == file
    for path, pack in zip(paths, packs, strict=True):
        path.write_text(pack.text())
    rest = [("", True, 2), ("", False, 3), ("moereg-mine", False, 4)]
    assert origins(read_tuning()) == rest
    monkeypatch.setenv("MOEREG_TUNING", str(paths[0]))
    assert origins(read_tuning()) == [("", True, 1), *rest]
    assert tuning_path() == paths[0]
    monkeypatch.setenv("MOEREG_TUNING", str(file))
    assert origins(read_tuning()) == rest
    monkeypatch.setenv("MOEREG_TUNING", "")
    assert read_tuning() == ()
    assert tuning_path() is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        (lambda path: path.chmod(0o664), "nobody else may write to it; let this user, and nobody else, write to it"),
        (lambda path: path.write_text("{"), "; delete it, or "),
        (lambda path: path.write_text('{"schema": 3}'), "schema must be 2, got 3; move it away, or "),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file; "),
    ],
)
def test_a_bad_file_is_left_out_with_one_warning(file: Path, damage: Callable[[Path], object], cure: str) -> None:
    file.write_text(PACK.text())
    damage(file)
    with pytest.warns(RecordFileWarning, match=f"the pack .* cannot be used: .*{cure}.*name another file in") as caught:
        assert read_tuning() == ()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_tuning() == ()
    file.unlink()
    file.write_text(PACK.text())
    file.chmod(0o600)
    assert len(read_tuning()) == 1
    measured._SHIPPED.write_text("{")
    with pytest.warns(RecordFileWarning, match="tell the authors of moereg$"):
        assert len(read_tuning()) == 1


def test_a_bad_pack_of_a_wheel_names_the_wheel(file: Path, tmp_path: Path) -> None:
    (tmp_path / "wheel.json").write_text("{}")
    with pytest.warns(RecordFileWarning, match="tell the authors of moereg-mine"):
        assert read_tuning() == ()


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Has an entry for each call of a function of the module."""
    calls: list[str] = []
    function = getattr(measured, name)

    def call(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return function(*arguments, **keywords)

    monkeypatch.setattr(measured, name, call)
    return calls


def test_files_are_read_once_and_plans_made_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(PACK.text())
    reads, plans = counted(monkeypatch, "read_pack"), counted(monkeypatch, "_plan")
    for _ in range(3):
        found = decide(PROBLEM, HERE, Request(), CELLS, tuning=read_tuning())
        assert found.backend == "third"
    assert (len(reads), len(plans)) == (1, 1)
    file.write_text(pack_of(CELLS, rows_of({1: FASTER}, sessions=(1, 2, 3))).text())
    assert decide(PROBLEM, HERE, Request(), CELLS, tuning=read_tuning()).backend == "second"
    assert (len(reads), len(plans)) == (2, 2)


def test_times_of_another_machine_are_not_even_read(file: Path) -> None:
    moved = dataclasses.replace(PACK, machine=dataclasses.replace(PACK.machine, driver="other")).text()
    file.write_text(moved.replace('"rows": [', '"rows": ["no row",'))
    (found,) = read_tuning(HERE)
    assert found.unused(HERE, CELLS) == {"": "it is of another machine: driver other, here none"}
    assert choose(CELLS, found).backend == "first"
    with pytest.warns(RecordFileWarning, match=r"layers\[0\].rows\[0\] must be a list, got 'no row'; move it away, or"):
        assert read_tuning() == ()
    file.write_text(PACK.text())
    (found,) = read_tuning(HERE)
    assert found.pack == PACK
    assert read_tuning(Platform.from_name("cpu")) == ()


def test_selecting_reads_the_packs(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
    file.write_text(Pack(dataclasses.replace(PACK.machine, driver="other"), cells=PACK.cells).text())
    found = explain_backends(problem)
    assert any(notice.startswith("pack unused: it is of another machine: ") for notice in found.notices)
    monkeypatch.setenv("MOEREG_TUNING", "")
    assert explain_backends(problem).notices == ()


def test_wheels_name_files_of_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moereg_mine").mkdir()
    (tmp_path / "moereg_mine" / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "Moereg_Mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: Moereg_Mine\nVersion: 1.0\n")
    points = (
        "a = moereg_mine:tuning.json\nb = moereg_mine\nc = moereg_missing:tuning.json\nd = moereg_mine:../up.json\n"
    )
    (info / "entry_points.txt").write_text(f"[moereg.tuning]\n{points}[moereg.backends]\nx = moereg_mine:x.json\n")
    monkeypatch.syspath_prepend(tmp_path)
    measured._files_of_wheels.cache_clear()
    found = [(path, origin) for path, origin in measured._files_of_wheels() if origin == "moereg-mine"]
    measured._files_of_wheels.cache_clear()
    folder = tmp_path / "moereg_mine"
    assert found == [(folder / "tuning.json", "moereg-mine"), (folder / "up.json", "moereg-mine")]

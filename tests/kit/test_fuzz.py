"""A sample of `make fuzz`: every case that failed once, and some new ones of each area. And its own limits."""

import json

import pytest

from tests.fuzz import command_line
from tests.fuzz.area import CORPUS, Area, draw_case, find_areas, load_case, run_case

AREAS = find_areas()
STORED = sorted(CORPUS.glob("*/*.json"))


@pytest.mark.parametrize("name", AREAS)
def test_seeded_cases_hold(name):
    area = AREAS[name]
    failures = {}
    for index in range(area.smoke):
        case = draw_case(area, 1, index)
        assert json.loads(json.dumps(case)) == case or "NaN" in json.dumps(case), "a case has to survive storing"
        if failure := run_case(area, case):
            failures[index] = failure
    assert not failures


@pytest.mark.parametrize("name", sorted({path.parent.name for path in STORED}))
def test_what_failed_once_holds(name):
    failures = {path.name: run_case(AREAS[name], load_case(path)) for path in STORED if path.parent.name == name}
    assert not {file: failure for file, failure in failures.items() if failure}


def _area(check, **limits):
    return Area("fake", lambda rng: rng.randrange(10), check, **limits)


def _loop(case):
    while True:
        pass


def _exit(case):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("check", "failure"),
    [
        (lambda case: None, None),
        (lambda case: f"{case} is\nwrong", "7 is wrong"),
        (lambda case: {}[case], "raised KeyError: 7"),
        (_exit, "raised SystemExit: 3"),
        (_loop, "took over 0.05 s of CPU time"),
        (lambda case: bytearray(2**30) and None, "took over 64 MiB"),
    ],
    ids=["holds", "line", "raises", "exits", "hangs", "grows"],
)
def test_a_broken_contract_is_said_in_one_line(check, failure):
    assert run_case(_area(check, limit_s=0.05, memory_mib=64), 7) == failure


@pytest.mark.parametrize(
    ("code", "out", "err", "failure"),
    [
        (0, "text\n", "", None),
        (2, "", "moereg: no\n", None),
        (0, '{"a": 1}\n', "", None),
        (70, "", "internal error\n", "an exit code that no input may have"),
        (2, "half a table\n", "moereg: no\n", "not one line of an error"),
        (2, "", "moereg: no\nmore\n", "not one line of an error"),
        (2, "", "", "not one line of an error"),
        (2, "", "moereg: \x1b[31m\n", "control characters"),
        (0, '{"a": NaN}\n', "", "no JSON"),
        (0, 'warning\n{"a": 1}\n', "", "not one line of JSON"),
        (3, "", "", "not one line of JSON"),
    ],
)
def test_the_area_of_the_command_line_sees_broken_promises(code, out, err, failure):
    found = command_line.broken_promise({"--json"} if "{" in out or code == 3 else set(), code, out, err)
    assert (found is None) is (failure is None)
    assert found is None or found.startswith(failure)

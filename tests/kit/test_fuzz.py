"""A sample of `make fuzz`: every case that failed once, and some new ones of each area. And its own limits."""

import json
import threading

import pytest

from moereg.errors import UnknownNameError
from tests.fuzz import small_checkpoints
from tests.fuzz.area import CORPUS, Area, draw_case, load_case, run_case
from tests.fuzz.checkpoints import AREAS

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


def _wait(case):
    threading.Event().wait()


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
        (_wait, "no answer after 0.5 s"),
        (lambda case: bytearray(2**30) and None, "took over 64 MiB"),
    ],
    ids=["holds", "line", "raises", "exits", "hangs", "waits", "grows"],
)
def test_a_broken_contract_is_said_in_one_line(check, failure):
    assert run_case(_area(check, limit_s=0.05, memory_mib=64), 7) == failure


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (RecursionError("deep"), "raised RecursionError: deep"),
        (ValueError("not ours"), "load_experts raised a foreign ValueError: not ours"),
        (UnknownNameError("\x1b[31m"), "load_experts: a message that is not printable"),
        (UnknownNameError("x" * 5000), "load_experts: a message of 5000 characters"),
    ],
    ids=["foreign", "value_error", "escape", "page"],
)
def test_the_areas_of_checkpoints_see_broken_promises(error, failure, monkeypatch):
    def broken(*arguments, **keywords):
        raise error

    monkeypatch.setattr(small_checkpoints, "load_experts", broken)
    for name in ("checkpoints", "quantization_config"):
        assert run_case(AREAS[name], {"base": "qwen3_moe"}).startswith(failure)

"""A sample of `make fuzz`: every case that failed once, and some new ones of each area. And its own limits."""

import json
import os
import random
import signal
import time

import pytest

from moereg.errors import UnknownNameError
from tests.fuzz import small_checkpoints
from tests.fuzz.area import CORPUS, Area, draw_case, find_areas, load_case, run_case, store_case
from tests.fuzz.pool import Worker

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


def test_a_case_is_drawn_by_its_seed_and_index_alone():
    area = _area(lambda case: None)
    first = [draw_case(area, 5, index) for index in range(20)]
    random.seed(9)
    assert [draw_case(area, 5, index) for index in reversed(range(20))] == first[::-1]
    assert [draw_case(area, 6, index) for index in range(20)] != first


def test_a_failing_case_is_stored_once_and_replays(tmp_path):
    path = store_case(_area(None), {"size": float("inf"), "names": ["\x1b"]}, "went wrong", tmp_path)
    again = store_case(_area(None), {"names": ["\x1b"], "size": float("inf")}, "went wrong", tmp_path)
    assert again == path
    assert path.parent.name == "fake"
    assert load_case(path) == {"size": float("inf"), "names": ["\x1b"]}


def _killed_by(case):
    os.kill(os.getpid(), signal.SIGBUS)


def _sleep(case):
    time.sleep(1000)


def fake_areas():
    checks = {"holds": lambda case: None, "dies": _killed_by, "waits": _sleep}
    return {name: Area(name, lambda rng: 0, check, limit_s=0.2) for name, check in checks.items()}


@pytest.mark.slow
def test_a_case_that_ends_or_blocks_its_process_is_a_failure_and_the_next_one_runs():
    worker = Worker(fake_areas)
    areas = fake_areas()
    try:
        failures = [worker.run(areas[name], 0, 0) for name in ("holds", "dies", "holds", "waits", "holds")]
    finally:
        worker.stop()
    assert failures == [None, "ended the process with SIGBUS", None, "no answer after 2.0 s", None]


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

"""Every case that failed once, and seeded new ones of each area, of which `make fuzz` draws more. And the limits."""

import json
import os
import threading
import time

import pytest

from moereg.errors import UnknownNameError
from tests.fuzz import checkpoints
from tests.fuzz.area import CORPUS, Area, draw_case, load_case, run_case, store_case

AREAS = checkpoints.AREAS
STORED = sorted(CORPUS.glob("*/*.json"))
NUM_CASES = int(os.environ.get("MOEREG_FUZZ_CASES", "0"))
"""Of each area. They are stored while they run, so that one that ends the process can be replayed too."""
SEED = int(os.environ.get("MOEREG_FUZZ_SEED", "1"))
SECONDS = 300


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", AREAS)
def test_seeded_cases_hold(name):
    area, failures, end = AREAS[name], {}, time.monotonic() + SECONDS
    for index in range(NUM_CASES or area.smoke):
        case = draw_case(area, SEED, index)
        assert json.loads(json.dumps(case)) == case or "NaN" in json.dumps(case), "a case has to survive storing"
        path = store_case(area, case, "ended the process") if NUM_CASES else None
        if failure := run_case(area, case):
            failures[index] = failure
        if path is not None:
            store_case(area, case, failure) if failure else path.unlink()
        if time.monotonic() > end:
            break
    assert not failures


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_what_failed_once_holds(path):
    assert run_case(AREAS[path.parent.name], load_case(path)) is None


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

    monkeypatch.setattr(checkpoints, "load_experts", broken)
    for name in ("checkpoints", "quantization_config"):
        assert run_case(AREAS[name], {"base": "qwen3_moe"}).startswith(failure)

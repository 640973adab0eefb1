"""The kit in many processes: which checks a process runs one after the other, and what is left out."""

from __future__ import annotations

import concurrent.futures
from concurrent.futures.process import BrokenProcessPool

from benches.h200 import kit
from moereg.testing.check import NO_TIME, Check, Outcome, Result
from moereg.testing.suite import checks_of


def test_cells_take_turns_and_no_check_is_lost() -> None:
    checks = checks_of("torch", isolate=False)
    groups = list(kit.in_turns(checks))
    assert sorted(check.id for group in groups for check in group) == sorted(check.id for check in checks)
    assert all(len({check.cell for check in group}) == 1 and len(group) <= kit.AT_ONCE for group in groups)
    num_cells = len({check.cell for check in checks})
    assert num_cells > 1
    assert len({group[0].cell for group in groups[:num_cells]}) == num_cells
    assert _num_checks(checks, groups[0]) == max(_num_checks(checks, group) for group in groups)


def test_checks_that_the_time_did_not_suffice_for_make_no_record() -> None:
    checks = checks_of("torch", isolate=False)[:2]
    results = kit.run_group(checks, end=0.0)
    assert [result.outcome.message for result in results] == [NO_TIME, NO_TIME]
    assert kit.report_of("torch", results, 1.0).verified_cells == {}


def test_a_process_that_was_killed_is_told_and_other_cells_keep_their_records() -> None:
    killed: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
    killed.set_exception(BrokenProcessPool("a process was terminated abruptly"))
    ended: concurrent.futures.Future[list[Result]] = concurrent.futures.Future()
    lost, kept, *_ = kit.in_turns(checks_of("torch", isolate=False))
    ended.set_result([Result(check, Outcome("passed")) for check in kept])
    results = [*kit.results_of(killed, lost), *kit.results_of(ended, kept)]
    assert {result.outcome.status for result in results[: len(lost)]} == {"crashed"}
    assert set(kit.report_of("torch", results, 1.0).verified_cells) == {kept[0].cell}


def _num_checks(checks: tuple[Check, ...], group: tuple[Check, ...]) -> int:
    return sum(check.cell == group[0].cell for check in checks)

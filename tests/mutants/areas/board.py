"""The board, and the page of which backend for what."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "rows that are there are measured again",
        "benches/board/store.py",
        old="if (point.routing, point.tokens) not in done]",
        new="if (point.routing, point.tokens) in done]",
        tests=("tests/benches/test_board.py::test_a_board_is_continued_where_it_was_cut",),
    ),
    Mutant(
        "a board of other versions is continued",
        "benches/board/store.py",
        old='_SAME: Final = ("device", "platform", "versions", "commit", ',
        new='_SAME: Final = ("device", "platform", "commit", ',
        tests=("tests/benches/test_board.py::test_a_board_of_another_run_is_not_continued",),
    ),
    Mutant(
        "a fault in one layer excludes a backend from all",
        "benches/board/store.py",
        old="if len(found) > 1 else None",
        new="if found else None",
        tests=("tests/benches/test_board.py::test_who_crashed_in_two_layers_is_out_of_all",),
    ),
    Mutant(
        "wrong numbers have no reason",
        "benches/board/measure.py",
        old="    if not reason and one.timing is None:",
        new="    if reason and one.timing is None:",
        tests=("tests/benches/test_board.py::test_every_backend_is_in_its_row",),
    ),
    Mutant(
        "a lost device is measured on",
        "benches/board/measure.py",
        old="    if comparison.stopped is None:\n        return",
        new="    if comparison.stopped is not None:\n        return",
        tests=("tests/benches/test_board.py::test_a_lost_device_ends_the_process_and_names_the_backend",),
    ),
    Mutant(
        "a killed process ended by itself",
        "benches/board/__main__.py",
        old="return code if code >= 0 else _FROM_SIGNALS - code",
        new="return abs(code)",
        tests=("tests/benches/test_board.py::test_a_stuck_process_is_killed",),
    ),
    Mutant(
        "a default that failed is no loss",
        "benches/board/rows.py",
        old="return 0.0 if own.time_us is None else other.time_us / own.time_us",
        new="return None if own.time_us is None else other.time_us / own.time_us",
        tests=("tests/benches/test_board_page.py::test_losses_come_worst_first_and_a_tie_is_none",),
    ),
    Mutant(
        "a ratio takes times of two processes",
        "benches/board/compare.py",
        old="if peer.process != self.own.process:",
        new="if peer.process == self.own.process and not self.peers:",
        tests=("tests/benches/test_peers.py::test_a_ratio_of_two_processes_is_refused",),
    ),
    Mutant(
        "a row of two processes is judged by the better one",
        "benches/board/compare.py",
        old="if other is None or _standing(one) < _standing(other):",
        new="if other is None or _standing(one) > _standing(other):",
        tests=("tests/benches/test_peers.py::test_a_row_of_two_processes_is_judged_by_the_worse_one",),
    ),
    Mutant(
        "every machine has the tick of one",
        "benches/which_backend.py",
        old='marks = ["✓"] if self.evidence.on(platform) else []',
        new='marks = ["✓"] if self.evidence.current else []',
        tests=("tests/benches/test_which_backend.py::test_a_tick_is_for_that_kind_of_machine_alone",),
    ),
)

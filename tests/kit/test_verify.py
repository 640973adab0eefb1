"""What verifying says of backends: of a right one, and of those that break a promise, crash or hang."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moereg.testing
from moereg.cli._verify import _verdict
from moereg.errors import ArgumentError, BackendError, UnknownBackendError, UnknownPlatformError
from moereg.platforms import Platform
from moereg.registry import REGISTRY, BackendRegistry, register_moe_backend
from moereg.selection.loader import load_backends
from moereg.selection.modules import import_modules
from moereg.testing.check import CHECK_KINDS, NO_TIME, STATUSES, CellName, Check, Outcome, Report, Result
from moereg.testing.checks import watched_imports
from moereg.testing.suite import Suite, _interleaved, checks_of, list_suite, run_check, run_here, verify
from moereg.testing.worker import SHARED_WORKER, Answer, Worker, _place
from tests.support.fakes import FakeExperts

FILE = str(pathlib.Path(__file__).with_name("bad_backends.py"))


@pytest.fixture(autouse=True, scope="module")
def _bad_backends() -> Iterator[None]:
    """The file's backends are registered while these tests run."""
    load_backends()
    before = REGISTRY.cells
    import_modules([FILE])
    yield
    SHARED_WORKER.stop()
    REGISTRY.restore(before)
    del sys.modules["bad_backends"]


def checks(name: str, kind: str) -> list[Check]:
    return [check for check in checks_of(name, modules=[FILE], num_drawn=2, isolate=False) if check.kind == kind]


def test_a_check_is_a_value() -> None:
    found = checks_of("good", modules=[FILE], num_drawn=2, isolate=False)
    assert len({check.id for check in found}) == len(found)
    for check in found:
        assert pickle.loads(pickle.dumps(check)) == check
    assert checks_of("good", modules=[FILE], num_drawn=2) == found
    kinds = {check.kind for check in found}
    assert kinds == {
        "deciding", "rejections", "workspaces", "permute", "numbers", "faults", "reload", "equal_bits", "compile",
        "drawn",
    }  # fmt: skip


# The kind of check that shows it, the status, and a part of the message: those that need a process of their own, and
# those that its state shows. test_broken_promises.py has the others.
BROKEN = {
    "exits": ("numbers", "crashed", "the process was ended with exit code 3"),
    "raises_exit": ("numbers", "failed", "raised in SystemExitExperts.apply: SystemExit: no"),
    "hoards": ("numbers", "crashed", "of memory in spoil of bad_backends.py"),
    "floods": ("numbers", "crashed", "to its standard streams in spoil of bad_backends.py"),
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker whose checks may take little memory."""
    worker = Worker(memory_bytes=3 << 29)
    yield worker
    worker.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_an_outcome_of_one_line(name: str, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.testing.suite.SHARED_WORKER", worker)
    kind, status, message = BROKEN[name]
    outcome = run_check(checks(name, kind)[0])
    assert outcome.status == status, outcome
    assert message in outcome.message
    assert "\n" not in outcome.message
    assert run_check(checks("good", "permute")[0]).status == "passed"


def interrupted(connection: Connection, timeout: float) -> bool:
    raise KeyboardInterrupt


def test_a_process_that_is_interrupted_while_it_starts_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(Connection, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(memory_bytes=1 << 40).ask(max, 1, 2)
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_an_answer_that_nobody_waited_for_is_none_to_the_next_question(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker.ask(max, 1, 2).value == 2
    with monkeypatch.context() as patched:
        patched.setattr(Connection, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.ask(max, 3, 4)
    assert worker.ask(max, 5, 6).value == 6


@pytest.mark.slow
def test_a_backend_that_prints_gets_a_note() -> None:
    report = verify("prints", modules=[FILE], only=["permute", "numbers"])
    assert report.passed is True
    (note,) = report.notes
    assert "PrintExperts cpu unquantized writes to standard output in 9 checks" in note
    assert "'compiling kernel compiling kernel" in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        ("import os; os._exit(4)", "crashed", "exit code 4"),
        ("import time; time.sleep(1000)", "timed_out", "no end after 5 s in <module> of backend_at_import.py:1"),
        ("import ctypes; ctypes.string_at(0)", "crashed", "SIGSEGV"),
    ],
    ids=["exits", "hangs", "segfault"],
)
def test_an_import_that_ends_the_process_is_an_outcome(
    code: str, status: str, message: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "backend_at_import.py"
    file.write_text(code + "\n")
    report = verify(modules=[str(file)], check_seconds=5)
    assert report.passed is False
    (result,) = report.failures
    assert result.outcome.status == status
    assert message in result.outcome.message


# In a file of its own: whoever asks it is gone.
KILLING = """
import os
from bad_backends import GoodExperts, bad

@bad("killing")
class KillingExperts(GoodExperts):
    @classmethod
    def unsupported_reasons(cls, problem, platform):
        os._exit(9)
"""


@pytest.mark.slow
def test_a_predicate_that_ends_the_process_is_an_outcome_and_verifying_does_not_verify_in_turn(
    tmp_path: pathlib.Path,
) -> None:
    file = tmp_path / "killing.py"
    file.write_text(KILLING)
    report = verify("killing", modules=[FILE, str(file)])
    assert report.passed is False
    assert "exit code 9" in report.failures[0].outcome.message
    file = tmp_path / "script.py"
    file.write_text("from moereg.testing import verify\nverify('torch', only=['permute'])\n")
    with pytest.raises(ArgumentError, match="must not verify in turn"):
        verify(modules=[str(file)])


def test_a_crash_and_a_hang_are_outcomes_and_the_next_check_runs() -> None:
    outcome = run_check(checks("segfault", "numbers")[0])
    assert outcome.status == "crashed"
    assert "SIGSEGV in spoil of bad_backends.py" in outcome.message
    # The limit counts the import of the backends, which the check before it has seen to.
    assert run_check(checks("good", "permute")[0]).status == "passed"
    outcome = run_check(checks("hangs", "permute")[0], seconds=3)
    assert outcome.status == "timed_out"
    assert "permute_weights of bad_backends.py" in outcome.message
    assert run_check(checks("good", "permute")[0]).status == "passed"
    # What is imported by kernels that ran is no import by choosing.
    assert run_check(checks("good", "deciding")[0]).status == "passed"
    assert not SHARED_WORKER.has_run
    outcome = run_check(checks("exits", "drawn")[0])
    assert (outcome.status, outcome.layer.num_tokens) == ("crashed", 1)


def hang_in(tell: Callable[[object], None], steps: list[str]) -> None:
    for step in steps:
        tell(step)
    threading.Event().wait()


def test_a_function_in_steps_has_a_time_limit_for_each() -> None:
    worker = SHARED_WORKER
    answer = worker.ask(hang_in, ["first", "last"], seconds=3, in_steps=True)
    assert answer.outcome is not None
    assert (answer.outcome.status, answer.step) == ("timed_out", "last")
    assert answer.outcome.message.startswith("no end after 3 s in ")
    with pytest.raises(TimeoutError):
        worker.ask(hang_in, [], seconds=0.5, in_steps=True, deadline=time.monotonic())


class FakeWorker:
    """Answers as a worker does, out of a function of the check."""

    is_isolated = True
    has_run = False

    def __init__(self, suite: Suite, run: Callable[[Check], Outcome]) -> None:
        self.suite, self.run = suite, run

    def ask(self, function: Callable[..., Any], *arguments: Any, **_: Any) -> Answer:
        return Answer(self.suite) if function is list_suite else Answer(outcome=self.run(arguments[0]), step=(1, None))

    def stop(self) -> None:
        """Nothing to stop."""


ONE, OTHER = (CellName("fake", f"{name}Experts", ("unquantized",), ("cpu",)) for name in ("One", "Other"))


def faked(monkeypatch: pytest.MonkeyPatch, run: Callable[[Check], Outcome], **options: Any) -> Report:
    listed = tuple(Check.make(cell, kind) for kind in ("permute", "workspaces", "reload") for cell in (ONE, OTHER))
    suite = Suite(listed, Report("fake", "cpu", "A CPU", {}, 0, (), {}))
    monkeypatch.setattr("moereg.testing.suite.Worker", lambda **_: FakeWorker(suite, run))
    return verify("fake", **options)


def test_a_predicate_that_ends_the_process_of_a_drawn_layer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Outcome("crashed", "exit code 5")
    report = faked(monkeypatch, lambda check: ended if check.kind == "drawn" else Outcome("passed"))
    assert [result.check.id for result in report.failures] == [
        f"drawn/{cell.experts}/cpu/unquantized/seed0" for cell in (ONE, OTHER)
    ]
    assert report.verified_cells == {}
    assert report.rerun_line(report.failures[0]).endswith(" --check drawn/OneExperts/cpu/unquantized/seed0")
    assert report.to_dict()["passed"] is False


def test_a_machine_without_hypothesis_leaves_drawn_layers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = faked(monkeypatch, lambda check: Outcome("passed"))
    assert (report.passed, report.verified_cells) == (True, {})
    skipped = [result for result in report.results if result.outcome.status == "skipped"]
    assert [result.check.kind for result in skipped] == ["drawn", "drawn"]
    assert "pip install 'moereg[verify]'" in skipped[0].outcome.message


def test_checks_that_a_text_names_run_and_what_is_no_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{kind}Experts/cpu/unquantized" for kind in ("permute/One", "reload/One", "reload/Other", "drawn/One")]
    names[3] += "/seed5"  # Not the run's own.
    report = faked(monkeypatch, lambda check: Outcome("passed"), only=["permute/One", "reload", "absent", names[3]])
    assert [result.check.id for result in report.results] == names
    for text in ('{"backend": "torch', "{}", '{"problem": 1}'):
        with pytest.raises(ArgumentError, match="must be"):
            faked(monkeypatch, lambda check: Outcome("passed"), only=[text])


def test_a_search_that_finds_no_layer_is_no_evidence() -> None:
    check = next(each for each in checks_of("torch", num_drawn=1) if each.kind == "drawn")
    argument = {**json.loads(check.argument), "num_layers": None, "seconds": 0.0}
    outcome = run_check(dataclasses.replace(check, argument=json.dumps(argument)))
    assert (outcome.status, outcome.num_layers) == ("skipped", 0)
    assert "no layer was drawn" in outcome.message


def test_a_cell_that_ran_out_of_time_twice_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    report = faked(monkeypatch, lambda check: Outcome("timed_out" if check.cell == ONE else "passed"))
    statuses = [result.outcome.status for result in report.results if result.check.cell == ONE]
    assert statuses == ["timed_out", "timed_out", "skipped", "skipped"]
    assert report.passed is False
    assert list(report.verified_cells) == [OTHER]


def test_a_cell_whose_drawn_layers_had_no_time_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def slow(check: Check) -> Outcome:
        now[0] += 10
        return Outcome("passed")

    monkeypatch.setattr("moereg.testing.suite.time", SimpleNamespace(monotonic=lambda: now[0]))
    report = faked(monkeypatch, slow, seconds=55)
    assert report.passed is True
    assert report.verified_cells == {}
    assert len(faked(monkeypatch, slow, seconds=1000).verified_cells) == 2
    report = faked(monkeypatch, slow, seconds=-1)
    assert (report.passed, report.has_no_time) == (None, True)
    assert _verdict(report).plain.startswith("no time left for what runs here of fake; 0 checks passed, 8 skipped")


def test_a_module_may_register_a_class_of_another_module_of_its_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "two_modules"
    package.mkdir()
    texts = {
        "__init__": "",
        "_impl": "from bad_backends import GoodExperts\nclass OwnExperts(GoodExperts):\n    pass\n",
        "backend": "from bad_backends import bad\nfrom two_modules._impl import OwnExperts\nbad('own')(OwnExperts)\n",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    suite = list_suite("", modules=("two_modules.backend",))
    assert {cell.experts for cell in suite.running} == {"OwnExperts"}


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownBackendError, match="unknown backend 'gone'"):
        checks_of("gone")
    with pytest.raises(ArgumentError, match="no_such_module"):
        checks_of("", modules=["no_such_module"])


def test_public_names_are_there_and_cost_nothing_until_used() -> None:
    assert all(hasattr(moereg.testing, name) for name in moereg.testing.__all__)
    assert set(moereg.testing.__all__) <= set(dir(moereg.testing))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU imitates no other GPU")
def test_a_run_as_another_platform_passes_and_verifies_nothing(isolated_registry: BackendRegistry) -> None:
    register_moe_backend("imitating", 1, ("unquantized",), ("cuda:sm80+",))(FakeExperts)
    report = verify("imitating", platform="cuda:sm90", isolate=False, only=["workspaces"])
    assert (report.passed, report.platform) == (True, "cuda:sm90")
    assert report.verified_cells == {}
    found = report.to_dict()
    (cell,) = found["cells"]
    assert (cell["runs"], cell["counts"]["passed"]) == ("imitated", 1)
    waiting = "that a call never waits for the device"
    assert found["unchecked"] == ["equal bits of repeated calls", waiting, "capture in a CUDA graph"]
    report = verify("good", modules=[FILE], isolate=False, only=["workspaces"])
    assert report.unchecked == ()


def test_a_cell_is_verified_by_its_own_checks_alone() -> None:
    cells = {name: CellName("fake", name, ("unquantized",), ("cpu",)) for name in ("right", "skipped", "wrong", "idle")}
    statuses = {
        "right": ("passed", "passed"),
        "skipped": ("passed", "skipped"),
        "wrong": ("failed", "passed"),
        "idle": ("passed",),
    }
    results = tuple(
        Result(Check.make(cells[name], kind), Outcome(status))
        for name, found in statuses.items()
        for kind, status in zip(("deciding", "permute"), found, strict=False)
    )

    def reported(*shown: str) -> Report:
        kept = tuple(result for result in results if result.check.cell.experts in shown)
        return Report("fake", "cpu", "", {}, 0, kept, {cells["idle"]: "requires a GPU"})

    assert reported(*statuses).verified_cells == {cells["right"]: 2}
    verdicts = {"right": True, "skipped": True, "wrong": False, "idle": None}
    assert {name: reported(name).passed for name in statuses} == verdicts
    crashed = dataclasses.replace(reported(), results=(Result(results[0].check, Outcome("crashed")),))
    assert (crashed.passed, len(crashed.failures), crashed.verified_cells) == (False, 1, {})


@pytest.mark.parametrize(("kind", "arch"), [("npu", "910b"), ("cuda", "sm90")])
def test_a_machine_without_its_device_is_no_fault_of_a_backend(
    kind: str, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its platform plugin may lie."""
    if kind == "cuda" and torch.cuda.is_available():
        pytest.skip("the lie would be true")
    monkeypatch.setattr("moereg.testing.cases.current_platform", lambda: Platform(kind, arch, probed=True))
    with pytest.raises(UnknownPlatformError, match=f"layers of platform {kind}:{arch} live on torch's device type"):
        list_suite("good")


def test_listing_is_isolated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = Answer(outcome=Outcome("crashed", "exit code 4 in import of a.b of a 1.0"))
    monkeypatch.setattr(Worker, "ask", lambda *_, **named: ended)
    with pytest.raises(BackendError, match=r"of torch cannot be listed: exit code 4 in import of a\.b of a 1\.0"):
        checks_of("torch")


def test_a_plugin_that_ends_the_process_is_the_last_that_was_imported() -> None:
    written = "importing one of wheel-one 1.0\nof its own\nimporting two.backend of wheel-two 2.0\nits last words"
    assert _place(written) == "import of two.backend of wheel-two 2.0"
    assert _place("importing is not all") == ""
    # A predicate or a call ended it, which is no fault of the plugin that happened to be the last.
    assert _place(f"{written}\nimported two.backend of wheel-two 2.0\n") == ""


def run_as(monkeypatch: pytest.MonkeyPatch, broken: Callable[[Any, Any], object]) -> Outcome:
    """What `run_here` says of a check that does this."""
    monkeypatch.setattr(CellName, "find", lambda self: load_backends().by_name("torch")[0])
    monkeypatch.setitem(CHECK_KINDS, "permute", broken)
    return run_here(lambda told: None, Check.make(ONE, "permute"))


def test_whatever_a_check_raises_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cell: Any, argument: Any) -> None:
        raise AssertionError

    def raises(cell: Any, argument: Any) -> None:
        raise RuntimeError("a bug")

    def changes(cell: Any, argument: Any) -> None:
        torch.set_default_dtype(torch.float64)

    assert run_as(monkeypatch, lambda cell, argument: None) == Outcome("passed")
    for broken, message in ((fails, "an assertion without a message"), (raises, "RuntimeError: a bug")):
        assert run_as(monkeypatch, broken) == Outcome("failed", message)
    found = run_as(monkeypatch, changes)
    assert found.status == "failed"
    assert found.message.startswith("it changed torch's state for everybody (")
    assert torch.get_default_dtype() == torch.float32


def test_a_check_runs_in_one_thread_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        run_as(monkeypatch, lambda cell, argument: seen.append(torch.get_num_threads()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [2 if torch.cuda.is_available() else 1]


def test_an_import_is_on_behalf_of_who_waited_for_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with watched_imports() as watch:
        assert sys.meta_path[0] is watch
        watch.find_spec("package_x")
        exec("watch.find_spec('package_x')", {"__name__": "other", "watch": watch})
    assert watch not in sys.meta_path
    assert watch.imported_by(__name__) == set(), "it could not be imported"
    monkeypatch.setitem(sys.modules, "package_x", SimpleNamespace())
    assert watch.imported_by(__name__) == {"package_x"}
    assert watch.imported_by("other") == set()


def test_running_out_of_time_is_a_failure_and_one_print_names_its_check() -> None:
    assert [Outcome(status).is_failure for status in STATUSES] == [False, True, True, True, False]
    results = (
        Result(Check.make(ONE, "permute"), Outcome("passed", printed="hello")),
        Result(Check.make(ONE, "reload"), Outcome("skipped", NO_TIME)),
        Result(Check.make(OTHER, "permute"), Outcome("passed")),
    )
    report = Report("fake", "cpu", "", {}, 0, results, {})
    assert (report.passed, report.has_no_time) == (True, False)
    (note,) = report.notes
    assert note.startswith(f"{ONE} writes to standard output in the check permute, where")


def test_checks_come_kind_after_kind_and_cell_after_cell() -> None:
    asked = [
        Check.make(cell, kind, number) for cell in (ONE, OTHER) for kind in ("reload", "numbers") for number in (1, 2)
    ]
    found = [(check.kind, check.cell.experts, check.argument) for check in _interleaved(asked)]
    assert found == [
        (kind, experts, number)
        for kind in ("numbers", "reload")
        for number in ("1", "2")
        for experts in ("OneExperts", "OtherExperts")
    ]

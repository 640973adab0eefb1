"""The pytest plugin: checks of the kit are tests like others, and a run without the option pays nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moereg.errors import UnknownBackendError
from moereg.testing import suite
from moereg.testing.check import CellName, Check, Outcome
from tests.cli.command import printed

CELL = CellName("mine", "MineExperts", ("unquantized",), ("cpu",))
CHECKS = tuple(Check.make(CELL, kind) for kind in ("deciding", "permute", "workspaces", "reload", "compile"))
OUTCOMES = {
    "deciding": Outcome("passed"),
    "permute": Outcome("failed", "w13 was written to", output="said by the backend"),
    "workspaces": Outcome("crashed", "its process ended with signal 11"),
    "reload": Outcome("timed_out", "took longer than 5 s"),
    "compile": Outcome("skipped", "no compiler"),
}
RunPytest = Callable[..., "tuple[int, str]"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The arguments that the kit was called with; no check is run."""
    calls: list[object] = []

    def checks_of(name: str, platform: str | None = None, *, isolate: bool = True) -> tuple[Check, ...]:
        calls.append((name, platform, isolate))
        if name == "nobody":
            raise UnknownBackendError("unknown backend 'nobody' (known: mine)")
        return CHECKS

    def run_check(check: Check, isolate: bool = True, seconds: float | None = None) -> Outcome:
        calls.append((check.kind, isolate, seconds))
        return OUTCOMES[check.kind]

    monkeypatch.setattr(suite, "checks_of", checks_of)
    monkeypatch.setattr(suite, "run_check", run_check)
    return calls


@pytest.fixture
def run_pytest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, asked: list[object]
) -> RunPytest:
    """Runs pytest in this process on a project with one test: exit code and output."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --import-mode=importlib\n")
    (tmp_path / "test_own.py").write_text("def test_own():\n    assert True\n")

    def run(*options: str) -> tuple[int, str]:
        named = ("moereg.testing.pytest_plugin", "no:cacheprovider", "no:randomly")
        arguments = [*(f"-p{name}" for name in named), "-rA", *options, str(tmp_path)]
        code = pytest.main([*arguments, f"--rootdir={tmp_path}", "-c", str(tmp_path / "pytest.ini")])
        return int(code), capsys.readouterr().out

    return run


def test_checks_are_tests_with_their_outcomes(run_pytest: RunPytest, asked: list[object]) -> None:
    code, out = run_pytest("--moereg-backend", "mine")
    assert code == 1
    assert "collected 6 items" in out
    assert "3 failed, 2 passed, 1 skipped" in out
    assert "PASSED test_own.py::test_own" in out
    assert "PASSED moereg:mine::deciding/MineExperts/cpu/unquantized" in out
    for text in (
        "failed: w13 was written to",
        "said by the backend",
        "crashed: its process ended with signal 11",
        "timed out: took longer than 5 s",
        "again: moereg verify mine --check 'permute/MineExperts/cpu/unquantized'",
    ):
        assert text in out
    assert "no compiler" in out
    assert "Traceback" not in out
    assert asked == [("mine", None, True), *((check.kind, True, None) for check in CHECKS)]


def test_options_reach_the_kit_and_markers_choose(run_pytest: RunPytest, asked: list[object]) -> None:
    options = ("--moereg-platform", "cpu", "--moereg-seconds", "2.5", "--moereg-no-isolate")
    code, out = run_pytest("--moereg-backend", "mine", *options, "-m", "moereg_kit", "-k", "deciding")
    assert (code, asked) == (0, [("mine", "cpu", False), ("deciding", False, 2.5)])
    assert "1 passed, 5 deselected" in out


def test_several_backends_and_none(run_pytest: RunPytest, asked: list[object]) -> None:
    out = run_pytest("--moereg-backend", "mine", "--moereg-backend", "other", "--collect-only", "-q")[1]
    assert "moereg:mine::deciding" in out
    assert "moereg:other::deciding" in out
    assert asked == [("mine", None, True), ("other", None, True)]
    asked.clear()
    assert run_pytest()[0] == 0
    assert asked == []


def test_a_backend_that_is_not_there_is_one_line_of_an_error(run_pytest: RunPytest) -> None:
    code, out = run_pytest("--moereg-backend", "nobody")
    assert code == pytest.ExitCode.INTERRUPTED
    assert "\n--moereg-backend nobody: unknown backend 'nobody' (known: mine)\n" in out
    assert "Traceback" not in out


def test_it_costs_nothing_when_it_is_not_used() -> None:
    # pytest imports plugins in every project, so this one must import neither torch nor anything else of moereg.
    script = (
        "import sys, pytest; before = set(sys.modules); import moereg.testing.pytest_plugin; "
        "print(sorted(name for name in set(sys.modules) - before if name not in sys.stdlib_module_names))"
    )
    loaded = {name.strip("' ") for name in printed("-c", script).strip().strip("[]").split(",")}
    assert "moereg.testing.pytest_plugin" in loaded
    assert loaded <= {"moereg", "moereg._version", "moereg.testing", "moereg.testing.pytest_plugin"}

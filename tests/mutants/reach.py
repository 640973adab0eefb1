"""Which tests reach which lines, from a run of the tests under coverage.py with one context per test: `make reach`.

As a plugin of that run (`-p tests.mutants.reach`) it also stores how long each test took and a digest of each module.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
from pathlib import Path
from typing import Final

import pytest

from tests.mutants.mutant import ROOT, Mutant

FOLDER: Final = ROOT / ".reach"
PACKAGES: Final = ("moereg", "plugins/vllm-moereg/src")
_COVERAGE: Final = FOLDER / "coverage"
_RUN: Final = FOLDER / "run.json"

_SECONDS_PER_FILE: Final = 1.0
"""What it takes to collect a file of tests."""

_SECONDS: collections.Counter[str] = collections.Counter()
_NOT_PASSED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _SECONDS[report.nodeid] += report.duration
    if not report.passed:
        _NOT_PASSED.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        texts = {path: _digest(ROOT / path) for path in modules()}
        # A test that fails without a fault catches none.
        seconds = {test: spent for test, spent in _SECONDS.items() if test not in _NOT_PASSED}
        _RUN.write_text(json.dumps({"seconds": seconds, "texts": texts}), encoding="utf-8")


def modules() -> list[str]:
    """The modules of the packages that faults are planted in, relative to the root of the tree."""
    found = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [str(path.relative_to(ROOT)) for path in found]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Reach:
    """The stored run.

    Attributes:
        changed: Modules that are not as they were in the run.
    """

    def __init__(self) -> None:
        """Reads the run.

        Raises:
            FileNotFoundError: if there was none.
        """
        from coverage import CoverageData

        run = json.loads(_RUN.read_text(encoding="utf-8"))
        self._seconds: dict[str, float] = run["seconds"]
        self.changed = [path for path in modules() if run["texts"].get(path) != _digest(ROOT / path)]
        self._data = CoverageData(str(_COVERAGE))
        self._data.read()
        self._by_module: dict[str, dict[int, list[str]]] = {}

    def tests_of(self, mutant: Mutant, seconds: float) -> tuple[str, ...]:
        """Tests that reach a mutant's line, nearest first: those most of whose lines are in its module.

        Args:
            mutant: The mutant.
            seconds: How long they may take together.
        """
        reaching = self._tests_by_line(mutant.file).get(mutant.line, [])
        # What runs when a module is imported belongs to no test: any that reach the module may see it.
        in_module = self._lines_of(mutant.file)
        tests = [test for test in reaching or in_module if test in self._seconds]
        share = {test: in_module[test] / self._lines_by_test[test] for test in tests}
        by_file: dict[str, list[str]] = collections.defaultdict(list)
        for test in sorted(tests, key=lambda test: (-share[test], self._seconds[test])):
            by_file[test.partition("::")[0]].append(test)
        chosen: list[str] = []
        for file in by_file.values():
            seconds -= _SECONDS_PER_FILE
            for test in file:
                if (needed := self._seconds[test]) <= seconds:
                    seconds -= needed
                    chosen.append(test)
        return tuple(chosen)

    def is_reached(self, mutant: Mutant) -> bool:
        """Whether a test, or the import of its module, runs a mutant's line."""
        lines: list[int] = self._data.lines(str(ROOT / mutant.file)) or []
        return mutant.line in lines

    def _tests_by_line(self, path: str) -> dict[int, list[str]]:
        if path not in self._by_module:
            found = self._data.contexts_by_lineno(str(ROOT / path)).items()
            tests = {line: sorted({_test(context) for context in contexts if context}) for line, contexts in found}
            self._by_module[path] = tests
        return self._by_module[path]

    def _lines_of(self, path: str) -> collections.Counter[str]:
        return collections.Counter(test for tests in self._tests_by_line(path).values() for test in tests)

    @functools.cached_property
    def _lines_by_test(self) -> collections.Counter[str]:
        return sum((self._lines_of(path) for path in modules()), collections.Counter())


def _test(context: str) -> str:
    """Contexts end with `|setup`, `|run` or `|teardown`."""
    return context.rpartition("|")[0]

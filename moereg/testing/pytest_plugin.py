"""The pytest plugin: `pytest --moereg-backend NAME` runs the conformance kit along with a project's own tests.

pytest loads it wherever moereg is installed, so it imports no other moereg module until the option is given.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from moereg.testing.suite import Check, Outcome

__all__ = ["CheckItem", "KitCollector"]

_MARKER = "moereg_kit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options that begin with `--moereg`."""
    group = parser.getgroup("moereg", "conformance of Mixture-of-Experts backends")
    group.addoption(
        "--moereg-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="run moereg's conformance kit on this backend too; may be repeated; -m moereg_kit runs nothing else",
    )
    group.addoption(
        "--moereg-platform", metavar="PLATFORM", help="run the kit as this platform; as this machine where left out"
    )
    group.addoption(
        "--moereg-seconds",
        type=float,
        metavar="S",
        help="time that each check of the kit gets; 120 s, and 300 s beside a GPU, where left out",
    )
    group.addoption(
        "--moereg-no-isolate",
        action="store_true",
        help="run the kit in this process, for a debugger; a crash of the backend ends pytest then",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker of the kit's checks."""
    config.addinivalue_line("markers", f"{_MARKER}: a check of moereg's conformance kit, out of --moereg-backend")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Adds the checks of each requested backend after the project's tests."""
    report = yield
    if isinstance(collector, pytest.Session) and report.result is not None:
        names = dict.fromkeys(collector.config.getoption("--moereg-backend"))
        kits = [KitCollector.from_parent(collector, name=name, nodeid=f"moereg:{name}") for name in names]
        report.result = [*report.result, *kits]
    return report


class KitCollector(pytest.Collector):
    """The checks of one backend."""

    def collect(self) -> Iterable[CheckItem]:
        """Yields an item per check that can run on this machine.

        Raises:
            CollectError: The backend or the platform is unknown, or a plugin did not load.
        """
        from moereg.errors import MoeregError
        from moereg.testing.suite import checks_of

        try:
            options = self.config.option
            found = checks_of(self.name, options.moereg_platform, isolate=not options.moereg_no_isolate)
        except MoeregError as error:
            raise self.CollectError(f"--moereg-backend {self.name}: {error}") from error
        return [CheckItem.from_parent(self, name=check.id, check=check) for check in found]


class CheckItem(pytest.Item):
    """One check of the kit."""

    def __init__(self, *, check: Check, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.check = check
        self.add_marker(_MARKER)

    def runtest(self) -> None:
        """Runs the check in a worker process, where a crash or a hang is a failure."""
        from moereg.testing.suite import run_check

        options = self.config.option
        outcome = run_check(self.check, not options.moereg_no_isolate, options.moereg_seconds)
        if outcome.status == "skipped":
            pytest.skip(outcome.message)
        if outcome.status != "passed":
            raise _FailedCheckError(outcome)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The outcome's message, and the command that reruns the check."""
        if not isinstance(excinfo.value, _FailedCheckError):
            return super().repr_failure(excinfo, style)
        outcome = excinfo.value.outcome
        lines = [f"{outcome.status.replace('_', ' ')}: {outcome.message}"]
        if outcome.output:
            lines += ["output:", outcome.output]
        platform = f" --platform {self.check.platform}" if self.check.platform else ""
        again = f"again: moereg verify {self.check.cell.backend}{platform} --check '{outcome.layer or self.check.id}'"
        return "\n".join([*lines, again])

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """The heading of a failure."""
        return self.path, None, self.nodeid


class _FailedCheckError(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome

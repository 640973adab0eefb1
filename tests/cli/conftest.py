"""Fixtures that call the command line in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moereg import cli
from tests.cli.command import Call, strict_json


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command line in this process: exit code, standard output, standard error."""

    def run(line: str) -> tuple[int, str, str]:
        code = cli.main(line.split())
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def call_json(call: Call) -> Callable[[str], tuple[int, dict[str, Any]]]:
    """As `call` with `--json`; standard output must be one object and nothing else."""

    def run(line: str) -> tuple[int, dict[str, Any]]:
        code, out, _ = call(f"{line} --json")
        return code, strict_json(out)

    return run

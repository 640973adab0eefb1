"""The page for authors of backends: every command on it runs, in a new environment, as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console_blocks import ROOT, Environment, commands_of

PAGE = ROOT / "docs" / "backend-authors.md"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_command_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    commands = commands_of(PAGE)
    assert len(commands) > 10
    environment = Environment(tmp_path / "environment")
    folder = tmp_path / "work"
    folder.mkdir()
    for command in commands:
        print(f"$ {command.line}")
        print(environment.run(command, folder))

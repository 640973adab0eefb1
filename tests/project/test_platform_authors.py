"""The page for authors of platforms: every file, program and command on it, in order, in a new environment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.console_blocks import ROOT, Environment, commands_in

PAGE = ROOT / "docs" / "platform-authors.md"
_BLOCK = re.compile(r"(?:^\*\*([^*\n]+)\*\*\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_block_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    folder = tmp_path / "work"
    folder.mkdir()
    blocks = _BLOCK.findall(PAGE.read_text())
    assert len(blocks) == PAGE.read_text().count("\n```") / 2
    for name, language, text in blocks:
        if name:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        assert language == "console", f"a block of {language} needs the name of its file above it"
        for command in commands_in(text):
            print(f"$ {command.line}")
            print(environment.run(command, folder))

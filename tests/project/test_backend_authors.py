"""The page for authors of backends: every command on it runs, in a new environment, as it is written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from tests.support.console_blocks import ROOT, Environment, commands_of

PAGE = ROOT / "docs" / "backend-authors.md"


def test_the_predicate_on_the_page_gives_the_reason_that_it_says() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    predicate = names["unsupported_reasons"].__func__
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64}
    assert predicate(None, MoEProblem(**sizes, intermediate_size=256), Platform("cpu")) == []
    (reason,) = predicate(None, MoEProblem(**sizes, intermediate_size=320), Platform("cpu"))
    assert reason == "requires intermediate_size <= 4 * hidden_size, got 5.0 times it"


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

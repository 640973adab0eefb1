"""The pages for authors of backends and platforms: every file, program and command, in order, in a new environment."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from tests.support.console_blocks import ROOT, Environment, commands_in

_BLOCK = re.compile(r"(?:^\*\*([^*\n]+)\*\*\n\n)?^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_predicate_on_the_page_gives_the_reason_that_it_says() -> None:
    ((_, _, block),) = [found for found in blocks_of("backend-authors.md") if found[1] == "python" and not found[0]]
    names: dict[str, Any] = {}
    exec(block, names)
    predicate = names["unsupported_reasons"].__func__
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 64}
    assert predicate(None, MoEProblem(**sizes, intermediate_size=256), Platform("cpu")) == []
    (reason,) = predicate(None, MoEProblem(**sizes, intermediate_size=320), Platform("cpu"))
    assert reason == "requires intermediate_size <= 4 * hidden_size, got 5.0 times it"


def blocks_of(page: str) -> list[tuple[str, str, str]]:
    """File or nothing, language and text of each."""
    text = (ROOT / "docs" / page).read_text()
    found = _BLOCK.findall(text)
    assert len(found) == text.count("\n```") / 2
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("page", "shown"),
    [("backend-authors.md", ["python", "text"]), ("platform-authors.md", [])],
    ids=["backends", "platforms"],
)
def test_every_block_of_the_page_does_what_it_says(page: str, shown: list[str], tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    folder = tmp_path / "work"
    folder.mkdir()
    for name, language, text in blocks_of(page):
        if name:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            continue
        assert language in ("console", *shown), f"a block of {language} needs the name of its file above it"
        for command in commands_in(text):
            print(f"$ {command.line}")
            print(environment.run(command, folder))
